"""One line for each request: what it says, and what it never says."""

import asyncio
import base64
import json

import msgspec
import pytest

from support.forms import form
from triptych.checkpoint import packaged_folder
from triptych.commands import launch
from triptych.observe import access_log

CHAT = "/v1/chat/completions"
KEYS = '[[key]]\nname = "alice"\nkey = "secret-of-alice"\ntokens_per_minute = 100000\n'


def body(content="Hi", **fields):
    return {"model": "tiny", "messages": [{"role": "user", "content": content}]} | fields


@pytest.fixture
def alice(tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    return {"keys_file": str(file)}


def lines(capsys):
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


async def test_a_line_has_the_key_the_tokens_and_the_times(open_site, alice, capsys):
    """Proved with ``record.run`` left out: no tokens."""
    headers = {"x-api-key": "secret-of-alice"}
    data = base64.b64encode(bytes(100)).decode()
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    async with open_site(access_log=True, **alice) as web:
        ids = []
        for fields in ({}, {"stream": True}, {"n": 2}):
            reply = await web.ask(CHAT, body(max_tokens=3, **fields), headers=headers)
            ids.append(reply.headers["x-request-id"])
        prompt = len(web.pipeline.works[0].prompt)
        await web.ask(CHAT, body([picture], max_tokens=3), headers=headers)
        await web.app.close()
    whole, stream, both, media = lines(capsys)
    for line, id in zip((whole, stream, both), ids, strict=True):
        assert line["request_id"] == id
        assert (line["source"], line["event"], line["level"]) == ("access", "request", "info")
        assert (line["method"], line["path"], line["status"]) == ("POST", CHAT, 200)
        assert line["key"] == "alice"
        assert (line["prompt_tokens"], line["cached_tokens"]) == (prompt, 1)
        assert line["stages_ms"] == {"queue": 1.0, "prefill": 2.0, "decode": 3.0}
        assert 0 < line["first_token_ms"] <= line["ms"]
        assert "error" not in line
    assert [line["output_tokens"] for line in (whole, stream, both)] == [3, 3, 6]
    assert media["media_bytes"] == 100
    assert "fetch" in media["stages_ms"]


async def test_the_media_bytes_of_a_form_are_those_of_its_file(open_site, capsys):
    async with open_site(access_log=True, model=str(packaged_folder("qwen_omni"))) as web:
        headers, given = form([("file", bytes(600))])
        await web.ask("/v1/media", given, "POST", headers)
        headers, given = form([("file", bytes(700)), ("model", "tiny")])
        await web.ask("/v1/audio/transcriptions", given, "POST", headers)
        await web.app.close()
    assert [line["media_bytes"] for line in lines(capsys)] == [600, 700]


async def test_the_probes_of_serve_itself_have_no_line(open_site, capsys):
    async with open_site(access_log=True) as web:
        web.pipeline.absent = ("D",)
        config = msgspec.structs.replace(web.app.handlers.config, port=web.server.port)
        assert not await launch._healthy(config)
        await web.ask("/health")
        await web.ask(CHAT, body(), headers={"User-Agent": access_log.OWN_PROBE.decode()})
        await web.app.close()
    found = [(line["path"], line["status"]) for line in lines(capsys)]
    assert found == [("/health", 503), (CHAT, 200)]


async def test_refusals_errors_and_clients_that_leave(open_site, alice, capsys, wire):
    request, _ = wire
    headers = {"x-api-key": "secret-of-alice"}
    async with open_site(access_log=True, **alice) as web:
        for path, more in (
            (CHAT, {}), ("/nothing?secret=1", headers), ("/v1/models", headers), ("/live", {}),
        ):  # fmt: skip
            await web.ask(path, headers=more)
        await web.ask(CHAT, b"{", headers=headers)
        await web.raw(b"nonsense\r\n\r\n")
        web.pipeline.endless = True
        reader, writer = await web.connect()
        writer.write(
            request("POST", CHAT, json.dumps(body(stream=True)).encode(), headers),
        )
        await reader.readuntil(b"data: ")
        writer.transport.abort()
        async with asyncio.timeout(10):
            while not web.pipeline.cancelled:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        await web.app.close()
    text = capsys.readouterr().err
    found = [json.loads(line) for line in text.splitlines()]
    assert [(x["path"], x["status"], x.get("error"), x["key"]) for x in found] == [
        (CHAT, 401, "invalid_api_key", ""),
        ("/nothing", 404, "not_found", "alice"),
        ("/v1/models", 200, None, "alice"),
        ("/live", 200, None, ""),
        (CHAT, 400, "invalid_json", "alice"),
        ("-", 400, "invalid_http", ""),
        (CHAT, 200, "client_left", "alice"),
    ]
    assert all(line["request_id"] for line in found)
    assert "secret" not in text


async def test_keys_without_a_name_are_told_apart_and_not_shown(open_site, capsys):
    async with open_site(access_log=True, api_key="one,two", admin_key="three") as web:
        for key in ("one", "two", "three"):
            await web.ask("/v1/models", headers={"x-api-key": key})
        await web.app.close()
    names = [line["key"] for line in lines(capsys)]
    assert len(set(names)) == 3
    assert [name.partition("-")[0] for name in names] == ["key", "key", "admin"]


async def test_text_lines_have_no_control_characters(open_site, capsys):
    async with open_site(access_log=True, log_format="text") as web:
        await web.ask(CHAT, body(max_tokens=2))
        await web.raw(b"GET /\xff\x9b31m HTTP/1.1\r\nHost: x\r\n\r\n")
        await web.app.close()
    served, refused = capsys.readouterr().err.splitlines()
    assert f" POST {CHAT} 200 " in served
    assert " output_tokens=2 " in served
    assert " stages_ms.prefill=2.0" in served
    assert "access[" in refused
    assert refused.isascii()
    assert refused.isprintable()


def entry(path="/live"):
    return access_log.AccessEntry(
        time=1.0, request_id="req-1", key="", method="GET", path=path, status=200, ms=1.0
    )


def test_a_flood_of_refusals_is_counted_and_not_written(capsys):
    log = access_log.AccessLog("json", clock=lambda: 5.0)
    allowed = [log.may_add_refused() for _ in range(1000)]
    assert sum(allowed) == access_log.MAX_REFUSED
    log.close()
    (line,) = lines(capsys)
    assert line["event"] == f"{1000 - access_log.MAX_REFUSED} more requests have no line here"


def test_lines_that_cannot_be_written_are_bounded(capsys, monkeypatch):
    """A terminal that takes nothing blocks the thread, not the event loop."""
    monkeypatch.setattr(access_log, "MAX_QUEUED", 5)
    monkeypatch.setattr(access_log, "WRITE_SECONDS", 100.0)
    log = access_log.AccessLog("text")
    for _ in range(9):
        log.add(entry())
    log.close()
    written = capsys.readouterr().err.splitlines()
    assert len(written) == 6
    assert written[-1].endswith("4 more requests have no line here")


def test_the_log_of_a_long_path_is_short():
    assert access_log.printable_path("/a\x1bb") == "/a\\x1bb"
    assert len(access_log.printable_path("/" + "a" * 9999)) == access_log.MAX_PATH


async def test_it_is_off_unless_asked_for(web, capsys):
    await web.chat("Hi")
    assert capsys.readouterr().err == ""
