"""``vllm bench serve``, many times in one process: importing vLLM takes longer than a round.

Runs in vLLM's environment. Every line of standard input is a JSON list of options of that command,
and is answered by a line with what it found. Started by ``client``, in our environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

KEPT = (
    "completed",
    "failed",
    "duration",
    "total_input_tokens",
    "total_output_tokens",
    "output_throughput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_tpot_ms",
)


@contextlib.contextmanager
def client(python: Path) -> Iterator[Callable[[list[str]], dict[str, Any]]]:
    """A function that runs the command with the options it is given."""
    process = subprocess.Popen(
        [str(python), __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def run(words: list[str]) -> dict[str, Any]:
        stdin.write(json.dumps(words) + "\n")
        stdin.flush()
        found: dict[str, Any] = json.loads(stdout.readline() or '{"failed": "it has ended"}')
        if found.get("failed"):
            raise RuntimeError(f"vllm bench serve: {found}")
        return found

    try:
        yield run
    finally:
        stdin.close()
        process.wait()


def main() -> None:
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    for line in sys.stdin:
        with contextlib.redirect_stdout(sys.stderr):
            found = asyncio.run(serve.main_async(parser.parse_args(json.loads(line))))
        print(json.dumps({name: found.get(name) for name in KEPT}), flush=True)


if __name__ == "__main__":
    main()
