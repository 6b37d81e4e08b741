"""Every family, with media as pixels and as embeddings: the tokens of vLLM's own processing.

The reference is vLLM itself, in the same process, given pictures, frames and sounds as anybody
would; it then makes its own prompt, its own pixels and its own positions of them. Caches are
emptied in between, so that nothing is answered from another's.
"""

from __future__ import annotations

import asyncio
import io
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
import pytest
import pytest_asyncio
from PIL import Image
from tools import tiny
from vllm.sampling_params import SamplingParams

from support import clips, pictures
from triptych.checkpoint import open_model
from triptych.config import Config, Limits
from triptych.engines.base import (
    Encoder,
    Generation,
    LoadedEngine,
    Media,
    PrefillOutput,
    find_engine,
)
from triptych.media.base import PreparedMedia
from triptych.media.prepare import dtype_name, prepare
from triptych.messages import Delta, MediaItem, MediaKind, Sampling, Work
from triptych.models import FAMILIES, served_by
from triptych.models.tensors import tensor_view
from triptych.recipe import GridVideo
from triptych.topology import Role
from triptych.transfer.base import Array
from triptych.transfer.inline import InlineTransport

pytestmark = pytest.mark.asyncio(loop_scope="module")
# vLLM's own processing of the tiny checkpoint fails, so that there is nothing to compare with.
NOT_COMPARED = {"llama4"}
TAKEN: dict[str, tuple[MediaKind, ...]] = {
    family: tuple(FAMILIES[family].vllm_fields or ())
    for family in served_by("vllm")
    if family not in NOT_COMPARED
}
ONE_AT_MOST = {"llava_next_video"}  # what vLLM itself takes of a kind in one prompt
TOKENS = 12
CLIP = 100  # frames, at 25 in a second
_numbers = itertools.count()


@dataclass(frozen=True)
class Served:
    """A family's tiny checkpoint in vLLM, and its towers once more in Triptych's own encoder."""

    family: str
    loaded: LoadedEngine
    towers: Encoder

    @property
    def llm(self) -> Any:
        return self.loaded.engine._llm  # type: ignore[union-attr]

    async def answer(self, work: Work, media: list[Media]) -> list[int]:
        await self.llm.reset_encoder_cache()
        await self.llm.reset_prefix_cache()
        emitted: list[Delta | PrefillOutput] = []
        assert self.loaded.engine is not None
        await self.loaded.engine.generate(Generation(work, "PD", tuple(media)), emitted.append)
        return [id for delta in emitted if isinstance(delta, Delta) for id in delta.ids]

    async def answer_by_itself(self, work: Work, kind: MediaKind, given: list[Any]) -> list[int]:
        """vLLM's own processing of media in vLLM's own form."""
        await self.llm.reset_encoder_cache()
        await self.llm.reset_prefix_cache()
        prompt = {"prompt_token_ids": list(work.prompt), "multi_modal_data": {kind: given}}
        if kind == "video":
            prompt["mm_processor_kwargs"] = self._frames_as_given()
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        ids: list[int] = []
        async for output in self.llm.generate(prompt, params, work.id):
            ids = list(output.outputs[0].token_ids)
        return ids

    def _frames_as_given(self) -> dict[str, Any]:
        """Stock Qwen2.5-Omni puts limits of its own over those of the checkpoint."""
        if self.family != "qwen2_5_omni":
            return {"do_sample_frames": False}
        assert self.towers.recipes is not None
        video = self.towers.recipes.video
        assert isinstance(video, GridVideo)
        size = {"shortest_edge": video.min_pixels, "longest_edge": video.max_pixels}
        return {"videos_kwargs": {"do_sample_frames": False, "size": size}}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=sorted(TAKEN))
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    config = Config(
        model=str(tiny.ensure_checkpoint(request.param)),
        engine="vllm",
        cpu_threads=1,
        kv_cache_bytes=64 << 20,
    )
    empty = InlineTransport("worker", 1).empty
    parts = [
        await asyncio.to_thread(find_engine(engine), config, Role(role), empty, lambda *_: None)
        for engine, role in (("vllm", "EPD"), ("torch", "E"))
    ]
    assert parts[1].encoder is not None
    yield Served(request.param, parts[0], parts[1].encoder)
    for part in parts:
        part.close()


def file(kind: MediaKind, number: int) -> bytes:
    match kind:
        case "image":
            return pictures.encoded(pictures.draw(number, 130 + 20 * number, 90))
        case "video":
            return clips.video(number, frames=CLIP)
        case "audio":
            return clips.sound(number, seconds=1.0 + 0.4 * number, rate=16000)


def ready(encoder: Encoder, kind: MediaKind, data: bytes) -> PreparedMedia:
    assert encoder.recipes is not None
    meta, arrays, cost, encoded = prepare(
        kind, "file", memoryview(data), encoder.recipes, Limits(), False
    )
    made = tuple(Array(memoryview(a).cast("B"), dtype_name(a), a.shape) for a in arrays)
    return PreparedMedia(meta, made, cost, encoded)


def vllms_own(kind: MediaKind, data: bytes, item: PreparedMedia) -> Any:
    """As vLLM takes media: a picture, the frames that were chosen, or samples."""
    if kind == "image":
        return Image.open(io.BytesIO(data)).convert("RGB")
    if kind == "audio":
        with av.open(io.BytesIO(data)) as opened:
            samples = [frame.to_ndarray() for frame in opened.decode(audio=0)]
        return np.concatenate(samples, axis=1)[0].astype(np.float32) / 32768, 16000
    frames = tensor_view(item.arrays[0]).numpy()
    return frames, {
        "fps": 25.0,
        "duration": CLIP / 25,
        "total_num_frames": CLIP,
        "frames_indices": np.linspace(0, CLIP - 1, len(frames)).round().astype(int).tolist(),
        "video_backend": "given",
        "do_sample_frames": False,
    }


def work(served: Served, kind: MediaKind, count: int) -> Work:
    """A prompt with so many items of a kind, and words between."""
    model = open_model(tiny.ensure_checkpoint(served.family))
    prompt, media = [3, 4], []
    for _ in range(count):
        media.append(MediaItem(kind, len(prompt), b""))
        prompt += [model.media_ids[kind], 13, 14]
    prompt += range(20, 30)
    sampling = Sampling(seed=1, max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    return Work(f"r{next(_numbers)}", tuple(prompt), tuple(media), sampling)


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
async def test_tokens_of_vllms_own_processing(served: Served, kind: MediaKind) -> None:
    if kind not in TAKEN[served.family]:
        pytest.skip("the family, or vLLM's model of it, takes none")
    assert served.loaded.encoder is not None
    files = [file(kind, number) for number in (1, 2)]
    items = [ready(served.towers, kind, data) for data in files]
    pixels = await served.loaded.encoder.encode(items)
    rows = await served.towers.encode(items)
    for chosen in ([0], [1], [0, 1]):
        asked = work(served, kind, len(chosen))
        tokens = await served.answer(asked, [pixels[at] for at in chosen])
        assert len(tokens) == TOKENS
        assert await served.answer(asked, [rows[at] for at in chosen]) == tokens
        if len(chosen) == 1 or served.family not in ONE_AT_MOST:
            own = [vllms_own(kind, files[at], items[at]) for at in chosen]
            assert await served.answer_by_itself(asked, kind, own) == tokens
    one, other = [await served.answer(work(served, kind, 1), [pixels[at]]) for at in (0, 1)]
    assert one != other  # else nothing would show that media are seen at all


async def test_a_kind_that_vllms_model_does_not_encode_is_accepted_as_an_embedding(
    served: Served,
) -> None:
    if served.family != "llava_next_video":
        pytest.skip("only LLaVA-NeXT-Video's lacks one: pictures")
    assert served.loaded.encoder is not None
    assert served.loaded.encoder.recipes is not None
    assert served.loaded.encoder.recipes.image is None
    assert served.loaded.encoder.recipes.image_embeds is not None
    item = ready(served.towers, "image", file("image", 1))
    asked = work(served, "image", 1)
    [rows] = await served.towers.encode([item])
    assert len(await served.answer(asked, [rows])) == TOKENS
