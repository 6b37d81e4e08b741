"""KV cache between two processes on one GPU: CUDA IPC beside the way over the host's memory.

    python -m benchmarks.cuda_ipc OUT.json COMMIT

One process owns a tensor, the other one reads it into its own GPU memory. By CUDA IPC it gets the
handle of the owner's allocation (64 bytes that travel in a message; no pickle) and copies on the
device. Over the host the owner copies into pinned shared memory, and the reader copies from there.
Both check every byte. Needs torch with CUDA, and nothing else.
"""

from __future__ import annotations

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

SIZES = (1 << 20, 16 << 20, 154 << 20, 1 << 30)  # 154 MiB: the KV of a 1080p picture in a 7B model
ROUNDS = 9


def handle_of(tensor: Any) -> list[Any]:
    """What another process needs to open a tensor's memory, as plain values."""
    return [
        part.hex() if isinstance(part, bytes) else part
        for part in tensor.untyped_storage()._share_cuda_()
    ]


def opened(handle: list[Any], size: int) -> Any:
    import torch

    parts = [bytes.fromhex(part) if isinstance(part, str) else part for part in handle]
    storage = torch.UntypedStorage._new_shared_cuda(*parts)
    return torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage, 0, (size,))


def pinned(path: str, size: int) -> Any:
    """Shared memory that the GPU reads and writes by itself."""
    import torch

    shared = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    code = torch.cuda.cudart().cudaHostRegister(shared.data_ptr(), size, 0)
    assert int(code) == 0, f"cudaHostRegister: {code}"
    return shared


def own() -> None:
    """The owner: answers each line with a handle, or with a copy in shared memory."""
    import torch

    tensors, mapped = {}, {}
    for line in sys.stdin:
        asked = json.loads(line)
        size = asked["size"]
        if size not in tensors:
            tensors[size] = (torch.arange(size, device="cuda") % 251).to(torch.uint8)
            torch.cuda.synchronize()
        if asked["way"] == "ipc":
            answer: Any = handle_of(tensors[size])
        else:
            if size not in mapped:  # once, as a pool of segments is
                mapped[size] = pinned(asked["path"], size)
            start = time.perf_counter()
            mapped[size].copy_(tensors[size])
            torch.cuda.synchronize()
            answer = time.perf_counter() - start
        print(json.dumps(answer), flush=True)


class Owner:
    def __init__(self) -> None:
        argv = [sys.executable, "-m", "benchmarks.cuda_ipc", "own"]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, **asked: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def measure(owner: Owner, size: int) -> dict[str, Any]:
    import torch

    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    wanted = (torch.arange(size, device="cuda") % 251).to(torch.uint8)
    handle = owner.ask(way="ipc", size=size)
    start = time.perf_counter()
    source = opened(handle, size)
    first = time.perf_counter() - start
    copies, host = [], []
    for _ in range(ROUNDS):
        target.zero_()
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        copies.append(time.perf_counter() - start)
        assert torch.equal(target, wanted)
    del source
    path = Path(f"/dev/shm/triptych-cuda-ipc-{size}")
    with open(path, "wb") as file:
        file.truncate(size)
    try:
        shared = pinned(str(path), size)
        for _ in range(ROUNDS):
            target.zero_()
            torch.cuda.synchronize()
            out = owner.ask(way="host", size=size, path=str(path))
            start = time.perf_counter()
            target.copy_(shared)
            torch.cuda.synchronize()
            host.append(out + time.perf_counter() - start)
            assert torch.equal(target, wanted)
        torch.cuda.cudart().cudaHostUnregister(shared.data_ptr())
    finally:
        path.unlink()
    ipc, over = statistics.median(copies), statistics.median(host)
    return {
        "bytes": size,
        "open_ms": first * 1e3,
        "ipc_ms": ipc * 1e3,
        "ipc_gb_per_s": size / ipc / 1e9,
        "host_ms": over * 1e3,
        "host_gb_per_s": size / over / 1e9,
        "ipc_times_faster": over / ipc,
    }


def figures(row: dict[str, Any]) -> list[dict[str, Any]]:
    """In the shape of benchmarks.record, which may not be there where the GPU is."""
    empty = {"target": None, "at_least": False, "met": None}
    size = f"{row['bytes'] >> 20} MiB"
    rates = row["ipc_gb_per_s"], row["host_gb_per_s"]
    how = f"{rates[0]:.0f} GB/s beside {rates[1]:.1f}, which is {row['host_ms']:.2f} ms"
    opening = f"opening the handle: {row['open_ms']:.2f} ms, once"
    return [
        figure | empty
        for figure in (
            {
                "what": f"{size} by CUDA IPC",
                "found": row["ipc_ms"],
                "unit": "ms",
                "detail": opening,
            },
            {
                "what": f"{size}, over the host's memory by CUDA IPC",
                "found": row["ipc_times_faster"],
                "unit": "x",
                "detail": how,
            },
        )
    ]


def result(rows: list[dict[str, Any]], commit: str) -> dict[str, Any]:
    import torch

    return {
        "name": "cuda_ipc",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "command": "python -m benchmarks.cuda_ipc OUT.json COMMIT",
        "machine": {
            "cpu": f"a machine with one {torch.cuda.get_device_name()}",
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "packages": {"torch": torch.__version__},
        },
        "figures": [figure for row in rows for figure in figures(row)],
        "details": {"rows": rows},
    }


def main(out: str, commit: str) -> None:
    owner = Owner()
    rows = [measure(owner, size) for size in SIZES]
    owner.close()
    Path(out).write_text(json.dumps(result(rows, commit), indent=1) + "\n")
    for row in rows:
        print({key: round(value, 3) for key, value in row.items()})


if __name__ == "__main__":
    own() if sys.argv[1:] == ["own"] else main(*sys.argv[1:])
