"""Rows B15 to B42 of the table of bad inputs, one test each, through real processes.

After every row a server must be as it was before: see ``support.rows``. Two are attacked:
``server`` with every permission that an operator can give and a name server of ours (``ok.test``
is in the open network, ``inside.test`` is not), and ``plain`` with none.
"""

import asyncio
import gzip
import http.client
import io
import json
import os
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps
from tools import tiny

from support import clips, traps
from support.hostile_servers import ENDLESS, UNPACKS_TO_NOTHING, Sent
from support.origin import Origin, moved, reply
from support.pictures import draw, encoded, with_few_blocks, with_scans
from support.rows import (
    PATIENCE,
    PLACE,
    Closed,
    Watched,
    data_part,
    embeds_part,
    in_thread,
    is_refusal,
    url_part,
)
from support.servers import serving, text_part

KINDS = ("image", "video", "audio")
CAP = 1 << 20  # bytes of a file from a URL
DEADLINE = 2  # seconds for it
PICTURE = encoded(draw(1, 56, 84))
CLIP = clips.video(1, frames=8, fps=4, width=64, height=48)
SOUND = clips.sound(1, "wav", seconds=0.3, rate=16000)
GOOD = [data_part("image", PICTURE), data_part("video", CLIP), data_part("audio", SOUND)]
TESTS = Path(__file__).parent.parent
FOREVER = 1 << 40


# --- the servers, and what must hold after every row


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What ``server`` may read below, with traps in it."""
    folder = tmp_path_factory.mktemp("permitted")
    (folder / "inner").mkdir()
    (folder / "good.png").write_bytes(PICTURE)
    (folder.parent / "beside.png").write_bytes(PICTURE)
    (folder / "in.png").symlink_to("good.png")
    (folder / "out.png").symlink_to(folder.parent / "beside.png")
    (folder / "around").symlink_to(folder)
    (folder / "zero.png").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe.png")
    return folder


@pytest.fixture(scope="module")
def servers(folder):
    flags = [f"--allowed-media-path={folder}", "--allow-torch-embeddings", "--decode-processes=1"]
    flags += [f"--limits-fetch-seconds={DEADLINE}", f"--limits-media-bytes={CAP}"]
    path = os.pathsep.join([str(TESTS / "support/open_network"), os.environ.get("PYTHONPATH", "")])
    env = {"TRIPTYCH_API_KEY": "one,two", "PYTHONPATH": path}
    common = ("--pattern=E/PD", "--enable-multimodal")
    with ExitStack() as stack:
        model = str(tiny.ensure_checkpoint("qwen2_5_omni"))
        permitted = stack.enter_context(serving(model, *common, *flags, env=env, ready=False))
        plain = stack.enter_context(serving("--engine=fake", *common, ready=False))
        for server in (permitted, plain):
            server.wait(server.complete, 120, "every worker is ready")
        yield Watched(permitted, GOOD), Watched(plain, GOOD[:1])


@pytest.fixture
def server(servers):
    yield servers[0]
    servers[0].check()


@pytest.fixture
def plain(servers):
    yield servers[1]
    servers[1].check()


@pytest.fixture
def closed():
    """A closed port, and no connection comes."""
    closed = Closed()
    yield closed
    assert closed.came() == 0
    closed.close()


def answered(body=PICTURE, **headers):
    return reply(200, body, Connection="close", **headers)


# --- text that is no media


@cache
def tokenizer():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(tiny.ensure_checkpoint("qwen2_5_omni"))


def as_text(text):
    """The ids of a chat of one message, in which nothing that was typed means anything."""
    known = tokenizer()
    turns = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    whole = known.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    before, after = whole.split(f"user\n{text}")
    around = [known.encode(piece, add_special_tokens=False) for piece in (before, after)]
    typed = known.encode(f"user\n{text}", add_special_tokens=False, split_special_tokens=True)
    return [*around[0], *typed, *around[1]]


def test_B15_a_placeholder_that_is_typed_stays_text(server):
    known = tokenizer()
    for kind in KINDS:
        word = f"<|{kind.upper()}|>"
        id, text = known.convert_tokens_to_ids(word), f"What is {word}, {word}{word}?"
        assert known.encode(word) == [id], "it means something"
        for content in (text, [text_part(text)]):
            answer = server.post(content)
            assert answer.status == 200, answer.body
            assert id not in answer.json["prompt_token_ids"]
            assert answer.json["prompt_token_ids"] == as_text(text)
        both = server.post([text_part(text), *GOOD])
        assert both.status == 200
        one = server.post([text_part("What is it?"), *GOOD])
        counts = [answer.json["prompt_token_ids"].count(id) for answer in (both, one)]
        assert counts[0] == counts[1] > 0, "only the media have placeholders"


def test_B16_a_link_in_text_is_not_followed(server, plain, closed):
    with in_thread(Origin({"/a.png": answered()})) as origin:
        for url in (origin.url("/a.png"), f"http://127.0.0.1:{closed.port}/a.png"):
            text = f"![a]({url}) <img src='{url}'> [a]: {url} {url}"
            for watched in (server, plain):
                for content in (text, [text_part(text)]):
                    assert watched.post(content).status == 200
        assert origin.accepts == 0
        assert server.ids(url_part("image", origin.url("/a.png"))), "it could have been fetched"


# --- where media come from

INSIDE = (
    "127.1", "127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "2130706433",
    "0x7f000001", "0177.0.0.1", "localhost", "localhost.", "LOCALHOST", "0.0.0.0", "[::]",
)  # fmt: skip
METADATA = "http://169.254.169.254/latest/meta-data/"


def test_B17_closed_addresses(server, plain, closed):
    urls = [METADATA, *(f"http://{host}:{closed.port}/a.png" for host in INSIDE)]
    for url in urls:
        plain.refused(url_part("image", url), "media_url_blocked")
        if "localhost" not in url.lower():  # a name, which the test's name server does not know
            server.refused(url_part("image", url), "media_url_blocked")
    for url in urls[:3]:
        for kind in ("video", "audio"):
            server.refused(url_part(kind, url), "media_url_blocked")
        for kind in KINDS:
            server.refused(embeds_part(kind, url), "media_url_blocked")


def test_B18_a_redirect_to_a_closed_address(server, closed):
    targets = [METADATA, "//127.1/", "http://inside.test/"]
    targets += [
        f"http://{host}:{closed.port}/a.png" for host in ("127.0.0.1", "[::1]", "2130706433")
    ]
    routes = {f"/{n}": moved(target) for n, target in enumerate(targets)}
    routes |= {"/good": answered(), "/moved": moved("/good")}
    with in_thread(Origin(routes)) as origin:
        for path in list(routes)[: len(targets)]:
            server.refused(url_part("image", origin.url(path)), "media_url_blocked")
        assert len(origin.asked) == len(targets)
        want = server.cold(data_part("image", PICTURE))
        assert server.cold(url_part("image", origin.url("/moved"))) == want


def test_B19_names_that_lead_inside(server, plain, closed):
    """What a name says is checked at every connection, and one bad address spoils it."""
    for host in ("inside.test", "mixed.test", "mixed6.test", "metadata.test"):
        url = f"http://{host}:{closed.port}/a.png"
        server.refused(url_part("image", url), "media_url_blocked")
    with in_thread(Origin({"/a.png": answered(Cache_Control="no-store")})) as origin:
        url = origin.url("/a.png", "rebound.test")
        assert server.ids(url_part("image", url)) == server.ids(data_part("image", PICTURE))
        server.refused(url_part("image", url), "media_url_blocked")
        server.refused(url_part("image", url), "media_url_blocked")
        assert origin.accepts == 1
    for host in ("localhost", "localhost.", "LocalHost"):
        url = f"http://{host}:{closed.port}/a.png"
        plain.refused(url_part("image", url), "media_url_blocked")


def test_B20_urls_that_parsers_read_differently(server, plain, closed):
    for url in (
        "http://ok\\@127.0.0.1:{}/",
        "http://ok.test\\@127.0.0.1:{}/",
        "http://ok.test@127.0.0.1:{}/",
        "http://ok.test:80@127.0.0.1:{}/",
        "http://127.0.0.1:{}\\.ok.test/",
        "http://127.0.0.1:{}\\@ok.test/",
        "http://127.0.0.1:{}#@ok.test/",
        "http://127.0.0.1:{}\t.ok.test/",
        "http://127.0.0.1:{}%2f.ok.test/",
        "http://127。0。0。1:{}/",
        "http:127.0.0.1:{}/",
        "http:///127.0.0.1:{}/",
        " http://127.0.0.1:{}/",
    ):
        for watched in (server, plain):
            code = "unsupported_url_scheme" if url[0] == " " else "media_url_blocked"
            watched.refused(url_part("image", url.format(closed.port)), code)


def test_B21_other_schemes_and_redirects_without_end(server, closed):
    for scheme in ("ftp:", "gopher:", "FTP:", "jar:http:", "javascript:", ""):
        url = f"{scheme}//127.0.0.1:{closed.port}/a.png"
        server.refused(url_part("image", url), "unsupported_url_scheme")
    routes = {f"/{n}": moved(f"/{n + 1}") for n in range(6)} | {"/6": answered()}
    routes |= {"/loop": moved("/loop"), "/ftp": moved(f"ftp://127.0.0.1:{closed.port}/")}
    with in_thread(Origin(routes)) as origin:
        assert server.ids(url_part("image", origin.url("/1"))), "five are followed"
        server.refused(url_part("image", origin.url("/0")), "media_fetch_failed")
        server.refused(url_part("image", origin.url("/loop")), "media_fetch_failed")
        paths = [asked.path for asked in origin.asked]
        assert (paths.count("/6"), paths.count("/loop")) == (1, 6)
        assert server.ask(url_part("image", origin.url("/ftp"))).status == 400


def test_B22_local_files(server, plain, folder):
    good = server.cold(data_part("image", PICTURE))
    assert server.cold(url_part("image", f"file://{folder}/good.png")) == good
    outside = ["/etc/passwd", "/dev/zero", "/proc/self/environ", f"{folder.parent}/beside.png"]
    below = [
        "../beside.png", "inner/../../beside.png", "%2e%2e/beside.png", "..%2fbeside.png",
        "in.png", "out.png", "around/good.png", "zero.png", "pipe.png", "inner", "", "missing.png",
        "good.png%00.png",
    ]  # fmt: skip
    said = set()
    for path in [*outside, *(f"{folder}/{name}" for name in below)]:
        said.add(server.refused(url_part("image", f"file://{path}"), "local_media_forbidden"))
        plain.refused(url_part("image", f"file://{path}"), "local_media_forbidden")
    assert len(said) == 1, "nobody learns what there is"
    server.refused(url_part("image", f"file://elsewhere{folder}/good.png"), "local_media_forbidden")
    plain.refused(url_part("image", f"file://{folder}/good.png"), "local_media_forbidden")
    for kind in KINDS:
        server.refused(url_part(kind, "file:///etc/passwd"), "local_media_forbidden")
        server.refused(embeds_part(kind, "file:///etc/passwd"), "local_media_forbidden")
    with pytest.raises(OSError, match="No such device"):  # no process has the pipe open
        os.open(folder / "pipe.png", os.O_WRONLY | os.O_NONBLOCK)


def dripping(first, piece):
    async def drip(writer, asked):
        writer.write(first)
        while not writer.is_closing():
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.1)

    return drip


def test_B23_a_server_that_drips(server):
    routes = {
        "/body": dripping(reply(200, Content_Length="50000"), b"x"),
        "/head": dripping(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
        "/silent": dripping(b"", b""),
    }
    with in_thread(Origin(routes)) as origin:
        parts = [url_part("image", origin.url(path)) for path in routes]
        server.all_refused(parts, "media_fetch_timeout", DEADLINE + PATIENCE)
        left(origin)


def test_B43_a_server_that_sends_endless_bytes_outside_a_body(server):
    sent = Sent()
    with in_thread(Origin(sent.routes())) as origin:
        parts = [url_part("image", origin.url(path)) for path in ENDLESS]
        server.all_refused(parts, "media_fetch_failed", DEADLINE + PATIENCE)
        left(origin)
        assert max(sent.values()) < 8 << 20  # what fits in buffers on the way


def left(origin):
    """Every connection is closed from the other side."""
    end = time.monotonic() + PATIENCE
    while not origin.is_left:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_B24_bodies_without_end(server):
    sent = 0

    async def endless(writer, asked):
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while not writer.is_closing():
            writer.write(bytes(1 << 16))
            sent += 1 << 16
            await writer.drain()

    async def less(writer, asked):
        writer.write(answered(PICTURE, Content_Length=str(len(PICTURE) + 100)))
        writer.close()

    bomb = gzip.compress(bytes(200 * CAP), 9)
    assert len(bomb) < CAP
    routes = {
        "/endless": endless,
        "/boast": reply(200, Content_Length=str(FOREVER)),
        "/bomb": answered(bomb, Content_Encoding="gzip"),
        "/less": less,
        "/more": answered(PICTURE + bytes(4 * CAP), Content_Length=str(len(PICTURE) - 40)),
    }
    hostile = Sent().routes()
    routes |= {path: hostile[path] for path in UNPACKS_TO_NOTHING}
    with in_thread(Origin(routes)) as origin:
        for path in ("/endless", "/boast", "/bomb", "/empty-blocks"):
            server.refused(url_part("image", origin.url(path)), "media_too_large")
        for path in ("/less", "/junk"):
            server.refused(url_part("image", origin.url(path)), "media_fetch_failed")
        cut = server.ask(url_part("image", origin.url("/more"))).json["error"]
        assert cut["code"] in ("invalid_media", "media_fetch_failed")  # as soon as it is noticed
        left(origin)
    assert sent < 50 * CAP  # what fits in buffers on the way


# --- files that are not what they should be


def test_B25_bad_base64_or_data_url(server):
    for kind in KINDS:
        mime = data_part(kind, b"")[f"{kind}_url"]["url"].partition(",")[0]
        for url in (
            f"{mime},%%%%", f"{mime},AAAAA", f"{mime},AA A", f"{mime},A===", "data:,AAAA", "data:",
            "data:;base64", f"{mime.removesuffix(';base64')},AAAA", f"{mime},{'A' * 99_999}",
        ):  # fmt: skip
            server.refused(url_part(kind, url), "invalid_data_url")
        for text in ("%%%%", "AAAAA", "=AAA", "data:;base64,A==="):
            server.refused({"type": f"{kind}_embeds", f"{kind}_embeds": text}, "invalid_data_url")
    sound = {"type": "input_audio", "input_audio": {"data": "AA-_", "format": "wav"}}
    server.refused(sound, "invalid_data_url")


def test_B26_files_that_are_not_media(server):
    jpeg = encoded(draw(1, 64, 64), "JPEG")
    for kind, files in {
        "image": [PICTURE[:200], PICTURE[:-40], PICTURE[:20], jpeg[: len(jpeg) // 2]],
        "video": [CLIP[: len(CLIP) // 2], CLIP[:40]],
        "audio": [SOUND[: len(SOUND) // 2], SOUND[:40]],
    }.items():
        for data in [b"", b"<!DOCTYPE html><html></html>", bytes(1000), *files]:
            server.refused(data_part(kind, data), "invalid_media")
    empty = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
    server.refused(empty, "invalid_media")


def peak(process):
    """Bytes that a process had in memory at once."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def test_B27_a_picture_of_50000_by_50000(server):
    bomb = traps.png_bomb(50_000)
    assert len(bomb) < 1 << 20
    small = traps.png_bomb(500)
    assert Image.open(io.BytesIO(small)).convert("L").getextrema() == (255, 255), "it is a picture"
    [child] = server.decoding()
    before = peak(child)
    server.refused(data_part("image", bomb), "image_too_large")
    server.refused(data_part("image", traps.png(50_000, 50_000, b"")), "image_too_large")
    assert peak(child) - before < 50 << 20, "no raster was made"


def test_B28_the_smallest_pictures(server):
    want = server.cold(data_part("image", encoded(draw(1, 28, 28).resize((1, 1)))))
    assert len(want) == 8
    for size in ((1, 4096), (4096, 1)):
        said = server.refused(data_part("image", encoded(draw(1, *size))), "image_too_small")
        assert f"{size[0]} x {size[1]}" in said
    assert server.cold(data_part("image", encoded(draw(1, 1, 200))))


def test_B29_other_formats(server):
    files = {form: encoded(draw(0, 32, 32), form) for form in ("EPS", "JPEG2000", "GIF", "TIFF")}
    files["PSD"] = b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 32, 32, 8, 3) + bytes(4000)
    files["film"] = traps.gif(100_000)
    assert Image.open(io.BytesIO(traps.gif(20))).n_frames == 20
    for data in files.values():
        for mime in ("image/png", "image/gif"):
            server.refused(data_part("image", data, mime), "unsupported_media_type")


def odd_pictures():
    """Files, and the same picture as transformers decodes it: ``load_image``'s rotation, then
    ``convert_to_rgb``. Of 16 bits the upper ones count, where Pillow would make all white."""
    picture = draw(2, 84, 56)
    exif = Image.Exif()
    exif[0x0112] = 6
    palette = picture.quantize(16)
    wide = np.linspace(0, 0xFFFF, 84 * 56).reshape(56, 84).astype(np.uint16)
    files = {
        "rotated": encoded(picture, "JPEG", exif=exif),
        "colour that is clear": encoded(draw(3, 84, 56), transparency=draw(3).getpixel((0, 0))),
        "palette": encoded(palette),
        "palette with clear colours": encoded(palette, transparency=bytes([0, 90, 180, 255])),
        "grey with alpha": encoded(picture.convert("LA")),
        "CMYK": encoded(picture.convert("CMYK"), "JPEG"),
        "16 bits": encoded(Image.fromarray(wide)),
    }
    for name, data in files.items():
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        if name == "16 bits":
            plain = Image.fromarray((wide >> 8).astype(np.uint8)).convert("RGB")
        else:
            from transformers.image_transforms import convert_to_rgb

            plain = Image.fromarray(convert_to_rgb(image, return_numpy=True))
        yield name, data, encoded(plain)


def test_B30_odd_pictures_equal_the_reference(server):
    seen = []
    for name, data, plain in odd_pictures():
        mime = "image/jpeg" if data[:2] == b"\xff\xd8" else "image/png"
        salt = server.salt()
        got = server.ids(data_part("image", data, mime), cache_salt=salt)
        assert got == server.cold(data_part("image", plain)), name
        misses = server.counter("embedding_cache_misses")
        assert server.ids(data_part("image", plain), cache_salt=salt) == got
        assert server.counter("embedding_cache_misses") == misses, f"{name}: to the last pixel"
        seen.append(tuple(got))
    assert len(set(seen)) == len(seen)


def test_B31_a_video_of_10000_frames(server):
    long = clips.video(1, "mpeg4", frames=10_000, width=16, height=16)
    server.refused(data_part("video", long), "too_many_frames")


def test_B32_bad_videos(server):
    for codec, pixels in (("ffv1", "yuv422p"), ("prores", "yuv422p10le")):
        said = server.refused(data_part("video", traps.film(codec, pixels)), "invalid_media")
        assert codec in said
    for value in (2**31, 2**32 - 2):
        forged = traps.forged_box(CLIP, b"mvhd", 16, ">I", value)
        server.refused(data_part("video", forged), "invalid_media")


def test_F27_a_stopped_decoding_process_fails_no_request(server):
    [child] = server.decoding()
    child.suspend()
    assert server.cold(GOOD[1], timeout=6 * PATIENCE), "another process, which takes its time"
    server.crashes = 1
    assert [other.pid for other in server.decoding()] != [child.pid]


def test_B33_sounds_that_are_too_long(server):
    bomb = traps.silence(1200)
    assert len(bomb) < 1 << 18
    server.refused(data_part("audio", bomb, "audio/flac"), "audio_too_long")
    for rate in (1, 999, 1_000_000, 2**31 - 1, 2**32 - 1):
        forged = traps.forged_rate(SOUND, rate)
        server.refused(data_part("audio", forged), "audio_too_long")


def test_B34_a_thousand_images(server, closed):
    tiny_one = data_part("image", encoded(draw(1, 8, 8)))
    url = url_part("image", f"http://127.0.0.1:{closed.port}/a.png")
    for part in (tiny_one, url, embeds_part("image", traps.embedding(traps.rows()))):
        is_refusal(server.post([part] * 1000), "too_many_media", "messages")
    turns = [{"role": "user", "content": [part]} for part in (tiny_one, url) * 500]
    is_refusal(server.post(turns), "too_many_media", "messages")


# --- embeddings


def test_B35_a_pickle_that_runs_a_command(server, plain, folder, tmp_path):
    ran = tmp_path / "ran"
    for name, data in traps.running(ran).items():
        for watched in (server, plain):
            watched.refused(embeds_part("image", data), "invalid_embedding")
        for end in (".pt", ".pth", ".bin", ".safetensors"):
            file = folder / f"{name}{end}"
            file.write_bytes(data)
            server.refused(embeds_part("image", f"file://{file}"), "invalid_embedding")
    good = traps.torch_file(traps.rows())  # is read from the permitted folder, and only there
    routes = {"/a.pt": answered(traps.running(ran)["plain"]), "/b.pt": answered(good)}
    with in_thread(Origin(routes)) as origin:
        for path in routes:
            server.refused(embeds_part("image", origin.url(path)), "invalid_embedding")
    handle = server.server.request("/v1/media", good).json["id"]
    server.refused(embeds_part("image", handle), "invalid_embedding")
    server.refused(embeds_part("image", good), "invalid_embedding")
    (folder / "allowed.pt").write_bytes(good)
    assert server.cold(embeds_part("image", f"file://{folder}/allowed.pt"))
    assert not ran.exists()


def test_B36_fifty_odd_tensors_at_once(server, folder):
    parts = []
    for seed in range(8):
        for number, data in enumerate(traps.odd_tensors(seed)):
            file = folder / f"odd-{seed}-{number}.pt"
            file.write_bytes(data)
            parts.append(embeds_part("image", f"file://{file}"))
        header = {"image_embeds": {"dtype": "F32", "shape": [1 << 40, 64], "data_offsets": [0, 4]}}
        forged = traps.safetensors(json.dumps(header | {f"x{seed}": {}}).encode(), bytes(4))
        parts.append(embeds_part("image", forged))
    parts += [embeds_part("image", traps.odd_tensors(9)[0])] * 2
    assert len(parts) == 50
    server.all_refused(parts, "invalid_embedding", 6 * PATIENCE)
    dense = folder / "dense.pt"
    dense.write_bytes(traps.torch_file(traps.rows()))
    want = server.cold(embeds_part("image", traps.embedding(traps.rows())))
    assert server.cold(embeds_part("image", f"file://{dense}")) == want


def test_B37_embeddings_of_another_shape(server):
    rows, embedding = traps.rows, traps.embedding
    spoilt = rows()
    spoilt[2, 3] = np.nan
    endless = rows()
    endless[0, 0] = np.inf
    wrong = [
        embedding(rows()[0]),
        embedding(rows()[None, None]),
        embedding(np.stack([rows(), rows()])),
        embedding(rows(width=traps.WIDTH - 1)),
        embedding(rows(width=2 * traps.WIDTH)),
        embedding(rows(dtype="float64")),
        embedding(rows().astype(np.int64)),
        embedding(spoilt),
        embedding(endless),
        embedding(rows(0), (1, 0, 0)),
        embedding(rows(0)),
        embedding(rows(5)),
        embedding(rows(1)),
        embedding(rows(), None),
        embedding(rows(), (1, 2, 2)),
        embedding(rows(), (4, 2, 2, 1)),
        embedding(rows(), (-1, -4, 4)),
        embedding(rows(), (1, 1, 16)),
        embedding(rows(), kind="video"),
    ]
    for data in wrong:
        server.refused(embeds_part("image", data), "embedding_shape_mismatch")
    for kind in ("video", "audio"):
        for data in (embedding(rows(width=63), kind=kind), embedding(spoilt, kind=kind)):
            server.refused(embeds_part(kind, data), "embedding_shape_mismatch")
    assert server.cold(embeds_part("image", embedding(rows()))) != server.cold(
        embeds_part("image", embedding(rows(seed=1)))
    )


def test_B38_damaged_safetensors(server):
    def header(**places):
        shape = {"dtype": "F32", "shape": [1, 64]}
        return json.dumps(
            {name: shape | {"data_offsets": at} for name, at in places.items()}
        ).encode()

    body = bytes(512)
    whole = header(image_embeds=[0, 256])
    damaged = [
        traps.safetensors(whole, bytes(256), 1 << 63),
        traps.safetensors(whole, bytes(256), (1 << 64) - 1),
        traps.safetensors(whole, bytes(256), len(whole) + 257),
        traps.safetensors(whole, bytes(256), len(whole) - 1),
        traps.safetensors(header(image_embeds=[0, 256], other=[128, 384]), body),
        traps.safetensors(header(image_embeds=[0, 256], other=[0, 256]), bytes(256)),
        traps.safetensors(header(image_embeds=[0, 256], other=[300, 556]), bytes(556)),
        traps.safetensors(header(image_embeds=[256, 0]), bytes(256)),
        traps.safetensors(header(image_embeds=[-256, 0]), bytes(256)),
        traps.safetensors(header(image_embeds=[0, 1 << 62]), bytes(256)),
        traps.safetensors(whole, body),
        traps.safetensors(whole, bytes(255)),
        traps.safetensors(b"{" * 5000, body),
        b"",
        bytes(8),
        bytes(9),
        b"\xff" * 100,
    ]
    for data in damaged:
        server.refused(embeds_part("image", data), "invalid_embedding")


# --- who asks


def raw(server, lines):
    turns = [{"role": "user", "content": "Hi"}]
    body = json.dumps({"model": server.name, "messages": turns, "max_tokens": 2})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    head += f"Authorization: Bearer one\r\nConnection: close\r\n{lines}\r\n"
    with socket.create_connection(("127.0.0.1", server.server.port), PATIENCE) as wire:
        wire.sendall((head + body).encode("latin-1"))
        answer = http.client.HTTPResponse(wire)
        answer.begin()
        return answer.status, answer.headers, answer.read()


def test_B39_request_ids_of_clients(server):
    ids = []
    for lines in (
        "X-Request-Id: mine\r\n",
        "X-Request-Id: mine\r\nX-Request-Id: mine\r\n",
        "X-Request-Id: mine%0d%0aInjected: 1\\r\\nInjected: 1\r\n",
        f"X-Request-Id: {'m' * 10_000}\r\n",
    ):
        for _ in range(2):
            status, headers, body = raw(server, lines)
            assert status == 200
            assert "mine" not in str(headers)
            assert "Injected" not in headers
            assert headers["x-request-id"] == json.loads(body)["id"]
            ids.append(headers["x-request-id"])
    assert len(set(ids)) == len(ids) == 8
    assert all(id.startswith("chatcmpl-") and len(id) < 40 for id in ids)
    for break_ in ("\n", "\r", "\r\n "):
        status, headers, _ = raw(server, f"X-Request-Id: a{break_}Injected: b\r\n")
        assert status in (200, 400)  # a real newline is another header, or no HTTP
        assert "Injected" not in headers


# --- caches

ASKED = text_part("Is this one like the one before, or has something been changed in it?")


def usage(server, part, **more):
    """How many tokens were cached, and the answer."""
    answer = server.post([part, ASKED], **more)
    assert answer.status == 200, answer.body
    cached = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached, answer.json["choices"][0]["token_ids"]


def alike():
    """Pairs of pictures that are easily confused."""
    raw = draw(1, 30, 100).tobytes()
    yield [Image.frombytes("RGB", size, raw) for size in ((30, 100), (100, 30))]
    indices = np.arange(56 * 56, dtype=np.uint32).reshape(56, 56) % 251
    for first, second in (((1, 0, 0), (0, 0, 1)), ((1, 1, 1), (1, 1, 0))):
        pair = []
        for red, green, blue in (first, second):
            image = Image.fromarray(indices.astype(np.uint8)).convert("L").convert("P")
            image.putdata(indices.ravel().tolist())
            image.putpalette([v for i in range(256) for v in (i * red, i * green, i * blue)])
            pair.append(image)
        assert pair[0].tobytes() == pair[1].tobytes()
        yield pair


def test_B40_pictures_that_are_almost_the_same(server):
    for pair in alike():
        one, other = (data_part("image", encoded(image)) for image in pair)
        cold = [usage(server, part, cache_salt=server.salt()) for part in (one, other)]
        assert [cached for cached, _ in cold] == [0, 0]
        assert cold[0][1] != cold[1][1]
        salt = server.salt()
        misses = server.counter("embedding_cache_misses")
        warm = [usage(server, part, cache_salt=salt) for part in (one, other, one, other)]
        ids = server.post([one, ASKED], cache_salt=salt).json["prompt_token_ids"]
        start = ids.index(tokenizer().convert_tokens_to_ids("<|IMAGE|>"))
        assert server.counter("embedding_cache_misses") == misses + 2, "two media keys"
        assert [ids for _, ids in warm] == [ids for _, ids in cold] * 2
        cached = [count for count, _ in warm]
        assert cached[0] == 0
        assert cached[1] <= start < min(cached[2:]), "only words are shared"


def test_B41_tenants_share_no_cache(server):
    salts = [{}, {"cache_salt": server.salt()}]  # with a salt of its own too, the same for both
    part = data_part("image", encoded(draw(7, 70, 70)))
    words = text_part("A long sentence that is the same in every request of this test, indeed.")
    for more in salts:
        want = usage(server, part, key="one", **more)
        again = usage(server, part, key="one", **more)
        assert want[0] == 0 < again[0]
        before = [server.counter(f"{name}_cache_hits") for name in ("embedding", "decoded")]
        theirs = usage(server, part, key="two", **more)
        assert theirs == want
        assert [server.counter(f"{n}_cache_hits") for n in ("embedding", "decoded")] == before
        assert usage(server, words, key="one", **more)[0] == 0
        assert usage(server, words, key="one", **more)[0] > 0
        assert usage(server, words, key="two", **more)[0] == 0
    handle = server.server.request("/v1/media", PICTURE, key="one").json["id"]
    assert server.ids(url_part("image", handle), key="one")
    answer = server.ask(url_part("image", handle), key="two")
    is_refusal(answer, "media_not_found", status=404)


# --- messages


def test_B42_roles_and_parts(server):
    good, other = GOOD[0], GOOD[1]
    for role in ("tool", "function", "king", "", "user\n", None, 3, ["user"]):
        turns = [{"role": "user", "content": "a"}, {"role": role, "content": [good]}]
        is_refusal(server.post(turns), "invalid_value", "messages[1].role")
    for part in (
        {"type": "film"},
        {"type": None},
        {"type": ["image_url"]},
        {"image_url": good["image_url"]},
        {},
        "a",
        None,
        [good],
        {"type": "image_url"},
        {"type": "image_url", "video_url": other["video_url"]},
        good | {"text": "a"},
        good | {"video_url": other["video_url"]},
        good | embeds_part("image", traps.embedding(traps.rows())),
        text_part("a") | {"image_url": good["image_url"]},
    ):
        answer = server.ask(part)
        error = answer.json["error"]
        is_refusal(answer, "invalid_value", error["param"])
        assert error["param"].startswith(PLACE)


def test_B44_pictures_that_take_long_and_another_tenant(server):
    """Each costs its 400, and who comes later waits for one of them, not for all."""
    for data in (with_scans(3000), with_few_blocks()):
        server.refused(data_part("image", data), "invalid_media")
    slow = data_part("image", with_scans(100, 8000))
    with ThreadPoolExecutor(3) as pool:
        asked = [
            pool.submit(server.ask, slow, key="one", timeout=9 * PATIENCE, cache_salt=server.salt())
            for _ in range(3)
        ]
        server.server.wait(lambda: server.server.cluster()["E-0"]["queued"] == 3, what="all queued")
        assert server.cold(GOOD[0], key="two", timeout=6 * PATIENCE)
        assert not all(answer.done() for answer in asked), "it did not wait for all of them"
        for answer in asked:
            assert "CPU time" in is_refusal(answer.result(), "invalid_media")
    server.crashes = 3
