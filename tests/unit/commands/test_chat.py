import io
import sys
import threading

import pytest

from support.answering import ANSWER, DONE, USAGE, answering, chunk
from support.terminals import CTRL_D, typed_terminal
from triptych.cli import main

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def server():
    with answering() as state:
        yield state


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b.png").write_bytes(PNG)
    (tmp_path / "s.wav").write_bytes(b"RIFF....WAVEfmt ")
    return tmp_path


@pytest.fixture
def chat(server, folder, monkeypatch):
    def run(*lines, words=()):
        data = "".join(f"{line}\n" for line in lines).encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        return main(["chat", "--url", server.url, *words])

    return run


def texts(body):
    return [
        message["content"]
        if isinstance(message["content"], str)
        else [part.get("text", part["type"]) for part in message["content"]]
        for message in body["messages"]
    ]


def test_a_conversation_is_sent_with_every_question(server, chat, capsys):
    assert chat("How many?", "", "Sure?", words=["--system=Be brief.", "--max-tokens=7"]) == 0
    out, err = capsys.readouterr()
    assert out == "Two circles.\nTwo circles.\n"
    assert err == "fetch 0.5  prefill 2.0  = 2.5 ms\n" * 2
    assert texts(server.bodies[1]) == ["Be brief.", ["How many?"], "Two circles.", ["Sure?"]]
    assert (server.bodies[1]["max_tokens"], server.bodies[1]["temperature"]) == (7, 0)


def test_files_are_attached_where_they_are_named(server, chat, capsys):
    assert chat("a\\ b.png How many?", "s.wav", "/attach 'a b.png'", "And now?", "Sure?") == 0
    assert texts(server.bodies[0]) == [["image_url", "How many?"]]
    assert texts(server.bodies[1])[-1] == ["audio_url", "image_url", "And now?"]
    assert texts(server.bodies[2])[-1] == ["Sure?"]
    err = capsys.readouterr().err
    assert err.count("attached image a b.png\n") == 2
    assert "attached audio s.wav\n" in err


def test_a_file_that_is_not_there_is_reported(server, chat, capsys):
    assert chat("none.png What?") == 0
    assert "no file none.png: it is sent as text" in capsys.readouterr().err
    assert texts(server.bodies[0]) == [["none.png What?"]]


def test_new_and_undo_forget(server, chat):
    assert chat("One", "Two", "/undo", "Three", "s.wav", "/new", "Four") == 0
    assert texts(server.bodies[2]) == [["One"], "Two circles.", ["Three"]]
    assert texts(server.bodies[3]) == [["Four"]]


def test_the_system_message_changes(server, chat):
    assert chat("/system Be brief.", "One", "/system", "Two") == 0
    assert [texts(body)[0] for body in server.bodies] == ["Be brief.", ["One"]]


def test_stages_are_shown_until_they_are_not(chat, capsys):
    assert chat("/stages", "One", "/stages", "Two") == 0
    told = capsys.readouterr().err.splitlines()
    figures = "fetch 0.5  prefill 2.0  = 2.5 ms"
    assert told == ["stage times are hidden", "stage times are shown", figures]


def test_it_is_saved_as_a_new_file_only(chat, folder, capsys):
    assert chat("a\\ b.png One", "/save talk.md", "/save s.wav", "/save") == 1
    assert (folder / "talk.md").read_text() == (
        "**you**\n\n[image a b.png]\nOne\n\n**stub**\n\nTwo circles.\n"
    )
    assert (folder / "s.wav").read_bytes().startswith(b"RIFF")
    err = capsys.readouterr().err
    assert "error: s.wav cannot be written: File exists\n" in err
    assert "error: name a new file: /save FILE\n" in err


def test_help_lists_every_command(chat, capsys):
    assert chat("/help", "/quit", "not asked") == 0
    out, err = capsys.readouterr()
    for name in ("attach", "new", "undo", "system", "save", "stages", "help", "quit"):
        assert f"  /{name} " in err
    assert out == ""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/nwe", "there is no command /nwe. Did you mean /new?"),
        ("/xyzzy 1", "there is no command /xyzzy. /help lists them."),
        ("/undo", "there is nothing to undo"),
        ("/attach", "name a file: /attach PATH"),
        ("/attach none.png", "none.png: no such file"),
        ("/attach https://example.com/x", "https://example.com/x: neither name nor content"),
    ],
)
def test_a_wrong_command_is_reported_and_the_chat_goes_on(server, chat, capsys, line, said):
    assert chat(line, "One") == 1
    out, err = capsys.readouterr()
    assert f"error: {said}" in err
    assert out == "Two circles.\n"
    assert texts(server.bodies[0]) == [["One"]]


def test_an_absolute_path_is_not_a_command(server, chat, folder):
    assert chat(f"{folder}/s.wav", "/not/a/command is text") == 0
    assert texts(server.bodies[0]) == [["audio_url", "/not/a/command is text"]]


def test_a_refused_question_is_forgotten_and_the_chat_goes_on(server, chat, capsys):
    refusals = iter([400])

    def refuse_once(_):
        server.status = next(refusals, 200)
        error = {
            "message": "Not\nthis.",
            "code": "invalid_media",
            "param": "messages[0].content[0]",
        }
        server.pieces = {"error": error} if server.status == 400 else ANSWER

    server.on_post = refuse_once
    assert chat("s.wav What?", "One") == 1
    out, err = capsys.readouterr()
    assert "error: s.wav: Not this. (invalid_media)\n" in err
    assert out == "Two circles.\n"
    assert texts(server.bodies[1]) == [["One"]]


def test_an_answer_that_breaks_off_is_forgotten(server, chat, capsys):
    server.pieces = [chunk("Two ")]
    assert chat("One", "Two") == 1
    out, err = capsys.readouterr()
    assert out == "Two \nTwo \n"
    assert err.count("error: ") == 2
    assert texts(server.bodies[1]) == [["Two"]]


def test_a_server_that_is_not_there_is_reported_before_any_question(folder, capsys):
    assert main(["chat", "--url=http://127.0.0.1:1"]) == 1
    assert "no server answers at http://127.0.0.1:1" in capsys.readouterr().err


def test_a_model_is_refused_where_a_server_is_named(server, folder, capsys):
    assert main(["chat", "./model", "--url", server.url]) == 2
    assert "--url names a server; leave out --model, or --url" in capsys.readouterr().err


@pytest.fixture
def terminal(server, folder):
    argv = [sys.executable, "-m", "triptych", "chat", "--url", server.url]
    with typed_terminal(argv, XDG_STATE_HOME=str(folder / "state")) as typed:
        typed.expect("/help lists the commands")
        typed.expect("> ")
        yield typed


def test_a_chat_at_a_terminal(server, folder, terminal):
    """Ctrl-C stops an answer and keeps what was said; at the prompt it ends nothing. A paste of
    several lines and lines that end in a backslash are one question. All are in the history."""
    going_on = threading.Event()

    def slowly():
        yield chunk("Two ")
        going_on.wait(60)
        yield from (chunk("circles.", "stop"), USAGE, DONE)

    server.pieces = slowly()
    terminal.type("One\n")
    terminal.expect("Two ")
    terminal.interrupt("stopped; the answer so far is kept")
    terminal.expect("> ")
    going_on.set()
    server.pieces = ANSWER
    terminal.type("half")
    terminal.expect("half")
    terminal.interrupt("Ctrl-D or /quit ends the chat.")
    terminal.expect("> ")
    terminal.type("Two\\\nlines\n")
    terminal.expect("Two circles.")
    terminal.expect("> ")
    terminal.type("\x1b[200~pasted\nlines\x1b[201~\n")
    terminal.expect("Two circles.")
    terminal.expect("> ")
    terminal.type("/un\t\n")  # completed
    terminal.expect("are forgotten")
    terminal.expect("> ")
    terminal.type("a\t What?\n")
    terminal.expect("attached image a b.png")
    terminal.expect("Two circles.")
    terminal.expect("> ")
    terminal.type(CTRL_D)
    assert terminal.wait() == 0
    asked = [texts(body)[-1] for body in server.bodies]
    assert asked == [["One"], ["Two\nlines"], ["pasted\nlines"], ["image_url", "What?"]]
    assert texts(server.bodies[-1])[:-1] == [["One"], "Two ", ["Two\nlines"], "Two circles."]
    [kept] = folder.glob("state/triptych/*")
    assert kept.read_text().splitlines() == [
        '"One"', '"Two\\nlines"', '"pasted\\nlines"', '"/undo"', '"a\\\\ b.png What?"',
    ]  # fmt: skip


def test_control_characters_of_an_answer_do_not_reach_the_terminal(server, terminal):
    server.pieces = [chunk("Two \x1b]0;title\x07", "stop"), DONE]
    terminal.type("One\n")
    terminal.expect("Two \ufffd]0;title\ufffd")
