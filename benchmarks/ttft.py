"""What three processes add to the time to first token: E/P/D beside EPD, torch engine, tiny model.

Both run at once and are asked in turns, one request at a time, with and without an image. Every
request has a prompt of its own, so that no prefix cache answers.
"""

from __future__ import annotations

import base64
import functools
import http.client
import io
import json
import random
import time
from statistics import median
from typing import Any

from benchmarks import servers
from benchmarks.load import first_model
from benchmarks.record import Figure

PATTERNS = ("EPD", "E/P/D")
SIDE = 224  # pixels
LIMIT_MS = 5.0


def run(quick: bool) -> tuple[list[Figure], dict[str, Any]]:
    from tools import tiny

    asks = 30 if quick else 200
    flags = (str(tiny.ensure_checkpoint("qwen2_5_vl")), "--engine", "torch", "--device", "cpu",
             "--enable-multimodal", "--cpu-threads", "1")  # fmt: skip
    found: dict[str, dict[str, list[float]]] = {}
    with (
        servers.triptych(*flags, "--pattern", PATTERNS[0]) as together,
        servers.triptych(*flags, "--pattern", PATTERNS[1]) as apart,
    ):
        model = first_model(together.port)
        clients = {
            pattern: http.client.HTTPConnection("127.0.0.1", server.port)
            for pattern, server in zip(PATTERNS, (together, apart), strict=True)
        }
        for kind in ("text", "image"):
            times: dict[str, list[float]] = {pattern: [] for pattern in PATTERNS}
            for i in range(asks + 5):
                for pattern in PATTERNS if i % 2 else reversed(PATTERNS):
                    client = clients[pattern]
                    seconds = _first_token(client, _body(model, kind == "image", i))
                    if i >= 5:  # the first ones warm up
                        times[pattern].append(round(1e3 * seconds, 2))
            found[kind] = times
    figures = []
    for kind, times in found.items():
        one, three = (median(times[pattern]) for pattern in PATTERNS)
        detail = f"medians {three:.2f} ms beside {one:.2f} ms"
        name = f"E/P/D over EPD, TTFT, {kind}"
        figures.append(Figure(name, three - one, "ms", LIMIT_MS, detail=detail))
    return figures, {"ttft_ms": found}


def _body(model: str, image: bool, number: int) -> bytes:
    content: list[dict[str, Any]] = [{"type": "text", "text": f"{number}: what is to be seen?"}]
    if image:
        content.append({"type": "image_url", "image_url": {"url": _picture(number)}})
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    return json.dumps(body).encode()


@functools.cache
def _picture(number: int) -> str:
    """A picture of its own for each request: an embedding cache must not answer either."""
    from PIL import Image

    cells = random.Random(number).randbytes(3 * 8 * 8)
    picture = Image.frombytes("RGB", (8, 8), cells).resize((SIDE, SIDE))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _first_token(client: http.client.HTTPConnection, body: bytes) -> float:
    start = time.perf_counter()
    client.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    answer = client.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {answer.read()[:400]!r}")
    while line := answer.readline():
        if line.startswith(b"data: {") and _has_text(line):
            seconds = time.perf_counter() - start
            answer.read()
            return seconds
    raise RuntimeError("the stream had no token")


def _has_text(line: bytes) -> bool:
    choices = json.loads(line[6:]).get("choices")
    return bool(choices) and bool(choices[0]["delta"].get("content"))
