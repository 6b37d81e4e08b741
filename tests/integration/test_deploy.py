"""The files of deploy/: each is served as it is, and its NATS is one that asks who comes."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import pytest

from support import pictures
from support.servers import TestServer, image_part, serving, text_part
from triptych.config import Config
from triptych.deploy import compose, kubernetes
from triptych.deploy.container import NATS_HEALTHY, NATS_PORT, NATS_STORE, READY_FILE, Containers
from triptych.host import free_port

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("file", sorted(ROOT.glob("deploy/*.toml")), ids=lambda p: p.stem)
def test_every_pattern_is_served_as_its_file_says(file):
    with serving("--config", str(file), "--engine=fake") as server:
        question = [image_part(pictures.encoded(pictures.draw(1))), text_part("What is it?")]
        assert server.chat(question, max_tokens=4).status == 200
        assert server.state()["topology"].lower().replace("/", "-") == file.stem


# As nats-server's file is read these are numbers, a size, a truth, comments, names and maps.
HARD = ["1234", "0123e5", "1k", "true", "a b", "x#y", "a//b", "$HOME", "{a: b}", "[1, 2]", "a;b,c"]
PASSWORDS = [*HARD, 'say "a"', r"a\nb", "grün", "0a" * 32]


def compose_nats(password):
    """Command, environment and configuration as Compose fills them in."""
    service = compose.compose_document(Config(), Containers())["services"]["nats"]
    env = {
        name: value.replace(compose.PASSWORD, password).replace("$$", "$")
        for name, value in service["environment"].items()
    }
    return [word.replace("$$", "$") for word in service["entrypoint"]], env


def kubernetes_nats(password):
    found = kubernetes.kubernetes_documents(Config(), Containers())
    [config] = [one for one in found if one["kind"] == "ConfigMap"]
    pod = next(one for one in found if one["kind"] == "StatefulSet")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    env = {one["name"]: one.get("value", password) for one in container["env"]}
    env["NATS_PASSWORD"] = env["NATS_PASSWORD"].replace("$(PASSWORD)", password)
    [mount] = [one for one in container["volumeMounts"] if one["name"] == "settings"]
    [(name, text)] = config["data"].items()
    assert container["command"][-1] == f"{mount['mountPath']}/{name}"
    return container["command"], env | {"NATS_CONF": text}


class Nats:
    """A NATS server that is started as it is in a container, but on loopback."""

    def __init__(self, start, password, folder):
        self.port, self.monitor = (free_port("127.0.0.1", 0) for _ in range(2))
        words, env = start(password)
        here = {
            f"\nhttp_port: {NATS_HEALTHY[0]}": f'\nhttp: "127.0.0.1:{self.monitor}"',
            f"port: {NATS_PORT}\n": f'listen: "127.0.0.1:{self.port}"\n',
            f'"{NATS_STORE}"': f'"{folder}/store"',
        }
        for theirs, ours in here.items():
            assert theirs in env["NATS_CONF"]
            env["NATS_CONF"] = env["NATS_CONF"].replace(theirs, ours)
        file = folder / "nats.conf"
        if words[0] == "nats-server":  # in Compose a shell writes it
            file.write_text(env["NATS_CONF"])
        words = [re.sub(r"/\S+/nats\.conf", str(file), word) for word in words]
        programs = Path(sys.executable).parent
        env["PATH"] = f"{programs}:{os.environ['PATH']}"
        self._process = subprocess.Popen(words, env=env, stderr=subprocess.PIPE)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._process.terminate()
        self._process.communicate(timeout=60)

    @property
    def command_line(self):
        return Path(f"/proc/{self._process.pid}/cmdline").read_bytes()

    def greet(self, **login):
        """What a client hears: what the server is, and its answer to a login."""
        for _ in range(300):  # half a minute for it to listen
            assert self._process.poll() is None, self._process.stderr.read()
            with contextlib.suppress(ConnectionRefusedError):
                found = socket.create_connection(("127.0.0.1", self.port), timeout=30)
                break
            time.sleep(0.1)
        with found as line, line.makefile("rwb") as stream:
            info = json.loads(stream.readline().removeprefix(b"INFO "))
            words = {"verbose": False, "pedantic": False} | login
            stream.write(b"CONNECT " + json.dumps(words).encode() + b"\r\nPING\r\n")
            stream.flush()
            return info, stream.readline().strip()


@pytest.mark.parametrize("password", PASSWORDS)
@pytest.mark.parametrize("start", [compose_nats, kubernetes_nats])
def test_the_nats_of_a_container_has_jetstream_and_requires_credentials(start, password, tmp_path):
    """Fails without ``authorization``, without ``jetstream``, and where ``quoted`` does nothing."""
    with Nats(start, password, tmp_path) as nats:
        info, answer = nats.greet(user="triptych", **{"pass": password})
        assert (info["auth_required"], info["jetstream"], answer) == (True, True, b"PONG")
        assert b"Authorization" in nats.greet(user="triptych", **{"pass": f"{password}x"})[1]
        assert b"Authorization" in nats.greet()[1]
        words = nats.command_line.replace(bytes(tmp_path), b"")
        assert words.startswith(b"nats-server")
        assert password.encode() not in words
        with urlopen(f"http://127.0.0.1:{nats.monitor}{NATS_HEALTHY[1]}", timeout=30) as reply:
            assert reply.status == 200


@pytest.fixture
def nats(tmp_path):
    with Nats(compose_nats, "0123e5", tmp_path) as nats:
        nats.greet()
        yield nats.port


def test_what_the_containers_run_is_a_server(nats, tmp_path):
    """The commands and the environment of the Compose file, here instead of in containers."""
    port = free_port("127.0.0.1", 0)
    config = Config(engine="fake", pattern="E/PD", enable_multimodal=True, port=port)
    services = compose.compose_document(config, Containers())["services"]
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
    secrets = {compose.SECRET: "x" * 32, compose.PASSWORD: "0123e5"}
    secrets |= {"${TRIPTYCH_API_KEY:-}": "", "${TRIPTYCH_ADMIN_KEY:-}": ""}
    env = {name: secrets.get(value, value) for name, value in service["environment"].items()}
    with open(log, "ab") as lines:
        argv = [sys.executable, "-m", "triptych", *words]
        process = subprocess.Popen(argv, env=os.environ | env, stderr=lines)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=60)
