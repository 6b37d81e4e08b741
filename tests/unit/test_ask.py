import json
import os
import sys

import pytest

from support.answering import DONE, TIMING, USAGE, answering, chunk
from triptych.cli import EXIT_UNREAD, _parser, main


@pytest.fixture
def server():
    with answering() as state:
        yield state


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(b"picture")
    return str(path)


def test_media_keep_the_order_of_their_flags():
    words = ["ask", "Which?", "--image=a", "--audio=b", "--image", "c", "--video=d"]
    args = _parser().parse_args(words)
    assert args.media == [("image", "a"), ("audio", "b"), ("image", "c"), ("video", "d")]
    assert _parser().parse_args(["ask", "Which?"]).media == []


def test_the_answer_goes_to_stdout_and_the_times_to_stderr(server, picture, capsys):
    assert main(["ask", "How many?", "--image", picture, "--url", server.url]) == 0
    out, err = capsys.readouterr()
    assert out == "Two circles.\n"
    assert "fetch 0.5  prefill 2.0" in err
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
    assert server.keys == [None, "Bearer sesame"]  # none for whoever may listen on the port


@pytest.mark.parametrize(("finish", "cut"), [("length", True), ("stop", False)])
def test_an_answer_that_was_cut_off_is_told(server, capsys, finish, cut):
    server.pieces = [chunk("Two", finish), USAGE, TIMING, DONE]
    assert main(["ask", "How many?", "--url", server.url]) == 0
    out, err = capsys.readouterr()
    assert out == "Two\n"
    assert ("cut off after 2 tokens" in err) is cut
    assert main(["ask", "How many?", "--url", server.url, "--json"]) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out)["finish"], err) == (finish, "")


@pytest.mark.parametrize("words", [["--json"], []])
def test_a_full_disk_is_told_and_is_not_the_servers_fault(server, capsys, monkeypatch, words):
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
        assert main([*words, *where]) == EXIT_UNREAD
        unread.flush()
    assert capsys.readouterr().err == ""


def test_a_refusal_is_told_in_the_servers_words_and_by_the_exit_code(server, picture, capsys):
    server.status = 400
    server.pieces = {"error": {"message": "No picture.", "code": "invalid_media"}}
    assert main(["ask", "How many?", "--image", picture, "--url", server.url]) == 1
    assert capsys.readouterr().err == "triptych: No picture. (invalid_media)\n"


def test_a_server_that_is_gone_is_told(capsys):
    assert main(["ask", "How many?", "--url=http://127.0.0.1:1"]) == 1
    assert "no server answers at http://127.0.0.1:1" in capsys.readouterr().err


def test_no_server_is_asked_about_a_file_that_is_not_there(server, capsys):
    assert main(["ask", "How many?", "--audio=/not/there.wav", "--url", server.url]) == 2
    assert "--audio /not/there.wav: no such file" in capsys.readouterr().err
    assert server.bodies == []


@pytest.mark.parametrize("words", [[], ["Hi", "--max-tokens=0"], ["Hi", "--max-tokens=x"]])
def test_what_cannot_be_meant_is_refused(words, capsys):
    with pytest.raises(SystemExit) as left:
        main(["ask", *words])
    assert left.value.code == 2
    assert "See `triptych ask" in capsys.readouterr().err
