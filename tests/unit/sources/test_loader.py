"""The loader of media: each kind of source, and what is promised of embeddings."""

import os

import pytest

from support.fetching import InProcessClient
from support.origin import NamedGate, Origin, reply
from triptych.config import Config, Limits
from triptych.errors import (
    InvalidEmbedding,
    LocalMediaForbidden,
    MediaFetchTimeout,
    MediaNotFound,
    MediaTooLarge,
    MediaURLBlocked,
    UnsupportedURLScheme,
)
from triptych.media.embeds import looks_like_torch
from triptych.sources.address import AddressFilter
from triptych.sources.loader import MediaLoader
from triptych.sources.uploads import UploadStore

SCOPE = "tenant\nsalt"
TENSORS = (2).to_bytes(8, "little") + b"{}"
TORCH = [b"PK\x03\x04" + bytes(100), b"\x80\x02" + bytes(100)]


class Door:
    def __init__(self, gate=None, **settings):
        self.uploads = UploadStore(1 << 20, 60)
        client = InProcessClient(
            gate or AddressFilter(private=settings.get("allow_private_media", False))
        )
        self.sources = MediaLoader(Config(**settings), self.uploads, client=client)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        await self.sources.close()

    async def load(self, source, form="file", scope=SCOPE):
        with self.sources.reserve(scope) as reservation:
            return await self.sources.load(source, "image", form, scope, reservation)


async def test_bytes_pass_as_they_are():
    async with Door() as door:
        for data in (b"any", memoryview(b"thing"), b""):
            assert await door.load(data) is data


async def test_fetches_reads_and_looks_up(tmp_path):
    (tmp_path / "a.png").write_bytes(b"read")
    async with (
        Origin({"/a": reply(200, b"fetched")}) as origin,
        Door(NamedGate(), allowed_media_path=str(tmp_path)) as door,
    ):
        assert await door.load(origin.url("/a")) == b"fetched"
        assert await door.load(origin.url("/a").replace("http", "HTTP")) == b"fetched"
        assert await door.load(f"file://{tmp_path}/a.png") == b"read"
        upload = door.uploads.put("tenant", b"uploaded")
        assert await door.load(upload.id) == b"uploaded"
        assert await door.load(upload.id, scope="tenant\nother salt") == b"uploaded"
        assert await door.load(upload.id, scope="tenant") == b"uploaded"
        for scope in ("other\nsalt", "\n", "tenant2\n"):
            with pytest.raises(MediaNotFound):
                await door.load(upload.id, scope=scope)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://ok.test/",
        "gopher://ok.test/",
        "data:,x",
        "",
        "a.png",
        "/etc/passwd",
        "//ok.test/",
        "javascript:x",
        " http://ok.test/",
        "\x00http://ok.test/",
        "blob:x",
        "ws://ok.test/",
    ],
)
async def test_b21_other_schemes_are_unsupported(url):
    async with Door() as door:
        with pytest.raises(UnsupportedURLScheme):
            await door.load(url)


async def test_the_settings_reach_the_guards(tmp_path):
    (tmp_path / "big").write_bytes(bytes(11))
    limits = Limits(media_bytes=10, fetch_seconds=0.2)

    async def silent(writer, asked):
        await writer.wait_closed()

    async with (
        Origin({"/big": reply(200, bytes(11)), "/silent": silent}, "127.0.0.1") as origin,
        Door(limits=limits, allow_private_media=True, allowed_media_path=str(tmp_path)) as door,
    ):
        for url in (origin.url("/big", "127.0.0.1"), f"file://{tmp_path}/big"):
            with pytest.raises(MediaTooLarge):
                await door.load(url)
        with pytest.raises(MediaFetchTimeout):
            await door.load(origin.url("/silent", "localhost"))
        before = origin.accepts
        async with Door(allowed_media_domains="ok.test") as strict:
            for url in (origin.url("/big", "127.0.0.1"), "http://example.com/"):
                with pytest.raises(MediaURLBlocked):
                    await strict.load(url)
            with pytest.raises(LocalMediaForbidden):
                await strict.load(f"file://{tmp_path}/big")
        assert origin.accepts == before
        assert door.sources.counters["fetch_failures"] == 2


async def test_embeddings_are_safetensors_wherever_they_come_from(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(TENSORS)
    (tmp_path / "a.SafeTensors").write_bytes(TENSORS)
    async with (
        Origin({"/a": reply(200, TENSORS)}) as origin,
        Door(NamedGate(), allowed_media_path=str(tmp_path)) as door,
    ):
        for source in (
            TENSORS,
            memoryview(TENSORS),
            origin.url("/a"),
            f"file://{tmp_path}/a.safetensors",
            f"file://{tmp_path}/a.SafeTensors",
            door.uploads.put("tenant", TENSORS).id,
        ):
            assert await door.load(source, "embeds") == TENSORS


@pytest.mark.parametrize("start", [b"PK\x03\x04", b"\x80\x02\0\0", b"\x80\0\0\0"])
async def test_b35_safetensors_files_are_never_read_as_torch(start):
    """A header of 128 bytes begins as a pickle does."""
    data = start + b"\0\0\0\0{" + bytes(50)
    async with Door() as door:
        assert await door.load(data, "embeds") is data
    assert not looks_like_torch(memoryview(data))
    assert all(looks_like_torch(memoryview(torch)) for torch in TORCH)


@pytest.mark.parametrize("data", [*TORCH, b"", b"{", b"not tensors at all"])
@pytest.mark.parametrize("allowed", [False, True])
async def test_b35_torch_files_from_clients_and_servers_do_not_pass(data, allowed, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(data)
    settings = {"allowed_media_path": str(tmp_path), "allow_torch_embeddings": allowed}
    async with Origin({"/a.pt": reply(200, data)}) as origin, Door(NamedGate(), **settings) as door:
        for source in (
            data,
            memoryview(data),
            origin.url("/a.pt"),
            f"file://{tmp_path}/a.safetensors",
            door.uploads.put("tenant", data).id,
        ):
            with pytest.raises(InvalidEmbedding, match="convert-embeddings"):
                await door.load(source, "embeds")


@pytest.mark.parametrize("name", ["a.pt", "a.pth", "a.bin", "A.PT"])
async def test_b35_torch_files_below_the_folder_only_where_they_are_permitted(name, tmp_path):
    (tmp_path / name).write_bytes(TORCH[0])
    url = f"file://{tmp_path}/{name}"
    async with Door(allowed_media_path=str(tmp_path)) as door:
        with pytest.raises(InvalidEmbedding, match="allow-torch-embeddings"):
            await door.load(url, "embeds")
        with pytest.raises(InvalidEmbedding, match="allow-torch-embeddings"):
            await door.load(f"file://{tmp_path}/missing.pt", "embeds")  # not saying what exists
    async with Door(allowed_media_path=str(tmp_path), allow_torch_embeddings=True) as door:
        assert await door.load(url, "embeds") == TORCH[0]
        for outside in ("/etc/a.pt", f"{tmp_path}/../a.pt", f"{tmp_path}/missing.pt"):
            with pytest.raises(LocalMediaForbidden):
                await door.load(f"file://{outside}", "embeds")
        (tmp_path / "a.txt").write_bytes(TENSORS)
        with pytest.raises(InvalidEmbedding, match="safetensors"):
            await door.load(f"file://{tmp_path}/a.txt", "embeds")


async def test_closing_releases_everything_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    async with Door(allowed_media_path=str(tmp_path)):
        assert len(os.listdir("/proc/self/fd")) == before + 1
    assert len(os.listdir("/proc/self/fd")) == before
