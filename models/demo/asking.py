"""Held-out samples, and what a server answers to them: over HTTP, with the ``openai`` client.

The sample of a task, a split and a number is always the same one, whoever asks for it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import openai

from benchmarks import servers
from models.demo.files import File, file_of
from models.demo.recipe.sample import Maker, Sample, Split, Turn
from triptych.checkpoint import packaged_folder

CHECKPOINT = packaged_folder("triptych-demo")
AT_ONCE = 8
MAX_TOKENS = 40
SECONDS = 120.0  # for one answer
TELL_SECONDS = 2.0
TELL_SHARE = 0.02  # of the time so far


@dataclass(frozen=True)
class Before:
    """An earlier turn of the conversation, and its true answer."""

    question: str
    answer: str
    files: tuple[File, ...] = ()


@dataclass(frozen=True)
class Question:
    """One request: what is sent, and what decides whether the answer to its last turn is right."""

    task: str
    number: int
    turn: Turn
    files: tuple[File, ...] = ()
    system: str = ""
    before: tuple[Before, ...] = ()  # turns of the same conversation

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Media first, then the words, as in training."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for one in self.before:
            messages.append(_user(one.question, one.files))
            messages.append({"role": "assistant", "content": one.answer})
        return [*messages, _user(self.turn.question, self.files)]

    @property
    def every_file(self) -> tuple[File, ...]:
        """In the order in which they are sent."""
        return (*(file for one in self.before for file in one.files), *self.files)

    def without_media(self) -> Question:
        return replace(self, files=(), before=())


def _user(question: str, files: Sequence[File]) -> dict[str, Any]:
    text = {"type": "text", "text": question}
    content = [*(file.part for file in files), text] if files else question
    return {"role": "user", "content": content}


@dataclass(frozen=True)
class Answer:
    text: str
    ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of ids


def seed(task: str, number: int) -> str:
    """Of a sample. The same for known and for new wordings."""
    return f"{task}:{number}"


def draw(task: str, maker: Maker, split: Split, number: int) -> Sample:
    sample = maker(random.Random(seed(task, number)), split, 1)
    once = len(sample.turns) == 1 or sample.sent
    assert once, f"{task} was to ask once, and asks {len(sample.turns)} times"
    return sample


def question(task: str, number: int, sample: Sample) -> Question:
    def files(turn: int) -> tuple[File, ...]:
        return tuple(file_of(sample.media[at], number) for at in sample.sent_with(turn))

    *earlier, last = sample.turns
    before = tuple(Before(turn.question, turn.answer, files(at)) for at, turn in enumerate(earlier))
    return Question(task, number, last, files(len(earlier)), sample.system, before)


def questions(task: str, maker: Maker, split: Split, numbers: Sequence[int]) -> list[Question]:
    return [question(task, number, draw(task, maker, split, number)) for number in numbers]


@contextmanager
def serving(checkpoint: Path, pattern: str, *flags: str) -> Iterator[str]:
    """The URL of a Triptych of our own."""
    given = (str(checkpoint), "--pattern", pattern, "--enable-multimodal", *flags)
    with servers.triptych(*given) as server:
        yield f"http://127.0.0.1:{server.port}"


async def ask_all(
    url: str,
    asked: Sequence[Question],
    at_once: int = AT_ONCE,
    tell: Callable[[int], None] = lambda done: None,
) -> list[Answer]:
    """Answers in the order of the questions. ``tell`` hears how many there are so far."""
    done, turn = 0, asyncio.Semaphore(at_once)
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=SECONDS
    ) as client:
        model = (await client.models.list()).data[0].id

        async def ask(one: Question) -> Answer:
            nonlocal done
            async with turn:
                answer = await _ask(client, model, one)
            done += 1
            tell(done)
            return answer

        return list(await asyncio.gather(*map(ask, asked)))


async def _ask(client: openai.AsyncOpenAI, model: str, one: Question) -> Answer:
    got: Any = await client.chat.completions.create(
        model=model,
        messages=one.messages,  # type: ignore[arg-type]
        max_tokens=MAX_TOKENS,
        temperature=0,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    [choice] = got.choices
    return Answer(
        choice.message.content or "",
        tuple(choice.token_ids),
        tuple(got.prompt_token_ids),
        tuple(token.logprob for token in choice.logprobs.content),
    )


class Progress:
    """Lines: what is asked, how much of all is done, how long it may take. Ever fewer of them."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._start = self._told = time.monotonic()

    @contextmanager
    def over(self, what: str, count: int) -> Iterator[Callable[[int], None]]:
        """For a part of the work: a function to be told how much of it is done."""

        def tell(done: int) -> None:
            now = time.monotonic()
            if now - self._told < max(TELL_SECONDS, TELL_SHARE * (now - self._start)):
                return
            self._told = now
            share = (self._done + done) / self._total
            left = (now - self._start) * (1 / share - 1) / 60
            print(
                f"  {what}  {done}/{count}  ({share:.1%} of all, {left:.0f} min left)", flush=True
            )

        yield tell
        self._done += count
