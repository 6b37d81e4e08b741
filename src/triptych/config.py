"""Frozen settings from one TOML file, the environment and the flags, under the same names.

``[torch] kv_blocks`` in the file is ``TRIPTYCH_TORCH_KV_BLOCKS`` in the environment and
``--torch-kv-blocks`` on the command line; a flag wins over the environment, the environment over
the file. An unknown name is an error in each of them. ``environment.py`` reads the variables.
Keys are never flags: every user of the machine can list command lines.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from triptych.errors import InvalidConfig
from triptych.messages import MediaKind
from triptych.topology import Topology
from triptych.transfer.registry import TRANSPORT_HELP, TransportName

KEYS = ("api_key", "admin_key")  # not flags; the flag NAME_file takes a path
KEY_FILES = tuple(f"{name}_file" for name in KEYS)
NO_KEYS = dict.fromkeys((*KEYS, *KEY_FILES), "")

# Which process a setting applies to. The default is its section's, and that is both.
AppliesTo = Literal["both", "frontend", "worker", "serve"]
# What the value of a setting names: shells complete paths.
Takes = Literal["value", "file", "folder"]


def _about(text: str, of: AppliesTo | None = None, takes: Takes = "value", **checks: Any) -> Meta:
    extra = ({"of": of} if of else {}) | {"takes": takes}
    return Meta(description=text, extra=extra, **checks)


def _both(text: str, **checks: Any) -> Meta:
    return _about(text, "both", **checks)


def _frontend(text: str, **checks: Any) -> Meta:
    return _about(text, "frontend", **checks)


def _worker(text: str, **checks: Any) -> Meta:
    return _about(text, "worker", **checks)


class Limits(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of one request and of all requests together."""

    body_bytes: Annotated[int, _about("largest request body", ge=1024)] = 64 << 20
    media_in_flight_bytes: Annotated[
        int, _about("all request bodies over 256 KiB together; further ones wait unread", ge=1024)
    ] = 512 << 20
    media_ahead_bytes: Annotated[
        int, _about("request bodies of requests that wait for their first token, together", ge=1024)
    ] = 64 << 20
    body_wait_seconds: Annotated[
        float, _about("longest wait of an unread body; then 429", gt=0)
    ] = 120.0
    json_bytes: Annotated[int, _about("largest JSON body, without its media", ge=1024)] = 8 << 20
    header_bytes: Annotated[int, _about("largest request head", ge=1024)] = 64 << 10
    headers: Annotated[int, _about("most headers in a request", ge=8)] = 128
    requests: Annotated[int, _about("most requests in flight; further ones get 429", ge=1)] = 4096
    choices: Annotated[int, _about("largest value of the parameter n", ge=1)] = 16
    grammar_bytes: Annotated[
        int, _about("largest JSON schema, regular expression, choice list or grammar", ge=1)
    ] = 256 << 10
    grammar_seconds: Annotated[
        float, _worker("time to compile a JSON schema, regular expression or grammar", gt=0)
    ] = 2.0
    media_items: Annotated[int, _about("most media items in a request", ge=0)] = 32
    tools: Annotated[int, _about("most tools in a request", ge=0)] = 128
    tool_bytes: Annotated[int, _about("all tools of a request as JSON", ge=0)] = 512 << 10
    image_pixels: Annotated[int, _both("largest image, width times height", ge=1)] = 64_000_000
    video_frames: Annotated[int, _both("most frames in a video file", ge=1)] = 9000
    video_sampled: Annotated[int, _both("most frames sampled from a video", ge=1)] = 768
    audio_seconds: Annotated[float, _both("longest audio", gt=0)] = 600.0
    media_bytes: Annotated[int, _both("largest media file from a URL or a path", ge=1)] = 64 << 20
    request_media_bytes: Annotated[
        int, _about("all media of one request, each counted as often as it is named", ge=1)
    ] = 256 << 20
    loaded_media_bytes: Annotated[
        int, _about("all media loaded from URLs, paths and uploads; further requests wait", ge=1)
    ] = 1 << 30
    fetch_seconds: Annotated[float, _about("total time to fetch one media URL", gt=0)] = 10.0
    decode_seconds: Annotated[float, _both("CPU time to decode one video or embedding", gt=0)] = (
        20.0
    )
    decode_image_seconds: Annotated[float, _both("CPU time to decode one image", gt=0)] = 2.0
    decode_audio_seconds: Annotated[float, _both("CPU time to decode one audio file", gt=0)] = 10.0
    decode_bytes: Annotated[int, _both("memory of a decoding process", ge=512 << 20)] = 2 << 30
    upload_bytes: Annotated[int, _about("all uploaded media together", ge=0)] = 512 << 20
    upload_seconds: Annotated[float, _about("lifetime of an upload", gt=0)] = 3600.0
    stored_responses: Annotated[
        int, _about("most stored answers of /v1/responses; 0: none are stored", ge=0)
    ] = 1024
    stored_response_bytes: Annotated[
        int, _about("all stored answers together, with their conversations and media", ge=0)
    ] = 256 << 20
    stored_response_seconds: Annotated[
        float, _about("lifetime of a stored answer after its last use", gt=0)
    ] = 3600.0
    header_seconds: Annotated[float, _about("time to receive a request head", gt=0)] = 10.0
    body_seconds: Annotated[float, _about("time to receive a request body", gt=0)] = 120.0
    write_seconds: Annotated[
        float, _about("time that a client may leave its answer unread", gt=0)
    ] = 60.0
    engine_seconds: Annotated[
        float,
        _worker("a worker exits when its busy engine is silent for this long; 0: never", ge=0),
    ] = 600.0
    drain_seconds: Annotated[
        float, _both("time for running requests to finish when a process stops", ge=0)
    ] = 30.0


class TorchSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The built-in engine."""

    block_size: Annotated[int, _about("tokens in a KV block", ge=1)] = 16
    kv_blocks: Annotated[
        int, _about("KV blocks; 0: as many as fit into --kv-cache-bytes", ge=0)
    ] = 0
    max_running: Annotated[int, _about("most sequences in one step", ge=1)] = 256
    step_tokens: Annotated[
        int, _about("most tokens in one step; longer prompts are prefilled in chunks", ge=1)
    ] = 2048
    encode_patches: Annotated[
        int, _about("most patches, or audio frames, in one encoder batch", ge=1)
    ] = 65536
    prefix_cache: Annotated[bool, _about("reuse KV blocks of earlier prompts")] = True


class CacheSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Caches of media, in bytes; 0: off."""

    embeddings: Annotated[int, _worker("embeddings, in each worker that encodes", ge=0)] = 1 << 30
    largest_embedding: Annotated[int, _worker("largest embedding that is cached", ge=0)] = 256 << 20
    decoded: Annotated[int, _about("decoded media, in each decode pool", ge=0)] = 256 << 20
    fetched: Annotated[int, _frontend("fetched files, in the frontend", ge=0)] = 256 << 20


class FakeSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Engine fake, which has no model."""

    encode_ms: Annotated[float, _about("time to encode an item", ge=0)] = 0.0
    ttft_ms: Annotated[float, _about("time to prefill any prompt", ge=0)] = 0.0
    prefill_us_per_token: Annotated[
        float, _about("additional time per token that is not cached, one prompt at a time", ge=0)
    ] = 0.0
    step_ms: Annotated[float, _about("time between tokens", ge=0)] = 0.0
    kv_blocks: Annotated[
        int, _about("KV blocks of 16 tokens; unused ones are the prefix cache", ge=1)
    ] = 65536
    decode: Annotated[bool, _about("decode media as the real engine would")] = False
    replies: Annotated[
        str,
        _about('file of scripted replies, JSON lines as in {"prompt": "weather", "reply": ".."}'),
    ] = ""


class KvSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Routing by KV cache (--routing kv)."""

    overlap_weight: Annotated[
        float, _about("cost of an uncached block relative to a queued block", ge=0)
    ] = 1.0
    temperature: Annotated[
        float, _about("softmax temperature over cost; 0 picks the best worker", ge=0)
    ] = 0.0
    events: Annotated[
        bool,
        _about(
            "use cache events of workers; off: assume that prompts stay cached where they were sent"
        ),
    ] = True


class RaySettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Workers on a Ray cluster, with --launch ray."""

    address: Annotated[
        str,
        _about(
            "address of the Ray cluster: auto (the one of this machine), host:6379, "
            "ray://host:10001, or local to start one here",
            min_length=1,
        ),
    ] = "auto"
    namespace: Annotated[
        str, _about("Ray namespace of the actors' names (E-0, PD-0)", min_length=1)
    ] = "triptych"
    cpus: Annotated[float, _about("CPUs that Ray reserves for each worker", ge=0)] = 1.0
    gpus: Annotated[
        float, _about("GPUs of each worker; -1: one with --device cuda, else none", ge=-1)
    ] = -1.0


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of a server, a frontend or a worker."""

    model: Annotated[
        str, _about("folder of the checkpoint; default: the small demo model", takes="folder")
    ] = ""
    pattern: Annotated[str, _about("EPD, E/PD, E/P/D, EP/D, with counts as in E*2/P/D*3")] = "EPD"
    engine: Annotated[str, _about("torch, vllm, sglang, trtllm, or fake (no model, for tests)")] = (
        "torch"
    )
    engine_args: Annotated[
        str, _worker("options of vllm, sglang or trtllm, as their own serve command reads them")
    ] = ""
    engine_python: Annotated[
        str,
        _about(
            "Python of the engine's environment; default: this one, or .venv-ENGINE beside it",
            "serve",
            takes="file",
        ),
    ] = ""
    encoder: Annotated[
        Literal["torch", "native"],
        _worker("encoder of E workers: Triptych's, or the engine's own encoder disaggregation"),
    ] = "torch"
    host: Annotated[str, _frontend("address to listen on", min_length=1)] = "127.0.0.1"
    port: Annotated[
        int, _frontend("port of the HTTP interface; 0: any free one", ge=0, le=65535)
    ] = 8000
    tls_cert: Annotated[
        str,
        _frontend(
            "certificate chain (PEM) to serve HTTPS with; read again when it changes", takes="file"
        ),
    ] = ""
    tls_key: Annotated[
        str,
        _frontend("private key (PEM) of --tls-cert, unless it is in the same file", takes="file"),
    ] = ""
    cors_origins: Annotated[
        str,
        _frontend("origins whose pages may read answers, separated by commas, or *; default: none"),
    ] = ""
    public_routes: Annotated[
        str,
        _frontend(
            "paths that need no key, besides /health, /ping and /live, separated by commas, as in "
            "/metrics"
        ),
    ] = ""
    access_log: Annotated[bool, _frontend("log a line for each request, on stderr")] = False
    device: Annotated[
        str, _worker("cpu, cuda (all GPUs) or cuda:1; auto: cuda where there is one", min_length=1)
    ] = "auto"
    devices: Annotated[
        str,
        _about(
            "devices of each role, as in E=cpu,P=cuda:0,D=cuda:1-3; other roles follow --device, "
            "each on the GPU with the least load for its memory",
            "serve",
        ),
    ] = ""
    gpu_memory_utilization: Annotated[
        float,
        _worker(
            "fraction of its GPU's memory that a worker uses; 0: all, divided among the workers "
            "that share it",
            ge=0,
            le=1,
        ),
    ] = 0.0
    kv_cache_bytes: Annotated[
        int,
        _worker(
            "memory of the KV cache, for torch and for vllm on a CPU; 0: 1 GiB on a CPU, on a GPU "
            "what the worker's share leaves after the weights",
            ge=0,
        ),
    ] = 0
    cpu_threads: Annotated[
        int,
        _worker(
            "CPU threads of a worker; 0: its share of the cores, one left for the frontend", ge=0
        ),
    ] = 0
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        _worker("type of the weights; auto: float32 on a CPU, the checkpoint's on a GPU"),
    ] = "auto"
    max_model_len: Annotated[int, _about("longest context in tokens; 0: the model's", ge=0)] = 0
    enable_multimodal: Annotated[
        bool,
        _about("accept media in requests; always on for the demo model, unless --engine is fake"),
    ] = False
    limit_media: Annotated[
        str, _frontend("most items of a kind in a request, as in image=8,video=1,audio=2")
    ] = ""
    allowed_media_path: Annotated[
        str,
        _frontend(
            "folder that file: URLs may name files in; default: no file: URLs", takes="folder"
        ),
    ] = ""
    allowed_media_domains: Annotated[
        str, _frontend("hosts that media may be fetched from, separated by commas; default: any")
    ] = ""
    allow_private_media: Annotated[
        bool, _frontend("also fetch media from private and loopback addresses")
    ] = False
    allow_torch_embeddings: Annotated[
        bool, _about("read .pt, .pth and .bin files below --allowed-media-path, in the sandbox")
    ] = False
    decode_at: Annotated[
        Literal["encoder", "frontend"], _frontend("where media files are decoded")
    ] = "encoder"
    decode_processes: Annotated[
        int, _about("sandboxes of a decode pool; 0: cores minus one, at most 8", ge=0)
    ] = 0
    served_model_name: Annotated[
        str, _frontend("name of the model in the API; default: the folder's")
    ] = ""
    unknown_parameters: Annotated[
        Literal["refuse", "ignore"],
        _frontend("what becomes of unknown fields at the top level of a JSON request"),
    ] = "refuse"
    prompt_template: Annotated[str, _frontend("replaces the chat template; contains <prompt>")] = ""
    chat_template: Annotated[
        str, _frontend("Jinja file that replaces the model's chat template, for example for tools")
    ] = ""
    tool_parser: Annotated[
        str,
        _frontend(
            "how the model writes tool calls: auto (by its template), none, deepseek, glm, hermes, "
            "json, llama, mistral, pythonic or qwen-coder"
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        _frontend(
            "how the model marks its reasoning: auto (by its template), none, kimi, mistral or "
            "think"
        ),
    ] = "auto"
    api_key: Annotated[str, _frontend("API keys that clients must send, separated by commas")] = ""
    api_key_file: Annotated[
        str,
        _frontend(
            "file with API keys that clients must send, one per line (or TRIPTYCH_API_KEY)",
            takes="file",
        ),
    ] = ""
    keys_file: Annotated[
        str,
        _frontend(
            "TOML file with named API keys, their limits and expiry; read again when it changes",
            takes="file",
        ),
    ] = ""
    admin_key: Annotated[
        str, _frontend("admin keys for /cluster and /metrics, separated by commas")
    ] = ""
    admin_key_file: Annotated[
        str,
        _frontend(
            "file with admin keys for /cluster and /metrics, one per line (or TRIPTYCH_ADMIN_KEY)",
            takes="file",
        ),
    ] = ""
    routing: Annotated[
        Literal["round-robin", "random", "least-loaded", "kv"],
        _frontend(
            "how a worker is chosen; least-loaded also prefers the encoder that had the media, kv "
            "the worker that has the KV cache of the prompt"
        ),
    ] = "least-loaded"
    max_local_prefill: Annotated[
        int,
        _frontend(
            "with --routing kv: most uncached prompt tokens, besides the last block, that a D "
            "worker prefills itself instead of using P",
            ge=0,
        ),
    ] = 0
    transport: Annotated[
        TransportName,
        _about(TRANSPORT_HELP),
    ] = "auto"
    transfer_folder: Annotated[
        str,
        _about(
            "folder that all hosts share, for --transport file; empty: it is not available",
            takes="folder",
        ),
    ] = ""
    gpu_transfer_bytes: Annotated[
        int,
        _worker("GPU memory of a worker for tensors that other workers read; 0: by its size", ge=0),
    ] = 0
    request_plane: Annotated[
        Literal["tcp", "http", "nats"],
        _about("how frontends call workers: tcp, http (WebSocket), nats (needs --join)"),
    ] = "tcp"
    event_plane: Annotated[
        Literal["embedded", "zmq", "nats"],
        _about(
            "how workers publish cache events for --routing kv: embedded (in calls), zmq, or nats "
            "(stored, so that frontends that start later read them too)"
        ),
    ] = "embedded"
    worker_host: Annotated[str, _about("address that workers listen on", min_length=1)] = (
        "127.0.0.1"
    )
    worker_tls: Annotated[
        bool, _about("encrypt calls between frontend and workers (tcp, http); set it on both sides")
    ] = False
    worker_tls_cert: Annotated[
        str,
        _worker(
            "the worker's certificate for --worker-tls; default: made at the start with openssl",
            takes="file",
        ),
    ] = ""
    worker_tls_key: Annotated[
        str,
        _worker("private key of --worker-tls-cert, unless it is in the same file", takes="file"),
    ] = ""
    run_dir: Annotated[
        str,
        _about(
            "folder where processes of one host find each other; default: a new one", takes="folder"
        ),
    ] = ""
    join: Annotated[
        str,
        _about(
            "NATS where processes of many hosts find each other, as in nats://10.0.0.1:4222; "
            "several servers of one NATS separated by commas; tls://.. requires TLS"
        ),
    ] = ""
    namespace: Annotated[
        str, _about("name of this cluster, which isolates it from others on the same NATS")
    ] = "default"
    nats_credentials: Annotated[
        str,
        _about(
            "credentials file for NATS (or TRIPTYCH_NATS_USER and _PASSWORD, or _TOKEN)",
            takes="file",
        ),
    ] = ""
    nats_ca: Annotated[
        str, _about("CA certificates for NATS; default: the system's. Requires TLS", takes="file")
    ] = ""
    nats_cert: Annotated[str, _about("client certificate for NATS", takes="file")] = ""
    nats_key: Annotated[
        str, _about("private key of --nats-cert, unless it is in the same file", takes="file")
    ] = ""
    migration_limit: Annotated[
        int,
        _frontend(
            "how often a request continues on another worker after losing one; 0: never", ge=0
        ),
    ] = 1
    launch: Annotated[
        Literal["local", "ray"], _about("who runs the workers: this machine, or a Ray cluster")
    ] = "local"
    log_format: Annotated[Literal["json", "text"], _both("log format: JSON or plain text")] = "json"
    limits: Annotated[Limits, _frontend("")] = Limits()
    cache: CacheSettings = CacheSettings()
    kv: Annotated[KvSettings, _frontend("")] = KvSettings()
    torch: Annotated[TorchSettings, _worker("")] = TorchSettings()
    fake: Annotated[FakeSettings, _worker("")] = FakeSettings()
    ray: RaySettings = RaySettings()

    @property
    def topology(self) -> Topology:
        return Topology.parse(self.pattern)

    @property
    def api_keys(self) -> tuple[str, ...]:
        return _keys("api_key", self.api_key)

    @property
    def admin_keys(self) -> tuple[str, ...]:
        return _keys("admin_key", self.admin_key)

    @property
    def needs_key(self) -> bool:
        """Whether clients must send an API key."""
        return bool(self.api_keys or self.keys_file)

    @property
    def gpus(self) -> int:
        """GPUs of a worker that Kubernetes or Ray places: it sees only those it was given."""
        if self.engine == "fake" or not self.device.startswith("cuda"):
            return 0
        if self.device != "cuda":
            raise InvalidConfig(
                f"--device {self.device} has no meaning where each worker sees only the GPUs "
                "that it was given. Use --device cuda."
            )
        return 1

    @property
    def servers(self) -> tuple[str, ...]:
        """``nats://10.0.0.1:4222,nats://10.0.0.2:4222``, one by one."""
        servers = tuple(part.strip() for part in self.join.split(",")) if self.join else ()
        for server in servers:
            _check_server(server)
        return servers

    def share(self, whole: int) -> int:
        """How much of ``whole`` one tenant may use: half of it if there are several tenants."""
        return whole // 2 if self.keys_file or len(self.api_keys) > 1 else whole

    @property
    def media_limits(self) -> dict[MediaKind, int]:
        """``image=8,video=1`` as numbers."""
        limits: dict[MediaKind, int] = {}
        for part in self.limit_media.split(",") if self.limit_media.strip() else ():
            name, _, number = (word.strip() for word in part.partition("="))
            kind = next((kind for kind in typing.get_args(MediaKind) if kind == name), None)
            if kind is None or kind in limits or not re.fullmatch("[0-9]{1,9}", number):
                raise InvalidConfig(
                    f"--limit-media '{self.limit_media}' cannot be read at '{part.strip()}'. Write "
                    "it as image=8,video=1,audio=2, each kind once at most."
                )
            limits[kind] = int(number)
        return limits


class Setting(Struct, frozen=True):
    """One setting: ``--torch-kv-blocks`` has the path ``("torch", "kv_blocks")``."""

    path: tuple[str, ...]
    type: Any
    default: Any
    about: str
    section: str
    of: AppliesTo
    takes: Takes = "value"

    @property
    def name(self) -> str:
        return "--" + "-".join(self.path).replace("_", "-")

    @property
    def variable(self) -> str:
        return "TRIPTYCH_" + "_".join(self.path).upper()


def all_settings(
    struct: type[Struct] = Config, path: tuple[str, ...] = (), of: AppliesTo = "both"
) -> Iterator[Setting]:
    """Every setting, in the order of the structs."""
    hints = typing.get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        hint = hints[field.name]
        kind, *notes = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
        note = next((note for note in notes if isinstance(note, Meta)), Meta())
        extra = note.extra or {}
        whose = extra.get("of", of)
        if isinstance(kind, type) and issubclass(kind, Struct):
            yield from all_settings(kind, (*path, field.name), whose)
            continue
        section = (struct.__doc__ or "").strip() if path else "general"
        about, takes = note.description or "", extra.get("takes", "value")
        yield Setting((*path, field.name), kind, field.default, about, section, whose, takes)


def load_config(
    file: dict[str, Any],
    given: dict[tuple[str, ...], Any],
    source: str = "",
    own_nats: bool = False,
    environment: Mapping[tuple[str, ...], Any] | None = None,
    keys: bool = True,
) -> Config:
    """Merge the decoded TOML file (``source`` is its path), the environment and the given flags.

    ``own_nats``: NATS will exist, though ``join`` names none. ``keys``: read the key files.
    """
    merged: dict[str, Any] = {
        key: dict(value) if isinstance(value, dict) else value for key, value in file.items()
    }
    environment = environment or {}
    for layer in (environment, given):
        _merge_layer(merged, layer)
    try:
        config = msgspec.convert(merged, Config)
    except msgspec.ValidationError as error:
        raise InvalidConfig(_explain(str(error), given, environment, source)) from None
    if keys:
        config = _with_key_files(config)
    # These properties raise InvalidConfig for a wrong value.
    _ = config.topology, config.media_limits, config.servers
    if not set(config.api_keys).isdisjoint(config.admin_keys):
        raise InvalidConfig(
            "a key is both an API key and an admin key: its tenant would see all others"
        )
    for name in () if config.join or own_nats else ("request_plane", "event_plane"):
        if getattr(config, name) == "nats":
            flag = "--" + name.replace("_", "-")
            raise InvalidConfig(f"{flag} nats needs the address of NATS: set --join")
    if not re.fullmatch("[A-Za-z0-9_-]{1,64}", config.namespace):
        raise InvalidConfig(
            f"--namespace '{config.namespace}' is invalid. Use at most 64 letters, digits, '-' and "
            "'_'."
        )
    return config


def _merge_layer(merged: dict[str, Any], layer: Mapping[tuple[str, ...], Any]) -> None:
    """A key or a key file replaces both of the layers below."""
    for pair in zip(KEYS, KEY_FILES, strict=True):
        if any(layer.get((name,)) for name in pair):
            for name in pair:
                merged.pop(name, None)
    for path, value in layer.items():
        level = merged
        for name in path[:-1]:
            level = level.setdefault(name, {})
        if isinstance(level, dict):  # else the file is wrong: ``convert`` reports it
            level[path[-1]] = value


def _keys(name: str, given: str) -> tuple[str, ...]:
    keys = tuple(key for part in given.split(",") if (key := part.strip()))
    if given and not keys:
        raise InvalidConfig(f"{name} (or {key_variable(name)}) is set, but contains no key")
    return keys


def _with_key_files(config: Config) -> Config:
    """The settings with the keys of the key files."""
    for name, file in zip(KEYS, KEY_FILES, strict=True):
        if not (path := getattr(config, file)):
            continue
        flag = "--" + file.replace("_", "-")
        if getattr(config, name):
            raise InvalidConfig(
                f"{flag} and {name} (or {key_variable(name)}) are both set: use one"
            )
        try:
            lines = Path(path).read_text().split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidConfig(f"{flag} {path} cannot be read: {error}") from None
        keys = _keys(name, ",".join(lines) or ",")
        config = msgspec.structs.replace(config, **{name: ",".join(keys)})
    return config


def key_variable(name: str) -> str:
    return f"TRIPTYCH_{name.upper()}"


def key_environment(config: Config) -> dict[str, str]:
    """Environment variables with the keys of this config, which ``to_flags`` leaves out."""
    return {key_variable(name): value for name in KEYS if (value := getattr(config, name))}


def _check_server(server: str) -> None:
    try:
        parts = urlsplit(server)
        named = parts.scheme in ("nats", "tls") and parts.hostname and parts.port != 0
    except ValueError:
        named = False
    if not named or parts.path or parts.query or parts.fragment:
        raise InvalidConfig(
            f"--join {server!r} is not a server address. Write it as nats://10.0.0.1:4222."
        )
    if parts.username is not None:
        raise InvalidConfig(
            "--join contains a user name, which everyone who lists processes would see. Set "
            "TRIPTYCH_NATS_USER and TRIPTYCH_NATS_PASSWORD, or TRIPTYCH_NATS_TOKEN."
        )


def _explain(
    message: str,
    given: Mapping[tuple[str, ...], Any],
    environment: Mapping[tuple[str, ...], Any],
    source: str,
) -> str:
    """msgspec's message, with the name by which the operator gave the setting."""
    what, _, place = message.partition(" - at `$")
    path = tuple(place.rstrip("`").split(".")[1:])
    where = f"{source}: " if source else ""
    if unknown := re.search(r"unknown field `(.*)`", what):
        wrong = _key((*path, unknown[1]))
        near = difflib.get_close_matches(wrong, [_key(flag.path) for flag in all_settings()], 1)
        hint = f"Did you mean {near[0]}?" if near else "`triptych serve --help-all` lists them."
        return f"{where}there is no setting {wrong}. {hint}"
    what = what.replace("Expected `str` of length >= 1", "must not be empty").replace("`", "")
    what = what[0].lower() + what[1:]
    flag = next((flag for flag in all_settings() if flag.path == path), None)
    if flag is not None and path in given:
        return f"{flag.name} {given[path]!r}: {what}"
    if flag is not None and path in environment:
        return f"{flag.variable}={environment[path]}: {what}"
    return f"{where}{_key(path)}: {what}"


def _key(path: tuple[str, ...]) -> str:
    """Its name in the file: ``[torch] kv_blocks``."""
    return path[-1] if len(path) == 1 else f"[{'.'.join(path[:-1])}] {path[-1]}"


def to_flags(config: Config) -> list[str]:
    """The command line that gives this config, without keys."""
    words: list[str] = []
    for flag in all_settings():
        value: Any = config
        for name in flag.path:
            value = getattr(value, name)
        if value == flag.default or flag.path[0] in (*KEYS, *KEY_FILES):
            continue
        if flag.type is bool:
            words.append(flag.name if value else "--no-" + flag.name[2:])
        else:
            words.append(f"{flag.name}={value}")
    return words


def literal_values(kind: Any) -> tuple[str, ...] | None:
    """The values of a Literal, or None."""
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else None
