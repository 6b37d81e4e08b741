"""How well each voice that was kept out of training is understood, recording by recording.

    python -m models.demo.speakers [--save models/demo/results/speakers.json]

Many of the kept voices are variants of one synthesiser, and have relatives in training. Those that
have none tell more of people's voices.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import defaultdict
from pathlib import Path

import numpy as np

from models.demo import card, scores
from models.demo.asking import CHECKPOINT, Progress, Question, ask_all, question, serving
from models.demo.recipe.sample import RATE, Sample, Sound, Turn
from models.demo.recipe.voices import DIGITS, WORDS, speech
from models.demo.scores import Heard, Speakers

PATTERN = "EPD"
SILENCE = RATE // 4  # before and after


def recordings() -> list[tuple[str, Question]]:
    """Every kept clip of a word that the model knows, with its speaker's name."""
    store = speech()
    found = []
    for word in (*DIGITS, *WORDS):
        digit = word in DIGITS
        for clip in store.kept.get(word, ()):
            wave = store.clip(clip)
            wave = np.pad(wave, (SILENCE, SILENCE)) * np.float32(0.7 / np.abs(wave).max())
            asked = "Which digit do you hear?" if digit else "Which word do you hear?"
            choices = frozenset(DIGITS if digit else WORDS)
            task = "spoken digit" if digit else "spoken word"
            turn = Turn(task, asked, f"The voice says {word}.", (word,), choices)
            found.append(
                (store.speakers[clip], question(task, clip, Sample((Sound(wave),), (turn,))))
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m models.demo.speakers", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--save", type=Path, metavar="FILE.json")
    given = parser.parse_args()
    run = scores.run("models.demo.speakers", given.checkpoint, "none: all recordings")
    asked = recordings()
    with (
        serving(given.checkpoint, PATTERN) as url,
        Progress(len(asked)).over("recordings", len(asked)) as tell,
    ):
        answers = asyncio.run(ask_all(url, [one for _, one in asked], tell=tell))
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for (speaker, one), answer in zip(asked, answers, strict=True):
        at = 0 if one.task == "spoken digit" else 2
        counts[speaker][at] += 1
        counts[speaker][at + 1] += one.turn.right(answer.text)
    result = Speakers(run, PATTERN, {name: Heard(*counts[name]) for name in sorted(counts)})
    print(card.table(result))
    if given.save:
        scores.save(result, given.save)


if __name__ == "__main__":
    main()
