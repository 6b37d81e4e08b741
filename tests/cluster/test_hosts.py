"""Frontend, E, P and D on a host each, and NATS on a fifth: the tokens of one machine."""

import asyncio
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from tools import tiny

from support.hosts import hosts, possible
from support.promises import LONG, soon, unharmed
from support.requests64 import ask_all, mixed
from support.servers import TestServer, serving
from support.streams import body, equal, streamed, whole

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not possible(), reason="network namespaces can't be made here: it takes root"
    ),
]
SECRET = {"TRIPTYCH_SECRET": "s" * 32}
PORT = 8000
PARTITION_SECONDS = 30.0 if LONG else 12.0  # two leases, at least
HEALED = 5.0  # seconds that are promised


@contextmanager
def cluster(tmp_path, roles, *flags, model=None, front_flags=()):
    """A host for the frontend, one for each role and one for NATS; all of them and the server."""
    with hosts(2 + len(roles), tmp_path) as (front, *others, nats):
        server = Path(sys.executable).parent / "nats-server"
        nats.start(str(server), "-js", "-a", nats.address, "-sd", str(tmp_path / "nats"))
        common = [f"--join=nats://{nats.address}:4222", "--enable-multimodal", *flags]
        words = [sys.executable, "-m", "triptych"]
        folder = [] if model is None else [str(model)]
        for host, (role, index) in zip(others, roles, strict=True):
            own = ["--role", role, "--index", str(index), "--worker-host", host.address]
            host.start(*words, "worker", *folder, *own, *common, env=SECRET)
        own = [f"--host={front.address}", f"--port={PORT}", f"--worker-host={front.address}"]
        process = front.start(*words, "frontend", *folder, *own, *front_flags, *common, env=SECRET)
        server = TestServer(process, PORT, str(front.log))
        server.url = f"http://{front.address}:{PORT}"
        try:
            server.wait(server.live, 60, "the frontend lives")
            server.wait(server.complete, 120, "every worker has joined")
            yield server, front, others, nats
        except BaseException as error:
            for host in (front, *others, nats):
                error.add_note(f"== {host.name} {host.address}\n{host.tail()}")
            raise


def ids(answers):
    return [answer["choices"][0]["token_ids"] for answer in answers]


@pytest.mark.parametrize("transport", ["auto", "nixl", "file", "inline"])
def test_five_hosts_give_the_tokens_of_one_machine(tmp_path, transport):
    """Sixty-four mixed requests. Tensors go by NIXL over TCP, or as --transport says, which shows
    in what was counted; and nothing listens at another address than its own."""
    folder, flags = tiny.ensure_checkpoint("qwen2_5_vl"), ("--pattern=E/P/D",)
    with serving(str(folder), "--enable-multimodal", *flags) as server:
        wanted = ids(asyncio.run(ask_all(server.url, server.model, mixed())))
    roles = [("E", 0), ("P", 0), ("D", 0)]
    shared = tmp_path / "shared"
    flags = (*flags, f"--transport={transport}")
    if transport == "file":
        flags = (*flags, f"--transfer-folder={shared}")
    with cluster(tmp_path, roles, *flags, model=folder) as (server, front, others, nats):
        got = asyncio.run(ask_all(server.url, server.model, mixed()))
        assert ids(got) == wanted
        used = "nixl" if transport == "auto" else transport
        workers = server.cluster()
        for worker in ("E-0", "P-0"):
            assert set(workers[worker]["bytes_sent"]) == {used}
        assert set(workers["D-0"]["bytes_received"]) == {used}
        for host in (front, *others, nats):
            assert host.listens_at() == {host.address}
        server.wait(lambda: not [*shared.glob("*.safetensors")], what="no file is left")


@pytest.mark.parametrize("ways", ["both", "one"])
def test_f15_a_host_behind_a_partition(tmp_path, ways):
    """Its streams go on elsewhere, token for token, and when it can be reached again it serves
    again: the same process, with its own place. One way: what the host says to frontend and
    NATS is lost, what they say arrives. Guard: the beats of the request plane (Link._heartbeat that
    drops no peer: streams hang until TCP gives up). In its long form it takes over a minute: four
    times fifty streams, and half a minute of partition."""
    roles = [("EP", 0), ("D", 0), ("D", 1)]
    flags = ["--engine=fake", "--fake-ttft-ms=50", "--fake-step-ms=40", "--pattern=EP/D*2"]
    with cluster(tmp_path, roles, *flags) as (server, front, others, nats), unharmed(server):
        bodies = [body(server, i, 60) for i in range(50)]
        wanted = whole(streamed(server, bodies), 60)
        lost, begun = others[2], []

        def cut():
            server.wait(lambda: server.cluster()["D-1"]["running"] > 0, what="D-1 is at work")
            begun.append(time.monotonic())
            if ways == "both":
                lost.cut_off()
            else:
                lost.drop_to(front)
                lost.drop_to(nats)

        equal(streamed(server, bodies, cut), wanted)
        server.wait(lambda: "D-1" not in server.cluster(), what="D-1 is missed")
        equal(streamed(server, bodies), wanted)
        time.sleep(max(0.0, begun[0] + PARTITION_SECONDS - time.monotonic()))
        if ways == "both":
            lost.plug_in()
        else:
            lost.reach(front)
            lost.reach(nats)
        soon(server, lambda: "D-1" in server.cluster(), HEALED, f"F15 ({ways}): healed")
        equal(streamed(server, bodies), wanted)
