"""``python -m models.demo.card``: puts what was found into the model card, between its markers.

What stands between markers comes from a file under ``results/``, from the checkpoint itself, or
from the data folder's own list of sources where there is one. Everything else on the page, and so
all that is said of the training, is written by hand.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from models.demo import scores
from models.demo.asking import CHECKPOINT
from models.demo.scores import (
    Agreement,
    Code,
    Comparison,
    Control,
    Controls,
    Evaluation,
    Result,
    Run,
    Speakers,
    Tally,
)

FOLDER = Path(__file__).parent
CARD = FOLDER / "README.md"
RESULTS = FOLDER / "results"
SOURCES = FOLDER / "data" / "SOURCES.json"
PARTS = {  # of the network, by the names of its weights
    "thinker.visual.": "vision tower",
    "thinker.audio_tower.": "audio tower",
    "thinker.model.embed_tokens.": "token embeddings (in and out)",
    "thinker.model.": "language model",
}
BRIEF = 40  # letters of an answer in a table


def table(result: Result) -> str:
    match result:
        case Evaluation():
            return _accuracy(result)
        case Controls():
            return _controls(result)
        case Comparison():
            return _comparison(result)
        case Agreement():
            return _agreement(result)
        case Speakers():
            return _speakers(result)


def write(
    page: Path = CARD,
    results: Path = RESULTS,
    checkpoint: Path = CHECKPOINT,
    sources: Path = SOURCES,
) -> None:
    text = page.read_text()
    for file in sorted(results.glob("*.json")):
        text = put(text, file.stem, _page_part(file))
    if (checkpoint / "model.safetensors").is_file():
        text = put(text, "size", size(checkpoint))
    if sources.is_file():
        text = put(text, "sources", credits(sources))
    page.write_text(text)


def _page_part(file: Path) -> str:
    result = scores.load(file)
    match file.stem, result:
        case "backgrounds", Evaluation():
            return grounds(result)
        case "patterns", Evaluation():
            return patterns(result)
        case "parts", Evaluation():
            return parts(result)
    return table(result)


def grounds(result: Evaluation) -> str:
    """Accuracy by kind of background."""
    kinds = list(next(iter(result.tasks.values())))
    rows = [
        [task, *(_found(tallies[kind]) for kind in kinds)] for task, tallies in result.tasks.items()
    ]
    said = (
        "Held-out samples in learned wordings, all on backgrounds of one kind: `plain` is one "
        "tone, `pattern` a pattern of two, `texture` noise, a mosaic or a photograph. Pattern EPD."
    )
    return "\n".join([_about(result.run), "", said, "", *_grid(("task", *kinds), rows)])


def parts(result: Evaluation) -> str:
    """Parts of tasks."""
    rows = [
        [part, _found(splits["test"]), "; ".join(_mistakes(splits["test"]))]
        for part, splits in result.tasks.items()
    ]
    names = ("part of a task", "learned wordings", "mistakes")
    return "\n".join([_about(result.run), "", *_grid(names, rows)])


def patterns(result: Evaluation) -> str:
    """Whether all patterns give the same tokens."""
    tallies = [tally for splits in result.tasks.values() for tally in splits.values()]
    asked, differing = sum(t.count for t in tallies), sum(t.differing for t in tallies)
    said = (
        f"{asked - differing} of {asked} held-out requests over {len(result.tasks)} tasks gave the "
        f"same tokens in {', '.join(tallies[0].right)}."
    )
    return "\n".join([_about(result.run), "", said])


def size(checkpoint: Path) -> str:
    """Parameters by part, and bytes."""
    with (checkpoint / "model.safetensors").open("rb") as file:
        head = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    found: Counter[str] = Counter()
    for name, weight in head.items():
        if name != "__metadata__":
            part = next(part for start, part in PARTS.items() if name.startswith(start))
            found[part] += math.prod(weight["shape"])
    rows = [[part, f"{found[part]:,}"] for part in PARTS.values()]
    rows.append(["all", f"{found.total():,}"])
    bytes_ = sum(file.stat().st_size for file in checkpoint.iterdir())
    said = f"The folder has {bytes_ / 1e6:.1f} MB in all."
    return "\n".join([*_grid(("part", "parameters"), rows), "", said])


def credits(sources: Path) -> str:
    """Packages that data were taken from, by file and licence."""
    rows = []
    for file, packages in json.loads(sources.read_text()).items():
        by_licence = defaultdict(list)
        for package in packages:
            by_licence[package["licence"]].append(f"{package['package']} {package['version']}")
        rows += [[file, licence, ", ".join(names)] for licence, names in by_licence.items()]
    return "\n".join(_grid(("file", "licence", "packages"), rows))


def put(text: str, name: str, made: str) -> str:
    """The text with what was made between the markers of that name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise SystemExit(f"the page has no place for {name}: it needs {begin} and {end}")
    return f"{before}{begin}\n\n{made}\n\n{end}{after}"


def _accuracy(result: Evaluation) -> str:
    rows = []
    for task, splits in result.tasks.items():
        aim = result.aims.get(task)
        known, new = splits.get("test"), splits.get("new")
        both = [one for one in (known, new) if one is not None]
        met = "" if aim is None or known is None else "yes" if known.accuracy >= aim else "**no**"
        rows.append(
            [
                task,
                "" if aim is None else f"{aim:.0%}",
                _found(known),
                met,
                _word_for_word(known),
                _found(new),
                _word_for_word(new),
                str(sum(one.differing for one in both)),
                "; ".join(_mistakes(both[0])),
            ]
        )
    names = (
        "task",
        "aim",
        "learned wordings",
        "aim met (learned wordings)",
        "word for word",
        "new wordings",
        "word for word",
        "differing",
        "mistakes",
    )
    patterns = next(iter(next(iter(result.tasks.values())).values())).right
    said = (
        f"Accuracy over HTTP on held-out data, the lowest of {', '.join(patterns)}. An answer is "
        "right if the words that decide are the true ones, and counts as `word for word` if it is "
        "the true sentence, letter for letter. Aims are held against learned wordings; new ones "
        "have none. `differing`: samples whose tokens are not the same in all patterns. "
        "`mistakes`: the most common ones in learned wordings, truth → answer. Half of the words "
        "of `word` are new to the model, and all of `new word`; the fonts of both are."
    )
    return "\n".join([_about(result.run), "", said, "", *_grid(names, rows)])


def _found(tally: Tally | None) -> str:
    return "" if tally is None else f"{tally.accuracy:.1%} of {tally.count}"


def _word_for_word(tally: Tally | None) -> str:
    return "" if tally is None else f"{tally.word_for_word:.1%}"


def _mistakes(tally: Tally) -> list[str]:
    return [f"{one.truth} → {_brief(one.told)} ({one.count})" for one in tally.mistakes]


def _brief(said: str) -> str:
    """Fit for a cell, whatever the model said."""
    line = " ".join(said.split()).replace("|", "/")
    return line if len(line) <= BRIEF else f"{line[:BRIEF]}..."


def _controls(result: Controls) -> str:
    names = (
        "task",
        "chance",
        "with its media",
        "noise",
        "names a choice",
        "changed",
        "no media",
        "changed",
        "asks for it",
        "pairs",
        "changed",
        "both right",
    )
    rows = [[task, *_control(one)] for task, one in result.tasks.items()]
    said = (
        "`chance`: always the most frequent truth. `noise`: accuracy with noise in the media's "
        "place; `names a choice`: of these answers, right or wrong, those that name something to "
        "choose from at all. `no media`: with the question alone. `changed`: answers that are not "
        "those given to the media themselves. `asks for it`: asks for a picture, a clip or a "
        "sound, which the `nothing` task teaches: a learned refusal, so that `no media` proves "
        "little, and `noise` and `pairs` carry the claim that it looks and listens. "
        "`pairs`: the same question, word for word, about two media with "
        f"different true answers. Pattern {result.pattern}."
    )
    return "\n".join([_about(result.run), "", said, "", *_grid(names, rows)])


def _control(one: Control) -> list[str]:
    return [
        f"{one.chance:.1%}",
        _share(one.right, one.count),
        _share(one.noise_right, one.count),
        _share(one.noise_told, one.count),
        _share(one.noise_changed, one.count),
        _share(one.removed_right, one.count),
        _share(one.removed_changed, one.count),
        _share(one.removed_asks, one.count),
        str(one.pairs),
        _share(one.pairs_changed, one.pairs),
        _share(one.pairs_right, one.pairs),
    ]


def _comparison(result: Comparison) -> str:
    said = (
        f"{result.equal} of {result.count} requests over {len(result.tasks)} tasks gave the same "
        f"tokens in plain transformers (float32, greedy) and in Triptych ({result.pattern}, over "
        f"HTTP); the logprobs of a token differed by {result.logprob_difference:.1e} at most."
    )
    return "\n".join([_about(result.run), "", said])


def _agreement(result: Agreement) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    drawn, samples = result.drawn, result.samples
    said = (
        f"{drawn.equal} of {drawn.count} held-out requests over all tasks and {samples.equal} of "
        f"{samples.count} frozen samples gave the same prompts and tokens in vLLM ({versions}; "
        "float32, on a CPU) and in Triptych; the logprobs of a token differed by "
        f"{result.logprob_difference:.0e} at most."
    )
    return "\n".join([_about(result.run), "", said])


def _speakers(result: Speakers) -> str:
    rows = [
        [
            voice,
            _share(one.digits_right, one.digits),
            str(one.digits),
            _share(one.words_right, one.words),
            str(one.words),
        ]
        for voice, one in result.voices.items()
    ]
    said = (
        "Every recording of the voices that training never heard, as it is, with silence around "
        f"it. Pattern {result.pattern}."
    )
    names = ("voice", "digits", "of", "words", "of")
    return "\n".join([_about(result.run), "", said, "", *_grid(names, rows)])


def _about(run: Run) -> str:
    host = run.machine
    kept = f" (some answers at {', '.join(map(_code, run.kept))})" if run.kept else ""
    return (
        f"`{run.command}`, {run.date[:10]}, commit {_code(run.code)}{kept}, checkpoint "
        f"`{run.checkpoint[:10]}`, {host['cores']} cores of {host['cpu']}."
    )


def _code(code: Code) -> str:
    files = "file" if code.changed_files == 1 else "files"
    changed = f" with {code.changed_files} changed {files}" if code.changed_files else ""
    return f"`{code.commit[:10]}`{changed}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _grid(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [names, ["---"] * len(names), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


if __name__ == "__main__":
    write()
