import base64
import errno
import socket
import ssl
import threading
from contextlib import contextmanager

import pytest

from support.answering import ANSWER, DONE, answering, chunk, event
from support.certificates import Authority
from triptych.cli import main
from triptych.commands import client as client_module
from triptych.commands.client import Client, MediaInput, read_timing
from triptych.errors import InvalidConfig, InvalidMedia, ServiceError, StartError


@pytest.fixture
def server():
    with answering() as state:
        yield state


def test_an_answer_is_streamed_and_returned_whole(server):
    pieces = []
    heard = Client(server.url).ask("How many?", [], on_text=pieces.append)
    assert pieces == ["Two ", "circles."]
    assert (heard.answer, heard.model, heard.finish) == ("Two circles.", "stub", "stop")
    assert heard.usage == {"prompt_tokens": 5, "completion_tokens": 2}
    assert heard.timings == {"fetch": 0.5, "prefill": 2.0}


def test_what_is_asked(server):
    part = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    Client(server.url + "/v1/").ask("How many?", [part], 7)
    [body] = server.bodies
    [message] = body["messages"]
    assert message["content"] == [part, {"type": "text", "text": "How many?"}]
    assert (body["temperature"], body["max_tokens"], body["model"]) == (0, 7, "stub")
    Client(server.url).ask("How many?", [])
    assert "max_tokens" not in server.bodies[1]


def test_the_key_is_sent_where_there_is_one(server):
    Client(server.url, "sesame").model()
    Client(server.url).model()
    assert server.keys == ["Bearer sesame", None]


def test_files_are_sent_and_urls_are_passed_on(tmp_path):
    (tmp_path / "a.png").write_bytes(b"picture")
    part = MediaInput("image", str(tmp_path / "a.png")).part()
    data = base64.b64encode(b"picture").decode()
    assert part == {"type": "image_url", "image_url": {"url": f"data:;base64,{data}"}}
    for url in ("https://a/b.wav", "HTTP://a/b", "file:///b.wav", "media://x", "data:,"):
        assert MediaInput("audio", url).part() == {"type": "audio_url", "audio_url": {"url": url}}


@pytest.mark.parametrize(("name", "said"), [("none.png", "no such file"), ("", "not a file")])
def test_a_path_that_is_not_a_file_is_refused_by_name(tmp_path, name, said):
    with pytest.raises(StartError, match=rf"--video .*{name}: {said}"):
        MediaInput("video", str(tmp_path / name)).part()


def test_an_unknown_scheme_is_refused_unless_there_is_such_a_file(tmp_path, monkeypatch):
    with pytest.raises(StartError, match="--image ftp://x/y: unknown scheme"):
        MediaInput("image", "ftp://x/y").part()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ftp:").mkdir()
    (tmp_path / "ftp:" / "y").write_bytes(b"picture")
    assert MediaInput("image", "ftp://y").part()["image_url"]["url"].startswith("data:")
    with pytest.raises(StartError, match="no such file"):
        MediaInput("image", "x:y.png").part()


def test_a_long_url_has_a_short_name():
    assert MediaInput("image", "data:" + "x" * 1000).name == f"--image data:{'x' * 95}..."
    assert MediaInput("audio", "a.wav").name == "--audio a.wav"


def test_a_refusal_is_the_servers_own(server):
    server.status = 400
    error = {"message": "No picture.", "code": "invalid_media", "param": "messages[0].content[0]"}
    server.pieces = {"error": error}
    with pytest.raises(InvalidMedia, match="No picture") as raised:
        Client(server.url).ask("How many?", [])
    assert (raised.value.status, raised.value.code) == (400, "invalid_media")


def test_an_error_in_a_stream_is_raised(server):
    server.pieces = [chunk("Two "), event({"error": {"message": "Lost.", "code": "worker_lost"}})]
    with pytest.raises(ServiceError, match="Lost") as raised:
        Client(server.url).ask("How many?", [])
    assert raised.value.code == "worker_lost"


@pytest.mark.parametrize("cut", [True, False])
def test_an_answer_without_an_end_is_an_error(server, cut):
    server.pieces, server.cut = ANSWER[:-1], cut
    with pytest.raises(ServiceError, match=r"closed the connection"):
        Client(server.url).ask("How many?", [])


@pytest.mark.parametrize("models", [b"<html>", {"error": 1}, {"data": []}, b"\xff"])
def test_a_server_that_is_not_triptych_or_has_no_model_is_refused(server, models):
    server.models = models
    with pytest.raises(ServiceError, match=r"is not a Triptych server|serves no model"):
        Client(server.url).ask("How many?", [])


def test_pieces_may_lie_across_lines_that_come_in_parts(server):
    whole = b"".join(ANSWER)
    server.pieces = [whole[at : at + 7] for at in range(0, len(whole), 7)]
    assert Client(server.url).ask("How many?", []).answer == "Two circles."


def test_without_timing_there_is_none(server):
    server.pieces = [chunk("Two", "length"), DONE]
    heard = Client(server.url).ask("How many?", [])
    assert (heard.timings, heard.usage, heard.finish) == ({}, {}, "length")


def test_an_error_of_the_listener_is_not_the_servers(server):
    def hear(text):
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        Client(server.url).ask("How many?", [], on_text=hear)


@pytest.mark.parametrize("status", [200, 503])
@pytest.mark.parametrize("told", [b"", b"<html>", b"\xff", {"status": "up"}, {"ok": True}, []])
def test_another_program_on_the_port_is_no_server_and_gets_no_key(server, status, told):
    server.health, server.told = status, told
    assert not Client(server.url, "sesame").ready()
    assert server.keys == [None]


@contextmanager
def saying(words, leave=True):
    """A program that says this to every connection, and closes it."""

    def speak():
        peer, _ = listener.accept()
        with peer:
            peer.sendall(words)
            if leave:
                peer.shutdown(socket.SHUT_WR)
            while peer.recv(1000):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=speak)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize("words", [b"SSH-2.0-x\r\n", b"-ERR what?\r\n", b"x" * 70000, b""])
def test_a_port_without_http_is_not_a_server(words):
    with saying(words) as url, pytest.raises(ServiceError, match="not answer plain HTTP") as raised:
        Client(url).ready()
    assert f"give --url https{url[4:]} or its --tls-cert" in str(raised.value)
    with (
        saying(words) as url,
        pytest.raises(ServiceError, match=r"does not speak HTTP|closed the connection"),
    ):
        Client(url).model()


def test_who_is_silent_may_be_a_server_that_hangs(monkeypatch):
    monkeypatch.setattr(client_module, "CONNECT_SECONDS", 0.05)
    with saying(b"", leave=False) as url, pytest.raises(ServiceError, match="does not answer"):
        Client(url).ready()


def test_ready_absent_and_not_yet_ready_differ(server):
    assert Client(server.url).ready()
    server.health, server.told = 503, {"status": "draining"}
    with pytest.raises(ServiceError, match="not ready: draining"):
        Client(server.url).ready()
    server.health, server.told = 404, b"<html>somebody else's</html>"
    assert not Client(server.url).ready()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert not Client(url).ready()
        with pytest.raises(ServiceError, match="no server answers at"):
            Client(url).model()


def test_a_refusal_that_comes_before_all_is_sent_is_read():
    """As of a body that is too large: the server answers, closes, and reads no further."""
    told = b'{"error": {"message": "Too large.", "code": "payload_too_large"}}'
    head = b"HTTP/1.1 413 X\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(told)

    def refuse():
        peer, _ = listener.accept()
        with peer:
            peer.recv(1000)
            peer.sendall(head + told)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=refuse)
        thread.start()
        client = Client(f"http://127.0.0.1:{listener.getsockname()[1]}")
        client.model = lambda: "stub"
        with pytest.raises(Exception, match="Too large") as raised:
            client.ask("x" * (8 << 20), [])
        thread.join()
    assert raised.value.code == "payload_too_large"


@pytest.mark.parametrize("url", ["ftp://a", "127.0.0.1:8000", "http://", "http://a:b", ""])
def test_text_that_is_not_a_url_is_refused(url):
    with pytest.raises(InvalidConfig, match="not a server's URL"):
        Client(url)


def test_timing_is_read():
    assert read_timing("encode;dur=12.5, prefill;dur=4") == {"encode": 12.5, "prefill": 4.0}
    assert read_timing("cache;desc=hit, x") == {}


# --- https


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@contextmanager
def answering_with_tls(cert, key):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with answering(context) as state:
        yield state


def test_the_servers_own_certificate_is_known_by_its_file(authority):
    """Whatever name it is for, and whoever has signed it; another certificate is refused."""
    cert, key = authority.sign("chat.example.com")
    other, _ = authority.sign("other")
    with answering_with_tls(cert, key) as state:
        assert Client(state.url, "sesame", str(cert)).ready()
        assert Client(state.url, "sesame", str(cert)).ask("How many?", []).answer == "Two circles."
        assert not Client(state.url, "sesame", str(other)).ready()
        with pytest.raises(ServiceError, match="certificate is not the one in"):
            Client(state.url, "sesame", str(other)).model()
        assert state.keys == [None, "Bearer sesame"]  # none went to who has another certificate


def test_a_certificate_that_nobody_trusts_is_named_with_what_to_do(authority, capsys, monkeypatch):
    """Without a file an authority of the system must have signed it, for this host."""
    cert, key = authority.sign("server")
    with answering_with_tls(cert, key) as state:
        assert main(["ask", "How many?", "--url", state.url]) == 1
        said = capsys.readouterr().err
        assert said.startswith(f"triptych: the certificate of {state.url} is not trusted: ")
        assert "Set SSL_CERT_FILE to its PEM file. (service_unavailable)" in said
        assert state.keys == []
    (authority.folder / "names").write_text("subjectAltName=DNS:elsewhere")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    with (
        answering_with_tls(*authority.sign("elsewhere")) as state,
        pytest.raises(ServiceError, match=r"is not trusted: .*mismatch") as raised,
    ):
        Client(state.url).model()
    assert "SSL_CERT_FILE" not in str(raised.value)
