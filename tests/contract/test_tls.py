"""``--worker-tls``: what frontend and workers say is encrypted, and who ends TLS between them is
refused."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from support.relay import Relay
from triptych.commands import launch
from triptych.config import Config
from triptych.errors import InvalidConfig, StartError, WorkerLost
from triptych.messages import Delta, Job, MediaItem, Sampling, Work, WorkerAnswer, WorkerRequest
from triptych.runtime.connection import WorkerConnection
from triptych.runtime.planes import Planes, WorkerTls, open_planes, tls
from triptych.runtime.server import CallServer, Reply
from triptych.stages import process
from triptych.topology import Role

SECRET = "a cluster's secret"
MARK = b"a picture that nobody else shall see"


@pytest.fixture(scope="module")
def worker_tls() -> WorkerTls:
    return WorkerTls()  # makes its certificate once


@pytest.fixture(params=["tcp", "http"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def measure(ask: WorkerRequest, reply: Reply) -> None:
    assert isinstance(ask, Job)
    reply.send(Delta(tuple(len(item.data) for item in ask.work.media)))


@contextlib.asynccontextmanager
async def serving(name: str, planes: Planes) -> AsyncIterator[str]:
    server = CallServer(measure, SECRET, "PD-0", 7)
    try:
        yield await server.start("127.0.0.1", 0, planes.named(name))
    finally:
        await server.close()


async def sizes(address: str, planes: Planes, *data: bytes) -> list[WorkerAnswer]:
    connection = await WorkerConnection.open(address, SECRET, "PD-0", 7, planes=planes)
    got: list[WorkerAnswer] = []
    media = tuple(MediaItem("image", i, blob) for i, blob in enumerate(data))
    try:
        await connection.call(Job(Work("r", (1,), media, Sampling(seed=1))), got.append).done()
    finally:
        await connection.close()
    return got


class Wire:
    """A cable that somebody listens to."""

    def __init__(self) -> None:
        self.heard = bytearray()

    @contextlib.asynccontextmanager
    async def to(self, address: str) -> AsyncIterator[str]:
        """The same address, through the cable."""
        scheme, _, rest = address.rpartition("://")
        there, slash, path = rest.partition("/")
        host, _, port = there.partition(":")

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(1 << 16):
                    self.heard += data
                    writer.write(data)
                    await writer.drain()
            writer.close()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            await asyncio.gather(pass_on(reader, far_writer), pass_on(far_reader, writer))

        cable = await asyncio.start_server(accept, "127.0.0.1", 0)
        own = cable.sockets[0].getsockname()[1]
        try:
            yield f"{scheme}://" * bool(scheme) + f"127.0.0.1:{own}{slash}{path}"
        finally:
            cable.close()


@pytest.mark.parametrize("secured", [True, False])
async def test_f24_with_tls_a_proxy_can_read_nothing(
    name: str, worker_tls: WorkerTls, secured: bool
) -> None:
    planes, wire = Planes(tls=worker_tls if secured else None), Wire()
    large = MARK * (1 << 16)
    async with serving(name, planes) as address, wire.to(address) as tapped:
        assert address.startswith(("tls://", "wss://")) is secured
        assert await sizes(tapped, planes, MARK, large) == [Delta((len(MARK), len(large)))]
    assert len(wire.heard) > len(large)
    # What a caller sends over http is masked, which keeps nothing from anybody.
    assert (MARK in wire.heard) is (not secured and name == "tcp")


async def test_f24_a_proxy_that_ends_tls_is_refused(name: str, worker_tls: WorkerTls) -> None:
    """It has a certificate of its own. Proved with ``peer_fingerprint`` and ``binding`` empty."""
    planes, false = Planes(tls=worker_tls), Planes(tls=WorkerTls())
    async with serving(name, planes) as address:
        relay = Relay(false.named(name), address)
        try:
            with pytest.raises(WorkerLost, match="something between them terminates TLS"):
                await sizes(await relay.start(), planes, MARK)
        finally:
            await relay.close()
        assert relay.passed == [0, 0]
        assert MARK not in relay.seen
        assert await sizes(address, planes, MARK) == [Delta((len(MARK),))]


async def test_with_tls_no_call_goes_unencrypted(name: str, worker_tls: WorkerTls) -> None:
    async with serving(name, Planes()) as address:
        with pytest.raises(WorkerLost, match="offers no TLS, which --worker-tls demands"):
            await sizes(address, Planes(tls=worker_tls))
    async with serving(name, Planes(tls=worker_tls)) as address:  # the address says what it needs
        assert await sizes(address, Planes()) == [Delta(())]


@pytest.mark.parametrize(
    ("address", "why"),
    [("nats://triptych.PD-0", "go through NATS"), ("https://ingress/PD-0", "ends at an ingress")],
)
async def test_f24_with_tls_no_call_passes_a_proxy_that_reads(
    worker_tls: WorkerTls, address: str, why: str
) -> None:
    """Proved with tcp and http alone as the schemes that are refused."""
    with pytest.raises(WorkerLost, match=f"{why}.*, which --worker-tls demands: start it with"):
        await sizes(address, Planes(tls=worker_tls))


async def test_f28_a_client_without_tls_leaves_no_log_lines(
    name: str, worker_tls: WorkerTls, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(name, Planes(tls=worker_tls)) as address:
        port = int(address.split("/")[2].rpartition(":")[2])
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()
        assert await sizes(address, Planes()) == [Delta(())]
    assert [line for line in caplog.records if line.levelname != "DEBUG"] == []


async def test_a_certificate_can_be_given(tmp_path: Path) -> None:
    cert, key = tls._make(tmp_path)
    config = Config(worker_tls=True, worker_tls_cert=str(cert), worker_tls_key=str(key))
    async with open_planes(config, "test") as planes, serving("tcp", planes) as address:
        host, _, port = address.removeprefix("tls://").rpartition(":")
        shown = await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))
        assert ssl.PEM_cert_to_DER_cert(shown) == ssl.PEM_cert_to_DER_cert(cert.read_text())
        assert await sizes(address, planes, MARK) == [Delta((len(MARK),))]


async def test_without_openssl_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(StartError, match="--worker-tls needs the program openssl"):
        await WorkerTls().certificate()


async def test_a_missing_part_of_a_certificate_is_reported_before_loading(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of ``serve`` before it starts a process, of a worker before its engine."""
    monkeypatch.setenv("PATH", "/nowhere")
    config = launch.resolve(Config(engine="fake", worker_tls=True, run_dir=str(tmp_path)))
    with pytest.raises(StartError, match="--worker-tls needs the program openssl"):
        launch.check_config(config)
    loads: list[object] = []
    monkeypatch.setattr(process, "_load", lambda *_: loads.append(_))
    with pytest.raises(StartError, match="--worker-tls needs the program openssl"):
        await process.run_worker(config, Role("EPD"), "EPD-0", SECRET)
    assert not loads
    absent = msgspec.structs.replace(config, worker_tls_cert="/not/there")
    with pytest.raises(InvalidConfig, match="--worker-tls-cert or --worker-tls-key cannot be used"):
        launch.check_config(absent)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (Config(worker_tls_cert="a.pem"), "need --worker-tls"),
        (Config(worker_tls=True, request_plane="nats"), "NATS has TLS of its own"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(config: Config, told: str) -> None:
    with pytest.raises(InvalidConfig, match=told):
        tls.worker_tls(config)


async def test_a_file_that_is_not_a_certificate_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.pem").write_text("nothing")
    with pytest.raises(InvalidConfig, match="--worker-tls-cert or --worker-tls-key cannot be used"):
        await WorkerTls(str(tmp_path / "a.pem")).certificate()


async def test_a_trusted_certificate_is_refused_with_words(tmp_path: Path) -> None:
    """Its first line differs. Proved with ``index`` outside of the try: a traceback."""
    cert, key = tls._make(tmp_path)
    text = cert.read_text().replace(" CERTIFICATE", " TRUSTED CERTIFICATE")
    cert.write_text(text)
    with pytest.raises(InvalidConfig, match="does not begin with -----BEGIN CERTIFICATE"):
        await WorkerTls(str(cert), str(key)).certificate()


async def test_an_encrypted_key_is_refused_and_no_password_asked_for(tmp_path: Path) -> None:
    """Proved without ``_refuse_password``: OpenSSL asks on the terminal."""
    cert, key = tls._make(tmp_path)
    locked = tmp_path / "locked.pem"
    words = ["openssl", "pkey", "-in", key, "-out", locked, "-aes256", "-passout", "pass:sesame"]
    subprocess.run(words, check=True, start_new_session=True)  # noqa: ASYNC221
    with pytest.raises(InvalidConfig, match="--worker-tls-key is encrypted"):
        await WorkerTls(str(cert), str(locked)).certificate()
