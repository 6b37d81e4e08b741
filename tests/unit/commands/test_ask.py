import contextlib
import io
import json
import os
import ssl
import sys
from unittest.mock import Mock

import pytest

from support.answering import DONE, TIMING, USAGE, answering, chunk
from support.certificates import Authority
from triptych.checkpoint import packaged_folder
from triptych.cli import EXIT_BROKEN_PIPE, _parser, main
from triptych.commands import temporary_server
from triptych.commands.client import Client
from triptych.commands.launch import DEMO


@pytest.fixture
def server():
    with answering() as state:
        yield state


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(b"picture")
    return str(path)


def test_media_keep_the_order_of_the_command_line():
    words = ["--image=a", "Which?", "e.png", "--max-tokens", "7", "--image", "c", "--video=d", "f"]
    args = _parser().parse_args(["ask", *words, "--json", "--", "--g"])
    assert args.media == [
        ("image", "a"),
        (None, "Which?"),
        (None, "e.png"),
        ("image", "c"),
        ("video", "d"),
        (None, "f"),
        (None, "--g"),
    ]
    assert (args.max_tokens, args.json) == (7, True)
    assert _parser().parse_args(["ask"]).media == []


def test_files_without_a_flag_are_what_they_contain(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"\x89PNG\r\n")
    (tmp_path / "b.wav").write_bytes(b"sound")
    words = ["a.bin", "--image=b.wav", "b.wav", "https://example.com/c.mp4?size=2"]
    assert main(["ask", "Which?", *words, "--url", server.url]) == 0
    content = server.bodies[0]["messages"][0]["content"]
    kinds = ["image_url", "image_url", "audio_url", "video_url", "text"]
    assert [part["type"] for part in content] == kinds
    assert content[-1]["text"] == "Which?"


def test_system_and_temperature_are_sent(server):
    words = ["--system=Be brief.", "--temperature=0.5", "--url", server.url]
    assert main(["ask", "Hi", *words]) == 0
    [body] = server.bodies
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert body["temperature"] == 0.5
    assert main(["ask", "Hi", "--url", server.url]) == 0
    assert (len(server.bodies[1]["messages"]), server.bodies[1]["temperature"]) == (1, 0)


def piped(monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.mark.parametrize("words", [[], ["-"], ["a.png"], ["-", "a.png"], ["a.png", "-"]])
def test_the_question_comes_from_stdin(server, picture, monkeypatch, words):
    monkeypatch.chdir(os.path.dirname(picture))
    piped(monkeypatch, "Wie viele Größen?\n".encode())
    code = main(["ask", *words, "--url", server.url])
    if words == ["a.png", "-"]:  # the text stands first
        assert (code, server.bodies) == (2, [])
        return
    assert code == 0
    *media, text = server.bodies[0]["messages"][0]["content"]
    assert text["text"] == "Wie viele Größen?\n"
    assert len(media) == ("a.png" in words)


def test_a_given_question_leaves_stdin_alone(server, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["ask", "How many?", "--url", server.url]) == 0


@pytest.mark.parametrize(
    ("words", "data", "said"),
    [
        ([], b"", "the question is missing"),
        (["-"], b" \n", "the question is missing"),
        ([""], b"text", "the question is missing"),
        ([" \n"], b"text", "the question is missing"),
        (["-"], b"\xff", "is not UTF-8 text. Stdin gives only the question"),
        (["What?", "-"], b"\x89PNG", "-: stdin gives only the question"),
        (["What?", "--image=-"], b"\x89PNG", "--image -: stdin gives only the question"),
        (["-"], b"x" * (8 << 20) + b"y", "more than 8 MiB"),
        (["What?", "none.png"], b"", "none.png: no such file"),
        (["What?", "what.is"], b"", "what.is: no such file"),
        (["What?", __file__], b"", "neither name nor content"),
    ],
)
def test_what_cannot_be_asked_is_refused(server, monkeypatch, capsys, words, data, said):
    piped(monkeypatch, data)
    assert main(["ask", *words, "--url", server.url]) == 2
    assert said in capsys.readouterr().err
    assert server.bodies == []


@pytest.mark.parametrize("first", ["a.png", "none.png"])
def test_a_question_after_its_file_is_told_where_it_belongs(picture, monkeypatch, capsys, first):
    monkeypatch.chdir(os.path.dirname(picture))
    assert main(["ask", first, "How many?"]) == 2
    assert capsys.readouterr().err == (
        "triptych: How many?: no such file. The question comes first: triptych ask QUESTION FILE "
        "...\n"
    )
    assert main(["ask", "What is in none.png", "what.is"]) == 2
    assert capsys.readouterr().err == "triptych: what.is: no such file\n"


def test_a_file_without_a_question_is_not_the_question(picture, monkeypatch, capsys):
    """At a terminal, where nobody would type it."""
    monkeypatch.setattr(sys, "stdin", Mock(isatty=lambda: True))
    assert main(["ask", picture]) == 2
    assert "the question is missing" in capsys.readouterr().err


def test_the_answer_goes_to_stdout_and_the_times_to_stderr(server, picture, capsys):
    assert main(["ask", "How many?", "--image", picture, "--url", server.url]) == 0
    out, err = capsys.readouterr()
    assert out == "Two circles.\n"
    model, drawn, figures = err.splitlines()
    assert model == f"answered by stub at {server.url}"
    assert drawn.endswith("p 2.5 ms")
    assert figures == "fetch (f) 0.5  prefill (p) 2.0"
    kinds = [part["type"] for part in server.bodies[0]["messages"][0]["content"]]
    assert kinds == ["image_url", "text"]


def test_json_is_one_line_with_everything(server, capsys):
    assert main(["ask", "How many?", "--url", server.url, "--json", "--max-tokens=3"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    assert told == {
        "answer": "Two circles.",
        "model": "stub",
        "finish": "stop",
        "usage": {"prompt_tokens": 5, "completion_tokens": 2},
        "timings": {"fetch": 0.5, "prefill": 2.0},
    }
    assert server.bodies[0]["max_tokens"] == 3


def test_the_server_of_the_settings_is_asked_if_it_is_there(server, capsys, monkeypatch):
    monkeypatch.setenv("TRIPTYCH_API_KEY", "sesame,street")
    port = server.url.rpartition(":")[2]
    assert main(["ask", "How many?", f"--port={port}"]) == 0
    assert capsys.readouterr().out == "Two circles.\n"
    assert server.keys == [None, "Bearer sesame"]  # none for a program that happens to listen there


@pytest.mark.parametrize(("finish", "cut"), [("length", True), ("stop", False)])
def test_an_answer_that_was_cut_off_is_reported(server, capsys, finish, cut):
    server.pieces = [chunk("Two", finish), USAGE, TIMING, DONE]
    assert main(["ask", "How many?", "--url", server.url]) == 0
    out, err = capsys.readouterr()
    assert out == "Two\n"
    assert ("cut off after 2 tokens" in err) is cut
    assert main(["ask", "How many?", "--url", server.url, "--json"]) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out)["finish"], err) == (finish, "")


@pytest.mark.parametrize("words", [["--json"], []])
def test_a_full_disk_is_reported_as_local(server, capsys, monkeypatch, words):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["ask", "How many?", "--url", server.url, *words]) == 1
        full.flush()  # as at the exit: nothing is left to fail
    said = "triptych: stdout cannot be written to: No space left on device (output_failed)\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    "words", [["ask", "How many?", "--json"], ["ask", "How many?"], ["demo", "--engine=fake"], []]
)
def test_a_reader_who_leaves_early_ends_it_quietly(server, capsys, monkeypatch, words):
    theirs, ours = os.pipe()
    os.close(theirs)
    where = ["--url", server.url] if "ask" in words else []
    with os.fdopen(ours, "w") as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        assert main([*words, *where]) == EXIT_BROKEN_PIPE
        unread.flush()
    assert capsys.readouterr().err == ""


def test_a_refusal_shows_the_servers_message_and_sets_the_exit_code(server, picture, capsys):
    server.status = 400
    server.pieces = {"error": {"message": "No picture.", "code": "invalid_media"}}
    assert main(["ask", "How many?", "--image", picture, "--url", server.url]) == 1
    assert capsys.readouterr().err == "triptych: No picture. (invalid_media)\n"


def test_a_missing_key_is_reported_with_where_to_set_it(server, capsys):
    server.status = 401
    server.pieces = {"error": {"message": "The API key is missing.", "code": "invalid_api_key"}}
    assert main(["ask", "How many?", "--url", server.url]) == 1
    said = "The API key is missing. Set TRIPTYCH_API_KEY, or give --api-key-file."
    assert capsys.readouterr().err == f"triptych: {said} (invalid_api_key)\n"


@pytest.mark.parametrize(
    ("place", "named"),
    [
        ("messages[0].content[0]", "--image a.png: "),
        ("messages[0].content[1].video_url.url", "--video https://example.com/b.mp4: "),
        ("messages[0].content[2]", ""),  # the question
        ("messages[1].content[0]", ""),
        ("messages", ""),
    ],
)
def test_the_medium_that_the_server_refuses_is_named(
    server, picture, capsys, monkeypatch, place, named
):
    monkeypatch.chdir(os.path.dirname(picture))
    server.status = 400
    error = {"message": "Not this.", "code": "invalid_media", "param": place}
    server.pieces = {"error": error}
    media = ["--image=a.png", "--video=https://example.com/b.mp4"]
    assert main(["ask", "How many?", *media, "--url", server.url]) == 1
    assert capsys.readouterr().err == f"triptych: {named}Not this. (invalid_media)\n"


def test_a_server_that_is_gone_is_reported_with_what_to_do(capsys):
    assert main(["ask", "How many?", "--url=http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == (
        "triptych: no server answers at http://127.0.0.1:1: Connection refused. Start one with "
        "`triptych serve`, or leave out --url. (service_unavailable)\n"
    )


def test_a_port_with_tls_gets_no_second_server(tmp_path, capsys, monkeypatch):
    """Which would answer instead of the one that was meant."""
    monkeypatch.setattr(temporary_server, "temporary_server", Mock(side_effect=AssertionError))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*Authority(tmp_path).sign("server"))
    with answering(context) as state:
        assert main(["ask", "How many?", f"--port={state.url.rpartition(':')[2]}"]) == 1
    assert f"give --url {state.url} or its --tls-cert" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--model=/not/there"], "--model"),
        (["--no-torch-prefix-cache", "--pattern=E/P/D"], "--pattern and --torch-prefix-cache"),
        (["--engine=fake", "--device=cpu", "--dtype=auto"], "--engine, --device and --dtype"),
    ],
)
def test_settings_that_a_running_server_cannot_apply_are_refused(server, capsys, words, named):
    port = server.url.rpartition(":")[2]
    assert main(["ask", "How many?", *words, f"--port={port}"]) == 2
    assert capsys.readouterr().err == (
        f"triptych: a server runs at {server.url}; leave out {named}, or give another --port\n"
    )
    assert main(["ask", "How many?", *words, "--url", server.url]) == 2
    assert f"--url names a server; leave out {named}, or --url" in capsys.readouterr().err
    assert server.bodies == []


def test_settings_of_a_file_may_be_those_of_the_server_that_runs(server, capsys, tmp_path):
    (tmp_path / "t.toml").write_text(
        f'model = "/not/there"\nport = {server.url.rpartition(":")[2]}'
    )
    (tmp_path / "key").write_text("sesame")
    key = f"--api-key-file={tmp_path / 'key'}"
    words = ["--host=127.0.0.1", key, f"--config={tmp_path / 't.toml'}"]
    assert main(["ask", "How many?", *words]) == 0
    assert capsys.readouterr().out == "Two circles.\n"


@pytest.mark.parametrize(
    ("words", "model", "card"),
    [
        ([], "triptych-demo  (small, ", True),
        (["--engine=fake"], "qwen  (engine fake: ", False),
        (
            ["--engine=fake", f"--model={packaged_folder(DEMO)}"],
            "triptych-demo  (engine fake: ",
            False,
        ),
        (
            ["--engine=fake", f"--model={packaged_folder('qwen_omni')}"],
            "qwen_omni  (engine fake",
            False,
        ),
    ],
)
def test_a_server_of_our_own_has_its_model_introduced(
    server, capsys, monkeypatch, words, model, card
):
    @contextlib.contextmanager
    def fake_server(config, say):
        assert config.enable_multimodal
        yield Client(server.url)

    monkeypatch.setattr(temporary_server, "temporary_server", fake_server)
    assert main(["ask", "How many?", "--port=1", *words]) == 0
    out, err = capsys.readouterr()
    assert out == "Two circles.\n"
    assert err.startswith(
        f"no server at http://127.0.0.1:1: starting one for this question\nmodel     {model}"
    )
    assert ("'What it can'" in err) is card
    assert "answered by" not in err  # it was said before


def test_a_closed_stdout_is_reported_before_any_request(server, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["ask", "How many?", "--url", server.url]) == 1
    assert "stdout cannot be written to: it is closed" in capsys.readouterr().err
    assert server.bodies == []


def test_no_server_is_asked_about_a_file_that_is_not_there(server, capsys):
    assert main(["ask", "How many?", "--audio=/not/there.wav", "--url", server.url]) == 2
    assert "--audio /not/there.wav: no such file" in capsys.readouterr().err
    assert server.bodies == []


@pytest.mark.parametrize(
    "words",
    [
        ["Hi", "--max-tokens=0"],
        ["Hi", "--max-tokens=x"],
        ["Hi", "--temperature=-1"],
        ["Hi", "--temperature=nan"],
        ["Hi", "--temperature"],
        ["Hi", "--nonsense"],
        ["Hi", "--enable-multimodal"],  # always so
    ],
)
def test_settings_without_a_meaning_are_refused(words, capsys):
    with pytest.raises(SystemExit) as left:
        main(["ask", *words])
    assert left.value.code == 2
    assert "See `triptych ask --help`" in capsys.readouterr().err
