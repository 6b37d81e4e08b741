"""``triptych demo``: what a first user sees. Starts a server, asks it over HTTP, shows, stops."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from typing import Any

import msgspec

from triptych.config import Config, to_flags
from triptych.errors import StartError, UnsupportedModel
from triptych.launch import base_url, check, meaning, resolve
from triptych.messages import Kind
from triptych.model import open_model
from triptych.runtime.ports import free_port

SHOWN: dict[Kind, tuple[str, str, str]] = {  # what it is called, its file, what is asked about it
    "image": ("picture", "assets/demo.png", "What is in this picture?"),
    "video": ("clip", "assets/demo.mp4", "What happens in this clip?"),
    "audio": ("sound", "assets/demo.wav", "What is to be heard?"),
}
PATTERN = "E/PD"
START_SECONDS = 180.0
TELL_SECONDS = 2.0
LAST_WORDS = 2000  # characters of the server's log to show when it fails


def run(config: Config) -> int:
    pattern = config.pattern if config.pattern != Config().pattern else PATTERN
    config = msgspec.structs.replace(config, pattern=pattern, enable_multimodal=True)
    print(f"Triptych demo: {config.topology} on this machine, asked over HTTP.\n", flush=True)
    config = resolve(config)
    check(config)
    config = msgspec.structs.replace(config, port=free_port(config.host, 0))
    kinds = [kind for kind in SHOWN if kind in open_model(config.model).media_ids]
    if not kinds:
        raise UnsupportedModel("this model takes text only: the demo has nothing to show it")
    with _server(config) as url:
        for kind in kinds:
            name, file, question = SHOWN[kind]
            body, timing = _ask(url, config, kind)
            answer, tokens = (
                body["choices"][0]["message"]["content"],
                body["usage"]["prompt_tokens"],
            )
            print(f"\n{name:9} src/triptych/{file} ({tokens} prompt tokens with the text)")
            print(f"question  {question}")
            print(f"answer    {answer!r}")
            print(f"stages    {timing}", flush=True)
    if about := meaning(config):
        print(f"\nNo real model answered ({about}), but every request went the whole way.")
        print("Serve a real one: triptych serve MODEL_FOLDER")
    return 0


@contextmanager
def _server(config: Config) -> Iterator[str]:
    """A ``triptych serve`` of our own, ready; stopped on the way out."""
    argv = [sys.executable, "-m", "triptych", "serve", *to_flags(config)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(argv, stderr=log)
        try:
            url = base_url(config)
            if not _ready(url, process):
                log.seek(0)
                words = log.read()[-LAST_WORDS:]
                raise StartError(f"the server did not become ready. Its last words:\n{words}")
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)


def _ready(url: str, process: subprocess.Popen[bytes]) -> bool:
    start, told = time.monotonic(), 0.0
    while process.poll() is None and (passed := time.monotonic() - start) < START_SECONDS:
        if passed - told >= TELL_SECONDS:
            print(f"starting  {passed:.0f} s", flush=True)
            told = passed
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                print(f"ready     after {time.monotonic() - start:.1f} s", flush=True)
                return True
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    return False


def _ask(url: str, config: Config, kind: Kind) -> tuple[dict[str, Any], str]:
    _, file, question = SHOWN[kind]
    data = base64.b64encode(resources.files("triptych").joinpath(file).read_bytes()).decode()
    part = {"type": f"{kind}_url", f"{kind}_url": {"url": f"data:;base64,{data}"}}
    text = {"type": "text", "text": question}
    body = {"messages": [{"role": "user", "content": [part, text]}], "max_tokens": 24}
    key = next(iter(config.api_keys), "")
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/models", headers=headers)) as got:
        body["model"] = json.load(got)["data"][0]["id"]
    asked = json.dumps(body | {"temperature": 0}).encode()
    asking = urllib.request.Request(f"{url}/v1/chat/completions", asked, headers)
    try:
        with urllib.request.urlopen(asking, timeout=120) as got:
            return json.load(got), _stages(got.headers["Server-Timing"] or "")
    except urllib.error.HTTPError as error:
        with error:
            told = error.read().decode(errors="replace")
        raise StartError(f"the server answered with status {error.code}: {told}") from None


def _stages(header: str) -> str:
    """``encode;dur=12.3, prefill;dur=4.5`` as a line for people."""
    parts = (part.strip().split(";dur=") for part in header.split(",") if ";dur=" in part)
    return "  ".join(f"{name} {float(ms):.1f} ms" for name, ms in parts)
