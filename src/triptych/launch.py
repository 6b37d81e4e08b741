"""``triptych serve``: a supervisor with a frontend and the workers of a topology below it.

It moves no request and no tensor: it starts processes, restarts what dies and stops them in order.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from triptych import __version__
from triptych.config import Config, to_flags
from triptych.engines.base import ENGINES
from triptych.errors import InvalidConfig, StartError
from triptych.model import open_model, packaged
from triptych.runtime.supervisor import Child, Supervisor

TINY = "qwen2_5_vl"  # family of the checkpoint that is made when none is named


def serve(config: Config) -> int:
    """Serve until SIGTERM or Ctrl-C. Gives the exit code."""
    config = resolve(config)
    with _run_dir(config) as run_dir:
        config = msgspec.structs.replace(
            config, run_dir=str(run_dir), port=free_port(config.host, config.port)
        )
        print(banner(config), file=sys.stderr, flush=True)
        return asyncio.run(_supervise(config))


def resolve(config: Config) -> Config:
    """The config with its model named and its CPU threads shared out; refuses what can't work."""
    if config.engine not in ENGINES:
        raise InvalidConfig(
            f"engine '{config.engine}' is unknown; there are {', '.join(sorted(ENGINES))}"
        )
    if not config.model:
        model = str(packaged("qwen")) if config.engine == "fake" else _tiny_checkpoint()
        config = msgspec.structs.replace(config, model=model)
    open_model(config.model, config.max_model_len)
    workers = sum(group.count for group in config.topology.groups)
    if not config.torch.threads:
        threads = max(1, len(os.sched_getaffinity(0)) // workers)
        torch = msgspec.structs.replace(config.torch, threads=threads)
        config = msgspec.structs.replace(config, torch=torch)
    return config


def children(config: Config) -> list[Child]:
    """The processes of a topology. The frontend stops first, so that it can drain."""
    env = os.environ | {
        "TRIPTYCH_SECRET": os.environ.get("TRIPTYCH_SECRET") or secrets.token_hex(32),
        "OMP_NUM_THREADS": str(config.torch.threads),
    }
    if config.api_key:
        env["TRIPTYCH_API_KEY"] = config.api_key
    flags = to_flags(config)

    def child(name: str, order: int, *words: str) -> Child:
        return Child(name, [sys.executable, "-m", "triptych", *words, *flags], env, order)

    workers = [
        child(f"{group.role}-{i}", 1, "worker", "--role", group.role, "--index", str(i))
        for group in config.topology.groups
        for i in range(group.count)
    ]
    return [child("frontend", 0, "frontend"), *workers]


def banner(config: Config) -> str:
    model = open_model(config.model)
    name = config.served_model_name or model.name
    url = f"http://{config.host}:{config.port}"
    random = "" if not is_tiny(config) else "  (tiny, random weights: its answers mean nothing)"
    body = (
        f'{{"model": "{name}", "max_tokens": 16, '
        '"messages": [{"role": "user", "content": "Hello"}]}'
    )
    roles = "  ".join(f"{g.role}x{g.count}" for g in config.topology.groups)
    return f"""
  Triptych {__version__}
  model      {name}{random}
  topology   {config.topology}  ({roles}; engine {config.engine}, device {config.device})
  images     {"on" if config.enable_multimodal else "off (--enable-multimodal turns them on)"}
  interface  {url}/v1   (state: {url}/cluster)

  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{body}'
"""


def is_tiny(config: Config) -> bool:
    return Path(config.model).name.startswith("tiny-")


async def _supervise(config: Config) -> int:
    supervisor = Supervisor(children(config), stop_seconds=config.limits.drain_seconds + 5)
    announcing = asyncio.create_task(_announce(config, supervisor))
    try:
        return await supervisor.run()
    finally:
        announcing.cancel()


async def _announce(config: Config, supervisor: Supervisor) -> None:
    """Say when the server is ready. From then on, whatever dies is started again."""
    start = time.monotonic()
    while not await _healthy(config):  # noqa: ASYNC110 (another process's state)
        await asyncio.sleep(0.1)
    supervisor.ready()
    print(
        f"  ready after {time.monotonic() - start:.1f} s: http://{config.host}:{config.port}",
        file=sys.stderr,
        flush=True,
    )


async def _healthy(config: Config) -> bool:
    try:
        reader, writer = await asyncio.open_connection(config.host, config.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        status = await reader.readline()
        writer.close()
    except OSError:
        return False
    return b" 200 " in status


@contextmanager
def _run_dir(config: Config) -> Iterator[Path]:
    if config.run_dir:
        path = Path(config.run_dir)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield path
        return
    path = Path(tempfile.mkdtemp(prefix="triptych-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def free_port(host: str, port: int) -> int:
    """The port to listen on (0: any free one); refused early when it is taken."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise InvalidConfig(
                f"cannot listen on {host}:{port}: {error.strerror}. "
                "Choose another with --port (0: any free one)."
            ) from None
        bound: int = probe.getsockname()[1]
        return bound


def _tiny_checkpoint() -> str:
    """Made by a process of its own: this one never loads torch."""
    code = f"from triptych.engines.torch import tiny; print(tiny.ensure({TINY!r}))"
    made = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    if made.returncode:
        raise StartError("the tiny checkpoint could not be made; name a model folder instead")
    return made.stdout.strip().splitlines()[-1]
