"""``triptych serve --launch ray`` on a Ray cluster of several nodes, all of them on this machine.

Run by ``make test-ray``, in an environment that has Ray. Each guard was switched off once: without
``max_restarts`` no killed actor comes back, without ``max_task_retries`` neither does its worker,
without ``scheduling_strategy`` all workers share a node, without ``actor.stop`` no worker takes its
leave, unless tied to it a worker outlives its actor, without ``_check_nodes`` machines that cannot
meet are served.
"""

import concurrent.futures
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support import pictures
from support.nats_server import nats_server
from support.servers import image_part, serving, text_part

# For Ray's processes and for those of tests. Ray reads it when it is imported.
os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}
ray = pytest.importorskip("ray", reason="Ray is not installed: make setup-ray")

LOCAL, FAR = "127.0.0.2", "127.0.0.3"  # not 127.0.0.1, which Ray takes for the machine's name
FAKE = ("--engine=fake", "--pattern=E/P/D", "--enable-multimodal")
LONG = 90  # seconds: two noisy cores, and Ray starts a process for each actor


@pytest.fixture(scope="module")
def cluster():
    """Two nodes, each large enough for all workers."""
    from ray.cluster_utils import Cluster

    node = {"node_ip_address": LOCAL, "num_cpus": 4}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": True})
    cluster.add_node(**node)
    yield cluster
    cluster.shutdown()


@pytest.fixture
def on_ray(cluster):
    return ("--launch=ray", f"--ray-address={cluster.address}", *FAKE)


def actors(cluster):
    """Those of our namespace that are not dead, by name."""
    from ray.util.state import list_actors

    host = cluster.head_node.webui_url
    found = list_actors(f"http://{host}", detail=True, raise_on_missing_output=False)
    return {one.name: one for one in found if one.state != "DEAD"}


def questions():
    yield "Hello"
    for number in range(3):
        picture = image_part(pictures.encoded(pictures.draw(number)))
        yield [picture, text_part(f"What is number {number}?")]


def answers(server):
    told = [server.chat(question, max_tokens=12) for question in questions()]
    assert [one.status for one in told] == [200] * len(told)
    return [one.json["choices"] for one in told]


@pytest.fixture(scope="module")
def elsewhere():
    """The answers of a server without Ray."""
    with serving(*FAKE) as server:
        return answers(server)


def gone(pid):
    """Whether there is no such process; a zombie is gone too."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def wait_gone(pids):
    end = time.monotonic() + LONG
    while left := [pid for pid in pids if not gone(pid)]:
        assert time.monotonic() < end, f"still there: {left}"
        time.sleep(0.1)


def worker_pids(server):
    return [worker["pid"] for worker in server.cluster().values()]


def test_workers_are_placed_over_the_nodes_and_answer_as_elsewhere(cluster, on_ray, elsewhere):
    with serving(*on_ray, "--ray-cpus=0.5") as server:  # so little that all fit on one node
        assert answers(server) == elsewhere
        placed = actors(cluster)
        assert {name: one.state for name, one in placed.items()} == dict.fromkeys(
            ["E-0", "P-0", "D-0"], "ALIVE"
        )
        assert len({one.node_id for one in placed.values()}) == 2
        assert {one.ray_namespace for one in placed.values()} == {"triptych"}
        assert {one.required_resources["CPU"] for one in placed.values()} == {0.5}
        assert "TRIPTYCH" not in repr(placed)  # no secret where the dashboard shows it
        pids = worker_pids(server)
    assert server.process.returncode == 0
    wait_gone(pids)
    assert actors(cluster) == {}


def test_a_killed_worker_and_a_killed_actor_come_back(cluster, on_ray, elsewhere):
    with serving(*on_ray) as server:
        before = server.cluster()
        server.wait(lambda: "ready after" in server.tail(), what="it says that it is ready")
        server.kill("D-0")
        server.wait(lambda: _newer(server, before, "D-0"), LONG, "the worker is back")
        assert answers(server) == elsewhere
        os.kill(actors(cluster)["E-0"].pid, signal.SIGKILL)
        wait_gone([before["E-0"]["pid"]])  # it was tied to its actor
        server.wait(lambda: _newer(server, before, "E-0"), LONG, "the actor's worker is back")
        assert answers(server) == elsewhere
        restarts = {name: one.num_restarts for name, one in actors(cluster).items()}
        assert int(restarts["D-0"]) >= 1
        assert int(restarts["E-0"]) >= 1


def _newer(server, before, name):
    now = server.cluster().get(name)
    return now is not None and now["epoch"] > before[name]["epoch"] and server.healthy()


def test_workers_of_a_lost_node_come_back_on_another(cluster, on_ray, elsewhere):
    lost = cluster.add_node(node_ip_address=LOCAL, num_cpus=4, resources={"third": 1})
    with serving(*on_ray) as server:
        before = server.cluster()
        server.wait(lambda: "ready after" in server.tail(), what="it says that it is ready")
        there = [n for n, one in actors(cluster).items() if one.node_id == lost.node_id]
        assert there, "none was placed on the third node"
        cluster.remove_node(lost, allow_graceful=False)
        wait_gone([before[name]["pid"] for name in there])
        for name in there:
            server.wait(lambda name=name: _newer(server, before, name), LONG, f"{name} is back")
        assert answers(server) == elsewhere


def test_running_requests_finish_when_it_stops(on_ray):
    with serving(*on_ray, "--fake-step-ms=100") as server:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            asking = pool.submit(server.chat, "Hello", max_tokens=40, ignore_eos=True)
            server.wait(lambda: server.cluster()["D-0"]["running"] == 1, what="it runs")
            server.process.send_signal(signal.SIGTERM)
            answer = asking.result(timeout=LONG)
        assert answer.status == 200
        assert answer.json["usage"]["completion_tokens"] == 40
        assert server.process.wait(timeout=LONG) == 0


def test_workers_deregister_when_it_stops(cluster, on_ray, tmp_path):
    """One that is killed instead leaves its record behind."""

    def records():
        return {path.stem for path in tmp_path.glob("*.json")}

    with serving(*on_ray, f"--run-dir={tmp_path}") as server:
        server.wait(lambda: "ready after" in server.tail(), what="it says that it is ready")
        assert records() == {"E-0", "P-0", "D-0"}
        pids = worker_pids(server)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=LONG) == 0
        assert "Traceback" not in server.tail()
        assert records() == set()
    wait_gone(pids)


def test_nothing_outlives_a_killed_serve(cluster, on_ray):
    with serving(*on_ray) as server:
        pids = worker_pids(server)
        server.process.kill()
        server.process.wait(timeout=30)
        wait_gone(pids)
    end = time.monotonic() + LONG
    while actors(cluster):
        assert time.monotonic() < end, actors(cluster)
        time.sleep(0.2)


def refusal(*words):
    argv = [sys.executable, "-m", "triptych", "serve", *words, "--port=0"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LONG * 2)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_worker_that_does_not_start_is_reported_in_its_own_words(cluster, on_ray):
    said = refusal(*on_ray, "--worker-host=192.0.2.1")
    assert "does not start" in said
    assert "--worker-host" in said
    assert actors(cluster) == {}


def test_a_second_server_needs_a_namespace_of_its_own(on_ray, elsewhere):
    with serving(*on_ray) as server:
        assert "--ray-namespace" in refusal(*on_ray)
        with serving(*on_ray, "--ray-namespace=other") as other:
            assert answers(other) == elsewhere
        assert answers(server) == elsewhere


def hosts_said(server):
    return re.findall(r"is ready at ([0-9.]+):", server.tail())


def test_several_machines_need_a_rendezvous_address(cluster, on_ray, elsewhere):
    far = cluster.add_node(node_ip_address=FAR, num_cpus=4)
    try:
        assert "--join nats://host:4222" in refusal(*on_ray)
        with nats_server() as nats:
            env = {"TRIPTYCH_SECRET": "x" * 32}
            # A node has room for one. This machine may have fewer cores than Ray is told.
            apart = ("--ray-cpus=3", "--cpu-threads=1", f"--join={nats.url}")
            with serving(*on_ray, *apart, env=env) as server:
                assert answers(server) == elsewhere
                server.wait(lambda: len(hosts_said(server)) == 3, what="Ray passes on all lines")
                assert set(hosts_said(server)) == {LOCAL, FAR}  # each on its node's address
    finally:
        cluster.remove_node(far)


def test_a_cluster_that_is_not_there_is_named():
    said = refusal("--launch=ray", "--ray-address=ray://127.0.0.1:1", "--engine=fake")
    assert "no Ray cluster at --ray-address ray://127.0.0.1:1" in said
