"""Texts of ``--help``. Those of single settings stand in ``config.py``."""

from __future__ import annotations

ABOUT = """\
Triptych serves multimodal language models. Encode, prefill and decode run in one process or in
separate ones; the same request gives the same tokens in every pattern."""

FIRST = """\
first steps:
  triptych doctor                         is this machine ready?
  triptych demo                           pictures, clips and sounds through E/PD, with answers
  triptych ask 'What colour is the star?' --image star.png
  triptych serve                          serve the small demo model; prints a curl line
  triptych serve --help                   settings, patterns, and how to send media"""

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

OTHER_SETTINGS = """\
These settings apply to this process. It accepts those of the other side too, so that one file
serves both; `triptych serve --help` lists all of them."""

EXAMPLES = {
    "serve": """\
  triptych serve                                          try it with the small demo model
  triptych serve ./Qwen2.5-VL-7B --pattern E/PD --enable-multimodal
  triptych serve ./Qwen2.5-VL-7B --enable-multimodal --allowed-media-path /srv/media
  triptych serve ./Qwen2.5-VL-7B --enable-multimodal --limit-media image=8,video=1
  triptych serve --config triptych.toml --port 8080       flags override the file
  triptych serve ./Qwen2.5-VL-7B --engine vllm --engine-args='--max-num-seqs 64'

media are parts of a message's content (docs/interface.md lists all of them):
  {"type": "image_url", "image_url": {"url": "https://example.com/cat.jpg"}}
  {"type": "image_url", "image_url": {"url": "file:///srv/media/cat.jpg"}}
  {"type": "video_url", "video_url": {"url": "file:///srv/media/cat.mp4"}}
  {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,..."}}
  curl --data-binary @cat.mp4 http://127.0.0.1:8000/v1/media    gives a media:// URL for later""",
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
  triptych ask 'What colour is the triangle?' --image shapes.png
  triptych ask 'Which picture has the circle?' --image one.png --image two.png
  triptych ask 'What happens?' --video https://example.com/cat.mp4 --url http://127.0.0.1:8000
  triptych ask 'What is said?' --audio word.wav --json

Media stand before the question, in the order of the flags; a value is a local file or a URL that
the server fetches. Without --url the command asks the server at --host and --port. If none listens
there, it starts one with the settings below and stops it after the answer. To a running server
only --host, --port and the key apply; other settings are an error. The answer goes to stdout, the
model's name and times to stderr.""",
    "render": """\
  triptych render compose --config deploy/e-pd.toml > compose.yaml
  triptych render kubernetes /models/Qwen2.5-VL-7B --volume qwen --enable-multimodal --device cuda
  triptych render kubernetes --config deploy/e-p-d.toml --join nats://nats.infra:4222

MODEL and all other paths are paths inside the containers; without MODEL they serve the small demo
model. The output includes NATS, unless --join names one. It contains no secret: its first lines
say how to set them, and docs/deploy.md describes the steps before and after.""",
    "convert-embeddings": """\
  triptych convert-embeddings picture.pt picture.safetensors --kind image""",
}

OWN_USAGE = {
    "render": "{compose,kubernetes} [MODEL]",
    "worker": "--role ROLE [--index N] [--ready-file FILE] [MODEL]",
    "ask": "QUESTION [--image FILE] [--video FILE] [--audio FILE] [--url URL]",
}
