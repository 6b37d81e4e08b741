"""Media by URL, path and upload through real servers: what is taken, what is refused, who is asked.

The fake engine's answers follow from the bytes of the media, so equal answers mean equal bytes.
"""

import http.server
import itertools
import json
import threading
import time
import urllib.request

import pytest

from support.pictures import draw, encoded
from support.servers import image_part, serving, text_part

PICTURE = encoded(draw(1))
OTHER = encoded(draw(2))
CAP = 1 << 20


class Answering(http.server.BaseHTTPRequestHandler):
    """Pictures, and everything that a media server should not do."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.asked.append(self.path)
        getattr(self, self.path.strip("/").partition(".")[0])()

    def log_message(self, *what):
        pass

    def say(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def picture(self):
        self.say(200, PICTURE, Cache_Control="max-age=60")

    def moved(self):
        self.say(302, Location="/picture.png")

    def inside(self):
        self.say(302, Location="http://169.254.169.254/latest/meta-data/")

    def around(self):
        self.say(302, Location="/around")

    def gone(self):
        self.say(404, b"hidden")

    def drip(self):
        self.pour(b"x", 0.1, 1000)

    def endless(self):
        self.pour(bytes(1 << 16), 0, 1 << 40)

    def pour(self, piece, pause, length):
        self.send_response(200)
        self.send_header("Content-Length", str(length)) if length < CAP else None
        self.end_headers()
        try:
            while not self.server.over.is_set():
                self.wfile.write(piece)
                time.sleep(pause)
        except ConnectionError:
            self.server.left.append(self.path)
        self.close_connection = True


class MediaServer(http.server.ThreadingHTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answering)
        self.asked, self.left, self.accepts = [], [], 0
        self.over = threading.Event()

    def get_request(self):
        self.accepts += 1
        return super().get_request()

    def url(self, path):
        return f"http://127.0.0.1:{self.server_port}{path}"


@pytest.fixture(scope="module")
def origin():
    with MediaServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    (folder / "a b.png").write_bytes(PICTURE)
    (folder / "link.png").symlink_to("a b.png")
    (folder.parent / "beside.png").write_bytes(PICTURE)
    return folder


FLAGS = ["--engine=fake", "--enable-multimodal"]
KEYS = {"TRIPTYCH_API_KEY": "one,two"}


@pytest.fixture(scope="module")
def trusting(folder):
    """Fetches from this machine too, and reads below a folder."""
    flags = ["--allow-private-media", f"--allowed-media-path={folder}"]
    flags += ["--limits-fetch-seconds=1", f"--limits-media-bytes={CAP}", "--pattern=E/PD"]
    with serving(*FLAGS, *flags, env=KEYS | {"http_proxy": "http://127.0.0.1:9"}) as server:
        yield server


@pytest.fixture(scope="module")
def strict():
    with serving(*FLAGS) as server:
        yield server


def ask(server, url):
    part = {"type": "image_url", "image_url": {"url": url}}
    return server.chat([part, text_part("What is it?")], max_tokens=8, seed=1)


def answer(server, part):
    got = server.chat([part, text_part("What is it?")], max_tokens=8, seed=1)
    assert got.status == 200, got.body
    return got.json["choices"][0]["message"]["content"]


def refused(server, url, code):
    """As reliability demands after every bad input: told, well, and alive."""
    pids = {name: worker["pid"] for name, worker in server.cluster().items()}
    got = ask(server, url)
    assert (got.status, got.json["error"]["code"]) == (400, code), got.body
    assert got.json["error"]["param"] == "messages[0].content[0]"
    for secret in (b"127.0.0.1", b"169.254", b"hidden", b"/tmp", b".png"):
        assert secret not in got.body
    assert server.chat("Still there?", max_tokens=1).status == 200
    assert {name: worker["pid"] for name, worker in server.cluster().items()} == pids


def upload(server, data, key="one"):
    headers = {"Authorization": f"Bearer {key}"}
    with urllib.request.urlopen(
        urllib.request.Request(server.url + "/v1/media", data, headers, method="POST")
    ) as got:
        return json.loads(got.read())["id"]


def test_the_same_picture_by_every_way_gives_the_same_answer(trusting, origin, folder):
    handle = upload(trusting, PICTURE)
    expected = answer(trusting, image_part(PICTURE))
    assert answer(trusting, image_part(OTHER)) != expected
    for url in (
        origin.url("/picture.png"),
        origin.url("/moved.png"),
        origin.url("/picture.png").replace("127.0.0.1", "localhost"),
        f"file://{folder}/a%20b.png",
        handle,
    ):
        assert answer(trusting, {"type": "image_url", "image_url": {"url": url}}) == expected


def test_b41_an_upload_is_unknown_to_other_keys(trusting):
    handle = upload(trusting, PICTURE)
    assert ask(trusting, handle).status == 200
    trusting.key = "two"
    try:
        got = ask(trusting, handle)
        assert (got.status, got.json["error"]["code"]) == (404, "media_not_found")
    finally:
        trusting.key = "one"


def test_a_picture_that_is_asked_for_often_is_fetched_once(trusting, origin):
    url = origin.url("/picture.often")
    for _ in range(3):
        assert ask(trusting, url).status == 200
    assert origin.asked.count("/picture.often") == 1


def test_b17_b20_b21_what_is_closed_is_never_connected_to(strict, origin):
    before = origin.accepts
    port = origin.server_port
    for host in ("127.0.0.1", "127.1", "[::1]", "[::ffff:127.0.0.1]", "2130706433", "localhost."):
        refused(strict, f"http://{host}:{port}/picture.png", "media_url_blocked")
    refused(strict, "http://169.254.169.254/latest/meta-data/", "media_url_blocked")
    refused(strict, f"http://ok\\@127.0.0.1:{port}/picture.png", "media_url_blocked")
    refused(strict, f"ftp://127.0.0.1:{port}/picture.png", "unsupported_url_scheme")
    refused(strict, f"gopher://127.0.0.1:{port}/picture.png", "unsupported_url_scheme")
    assert origin.accepts == before


def test_b16_a_link_in_text_is_never_followed(trusting, origin):
    before = origin.accepts
    text = f"![a picture]({origin.url('/picture.png')}) <img src='{origin.url('/picture.png')}'>"
    assert trusting.chat(text, max_tokens=4).status == 200
    assert trusting.chat([text_part(text)], max_tokens=4).status == 200
    assert origin.accepts == before


def test_b18_b21_redirects_that_lead_inside_or_nowhere(trusting, origin):
    refused(trusting, origin.url("/inside.png"), "media_url_blocked")
    refused(trusting, origin.url("/around"), "media_fetch_failed")
    assert origin.asked.count("/around") == 6
    refused(trusting, origin.url("/gone.png"), "media_fetch_failed")


def test_b22_files_outside_of_the_folder(trusting, strict, folder):
    for path in ("/etc/passwd", "/dev/zero", f"{folder}/../beside.png", f"{folder}/link.png"):
        refused(trusting, f"file://{path}", "local_media_forbidden")
    refused(trusting, f"file://{folder}/missing.png", "local_media_forbidden")
    refused(strict, f"file://{folder}/a%20b.png", "local_media_forbidden")


def test_b23_b24_servers_that_do_not_end_are_left(trusting, origin):
    refused(trusting, origin.url("/drip.png"), "media_fetch_timeout")
    refused(trusting, origin.url("/endless.png"), "media_too_large")
    for _ in itertools.takewhile(lambda n: len(origin.left) < 2 and n < 100, itertools.count()):
        time.sleep(0.1)
    assert sorted(origin.left) == ["/drip.png", "/endless.png"]
