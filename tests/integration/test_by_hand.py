"""Frontend and workers started one by one, as on several machines: health follows who is there."""

import os
import subprocess
import sys

import pytest

from support.servers import TestServer
from triptych.launch import free_port


@pytest.fixture
def start(tmp_path):
    """Starts a ``triptych`` process of one cluster; all are stopped in the end."""
    running = []
    env = os.environ | {"TRIPTYCH_SECRET": "x" * 32}

    def start(*words):
        argv = [sys.executable, "-m", "triptych", *words, "--engine=fake", "--pattern=E/PD"]
        argv += [f"--run-dir={tmp_path / 'run'}", "--enable-multimodal"]
        with open(tmp_path / "log", "ab") as log:
            process = subprocess.Popen(argv, env=env, stderr=log)
        running.append(process)
        return process

    yield start
    for process in running:
        if process.poll() is None:
            process.terminate()
    codes = [process.wait(timeout=30) for process in running]
    assert all(code in (0, -9, -15) for code in codes), (tmp_path / "log").read_text()


def test_healthy_only_while_every_role_has_a_worker(start, tmp_path):
    port = free_port("127.0.0.1", 0)
    server = TestServer(start("frontend", f"--port={port}"), port, str(tmp_path / "log"))

    def status():
        return server.request("/health").status

    server.wait(server.live, what="live")
    assert status() == 503  # without workers
    assert server.chat("Hello").json["error"]["code"] == "no_workers"
    encoder = start("worker", "--role=E")
    server.wait(lambda: "E-0" in server.cluster(), what="E joins")
    assert status() == 503
    start("worker", "--role=PD")
    server.wait(lambda: status() == 200, what="200 with every role")
    assert server.chat("Hello", max_tokens=3).status == 200
    encoder.kill()
    server.wait(lambda: status() == 503, what="503 when a role has none again")
    start("worker", "--role=E")
    server.wait(lambda: status() == 200, what="200 when it is back")


def test_another_secret_gets_nobody_in(start, tmp_path):
    port = free_port("127.0.0.1", 0)
    server = TestServer(start("frontend", f"--port={port}"), port, str(tmp_path / "log"))
    env = os.environ | {"TRIPTYCH_SECRET": "y" * 32}
    argv = [sys.executable, "-m", "triptych", "worker", "--role=PD", "--engine=fake"]
    argv += ["--pattern=E/PD", f"--run-dir={tmp_path / 'run'}"]
    with open(tmp_path / "log", "ab") as log, subprocess.Popen(argv, env=env, stderr=log) as other:
        try:
            start("worker", "--role=E")
            server.wait(server.live, what="live")
            server.wait(lambda: "E-0" in server.cluster(), what="E joins")
            assert "PD-0" not in server.cluster()
            assert server.request("/health").status == 503
        finally:
            other.terminate()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "--pattern=D/P"], "E is missing"),
        (["serve", "/nowhere"], "no checkpoint folder"),
        (["serve", "--engine=warp"], "engine 'warp' is unknown"),
        (["worker", "--role=E"], "--run-dir is not set"),
        (["serve", "--engine=fake", "--host=192.0.2.1"], "cannot listen"),
        (["serve", "--engine=fake", "--prompt-template=no slot"], "<prompt>"),
    ],
)
def test_a_wrong_start_says_what_to_mend(words, said):
    done = subprocess.run(
        [sys.executable, "-m", "triptych", *words], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
