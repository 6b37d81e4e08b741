"""A real server with TLS, named keys, public routes, CORS and an access log, all at once."""

import asyncio
import json
import os
import random
import socket
import ssl
import subprocess
import sys

import httpx2
import openai
import pytest
from tests.integration import test_strict_client as strict

from support.certificates import Authority
from support.servers import serving

ALICE = "of-alice-and-long-enough"
PAGE = "https://chat.example.com"
EXCHANGES = 1500
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def files(authority, tmp_path_factory):
    folder = tmp_path_factory.mktemp("access")
    cert, key = authority.sign("first")
    (folder / "both.pem").write_bytes(cert.read_bytes() + key.read_bytes())
    (folder / "keys.toml").write_text(
        f'[[key]]\nname = "alice"\nkey = "{ALICE}"\nrequests_per_minute = 5\n'
    )
    return folder


@pytest.fixture(scope="module")
def server(authority, files):
    flags = (
        "--engine=fake", "--pattern=EPD", "--enable-multimodal", "--fake-step-ms=0",
        f"--tls-cert={files / 'both.pem'}", f"--keys-file={files / 'keys.toml'}",
        f"--cors-origins={PAGE}", "--public-routes=/metrics", "--access-log",
    )  # fmt: skip
    env = {"TRIPTYCH_API_KEY": strict.KEY}
    with serving(*flags, env=env, context=authority.client()) as running:
        yield running


class TLSTraffic(strict.Traffic):
    """Without what ends a connection: with TLS the end takes longer."""

    def draw(self, rnd):
        asked = super().draw(rnd)
        while asked.refused:
            asked = super().draw(rnd)
        return asked


def test_strict_exchanges_over_tls(server, authority, monkeypatch):
    context = authority.client()

    async def connect(port, slow):
        sock = socket.socket()
        if slow:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        return await asyncio.open_connection(sock=sock, ssl=context, server_hostname="127.0.0.1")

    ways = {way: weight for way, weight in strict.WAYS.items() if way != "half-close"}
    monkeypatch.setattr(strict, "connect", connect)
    monkeypatch.setattr(strict, "WAYS", ways)
    monkeypatch.setattr(strict, "PROMPTS", 6)
    traffic = TLSTraffic(strict.specs(server), server.model)
    state = {"checked": 0, "connections": 0}

    async def drive():
        async with asyncio.TaskGroup() as group:
            for number in range(6):
                rnd = random.Random(f"{strict.SEED} tls {number}")
                group.create_task(strict.drive(server.port, traffic, rnd, state, EXCHANGES))

    asyncio.run(drive())
    assert "Traceback" not in server.tail(), server.tail()


def test_the_official_client_and_the_limits_of_its_key(server, authority):
    client = openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key=ALICE,
        max_retries=0,
        http_client=httpx2.Client(verify=authority.client()),
    )
    with client:
        for _ in range(5):
            client.chat.completions.create(model=server.model, messages=HI, max_tokens=2)
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(model=server.model, messages=HI)
        assert refused.value.code == "rate_limit_exceeded"
        assert int(refused.value.response.headers["retry-after"]) >= 1

    def lines():
        found = [line for line in server.tail().splitlines() if '"key":"alice"' in line]
        return [json.loads(line.removeprefix("[frontend] ")) for line in found]

    server.wait(lambda: len(lines()) >= 6, what="six lines in the access log")
    assert lines()[-1]["error"] == "rate_limit_exceeded"
    assert lines()[-2]["output_tokens"] == 2
    assert lines()[-2]["stages_ms"]
    assert ALICE not in server.tail()


def test_public_routes_and_pages(server, authority):
    with httpx2.Client(verify=authority.client()) as http:
        assert "triptych_requests_total" in http.get(f"{server.url}/metrics").text
        assert http.get(f"{server.url}/cluster").status_code == 401
        asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
        reply = http.options(f"{server.url}/v1/chat/completions", headers=asked)
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == PAGE


def test_ask_speaks_https(server, files):
    words = ["ask", "Hello?", "--max-tokens=2", f"--port={server.port}"]
    done = subprocess.run(
        [sys.executable, "-m", "triptych", *words, f"--tls-cert={files / 'both.pem'}"],
        env=os.environ | {"TRIPTYCH_API_KEY": strict.KEY},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert f"at https://127.0.0.1:{server.port}" in done.stderr


def test_renewed_files_are_used(server, authority, files):
    """The certificate and the keys, one after the other, without a restart."""
    cert, key = authority.sign("second")
    (files / "next").write_bytes(cert.read_bytes() + key.read_bytes())
    (files / "next").replace(files / "both.pem")
    (files / "keys.toml").write_text(f'[[key]]\nname = "bob"\nkey = "{ALICE}2"\n')

    def shown():
        with (
            socket.create_connection(("127.0.0.1", server.port)) as plain,
            authority.client().wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            return connection.getpeercert(True) == ssl.PEM_cert_to_DER_cert(cert.read_text())

    server.wait(shown, what="the new certificate is used")
    server.wait(
        lambda: server.request("/v1/models", key=f"{ALICE}2").status == 200, what="the new key"
    )
    assert server.request("/v1/models", key=ALICE).status == 401
