"""Torch engines over tiny checkpoints, and requests for them, without any server around."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from PIL import Image

import reference
from triptych import models
from triptych.checkpoint import open_model
from triptych.config import TorchSettings
from triptych.engines.base import Generation, Media, PrefillOutput
from triptych.engines.torch import weights
from triptych.engines.torch.engine import TorchEngine
from triptych.media import images
from triptych.media.base import PreparedMedia
from triptych.messages import Delta, MediaItem, MediaMeta, Sampling, TokenLogprob, Work
from triptych.recipe import GridImage, SquareImage
from triptych.transfer.base import Array


def empty(dtype: str, shape: tuple[int, ...]) -> Array:
    size = math.prod(shape) * getattr(torch, dtype).itemsize
    return Array(memoryview(bytearray(size)), dtype, shape)


def frozen(tensor: torch.Tensor) -> Array:
    """As another worker's memory looks: read-only."""
    data = tensor.contiguous().numpy().tobytes()
    return Array(memoryview(data), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def prepared(recipe: GridImage | SquareImage, shown: Image.Image) -> PreparedMedia:
    """A picture as the decode pool gives it."""
    prepare = (
        images.prepare_grid_image if isinstance(recipe, GridImage) else images.prepare_square_image
    )
    meta, arrays, cost = prepare(shown, recipe)
    key = hashlib.sha256(shown.tobytes()).digest()
    return PreparedMedia(
        msgspec.structs.replace(meta, key=key),
        tuple(frozen(torch.from_numpy(array.copy())) for array in arrays),
        cost,
    )


class Bench:
    """One tiny checkpoint, loaded once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = open_model(folder)
        self.family = models.find_family(self.model)
        self.module = weights.load_part(self.family, self.model, "language", "cpu", torch.float32)
        self.language = self.family.language(self.module)
        self.image_id = self.model.media_ids.get("image", -1)  # some only hear

    @contextlib.contextmanager
    def engine(self, **settings: object) -> Iterator[TorchEngine]:
        chosen = TorchSettings(**{"kv_blocks": 512, **settings})
        engine = TorchEngine(self.language, self.family.layout, self.model, chosen, empty)
        try:
            yield engine
        finally:
            engine.close()

    def work(
        self,
        prompt: Sequence[int],
        pictures: Sequence[Image.Image] = (),
        *,
        salt: str = "",
        **sampling: object,
    ) -> tuple[Work, tuple[Media, ...]]:
        """Pictures stand at the image placeholders in the prompt."""
        places = [at for at, id in enumerate(prompt) if id == self.image_id]
        items = tuple(MediaItem("image", at, b"") for at in places)
        chosen = Sampling(**{"seed": 1, "temperature": 0.0, "max_tokens": 12, **sampling})
        work = Work("w", tuple(prompt), items, chosen, salt=salt, return_prompt_ids=True)
        return work, self.media(pictures)

    def media(self, pictures: Sequence[Image.Image]) -> tuple[Media, ...]:
        if not pictures:
            return ()
        rows = reference.image_features(self.folder, pictures)
        grids = reference.image_inputs(self.folder, pictures).get("image_grid_thw")
        metas = [
            MediaMeta(
                hashlib.sha256(picture.tobytes()).digest(),
                len(rows[at]),
                () if grids is None else tuple(grids[at].tolist()),
            )
            for at, picture in enumerate(pictures)
        ]
        return tuple(Media(meta, (frozen(r),)) for meta, r in zip(metas, rows, strict=True))

    def prompts(self, count: int, *, pictures: int, seed: int = 0) -> list[Request]:
        """Mixed requests: texts of many lengths, with up to ``pictures`` pictures."""
        draw = random.Random(seed)
        return [self._request(draw, draw.randint(0, pictures)) for _ in range(count)]

    def _request(self, draw: random.Random, pictures: int) -> Request:
        prompt = [draw.randrange(100, 300) for _ in range(draw.randint(3, 60))]
        shown = [picture(draw) for _ in range(pictures)]
        for _ in shown:
            at = draw.randint(1, len(prompt))
            prompt[at:at] = [98, self.image_id, 99]  # as markers do, text parts pictures
        return Request(prompt, shown)

    def expected(self, request: Request, max_tokens: int = 12) -> reference.Reference:
        ids = reference.expand(self.folder, request.prompt, request.pictures)
        return reference.generate(self.folder, ids, request.pictures, max_tokens)


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    pictures: list[Image.Image]


def picture(draw: random.Random) -> Image.Image:
    width, height = draw.choice([(60, 60), (90, 60), (64, 112), (112, 84)])
    return Image.frombytes("RGB", (width, height), draw.randbytes(width * height * 3))


@dataclass
class Answer:
    deltas: list[Delta]

    @property
    def ids(self) -> list[int]:
        return [id for delta in self.deltas for id in delta.ids]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [value for delta in self.deltas for value in delta.logprobs]


async def whole(engine: TorchEngine, work: Work, media: tuple[Media, ...]) -> Answer:
    """Phases PD."""
    deltas: list[Delta] = []
    await engine.generate(Generation(work, "PD", media), deltas.append)
    return Answer(deltas)


async def prefill(engine: TorchEngine, work: Work, media: tuple[Media, ...]) -> PrefillOutput:
    found: list[PrefillOutput] = []
    await engine.generate(Generation(work, "P", media), found.append)
    assert len(found) == 1
    return found[0]


async def split(
    first: TorchEngine, second: TorchEngine, work: Work, media: tuple[Media, ...]
) -> Answer:
    """Phase P in one engine, D in the other, which gets no embeddings."""
    handed = await prefill(first, work, media)
    deltas: list[Delta] = []
    if handed.delta.finish is None:
        bare = tuple(Media(item.meta, ()) for item in media)
        generation = Generation(work, "D", bare, handed.kv, handed.delta)
        await second.generate(generation, deltas.append)
        assert deltas[0].ids == ()
    return Answer([handed.delta, *deltas])


async def settled(engine: TorchEngine) -> bool:
    """Whether all blocks come back to the pool, within a few steps."""
    for _ in range(500):
        report = engine.report()
        if report.kv_blocks_free == report.kv_blocks_total and not report.running + report.queued:
            return True
        await asyncio.sleep(0.01)
    return False
