"""``triptych chat`` and files of ``ask`` as a user types them, to the model that ships."""

import os
import subprocess
import sys

import pytest

from support.servers import serving
from support.terminals import CTRL_D, typed_terminal
from triptych.commands.demo import EXAMPLES

SOUND, SPOKEN = str(EXAMPLES / "seven.wav"), "What number is spoken?"
SEEN = "What colour is the triangle?"


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


def triptych(*words, text=""):
    argv = [sys.executable, "-m", "triptych", *words]
    return subprocess.run(argv, input=text, capture_output=True, text=True, timeout=120)


def test_a_chat_about_files(server, tmp_path):
    picture = tmp_path / "the picture.png"
    picture.write_bytes((EXAMPLES / "circles.png").read_bytes())
    argv = [sys.executable, "-m", "triptych", "chat", f"--port={server.port}"]
    with typed_terminal(argv, XDG_STATE_HOME=str(tmp_path)) as terminal:
        terminal.expect("chat with triptych-demo at ")
        terminal.expect("> ")
        escaped = str(picture).replace(" ", "\\ ")
        terminal.type(f"{escaped} {SEEN}\n")
        terminal.expect(f"attached image {picture}")
        answer = terminal.expect(" ms")
        assert "brown" in answer
        assert "encode " in answer
        terminal.expect("> ")
        terminal.type("/new\n")
        terminal.expect("a new conversation")
        terminal.expect("> ")
        terminal.type(f"{SEEN}\n")
        assert "encode " not in terminal.expect(" ms")  # the picture is forgotten
        terminal.expect("> ")
        terminal.type(f"/attach {SOUND}\n")
        terminal.expect("attached audio ")
        terminal.expect("> ")
        terminal.type(f"{SPOKEN}\n")
        assert "seven" in terminal.expect(" ms")
        terminal.expect("> ")  # before it, Ctrl-D would be lost
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    [kept] = tmp_path.glob("triptych/chat_history")
    assert os.stat(kept).st_mode & 0o777 == 0o600


def test_a_chat_from_a_pipe(server):
    done = triptych(
        "chat",
        "--no-history",
        f"--url={server.url}",
        text=f"'{SOUND}' {SPOKEN}\n/nwe\n/stages\n/undo\n",
    )
    assert done.returncode == 1  # one of the commands is wrong
    assert "seven" in done.stdout
    assert done.stdout.count("\n") == 1
    assert "error: there is no command /nwe. Did you mean /new?" in done.stderr
    assert "error: there is nothing to undo" not in done.stderr


def test_a_question_on_stdin_about_a_file_without_a_flag(server):
    done = triptych("ask", SOUND, f"--url={server.url}", text=SPOKEN)
    assert (done.returncode, "seven" in done.stdout) == (0, True), done.stderr
    both = triptych("ask", SPOKEN, SOUND, f"--url={server.url}")
    assert both.stdout == done.stdout
