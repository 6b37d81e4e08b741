"""Workers that a frontend sees and does not use are listed, with what to do."""

import asyncio
import contextlib

import pytest

from support.relay import Relay
from support.site import SECRET
from triptych.api.process import _tell_missing
from triptych.errors import NatsAway, NoWorkers, WorkerLost
from triptych.messages import WorkerRecord
from triptych.pipeline.membership import Membership
from triptych.runtime import discovery, frames
from triptych.runtime.connection import WorkerConnection
from triptych.runtime.directory import Directory
from triptych.runtime.planes import Planes
from triptych.runtime.server import CallServer
from triptych.topology import Role, Topology


async def nothing(ask, reply): ...


@contextlib.asynccontextmanager
async def worker(directory, name="PD-0", model="m", secret=SECRET, address=""):
    """A worker that is seen in discovery, whatever becomes of its callers."""
    epoch = await directory.claim(name)
    server = CallServer(nothing, secret, name, epoch)
    address = address or await server.start("127.0.0.1", 0)
    role = name.partition("-")[0]
    lease = await directory.register(
        WorkerRecord(name, role, epoch, address, 1, model, host="gpu-2 x 1")
    )
    try:
        yield server
    finally:
        await lease.close()
        await server.close()


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def frontend(directory, **settings):
    return Membership(Topology.parse("E/PD"), directory, SECRET, "round-robin", "m", **settings)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            {"model": "other"},
            "It serves another model (fingerprint other) than this frontend (m). Give both the same"
            ", or give one of the two",
        ),
        ({"name": "D-0"}, "It has the role D, and this frontend's pattern only E, PD. Give both"),
        ({"secret": "y" * 32}, "different secrets: give both the same TRIPTYCH_SECRET."),
        ({"address": "127.0.0.1:1"}, "(--worker-host), and is the port open?"),
        ({"address": "nats://there"}, "needs a NATS server: give its address with --join."),
    ],
    ids=["model", "role", "secret", "address", "plane"],
)
async def test_an_unused_worker_is_listed_with_the_reason(tmp_path, caplog, settings, why):
    """It is gone from the list when it leaves. Proved without the first line of ``_watch``."""
    directory = Directory(tmp_path)
    async with frontend(directory) as seen:
        async with worker(directory, **settings):
            await until(lambda: seen.unused)
            [one] = seen.unused
            assert (one.id, one.host) == (settings.get("name", "PD-0"), "gpu-2")
            assert why in one.why
            assert seen.peers == ()
            await until(lambda: why in caplog.text)
            assert {line.levelname for line in caplog.records} == {"WARNING"}
        await until(lambda: not seen.unused)


async def test_another_version_is_logged_on_both_sides(tmp_path, caplog, monkeypatch):
    directory = Directory(tmp_path)
    async with worker(directory), frontend(directory) as seen:
        await until(lambda: seen.peers)
        monkeypatch.setattr(frames, "PROTOCOL_VERSION", 2)  # the hello is already sent
        hello = frames.Hello
        monkeypatch.setattr("triptych.runtime.connection.Hello", lambda _, *rest: hello(1, *rest))
        seen.peers[0].connections[0].abort("a test")
        await until(lambda: seen.unused)
        why = "protocol version 2, its caller another: run the same version of Triptych"
        assert why in seen.unused[0].why
        assert f"refused a caller: the worker speaks {why}" in caplog.text
        monkeypatch.undo()
        await until(lambda: seen.peers)
        assert seen.unused == ()


async def test_many_attempts_with_another_secret_are_logged_once(tmp_path, caplog):
    """Proved without ``Server._refused``."""
    directory = Directory(tmp_path)
    async with worker(directory, secret="y" * 32) as refusing, frontend(directory) as seen:
        await until(lambda: "The connection to worker" in caplog.text)  # after four tries
        assert caplog.text.count("refused a caller: the two sides have different secrets") == 1
        assert "TRIPTYCH_SECRET" in seen.unused[0].why
        assert refusing.called


async def test_a_call_to_another_incarnation_is_refused():
    """It may come from anywhere, by an address of old. Proved by counting every hello."""
    server = CallServer(nothing, SECRET, "PD-0", 7)
    address = await server.start("127.0.0.1", 0)
    for epoch in (6, 7):
        assert not server.called
        with contextlib.suppress(WorkerLost):
            await (await WorkerConnection.open(address, "y" * 32, "PD-0", epoch)).close()
    assert server.called
    await server.close()


async def test_a_frontend_with_workers_looks_in_no_other_namespace(tmp_path, monkeypatch, capfd):
    """Whatever keeps it from using them. Proved with ``found`` left out of ``tell_waiting``."""

    class Shared(Directory):
        async def others(self):
            return ("prod",)

    monkeypatch.setattr(discovery, "WAITING_SECONDS", 0.01)
    directory = Shared(tmp_path)
    async with frontend(directory) as seen:
        waits = f"still waiting for workers of E, PD in --run-dir {tmp_path}"
        async with worker(directory, secret="y" * 32):
            await until(lambda: seen.unused)
            await _tell_missing(directory, seen)
            told = f"{waits} (1 found and not used: /cluster says why)\n"
            assert capfd.readouterr().err == told
        await until(lambda: not seen.unused)
        await _tell_missing(directory, seen)
        assert (
            f"{waits}. Other namespaces in use: prod. Is --namespace right"
            in capfd.readouterr().err
        )


async def test_while_nats_is_away_errors_about_its_workers_say_so(tmp_path):
    """And not of others. Proved by asking only whether NATS is away."""

    class Client:
        is_connected = False

    directory, role = Directory(tmp_path), Role("PD")
    planes = Planes(Client())
    async with frontend(directory, planes=planes) as seen:
        async with worker(directory, address="127.0.0.1:1"):
            await until(lambda: seen.unused)
            with pytest.raises(NoWorkers):
                seen.choose(role)
        async with worker(directory, address="nats://there"):
            await until(lambda: seen.unused and "NATS is away" in seen.unused[0].why)
            with pytest.raises(NatsAway, match="NATS"):
                seen.choose(role)
            planes.client = None
            with pytest.raises(NoWorkers):
                seen.choose(role)


async def test_f24_a_record_that_leads_to_a_relay_is_listed_and_never_called(tmp_path, caplog):
    """Proved with ``EntrySigner.decode`` saying that all are signed: the relay passes the hello."""
    ours, forger = Directory(tmp_path, SECRET), Directory(tmp_path, "a guess")
    async with worker(ours, "E-0") as server:
        plane, address = Planes().named("tcp"), (await ours.view())["E-0"].address
        relay = Relay(plane, address)
        false = WorkerRecord("PD-0", "PD", await forger.claim("PD-0"), await relay.start(), 1, "m")
        lease = await forger.register(false)
        async with frontend(ours) as seen:
            await until(lambda: seen.peers and seen.unused)
            assert [peer.name for peer in seen.peers] == ["E-0"]
            [one] = seen.unused
            assert one.id == "PD-0"
            assert "not signed with this cluster's secret" in one.why
            assert caplog.text.count("worker 'PD-0' is not used. Its record is not signed") == 1
            await lease.close()
            await until(lambda: not seen.unused)
        assert relay.ends == []
        await relay.close()
        assert server.called


async def test_f28_a_flood_of_refused_and_broken_callers_is_two_lines_and_a_count(caplog):
    """Proved with ``RateLimitedLog.warning`` logging every one."""
    server = CallServer(nothing, SECRET, "PD-0", 7)
    host, _, port = (await server.start("127.0.0.1", 0)).rpartition(":")

    async def garbage():
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"\xff" * 100)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    for _ in range(30):
        await garbage()
        with pytest.raises(WorkerLost, match="different secrets"):
            await WorkerConnection.open(f"{host}:{port}", "y" * 32, "PD-0", 7)
    await server.close()
    totals = {"frames_broken": 30, "frames_forged": 0, "callers_refused": 30}
    assert server.limited.totals == totals
    lines = [
        line for line in caplog.messages if "refused a caller" in line or "broken frame" in line
    ]
    assert len(lines) <= 2 + 2  # one more of each if the flood took long
