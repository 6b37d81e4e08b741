"""Hostile media files, all of them small: what they would unpack to, run or claim is not."""

from __future__ import annotations

import io
import os
import pickle
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from safetensors.numpy import save

from support import clips

WIDTH = 128  # of the tiny checkpoints' embeddings
GRID = (1, 4, 4)  # patches, of which 2 x 2 make a row


def png_bomb(side: int) -> bytes:
    """A whole picture of side x side white pixels, a bit each."""
    rows, per_block = side, 500
    assert rows % per_block == 0
    packer = zlib.compressobj(9, wbits=-15)
    row = b"\0" + b"\xff" * -(-side // 8)
    block = packer.compress(row * per_block) + packer.flush(zlib.Z_FULL_FLUSH)
    adler = 1
    for _ in range(rows // per_block):
        adler = zlib.adler32(row * per_block, adler)
    packed = b"\x78\xda" + block * (rows // per_block) + b"\x03\x00" + struct.pack(">I", adler)
    return png(side, side, packed, depth=1, colour=0)


def png(width: int, height: int, packed: bytes, depth: int = 8, colour: int = 2) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def gif(frames: int) -> bytes:
    head = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    return head + frame * frames + b";"


def forged_box(data: bytes, box: bytes, at: int, form: str, value: int) -> bytes:
    """An MP4 with another number in its first box of a kind."""
    place = data.index(box) + 4 + at
    return data[:place] + struct.pack(form, value) + data[place + struct.calcsize(form) :]


def film(codec: str, pixels: str) -> bytes:
    """One frame in a codec of choice, in a container that is accepted."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as out:
        track = out.add_stream(codec, rate=25)
        track.width, track.height, track.pix_fmt = 64, 64, pixels
        out.mux(track.encode(av.VideoFrame.from_ndarray(clips.draw(1, 0, 64, 64), "rgb24")))
        out.mux(track.encode(None))
    return file.getvalue()


def silence(seconds: int, rate: int = 8000) -> bytes:
    """A FLAC that unpacks to a thousand times its size."""
    file = io.BytesIO()
    with av.open(file, "w", format="flac") as out:
        track = out.add_stream("flac", rate=rate, layout="mono")
        piece = av.AudioFrame.from_ndarray(np.zeros((1, 4608), np.int16), "s16", "mono")
        piece.sample_rate = rate
        for _ in range(seconds * rate // 4608):
            out.mux(track.encode(piece))
        out.mux(track.encode(None))
    return file.getvalue()


def forged_rate(data: bytes, rate: int) -> bytes:
    """A WAV whose header claims another rate."""
    place = data.index(b"fmt ") + 12
    return data[:place] + struct.pack("<I", rate) + data[place + 4 :]


def rows(count: int = 4, width: int = WIDTH, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, (count, width)).astype(dtype)


def embedding(tensor: np.ndarray, grid: Any = GRID, kind: str = "image") -> bytes:
    """A safetensors file, right or wrong."""
    tensors = {f"{kind}_embeds": np.ascontiguousarray(tensor)}
    if grid is not None:
        tensors[f"{kind}_grid_thw"] = np.array([grid])
    return save(tensors)


def safetensors(header: bytes, body: bytes = b"", length: int | None = None) -> bytes:
    """The same by hand."""
    return struct.pack("<Q", len(header) if length is None else length) + header + body


class Runs:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def running(path: Path) -> dict[str, bytes]:
    """Files that would run something if they were read as they ask to be."""
    return {
        "plain": pickle.dumps(Runs(path)),
        "archive": saved({"image_embeds": Runs(path)}),
        "legacy": saved(Runs(path), _use_new_zipfile_serialization=False),
    }


def saved(value: Any, **how: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **how)
    return file.getvalue()


def torch_file(tensor: np.ndarray) -> bytes:
    """The same embedding as torch writes it."""
    return saved({"image_embeds": torch.from_numpy(tensor), "image_grid_thw": torch.tensor([GRID])})


def odd_tensors(seed: int) -> list[bytes]:
    """Torch files with tensors that are not dense, or not within their own data."""
    tensor = torch.from_numpy(rows(seed=seed))
    with warnings.catch_warnings(action="ignore"):  # of prototypes in torch
        outside = torch.sparse_coo_tensor(
            torch.tensor([[0, 1 << 40], [0, seed]]),
            torch.ones(2),
            (4, WIDTH),
            check_invariants=False,
        )
        found = [
            tensor.to_sparse(),
            tensor.to_sparse_csr(),
            outside,
            tensor[:1].expand(1 << 40, -1),
        ]
        return [*(saved({"image_embeds": odd}) for odd in found), _overlong(tensor)]


def _overlong(tensor: torch.Tensor) -> bytes:
    """It claims 100 rows and brings 4."""
    with zipfile.ZipFile(io.BytesIO(saved(tensor))) as archive:
        entries = {entry: archive.read(entry) for entry in archive.namelist()}
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for entry, body in entries.items():
            forged = body.replace(b"K\x04K\x80\x86", b"K\x64K\x80\x86")  # four rows of WIDTH
            assert forged != body or not entry.endswith("data.pkl")
            archive.writestr(entry, forged)
    return file.getvalue()
