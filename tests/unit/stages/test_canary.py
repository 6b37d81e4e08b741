"""A worker whose encoder or engine does not work takes no place in discovery."""

from __future__ import annotations

import io
import signal
import sys
import wave
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest
from PIL import Image

from support.gpus import PlayedGpu
from triptych.checkpoint import packaged_folder
from triptych.config import Config
from triptych.engines.base import EngineReport, LoadedEngine, Media
from triptych.errors import (
    ContextLengthExceeded,
    EngineFailed,
    ImageTooLarge,
    InvalidConfig,
    StartError,
)
from triptych.media.base import PreparedMedia
from triptych.messages import MediaMeta
from triptych.recipe import (
    FrameSampling,
    MelAudio,
    Normalization,
    Recipes,
    SquareImage,
    SquareVideo,
)
from triptych.runtime.directory import Directory, WorkerFiles
from triptych.runtime.planes import Planes
from triptych.stages import health, process
from triptych.stages.embedding_cache import EmbeddingCache
from triptych.stages.encode import EncodeStage
from triptych.stages.process import ENGINE_DIED
from triptych.topology import Role
from triptych.transfer import client
from triptych.transfer.client import TransferClient
from triptych.transfer.file import FOLDER_ID_FILE


class Encoder:
    """Takes files as they are, or sound alone."""

    recipes = None

    def __init__(self, sound: bool) -> None:
        self.sound = sound
        self.seen = []

    async def encode(self, items):
        self.seen += items
        if not self.sound:
            raise EngineFailed("no picture goes through")
        return [Media(item.meta, ()) for item in items]


class Engine:
    def __init__(self, sound: bool) -> None:
        self.sound = sound
        self.seen = []

    async def generate(self, generation, emit):
        self.seen.append(generation)
        if not self.sound:
            raise EngineFailed("no token comes out")


def loaded(encoder: bool | None, engine: bool | None) -> LoadedEngine:
    """Parts that are sound or not; None: not there."""
    return LoadedEngine(
        None if encoder is None else Encoder(encoder),
        None if engine is None else Engine(engine),
        EngineReport,
        lambda: None,
    )


def stage(parts: LoadedEngine, pool=None) -> EncodeStage | None:
    if parts.encoder is None:
        return None
    return EncodeStage(
        parts.encoder, pool, EmbeddingCache(0, 0, 0), TransferClient("inline", "E-0", 1)
    )


class Pool:
    def __init__(self) -> None:
        self.seen = []

    async def prepare(self, item, salt, name):
        self.seen.append(item)
        return PreparedMedia(MediaMeta(b"k", 1), (), 1)


async def test_a_picture_and_a_token_go_through_what_is_there():
    parts = loaded(True, True)
    await health.check_start(parts.engine, stage(parts))
    assert len(parts.encoder.seen) == 1
    [generation] = parts.engine.seen
    assert generation.phases == "PD"
    assert generation.work.sampling.max_tokens == 1
    await health.check_start(Engine(True), None)
    await health.check_start(None, stage(loaded(True, None)))


async def test_the_picture_is_one():
    parts, pool = loaded(True, None), Pool()
    parts.encoder.recipes = Recipes("r", image=SquareImage(1, 1, 1, 0, 3, None))
    await health.check_start(None, stage(parts, pool))
    [item] = pool.seen
    assert item.kind == "image"
    # The smallest that every model takes, and few tokens: the context may be short.
    assert Image.open(io.BytesIO(item.data)).size == (56, 56)


async def test_a_model_that_only_hears_gets_a_sound():
    parts, pool = loaded(True, None), Pool()
    parts.encoder.recipes = Recipes("r", audio=MelAudio(16000, 400, 160, 128, 3000))
    await health.check_start(None, stage(parts, pool))
    [item] = pool.seen
    assert item.kind == "audio"
    with wave.open(io.BytesIO(item.data)) as file:
        assert file.getnframes() / file.getframerate() == 0.5


@pytest.mark.parametrize("parts", [(False, None), (None, False), (False, True), (True, False)])
async def test_an_encoder_or_engine_that_fails_fails_the_start(parts):
    parts = loaded(*parts)
    with pytest.raises(EngineFailed):
        await health.check_start(parts.engine, stage(parts))


async def test_where_nothing_can_be_decoded_the_start_is_refused_in_words():
    """And not tried again and again, with a traceback each time."""

    class Refusing(Pool):
        async def prepare(self, item, salt, name):
            raise ImageTooLarge("At most 10 pixels are taken.")

    with pytest.raises(StartError, match=r"10 pixels are taken.*doctor.*--limits"):
        await health.check_start(None, stage(loaded(True, None), Refusing()))


async def test_a_context_that_is_too_short_for_the_canary_is_refused_in_words():
    class Long(Pool):
        async def prepare(self, item, salt, name):
            raise ContextLengthExceeded.of(4, None, 2)

    with pytest.raises(StartError, match=r"--max-model-len"):
        await health.check_start(None, stage(loaded(True, None), Long()))


@pytest.fixture
def _signals():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, answer in before.items():
        signal.signal(number, answer)


@pytest.mark.usefixtures("_signals")
@pytest.mark.parametrize("sound", [True, False])
@pytest.mark.parametrize("role", ["E", "PD"])
async def test_a_worker_that_does_not_work_is_not_registered(tmp_path, monkeypatch, role, sound):
    parts = loaded(sound, None) if role == "E" else loaded(None, sound)
    closed, registered = [], []
    parts = LoadedEngine(parts.encoder, parts.engine, parts.report, lambda: closed.append(True))

    async def look(*_: object) -> int:
        registered.extend(WorkerFiles(config.run_dir, "secret").view())
        return 0

    monkeypatch.setattr(process, "find_engine", lambda _: lambda *_: parts)
    monkeypatch.setattr(process, "serve_until_stopped", look)
    config = Config(str(packaged_folder("qwen")), "E/PD", "fake", run_dir=str(tmp_path))
    if sound:
        assert await process.run_worker(config, Role(role), f"{role}-0", "secret") == 0
    else:
        with pytest.raises(EngineFailed):
            await process.run_worker(config, Role(role), f"{role}-0", "secret")
    assert registered == ([f"{role}-0"] if sound else [])
    assert WorkerFiles(config.run_dir, "secret").view() == {}
    assert closed == [True]


@pytest.mark.usefixtures("_signals")
@pytest.mark.parametrize(
    ("far", "told"),
    [
        ({}, ("shm", "nixl", "inline")),  # on one host it is not even tried
        ({"join": "nats://127.0.0.1:4222"}, ("shm", "inline")),
        ({"transport": "nixl"}, None),
        ({"join": "nats://127.0.0.1:4222", "transfer_folder": "."}, ("shm", "file", "inline")),
    ],
)
async def test_a_worker_reports_the_transports_that_work(tmp_path, monkeypatch, far, told):
    """NIXL is installed and does not load. Off: the record has what is installed."""
    registered = []

    async def look(*_: object) -> int:
        registered.extend(WorkerFiles(str(tmp_path), "secret").view().values())
        return 0

    @asynccontextmanager
    async def run_dir(*_: object):
        yield Directory(str(tmp_path), "secret")

    @asynccontextmanager
    async def no_nats(*_: object):
        yield Planes()

    monkeypatch.setattr(client, "is_installed", lambda _: True)
    monkeypatch.setitem(sys.modules, "nixl_cu13._api", None)  # an import of it fails
    monkeypatch.setattr(process, "find_engine", lambda _: lambda *_: loaded(None, True))
    monkeypatch.setattr(process, "serve_until_stopped", look)
    monkeypatch.setattr(process, "open_discovery", run_dir)
    monkeypatch.setattr(process, "open_planes", no_nats)
    config = Config(str(packaged_folder("qwen")), "PD", "fake", run_dir=str(tmp_path), **far)
    shared = tmp_path / "shared"
    if config.transfer_folder:
        config = msgspec.structs.replace(config, transfer_folder=str(shared))
    if told is None:
        with pytest.raises(InvalidConfig, match="nixl_cu13"):
            await process.run_worker(config, Role("PD"), "PD-0", "secret")
    else:
        assert await process.run_worker(config, Role("PD"), "PD-0", "secret") == 0
    assert [record.transports for record in registered] == ([told] if told else [])
    folder = (shared / FOLDER_ID_FILE).read_text() if config.transfer_folder else ""
    assert all(record.folder == folder for record in registered)


@pytest.mark.usefixtures("_signals")
@pytest.mark.parametrize(("number", "told"), [(None, ""), (0, PlayedGpu.identity.hex())])
async def test_a_worker_reports_the_gpu_whose_memory_it_shares(tmp_path, monkeypatch, number, told):
    registered, lent = [], []

    async def look(*_: object) -> int:
        registered.extend(WorkerFiles(str(tmp_path), "secret").view().values())
        return 0

    def load(config, role, lend, progress):
        lent.append(lend)
        return replace(loaded(None, True), gpu=number)

    monkeypatch.setattr(
        client, "open_shareable_gpu", lambda asked: PlayedGpu() if asked == number else None
    )
    monkeypatch.setattr(process, "find_engine", lambda _: load)
    monkeypatch.setattr(process, "serve_until_stopped", look)
    config = Config(str(packaged_folder("qwen")), "PD", "fake", run_dir=str(tmp_path))
    assert await process.run_worker(config, Role("PD"), "PD-0", "secret") == 0
    assert [record.gpu for record in registered] == [told]
    assert lent[0]("uint8", (1 << 20,), gpu=0).gpu is None  # it is closed


@pytest.mark.usefixtures("_signals")
async def test_a_worker_says_that_it_ends_before_it_closes_its_engine(tmp_path, monkeypatch):
    """From then on its time is bounded, for an engine that hangs may block its close."""
    told = []

    async def hung(*_: object) -> int:
        return ENGINE_DIED

    parts = replace(loaded(None, True), close=lambda: told.append("closed"))
    monkeypatch.setattr(process, "find_engine", lambda _: lambda *_: parts)
    monkeypatch.setattr(process, "serve_until_stopped", hung)
    config = Config(str(packaged_folder("qwen")), "PD", "fake", run_dir=str(tmp_path))
    served = process.run_worker(config, Role("PD"), "PD-0", "secret", ending=told.append)
    assert await served == ENGINE_DIED
    assert told == [ENGINE_DIED, "closed"]


async def test_a_model_of_videos_alone_gets_a_video():
    parts, pool = loaded(True, True), Pool()
    square = SquareImage(8, 8, 4, 0, 3, Normalization(1.0, (0.0,) * 3, (1.0,) * 3))
    frames = FrameSampling("even", fps=0.0, count=4, least=1, most=4, patch=1)
    parts.encoder.recipes = Recipes("r", video=SquareVideo(frames, square, 4))
    await health.check_start(parts.engine, stage(parts, pool))
    assert [item.kind for item in pool.seen] == ["video"]
    assert len(parts.encoder.seen) == 1
    assert len(parts.engine.seen) == 1
