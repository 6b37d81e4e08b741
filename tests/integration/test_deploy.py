"""The files of deploy/: each is served as it is, and its NATS is one that asks who comes."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support import pictures
from support.servers import TestServer, image_part, serving, text_part
from triptych.config import Config
from triptych.render import compose
from triptych.render.container import NATS_STORE, READY_FILE, Containers, nats_words
from triptych.runtime.ports import free_port

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("file", sorted(ROOT.glob("deploy/*.toml")), ids=lambda p: p.stem)
def test_every_pattern_is_served_as_its_file_says(file):
    with serving("--config", str(file), "--engine=fake") as server:
        question = [image_part(pictures.encoded(pictures.draw(1))), text_part("What is it?")]
        assert server.chat(question, max_tokens=4).status == 200
        assert server.state()["topology"].lower().replace("/", "-") == file.stem


PASSWORD = "0123e5"  # nats-server must not take it for a number


@pytest.fixture
def nats(tmp_path):
    """The port of a NATS server that is started as it is in a container."""
    program = Path(sys.executable).parent / "nats-server"
    port = free_port("127.0.0.1", 0)
    words = nats_words("triptych", PASSWORD, free_port("127.0.0.1", 0))
    words = [word.replace(f"={NATS_STORE}", f"={tmp_path}") for word in words]
    with subprocess.Popen([program, "--addr=127.0.0.1", f"--port={port}", *words]) as server:
        yield port
        server.terminate()


def greet(port, **login):
    """What a client hears: what the server is, and its answer to a login."""
    for _ in range(300):  # half a minute for it to listen
        with contextlib.suppress(ConnectionRefusedError):
            found = socket.create_connection(("127.0.0.1", port), timeout=30)
            break
        time.sleep(0.1)
    with found as line, line.makefile("rwb") as stream:
        info = json.loads(stream.readline().removeprefix(b"INFO "))
        words = {"verbose": False, "pedantic": False} | login
        stream.write(b"CONNECT " + json.dumps(words).encode() + b"\r\nPING\r\n")
        stream.flush()
        return info, stream.readline().strip()


def test_the_nats_of_a_container_keeps_what_it_is_told_and_asks_who_comes(nats):
    """Fails without ``--user``, and without ``--jetstream``."""
    info, answer = greet(nats, **{"user": "triptych", "pass": PASSWORD})
    assert (info["auth_required"], info["jetstream"], answer) == (True, True, b"PONG")
    assert b"Authorization" in greet(nats, user="triptych")[1]
    assert b"Authorization" in greet(nats)[1]


def test_what_the_containers_run_is_a_server(nats, tmp_path):
    """The commands and the environment of the Compose file, here instead of in containers."""
    port = free_port("127.0.0.1", 0)
    config = Config(engine="fake", pattern="E/PD", enable_multimodal=True, port=port)
    services = compose.document(config, Containers())["services"]
    del services["nats"]
    ready = {name: tmp_path / f"{name}.ready" for name in services}
    with contextlib.ExitStack() as scope:
        running = {
            name: scope.enter_context(_container(service, nats, ready[name], tmp_path / "log"))
            for name, service in services.items()
        }
        server = TestServer(running["frontend"], port, str(tmp_path / "log"))
        server.wait(server.complete, what="every worker is ready")
        server.wait(lambda: ready["e-0"].exists() and ready["pd-0"].exists(), what="both say so")
        assert server.chat("Hello", max_tokens=3).status == 200
        health = services["frontend"]["healthcheck"]["test"][3]
        subprocess.run([sys.executable, "-c", health], check=True)
        running["e-0"].terminate()
        running["e-0"].wait(timeout=60)
        assert not ready["e-0"].exists()
        server.wait(lambda: not server.healthy(), what="it is missed")
        assert subprocess.run([sys.executable, "-c", health], capture_output=True).returncode


@contextlib.contextmanager
def _container(service, nats, ready, log):
    here = {
        "nats://nats:4222": f"nats://127.0.0.1:{nats}",
        f"--worker-host={service['hostname']}": "--worker-host=127.0.0.1",
        "0.0.0.0": "127.0.0.1",
        READY_FILE: str(ready),
    }
    words = service["command"]
    for theirs, ours in here.items():
        words = [word.replace(theirs, ours) for word in words]
    secrets = {compose.SECRET: "x" * 32, compose.PASSWORD: PASSWORD, "${TRIPTYCH_API_KEY:-}": ""}
    env = {name: secrets.get(value, value) for name, value in service["environment"].items()}
    with open(log, "ab") as lines:
        argv = [sys.executable, "-m", "triptych", *words]
        process = subprocess.Popen(argv, env=os.environ | env, stderr=lines)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=60)
