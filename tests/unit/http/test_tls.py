"""HTTPS on the frontend's own protocol: handshakes, requests, streams, renewal."""

import asyncio
import http.client
import os
import ssl

import httpx2
import openai
import pytest

from support.certificates import Authority
from support.served_app import read, request
from triptych.config import Config, Limits
from triptych.errors import InvalidConfig
from triptych.http import tls
from triptych.http.acceptor import HANDSHAKES_FAILED
from triptych.observe.log import warning_totals

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def signed(authority):
    return authority.sign("server")


@pytest.fixture
def open_tls(open_site, signed):
    cert, key = signed
    return lambda limits=None, **fields: open_site(
        limits, **{"tls_cert": str(cert), "tls_key": str(key)} | fields
    )


async def connect(web, context):
    return await asyncio.open_connection("127.0.0.1", web.server.port, ssl=context)


async def ask(connection, *arguments):
    reader, writer = connection
    writer.write(request(*arguments))
    return await read(reader, arguments[0])


def common_name(connection):
    subject = connection[1].get_extra_info("peercert")["subject"]
    return dict(pair for part in subject for pair in part)["commonName"]


async def close(*connections):
    for _, writer in connections:
        writer.transport.abort()
    await asyncio.sleep(0)


async def test_the_official_client_over_tls(open_tls, authority):
    """Whole, streamed, and with a body of megabytes; a client that trusts no such CA gets none."""
    async with open_tls() as web:
        http = httpx2.AsyncClient(verify=authority.client())
        url = f"https://127.0.0.1:{web.server.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", http_client=http) as client:
            whole = await client.chat.completions.create(model="tiny", messages=HI)
            stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)
            texts = [c.choices[0].delta.content or "" async for c in stream if c.choices]
            assert "".join(texts) == whole.choices[0].message.content
        async with httpx2.AsyncClient(verify=authority.client()) as http:
            body = os.urandom(5_000_000)
            reply = await http.post(f"{url}/media", content=body)
            assert reply.json()["bytes"] == len(body)
            # many requests of one connection
            for _ in range(20):
                assert (await http.get(f"{url}/models")).status_code == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            await connect(web, ssl.create_default_context())


async def test_keep_alive_pipelining_head_and_refusals(open_tls, authority):
    async with open_tls() as web:
        reader, writer = connection = await connect(web, authority.client())
        writer.write(request("GET", "/live") * 3 + request("HEAD", "/live"))
        for method in ("GET", "GET", "GET", "HEAD"):
            assert (await read(reader, method)).status == 200
        reply = await ask(connection, "GET", "/nothing")
        assert (reply.status, reply.code, reply.headers["connection"]) == (
            404,
            "not_found",
            "close",
        )
        writer.close()


async def test_a_client_that_leaves_cancels_its_request(open_tls, authority, caplog):
    """Also one that says goodbye: with TLS there is no open half. Nothing is logged."""
    async with open_tls() as web:
        web.pipeline.endless = True
        for leave in (lambda w: w.transport.abort(), lambda w: w.close()):
            before = len(web.pipeline.cancelled)
            reader, writer = await connect(web, authority.client())
            body = b'{"model": "tiny", "stream": true, "messages": [{"role":"user","content":"a"}]}'
            writer.write(request("POST", "/v1/chat/completions", body))
            await reader.readuntil(b"data: ")
            leave(writer)
            async with asyncio.timeout(10):
                while len(web.pipeline.cancelled) == before:
                    await asyncio.sleep(0.01)
    assert not caplog.records


async def test_a_client_that_does_not_read_pauses_the_tokens(open_tls, authority):
    async with open_tls() as web:
        web.pipeline.endless = True
        reader, writer = await connect(web, authority.client())
        body = b'{"model": "tiny", "stream": true, "messages": [{"role":"user","content":"a"}]}'
        writer.write(request("POST", "/v1/chat/completions", body))
        async with asyncio.timeout(20):
            while not web.pipeline.paused:
                await asyncio.sleep(0.01)
            while web.pipeline.resumed < web.pipeline.paused:
                await reader.read(1 << 20)
        writer.transport.abort()


async def test_f13_slow_handshakes_are_cut(open_tls):
    """One that says nothing, and one that stops in its midst, within the time of a head."""
    async with open_tls(Limits(header_seconds=0.3)) as web:
        for first in (b"", b"\x16\x03\x01\x02\x00\x01"):
            reader, writer = await web.connect()
            writer.write(first)
            async with asyncio.timeout(10):
                assert not await reader.read()
        assert not web.server.connections


async def test_plain_http_is_refused_and_tls_12_is_served(open_tls, authority):
    async with open_tls() as web:
        before = warning_totals().get(HANDSHAKES_FAILED, 0)
        reader, writer = await web.connect()
        writer.write(request("GET", "/live"))
        async with asyncio.timeout(10):
            assert b"HTTP/" not in await reader.read()
            while warning_totals()[HANDSHAKES_FAILED] == before:
                await asyncio.sleep(0.01)
        old = authority.client()
        old.maximum_version = ssl.TLSVersion.TLSv1_2  # the oldest that is served
        connection = await connect(web, old)
        assert (await ask(connection, "GET", "/live")).status == 200
        await close(connection)


async def test_failed_handshakes_are_logged_in_words(open_tls, caplog):
    async def logged(text):
        async with asyncio.timeout(10):
            while text not in caplog.text:
                await asyncio.sleep(0.01)

    async with open_tls() as web:
        _, writer = await web.connect()
        writer.write(request("GET", "/live"))
        await logged("a client spoke plain HTTP to this HTTPS port")
        writer.close()
    async with open_tls() as web:  # whose log is in a new window
        client = http.client.HTTPSConnection("127.0.0.1", web.server.port, timeout=10)
        with pytest.raises(ssl.SSLCertVerificationError):  # asyncio would not send the alert
            await asyncio.to_thread(client.connect)
        await logged("a client does not trust the certificate of --tls-cert")


async def test_tls_to_a_plain_port_is_refused_at_once_and_logged(web, caplog):
    """Its first byte is enough. Clients then report a wrong version number."""
    for sent in (b"\x16", b"\x16\x03\x01\x02\x00\x01\x00"):
        reader, writer = await web.connect()
        writer.write(sent)
        async with asyncio.timeout(5):  # the deadline of a head is later
            assert b"not TLS" in await reader.read()
        writer.close()
    with pytest.raises(ssl.SSLError, match="WRONG_VERSION_NUMBER"):
        await connect(web, ssl.create_default_context())
    assert "a client speaks TLS to this plain HTTP port: set --tls-cert" in caplog.text


async def test_stopping_does_not_wait_for_handshakes(open_tls):
    async with open_tls() as web:
        reader, _ = await web.connect()
        await asyncio.sleep(0.05)  # its handshake has begun
        await web.server.close()
        async with asyncio.timeout(5):
            assert not await reader.read()


# --- renewal


async def renewed(web, context, name):
    """A connection that got the certificate of this name."""
    async with asyncio.timeout(20):
        while True:
            connection = await connect(web, context)
            if common_name(connection) == name:
                return connection
            await close(connection)
            await asyncio.sleep(0.05)


async def test_a_renewed_certificate_is_used_by_new_connections(
    open_site, authority, tmp_path, monkeypatch
):
    """As cert-manager does it: a link to a folder is swapped. Under load, no request fails."""
    monkeypatch.setattr("triptych.runtime.file_watch.WATCH_SECONDS", 0.05)
    for name in ("first", "second"):
        cert, key = authority.sign(name)
        (tmp_path / name).mkdir()
        (tmp_path / name / "tls.crt").write_bytes(cert.read_bytes())
        (tmp_path / name / "tls.key").write_bytes(key.read_bytes())
    link = tmp_path / "now"
    link.symlink_to("first")
    fields = {"tls_cert": str(link / "tls.crt"), "tls_key": str(link / "tls.key")}
    async with open_site(**fields) as web:
        old = await connect(web, authority.client())
        assert common_name(old) == "first"
        done, count = asyncio.Event(), 0

        async def load():
            nonlocal count
            while not done.is_set():
                connection = await connect(web, authority.client())
                assert (await ask(connection, "GET", "/live")).status == 200
                await close(connection)
                count += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(load())
            (tmp_path / "next").symlink_to("second")
            os.replace(tmp_path / "next", link)
            new = await renewed(web, authority.client(), "second")
            done.set()
        assert count
        assert (await ask(old, "GET", "/live")).status == 200  # it goes on
        assert (await ask(new, "GET", "/live")).status == 200
        await close(old, new)


async def test_a_broken_renewal_is_logged_and_the_old_certificate_stays(
    open_site, authority, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("triptych.runtime.file_watch.WATCH_SECONDS", 0.02)
    both = tmp_path / "both.pem"
    good = b"".join(path.read_bytes() for path in authority.sign("both"))
    both.write_bytes(good)
    async with open_site(tls_cert=str(both)) as web:
        both.write_bytes(b"not a certificate")
        async with asyncio.timeout(10):
            while "the old one stays" not in caplog.text:
                await asyncio.sleep(0.01)
        assert "is not PEM" in caplog.text
        connection = await connect(web, authority.client())
        assert (await ask(connection, "GET", "/live")).status == 200
        await close(connection)
        both.write_bytes(b"".join(path.read_bytes() for path in authority.sign("third")))
        await close(await renewed(web, authority.client(), "third"))


# --- files at the start


def test_files_that_cannot_be_used_are_refused_with_the_reason(authority, signed, tmp_path):
    cert, key = map(str, signed)
    _, other = authority.sign("other")
    (tmp_path / "der").write_bytes(ssl.PEM_cert_to_DER_cert(signed[0].read_text()))
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    for given, said in (
        (("/not/there.pem", key), "--tls-cert /not/there.pem cannot be read: No such file"),
        ((cert, "/not/there.key"), "--tls-key /not/there.key cannot be read: No such file"),
        ((str(tmp_path), key), "--tls-cert .* cannot be read: Is a directory"),
        ((str(tmp_path / "der"), key), "--tls-cert .* is not PEM"),
        ((key, key), "--tls-cert .* is not PEM: it has no line with '-----BEGIN CERTIFICATE"),
        ((cert, str(tmp_path / "der")), "--tls-key .* is not PEM: it has no line with 'PRIVATE"),
        ((cert, cert), "holds certificates but no private key: set --tls-key"),
        ((cert, ""), "server.pem holds certificates but no private key: set --tls-key"),
        ((cert, str(other)), "is not that of the first certificate"),
        ((str(broken), key), "OpenSSL cannot read"),
        ((cert, str(authority.lock(signed[1]))), "without a password"),
        (("", key), "--tls-key needs the certificate"),
    ):
        with pytest.raises(InvalidConfig, match=said):
            tls.server_certificate(Config(tls_cert=given[0], tls_key=given[1]))
    assert tls.server_certificate(Config()) is None
    assert tls.load_certificate(cert, key).minimum_version is ssl.TLSVersion.TLSv1_2
