"""``triptych serve``: starts and supervises a frontend and the workers of a topology.

Requests and tensors do not pass this process. It starts the others, restarts those that die and
stops them in order.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import secrets
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from triptych import __version__, models, placement, requirements
from triptych.checkpoint import Model, cache_folder, fingerprint, open_model, packaged_folder
from triptych.commands.client import base_url, unverified_context
from triptych.commands.command_parser import suggest
from triptych.config import Config, RaySettings, key_environment, to_flags
from triptych.engines.adapter.arguments import gpus_per_engine, sets_gpu_memory
from triptych.engines.base import engine_kind
from triptych.engines.checks import check_family
from triptych.engines.environments import engine_python
from triptych.environment import without_settings
from triptych.errors import InvalidConfig, UnsupportedModel
from triptych.host import free_port, is_loopback
from triptych.observe import log
from triptych.observe.access_log import OWN_PROBE
from triptych.observe.log import print_status
from triptych.placement import Placement
from triptych.prompt.processor import PromptProcessor
from triptych.runtime import run_dir
from triptych.runtime.discovery import describe_conflict, find_conflict, open_discovery
from triptych.runtime.gpus import GpuInventory, visible_gpus
from triptych.runtime.nats import requires_tls
from triptych.runtime.parent_death import dies_with_parent
from triptych.runtime.planes.tls import worker_tls
from triptych.runtime.supervisor import SupervisedProcess, Supervisor
from triptych.sources.files import MediaFolder
from triptych.sources.url import AllowedDomains

SECRET_LENGTH = 16  # characters: a shorter one could be guessed
END_SECONDS = 5.0  # for a process to exit after it has drained
REPORT_SECONDS = 5.0  # first line about what the start waits for; later ones are rarer
REPORT_SHARE = 0.3  # of the elapsed time between such lines
OPERATORS_PATHS = ("/cluster", "/metrics")  # they show all tenants and the machine
DEMO = "triptych-demo"  # the packaged checkpoint, served when no model is named
# A red circle on white, 64 x 64, as a PNG of two colours: short enough for a command line.
CIRCLE = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABAAQMAAACQp+OdAAAABlBMVEX////cFB4F8PUcAAAAZklEQVR42r2Q"
    "sQ2AMAwEgyhSZgRGYTQYjVEyQkoKxEFs9CCBKPONr7Al/4XQNuPms4PZIEI2SFAMBlh9F3x7gt2AM9e13/cV"
    "lifECvkTUoXSBn7eeP+sOip4V5YEaZEoqZNM6W2WAxYvo88dmikOAAAAAElFTkSuQmCC"
)


def serve_local(config: Config) -> int:
    """Serve until SIGTERM, SIGHUP or Ctrl-C. Returns the exit code."""
    log.configure(config.log_format)
    config = resolve(config)
    check_config(config)
    warn_of_short_secret(config)
    warn_of_plain_calls(config)
    warn_of_open_port(config)
    port = free_port(config.host, config.port)
    free_port(config.worker_host, 0, "--worker-host")
    with run_dir.use(config.run_dir) as path:
        config = msgspec.structs.replace(config, run_dir=str(path), port=port)
        asyncio.run(check_names_free(config))
        print_status(banner(config))
        return asyncio.run(supervise(config, server_processes(config)))


def resolve(config: Config) -> Config:
    """Fill in the model, the context and the CPU threads of each worker."""
    engine_kind(config.engine)
    if not config.model:
        # The demo model needs media.
        shipped, media = (
            ("qwen", config.enable_multimodal) if config.engine == "fake" else (DEMO, True)
        )
        model = str(packaged_folder(shipped))
        config = msgspec.structs.replace(config, model=model, enable_multimodal=media)
    config = _with_context(config)
    if not config.cpu_threads:
        cores = len(os.sched_getaffinity(0)) - 1  # one for the frontend: sharing it halves both
        threads = max(1, cores // len(config.topology.workers))
        config = msgspec.structs.replace(config, cpu_threads=threads)
    return config


def _with_context(config: Config) -> Config:
    """Frontend and workers use the same context, also where the engine serves less of it."""
    model = open_model(config.model, config.max_model_len)
    if config.engine != "torch" or model.family not in models.FAMILIES:
        return config
    served = models.limit_context(model, config.max_model_len).context
    if served == model.context:
        return config
    print_status(
        f"  requests may have {served} tokens: of the model's {model.context}, one attention chunk"
    )
    return msgspec.structs.replace(config, max_model_len=served)


def check_config(config: Config) -> None:
    """Refuse what frontend or workers would refuse, before any of them starts.

    It reads no weights and imports no torch; workers check what needs these.
    """
    requirements.check_packages(config, "serve")
    check_threads(config)
    check_media(config)
    open_checked_model(config)
    check_sources(config)
    check_access(config)
    check_parsers(config)
    check_replies(config)
    engine_python(config)
    if (tls := worker_tls(config)) is not None:
        tls.check()
    if config.join:
        cluster_secret()
    place_topology(config)


def check_threads(config: Config) -> None:
    """More threads than cores slow each other down, and far more crash a process (SIGSEGV)."""
    cores = os.cpu_count() or 1
    if config.cpu_threads > cores:
        raise InvalidConfig(
            f"--cpu-threads {config.cpu_threads}: this machine has {cores} cores. Give at most "
            "that many, or 0 for a share of them."
        )


def check_media(config: Config, role: str = "") -> None:
    """Refuse workers that only encode where media are off.

    ``role``: of a single worker. Engine fake has no model, and encodes for tests.
    """
    roles = (role,) if role else config.topology.roles
    if "E" in roles and not config.enable_multimodal and config.engine != "fake":
        raise InvalidConfig(
            f"--pattern {config.pattern} has workers that only encode media, but media are off: "
            "add --enable-multimodal. For text alone use --pattern EPD or EP/D."
        )


def check_access(config: Config) -> None:
    """Check how clients reach the frontend: certificate, keys, public routes and origins."""
    from triptych.api.cors import cors_policy  # of the frontend: workers import this module too
    from triptych.api.keys import APIKeys
    from triptych.api.routes import public_paths
    from triptych.http.tls import server_certificate

    server_certificate(config)
    APIKeys(config.api_keys, config.admin_keys, config.keys_file)
    public_paths(config.public_routes)
    cors_policy(config)


def check_parsers(config: Config) -> None:
    """Check the names of --tool-parser and --reasoning-parser."""
    from triptych.parsers.registry import REASONING_PARSERS, TOOL_PARSERS

    for flag, given, formats in (
        ("--tool-parser", config.tool_parser, TOOL_PARSERS),
        ("--reasoning-parser", config.reasoning_parser, REASONING_PARSERS),
    ):
        names = ("auto", "none", *formats)
        if given not in names:
            raise InvalidConfig(
                f"{flag} {given!r} is not one of {', '.join(names)}{suggest(given, names)}"
            )


def check_replies(config: Config) -> None:
    """Check the file of --fake-replies."""
    if not config.fake.replies:
        return
    if config.engine != "fake":
        raise InvalidConfig(f"--fake-replies needs --engine fake; the engine is {config.engine}")
    from triptych.engines.fake.replies import read_replies

    read_replies(config.fake.replies)


def check_sources(config: Config) -> None:
    """Check the settings of where media may come from."""
    AllowedDomains(config.allowed_media_domains)
    MediaFolder(config.allowed_media_path).close()


def open_checked_model(config: Config) -> Model:
    model = open_model(config.model, config.max_model_len)
    PromptProcessor(model, config)  # tokenizer, chat template or prompt template
    if config.engine == "torch":
        model = models.limit_context(model, config.max_model_len)
    if config.engine != "fake":
        models.check_supported(model)
        check_family(config.engine, model)
        if not any(model.folder.glob("*.safetensors")):
            raise UnsupportedModel(f"{model.folder} has no weights: no *.safetensors in it")
    return model


async def check_names_free(config: Config) -> None:
    """Refuse a discovery where another server's workers have the ids of ours. Ours would be refused
    one by one, while the frontend would find the others and report that it is ready."""
    names = [f"{role}-{index}" for role, index in config.topology.workers]
    known = os.environ.get("TRIPTYCH_SECRET", "")
    # In a run directory each server may have generated its own secret.
    unsigned = not config.join
    async with open_discovery(config, f"serve {os.getpid()}", known) as discovery:
        other = await find_conflict(discovery, names, unsigned=unsigned)
        place = discovery.status.setting
    if other is not None:
        same = other.model == fingerprint(open_model(config.model))
        raise InvalidConfig(
            f"{describe_conflict(other)}: another server{'' if same else ', of another model,'} "
            f"runs in {place}. Give this one another {place.split()[0]}; or, to add workers to "
            f"that one, start them one by one: `triptych worker --role {other.role} --index N`."
        )


def cluster_secret() -> str:
    """The cluster secret of a process that is started by hand."""
    given = os.environ.get("TRIPTYCH_SECRET", "")
    if not given:
        raise InvalidConfig(
            "TRIPTYCH_SECRET is not set. Frontend and workers prove it to each other: set the same "
            "for all of them, for example from `openssl rand -hex 32`."
        )
    return given


def warn_of_short_secret(config: Config) -> None:
    """Warns once per command; child processes stay silent."""
    given = os.environ.get("TRIPTYCH_SECRET", "")
    far = bool(config.join) or not is_loopback(config.worker_host)
    if 0 < len(given) < SECRET_LENGTH and far and not dies_with_parent():
        print_status(
            f"  warning: TRIPTYCH_SECRET has {len(given)} characters and protects ports that other "
            "hosts reach. Who guesses it can act as a worker or a frontend. Make one with `openssl "
            "rand -hex 32`."
        )


def warn_of_plain_calls(config: Config) -> None:
    """Warns once per command, as above."""
    if dies_with_parent() or config.worker_tls:
        return
    if config.request_plane == "nats":
        far = [s for s in config.servers if not is_loopback(urlsplit(s).hostname or "")]
        if not far or requires_tls(config):
            return
        where = f"go through {far[0]} without TLS (--join tls://..)"
    elif is_loopback(config.worker_host):
        return
    else:
        where = f"go to {config.worker_host} without --worker-tls"
    print_status(
        f"  warning: calls to workers {where}: others on that network can read prompts, media and "
        "answers, but not change them."
    )


def warn_of_open_port(config: Config) -> None:
    """Warns once per command, as above."""
    if is_loopback(config.host) or dies_with_parent():
        return
    if not config.needs_key:
        print_status(
            f"  warning: --host {config.host} is open to other hosts and no API key is set: all "
            "who reach this port can use the server. Set TRIPTYCH_API_KEY."
        )
    listed = [path.strip() for path in config.public_routes.split(",")]
    if shown := [path for path in OPERATORS_PATHS if path in listed]:
        print_status(
            f"  warning: {' and '.join(shown)} (--public-routes) can be read by all who reach "
            f"{config.host}: that shows all tenants and the machine."
        )


def server_processes(config: Config) -> list[SupervisedProcess]:
    """The processes of a server. The frontend stops first, so that it can drain."""
    env, theirs = child_environment(config), engine_python(config)

    def worker(place: Placement) -> SupervisedProcess:
        role, index = place.worker.role, str(place.worker.index)
        words = ["worker", "--role", role, "--index", index, *_flags(_placed(config, place))]
        return SupervisedProcess(
            place.worker.id, [theirs, "-m", "triptych", *words], env, 1, "is ready at"
        )

    return [frontend_process(config, env), *map(worker, place_topology(config))]


def place_topology(config: Config) -> list[Placement]:
    """The device of every worker, and its share of the memory where several use one."""
    width = gpus_per_engine(config)
    wanted = placement.worker_specs(
        config.topology, width=width, own_encoder=config.encoder == "native"
    )
    if config.engine == "fake":
        return [Placement(worker, config.device) for worker in wanted]
    return placement.place_workers(
        wanted,
        find_gpus(config),
        device=config.device,
        devices=config.devices,
        share=config.gpu_memory_utilization,
    )


def describe_devices(config: Config) -> list[str]:
    """For the banner: a line per device."""
    if config.engine == "fake":
        return ["none: engine fake has no model"]
    lines = placement.describe_placements(place_topology(config), find_gpus(config))
    return [*lines, "memory as --engine-args says"] if sets_gpu_memory(config) else lines


def find_gpus(config: Config) -> GpuInventory:
    """The GPUs that workers could use. Does not look for any if the settings use none."""
    if config.engine == "fake" or (config.device == "cpu" and not config.devices):
        return GpuInventory()
    return _gpus_seen(engine_python(config))


_gpus_seen = functools.cache(visible_gpus)


def _placed(config: Config, place: Placement) -> Config:
    """The settings of one worker."""
    return msgspec.structs.replace(config, device=place.device, gpu_memory_utilization=place.share)


def frontend_process(config: Config, env: Mapping[str, str]) -> SupervisedProcess:
    """Only the frontend gets the keys of clients, in its environment."""
    argv = [sys.executable, "-m", "triptych", "frontend", *_flags(config)]
    env = {**env, **key_environment(config)}
    return SupervisedProcess("frontend", argv, env, 0, "listening at")


def child_environment(config: Config) -> dict[str, str]:
    """The environment of frontend and workers: the secret, and their threads."""
    return without_settings(os.environ) | {
        "TRIPTYCH_SECRET": os.environ.get("TRIPTYCH_SECRET") or secrets.token_hex(32),
        "OMP_NUM_THREADS": str(config.cpu_threads),
    }


def _flags(config: Config) -> list[str]:
    """The flags of frontend and workers, without those of the launcher."""
    return to_flags(msgspec.structs.replace(config, launch="local", ray=RaySettings(), devices=""))


def banner(config: Config, devices: Sequence[str] | None = None) -> str:
    """``devices``: the lines about devices; None: as this machine places the workers."""
    devices = describe_devices(config) if devices is None else devices
    model = open_model(config.model)
    url, name = base_url(config), describe_model(config, model)
    roles = "  ".join(f"{g.role}x{g.count}" for g in config.topology.groups)
    pictures = config.enable_multimodal and "image" in model.media_ids
    body = first_request(config.served_model_name or model.name, picture=pictures)
    key = f""" -H "Authorization: Bearer {_shell_key(config)}" """ if config.needs_key else " "
    if config.tls_cert and is_loopback(config.host):
        key = f" -k{key}"  # no authority signs a certificate for this address
    who = ", for the admin key" if config.needs_key or config.admin_key else ""
    return f"""
  Triptych {__version__}
  model      {name}
  topology   {config.topology}  ({roles}; engine {config.engine})
  devices    {(chr(10) + " " * 13).join(devices)}
  media      {_media(model, config)}
  interface  {url}/v1   (state: {url}/cluster{who})

  curl {shlex.quote(f"{url}/v1/chat/completions")}{key}-H 'Content-Type: application/json' \\
    -d {shlex.quote(json.dumps(body))}
"""


def first_request(model: str, *, picture: bool) -> dict[str, Any]:
    """The chat request of the banner's curl line, with a picture if the server takes them."""
    content: Any = "Hello"
    if picture:
        content = [
            {"type": "image_url", "image_url": {"url": CIRCLE}},
            {"type": "text", "text": "What colour is the circle?"},
        ]
    messages = [{"role": "user", "content": content}]
    return {"model": model, "max_tokens": 32, "messages": messages}


def _shell_key(config: Config) -> str:
    """A shell expression for the first API key."""
    if not config.api_key:
        return "$KEY"  # one of --keys-file, which may hold digests
    if config.api_key_file:
        return f"$(head -n 1 {shlex.quote(config.api_key_file)} | cut -d , -f 1)"
    return "${TRIPTYCH_API_KEY%%,*}" if len(config.api_keys) > 1 else "$TRIPTYCH_API_KEY"


def _media(model: Model, config: Config) -> str:
    """Which kinds of media the server takes, and from where."""
    kinds = ", ".join(model.media_ids)
    if not kinds:
        return "none: the model takes text only"
    if not config.enable_multimodal:
        return f"off (--enable-multimodal turns them on: {kinds})"
    web = f" of {config.allowed_media_domains}" if config.allowed_media_domains else ""
    web += " also in private networks" if config.allow_private_media else ""
    sources = f"data:, uploads, http(s):{web}"
    if config.allowed_media_path:
        sources += f", file: below {config.allowed_media_path}"
    return f"{kinds}  (from {sources})"


def why_meaningless(config: Config) -> str:
    """Why the answers of this model have no meaning; empty if they have."""
    if config.engine == "fake":
        return "engine fake: its answers are invented"
    if open_model(config.model).folder.parent == cache_folder().resolve():
        return "tiny, random weights: its answers are noise"
    return ""


def describe_model(config: Config, model: Model) -> str:
    """The name of the model, with a note if it is a fake, random or demo model."""
    about = why_meaningless(config)
    if not about and model.folder == packaged_folder(DEMO).resolve():
        about = "small, trained to show what this server does"
    return f"{config.served_model_name or model.name}{about and f'  ({about})'}"


async def supervise(config: Config, processes: Sequence[SupervisedProcess]) -> int:
    """Run the processes of a server until it is stopped. Returns the exit code."""
    seconds = config.limits.drain_seconds
    farewell = (
        f"  stopping: running requests may finish within {seconds:.0f} s "
        "(Ctrl-C again to stop at once)"
    )
    supervisor = Supervisor(processes, stop_seconds=seconds + END_SECONDS, farewell=farewell)
    announcing = asyncio.create_task(announce(config, supervisor))
    try:
        return await supervisor.run()
    finally:
        announcing.cancel()


async def announce(config: Config, supervisor: Supervisor) -> None:
    """Print what the start waits for, and when the server is ready. From then on the supervisor
    restarts every process that dies."""
    start, reported = time.monotonic(), 0.0
    while not await _healthy(config):
        passed = time.monotonic() - start
        if passed - reported >= max(REPORT_SECONDS, passed * REPORT_SHARE):
            print_status(waiting_line(passed, supervisor.starting()))
            reported = passed
        await asyncio.sleep(0.1)
    supervisor.ready()
    print_status(f"  ready after {time.monotonic() - start:.1f} s: {base_url(config)}")


def waiting_line(seconds: float, starting: Mapping[str, str]) -> str:
    phases = ", ".join(f"{name} ({phase})" for name, phase in starting.items())
    return f"  {seconds:.0f} s: waiting for {phases or 'the frontend to find its workers'}"


async def _healthy(config: Config) -> bool:
    tls = unverified_context() if config.tls_cert else None
    try:
        reader, writer = await asyncio.open_connection(config.host, config.port, ssl=tls)
        writer.write(
            b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"User-Agent: %b\r\n\r\n" % OWN_PROBE
        )
        status = await reader.readline()
        writer.close()
    except OSError:
        return False
    return b" 200 " in status
