"""The words of ``--help``, besides those that settings have of their own."""

from __future__ import annotations

ABOUT = """\
Triptych serves multimodal language models: Encode, Prefill and Decode, folded in one process
or apart. The same request gives the same tokens in every pattern."""

FIRST = """\
first steps:
  triptych doctor                         is this machine ready?
  triptych demo                           pictures, clips and sounds through E/PD, with answers
  triptych ask 'What colour is the star?' --image star.png
  triptych serve                          the demo's small model, until Ctrl-C; prints a curl line
  triptych serve --help                   settings, patterns, and how to send media"""

PATTERNS = """\
patterns (the slash is a process boundary, a number is how many):
  EPD         one process does all three: first try, small models, low load
  E/PD        encoders apart: many images, encoders scale on their own
  E/P/D       all apart: time to first token and between tokens tuned on their own
  EP/D        encode with prefill, decode apart
  E*2/P/D*3   two encoders, one prefill, three decode workers"""

VARIABLES = """\
Every setting is an environment variable too: --torch-kv-blocks is TRIPTYCH_TORCH_KV_BLOCKS, and
TRIPTYCH_CONFIG names the file. A flag wins over the environment, the environment over the file. A
TRIPTYCH_ name that is no setting is refused.
Secrets: TRIPTYCH_API_KEY (what clients must send) and TRIPTYCH_ADMIN_KEY (what opens /cluster and
/metrics), or files with them (--api-key-file, --admin-key-file); TRIPTYCH_SECRET (what workers
prove to each other); TRIPTYCH_NATS_USER and TRIPTYCH_NATS_PASSWORD, or TRIPTYCH_NATS_TOKEN (for
--join). TRIPTYCH_LOG sets the log level."""

OTHERS = """\
These are the settings that this process heeds. It takes those of the other side too, so that
one file serves both; `triptych serve --help` has them all."""

EXAMPLES = {
    "serve": """\
  triptych serve                                          the small model that ships, to try it
  triptych serve ./Qwen2.5-VL-7B --pattern E/PD --enable-multimodal
  triptych serve ./Qwen2.5-VL-7B --enable-multimodal --allowed-media-path /srv/media
  triptych serve ./Qwen2.5-VL-7B --enable-multimodal --limit-media image=8,video=1
  triptych serve --config triptych.toml --port 8080       flags win over the file
  triptych serve ./Qwen2.5-VL-7B --engine vllm --engine-args='--max-num-seqs 64'

media are parts of a message's content (docs/interface.md has all of them):
  {"type": "image_url", "image_url": {"url": "https://example.com/cat.jpg"}}
  {"type": "image_url", "image_url": {"url": "file:///srv/media/cat.jpg"}}
  {"type": "video_url", "video_url": {"url": "file:///srv/media/cat.mp4"}}
  {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,..."}}
  curl --data-binary @cat.mp4 http://127.0.0.1:8000/v1/media    gives a media:// URL for later""",
    "frontend": """\
  triptych frontend ./MODEL --pattern E/PD --enable-multimodal --run-dir /run/triptych
  triptych frontend ./MODEL --pattern E/PD --enable-multimodal --join nats://10.0.0.1:4222

It answers HTTP and sends requests to the workers that it finds: on one machine in the same
--run-dir, on many on the same NATS (--join) in the same --namespace. All need the same model,
--pattern and TRIPTYCH_SECRET. GET /cluster tells who is there, and who is not used and why.
It loads no weights and needs no GPU. There may be several.""",
    "worker": """\
  triptych worker ./MODEL --pattern 'E*2/PD' --enable-multimodal --run-dir /run/triptych --role E
  triptych worker ./MODEL --pattern EP/D --role D --join nats://10.0.0.1:4222 --worker-host 10.0.0.2

It loads what its --role needs, one of the roles of --pattern, and answers the frontends that find
it: on one machine in the same --run-dir, on many on the same NATS (--join) in the same
--namespace, at the address --worker-host. All need the same model, --pattern and TRIPTYCH_SECRET.
Role and --index are its name (E-1), which nobody else may have there.""",
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

Media stand before the question, in the order of the flags; a value is a file here or a URL that
the server looks up. Without --url the server at --host and --port is asked; if nobody listens
there, one is started with the settings below and stopped after the answer. A server that runs
heeds none of them but --host, --port and the key: with others it is not asked. The answer goes
to stdout, the model's name and times to stderr.""",
    "render": """\
  triptych render compose --config deploy/e-pd.toml > compose.yaml
  triptych render kubernetes /models/Qwen2.5-VL-7B --volume qwen --enable-multimodal --device cuda
  triptych render kubernetes --config deploy/e-p-d.toml --join nats://nats.infra:4222

MODEL is a path inside the containers, as all others are; none: the small model that ships. NATS is
part of what is printed, unless --join names one. No secret is: the first lines say how to give
them, and docs/deploy.md what comes before and after.""",
    "convert-embeddings": """\
  triptych convert-embeddings picture.pt picture.safetensors --kind image""",
}

OWN_USAGE = {
    "render": "{compose,kubernetes} [MODEL]",
    "worker": "--role ROLE [--index N] [--ready-file FILE] [MODEL]",
    "ask": "QUESTION [--image FILE] [--video FILE] [--audio FILE] [--url URL]",
}
