"""The command line: each command calls one function. A flag is a setting's name with dashes."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from triptych import __version__, environment, requirements
from triptych.commands.command_parser import CommandParser, HelpAll, HelpGroup
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
from triptych.errors import InvalidConfig, StartError, TriptychError
from triptych.messages import MediaKind
from triptych.runtime.parent_death import EXIT_START_ERROR
from triptych.usage import (
    ABOUT,
    DETAILS,
    EXAMPLES,
    FIRST,
    MORE,
    OTHER_SETTINGS,
    OWN_USAGE,
    PATTERNS,
    SHORT,
    VARIABLES,
    VLLM_FLAGS,
)

if TYPE_CHECKING:  # it loads an HTTP client, which most commands do not need
    from triptych.commands.asked_server import ServerChoice

EXIT_BROKEN_PIPE = 141  # the code of a command that SIGPIPE ends


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
        args.refuse(rest)
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
    launch.check_parsers(config)
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

    config = _config(args)
    text, media = ask.read_question(args.media)
    question = ask.Question(text, media, args.system, _parameters(args), args.json)
    return ask.run(config, question, _choose_server(args))


def _chat(args: argparse.Namespace) -> int:
    from triptych.commands import chat

    options = chat.ChatSettings(args.system, _parameters(args), args.history)
    return chat.run(_config(args), options, _choose_server(args))


def _parameters(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters of a request."""
    limit = {} if args.max_tokens is None else {"max_tokens": args.max_tokens}
    return {"temperature": args.temperature, **limit}


def _choose_server(args: argparse.Namespace) -> ServerChoice:
    from triptych.commands.asked_server import ServerChoice

    given = _given(args)
    own = (flag for flag in all_settings() if flag.path in given)
    names = tuple(flag.name for flag in own if not _selects_server(flag))
    return ServerChoice(args.url, names)


def _selects_server(flag: Setting) -> bool:
    """Whether a setting says which server to ask, not how to start one."""
    return flag.path[0] in {"host", "port", "tls_cert", "tls_key", *KEYS, *KEY_FILES}


def _completion(args: argparse.Namespace) -> int:
    from triptych.commands import completion

    return completion.run(args.shell, _parser())


def _convert(args: argparse.Namespace) -> int:
    from triptych.commands import convert

    return convert.run(Path(args.source), Path(args.target), args.kind)


def _render(args: argparse.Namespace) -> int:
    from triptych import deploy
    from triptych.deploy.container import Containers

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
    "chat": (_chat, "talk to a model in the terminal, with files dropped into the text"),
    "render": (_render, "print a Compose file or Kubernetes manifests"),
    "convert-embeddings": (_convert, "convert a torch file with embeddings to safetensors"),
    "completion": (_completion, "print a script that completes commands and settings in a shell"),
}
WITHOUT_SETTINGS = ("convert-embeddings", "completion")
DEFAULTS: dict[str, dict[str, Any]] = {  # of single commands
    "demo": {"pattern": "E/PD"},  # the simplest that shows a transfer
}
PROCESS_COMMANDS = ("frontend", "worker")  # their help shows only the settings that apply to them
LAUNCH_SETTINGS = {"launch", "ray"}  # only `serve` starts workers
# Settings without effect: demo, ask and chat accept media, and demo takes any free port.
HIDDEN_SETTINGS = {
    "frontend": {"devices", *LAUNCH_SETTINGS},
    "worker": {"devices", *LAUNCH_SETTINGS},
    "doctor": LAUNCH_SETTINGS,
    "render": LAUNCH_SETTINGS,
    "demo": {"port", "enable_multimodal", *LAUNCH_SETTINGS},
    "ask": {"enable_multimodal", *LAUNCH_SETTINGS},
    "chat": {"enable_multimodal", *LAUNCH_SETTINGS},
}


def _parser() -> CommandParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = CommandParser("triptych", description=ABOUT, epilog=FIRST, formatter_class=raw)
    parser.add_argument("--version", action="version", version=__version__)
    parser.set_defaults(refuse=parser.refuse_unknown)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, (run, about) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=about,
            description=f"{about}\n\nexamples:\n{EXAMPLES[name]}",
            formatter_class=raw,
        )
        command.set_defaults(run=run, refuse=command.refuse_unknown)
        command.intermixed = name == "render"  # it has an optional positional after another one
        command.add_flags = functools.partial(_add_flags, command, name)
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
    from triptych.deploy.container import Containers

    group = command.add_argument_group("containers")
    for flag in all_settings(Containers):
        _add_flag(group, flag, flag.default)


def _add_ask(command: argparse.ArgumentParser) -> None:
    assert isinstance(command, CommandParser)
    command.word_flag = "--word"
    _add_media(command, command.word_flag, None, argparse.SUPPRESS)
    for kind, what in (("image", "a picture"), ("video", "a clip"), ("audio", "a sound")):
        about = f"{what}: a file or a URL; may be given several times"
        _add_media(command, f"--{kind}", kind, about)
    _add_question(command)
    about = "print one line of JSON: answer, model, finish, usage, and timings in milliseconds"
    command.add_argument("--json", action="store_true", help=about)


def _add_media(command: argparse.ArgumentParser, flag: str, kind: str | None, about: str) -> None:
    command.add_argument(
        flag,
        dest="media",  # one list, so that media keep their order
        action="append",
        default=[],
        type=functools.partial(_medium, kind),
        metavar="FILE",
        help=about,
    )


def _medium(kind: str | None, source: str) -> tuple[str | None, str]:
    return kind, source


def _add_chat(command: argparse.ArgumentParser) -> None:
    _add_question(command)
    about = "do not read or write the file with earlier inputs"
    command.add_argument("--no-history", dest="history", action="store_false", help=about)


def _add_question(command: argparse.ArgumentParser) -> None:
    """The flags of a request and of the server that gets it."""
    command.add_argument("--url", default="", help="URL of the server (default: see above)")
    about = "text before the conversation that tells the model how to answer"
    command.add_argument("--system", metavar="TEXT", default="", help=about)
    about = "0: the most likely answer; higher: more varied (default: 0)"
    command.add_argument("--temperature", type=_temperature, metavar="X", default=0.0, help=about)
    command.add_argument("--max-tokens", type=_count, metavar="N", help="most tokens of the answer")


def _add_completion(command: argparse.ArgumentParser) -> None:
    from triptych.commands.completion import SHELLS

    command.add_argument("shell", choices=tuple(SHELLS), help="the shell to complete in")


def _temperature(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 100:
        raise argparse.ArgumentTypeError("must be 0 to 100")
    return number


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


OWN_FLAGS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "worker": _add_worker,
    "ask": _add_ask,
    "chat": _add_chat,
    "completion": _add_completion,
    "render": _add_render,
    "convert-embeddings": _add_convert,
}


def _add_flags(command: CommandParser, name: str) -> None:
    """The flags of a command, and what its help says."""
    if name in OWN_FLAGS:
        OWN_FLAGS[name](command)
    if name in WITHOUT_SETTINGS:
        return
    _add_settings(command, name)
    command.foreign_flags = VLLM_FLAGS
    own = OWN_USAGE.get(name, "[MODEL]")
    command.usage = f"triptych {name} {own} [--config FILE] [settings]"
    if name in ("ask", "chat"):  # most of those who read it ask a server that runs
        command.details = PATTERNS
    else:
        command.description = f"{command.description}\n\n{PATTERNS}"
        command.details = DETAILS.get(name, "")
    command.short_epilog = MORE
    command.epilog = f"{OTHER_SETTINGS}\n\n{VARIABLES}" if name in PROCESS_COMMANDS else VARIABLES
    command.short = tuple(HelpGroup(title, names) for title, names in SHORT[name])


def _add_settings(command: CommandParser, name: str) -> None:
    """Every setting that applies to a command; the model also as a positional argument."""
    about = "show all settings, with their defaults"
    command.add_argument("--help-all", action=HelpAll, help=about)
    command.add_argument("--config", metavar="FILE", help="TOML file with the same names")
    if name != "ask":  # its positional arguments are the question and files
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
    command.setting_groups = [*sections.values()]


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
        kinds = {int: "N", float: "X"}
        metavar = kinds.get(flag.type, "TEXT") if flag.takes == "value" else flag.takes.upper()
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
