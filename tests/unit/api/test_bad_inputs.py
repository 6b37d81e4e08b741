"""Rows B1 to B12 and B14 of the table of bad inputs, by number.

After every row: the next good request gives 200, nothing in the body is an address or path,
memory has not grown by more than 50 MB, and the answer came within 5 s.
"""

import asyncio
import json
import re

import pytest

from triptych.config import Limits

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
PLACES = re.compile(rb"127\.0\.0\.1|/work|/tmp|/home|/usr|/dev/shm|\.py|0x[0-9a-f]{6}|Traceback")


@pytest.fixture
async def after(web, memory):
    """Gives a function that asks and then checks what must hold after every row."""
    before = memory().rss

    async def ask(asking):
        async with asyncio.timeout(5):
            reply = await asking
        good = await web.chat(max_tokens=2)
        assert good.status == 200
        assert not PLACES.search(reply.body), reply.body
        assert memory().rss - before < 50 << 20
        assert reply.status < 500
        return reply

    return ask


def body(**fields):
    return {"model": "tiny", "messages": MESSAGES} | fields


def refused(reply, status, code):
    assert (reply.status, reply.code) == (status, code), reply.body
    error = reply.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"hello",
        b"{",
        b'{"model": "tiny",}',
        b"[" * 10_000,
        b"[" * 10_000 + b"]" * 10_000,
        b'{"model": "tiny", "messages": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"x": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}",
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"model": "ti\xc3ny", "messages": []}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b"\x00\x01\x02",
    ],
    ids=range(12),
)
async def test_b1_not_json(web, after, text):
    refused(await after(web.ask(CHAT, text)), 400, "invalid_json")


async def test_b2_declared_body_over_the_limit(web, after, wire):
    request, _ = wire
    huge = request("POST", CHAT, b"", {"Content-Length": str(100 << 30)})
    refused(await after(web.raw(huge)), 413, "payload_too_large")


async def test_b2_chunked_body_over_the_limit(open_site):
    async with open_site(Limits(body_bytes=1 << 20)) as web:
        reader, writer = await web.connect()
        writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\n" % CHAT.encode())
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(3 * 16):
            writer.write(b"10000\r\n" + b" " * 65536 + b"\r\n")
        reply = await reader.readuntil(b"\r\n\r\n")
        assert reply.startswith(b"HTTP/1.1 413 ")
        assert all(c._parser.size <= 1 << 20 for c in web.server.connections)
        writer.close()
        assert (await web.chat()).status == 200


async def test_b2_reading_stops_at_the_limit(open_site):
    """A client that goes on sending is cut."""
    async with open_site(Limits(body_bytes=1 << 20)) as web:
        _, writer = await web.connect()
        writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\n" % CHAT.encode())
        writer.write(b"Content-Length: 10000000000\r\n\r\n")

        async def pour():
            while True:
                writer.write(bytes(1 << 20))
                await writer.drain()

        with pytest.raises(ConnectionError):
            await asyncio.wait_for(pour(), 5)


async def test_b3_three_megabytes_in_one_byte_chunks(web, after, wire):
    _, read = wire
    text = json.dumps(body(max_tokens=3, seed=1)).encode()
    rest = 3_000_000 - len(text)
    plain = await web.ask(CHAT, text + b" " * rest)
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % CHAT.encode()

    async def send():
        reader, writer = await web.connect()
        writer.write(head)
        writer.write(b"".join(b"1\r\n%c\r\n" % byte for byte in text))
        for at in range(0, rest, 10_000):
            writer.write(b"1\r\n \r\n" * min(10_000, rest - at))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        reply = await read(reader)
        writer.close()
        return reply

    chunked = await after(send())
    assert (chunked.status, plain.status) == (200, 200)
    assert chunked.json["choices"] == plain.json["choices"]


async def test_b4_ten_megabyte_header(web, after, wire):
    request, _ = wire
    data = request("GET", "/health", b"", {"X-Big": "a" * (10 << 20)})
    refused(await after(web.raw(data)), 431, "headers_too_large")


async def test_b4_three_hundred_headers(web, after, wire):
    request, _ = wire
    data = request("GET", "/health", b"", {f"X-{i}": "a" for i in range(300)})
    refused(await after(web.raw(data)), 431, "headers_too_large")
    few = request("GET", "/health", b"", {f"X-{i}": "a" for i in range(100)})
    assert (await web.raw(few)).status == 200


@pytest.mark.parametrize(
    "key",
    [
        None,
        "",
        "Bearer",
        "Bearer wrong",
        "Bearer secret2",
        "secret",
        "Basic secret",
        "Bearer \xff",
        "Bearer SECRET",
        "Bearersecret",
        "Bearer Bearer secret",
    ],
)
async def test_b5_missing_or_wrong_key(open_site, key):
    async with open_site(api_key="secret") as web:
        headers = {} if key is None else {"Authorization": key}
        reply = await web.ask(CHAT, body(), headers=headers)
        refused(reply, 401, "invalid_api_key")
        for scheme in ("Bearer", "bearer", "BEARER"):
            good = await web.ask(CHAT, body(), headers={"Authorization": f"{scheme} secret"})
            assert good.status == 200


@pytest.mark.parametrize("host", ["x:y:z", "a b", "127.0.0.1@evil", "../x", "", "\xff", "a,b"])
async def test_b6_odd_host(open_site, wire, host):
    request, _ = wire
    async with open_site(api_key="secret") as web:
        data = request("GET", "/v1/models", b"", {"Host": host})
        assert (await web.raw(data)).status in (400, 401)


async def test_b6_no_host_and_two_hosts(web):
    for lines in (b"", b"Host: a\r\nHost: b\r\n"):
        reply = await web.raw(b"GET /health HTTP/1.1\r\n" + lines + b"\r\n")
        refused(reply, 400, "invalid_http")


ROUTES = (
    "/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize",
    "/v1/media", "/v1/media/x", "/metrics", "/openapi.json", "/cluster", "/nothing",
)  # fmt: skip


async def test_b7_routes_without_key(open_site):
    async with open_site(api_key="secret") as web:
        for route in ROUTES:
            odd = (
                route, "/" + route, route + "/", "/." + route, "/%2e" + route, "/health/.." + route,
                "/health%2f.." + route, "/health;" + route, route.upper(), "http://x" + route,
                route + "?x=/health", "/live#" + route,
            )  # fmt: skip
            for path in odd:
                for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE"):
                    reply = await web.ask(path, b"", method)
                    assert reply.status in (400, 401, 404), (method, path)
                    assert reply.status != 400 or "#" in path
        assert (await web.ask("/health")).status == 200
        assert (await web.ask("/live")).status == 200


async def test_b7_odd_paths_with_key(open_site):
    async with open_site(api_key="secret") as web:
        key = {"Authorization": "Bearer secret"}
        for path in ("//v1/models", "/%2e/v1/models", "/v1/./models", "/v1/models/"):
            refused(await web.ask(path, headers=key), 404, "not_found")


@pytest.mark.parametrize("model", ["", "other", "tiny ", "../tiny"])
async def test_b8_unknown_model(web, after, model):
    for path, fields in (
        (CHAT, body()),
        ("/v1/completions", {"prompt": "a"}),
        ("/tokenize", {"prompt": "a"}),
    ):
        fields = {k: v for k, v in fields.items() if k != "model"} | {"model": model}
        reply = await after(web.ask(path, fields))
        refused(reply, 404, "model_not_found")
        assert reply.param == "model"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": None}, "messages"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": "Hi"}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [[]]}, "prompt"),
        ("/v1/completions", {"prompt": ["a", ""]}, "prompt"),
        ("/v1/completions", {"prompt": ["a", 1]}, "prompt"),
        ("/v1/completions", {}, "prompt"),
    ],
)  # fmt: skip
async def test_b9_nothing_to_say(web, after, path, fields, param):
    reply = await after(web.ask(path, {"model": "tiny"} | fields))
    refused(reply, 400, "invalid_value")
    assert reply.param == param


@pytest.mark.parametrize("name", ["n", "seed", "top_k", "temperature", "n" * 5000])
async def test_b10_integers_of_many_digits(web, after, name):
    for digits in ("1" + "0" * 400, "-1" + "0" * 400, "1" + "0" * 5000):
        text = json.dumps(body()).replace("}]", f'}}], "{name}": {digits}').encode()
        reply = await after(web.ask(CHAT, text))
        code = "unsupported_parameter" if len(name) > 100 else "invalid_value"
        refused(reply, 400, code)
        assert name.startswith(reply.param.removesuffix("…"))
        assert "set_int_max_str_digits" not in reply.body.decode()
        assert len(reply.body) < 500
    reply = await after(web.ask("/detokenize", b'{"tokens": [1' + b"0" * 5000 + b"]}"))
    refused(reply, 400, "invalid_value")
    assert reply.param == "tokens[0]"


TAKEN = [["top_k", -1], ["seed", -1], ["seed", -(1 << 63)]]
NUMBERS = (
    "n",
    "max_tokens",
    "max_completion_tokens",
    "top_k",
    "seed",
    "top_logprobs",
    "min_tokens",
    "prompt_logprobs",
)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [-1, -(1 << 63), 1 << 63, 1 << 64, 10**30, 1.5, "1", [1], True])
async def test_b10_integers_out_of_range(web, after, name, value):
    if [name, value] in TAKEN:
        pytest.skip("it has a meaning")
    reply = await after(web.ask(CHAT, body(**{name: value, "logprobs": True})))
    refused(reply, 400, "invalid_value")
    assert reply.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 10**9), ("n", 0), ("n", 17), ("max_tokens", 0),
        ("logit_bias", {"100000000": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"a": 1}),
        ("logit_bias", {str(1 << 63): 1}), ("logit_bias", {"1": 101}), ("logit_bias", [1]),
        ("stop_token_ids", [10**8]), ("stop_token_ids", [-1]), ("top_logprobs", 21),
    ],
)  # fmt: skip
async def test_b10_values_out_of_range(web, after, name, value):
    reply = await after(web.ask(CHAT, body(**{name: value, "logprobs": True})))
    refused(reply, 400, "invalid_value")
    assert reply.param.startswith(name)


async def test_b10_prompt_ids_out_of_range(web, after):
    for value in (-1, 1 << 63, 10**8):
        for prompt in ([1, value], [[1], [value]]):
            reply = await after(web.ask("/v1/completions", {"model": "tiny", "prompt": prompt}))
            refused(reply, 400, "invalid_value")
            assert reply.param.startswith("prompt")
        reply = await after(web.ask("/detokenize", {"tokens": [value]}))
        refused(reply, 400, "invalid_value")


async def test_b11_over_the_context(web, after):
    for fields in ({"max_tokens": 131_072}, {"max_completion_tokens": (1 << 31) - 1}):
        reply = await after(web.ask(CHAT, body(**fields)))
        refused(reply, 400, "context_length_exceeded")
    prompt = {"model": "tiny", "prompt": [5] * 131_072}
    reply = await after(web.ask("/v1/completions", prompt))
    refused(reply, 400, "context_length_exceeded")
    assert web.pipeline.works[0].sampling.max_tokens == 2  # only the good ones got through


FLOATS = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"
)  # fmt: skip


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
async def test_b12_not_finite(web, after, name, value):
    text = json.dumps(body(max_tokens=1)).replace("}]", f'}}], "{name}": {value}').encode()
    reply = await after(web.ask(CHAT, text))
    refused(reply, 400, "invalid_value")
    assert reply.param == name


@pytest.mark.parametrize("value", ["NaN", "1e400"])
async def test_b12_not_finite_inside(web, after, value):
    text = json.dumps(body(max_tokens=1)).replace("}]", f'}}], "logit_bias": {{"1": {value}}}')
    refused(await after(web.ask(CHAT, text.encode())), 400, "invalid_value")


INTERNALS = (
    "chat_template", "kv_transfer_params", "prompt_embeds", "priority", "request_id", "best_of",
    "suffix", "lora",
    "extra_args", "vllm_xargs", "bootstrap_room", "data_parallel_rank", "use_beam_search",
)  # fmt: skip


@pytest.mark.parametrize("name", INTERNALS)
async def test_b14_engine_internals(web, after, name):
    for path, fields in ((CHAT, body()), ("/v1/completions", {"model": "tiny", "prompt": "a"})):
        reply = await after(web.ask(path, fields | {name: {"a": 1}}))
        refused(reply, 400, "unsupported_parameter")
        assert reply.param == name


async def test_b14_engine_internals_inside(web, after):
    reply = await after(web.ask(CHAT, body(structured_outputs={"backend": "x"})))
    refused(reply, 400, "unsupported_parameter")
    assert reply.param == "structured_outputs.backend"


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        ("mm_processor_kwargs", {"size": {"longest_edge": 9}}, "mm_processor_kwargs.size"),
        ("mm_processor_kwargs", {"do_rescale": False}, "mm_processor_kwargs.do_rescale"),
        ("mm_processor_kwargs", {"truncation": True}, "mm_processor_kwargs.truncation"),
        ("media_io_kwargs", {"video": {"backend": "x"}}, "media_io_kwargs.video.backend"),
        ("media_io_kwargs", {"image": {"image_mode": "L"}}, "media_io_kwargs.image.image_mode"),
        ("media_io_kwargs", {"text": {}}, "media_io_kwargs.text"),
    ],
)
async def test_b14_media_options_beyond_the_permitted_ones(web, after, name, value, param):
    reply = await after(web.ask(CHAT, body(**{name: value})))
    refused(reply, 400, "unsupported_parameter")
    assert reply.param == param
    completion = {"model": "tiny", "prompt": "a", name: value}
    refused(await after(web.ask("/v1/completions", completion)), 400, "unsupported_parameter")


EXTREMES = [  # at the ends of what is documented, and just beyond
    ({"repetition_penalty": 1e-38}, 400),
    ({"repetition_penalty": 0.0099}, 400),
    ({"repetition_penalty": 0.01}, 200),
    ({"repetition_penalty": 100}, 200),
    ({"temperature": 1e-30}, 200),
    ({"temperature": 5e-324}, 200),
    ({"temperature": 100}, 200),
    ({"presence_penalty": -2, "frequency_penalty": 2}, 200),
    ({"presence_penalty": 2, "frequency_penalty": -2.001}, 400),
    ({"top_p": 5e-324}, 200),
    ({"top_p": 0}, 400),
    ({"min_p": 1}, 200),
    ({"min_p": 5e-324}, 200),
    ({"logit_bias": {"1": 100, "2": -100}}, 200),
    ({"logit_bias": {"1": 100.1}}, 400),
]


@pytest.mark.parametrize(("fields", "status"), EXTREMES, ids=str)
async def test_b45_extreme_settings_are_accepted_or_refused(web, after, fields, status):
    reply = await after(web.ask(CHAT, body(max_tokens=1, **fields)))
    assert reply.status == status
    if status == 400:
        refused(reply, 400, "invalid_value")
