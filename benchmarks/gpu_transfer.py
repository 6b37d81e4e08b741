"""A KV cache from one process's pages to another's, both on one GPU: in place, and over the host.

    python -m benchmarks.gpu_transfer OUT.json COMMIT

What the torch engine does for a hand-over, and nothing else: blocks are copied out of the owner's
pages into memory that is lent, published by ticket, fetched and copied into the reader's pages.
Every byte is compared. Needs torch with CUDA, msgspec and numpy.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import torch

from triptych.engines.torch.kv_cache import PagedKVCache
from triptych.messages import Ticket
from triptych.models.tensors import DTYPE_NAMES, tensor_view
from triptych.transfer.client import TransferClient

BLOCKS = (2, 18, 176, 1170)  # of 16 tokens in a 7B model: 1.75, 16, 154 (a 1080p picture), 1024 MiB
ROUNDS = 9
WAYS = ("cuda", "shm")


def made_pages() -> PagedKVCache:
    """As Qwen2.5-VL-7B has them."""
    device = torch.device("cuda", 0)
    return PagedKVCache(
        max(BLOCKS), 16, layers=28, kv_heads=4, head_dim=128, dtype=torch.bfloat16, device=device
    )


async def opened(name: str) -> TransferClient:
    transfers = TransferClient("auto", name, 1)
    assert await transfers.use_gpu(0, 4 << 30), "memory of this GPU cannot be shared"
    return transfers


async def own() -> None:
    """The owner: answers each line with a ticket, and the seconds that it took."""
    pages, transfers = made_pages(), await opened("owner")
    pages.kv.copy_(contents(pages))
    ticket: Ticket | None = None
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        if ticket is not None:
            transfers.release(ticket)
        start = time.perf_counter()
        gpu = 0 if asked["by"] == "cuda" else None
        shape = pages.shape(asked["blocks"])
        array = transfers.empty(DTYPE_NAMES[pages.kv.dtype], shape, gpu=gpu)
        pages.save(range(asked["blocks"]), tensor_view(array))
        ticket = await transfers.publish([array], by=asked["by"])
        spent = time.perf_counter() - start
        del array
        packed = base64.b64encode(msgspec.msgpack.encode(ticket)).decode()
        print(json.dumps({"ticket": packed, "spent": spent}), flush=True)
    await transfers.close()


def contents(pages: PagedKVCache) -> torch.Tensor:
    chance = torch.Generator(pages.device).manual_seed(5)
    return torch.randn(pages.kv.shape, generator=chance, device=pages.device).to(pages.kv.dtype)


class Owner:
    def __init__(self) -> None:
        argv = [sys.executable, "-m", "benchmarks.gpu_transfer", "own"]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, **asked: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


async def taken(transfers: TransferClient, pages: PagedKVCache, answer: Any, blocks: int) -> float:
    """Seconds until it is in the reader's own pages, and known to be right."""
    ticket = msgspec.msgpack.decode(base64.b64decode(answer["ticket"]), type=Ticket)
    start = time.perf_counter()
    async with transfers.borrow(ticket) as fetched:
        pages.load(tensor_view(fetched.arrays[0]), range(blocks))
        fetched.check()
    return time.perf_counter() - start


async def measure(
    owner: Owner, transfers: TransferClient, pages: PagedKVCache, blocks: int
) -> dict[str, Any]:
    wanted = contents(pages)
    row: dict[str, Any] = {"bytes": pages.kv[:, :, :blocks].nbytes}
    for by in WAYS:
        spent = []
        for turn in range(ROUNDS + 2):
            pages.kv.zero_()
            torch.cuda.synchronize()
            answer = await asyncio.to_thread(owner.ask, by=by, blocks=blocks)
            here = await taken(transfers, pages, answer, blocks)
            if turn > 1:  # memory is made and opened in the first
                spent.append((answer["spent"], here))
            assert torch.equal(pages.kv[:, :, :blocks], wanted[:, :, :blocks])
        row |= {
            f"{by}_out_ms": statistics.median(out for out, _ in spent) * 1e3,
            f"{by}_in_ms": statistics.median(into for _, into in spent) * 1e3,
            f"{by}_ms": statistics.median(map(sum, spent)) * 1e3,
        }
    return row


def figures(row: dict[str, Any]) -> list[dict[str, Any]]:
    """In the shape of benchmarks.record, which may not be there where the GPU is."""
    size = f"{row['bytes'] / (1 << 20):.0f} MiB"
    made = (
        (f"{size}, pages to pages on the GPU", row["cuda_ms"], "ms", "cuda"),
        (f"{size}, over the host beside that", row["shm_ms"] / row["cuda_ms"], "x", "shm"),
    )
    return [
        {
            "what": what,
            "found": found,
            "unit": unit,
            "detail": f"{row[f'{by}_ms']:.2f} ms: out {row[f'{by}_out_ms']:.2f}, in "
            f"{row[f'{by}_in_ms']:.2f}",
            "target": None,
            "at_least": False,
            "met": None,
        }
        for what, found, unit, by in made
    ]


def result(rows: list[dict[str, Any]], commit: str) -> dict[str, Any]:
    return {
        "name": "gpu_transfer",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "command": "python -m benchmarks.gpu_transfer OUT.json COMMIT",
        "machine": {
            "cpu": f"a machine with one {torch.cuda.get_device_name()}",
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "packages": {"torch": torch.__version__},
        },
        "figures": [figure for row in rows for figure in figures(row)],
        "details": {"rows": rows},
    }


async def measured() -> list[dict[str, Any]]:
    owner, transfers, pages = Owner(), await opened("reader"), made_pages()
    rows = [await measure(owner, transfers, pages, blocks) for blocks in BLOCKS]
    owner.close()
    await transfers.close()
    return rows


def main(out: str, commit: str) -> None:
    rows = asyncio.run(measured())
    Path(out).write_text(json.dumps(result(rows, commit), indent=1) + "\n")
    for row in rows:
        print({key: round(value, 3) for key, value in row.items()})


if __name__ == "__main__":
    asyncio.run(own()) if sys.argv[1:] == ["own"] else main(*sys.argv[1:])
