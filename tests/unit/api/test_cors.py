"""Pages of other origins: preflight requests, and headers on every kind of answer."""

import pytest

from triptych.api.cors import cors_policy
from triptych.config import Config
from triptych.errors import InvalidConfig

PAGE = "https://chat.example.com"
CHAT = "/v1/chat/completions"
HI = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
ALLOW = "access-control-allow-origin"


def preflight(origin=PAGE, method="POST"):
    wanted = {"Access-Control-Request-Headers": "authorization,x-stainless-os"}
    return {"Origin": origin, "Access-Control-Request-Method": method} | wanted


def as_(key):
    return {"Authorization": f"Bearer {key}"}


async def test_a_preflight_request_needs_no_key(open_site):
    async with open_site(api_key="one", cors_origins=f"{PAGE}, http://localhost:3000") as web:
        for path, methods in ((CHAT, "POST, OPTIONS"), ("/v1/models", "GET, OPTIONS, HEAD")):
            reply = await web.ask(path, b"", "OPTIONS", preflight())
            assert (reply.status, reply.body) == (200, b"")
            assert reply.headers[ALLOW] == PAGE
            assert reply.headers["vary"] == "origin"
            assert reply.headers["access-control-allow-methods"] == methods.lower()
            allowed = reply.headers["access-control-allow-headers"].split(", ")
            assert {"authorization", "content-type", "x-api-key", "*"} == set(allowed)
            assert int(reply.headers["access-control-max-age"]) > 0
            assert "access-control-allow-credentials" not in reply.headers
        reply = await web.ask(CHAT, b"", "OPTIONS", preflight("https://other.example.com"))
        assert ALLOW not in reply.headers
        assert reply.headers["vary"] == "origin"
        # Other paths, and other uses of OPTIONS, need a key as before.
        reply = await web.ask("/nothing", b"", "OPTIONS", preflight())
        assert (reply.status, reply.headers[ALLOW]) == (401, PAGE)
        reply = await web.ask(CHAT, b"", "OPTIONS", {"Origin": PAGE})
        assert (reply.status, reply.headers[ALLOW]) == (401, PAGE)
        assert not web.pipeline.works


async def test_every_kind_of_answer_has_the_headers(open_site):
    async with open_site(api_key="one", cors_origins=PAGE) as web:
        ours = {"Origin": PAGE, **as_("one")}
        for status, path, body, method, headers in (
            (200, CHAT, HI, None, ours),
            (200, CHAT, HI | {"stream": True}, None, ours),
            (200, "/v1/models", None, "HEAD", ours),
            (200, "/live", None, None, {"Origin": PAGE}),
            (400, CHAT, b"{", None, ours),
            (401, CHAT, HI, None, {"Origin": PAGE}),
            (403, "/cluster", None, None, ours),
            (404, "/nothing", None, None, ours),
            (404, "/v1/models/none", None, None, ours),
            (405, CHAT, None, None, ours),
            (413, "/live", b"x" * 20_000, None, ours),
        ):
            reply = await web.ask(path, body, method, headers)
            assert reply.status == status
            assert reply.headers[ALLOW] == PAGE, status
            assert reply.headers["vary"] == "origin"
            exposed = reply.headers["access-control-expose-headers"]
            assert {"x-request-id", "retry-after", "x-ratelimit-remaining-tokens"} <= set(
                exposed.split(", ")
            )
            other = await web.ask(path, body, method, headers | {"Origin": "https://x.example"})
            assert other.status == status
            assert ALLOW not in other.headers


async def test_any_origin(open_site):
    async with open_site(cors_origins="*") as web:
        for headers in (preflight("https://any.example"), {}):
            reply = await web.ask(CHAT, b"", "OPTIONS", headers)
            assert reply.headers[ALLOW] == "*"
            assert "vary" not in reply.headers
            assert "access-control-allow-credentials" not in reply.headers


async def test_without_the_setting_nothing_is_added(web):
    reply = await web.ask(CHAT, b"", "OPTIONS", preflight())
    assert reply.headers["allow"] == "post, options"
    assert not [name for name in reply.headers if "access-control" in name or name == "vary"]


@pytest.mark.parametrize(
    "origins",
    ["*,https://a.example", "a.example", "https://a.example/", "https://A.example", "null",
     "https://u@a.example", "https://*.example"],
)  # fmt: skip
def test_what_is_no_origin_is_refused(origins):
    with pytest.raises(InvalidConfig, match="--cors-origins"):
        cors_policy(Config(cors_origins=origins))
