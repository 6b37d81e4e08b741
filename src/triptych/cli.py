"""The command line: each command calls one function. A flag is a setting's name with dashes."""

from __future__ import annotations

import argparse
import os
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from triptych import __version__
from triptych.config import Config, Flag, choices, flags, load
from triptych.errors import InvalidConfig, StartError
from triptych.messages import Kind

ABOUT = """\
Triptych serves multimodal language models: Encode, Prefill and Decode, folded in one process
or apart. The same request gives the same tokens in every pattern."""

FIRST = """\
first steps:
  triptych doctor                         is this machine ready?
  triptych demo                           a picture and a clip through E/PD (tiny random model)
  triptych serve --enable-multimodal      that model, until Ctrl-C; prints a curl line
  triptych serve --help                   settings, patterns, and how to send media"""

PATTERNS = """\
patterns (the slash is a process boundary, a number is how many):
  EPD         one process does all three: first try, small models, low load
  E/PD        encoders apart: many images, encoders scale on their own
  E/P/D       all apart: time to first token and between tokens tuned on their own
  EP/D        encode with prefill, decode apart
  E*2/P/D*3   two encoders, one prefill, three decode workers"""

SECRETS = """\
Secrets come from the environment: TRIPTYCH_API_KEY (what clients must send), TRIPTYCH_SECRET
(what workers prove to each other). TRIPTYCH_LOG sets the log level. A flag wins over the
environment, and that over the file."""

EXAMPLES = {
    "serve": """\
  triptych serve                                          a tiny random model, to try it
  triptych serve ./Qwen2.5-VL-7B --pattern E/PD --enable-multimodal
  triptych serve ./Qwen2.5-VL-7B --enable-multimodal --allowed-media-path /srv/media
  triptych serve ./Qwen2.5-VL-7B --enable-multimodal --limit-media image=8,video=1
  triptych serve --config triptych.toml --port 8080       flags win over the file

media are parts of a message's content (docs/interface.md has all of them):
  {"type": "image_url", "image_url": {"url": "https://example.com/cat.jpg"}}
  {"type": "image_url", "image_url": {"url": "file:///srv/media/cat.jpg"}}
  {"type": "video_url", "video_url": {"url": "file:///srv/media/cat.mp4"}}
  {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,..."}}
  curl --data-binary @cat.mp4 http://127.0.0.1:8000/v1/media    gives a media:// URL for later""",
    "frontend": """\
  triptych frontend ./MODEL --pattern E/PD --run-dir /run/triptych""",
    "worker": """\
  triptych worker ./MODEL --pattern 'E*2/PD' --run-dir /run/triptych --role E --index 1""",
    "doctor": """\
  triptych doctor ./MODEL --device cuda                   can it be served here?""",
    "demo": """\
  triptych demo --pattern E/P/D
  triptych demo ./Qwen2-Audio-7B-Instruct                 asks about what the model takes""",
    "convert-embeddings": """\
  triptych convert-embeddings picture.pt picture.safetensors --kind image""",
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in a line, and where help is, instead of all its flags."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"triptych: {message}. See `{self.prog} --help`.\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if "run" not in args:
        parser.print_help()
        return 0
    try:
        return int(args.run(args))
    except StartError as error:
        print(f"triptych: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _serve(args: argparse.Namespace) -> int:
    from triptych import launch

    return launch.serve(_config(args))


def _frontend(args: argparse.Namespace) -> int:
    from triptych.frontend import process

    return process.main(_alone(_config(args)), _secret())


def _worker(args: argparse.Namespace) -> int:
    from triptych.stages import process

    config = _alone(_config(args))
    return process.main(config, args.role, f"{args.role}-{args.index}", _secret())


def _doctor(args: argparse.Namespace) -> int:
    from triptych import doctor

    return doctor.run(_config(args))


def _demo(args: argparse.Namespace) -> int:
    from triptych import demo

    return demo.run(_config(args))


def _convert(args: argparse.Namespace) -> int:
    from triptych import convert

    return convert.run(Path(args.source), Path(args.target), args.kind)


COMMANDS = {
    "serve": (_serve, "start everything on this machine"),
    "frontend": (_frontend, "only the HTTP interface, for workers started elsewhere"),
    "worker": (_worker, "only one worker of a role"),
    "doctor": (_doctor, "check this machine and say what to mend"),
    "demo": (
        _demo,
        "start E/PD, ask about a picture and a clip, show answers and stage times, stop",
    ),
    "convert-embeddings": (_convert, "make a safetensors file of a torch file with embeddings"),
}


def _parser() -> _Parser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser("triptych", description=ABOUT, epilog=FIRST, formatter_class=raw)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, (run, about) in COMMANDS.items():
        examples, usage, epilog = f"{about}\n\nexamples:\n{EXAMPLES[name]}", None, None
        if name != "convert-embeddings":  # its own line of usage is short
            examples = f"{examples}\n\n{PATTERNS}"
            own = " --role ROLE [--index N]" if name == "worker" else ""
            usage, epilog = f"triptych {name}{own} [MODEL] [--config FILE] [settings]", SECRETS
        command = commands.add_parser(
            name,
            help=about,
            description=examples,
            usage=usage,
            epilog=epilog,
            formatter_class=raw,
        )
        command.set_defaults(run=run)
        if name == "convert-embeddings":
            command.add_argument("source", metavar="FILE", help="the .pt, .pth or .bin file")
            command.add_argument("target", metavar="NEW", help="the .safetensors file to write")
            about = "what a tensor without a name is the embedding of (default: image)"
            command.add_argument("--kind", choices=get_args(Kind), default="image", help=about)
            continue
        if name == "worker":
            command.add_argument("--role", required=True, help="its stages: E, P, D, EP, PD, EPD")
            command.add_argument("--index", type=int, default=0, help="which of its role: 0, 1 ..")
        _add_flags(command)
    return parser


def _add_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", metavar="FILE", help="TOML file with the same names")
    command.add_argument("folder", nargs="?", metavar="MODEL", help="the same as --model")
    sections: dict[str, Any] = {}
    for flag in flags():
        section = flag.section.rstrip(".").lower()
        group = sections.get(section)
        if group is None:
            group = sections[section] = command.add_argument_group(section)
        _add_flag(group, flag)


def _add_flag(group: Any, flag: Flag) -> None:
    default = "" if flag.default == "" else f" (default: {_told(flag.default)})"
    about = f"{flag.about}{default}".replace("%", "%%")
    common = {"dest": "/".join(flag.path), "default": argparse.SUPPRESS, "help": about}
    if flag.type is bool:
        group.add_argument(flag.name, action=argparse.BooleanOptionalAction, **common)
    elif options := choices(flag.type):
        group.add_argument(flag.name, choices=options, **common)
    else:
        metavar = {int: "N", float: "X"}.get(flag.type, "TEXT")
        group.add_argument(flag.name, type=flag.type, metavar=metavar, **common)


def _told(default: Any) -> str:
    """A default for people: nobody counts the digits of a gibibyte."""
    if type(default) is not int or default < 1 << 20 or default % (1 << 20):
        return str(default)
    return f"{default}, {default >> 20} MiB"


def _config(args: argparse.Namespace) -> Config:
    given: dict[tuple[str, ...], Any] = {
        flag.path: getattr(args, "/".join(flag.path))
        for flag in flags()
        if hasattr(args, "/".join(flag.path))
    }
    if args.folder:
        given["model",] = args.folder
    if key := os.environ.get("TRIPTYCH_API_KEY"):
        given.setdefault(("api_key",), key)
    return load(_file(args.config), given, args.config or "")


def _file(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidConfig(f"{path} cannot be read: {error}") from None


def _alone(config: Config) -> Config:
    """For a process started by hand: it must be told where the others are."""
    from triptych import launch
    from triptych.runtime import run_dir

    if not config.run_dir:
        raise InvalidConfig(
            "--run-dir is not set. Frontend and workers find each other there: give all of them "
            "the same directory."
        )
    run_dir.make(config.run_dir)
    return launch.resolve(config)


def _secret() -> str:
    secret = os.environ.get("TRIPTYCH_SECRET", "")
    if not secret:
        raise InvalidConfig(
            "TRIPTYCH_SECRET is not set. Frontend and workers prove it to each other: give all of "
            "them the same, for example from `openssl rand -hex 32`."
        )
    return secret
