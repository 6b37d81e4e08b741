"""Texts of ``--help``. Those of single settings stand in ``config.py``."""

from __future__ import annotations

ABOUT = """\
Triptych serves multimodal language models. Encode, prefill and decode run in one process or in
separate ones; the same request gives the same tokens in every pattern."""

FIRST = """\
first steps:
  triptych doctor                         is this machine ready?
  triptych demo                           pictures, clips and sounds through E/PD, with answers
  triptych ask 'What colour is the star?' star.png
  triptych chat                           talk to a model; drop files into the text
  triptych serve                          serve the small demo model; prints a curl line
  triptych serve --help                   patterns and the common settings; --help-all: all"""

PATTERNS = """\
patterns (the slash is a process boundary, a number is how many):
  EPD         one process does all three: first try, small models, low load
  E/PD        separate encoders: many images, encoders scale on their own
  E/P/D       all separate: tune time to first token and time between tokens on their own
  EP/D        encode with prefill, decode separate
  E*2/P/D*3   two encoders, one prefill, three decode workers"""

VARIABLES = """\
Every setting is an environment variable too: --torch-kv-blocks is TRIPTYCH_TORCH_KV_BLOCKS, and
TRIPTYCH_CONFIG names the file. A flag overrides the environment, the environment the file. A
TRIPTYCH_ name that is not a setting is an error.
Secrets: TRIPTYCH_API_KEY (clients must send it) and TRIPTYCH_ADMIN_KEY (opens /cluster and
/metrics), or files with them (--api-key-file, --admin-key-file); TRIPTYCH_SECRET (frontends and
workers prove it to each other); TRIPTYCH_NATS_USER and TRIPTYCH_NATS_PASSWORD, or
TRIPTYCH_NATS_TOKEN (for --join). TRIPTYCH_LOG sets the log level."""

MORE = """\
--help-all shows every setting. Each is also a name in the file of --config and an environment
variable: --kv-cache-bytes is TRIPTYCH_KV_CACHE_BYTES."""

OTHER_SETTINGS = """\
These settings apply to this process. It accepts those of the other side too, so that one file
serves both; `triptych serve --help-all` lists all of them."""

DETAILS = {  # of --help-all
    "serve": """\
media are parts of a message's content (docs/interface.md lists all of them):
  {"type": "image_url", "image_url": {"url": "https://example.com/cat.jpg"}}
  {"type": "image_url", "image_url": {"url": "file:///srv/media/cat.jpg"}}
  {"type": "video_url", "video_url": {"url": "file:///srv/media/cat.mp4"}}
  {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,..."}}
  curl --data-binary @cat.mp4 http://127.0.0.1:8000/v1/media    gives a media:// URL for later""",
}

EXAMPLES = {
    "serve": """\
  triptych serve                                          try it with the small demo model
  triptych serve ./Qwen2.5-VL-7B --pattern E/PD --enable-multimodal
  triptych serve ./Qwen2.5-VL-7B --enable-multimodal --allowed-media-path /srv/media
  triptych serve ./Qwen2.5-VL-7B --enable-multimodal --limit-media image=8,video=1
  triptych serve --config triptych.toml --port 8080       flags override the file
  triptych serve ./Qwen2.5-VL-7B --engine vllm --engine-args='--max-num-seqs 64'""",
    "frontend": """\
  triptych frontend ./MODEL --pattern E/PD --enable-multimodal --run-dir /run/triptych
  triptych frontend ./MODEL --pattern E/PD --enable-multimodal --join nats://10.0.0.1:4222

It answers HTTP and calls the workers that it finds: on one machine in the same --run-dir, on
several machines on the same NATS (--join) in the same --namespace. All processes need the same
model, --pattern and TRIPTYCH_SECRET. GET /cluster lists the workers, and those that are not used
with the reason. A frontend loads no weights and needs no GPU. You may run several.""",
    "worker": """\
  triptych worker ./MODEL --pattern 'E*2/PD' --enable-multimodal --run-dir /run/triptych --role E
  triptych worker ./MODEL --pattern EP/D --role D --join nats://10.0.0.1:4222 --worker-host 10.0.0.2

It loads what its --role needs, one of the roles of --pattern. Frontends find it on one machine in
the same --run-dir, on several machines on the same NATS (--join) in the same --namespace, at the
address --worker-host. All processes need the same model, --pattern and TRIPTYCH_SECRET. Role and
--index are its id (E-1), which must be unique there.""",
    "doctor": """\
  triptych doctor ./MODEL --device cuda                   can it be served here?""",
    "demo": """\
  triptych demo --pattern E/P/D
  triptych demo ./Qwen2-Audio-7B-Instruct                 asks about what the model takes""",
    "ask": """\
  triptych ask 'What colour is the triangle?' shapes.png
  triptych ask 'Which picture has the circle?' one.png two.png
  triptych ask 'What happens?' --video https://example.com/cat --url http://127.0.0.1:8000
  triptych ask 'What is said?' word.wav --json
  triptych ask - notes.png < question.txt

The question comes first, then the files; the model sees the files first, in the same order. Each
is a local file or a URL that the server fetches. The content of a file, or its name, says what it
is; --image, --video and --audio say it themselves. The question comes from stdin if it is - or
missing.
Without --url the command asks the server at --host and --port. If none listens there, it starts
one with the settings below and stops it after the answer. To a running server only --host, --port
and the key apply; other settings are an error. The answer goes to stdout, the model's name and
times to stderr.
exit codes: 0 answered; 1 the server refused or failed; 2 the command line, a setting or a file is
wrong; 130 Ctrl-C; 141 the reader of stdout has gone.""",
    "chat": """\
  triptych chat                                           with the server at --host and --port
  triptych chat --url http://10.0.0.2:8000 --system 'Answer in one sentence.'
  triptych chat ./Qwen2.5-VL-7B --device cuda             starts a server if none runs

Type text and press Enter. Drop files into the line, or type their paths: pictures, clips and sounds
go along. A \\ at the end of a line continues it. Ctrl-C stops an answer, Ctrl-D ends the chat, and
/help lists the commands. Input from a pipe is read line by line, each a question; answers go to
stdout, everything else to stderr. Without --url the server is chosen as by `triptych ask`.
exit codes: 0; 1 a question from a pipe was refused or failed, or no server answers; 2 a setting is
wrong.""",
    "render": """\
  triptych render compose --config deploy/e-pd.toml > compose.yaml
  triptych render kubernetes /models/Qwen2.5-VL-7B --volume qwen --enable-multimodal --device cuda
  triptych render kubernetes --config deploy/e-p-d.toml --join nats://nats.infra:4222

MODEL and all other paths are paths inside the containers; without MODEL they serve the small demo
model. The output includes NATS, unless --join names one. It contains no secret: its first lines
say how to set them, and docs/deploy.md describes the steps before and after.""",
    "convert-embeddings": """\
  triptych convert-embeddings picture.pt picture.safetensors --kind image""",
    "completion": """\
  triptych completion bash > ~/.local/share/bash-completion/completions/triptych
  triptych completion zsh > ~/.zfunc/_triptych            a folder of $fpath
  triptych completion fish > ~/.config/fish/completions/triptych.fish

Create the folder first (mkdir -p). bash reads its file only with the package bash-completion.
Without it, and to try it in the shell that runs: source <(triptych completion bash)""",
}

OWN_USAGE = {
    "render": "{compose,kubernetes} [MODEL]",
    "worker": "--role ROLE [--index N] [--ready-file FILE] [MODEL]",
    "ask": "[QUESTION] [FILE ...] [--image FILE] [--video FILE] [--audio FILE] [--url URL]",
    "chat": "[--url URL | MODEL]",
}

_ENGINE_ARGS = "With --engine vllm give it in --engine-args"
VLLM_FLAGS = {  # that have another name here: what to do instead
    "--limit-mm-per-prompt": "Use --limit-media, as in --limit-media image=8,video=1",
    "--max-num-seqs": f"Use --torch-max-running. {_ENGINE_ARGS}",
    "--enable-auto-tool-choice": "It is not needed: leave it out",
    "--tool-call-parser": "Use --tool-parser",
    "--allowed-local-media-path": "Use --allowed-media-path",
    "--tensor-parallel-size": _ENGINE_ARGS,
    "--pipeline-parallel-size": _ENGINE_ARGS,
    "--max-num-batched-tokens": _ENGINE_ARGS,
}

# The settings of --help, by command.
_MODEL = ("model", ("model", "served_model_name", "max_model_len", "dtype"))
_RUNS = ("how it runs", ("pattern", "engine", "device", "kv_cache_bytes"))
_MEDIA = ("media", ("enable_multimodal", "limit_media", "allowed_media_path"))
_HTTP = ("HTTP", ("host", "port", "api_key_file"))
_FIND = ("how the processes find each other", ("run_dir", "join", "namespace"))
_BRIEF = ("model, of a server that it starts", ("model", "pattern", "engine", "device"))
SHORT: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "serve": (_MODEL, _RUNS, _MEDIA, _HTTP, ("choice of workers", ("routing",))),
    "frontend": (
        ("model", ("model", "served_model_name", "max_model_len")),
        ("how it runs", ("pattern", "routing")),
        _FIND,
        _MEDIA,
        _HTTP,
    ),
    "worker": (
        ("model", ("model", "max_model_len", "dtype")),
        (
            "how it runs",
            (*_RUNS[1], "gpu_memory_utilization", "cpu_threads", "enable_multimodal"),
        ),
        (_FIND[0], (*_FIND[1], "worker_host")),
    ),
    "doctor": (_MODEL, _RUNS, _MEDIA, _HTTP),
    "demo": (("model", ("model", "pattern", "engine", "device")),),
    "ask": (("server", _HTTP[1]), _BRIEF),
    "chat": (("server", _HTTP[1]), _BRIEF),
    "render": (_MODEL, _RUNS, _MEDIA, _HTTP, ("cluster", ("join", "namespace", "routing"))),
}
