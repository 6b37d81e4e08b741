"""What of ``--launch ray`` needs no Ray; tests/cluster/test_ray.py has the rest."""

import asyncio
import sys
from concurrent.futures import Future
from types import SimpleNamespace

import msgspec
import pytest

from triptych.checkpoint import packaged_folder
from triptych.cli import _parser, main
from triptych.commands import launch, launch_ray
from triptych.commands.launch_ray import with_node_address
from triptych.config import Config, RaySettings
from triptych.errors import InvalidConfig, StartError
from triptych.runtime import supervisor
from triptych.runtime.supervisor import SupervisedProcess, Supervisor


def test_without_ray_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["serve", "--launch=ray", "--engine=fake", "--port=0"]) == 2
    assert "pip install 'triptych[ray]==" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "engine", "named", "given"),
    [
        ("cpu", "torch", -1, 0),
        ("auto", "torch", -1, 0),
        ("cuda", "torch", -1, 1),
        ("cuda", "fake", -1, 0),
        ("cuda", "vllm", 4, 4),
        ("cuda", "torch", 0.5, 0.5),
    ],
)
def test_gpus_of_a_worker(device, engine, named, given):
    config = Config(device=device, engine=engine)
    assert launch_ray.gpus_of_worker(config, RaySettings(gpus=named)) == given


def test_a_gpu_by_number_is_refused_with_ray():
    with pytest.raises(InvalidConfig, match="Use --device cuda"):
        launch_ray.gpus_of_worker(Config(device="cuda:1"), RaySettings())


def test_workers_get_what_they_must_prove_and_not_what_clients_send(monkeypatch):
    given = {
        "TRIPTYCH_SECRET": "s",
        "TRIPTYCH_NATS_PASSWORD": "p",
        "TRIPTYCH_API_KEY": "k",
        "TRIPTYCH_ADMIN_KEY_FILE": "/a",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    got = launch_ray.secrets_of(launch.child_environment(Config()))
    assert got["TRIPTYCH_SECRET"] == "s"
    assert got["TRIPTYCH_NATS_PASSWORD"] == "p"
    assert not [name for name in got if "KEY" in name]


def test_workers_do_not_get_the_launcher_setting():
    """A file for Ray serves on one machine too, and its processes know no such flags."""
    settings = {"model": str(packaged_folder("qwen")), "engine": "fake", "ray": {"cpus": 2}}
    config = launch.resolve(msgspec.convert(settings, Config))
    for child in launch.server_processes(config):
        _parser().parse_args(child.argv[3:])
        assert not [word for word in child.argv if "ray" in word]


def test_threads_follow_the_cpus_that_ray_reserves():
    settings = {"model": str(packaged_folder("qwen")), "engine": "fake", "ray": {"cpus": 3}}
    assert launch_ray._resolved(msgspec.convert(settings, Config)).cpu_threads == 3


def test_a_worker_listens_where_others_reach_it(monkeypatch):
    class Ray:
        class util:
            get_node_ip_address = staticmethod(lambda: "10.0.0.7")

    monkeypatch.setitem(sys.modules, "ray", Ray)
    assert with_node_address(Config()).worker_host == "127.0.0.1"  # no other host does
    assert with_node_address(Config(join="nats://n:4222")).worker_host == "10.0.0.7"
    named = Config(join="nats://n:4222", worker_host="10.1.0.7")
    assert with_node_address(named).worker_host == "10.1.0.7"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--worker-host=10.0.0.2"], "go to 10.0.0.2 without"),
        (["--join=nats://10.0.0.1"], "go to the nodes' addresses without"),
        (["--join=nats://10.0.0.1", "--worker-tls"], ""),
    ],
)
def test_calls_in_plain_between_nodes_are_warned_of(monkeypatch, capsys, flags, told):
    """Proved without ``_warn_of_plain_calls`` in ``serve``."""
    monkeypatch.setenv("TRIPTYCH_SECRET", "s" * 32)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["serve", "--launch=ray", "--engine=fake", "--port=0", *flags]) == 2
    warned = capsys.readouterr().err
    assert told in warned
    assert ("warning: calls to workers" in warned) is bool(told)


async def test_a_worker_that_dies_slowly_at_each_start_ends_the_server(monkeypatch):
    """Proved by forgetting deaths after STEADY_SECONDS in every case: it is started for ever."""
    monkeypatch.setattr(supervisor, "STEADY_SECONDS", 0.0)
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF", 0.0)
    exited = Future()
    exited.set_result((1, ["the engine died"]))
    lives = []

    def run(role, index):
        lives.append(index)
        return SimpleNamespace(future=lambda: exited)

    actor = SimpleNamespace(
        run=SimpleNamespace(remote=run), stop=SimpleNamespace(remote=lambda: None)
    )
    ray = SimpleNamespace(
        kill=lambda actor, no_restart=True: None, exceptions=SimpleNamespace(RayError=OSError)
    )
    worker = SupervisedProcess("EPD-0", elsewhere=launch_ray.RayActor(ray, actor, "EPD", 0))
    with pytest.raises(StartError, match=r"EPD-0 does not start.*(?s:.*)the engine died"):
        await asyncio.wait_for(Supervisor([worker]).run(), 10)
    assert len(lives) == supervisor.MAX_START_FAILURES


async def test_a_worker_that_is_refused_late_is_started_again(monkeypatch):
    """Ray may find a node for it when others serve already. Proved without ``elsewhere``."""
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF", 0.0)

    class Late:
        pid, last_lines, lives = None, (), 0

        def __init__(self):
            self.started, self.stopped = asyncio.Event(), asyncio.Event()

        async def run(self):
            self.lives += 1
            if self.lives == 3:
                self.started.set()
                await self.stopped.wait()
            return supervisor.EXIT_START_ERROR

        def stop(self):
            self.stopped.set()

        kill = stop

    late = Late()
    boss = Supervisor([SupervisedProcess("D-1", elsewhere=late)])
    boss.ready()
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        running = group.create_task(boss.run())
        await late.started.wait()
        boss.stop()
    assert running.result() == 0


async def test_a_stop_while_ray_restarts_an_actor_ends_it():
    """The dying actor may have received the stop. Proved without ``_stopping``: it runs again."""
    runs = []

    def run(*arguments):
        runs.append(arguments)
        done = Future()
        done.set_result((1, []))
        return SimpleNamespace(future=lambda: done)

    remote = SimpleNamespace(
        run=SimpleNamespace(remote=run), stop=SimpleNamespace(remote=lambda: None)
    )
    ray = SimpleNamespace(exceptions=SimpleNamespace(RayError=OSError))
    actor = launch_ray.RayActor(ray, remote)
    ray.kill = lambda killed, no_restart: actor.stop()
    assert await actor.run() == 1
    assert await actor.run() == 0
    assert len(runs) == 1
