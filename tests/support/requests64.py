"""Sixty-four requests that try everything at once, and what plain transformers answers to them."""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import aiohttp
from PIL import Image

import reference
from support.servers import image_part, text_part

COUNT = 64
TOKENS = 20
SIZES = [(28, 28), (56, 84), (120, 40), (200, 150), (97, 211), (320, 240)]
WORDS = """
panel hinge gold colour saint river angel why how many which left right above small blue red
count tell describe compare between them shadow light window bird tree house please briefly
""".split()  # noqa: SIM905


@dataclass(frozen=True)
class Asked:
    """One request: as OpenAI turns, and as transformers needs it."""

    turns: list[dict[str, Any]]
    template: list[dict[str, Any]]
    pictures: list[Image.Image]
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def greedy(self) -> bool:
        return self.fields["temperature"] == 0


def picture(rng: random.Random) -> Image.Image:
    """Noise, stripes or a plain colour, of some size."""
    width, height = rng.choice(SIZES)
    kind = rng.randrange(3)
    if kind == 0:
        return Image.frombytes("RGB", (width, height), rng.randbytes(width * height * 3))
    image = Image.new("RGB", (width, height), tuple(rng.randrange(256) for _ in range(3)))
    if kind == 1:
        for x in range(0, width, 8):
            image.paste(tuple(rng.randrange(256) for _ in range(3)), (x, 0, x + 4, height))
    return image


def png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def asked(rng: random.Random, album: list[Image.Image], greedy: bool) -> Asked:
    """One to three turns, with up to four pictures among them, some from the album."""
    turns, template, pictures = [], [], []
    images = rng.choice([0, 0, 1, 1, 2, 3, 4])
    rounds = rng.choice([1, 1, 2, 3])
    if rng.random() < 0.5:
        system = "You look at altarpieces and answer in few words. " * 3
        turns.append({"role": "system", "content": system})
        template.append({"role": "system", "content": [text_part(system)]})
    for turn in range(rounds):
        mine = images if turn == rounds - 1 else rng.randint(0, images)
        images -= mine
        parts, marks = [], []
        for _ in range(mine):
            image = rng.choice(album) if rng.random() < 0.5 else picture(rng)
            pictures.append(image)
            parts.append(image_part(png(image)))
            marks.append({"type": "image"})
        text = words(rng, rng.choice([3, 10, 40, 150]))
        parts.insert(rng.randint(0, len(parts)), text_part(text))
        marks.insert(parts.index(text_part(text)), text_part(text))
        turns.append({"role": "user", "content": parts})
        template.append({"role": "user", "content": marks})
        if turn < rounds - 1:
            reply = words(rng, 6)
            turns.append({"role": "assistant", "content": reply})
            template.append({"role": "assistant", "content": [text_part(reply)]})
    return Asked(turns, template, pictures, _fields(rng, greedy))


def _fields(rng: random.Random, greedy: bool) -> dict[str, Any]:
    fields = {
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
    }
    if greedy:
        return fields | {"temperature": 0}
    return fields | {
        "temperature": rng.choice([0.7, 1.0, 1.3]),
        "seed": rng.randrange(2**40),
        "top_p": rng.choice([1.0, 0.9]),
        "top_k": rng.choice([0, 40]),
        "min_p": rng.choice([0.0, 0.02]),
        "presence_penalty": rng.choice([0.0, 0.5]),
        "repetition_penalty": rng.choice([1.0, 1.2]),
    }


@lru_cache
def mixed(seed: int = 7) -> tuple[Asked, ...]:
    """Sixty-four requests: three of four greedy, the others sampled with seeds."""
    rng = random.Random(seed)
    album = [picture(rng) for _ in range(6)]
    return tuple(asked(rng, album, greedy=i % 4 != 3) for i in range(COUNT))


@lru_cache
def same_words(count: int = 8) -> tuple[Asked, ...]:
    """Greedy requests that differ in nothing but what is on their picture."""
    rng = random.Random(11)
    pictures = [Image.frombytes("RGB", (56, 84), rng.randbytes(56 * 84 * 3)) for _ in range(count)]
    question, fields = text_part("Which panel is it?"), _fields(rng, greedy=True)
    return tuple(
        Asked(
            [{"role": "user", "content": [image_part(png(image)), question]}],
            [{"role": "user", "content": [{"type": "image"}, question]}],
            [image],
            fields,
        )
        for image in pictures
    )


@lru_cache
def stock_prompts(folder: Path) -> tuple[tuple[int, ...], ...]:
    """Expanded prompts by transformers' own tokenizer and template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = []
    for one in mixed():
        text = tokenizer.apply_chat_template(
            one.template, tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        prompts.append(tuple(reference.expand(folder, ids, one.pictures)))
    return tuple(prompts)


def stock_answers(
    folder: Path, generated: Sequence[Sequence[int]] | None = None
) -> tuple[reference.Reference | None, ...]:
    """What transformers answers greedily, one request after the other; None for sampled ones.

    With ``generated`` it generates every eighth answer only; of the others it gives its choice
    after each of these tokens.
    """

    def answer(number: int, one: Asked, ids: Sequence[int]) -> reference.Reference | None:
        if not one.greedy:
            return None
        if generated is not None and number % 8:
            return reference.follow(folder, ids, generated[number], one.pictures)
        return reference.generate(folder, ids, one.pictures, TOKENS, ignore_eos=True)

    found = zip(mixed(), stock_prompts(folder), strict=True)
    return tuple(answer(number, one, ids) for number, (one, ids) in enumerate(found))


async def ask_all(url: str, model: str, requests: Sequence[Asked]) -> list[Any]:
    """All at once."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def ask(one: Asked) -> Any:
            body = {"model": model, "messages": one.turns} | one.fields
            async with session.post(f"{url}/v1/chat/completions", json=body) as got:
                answer = await got.json()
                assert got.status == 200, answer
                return answer

        return await asyncio.gather(*(ask(one) for one in requests))
