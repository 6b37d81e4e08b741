"""``triptych serve --launch ray``: the frontend here, the workers as actors on a Ray cluster.

Ray finds a node for each worker and restarts it when its actor or its node dies. This process runs
the frontend, reports when all is ready and stops everything in order. If it dies, Ray ends the
actors. Neither requests nor tensors go through Ray. Importing this module does not import Ray: its
actors import it too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from triptych import placement, requirements
from triptych.commands import launch
from triptych.config import NO_KEYS, Config, RaySettings, to_flags
from triptych.engines.environments import engine_python
from triptych.environment import without_settings
from triptych.errors import InvalidConfig, StartError, install_hint
from triptych.host import free_port
from triptych.observe import log
from triptych.observe.log import print_status
from triptych.runtime import run_dir
from triptych.runtime.parent_death import EXIT_START_ERROR, dying_with_us
from triptych.runtime.supervisor import LAST_LINES, RELAY_SECONDS, SupervisedProcess

CONNECT_SECONDS = 5.0

Exit = tuple[int, list[str]]  # exit code and the end of its log


def serve_on_ray(config: Config) -> int:
    """Serve until SIGTERM, SIGHUP or Ctrl-C. Returns the exit code."""
    log.configure(config.log_format)
    requirements.check_packages(config, "frontend")
    settings, config = config.ray, _resolved(config)
    placement.refuse_devices(config.devices, "Ray")
    launch.open_checked_model(config)
    launch.check_media(config)
    launch.check_sources(config)
    launch.check_access(config)
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
        print_status(launch.banner(config, [f"Ray places the workers, each with {each:g} GPUs"]))
        return asyncio.run(_supervise(ray, config, settings))


def _resolved(config: Config) -> Config:
    """The settings of frontend and workers, without Ray's. Threads follow Ray's CPUs."""
    threads = config.cpu_threads or max(1, int(config.ray.cpus))
    return launch.resolve(
        msgspec.structs.replace(config, cpu_threads=threads, launch="local", ray=RaySettings())
    )


def _warn_of_plain_calls(config: Config) -> None:
    if config.join and config.worker_host == Config().worker_host:  # see with_node_address
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
    env = launch.child_environment(config)
    frontend = launch.frontend_process(config, env)
    return await launch.supervise(config, [frontend, *_actors(ray, config, settings, env)])


def _actors(
    ray: Any, config: Config, settings: RaySettings, env: Mapping[str, str]
) -> Iterator[SupervisedProcess]:
    """The workers, which Ray places. They stop after the frontend."""
    want = {"num_cpus": settings.cpus, "num_gpus": gpus_of_worker(config, settings)}
    workers = config.topology.workers
    _warn_of_little(ray.cluster_resources(), want, len(workers))
    text = msgspec.json.encode(msgspec.structs.replace(config, **NO_KEYS))
    options = {
        "max_restarts": -1,
        "max_task_retries": -1,  # a restarted actor also runs again
        "max_concurrency": 2,  # run and stop
        "scheduling_strategy": "SPREAD",
    }
    for role, index in workers:
        name = f"{role}-{index}"
        remote = ray.remote(RayWorker).options(name=name, **options, **want)
        try:
            actor = RayActor(ray, remote.remote(name), text, secrets_of(env), role, index)
        except ValueError as error:
            raise StartError(f"{error} Use another --ray-namespace.") from None
        yield SupervisedProcess(name, stop_order=1, elsewhere=actor)


def _warn_of_little(have: Mapping[str, float], want: Mapping[str, float], workers: int) -> None:
    for kind, each in (("CPU", want["num_cpus"]), ("GPU", want["num_gpus"])):
        if each * workers > have.get(kind, 0):
            print_status(
                f"  Ray has {have.get(kind, 0):g} {kind}s and the workers want "
                f"{each * workers:g}: some wait until there are more"
            )


class RayActor:
    """A worker as an actor, named by its id: ``E-0``, ``PD-0``. Ray prints its lines.

    The supervisor runs a worker that has exited again. Ray restarts an actor that dies, or whose
    node dies, and it runs its worker again by itself.
    """

    pid = None

    def __init__(self, ray: Any, actor: Any, *arguments: Any) -> None:
        self.last_lines: list[str] = []
        self._ray = ray
        self._actor = actor
        self._arguments = arguments
        self._running: asyncio.Future[Exit] | None = None
        self._killed = False
        self._stopping = False

    async def run(self) -> int:
        if self._running is not None:  # in a new actor: Ray places it again
            await asyncio.to_thread(self._ray.kill, self._actor, no_restart=False)
            if self._stopping:  # the killed actor may have received the stop
                return 0
        called = self._actor.run.remote(*self._arguments)
        self._running = asyncio.wrap_future(called.future())
        try:
            code, self.last_lines = await self._running
        except asyncio.CancelledError:
            if not self._killed:
                raise
            code = -signal.SIGKILL
        except self._ray.exceptions.RayError as error:  # no node can create the actor
            code, self.last_lines = EXIT_START_ERROR, str(error).splitlines()
        return code

    def stop(self) -> None:
        self._stopping = True
        self._actor.stop.remote()

    def kill(self) -> None:
        """Does not wait for Ray, which may not answer."""
        self._killed = True
        self._ray.kill(self._actor)
        if self._running is not None:
            self._running.cancel()


def gpus_of_worker(config: Config, settings: RaySettings) -> float:
    return config.gpus if settings.gpus < 0 else settings.gpus


def secrets_of(env: Mapping[str, str]) -> dict[str, str]:
    """The TRIPTYCH_ variables, which are secrets and no keys. They are arguments of the call: Ray
    shows an actor's environment to everyone who sees its dashboard."""
    return {name: value for name, value in env.items() if name.startswith("TRIPTYCH_")}


class RayWorker:
    """The actor: a worker on the node that Ray has chosen. Ray calls ``run`` and ``stop`` in two
    threads.

    The worker is a separate process, so that an engine may have its own environment, and signals
    and exit codes mean the same as elsewhere. It dies with its actor.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: subprocess.Popen[str] | None = None
        self._stopping = threading.Event()

    def __repr__(self) -> str:
        return self._name  # Ray shows it in its dashboard and before each log line

    def run(self, settings: bytes, secrets: Mapping[str, str], role: str, index: int) -> Exit:
        """Run the worker until it exits.

        The kernel ends it with this thread, which therefore waits here.
        """
        config = with_node_address(msgspec.json.decode(settings, type=Config))
        words: deque[str] = deque(maxlen=LAST_LINES)
        try:
            python = engine_python(config)
        except StartError as error:  # on this node; others may have the package
            return EXIT_START_ERROR, [str(error)]
        argv = [python, "-m", "triptych", "worker", "--role", role, "--index", str(index)]
        with self._spawn([*argv, *to_flags(config)], config, secrets) as process:
            relaying = threading.Thread(target=_relay, args=(process, words), daemon=True)
            relaying.start()
            code = process.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its leftover children
            relaying.join(RELAY_SECONDS)
        return code, list(words)

    def stop(self) -> None:
        """Let the worker drain; ``run`` returns when it has."""
        self._stopping.set()
        if self._process is not None:
            self._process.terminate()

    def _spawn(
        self, argv: list[str], config: Config, secrets: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        threads = {"OMP_NUM_THREADS": str(config.cpu_threads)}
        self._process = subprocess.Popen(
            dying_with_us(argv),
            env=without_settings(os.environ) | threads | dict(secrets),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,
        )
        if self._stopping.is_set():
            self._process.terminate()
        return self._process


def with_node_address(config: Config) -> Config:
    """The settings with this node's address as --worker-host, if other nodes must reach it."""
    if not config.join or config.worker_host != Config().worker_host:
        return config
    import ray

    return msgspec.structs.replace(config, worker_host=ray.util.get_node_ip_address())


def _relay(process: subprocess.Popen[str], words: deque[str]) -> None:
    """Copy the worker's log to Ray's."""
    assert process.stderr is not None
    for line in process.stderr:
        words.append(line.rstrip("\n"))
        print(line, end="", file=sys.stderr, flush=True)
