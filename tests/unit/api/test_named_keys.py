"""Keys with names, limits and expiry, and routes without a key, as clients see them."""

import asyncio
import base64
import hashlib
import json

import pytest

from support.forms import form
from triptych.checkpoint import packaged_folder
from triptych.config import Config
from triptych.errors import InvalidConfig, NoWorkers

CHAT = "/v1/chat/completions"
TRANSCRIBE = "/v1/audio/transcriptions"
HI = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}


def entry(name, key="", **fields):
    lines = [f'name = "{name}"', *(f"{field} = {value}" for field, value in fields.items())]
    if key:
        lines.append(f'key = "{key}"')
    return "[[key]]\n" + "\n".join(lines) + "\n"


@pytest.fixture
def keys(tmp_path, monkeypatch):
    """Writes the file of keys; a server notices within moments."""
    monkeypatch.setattr("triptych.runtime.file_watch.WATCH_SECONDS", 0.02)

    def write(*entries):
        file = tmp_path / "keys.toml"
        (tmp_path / "next").write_text("".join(entries))
        (tmp_path / "next").replace(file)
        return str(file)

    return write


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


async def until(condition):
    async with asyncio.timeout(10):
        while not await condition():
            await asyncio.sleep(0.01)


async def test_both_headers_and_both_forms_of_a_key(open_site, keys):
    digest = hashlib.sha256(b"by-digest").hexdigest()
    file = keys(entry("alice", "plain"), entry("bob", sha256=f'"{digest}"'))
    async with open_site(keys_file=file, api_key="unnamed", admin_key="operator") as web:
        for key in ("plain", "by-digest", "unnamed", "operator"):
            for headers in (bearer(key), {"x-api-key": key}):
                assert (await web.ask(CHAT, HI, headers=headers)).status == 200
        for headers in (
            {}, bearer("wrong"), bearer(digest), {"x-api-key": digest}, {"x-api-key": ""},
            {"Authorization": "Basic plain"}, {"Authorization": "Basic x", "x-api-key": "plain"},
        ):  # fmt: skip
            reply = await web.ask(CHAT, HI, headers=headers)
            assert (reply.status, reply.code) == (401, "invalid_api_key"), headers
            assert "x-ratelimit-limit-requests" not in reply.headers
        reply = await web.ask("/cluster", headers={"x-api-key": "plain"})
        assert (reply.status, reply.code) == (403, "forbidden")
        assert (await web.ask("/cluster", headers={"x-api-key": "operator"})).status == 200
        twice = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nx-api-key: a\r\nx-api-key: plain\r\n\r\n"
        assert (await web.raw(twice)).code == "invalid_http"
        assert len({work.salt for work in web.pipeline.works}) == 4  # a tenant each


async def test_keys_of_one_name_are_one_tenant_and_share_its_limits(open_site, keys):
    """So that a key can be replaced without losing caches."""
    file = keys(entry("alice", "old", streams=9), entry("alice", "new", streams=9))
    async with open_site(keys_file=file) as web:
        upload = (await web.ask("/v1/media", b"12345", headers=bearer("old"))).json["id"]
        path = f"/v1/media/{upload.removeprefix('media://')}"
        assert (await web.ask(CHAT, HI, headers=bearer("old"))).status == 200
        assert (await web.ask(CHAT, HI, headers=bearer("new"))).status == 200
        one, two = web.pipeline.works
        assert one.salt == two.salt != ""
        assert "alice" not in one.salt
        assert (await web.ask(path, b"", "DELETE", bearer("new"))).status == 200


async def test_an_expired_key_is_refused(open_site, keys):
    file = keys(
        entry("late", "late", expires="2020-01-01T00:00:00Z"),
        entry("soon", "soon", expires="2999-01-01"),
    )
    async with open_site(keys_file=file) as web:
        reply = await web.ask(CHAT, HI, headers=bearer("late"))
        assert (reply.status, reply.code) == (401, "invalid_api_key")
        assert "expired" in reply.json["error"]["message"]
        assert (await web.ask(CHAT, HI, headers=bearer("soon"))).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_exactly_as_many_requests_as_allowed_though_all_come_at_once(open_site, keys, stream):
    """Proved with ``admit`` called at the end of a request: all 30 get in."""
    file = keys(entry("alice", "a", requests_per_minute=12), entry("bob", "b"))
    async with open_site(keys_file=file) as web:
        replies = await asyncio.gather(
            *(web.ask(CHAT, HI | {"stream": stream}, headers=bearer("a")) for _ in range(30)),
            *(web.ask(CHAT, HI, headers=bearer("b")) for _ in range(30)),
        )
        alice, bob = replies[:30], replies[30:]
        served = [reply for reply in alice if reply.status == 200]
        refused = [reply for reply in alice if reply.status != 200]
        assert len(served) == 12
        left = {int(reply.headers["x-ratelimit-remaining-requests"]) for reply in served}
        assert left == set(range(12))
        for reply in refused:
            assert (reply.status, reply.code) == (429, "rate_limit_exceeded")
            assert reply.json["error"]["type"] == "rate_limit_error"
            assert 1 <= int(reply.headers["retry-after"]) <= 5
            assert reply.headers["x-ratelimit-remaining-requests"] == "0"
        assert {reply.status for reply in bob} == {200}
        assert not any(name.startswith("x-ratelimit") for name in bob[0].headers)
        # What does no work is not counted.
        reply = await web.ask("/v1/models", headers=bearer("a"))
        assert (reply.status, reply.headers["x-ratelimit-limit-requests"]) == (200, "12")


async def test_tokens_of_prompt_and_answer_count(open_site, keys):
    file = keys(entry("alice", "a", tokens_per_minute=1000))
    async with open_site(keys_file=file) as web:
        for stream in (False, True):
            before = await web.ask("/v1/models", headers=bearer("a"))
            reply = await web.ask(CHAT, HI | {"stream": stream}, headers=bearer("a"))
            after = await web.ask("/v1/models", headers=bearer("a"))
            left = [int(r.headers["x-ratelimit-remaining-tokens"]) for r in (before, after)]
            assert reply.status == 200
            used = len(web.pipeline.works[-1].prompt) + 2
            assert used - 5 <= left[0] - left[1] <= used  # it refills meanwhile
        many = HI | {"n": 8, "max_tokens": 200}
        assert (await web.ask(CHAT, many, headers=bearer("a"))).status == 200
        reply = await web.ask(CHAT, HI, headers=bearer("a"))
        assert (reply.status, reply.code) == (429, "rate_limit_exceeded")
        assert int(reply.headers["retry-after"]) > 1


async def test_a_request_that_its_client_leaves_is_counted_and_ends(open_site, keys, wire):
    request, _ = wire
    file = keys(entry("alice", "a", tokens_per_minute=5000, streams=1))
    async with open_site(keys_file=file) as web:
        web.pipeline.endless = True
        reader, writer = await web.connect()
        body = b'{"model": "tiny", "stream": true, "messages": [{"role":"user","content":"a"}]}'
        writer.write(request("POST", CHAT, body, bearer("a")))
        await reader.readuntil(b"data: ")
        web.pipeline.endless = False
        reply = await web.ask(CHAT, HI, headers=bearer("a"))
        assert (reply.status, reply.code) == (429, "rate_limit_exceeded")  # one at once
        assert reply.headers["retry-after"] == "1"
        writer.transport.abort()

        async def served():
            return (await web.ask(CHAT, HI, headers=bearer("a"))).status == 200

        await until(served)
        left = await web.ask("/v1/models", headers=bearer("a"))
        assert int(left.headers["x-ratelimit-remaining-tokens"]) < 5000 - len(
            web.pipeline.works[0].prompt
        )


async def test_a_prompt_counts_though_its_client_leaves_before_the_first_token(
    open_site, keys, wire
):
    request, _ = wire
    file = keys(entry("alice", "a", tokens_per_minute=100))
    async with open_site(keys_file=file) as web:
        web.pipeline.gate = asyncio.Event()
        _, writer = await web.connect()
        prompts = [[5] * 80, [6] * 70]
        body = json.dumps({"model": "tiny", "prompt": prompts, "n": 2}).encode()
        writer.write(request("POST", "/v1/completions", body, bearer("a")))

        async def begun():
            return len(web.pipeline.works) == 4

        async def left():
            return len(web.pipeline.cancelled) == 4

        await until(begun)
        writer.transport.abort()
        await until(left)
        web.pipeline.gate.set()
        reply = await web.ask(CHAT, HI, headers=bearer("a"))
        assert (reply.status, reply.code) == (429, "rate_limit_exceeded")
        assert int(reply.headers["retry-after"]) <= 31  # 50 too many, at 100 a minute


async def test_a_prompt_that_no_worker_took_does_not_count(open_site, keys):
    file = keys(entry("alice", "a", tokens_per_minute=100))
    async with open_site(keys_file=file) as web:
        web.pipeline.error = NoWorkers("none is ready")
        reply = await web.ask(
            "/v1/completions", {"model": "tiny", "prompt": [5] * 200}, headers=bearer("a")
        )
        assert reply.status == 503
        web.pipeline.error = None
        assert (await web.ask(CHAT, HI, headers=bearer("a"))).status == 200


async def test_as_many_at_once_as_allowed(open_site, keys):
    file = keys(entry("alice", "a", streams=3))
    async with open_site(keys_file=file) as web:
        web.pipeline.gate = asyncio.Event()
        asking = [asyncio.create_task(web.ask(CHAT, HI, headers=bearer("a"))) for _ in range(10)]

        async def settled():
            return sum(task.done() for task in asking) == 7

        await until(settled)
        assert {task.result().code for task in asking if task.done()} == {"rate_limit_exceeded"}
        assert len(web.pipeline.works) == 3
        web.pipeline.gate.set()
        replies = await asyncio.gather(*asking)
        assert sorted(reply.status for reply in replies) == [200] * 3 + [429] * 7


async def test_bytes_of_media_count_and_text_goes_on(open_site, keys):
    file = keys(entry("alice", "a", media_bytes_per_minute=1000))
    data = base64.b64encode(bytes(900)).decode()
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    picture = HI | {"messages": [{"role": "user", "content": [url]}]}
    async with open_site(keys_file=file) as web:
        assert (await web.ask(CHAT, picture, headers=bearer("a"))).status == 200
        assert (await web.ask("/v1/media", bytes(900), headers=bearer("a"))).status == 200
        reply = await web.ask("/v1/media", b"more", headers=bearer("a"))
        assert (reply.status, reply.code) == (429, "rate_limit_exceeded")
        reply = await web.ask(CHAT, picture, headers=bearer("a"))
        assert (reply.status, reply.code) == (429, "rate_limit_exceeded")
        assert int(reply.headers["retry-after"]) > 10
        assert (await web.ask(CHAT, HI, headers=bearer("a"))).status == 200


async def test_a_transcription_counts_once_and_may_be_more_than_is_left(open_site, keys):
    """Proved with the body counted where it arrives, too."""
    file = keys(entry("alice", "a", media_bytes_per_minute=10_000))
    headers, body = form([("file", bytes(6000)), ("model", "tiny")])
    model = str(packaged_folder("qwen_omni"))
    async with open_site(keys_file=file, model=model) as web:
        statuses = [
            (await web.ask(TRANSCRIBE, body, "POST", headers | bearer("a"))).status
            for _ in range(3)
        ]
        assert statuses == [200, 200, 429]


# --- changes


async def test_a_changed_file_is_used_and_what_was_used_stays_used(open_site, keys, caplog):
    file = keys(entry("alice", "a", requests_per_minute=3), entry("bob", "b"))
    async with open_site(keys_file=file) as web:
        for _ in range(3):
            assert (await web.ask(CHAT, HI, headers=bearer("a"))).status == 200
        keys(entry("alice", "a2", requests_per_minute=4), entry("carol", "c"))

        async def known():
            return (await web.ask("/v1/models", headers=bearer("c"))).status == 200

        await until(known)
        for key in ("a", "b"):
            assert (await web.ask(CHAT, HI, headers=bearer(key))).status == 401
        statuses = [(await web.ask(CHAT, HI, headers=bearer("a2"))).status for _ in range(2)]
        assert statuses == [200, 429]
        keys("[[key]\n")

        async def told():
            return "the old ones stay" in caplog.text

        await until(told)
        assert (await web.ask("/v1/models", headers=bearer("c"))).status == 200


async def test_a_file_that_is_refused_changes_no_limit(open_site, keys, caplog):
    file = keys(entry("alice", "a", requests_per_minute=3))
    async with open_site(keys_file=file, api_key="unnamed") as web:
        keys(entry("alice", "a", requests_per_minute=9), entry("bob", "unnamed"))

        async def told():
            return "the old ones stay" in caplog.text

        await until(told)
        reply = await web.ask("/v1/models", headers=bearer("a"))
        assert reply.headers["x-ratelimit-limit-requests"] == "3"


async def test_a_key_stands_in_one_place(open_site, keys):
    for fields in ({"api_key": "same"}, {"admin_key": "same"}):
        with pytest.raises(InvalidConfig, match="'alice' in --keys-file is also"):
            async with open_site(keys_file=keys(entry("alice", "same")), **fields):
                pass


# --- public routes


async def test_public_routes_need_no_key_and_a_key_still_counts(open_site, keys):
    file = keys(entry("alice", "a", requests_per_minute=1))
    listed = f"/metrics, {CHAT},/v1/models/{{model}},/health"
    async with open_site(keys_file=file, admin_key="operator", public_routes=listed) as web:
        for headers in ({}, bearer("wrong"), bearer("a")):
            assert b"triptych_" in (await web.ask("/metrics", headers=headers)).body
            assert (await web.ask("/v1/models/tiny", headers=headers)).status == 200
        assert (await web.ask("/cluster")).status == 401
        assert (await web.ask("/v1/models")).status == 401
        paths = (await web.ask("/openapi.json", headers=bearer("a"))).json["paths"]
        assert paths["/metrics"]["get"]["security"] == []
        assert "security" not in paths["/cluster"]["get"]
        assert (await web.ask("/nothing")).status == 401
        for headers, status in (({}, 200), (bearer("a"), 200), (bearer("a"), 429)):
            assert (await web.ask(CHAT, HI, headers=headers)).status == status
        assert [bool(work.salt) for work in web.pipeline.works] == [False, True]


@pytest.mark.parametrize("path", ["/metric", "/v1/models/tiny", "metrics", "/"])
async def test_a_public_route_that_does_not_exist_is_an_error_at_the_start(open_site, path):
    with pytest.raises(InvalidConfig, match="is not a path of this server"):
        async with open_site(public_routes=path):
            pass


def test_a_keys_file_is_a_reason_to_share():
    assert Config(keys_file="x").needs_key
    assert Config(keys_file="x").share(10) == 5
