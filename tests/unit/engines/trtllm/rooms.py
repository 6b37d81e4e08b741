"""Workers of every role without any server around, and requests for them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from support import pictures
from support.torch_engine import empty, frozen, prepared
from triptych import models
from triptych.checkpoint import open_model
from triptych.config import Config
from triptych.engines.base import Generation, LoadedEngine, Media, PrefillOutput
from triptych.engines.trtllm import load
from triptych.media.base import PreparedMedia
from triptych.messages import Delta, MediaItem, MediaMeta, Sampling, TokenLogprob, Work
from triptych.topology import Role
from unit.engines.trtllm.fake_parameters import World


class Heard:
    """What an engine emitted."""

    def __init__(self) -> None:
        self.emitted: list[Delta | PrefillOutput] = []

    def __call__(self, answer: Delta | PrefillOutput) -> None:
        self.emitted.append(answer)

    @property
    def deltas(self) -> list[Delta]:
        """Those with content."""
        every = [one.delta if isinstance(one, PrefillOutput) else one for one in self.emitted]
        return [delta for delta in every if delta.ids or delta.finish or delta.prompt]

    @property
    def ids(self) -> list[int]:
        return [id for delta in self.deltas for id in delta.ids]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [entry for delta in self.deltas for entry in delta.logprobs]


class Rooms:
    def __init__(self, world: World, folder: Path) -> None:
        self.world = world
        self.folder = folder
        self.model = open_model(folder)
        self.family = models.find_family(self.model)
        self.loaded: list[LoadedEngine] = []

    def open(self, role: str, **settings: object) -> LoadedEngine:
        config = Config(model=str(self.folder), engine="trtllm", **settings)
        loaded = load.load(config, Role(role), empty, lambda *_: None)
        self.loaded.append(loaded)
        return loaded

    def close(self) -> None:
        for loaded in self.loaded:
            loaded.close()

    def pictures(self, *numbers: int) -> list[PreparedMedia]:
        recipe = self.family.recipes.image
        return [prepared(recipe, pictures.draw(number, 90, 60)) for number in numbers]

    def embedding(self, meta: MediaMeta, width: int | None = None) -> Media:
        """Rows that belong to the key, as another worker lends them."""
        seed = int.from_bytes(meta.key[:6], "big")
        rows = torch.randn(
            meta.tokens, width or self.family.width, generator=torch.Generator().manual_seed(seed)
        )
        return Media(meta, (frozen(rows),))

    def work(self, items: Sequence[MediaMeta] = (), salt: str = "", **sampling: object) -> Work:
        chosen = {"seed": 7, "max_tokens": 6, "temperature": 0.0, **sampling}
        prompt, media = [5, 6], []
        for meta in items:
            media.append(MediaItem(meta.kind, len(prompt), b""))
            prompt += [self.model.media_ids[meta.kind], 9]
        ids = chosen.pop("return_prompt_ids", False)
        return Work("w", tuple(prompt), tuple(media), Sampling(**chosen), salt, bool(ids))

    async def answer(
        self, loaded: LoadedEngine, work: Work, media: Sequence[Media] = (), phases: str = "PD"
    ) -> Heard:
        heard = Heard()
        await loaded.engine.generate(Generation(work, phases, tuple(media)), heard)
        return heard


def video(grid: tuple[int, int, int], times: tuple[float, ...]) -> MediaMeta:
    tokens = grid[0] * grid[1] * grid[2] // 4
    key = hashlib.sha256(repr(grid).encode()).digest()
    return MediaMeta(key, tokens, grid, "video", times)
