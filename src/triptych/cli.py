"""The command line: each command calls one function. A flag is a setting's name with dashes."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from triptych import __version__, environment, requirements
from triptych.commands.terminal import discard_unwritten, write_stdout
from triptych.config import (
    KEY_FILES,
    KEYS,
    Config,
    Setting,
    all_settings,
    key_variable,
    literal_values,
    load_config,
)
from triptych.deploy.container import Containers
from triptych.errors import InvalidConfig, StartError, TriptychError
from triptych.messages import MediaKind
from triptych.runtime.parent_death import EXIT_START_ERROR
from triptych.usage import ABOUT, EXAMPLES, FIRST, OTHER_SETTINGS, OWN_USAGE, PATTERNS, VARIABLES

EXIT_BROKEN_PIPE = 141  # the code of a command that SIGPIPE ends


class _CommandParser(argparse.ArgumentParser):
    """Reports an error in one line with a pointer to --help, instead of the whole usage."""

    intermixed = False  # positional arguments may stand between flags

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if not self.intermixed:
            return super().parse_known_args(args, namespace)
        self.intermixed = False  # parse_known_intermixed_args calls this method
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self.intermixed = True

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"triptych: {message}. See `{self.prog} --help`.\n")


class _NoFlag(argparse.Action):
    """Refuses a key on the command line, which every user of the machine can list."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        flag = self.option_strings[0]
        variable = key_variable(self.dest)
        parser.error(
            f"{flag} would show the key to everyone who lists processes: set {variable}, or give "
            f"{flag}-file FILE"
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest:
        args.refuse(f"unrecognized arguments: {' '.join(rest)}")
    code = 0
    try:
        if "run" in args:
            code = int(args.run(args))
        else:
            parser.print_help()
        write_stdout("", end="")  # flush while an error can still be reported
        return code
    except StartError as error:
        print(f"triptych: {error}", file=sys.stderr)
        return EXIT_START_ERROR
    except TriptychError as error:  # of a server, or no server answers
        print(f"triptych: {error} ({error.code})", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of stdout is gone, as with `| head`
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        return 130
    finally:
        discard_unwritten(sys.stdout)


def _serve(args: argparse.Namespace) -> int:
    from triptych.commands import launch, launch_ray

    config = _config(args)
    return launch_ray.serve_on_ray(config) if config.launch == "ray" else launch.serve_local(config)


def _frontend(args: argparse.Namespace) -> int:
    from triptych.api import process
    from triptych.commands import launch

    config = _check_single(_config(args), "frontend")
    launch.check_media(config)
    launch.check_access(config)
    launch.warn_of_open_port(config)
    return process.main(config, launch.cluster_secret())


def _worker(args: argparse.Namespace) -> int:
    from triptych.commands import launch
    from triptych.stages import process

    config = _check_single(_config(args, keys=False), "worker")
    launch.check_threads(config)
    launch.check_media(config, args.role)
    worker_id = f"{args.role}-{args.index}"
    return process.main(config, args.role, worker_id, launch.cluster_secret(), args.ready_file)


def _doctor(args: argparse.Namespace) -> int:
    from triptych.commands import doctor

    return doctor.run(_config(args, keys=False))


def _demo(args: argparse.Namespace) -> int:
    from triptych.commands import demo

    return demo.run(_config(args, **DEFAULTS["demo"]))


def _ask(args: argparse.Namespace) -> int:
    from triptych.commands import ask
    from triptych.commands.client import MediaInput

    media = tuple(MediaInput(kind, source) for kind, source in args.media)
    own = tuple(
        flag.name
        for flag in all_settings()
        if flag.path in _given(args) and not _selects_server(flag)
    )
    question = ask.Question(args.question, media, args.url, args.max_tokens, args.json, own)
    return ask.run(_config(args), question)


def _selects_server(flag: Setting) -> bool:
    """Whether a setting says which server to ask, not how to start one."""
    return flag.path[0] in {"host", "port", "tls_cert", "tls_key", *KEYS, *KEY_FILES}


def _convert(args: argparse.Namespace) -> int:
    from triptych.commands import convert

    return convert.run(Path(args.source), Path(args.target), args.kind)


def _render(args: argparse.Namespace) -> int:
    from triptych import deploy

    own = {
        flag.path[0]: getattr(args, flag.path[0], flag.default) for flag in all_settings(Containers)
    }
    return deploy.run(args.target, _config(args, own_nats=True), Containers.checked(own))


COMMANDS = {
    "serve": (_serve, "start a frontend and all workers on this machine"),
    "frontend": (_frontend, "start one frontend, for workers started elsewhere"),
    "worker": (_worker, "start one worker of a role"),
    "doctor": (_doctor, "check this machine: what is wrong and what to do"),
    "demo": (
        _demo,
        "start E/PD, ask about pictures, clips and sounds, show answers and stage times",
    ),
    "ask": (_ask, "ask about your own files: a running server, or a temporary one"),
    "render": (_render, "print a Compose file or Kubernetes manifests"),
    "convert-embeddings": (_convert, "convert a torch file with embeddings to safetensors"),
}
DEFAULTS: dict[str, dict[str, Any]] = {  # of single commands
    "demo": {"pattern": "E/PD"},  # the simplest that shows a transfer
}
PROCESS_COMMANDS = ("frontend", "worker")  # their help shows only the settings that apply to them
LAUNCH_SETTINGS = {"launch", "ray"}  # only `serve` starts workers
HIDDEN_SETTINGS = {  # settings without effect: demo and ask accept media, demo takes any free port
    "frontend": {"devices", *LAUNCH_SETTINGS},
    "worker": {"devices", *LAUNCH_SETTINGS},
    "doctor": LAUNCH_SETTINGS,
    "render": LAUNCH_SETTINGS,
    "demo": {"port", "enable_multimodal", *LAUNCH_SETTINGS},
    "ask": {"enable_multimodal", *LAUNCH_SETTINGS},
}


def _parser() -> _CommandParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = _CommandParser("triptych", description=ABOUT, epilog=FIRST, formatter_class=raw)
    parser.add_argument("--version", action="version", version=__version__)
    parser.set_defaults(refuse=parser.error)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, (run, about) in COMMANDS.items():
        examples, usage, epilog = f"{about}\n\nexamples:\n{EXAMPLES[name]}", None, None
        if name != "convert-embeddings":  # its own line of usage is short
            examples = f"{examples}\n\n{PATTERNS}"
            own = OWN_USAGE.get(name, "[MODEL]")
            usage = f"triptych {name} {own} [--config FILE] [settings]"
            epilog = f"{OTHER_SETTINGS}\n\n{VARIABLES}" if name in PROCESS_COMMANDS else VARIABLES
        command = commands.add_parser(
            name,
            help=about,
            description=examples,
            usage=usage,
            epilog=epilog,
            formatter_class=raw,
        )
        command.set_defaults(run=run, refuse=command.error)
        command.intermixed = name == "render"  # it has an optional positional after another one
        if name in OWN_FLAGS:
            OWN_FLAGS[name](command)
        if name != "convert-embeddings":
            _add_flags(command, name)
    return parser


def _add_convert(command: argparse.ArgumentParser) -> None:
    command.add_argument("source", metavar="FILE", help="the .pt, .pth or .bin file")
    command.add_argument("target", metavar="NEW", help="the .safetensors file to write")
    about = "kind of a tensor without a name (default: image)"
    command.add_argument("--kind", choices=get_args(MediaKind), default="image", help=about)


def _add_worker(command: argparse.ArgumentParser) -> None:
    command.add_argument("--role", required=True, help="its stages: E, P, D, EP, PD, EPD")
    command.add_argument("--index", type=int, default=0, help="number within its role: 0, 1 ..")
    about = "file that exists while this worker takes requests, for probes"
    command.add_argument("--ready-file", metavar="FILE", default="", help=about)


def _add_render(command: argparse.ArgumentParser) -> None:
    command.add_argument("target", choices=("compose", "kubernetes"), help="what to print")
    group = command.add_argument_group("containers")
    for flag in all_settings(Containers):
        _add_flag(group, flag, flag.default)


def _add_ask(command: argparse.ArgumentParser) -> None:
    command.add_argument("question", type=_question, metavar="QUESTION", help="what to ask")
    for kind, what in (("image", "a picture"), ("video", "a clip"), ("audio", "a sound")):
        command.add_argument(
            f"--{kind}",
            dest="media",  # one list, so that media keep their order
            action="append",
            default=[],
            type=functools.partial(_medium, kind),
            metavar="FILE",
            help=f"{what}: a file or a URL; may be given several times",
        )
    command.add_argument("--url", default="", help="URL of the server (default: see above)")
    command.add_argument("--max-tokens", type=_count, metavar="N", help="most tokens of the answer")
    about = "print one line of JSON: answer, model, finish, usage, and timings in milliseconds"
    command.add_argument("--json", action="store_true", help=about)


def _question(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def _medium(kind: str, source: str) -> tuple[str, str]:
    return kind, source


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


OWN_FLAGS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "worker": _add_worker,
    "ask": _add_ask,
    "render": _add_render,
    "convert-embeddings": _add_convert,
}


def _add_flags(command: argparse.ArgumentParser, name: str) -> None:
    """Every setting that applies to a command; the model also as a positional argument."""
    command.add_argument("--config", metavar="FILE", help="TOML file with the same names")
    if name != "ask":  # its positional argument is the question
        command.add_argument("folder", nargs="?", metavar="MODEL", help="the same as --model")
    else:
        command.set_defaults(folder=None)
    sections: dict[str, Any] = {}
    for flag in all_settings():
        if flag.path[0] in HIDDEN_SETTINGS.get(name, ()):
            continue
        section = flag.section.rstrip(".")
        section = section[:1].lower() + section[1:]
        group = sections.get(section)
        if group is None:
            group = sections[section] = command.add_argument_group(section)
        default = DEFAULTS.get(name, {}).get(flag.path[0], flag.default)
        _add_flag(
            group, flag, default, shown=name not in PROCESS_COMMANDS or flag.of in ("both", name)
        )


def _add_flag(group: Any, flag: Setting, default: Any, shown: bool = True) -> None:
    if flag.path[0] in KEYS:
        group.add_argument(
            flag.name, action=_NoFlag, default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
        return
    note = "" if default == "" else f" (default: {_shown(default)})"
    about = f"{flag.about}{note}".replace("%", "%%") if shown else argparse.SUPPRESS
    common = {"dest": "/".join(flag.path), "default": argparse.SUPPRESS, "help": about}
    if flag.type is bool:
        group.add_argument(flag.name, action=argparse.BooleanOptionalAction, **common)
    elif options := literal_values(flag.type):
        group.add_argument(flag.name, choices=options, **common)
    else:
        metavar = {int: "N", float: "X"}.get(flag.type, "TEXT")
        group.add_argument(flag.name, type=flag.type, metavar=metavar, **common)


def _shown(default: Any) -> str:
    """A default for --help, large sizes also in MiB."""
    if type(default) is not int or default < 1 << 20 or default % (1 << 20):
        return str(default)
    return f"{default}, {default >> 20} MiB"


def _config(
    args: argparse.Namespace, *, own_nats: bool = False, keys: bool = True, **defaults: Any
) -> Config:
    """``keys``: read the key files. ``defaults``: of this command."""
    path = args.config or os.environ.get(environment.CONFIG) or None
    variables = environment.settings_of_environment(os.environ)
    return load_config(defaults | _file(path), _given(args), path or "", own_nats, variables, keys)


def _given(args: argparse.Namespace) -> dict[tuple[str, ...], Any]:
    """The settings of the command line."""
    given: dict[tuple[str, ...], Any] = {
        flag.path: getattr(args, "/".join(flag.path))
        for flag in all_settings()
        if hasattr(args, "/".join(flag.path))
    }
    if args.folder:
        given["model",] = args.folder
    return given


def _file(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidConfig(f"{path} cannot be read: {error}") from None


def _check_single(config: Config, part: requirements.Command) -> Config:
    """Check the settings of a process that is started by hand: it needs a discovery."""
    from triptych.commands import launch
    from triptych.runtime import run_dir

    requirements.check_packages(config, part)
    if config.run_dir:
        run_dir.create(config.run_dir)
    elif not config.join:
        raise InvalidConfig(
            "--run-dir is not set. Frontend and workers find each other there: give all of them "
            "the same directory. On several hosts use NATS: set --join."
        )
    launch.warn_of_short_secret(config)
    launch.warn_of_plain_calls(config)
    return launch.resolve(config)
