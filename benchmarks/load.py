"""One measurement of an OpenAI-compatible server on this machine.

``measure`` keeps a number of connections busy and reports rates, percentiles and the CPU that given
processes spent meanwhile. As a command:

    python -m benchmarks.load --port 8000 --kind stream --connections 64 --pid frontend=1234
"""

from __future__ import annotations

import argparse
import base64
import functools
import io
import json
import math
import os
import random
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TICKS = os.sysconf("SC_CLK_TCK")
KINDS = ("chat", "stream", "image")
UNLIMITED = 10**9
UNENDING = 3600.0  # seconds, until it is stopped


@dataclass(frozen=True)
class Load:
    """What to ask, how often and for how long."""

    kind: str = "chat"  # of KINDS
    connections: int = 16
    seconds: float = 5.0
    warm_up: float = 0.5  # seconds of the same load before, not counted
    max_requests: int = UNLIMITED
    max_tokens: int | None = None  # None: 128 for a stream, 1 otherwise
    prompt: str = "Hello, how are you?"
    image_kib: int = 768  # of JPEG; a third more as base64, so 1 MiB
    extra: Mapping[str, Any] = field(default_factory=dict)  # merged in the body

    @property
    def streams(self) -> bool:
        return self.kind == "stream"

    def body(self, model: str) -> bytes:
        content: Any = self.prompt
        if self.kind == "image":
            url = "data:image/jpeg;base64," + base64.b64encode(jpeg(self.image_kib)).decode()
            content = [
                {"type": "text", "text": self.prompt},
                {"type": "image_url", "image_url": {"url": url}},
            ]
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self.max_tokens or (128 if self.streams else 1),
            "stream": self.streams,
            "ignore_eos": True,
        }
        if self.streams:
            body["stream_options"] = {"include_usage": True}
        return json.dumps(body | dict(self.extra)).encode()


@functools.cache
def jpeg(kib: int) -> bytes:
    """A noise picture whose JPEG is about this large: noise does not compress, so that size and
    side go together."""
    from PIL import Image

    noise, size, side = random.Random(7), kib * 1024, int(math.sqrt(kib * 1024))
    while True:
        picture = Image.frombytes("RGB", (side, side), noise.randbytes(3 * side * side))
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=75)
        if abs(file.tell() - size) < size / 20:
            return file.getvalue()
        side = round(side * math.sqrt(size / file.tell()))


def measure(
    port: int,
    load: Load,
    *,
    model: str | None = None,
    body: bytes | None = None,
    pids: Mapping[str, int] | None = None,
    core: int | None = None,
    path: str = "/v1/chat/completions",
) -> dict[str, Any]:
    """Run one load. ``body`` replaces the one of ``load``; ``core`` is where the load is made."""
    program = _compiled()
    body = body or load.body(model or first_model(port))
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(body)
        file.flush()

        def generate(seconds: float, most: int) -> dict[str, Any]:
            words = [program, "127.0.0.1", port, path, file.name, load.connections, seconds, most]
            command = [str(word) for word in (*words, int(load.streams))]
            if core is not None:
                command = ["taskset", "-c", str(core), *command]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            found: dict[str, Any] = json.loads(done.stdout)
            return found

        if load.warm_up:
            generate(load.warm_up, UNLIMITED)
        before = {name: cpu_seconds(pid) for name, pid in (pids or {}).items()}
        found = generate(load.seconds, load.max_requests)
        spent = {name: cpu_seconds(pid) - before[name] for name, pid in (pids or {}).items()}
    found["cpu"] = {
        name: {
            "seconds": round(seconds, 2),
            "cores": round(seconds / found["seconds"], 3),
            "us_per_request": round(1e6 * seconds / max(1, found["ok"]), 2),
            "us_per_token": round(1e6 * seconds / max(1, found["tokens"]), 3),
        }
        for name, seconds in spent.items()
    }
    return found


class Generator:
    """A load that runs until it is stopped."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.found: dict[str, Any] = {}

    def stop(self) -> None:
        """Let what was asked be answered, and read what was found."""
        self._process.terminate()
        output, _ = self._process.communicate()
        self.found = json.loads(output)


@contextmanager
def generator(port: int, load: Load, model: str) -> Iterator[Generator]:
    """Run a load beside something else; what was found is there after the end."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(load.body(model))
        file.flush()
        words: list[Any] = [_compiled(), "127.0.0.1", port, "/v1/chat/completions", file.name]
        words += [load.connections, UNENDING, UNLIMITED, int(load.streams)]
        process = subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE)
        running = Generator(process)
        try:
            yield running
        finally:
            running.stop()


def first_model(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10) as answer:
        name: str = json.load(answer)["data"][0]["id"]
    return name


def tree(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = thread.read_text().split()
        except OSError:  # it has ended meanwhile
            continue
        for child in children:
            yield from tree(int(child))


def cpu_seconds(pid: int) -> float:
    """User and system time of a process with its children, so far."""
    ticks = 0
    for member in tree(pid):
        try:
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS


def _compiled() -> Path:
    source, program = HERE / "loadgen.c", HERE / "loadgen"
    if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
        subprocess.run(["gcc", "-O2", "-o", str(program), str(source)], check=True)
    return program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--path", default="/v1/chat/completions")
    parser.add_argument("--model", help="none: the first that the server lists")
    parser.add_argument("--kind", choices=KINDS, default="chat")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--warm-up", type=float, default=0.5)
    parser.add_argument("--max-requests", type=int, default=UNLIMITED)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--image-kib", type=int, default=768)
    parser.add_argument("--extra", type=json.loads, default={}, help="JSON merged in the body")
    parser.add_argument("--body", type=Path, help="a file to send instead (kind says how to read)")
    parser.add_argument("--pid", action="append", default=[], metavar="NAME=PID")
    parser.add_argument("--core", type=int, help="where the load is made")
    args = parser.parse_args()
    load = Load(
        kind=args.kind,
        connections=args.connections,
        seconds=args.seconds,
        warm_up=args.warm_up,
        max_requests=args.max_requests,
        max_tokens=args.max_tokens,
        image_kib=args.image_kib,
        extra=args.extra,
    )
    found = measure(
        args.port,
        load,
        model=args.model,
        body=args.body.read_bytes() if args.body else None,
        pids={name: int(pid) for name, _, pid in (word.partition("=") for word in args.pid)},
        core=args.core,
        path=args.path,
    )
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
