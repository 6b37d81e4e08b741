"""Frontend and workers started one by one, as on several machines: health follows who is there."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from support.servers import TestServer, serving
from triptych.host import free_port


@pytest.fixture
def start(tmp_path):
    """Starts a ``triptych`` process of one cluster; all are stopped in the end."""
    running = []
    env = os.environ | {"TRIPTYCH_SECRET": "x" * 32}

    def start(*words, code=0):
        argv = [sys.executable, "-m", "triptych", *words, "--engine=fake", "--pattern=E/PD"]
        argv += [f"--run-dir={tmp_path / 'run'}", "--enable-multimodal"]
        with open(tmp_path / "log", "ab") as log:
            process = subprocess.Popen(argv, env=env, stderr=log)
        running.append((process, code))
        return process

    yield start
    for process, _ in running:
        if process.poll() is None:
            process.terminate()
    for process, code in running:
        assert process.wait(timeout=30) in (code, -9, -15), (tmp_path / "log").read_text()


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


def test_a_worker_with_another_secret_does_not_join(start, tmp_path):
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
            address = server.cluster()["E-0"]["address"]
            assert f"worker E-0 is ready at {address}\n" in server.tail()
            assert server.request("/health").status == 503
            server.wait(lambda: server.state()["unused"], what="PD is listed")
            [unused] = server.state()["unused"]
            assert (unused["id"], "TRIPTYCH_SECRET" in unused["why"]) == ("PD-0", True)
            server.wait(lambda: "worker 'PD-0' is not used. Its" in server.tail(), what="log")
        finally:
            other.terminate()


def test_a_process_that_cannot_listen_says_so(start, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        frontend = start("frontend", f"--port={taken.getsockname()[1]}", code=2)
        worker = start("worker", "--role=E", "--worker-host=192.0.2.1", code=2)
        frontend.wait(timeout=30)
        worker.wait(timeout=30)
    log = (tmp_path / "log").read_text()
    assert "the port is in use" in log
    assert "--worker-host" in log
    assert "Traceback" not in log


def test_each_says_when_it_is_ready_and_sighup_stops_it(start, tmp_path):
    port = free_port("127.0.0.1", 0)
    processes = [start("frontend", f"--port={port}"), start("worker", "--role=E")]
    server = TestServer(processes[0], port, str(tmp_path / "log"))
    server.wait(lambda: f"listening at http://127.0.0.1:{port}\n" in server.tail(), what="URL")
    server.wait(lambda: "worker E-0 is ready at 127.0.0.1:" in server.tail(), what="address")
    for process in processes:
        process.send_signal(signal.SIGHUP)
        assert process.wait(timeout=30) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_an_orderly_stop_looks_like_one(tmp_path, number):
    env = {"TMPDIR": str(tmp_path)}
    with serving("--engine=fake", "--pattern=E/PD", env=env) as server:
        assert [path.name[:13] for path in tmp_path.iterdir()] == ["triptych-run-"]
        server.wait(lambda: "ready after" in server.tail(), what="it says that it is ready")
        said = len(server.tail())
        server.process.send_signal(number)
        assert server.process.wait(timeout=30) == 0
        assert server.tail()[said:].splitlines() == [
            "  stopping: running requests may finish within 30 s (Ctrl-C again to stop at once)"
        ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "--pattern=D/P"], "E is missing"),
        (["serve", "/nowhere"], "not a checkpoint folder"),
        (["serve", "--engine=warp"], "engine 'warp' is unknown"),
        (["worker", "--role=E"], "--run-dir is not set"),
        (["serve", "--engine=fake", "--host=192.0.2.1"], "cannot listen"),
        (["serve", "--engine=fake", "--prompt-template=no slot"], "<prompt>"),
        (["serve", "--engine=fake", "--worker-host=192.0.2.1"], "--worker-host"),
        (["serve", "--engine=fake", "--run-dir=/proc/x"], "--run-dir"),
        (["worker", "--role=EPD", "--engine=fake", "--run-dir=/proc/x"], "--run-dir"),
    ],
)
def test_a_wrong_start_says_what_to_change(words, said):
    done = subprocess.run(
        [sys.executable, "-m", "triptych", *words], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
