"""Row F26: what tenants see, and what is the operator's."""

import pytest

from support.rows import SECRETS

CHAT = "/v1/chat/completions"


def body():
    return {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


def refused(reply, status, code):
    assert (reply.status, reply.code) == (status, code)


def as_(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("method", ["GET", "OPTIONS", "POST"])
async def test_f26_a_tenants_key_sees_nothing_of_others_and_of_the_machine(open_site, method):
    """Proved with ADMIN empty: /cluster and /metrics answer any tenant."""
    async with open_site(api_key="one,two", admin_key="operator") as web:
        for path in ("/cluster", "/metrics"):
            for key, status, code in (
                ("one", 403, "forbidden"),
                ("three", 401, "invalid_api_key"),
                ("operato", 401, "invalid_api_key"),
            ):
                reply = await web.ask(path, b"", method, as_(key))
                refused(reply, status, code)
                assert not SECRETS.search(reply.body.decode())
            assert (await web.ask(path, b"", method)).status == 401
            reply = await web.ask(path, b"", method, {"Authorization": "Basic operator"})
            assert reply.status == 401
        reply = await web.ask("/cluster", headers=as_("one"))
        assert "TRIPTYCH_ADMIN_KEY" in reply.json["error"]["message"]  # what the operator can do


async def test_f26_the_admin_key_sees_the_server_and_may_ask_as_a_tenant_of_its_own(open_site):
    async with open_site(api_key="one", admin_key="operator, other") as web:
        for key in ("operator", "other"):
            assert (await web.ask("/cluster", headers=as_(key))).json["workers"]
            assert b"triptych_" in (await web.ask("/metrics", headers=as_(key))).body
        for key in ("one", "operator", "other"):
            assert (await web.ask(CHAT, body(), headers=as_(key))).status == 200
        assert len({work.salt for work in web.pipeline.works}) == 3


async def test_f26_without_an_admin_key_no_tenant_sees_the_server(open_site):
    async with open_site(api_key="one") as web:
        for path in ("/cluster", "/metrics"):
            refused(await web.ask(path, headers=as_("one")), 403, "forbidden")


async def test_f26_an_admin_key_alone_closes_those_two_paths_and_no_other(open_site):
    async with open_site(admin_key="operator") as web:
        for path in ("/cluster", "/metrics"):
            refused(await web.ask(path), 401, "invalid_api_key")
            assert (await web.ask(path, headers=as_("operator"))).status == 200
        for path in ("/v1/models", "/openapi.json", "/health"):
            assert (await web.ask(path)).status == 200
        assert (await web.ask(CHAT, body(), headers=as_("operator"))).status == 200
        assert (await web.ask(CHAT, body())).status == 200
        assert {work.salt for work in web.pipeline.works} == {""}  # one tenant, as without keys


async def test_f26_tenants_see_no_address_and_no_other_tenant(open_site):
    """Bodies and headers of what is left to them, while another has asked and uploaded."""
    async with open_site(api_key="one,two", admin_key="operator") as web:
        await web.ask(CHAT, body(), headers=as_("one"))
        upload = (await web.ask("/v1/media", b"12345", headers=as_("one"))).json["id"]
        for path in ("/health", "/live", "/v1/models", "/openapi.json", "/nothing"):
            reply = await web.ask(path, headers=as_("two"))
            told = reply.body.decode() + str(reply.headers)
            assert not SECRETS.search(told), told
            assert upload.removeprefix("media://") not in told
            usual = {"content-type", "content-length", "connection", "date", "x-request-id"}
            assert set(reply.headers) <= usual
