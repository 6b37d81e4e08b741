"""Media in requests: parts of every kind and form, uploads, keys and what is refused.

Rows B16, B25, B34, B39, B41 and B42 of the table of bad inputs are here by number, as far as the
frontend alone can answer them.
"""

import asyncio
import base64
import json
import re
import threading

import openai
import pytest

from support.fetching import InProcessClient
from triptych.api import app, handlers
from triptych.api.app import DECODE_INLINE_BYTES, decode_request
from triptych.checkpoint import packaged_folder
from triptych.config import Config, Limits
from triptych.errors import InvalidConfig, MediaFetchTimeout, MediaURLBlocked
from triptych.media.frame_list import join_frames
from triptych.messages import MediaItem
from triptych.recipe import MediaOptions
from triptych.sources.address import AddressFilter
from triptych.sources.loader import MediaLoader

CHAT = "/v1/chat/completions"
OMNI = str(packaged_folder("qwen_omni"))
RAW = bytes(range(256)) * 40  # long enough to be cut out of the body
BASE64 = base64.b64encode(RAW).decode()
TENSORS = b"\2\0\0\0\0\0\0\0{}"  # as safetensors begin
TEXT = {"type": "text", "text": "a"}


def url(kind, where):
    return {"type": f"{kind}_url", f"{kind}_url": {"url": where}}


def sound(data=BASE64, format="wav"):
    return {"type": "input_audio", "input_audio": {"data": data, "format": format}}


def encoded(data):
    return base64.b64encode(data).decode()


def file(data, **more):
    return {"type": "file", "file": {"file_data": data} | more}


def embeds(kind, payload):
    return {"type": f"{kind}_embeds", f"{kind}_embeds": payload}


def refused(reply, code, param="messages[0].content[1]", status=400):
    assert (reply.status, reply.code, reply.param) == (status, code, param), reply.body


@pytest.fixture
async def omni(open_site):
    async with open_site(model=OMNI) as running:
        yield running


# --- parts


@pytest.mark.parametrize(
    ("part", "kind", "form", "data"),
    [
        (url("image", f"data:image/png;base64,{BASE64}"), "image", "file", RAW),
        (url("image", "data:application/octet-stream;base64,AAAA"), "image", "file", bytes(3)),
        (url("video", f"data:video/mp4;base64,{BASE64}"), "video", "file", RAW),
        (url("video", "data:;base64,AAAA"), "video", "file", bytes(3)),
        (url("audio", f"data:audio/ogg;codecs=opus;base64,{BASE64}"), "audio", "file", RAW),
        (sound(), "audio", "file", RAW),
        (sound("AAAA", "mp3"), "audio", "file", bytes(3)),
        (embeds("image", BASE64), "image", "embeds", RAW),
        (embeds("video", base64.b64encode(TENSORS).decode()), "video", "embeds", TENSORS),
        (embeds("audio", {"url": f"data:;base64,{BASE64}"}), "audio", "embeds", RAW),
        (
            embeds("audio", {"url": "data:application/octet-stream;base64,AAAA"}),
            "audio",
            "embeds",
            bytes(3),
        ),
        (url("image", f"data:image;base64,{BASE64}"), "image", "file", RAW),
        (url("audio", f"DATA:AUDIO;base64,{BASE64}"), "audio", "file", RAW),
        (
            {"type": "image_url", "image_url": f"data:image/png;base64,{BASE64}"},
            "image",
            "file",
            RAW,
        ),
        ({"type": "input_audio", "input_audio": {"data": BASE64}}, "audio", "file", RAW),
        (sound(f"data:audio/wav;base64,{BASE64}"), "audio", "file", RAW),
        (sound("data:;base64,AAAA"), "audio", "file", bytes(3)),
        (
            {"type": "input_audio", "input_audio": f"data:audio/mp3;base64,{BASE64}"},
            "audio",
            "file",
            RAW,
        ),
        (
            {
                "type": "input_image",
                "image_url": f"data:image/png;base64,{BASE64}",
                "detail": "high",
            },
            "image",
            "file",
            RAW,
        ),
        (
            {"type": "input_image", "image_url": {"url": "https://example.org/a.png"}},
            "image",
            "file",
            b"far away",
        ),
        (file(f"data:image/png;base64,{BASE64}"), "image", "file", RAW),
        (file(f"data:video/mp4;base64,{BASE64}", filename="a.mp4"), "video", "file", RAW),
        (file(f"data:audio/wav;base64,{BASE64}"), "audio", "file", RAW),
        (file(encoded(b"\x89PNG" + RAW)), "image", "file", b"\x89PNG" + RAW),
        (file(f"data:;base64,{encoded(b'OggS')}"), "audio", "file", b"OggS"),
        (
            {"type": "input_file", "filename": "x", "file_data": encoded(b"\0\0\0 ftypisom")},
            "video",
            "file",
            b"\0\0\0 ftypisom",
        ),
        (
            url("video", f"data:video/jpeg;base64,{BASE64},AAAA"),
            "video",
            "file",
            join_frames([RAW, bytes(3)]),
        ),
        (url("image", "https://example.org/a.png"), "image", "file", b"far away"),
        (url("video", "file:///media/a.mp4"), "video", "file", b"on disk"),
        (embeds("image", {"url": "file:///media/a.safetensors"}), "image", "embeds", b"tensors"),
    ],
)
async def test_every_part_reaches_the_work(omni, part, kind, form, data):
    omni.sources.files = {
        "https://example.org/a.png": b"far away",
        "file:///media/a.mp4": b"on disk",
        "file:///media/a.safetensors": b"tensors",
    }
    assert (await omni.chat([TEXT, part, TEXT])).status == 200
    (work,) = omni.pipeline.works
    (item,) = work.media
    assert (item.kind, item.form, bytes(item.data)) == (kind, form, data)
    tokens = omni.pipeline.tokenizer
    word = {"image": "<|IMAGE|>", "video": "<|VIDEO|>", "audio": "<|AUDIO|>"}[kind]
    assert work.prompt[item.at] == tokens.specials[word]


async def test_a_context_error_says_that_media_are_not_counted(omni):
    reply = await omni.chat([TEXT, GOOD], max_tokens=1 << 30)
    assert reply.code == "context_length_exceeded"
    message = reply.json["error"]["message"]
    assert re.match(r"The prompt has at least \d+ tokens, without its media, and max", message)
    reply = await omni.chat([TEXT], max_tokens=1 << 30)
    assert re.match(r"The prompt has \d+ tokens, and max", reply.json["error"]["message"])


async def test_input_text_is_text(omni):
    assert (await omni.chat([{"type": "input_text", "text": "a"}])).status == 200
    assert (await omni.chat([TEXT])).status == 200
    first, second = omni.pipeline.works
    assert first.prompt == second.prompt


@pytest.mark.parametrize(
    ("part", "code"),
    [
        (file(f"data:application/pdf;base64,{BASE64}"), "unsupported_media_type"),
        (file(encoded(b"%PDF-1.7" + RAW)), "unsupported_media_type"),
        (file("data:text/plain;base64,AAAA"), "unsupported_media_type"),
        (file("AAAA"), "unsupported_media_type"),
        (file(""), "unsupported_media_type"),
        (file("data:image/png,x"), "invalid_data_url"),
        (file(f"data:image/png;base64,{BASE64}%"), "invalid_data_url"),
        ({"type": "file", "file": {"file_id": "file-1"}}, "unsupported_parameter"),
        ({"type": "file", "file": {}}, "unsupported_parameter"),
        ({"type": "input_file", "file_url": "https://a/b.pdf"}, "unsupported_parameter"),
        (url("video", "data:video/jpeg;base64," + "AAAA," * 1024), "too_many_frames"),
    ],
)
async def test_files_that_are_refused(omni, part, code):
    reply = await omni.chat([TEXT, part])
    refused(reply, code)
    is_pdf = "application/pdf" in str(part) or "JVBERi" in str(part)
    assert ("PDF" in reply.json["error"]["message"]) == is_pdf


async def test_files_count_as_what_they_are(open_site):
    config = {"model": OMNI, "limit_media": "image=1"}
    async with open_site(**config) as web:
        picture = file(f"data:image/png;base64,{BASE64}")
        assert (await web.chat([picture, sound()])).status == 200
        refused(await web.chat([picture, GOOD]), "too_many_media", "messages")


@pytest.mark.parametrize("detail", ["low", "high", "auto", "original", None])
async def test_low_detail_caps_the_pixels(omni, detail):
    url_part = {"type": "image_url", "image_url": GOOD["image_url"] | {"detail": detail}}
    string = {"type": "input_image", "image_url": "data:;base64,AAAA", "detail": detail}
    assert (await omni.chat([url_part, string])).status == 200
    wanted = MediaOptions(pixel_cap=512 * 512) if detail == "low" else None
    assert [item.options for item in omni.pipeline.works[0].media] == [wanted, wanted]


# --- options


async def test_media_options_reach_the_items_of_their_kind(omni):
    parts = [GOOD, url("video", "data:;base64,AAAA"), sound(), embeds("image", encoded(TENSORS))]
    processor = {"min_pixels": 3136, "max_pixels": 50176, "use_audio_in_video": False}
    more = {"do_sample_frames": True, "fps": None}
    reply = await omni.chat(
        parts,
        mm_processor_kwargs=processor | more,
        media_io_kwargs={"video": {"num_frames": 8, "fps": -1}, "image": {}, "audio": None},
    )
    assert reply.status == 200, reply.body
    assert [item.options for item in omni.pipeline.works[0].media] == [
        MediaOptions(min_pixels=3136, max_pixels=50176),
        MediaOptions(num_frames=8, min_pixels=3136, max_pixels=50176, use_audio_in_video=False),
        None,
        None,
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"mm_processor_kwargs": {}, "media_io_kwargs": {}},
        {"mm_processor_kwargs": None, "media_io_kwargs": {"video": {"num_frames": -1}}},
    ],
)
async def test_options_that_change_nothing_are_none(omni, fields):
    assert (await omni.chat([url("video", "data:;base64,AAAA")], **fields)).status == 200
    assert omni.pipeline.works[0].media[0].options is None


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        ("mm_processor_kwargs", {"num_frames": 0}, ".num_frames"),
        ("mm_processor_kwargs", {"num_frames": -2}, ".num_frames"),
        ("mm_processor_kwargs", {"num_frames": 1.5}, ".num_frames"),
        ("mm_processor_kwargs", {"num_frames": 10**30}, ".num_frames"),
        ("mm_processor_kwargs", {"fps": 0}, ".fps"),
        ("mm_processor_kwargs", {"fps": "2"}, ".fps"),
        ("mm_processor_kwargs", {"fps": 1e308}, ".fps"),
        ("mm_processor_kwargs", {"min_pixels": 0}, ".min_pixels"),
        ("mm_processor_kwargs", {"max_pixels": -5}, ".max_pixels"),
        ("mm_processor_kwargs", {"use_audio_in_video": 1}, ".use_audio_in_video"),
        ("mm_processor_kwargs", {"do_sample_frames": False}, ".do_sample_frames"),
        ("mm_processor_kwargs", [], ""),
        ("media_io_kwargs", {"video": {"num_frames": 0}}, ".video.num_frames"),
        ("media_io_kwargs", {"video": 3}, ".video"),
        ("media_io_kwargs", "x", ""),
    ],
)
async def test_bad_media_options(omni, name, value, param):
    reply = await omni.chat([url("video", "data:;base64,AAAA")], **{name: value})
    refused(reply, "invalid_value", name + param)


async def test_options_that_contradict_each_other(omni):
    film = url("video", "data:;base64,AAAA")
    both = {"mm_processor_kwargs": {"fps": 2}, "media_io_kwargs": {"video": {"fps": 4}}}
    refused(await omni.chat([film], **both), "invalid_value", "mm_processor_kwargs.fps")
    frames = url("video", "data:video/jpeg;base64,AAAA,AAAA")
    refused(await omni.chat([TEXT, frames], mm_processor_kwargs={"num_frames": 4}), "invalid_value")
    assert (await omni.chat([frames], mm_processor_kwargs={"max_pixels": 3136})).status == 200


# --- uuids


async def test_a_uuid_stands_for_what_was_sent_with_it(omni):
    picture = url("image", f"data:image/png;base64,{BASE64}") | {"uuid": "cat"}
    bare = {"type": "image_url", "image_url": None, "uuid": "cat"}
    refused(await omni.chat([TEXT, bare]), "unknown_media_uuid")
    assert (await omni.chat([picture])).status == 200
    for part in (bare, {"type": "image_url", "image_url": {}, "uuid": "cat"}):
        assert (await omni.chat([part, TEXT])).status == 200
        assert bytes(omni.pipeline.works[-1].media[0].data) == RAW
    other = {"type": "video_url", "uuid": "cat"}
    refused(await omni.chat([TEXT, other]), "unknown_media_uuid")  # of another kind
    assert (await omni.chat([GOOD | {"uuid": "cat"}])).status == 200  # what is sent wins
    assert bytes(omni.pipeline.works[-1].media[0].data) == bytes(3)
    assert (await omni.chat([bare])).status == 200
    assert bytes(omni.pipeline.works[-1].media[0].data) == bytes(3)


async def test_a_uuid_belongs_to_a_tenant(open_site):
    async with open_site(model=OMNI, api_key="one,two") as web:
        bare = {"type": "image_url", "uuid": "cat"}

        async def ask(key, part):
            body = {"model": "tiny", "messages": [{"role": "user", "content": [TEXT, part]}]}
            return await web.ask(CHAT, body, None, {"Authorization": f"Bearer {key}"})

        assert (await ask("one", GOOD | {"uuid": "cat"})).status == 200
        refused(await ask("two", bare), "unknown_media_uuid")
        assert (await ask("one", bare)).status == 200


async def test_several_kinds_keep_their_order_across_turns(omni):
    omni.sources.files = {f"file:///{n}": b"%d" % n for n in range(6)}
    parts = [
        url("image", "file:///0"), url("audio", "file:///1"), TEXT, url("video", "file:///2"),
        url("image", "file:///3"),
    ]  # fmt: skip
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [url("video", "file:///4"), url("image", "file:///5")]},
    ]
    assert (await omni.chat(messages=messages, n=2)).status == 200
    for work in omni.pipeline.works:
        assert [bytes(item.data) for item in work.media] == [b"%d" % n for n in range(6)]
        assert [item.at for item in work.media] == sorted(item.at for item in work.media)
    assert len(omni.sources.asked) == 6  # once for both choices


async def test_fetching_is_a_stage_of_its_own_where_there_are_media(omni):
    omni.sources.files["https://example.com/cat.png"] = b"cat"
    part = {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}
    timing = (await omni.chat([part])).headers["server-timing"]
    assert re.match(r"fetch;dur=\d+\.\d{3}, queue;dur=1\.000, ", timing)
    assert "fetch" not in (await omni.chat("Hi")).headers["server-timing"]


async def test_media_are_looked_for_after_the_prompt_is_known_to_be_good(omni):
    part = url("image", "https://example.org/a.png")
    bad = [
        {"max_tokens": 1 << 30},
        {"n": 99},
        {"logit_bias": {"99999999": 1}},
        {"messages": [{"role": "user", "content": [part]}, {"role": "user", "content": None}]},
    ]
    for fields in bad:
        assert (await omni.chat([part], **fields)).status == 400
    reply = await omni.ask("/tokenize", {"messages": [{"role": "user", "content": [part]}]})
    assert reply.status == 200
    assert omni.sources.asked == []


@pytest.mark.parametrize("error", [MediaURLBlocked("no"), MediaFetchTimeout("late")])
async def test_a_file_that_cannot_be_fetched_is_named(omni, error):
    omni.sources.files = {"http://a/": b"1", "http://b/": error}
    reply = await omni.chat([url("image", "http://a/"), url("video", "http://b/")])
    refused(reply, error.code)
    assert not omni.pipeline.works
    assert (await omni.chat([url("image", "http://a/")])).status == 200


@pytest.mark.parametrize("part", [url("audio", "http://a/"), sound(), embeds("audio", "AAAA")])
async def test_media_that_the_model_does_not_take_are_named(web, part):
    refused(await web.chat([TEXT, part]), "invalid_value")
    assert web.sources.asked == []


async def test_media_must_be_enabled(open_site):
    async with open_site(model=OMNI, enable_multimodal=False) as web:
        for part in (url("video", "http://a/"), sound(), embeds("image", "AAAA")):
            refused(await web.chat([TEXT, part]), "media_disabled")
            refused(await web.chat([TEXT, *[part] * 100]), "media_disabled")
        reply = await web.ask("/v1/media", b"x", "POST")
        refused(reply, "media_disabled", None)
        assert (await web.ask("/v1/models/tiny")).json["modalities"] == ["text"]


async def test_the_model_says_which_kinds_it_takes(omni, web):
    assert (await omni.ask("/v1/models/tiny")).json["modalities"] == [
        "text", "image", "video", "audio",
    ]  # fmt: skip
    assert "image" in (await web.ask("/v1/models/tiny")).json["modalities"]


async def test_the_official_client_sends_sounds(omni):
    where = f"http://127.0.0.1:{omni.server.port}/v1"
    async with openai.AsyncOpenAI(base_url=where, api_key="x", max_retries=0) as client:
        messages = [{"role": "user", "content": [TEXT, sound()]}]
        assert (await client.chat.completions.create(model="tiny", messages=messages)).choices
    (item,) = omni.pipeline.works[0].media
    assert item == MediaItem("audio", item.at, RAW)


# --- B16


async def test_b16_a_link_in_text_opens_no_connection(open_site):
    seen = []

    async def serve(reader, writer):
        seen.append(await reader.readline())
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc")
        writer.close()

    site = await asyncio.start_server(serve, "127.0.0.1", 0)
    link = f"http://127.0.0.1:{site.sockets[0].getsockname()[1]}/a.png"
    text = f"![x]({link}) <img src='{link}'> {link} [y]({link})"
    async with site, open_site(allow_private_media=True) as web:
        web.app.handlers._completions._sources = sources = MediaLoader(
            web.app.handlers.config,
            web.app.handlers._uploads,
            client=InProcessClient(AddressFilter(private=True)),
        )
        try:
            for content in (text, [{"type": "text", "text": text}]):
                assert (await web.chat(content)).status == 200
            assert (
                await web.ask("/v1/completions", {"model": "tiny", "prompt": text})
            ).status == 200
            assert seen == []
            assert (await web.chat([url("image", link)])).status == 200
            assert len(seen) == 1  # as it does where it is a part
        finally:
            await sources.close()


# --- B25


@pytest.mark.parametrize("padding", ["", BASE64])
@pytest.mark.parametrize(
    ("part", "code"),
    [
        (lambda p: url("image", f"data:image/png;base64,{p}%%%%"), "invalid_data_url"),
        (lambda p: url("video", f"data:video/mp4;base64,{p}A"), "invalid_data_url"),
        (lambda p: url("audio", f"data:audio/wav,{p}"), "invalid_data_url"),
        (lambda p: url("audio", f"data:audio/;base64,{p}"), "invalid_data_url"),
        (lambda p: url("audio", f"data:image;base64,{p}AAAA"), "unsupported_media_type"),
        (lambda p: url("video", f"data:video/jpeg;base64,{p},%%%%"), "invalid_data_url"),
        (lambda p: url("video", f"data:image/png;base64,{p}AAAA"), "unsupported_media_type"),
        (lambda p: url("image", f"data:video/mp4;base64,{p}AAAA"), "unsupported_media_type"),
        (lambda p: url("audio", f"data:text/html;base64,{p}AAAA"), "unsupported_media_type"),
        (lambda p: sound(f"{p}AA A"), "invalid_data_url"),
        (lambda p: sound(f"data:image/png;base64,{p}AAAA"), "unsupported_media_type"),
        (lambda p: embeds("image", f"{p}=A"), "invalid_data_url"),
        (lambda p: embeds("image", f"{p}\u00e9AAA"), "invalid_data_url"),
        (
            lambda p: embeds("image", {"url": f"data:image/png;base64,{p}AAAA"}),
            "unsupported_media_type",
        ),
    ],
)
async def test_b25_bad_base64_or_data_url(omni, part, code, padding):
    refused(await omni.chat([TEXT, part(padding)]), code)
    assert not omni.pipeline.works


# --- B34


async def test_b34_a_thousand_images(omni):
    for part in (url("image", "https://example.org/a"), embeds("image", "AAAA")):
        reply = await omni.chat([part] * 1000)
        refused(reply, "too_many_media", "messages")
        assert "1000 images" in reply.json["error"]["message"]
    reply = await omni.chat([url("image", "data:,")] * 10_000)
    refused(reply, "too_many_media", "messages")
    assert omni.sources.asked == []
    assert not omni.pipeline.works


async def test_b34_limits_of_each_kind(open_site):
    async with open_site(Limits(media_items=4), model=OMNI, limit_media="image=3,audio=0") as web:
        image, film = url("image", "data:;base64,AAAA"), url("video", "data:;base64,AAAA")
        for content, said in (
            ([image] * 4, "4 images; the limit is 3"),
            ([image] * 2 + [embeds("image", "AAAA")] * 2, "4 images; the limit is 3"),
            ([image, sound()], "1 sounds; the limit is 0"),
            ([image] * 2 + [film] * 3, "5 media items (2 images, 3 videos); the limit is 4"),
        ):
            reply = await web.chat(content)
            refused(reply, "too_many_media", "messages")
            assert said in reply.json["error"]["message"]
        assert (await web.chat([image] * 3 + [film])).status == 200
        assert (await web.chat([film] * 4)).status == 200


# --- B39


@pytest.mark.parametrize(
    "lines",
    [
        "X-Request-Id: mine\r\nX-Request-Id: mine\r\n",
        "X-Request-Id: a\\nb%0Ac\r\n",
        f"X-Request-Id: {'a' * 10_000}\r\n",
        "X-Request-Id:\r\n",
        "X-Request-Id: \xff\x80\r\n",
    ],
    ids=["duplicate", "newline", "10 kB", "empty", "bytes"],
)
async def test_b39_a_clients_request_id_is_never_used_as_ours(web, lines):
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{lines}\r\n"
    replies = [await web.raw(head.encode("latin-1") + body) for _ in range(2)]
    ids = [reply.headers["x-request-id"] for reply in replies]
    assert [reply.status for reply in replies] == [200, 200]
    assert ids == [reply.json["id"] for reply in replies]
    assert all(id.startswith("chatcmpl-") and len(id) < 40 for id in ids)
    assert len({*ids, *(work.id for work in web.pipeline.works)}) == 2


@pytest.mark.parametrize("break_", ["\n", "\r", "\r\n "])
async def test_b39_a_real_newline_is_not_http(web, break_):
    """Nothing of it comes back in the answer's head."""
    raw = f"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: a{break_}Injected: b\r\n\r\n".encode()
    reply = await web.raw(raw)
    assert reply.status in (200, 400)
    assert "injected" not in reply.headers
    assert reply.headers["x-request-id"].startswith("req-")


# --- large bodies


@pytest.mark.parametrize(("size", "inloop"), [(1000, True), (DECODE_INLINE_BYTES, False)])
async def test_large_bodies_are_decoded_in_a_thread(omni, monkeypatch, size, inloop):
    ran = []

    def spied(*given):
        ran.append(threading.current_thread() is threading.main_thread())
        return decode_request(*given)

    monkeypatch.setattr(app, "decode_request", spied)
    data = base64.b64encode(bytes(size)).decode().replace("A", "/")
    body = {"model": "tiny", "messages": [{"role": "user", "content": [sound(data)]}]}
    raw = json.dumps(body).replace("/", "\\/").encode()  # as PHP writes it
    assert (await omni.ask(CHAT, raw)).status == 200
    assert ran == [inloop]
    assert omni.pipeline.works[0].media[0].data == base64.b64decode(data)


async def test_a_large_upload_is_copied_in_steps_and_whole(omni, monkeypatch):
    monkeypatch.setattr(handlers, "COPY_INLINE_BYTES", 1000)
    monkeypatch.setattr(handlers, "COPY_STEP", 999)
    data = bytes(range(256)) * 40
    upload = (await omni.ask("/v1/media", data, "POST")).json
    assert omni.app.handlers._uploads.get("", upload["id"]) == data


# --- B41, keys and uploads


async def ask_as(web, key, path, body, **more):
    return await web.ask(path, body, headers={"Authorization": f"Bearer {key}"}, **more)


def chat_body(content="Hi", **more):
    return {"model": "tiny", "messages": [{"role": "user", "content": content}]} | more


async def test_b41_keys_and_salts_share_no_cache(open_site):
    async with open_site(api_key="one, two") as web:
        for key in ("one", "two"):
            for salt in ({}, {"cache_salt": "x"}, {"cache_salt": "y"}, {"cache_salt": None}):
                reply = await ask_as(web, key, CHAT, chat_body(**salt))
                assert reply.status == 200
        salts = [work.salt for work in web.pipeline.works]
        assert len(set(salts)) == 6
        assert salts[0] == salts[3]
        assert not any(key in salt for salt in salts for key in ("one", "two"))
        for key in ("three", "one,two", "one, two", "on", ""):
            refused(await ask_as(web, key, CHAT, chat_body()), "invalid_api_key", None, 401)


async def test_b41_no_salt_can_imitate_another_tenants(open_site):
    """Whatever a client writes, what stands before it is its own."""
    async with open_site(api_key="one,two") as web:
        await ask_as(web, "one", CHAT, chat_body(cache_salt="x"))
        theirs = web.pipeline.works[0].salt
        for salt in (theirs, "\n" + theirs, "x"):
            await ask_as(web, "two", CHAT, chat_body(cache_salt=salt))
        assert theirs not in [work.salt for work in web.pipeline.works[1:]]
    async with open_site() as web:
        await web.chat()
        assert web.pipeline.works[0].salt == ""


async def test_uploads(omni):
    reply = await omni.ask("/v1/media", RAW, headers={"Content-Type": "image/png"})
    assert reply.status == 200
    upload = reply.json
    assert (upload["object"], upload["bytes"]) == ("media", len(RAW))
    assert upload["id"].startswith("media://")
    assert upload["expires_at"] - upload["created_at"] in (3600, 3601)
    parts = [url("image", upload["id"]), embeds("audio", {"url": upload["id"]})]
    assert (await omni.chat(parts)).status == 200
    assert [bytes(item.data) for item in omni.pipeline.works[0].media] == [RAW, RAW]
    path = upload["id"].removeprefix("media://")
    dropped = await omni.ask(f"/v1/media/{path}", method="DELETE")
    assert dropped.json == {"id": upload["id"], "object": "media", "deleted": True}
    refused(await omni.chat([TEXT, parts[0]]), "media_not_found", status=404)
    reply = await omni.ask(f"/v1/media/{path}", method="DELETE")
    refused(reply, "media_not_found", None, 404)


@pytest.mark.parametrize("scheme", ["media%3A%2F%2F", "media://", "media:/"])
async def test_an_uploads_id_may_be_given_whole(omni, scheme):
    """Proxies may make one slash of two."""
    upload = (await omni.ask("/v1/media", b"x", "POST")).json
    path = upload["id"].replace("media://", scheme)
    assert (await omni.ask(f"/v1/media/{path}", method="DELETE")).json["deleted"]


async def test_b41_uploads_are_known_to_their_key_alone(open_site):
    async with open_site(model=OMNI, api_key="one,two") as web:
        upload = (await ask_as(web, "one", "/v1/media", b"mine")).json["id"]
        content = [TEXT, url("image", upload)]
        for salt in (None, "x"):
            body = chat_body(content, cache_salt=salt)
            assert (await ask_as(web, "one", CHAT, body)).status == 200
            refused(await ask_as(web, "two", CHAT, body), "media_not_found", status=404)
        path = "/v1/media/" + upload.removeprefix("media://")
        reply = await ask_as(web, "two", path, b"", method="DELETE")
        refused(reply, "media_not_found", None, 404)
        assert (await ask_as(web, "one", path, b"", method="DELETE")).status == 200


async def test_uploads_that_are_refused(open_site):
    limits = Limits(body_bytes=4096, upload_bytes=6000)
    async with open_site(limits) as web:
        refused(await web.ask("/v1/media", bytes(5000), "POST"), "payload_too_large", None, 413)
        refused(await web.ask("/v1/media", b"", "POST"), "invalid_media", None)
        form = {"Content-Type": "multipart/form-data; boundary=x"}
        refused(await web.ask("/v1/media", b"--x", "POST", form), "invalid_form", None)
        assert (await web.ask("/v1/media", bytes(4096), "POST")).status == 200
        refused(await web.ask("/v1/media", bytes(4096), "POST"), "server_overloaded", None, 429)
        reply = await web.ask("/v1/media")
        assert (reply.status, reply.headers["allow"]) == (405, "post, options")
        assert (await web.ask("/v1/media/")).status == 404
    async with open_site(api_key="secret") as web:
        for path, method in (("/v1/media", "POST"), ("/v1/media/x", "DELETE")):
            refused(await web.ask(path, b"x", method), "invalid_api_key", None, 401)


async def test_an_upload_that_no_request_could_use_is_refused(web):
    web.server.draining = True
    refused(await web.ask("/v1/media", b"x", "POST"), "draining", None, 503)


@pytest.mark.parametrize("keys", [",", " ", " , ,"])
def test_empty_keys_do_not_open_the_server(keys):
    with pytest.raises(InvalidConfig):
        _ = Config(api_key=keys).api_keys


# --- B42

GOOD = url("image", "data:;base64,AAAA")
WRONG = [
    {"type": "film"},
    {"type": None},
    {"type": ["image_url"]},
    {"text": "a"},
    {"image_url": {"url": "data:;base64,AAAA"}},
    {},
    "a",
    None,
    [TEXT],
    GOOD | {"video_url": {"url": "data:;base64,AAAA"}},
    GOOD | {"text": "a"},
    GOOD | {"image_embeds": "AAAA"},
    TEXT | {"image_url": {"url": "data:;base64,AAAA"}},
    sound() | {"audio_url": {"url": "data:;base64,AAAA"}},
    {"type": "image_url"},
    {"type": "image_url", "video_url": {"url": "data:;base64,AAAA"}},
    {"type": "audio_embeds", "image_embeds": "AAAA"},
]


async def test_the_formats_of_sounds_are_named(omni):
    reply = await omni.chat([sound(format="aac")])
    assert "wav, mp3, flac, ogg, opus, m4a, mp4" in reply.json["error"]["message"]


@pytest.mark.parametrize("part", WRONG, ids=range(len(WRONG)))
@pytest.mark.parametrize("padding", ["a", "a" * 100_000])
async def test_b42_parts_with_no_or_two_contents(omni, part, padding):
    reply = await omni.chat([{"type": "text", "text": padding}, part])
    refused(reply, "invalid_value")
    assert (await omni.chat([TEXT, GOOD])).status == 200


async def test_payloads_that_are_null_are_absent(omni):
    """As clients write parts that they keep as objects with a member for each type."""
    part = dict.fromkeys(("text", "video_url", "audio_url", "input_audio", "image_embeds")) | GOOD
    assert (await omni.chat([TEXT | {"image_url": None}, part])).status == 200


@pytest.mark.parametrize("role", ["tool", "function", "king", "", "user\n", None, 3, ["user"]])
async def test_b42_unknown_role(omni, role):
    message = {"role": role, "content": [TEXT, GOOD]}
    reply = await omni.chat(messages=[{"role": "user", "content": "a"}, message])
    refused(reply, "invalid_value", "messages[1].role")


@pytest.mark.parametrize("padding", ["a", "a" * 100_000])
@pytest.mark.parametrize(
    "part",
    [
        GOOD | {"cache_control": {"type": "ephemeral"}, "annotations": [], "x": 1},
        {"type": "image_url", "image_url": GOOD["image_url"] | {"extra": {"a": [1]}}},
        sound() | {"mm_processor_kwargs": {}},
        {"type": "text", "text": "a", "citations": [{"a": 1}], "cache_control": None},
    ],
    ids=range(4),
)
async def test_other_members_of_parts_are_ignored(omni, part, padding):
    """Also those of engines: nothing reads them (B14)."""
    assert (await omni.chat([{"type": "text", "text": padding}, part])).status == 200


@pytest.mark.parametrize(
    ("part", "param"),
    [
        (sound(format="zip"), ".input_audio.format"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, ""),
        ({"type": "video_url", "video_url": {}}, ""),
        ({"type": "video_url", "video_url": 3}, ".video_url"),
        ({"type": "file"}, ""),
        ({"type": "file", "file": "AAAA"}, ".file"),
        (GOOD | {"uuid": ""}, ".uuid"),
        (GOOD | {"uuid": "x" * 257}, ".uuid"),
        (GOOD | {"uuid": 3}, ".uuid"),
        ({"type": "input_text", "text": 3}, ".text"),
        ({"type": "input_image", "image_url": {"url": 3}}, ".image_url.url"),
        ({"type": "input_image", "image_url": "x", "detail": 3}, ".detail"),
        (embeds("image", 3), ".image_embeds"),
        (embeds("image", None), ""),
    ],
)
async def test_b42_payloads_of_another_shape(omni, part, param):
    refused(await omni.chat([TEXT, part]), "invalid_value", f"messages[0].content[1]{param}")


# --- what is said of it


async def test_openapi_describes_parts_and_uploads(omni):
    document = (await omni.ask("/openapi.json")).json
    schemas = document["components"]["schemas"]
    content = schemas["ChatMessage"]["properties"]["content"]
    parts = next(b for b in content["anyOf"] if b.get("type") == "array")["items"]
    assert set(parts["discriminator"]["mapping"]) == {
        "text", "input_text", "image_url", "input_image", "video_url", "audio_url", "input_audio",
        "file", "input_file", "image_embeds", "video_embeds", "audio_embeds",
    }  # fmt: skip
    assert (
        schemas["ContentURL"]["properties"]["url"]["pattern"]
        == (schemas["ImageURL"]["properties"]["url"]["pattern"])
    )
    upload = document["paths"]["/v1/media"]["post"]
    assert upload["requestBody"]["content"] == {"*/*": {"schema": {}}}
    assert document["paths"]["/v1/media/{id}"]["delete"]["parameters"][0]["name"] == "id"
