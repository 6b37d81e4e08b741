"""Media by URL, path and upload through a real server: every way leads to the same bytes.

``test_bad_media`` has what is refused, and what holds after that; here is what a server
does that may fetch from its own machine. The fake engine's answers follow from the bytes of the
media, so equal answers mean equal bytes.
"""

import json
import urllib.request

import pytest

from support.origin import Origin, moved, reply
from support.pictures import draw, encoded
from support.rows import in_thread, url_part
from support.servers import image_part, serving, text_part

PICTURE = encoded(draw(1))
OTHER = encoded(draw(2))
ROUTES = {
    "/picture.png": reply(200, PICTURE, Cache_Control="max-age=60"),
    "/often.png": reply(200, PICTURE, Cache_Control="max-age=60"),
    "/moved.png": moved("/picture.png"),
    "/inside.png": moved("http://169.254.169.254/latest/meta-data/"),
}


@pytest.fixture(scope="module")
def origin():
    with in_thread(Origin(ROUTES, "127.0.0.1")) as origin:
        yield origin


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    (folder / "a b.png").write_bytes(PICTURE)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    """Fetches from this machine too, reads below a folder, and asks no proxy."""
    flags = ["--engine=fake", "--enable-multimodal", "--pattern=E/PD"]
    flags += ["--allow-private-media", f"--allowed-media-path={folder}"]
    env = {"TRIPTYCH_API_KEY": "one,two", "http_proxy": "http://127.0.0.1:9"}
    with serving(*flags, env=env) as server:
        yield server


def ask(server, part):
    return server.chat([part, text_part("What is it?")], max_tokens=8, seed=1)


def answer(server, part):
    got = ask(server, part)
    assert got.status == 200, got.body
    return got.json["choices"][0]["message"]["content"]


def upload(server, data, key="one"):
    headers = {"Authorization": f"Bearer {key}"}
    with urllib.request.urlopen(
        urllib.request.Request(server.url + "/v1/media", data, headers, method="POST")
    ) as got:
        return json.loads(got.read())["id"]


def test_the_same_picture_by_every_way_gives_the_same_answer(server, origin, folder):
    handle = upload(server, PICTURE)
    expected = answer(server, image_part(PICTURE))
    assert answer(server, image_part(OTHER)) != expected
    for url in (
        origin.url("/picture.png", "127.0.0.1"),
        origin.url("/moved.png", "127.0.0.1"),
        origin.url("/picture.png", "localhost"),
        f"file://{folder}/a%20b.png",
        handle,
    ):
        assert answer(server, url_part("image", url)) == expected


def test_b41_an_upload_is_unknown_to_other_keys(server):
    handle = upload(server, PICTURE)
    assert ask(server, url_part("image", handle)).status == 200
    server.key = "two"
    try:
        got = ask(server, url_part("image", handle))
        assert (got.status, got.json["error"]["code"]) == (404, "media_not_found")
    finally:
        server.key = "one"


def test_a_picture_that_is_asked_for_often_is_fetched_once(server, origin):
    for _ in range(3):
        assert ask(server, url_part("image", origin.url("/often.png", "127.0.0.1"))).status == 200
    assert [asked.path for asked in origin.asked].count("/often.png") == 1


def test_b18_link_local_addresses_stay_closed_even_then(server, origin):
    for url in (origin.url("/inside.png", "127.0.0.1"), "http://169.254.169.254/latest/meta-data/"):
        got = ask(server, url_part("image", url))
        assert (got.status, got.json["error"]["code"]) == (400, "media_url_blocked")
        assert got.json["error"]["param"] == "messages[0].content[0]"
        assert b"169.254" not in got.body
