"""``triptych serve --launch ray``: the frontend here, the workers as actors on a Ray cluster.

Ray finds a node for each worker and restarts it when its actor or its node dies. This process runs
the frontend, reports when all is ready and stops everything in order. If it dies, Ray ends the
actors. Neither requests nor tensors go through Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from triptych import placement, requirements
from triptych.commands import launch
from triptych.commands.ray_worker import Exit, RayWorker
from triptych.config import NO_KEYS, Config, RaySettings
from triptych.errors import InvalidConfig, StartError, install_hint
from triptych.host import free_port
from triptych.observe import log
from triptych.observe.log import print_status
from triptych.runtime import run_dir
from triptych.runtime.parent_death import EXIT_START_ERROR
from triptych.runtime.process import on_stop_signal
from triptych.runtime.supervisor import (
    EXIT_FORCED,
    MAX_START_FAILURES,
    Supervisor,
    consecutive_failures,
    restart_delay,
    start_error,
)

CONNECT_SECONDS = 5.0
END_SECONDS = 5.0  # for a worker to exit after it has drained


def serve_on_ray(config: Config) -> int:
    """Serve until SIGTERM, SIGHUP or Ctrl-C. Returns the exit code."""
    log.configure(config.log_format)
    requirements.check_packages(config, "frontend")
    settings, config = config.ray, _resolved(config)
    placement.refuse_devices(config.devices, "Ray")
    launch.open_checked_model(config)
    launch.check_media(config)
    launch.check_sources(config)
    if config.join:
        launch.cluster_secret()  # required: others may be part of that cluster
    launch.warn_of_short_secret(config)
    _warn_of_plain_calls(config)
    launch.warn_of_open_port(config)
    config = msgspec.structs.replace(config, port=free_port(config.host, config.port))
    with contextlib.ExitStack() as scope:
        ray = scope.enter_context(_connected(settings))
        _check_nodes(ray, config)
        if not config.join:
            path = scope.enter_context(run_dir.use(config.run_dir))
            config = msgspec.structs.replace(config, run_dir=str(path))
        asyncio.run(launch.check_names_free(config))
        each = gpus_of_worker(config, settings)
        print_status(launch.banner(config, [f"Ray place_workers workers, each with {each:g} GPUs"]))
        return asyncio.run(_supervise(ray, config, settings))


def _resolved(config: Config) -> Config:
    """The settings of frontend and workers, without Ray's. Threads follow Ray's CPUs."""
    threads = config.torch.threads or max(1, int(config.ray.cpus))
    torch = msgspec.structs.replace(config.torch, threads=threads)
    return launch.resolve(
        msgspec.structs.replace(config, torch=torch, launch="local", ray=RaySettings())
    )


def _warn_of_plain_calls(config: Config) -> None:
    if config.join and config.worker_host == Config().worker_host:  # see ray_worker.placed
        config = msgspec.structs.replace(config, worker_host="the nodes' addresses")
    launch.warn_of_plain_calls(config)


@contextlib.contextmanager
def _connected(settings: RaySettings) -> Iterator[Any]:
    """The module ray, connected as a driver."""
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # equal lines of two workers are two lines
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # for a cluster that is started here
    try:
        import ray
    except ModuleNotFoundError:
        raise InvalidConfig(f"--launch ray needs Ray. {install_hint('ray')}") from None
    _check_listens(settings.address)
    try:
        ray.init(
            address=settings.address, namespace=settings.namespace, logging_level=logging.WARNING
        )
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        raise _refusal(settings.address, error) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_listens(address: str) -> None:
    """Fail early: Ray itself would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        except OSError as error:
            raise _refusal(address, error) from None


def _refusal(address: str, error: Exception) -> InvalidConfig:
    why = str(error).partition("\n")[0].rstrip(".")
    return InvalidConfig(
        f"there is no Ray cluster at --ray-address {address} ({why}). Start one with "
        "`ray start --head`, or use local."
    )


def _check_nodes(ray: Any, config: Config) -> None:
    """Without --join, discovery is a directory of one machine."""
    nodes = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    if not config.join and nodes != {ray.util.get_node_ip_address()}:
        raise InvalidConfig(
            f"the Ray cluster has other machines ({', '.join(sorted(nodes))}): set --join "
            "nats://host:4222, so that workers and frontend find each other"
        )


async def _supervise(ray: Any, config: Config, settings: RaySettings) -> int:
    seconds = config.limits.drain_seconds
    env = launch.child_environment(config)
    frontend = launch.frontend_process(config, env)
    farewell = launch.stop_message(config)
    supervisor = Supervisor([frontend], stop_seconds=seconds + END_SECONDS, farewell=farewell)
    workers = Workers(ray, config, settings, env)
    keeping = asyncio.create_task(workers.keep())
    keeping.add_done_callback(lambda _: supervisor.stop())  # it ends only with an error
    announcing = asyncio.create_task(launch.announce(config, supervisor))
    announcing.add_done_callback(lambda _: workers.ready())
    code = EXIT_FORCED
    try:
        code = await supervisor.run()
    finally:
        announcing.cancel()
        await workers.stop(seconds + END_SECONDS if code != EXIT_FORCED else 0)
    if keeping.done() and (error := keeping.exception()) is not None:
        raise error
    keeping.cancel()
    return code


class Workers:
    """The workers of a topology as actors, named by their ids: ``E-0``, ``PD-0``."""

    def __init__(
        self, ray: Any, config: Config, settings: RaySettings, env: Mapping[str, str]
    ) -> None:
        self._ray = ray
        self._settings = settings
        self._text = msgspec.json.encode(msgspec.structs.replace(config, **NO_KEYS))
        self._secrets = secrets_of(env)
        self._once_ready = self._stopping = False
        self._actors: dict[str, Any] = {}
        self._running: dict[str, asyncio.Future[Exit]] = {}
        self._want = {"num_cpus": settings.cpus, "num_gpus": gpus_of_worker(config, settings)}
        self._places = [(g.role, i) for g in config.topology.groups for i in range(g.count)]

    async def keep(self) -> None:
        """Start all workers and keep them running. Raises StartError if one does not start."""
        self._warn_of_little()
        for role, index in self._places:
            self._actors[f"{role}-{index}"] = self._placed(f"{role}-{index}")
        await asyncio.gather(*(self._keep(role, index) for role, index in self._places))

    def ready(self) -> None:
        """All have started: from now on they are restarted whatever happens."""
        self._once_ready = True

    async def stop(self, seconds: float) -> None:
        """Let all drain for ``seconds``; a second signal ends them at once."""
        self._stopping = True
        hurry = asyncio.Event()
        with on_stop_signal(hurry.set):
            if seconds:
                for actor in self._actors.values():
                    actor.stop.remote()
                await self._ended(seconds, hurry)
            for actor in self._actors.values():
                await asyncio.to_thread(self._ray.kill, actor)

    async def _ended(self, seconds: float, hurry: asyncio.Event) -> None:
        """Wait until all have ended, the time is over or ``hurry`` is set."""
        waiting: asyncio.Future[Any] = asyncio.ensure_future(hurry.wait())
        running: set[asyncio.Future[Any]] = set(self._running.values())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while running and not hurry.is_set():
                    done, _ = await asyncio.wait(
                        {waiting, *running}, return_when=asyncio.FIRST_COMPLETED
                    )
                    running -= done
        waiting.cancel()

    def _placed(self, name: str) -> Any:
        options = {
            "name": name,
            "max_restarts": -1,
            "max_task_retries": -1,  # a restarted actor also runs again
            "max_concurrency": 2,  # run and stop
            "scheduling_strategy": "SPREAD",
        }
        try:
            return self._ray.remote(RayWorker).options(**options, **self._want).remote(name)
        except ValueError as error:
            raise StartError(f"{error} Use another --ray-namespace.") from None

    async def _keep(self, role: str, index: int) -> None:
        name, deaths = f"{role}-{index}", 0
        clock = asyncio.get_running_loop().time
        while not self._stopping:
            started = clock()
            code, words = await self._run(role, index)
            if self._stopping:
                return
            deaths = consecutive_failures(deaths, clock() - started, self._once_ready)
            if not self._once_ready and (code == EXIT_START_ERROR or deaths >= MAX_START_FAILURES):
                raise start_error(name, f"exited with code {code}", words)
            pause = restart_delay(deaths)
            print_status(f"[{name}] ended with code {code}; Ray starts it again in {pause:.1f} s")
            await asyncio.sleep(pause)
            # In a new actor: Ray places it again.
            await asyncio.to_thread(self._ray.kill, self._actors[name], no_restart=False)

    async def _run(self, role: str, index: int) -> Exit:
        """Run a worker until it exits; Ray may restart its actor meanwhile."""
        name = f"{role}-{index}"
        called = self._actors[name].run.remote(self._text, self._secrets, role, index)
        self._running[name] = asyncio.wrap_future(called.future())
        try:
            return await self._running[name]
        except self._ray.exceptions.RayError as error:  # no node can create the actor
            return EXIT_START_ERROR, str(error).splitlines()

    def _warn_of_little(self) -> None:
        have = self._ray.cluster_resources()
        for kind, each in (("CPU", self._want["num_cpus"]), ("GPU", self._want["num_gpus"])):
            wanted = each * len(self._places)
            if wanted > have.get(kind, 0):
                print_status(
                    f"  Ray has {have.get(kind, 0):g} {kind}s and the workers want {wanted:g}: "
                    "some wait until there are more"
                )


def gpus_of_worker(config: Config, settings: RaySettings) -> float:
    return config.gpus if settings.gpus < 0 else settings.gpus


def secrets_of(env: Mapping[str, str]) -> dict[str, str]:
    """The TRIPTYCH_ variables, which are secrets and no keys. They are arguments of the call: Ray
    shows an actor's environment to everyone who sees its dashboard."""
    return {name: value for name, value in env.items() if name.startswith("TRIPTYCH_")}
