"""``triptych ask`` as a user types it, to a server that runs and to one that it starts."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support import clips, pictures
from support.servers import serving
from triptych.checkpoint import packaged_folder
from triptych.host import free_port

KEY = "sesame"


@pytest.fixture(scope="module")
def server():
    flags = ["--pattern=E/P/D", "--enable-multimodal", "--engine=fake", "--fake-decode"]
    with serving(
        str(packaged_folder("qwen_omni")), *flags, env={"TRIPTYCH_API_KEY": KEY}
    ) as running:
        yield running


@pytest.fixture
def files(tmp_path):
    (tmp_path / "a.png").write_bytes(pictures.encoded(pictures.draw(1, 84, 56)))
    (tmp_path / "b.mp4").write_bytes(clips.video(1))
    (tmp_path / "c.wav").write_bytes(clips.sound(1))
    (tmp_path / "d.png").write_bytes(b"no picture")
    return tmp_path


def ask(*words, key=KEY, cwd=None):
    env = os.environ | {"TRIPTYCH_API_KEY": key}
    argv = [sys.executable, "-m", "triptych", "ask", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, env=env, cwd=cwd)


def test_a_running_server_is_asked_about_files_of_every_kind(server, files):
    media = ["--audio=c.wav", "--image=a.png", "--video=b.mp4"]
    done = ask("What?", *media, "--max-tokens=4", "--json", f"--port={server.port}", cwd=files)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["answer"]
    assert told["usage"]["completion_tokens"] == 4
    expected = {"fetch", "prepare", "encode", "transfer", "queue", "prefill", "decode"}
    assert told["timings"].keys() == expected
    plain = ask("What?", *media, "--max-tokens=4", "--url", server.url, cwd=files)
    assert plain.stdout == told["answer"] + "\n"
    for stage in ("fetch", "encode", "transfer", "prefill", "decode"):
        assert f"{stage} " in plain.stderr
    turned = ask("What?", *reversed(media), "--max-tokens=4", "--url", server.url, cwd=files)
    assert turned.stdout != plain.stdout  # media stand in the order of their flags


def test_keys_are_in_no_command_line_and_in_no_workers_environment(server):
    """Proved with ``os.environ`` as the environment of all."""
    keys = (KEY.encode(), server.admin_key.encode())
    for name, pid in server.pids().items():
        process = Path(f"/proc/{pid}")
        assert not any(key in (process / "cmdline").read_bytes() for key in keys), name
        given = (process / "environ").read_bytes()
        assert [key in given for key in keys] == [name == "frontend"] * 2, name


@pytest.mark.parametrize(
    ("words", "key", "said"),
    [
        (["--image=a.png", "--image=d.png"], KEY, "(invalid_media)"),
        (["--image=file:///etc/hostname"], KEY, "(local_media_forbidden)"),
        ([], "other", "(invalid_api_key)"),
    ],
)
def test_a_refusal_of_the_server_is_shown_with_its_code(server, files, words, key, said):
    done = ask("What?", *words, "--url", server.url, key=key, cwd=files)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.rstrip().endswith(said)
    assert ("triptych: --image d.png: " in done.stderr) == ("--image=d.png" in words)


def test_without_a_server_one_is_started_and_stopped(files):
    port = free_port("127.0.0.1", 0)
    words = ["--image=a.png", "--engine=fake", "--max-tokens=5", f"--port={port}"]
    done = ask("What?", *words, cwd=files)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert f"no server at http://127.0.0.1:{port}: starting one" in done.stderr
    assert "answers are invented" in done.stderr
    assert "ready" in done.stderr


def test_a_server_that_cannot_start_is_refused_before_it_does():
    done = ask("What?", "--model=/not/there", f"--port={free_port('127.0.0.1', 0)}")
    assert done.returncode == 2
    assert "no config.json" in done.stderr


def test_the_server_that_was_started_ends_with_us():
    argv = [sys.executable, "-m", "triptych", "ask", "What?", "--engine=fake"]
    argv.append(f"--port={free_port('127.0.0.1', 0)}")
    with subprocess.Popen(argv, stderr=subprocess.PIPE) as process:
        [child] = wait_for(lambda: children(process.pid))
        wait_for(lambda: children(child))  # it has processes of its own by now
        assert os.getpgid(int(child)) != os.getpgid(process.pid)  # Ctrl-C does not reach it
        os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: not os.path.exists(f"/proc/{child}"))


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found
