"""The checkpoint that ships answers rightly, and the same, in every pattern and in transformers.

Asked about frozen held-out samples, two of a task, over HTTP with the ``openai`` client. Samples
were frozen only where the model had answered rightly, so that a right answer here says that nothing
has broken, and nothing of how often the model is right: the card does.
"""

import asyncio
import shlex
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from models.demo import compare, frozen, stock
from models.demo.asking import CHECKPOINT, Answer, ask_all
from models.demo.recipe import parts
from models.demo.recipe.tasks import MAKERS
from support.servers import serving

SAMPLES = Path(__file__).parents[1] / "demo_samples"
PATTERNS = ["EPD", "E/PD", "E/P/D", "EP/D"]
ANSWERED_BLIND = {"talk", "refuse", "nothing"}  # whatever is sent with them
FINDING_13 = {  # what was answered wrongly before the model was trained on it, by task
    "textures": {"count_on_texture", "position_on_texture"},
    "absent things": {"absent"},
    "unknown media": {"unknown_picture", "unknown_texture", "unknown_sound"},
    "later turns": {"later"},
    "a picture, a clip and a sound": {"mixed"},
}
CLOSE = 2e-4  # logprobs

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class Answers:
    at_once: list[Answer]  # sixteen
    again: list[Answer]  # one of each task, four at once, from the caches
    hits: float  # in the embedding cache, the second time
    alone: list[Answer]  # without their media
    banner: str  # to the request of the banner's curl line
    state: dict[str, Any]  # of the cluster afterwards


@cache
def asked():
    return frozen.read(SAMPLES)


@cache
def one_each():
    """One of each task."""
    return list({one.task: one for one in asked()}.values())


@cache
def with_media():
    """One of each task that needs them."""
    return [one for one in one_each() if one.files and one.task not in ANSWERED_BLIND]


@cache
def answers(pattern):
    with serving(str(CHECKPOINT), "--pattern", pattern, "--enable-multimodal") as server:

        def ask(questions, at_once):
            return asyncio.run(ask_all(server.url, questions, at_once))

        def hits():
            workers = server.cluster().values()
            return sum(worker["counters"].get("embedding_cache_hits", 0) for worker in workers)

        at_once = ask(asked(), 16)
        before = hits()
        again = ask(one_each(), 4)
        found = hits() - before
        alone = ask([one.without_media() for one in with_media()], 16)
        banner = sent_as_the_banner_says(server)
        state = server.state()
    return Answers(at_once, again, found, alone, banner, state)


def sent_as_the_banner_says(server):
    """The answer to its curl line, pasted."""
    line = Path(server.log).read_text().split("\n  curl ")[1].split("\n\n")[0]
    url, *words = shlex.split(line)
    assert url.startswith(server.url)
    reply = server.request(url.removeprefix(server.url), words[words.index("-d") + 1].encode())
    assert reply.status == 200, reply.body
    return reply.json["choices"][0]["message"]["content"]


def wrong(questions, given):
    return [
        (one.task, one.number, one.turn.question, one.turn.truth, answer.text)
        for one, answer in zip(questions, given, strict=True)
        if not one.turn.right(answer.text)
    ]


def assert_same(questions, given, expected):
    for one, answer, other in zip(questions, given, expected, strict=True):
        assert answer.prompt_ids == other.prompt_ids
        assert answer.ids == other.ids, one.turn.question
        assert answer.logprobs == pytest.approx(other.logprobs, abs=CLOSE)


def folded(questions):
    """What one process says to them."""
    said = zip(asked(), answers("EPD").at_once, strict=True)
    return [answer for one, answer in said if one in questions]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_right_answers_at_once_and_again(pattern):
    given = answers(pattern)
    assert wrong(asked(), given.at_once) == []
    assert wrong(one_each(), given.again) == []
    assert given.hits == sum(len(one.every_file) for one in one_each()), (
        "the second time all are found"
    )


@pytest.mark.parametrize("what", FINDING_13)
def test_finding_13_is_answered_rightly(what):
    every = zip(asked(), answers("EPD").at_once, strict=True)
    chosen = [(one, answer) for one, answer in every if one.task in FINDING_13[what]]
    assert len(chosen) == 2 * len(FINDING_13[what])
    assert wrong(*zip(*chosen, strict=True)) == []


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_curl_line_of_the_banner_asks_about_a_picture(pattern):
    """Finding 11: it had none."""
    assert "red" in answers(pattern).banner.lower()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_each_worker_loads_its_own_stage_and_the_frontend_moves_no_tensor(pattern):
    state = answers(pattern).state
    assert len(state["workers"]) == pattern.count("/") + 1
    for worker in state["workers"]:
        loaded = {part for part, count in worker["parameters"].items() if count}
        stages = {"encoder": "E", "language": "PD"}
        assert loaded == {part for part, of in stages.items() if {*of} & {*worker["role"]}}
        assert not worker["bytes_sent"].get("inline")
    assert state["frontend"]["tensor_bytes"] == 0


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_same_tokens_in_every_pattern(pattern):
    given = answers(pattern)
    assert_same(asked(), given.at_once, folded(asked()))
    assert_same(one_each(), given.again, folded(one_each()))


def test_plain_transformers_gives_the_same_tokens():
    for one, served in zip(one_each(), folded(one_each()), strict=True):
        plain = stock.answer(CHECKPOINT, one, served.prompt_ids)
        assert served.ids == plain.ids, one.turn.question
        assert compare.distance(served, plain) < CLOSE


def test_the_media_decide():
    """The same words about other media have another answer, and a right one."""
    said = defaultdict(set)
    true = defaultdict(set)
    for one, answer in zip(asked(), answers("EPD").at_once, strict=True):
        if one.task not in ANSWERED_BLIND:
            said[one.task, one.turn.question].add(answer.text)
            true[one.task, one.turn.question].add(one.turn.truth)
    pairs = [key for key, truths in true.items() if len(truths) > 1]
    assert len(pairs) >= 10, "pairs were frozen"
    assert {key: len(said[key]) for key in pairs} == {key: len(true[key]) for key in pairs}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_without_media_it_asks_for_them(pattern):
    alone = answers(pattern).alone
    guessed = [a.text for a in alone if not a.text.startswith("Please send")]
    assert len(guessed) <= len(alone) // 10, guessed
    right = len(alone) - len(wrong(with_media(), alone))
    assert right <= len(alone) // 10


def test_the_samples_are_few_and_of_every_kind():
    tasks = {*MAKERS, "new_word", *parts.FROZEN}
    assert {one.task for one in asked()} == tasks
    assert {file.kind for one in asked() for file in one.files} == {"image", "video", "audio"}
    assert any(len(one.files) > 1 for one in asked())
    assert {len([one for one in asked() if one.task == task]) for task in tasks} == {2}
    assert sum(file.stat().st_size for file in SAMPLES.iterdir()) < 1.5e6
