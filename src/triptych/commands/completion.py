"""``triptych completion``: scripts that complete commands, flags and their values in a shell.

They are made from the parsers of the commands, so that they know every setting, and are complete in
themselves: a shell does not start Triptych to complete a word.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from msgspec import Struct

from triptych.commands.command_parser import CommandParser
from triptych.commands.terminal import write_stdout
from triptych.parsers.registry import REASONING_PARSERS, TOOL_PARSERS

_FOLDERS = ("FOLDER", "MODEL")
_FILES = ("FILE", "NEW")
_USUAL = {  # values of settings that take others too
    "--pattern": ("EPD", "E/PD", "E/P/D", "EP/D"),
    "--engine": ("torch", "vllm", "sglang", "trtllm", "fake"),
    "--device": ("auto", "cpu", "cuda"),
    "--role": ("E", "P", "D", "EP", "PD", "EPD"),
    "--tool-parser": ("auto", "none", *TOOL_PARSERS),
    "--reasoning-parser": ("auto", "none", *REASONING_PARSERS),
}


Value = Literal["none", "value", "file", "folder"]


class Completed(Struct, frozen=True):
    """A flag, or a word without one (``name`` is empty)."""

    name: str
    about: str
    takes: Value
    values: tuple[str, ...] = ()
    repeats: bool = False


class CompletedCommand(Struct, frozen=True):
    name: str
    about: str
    arguments: tuple[Completed, ...]

    @property
    def flags(self) -> list[Completed]:
        return [one for one in self.arguments if one.name]

    @property
    def words(self) -> list[Completed]:
        return [one for one in self.arguments if not one.name]


def run(shell: str, parser: CommandParser) -> int:
    write_stdout(SHELLS[shell](collect_commands(parser)), end="")
    return 0


def collect_commands(parser: CommandParser) -> list[CompletedCommand]:
    """The commands, after one without a name that has the flags before any command."""
    [commands] = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    found = [CompletedCommand("", "", tuple(_arguments(parser)))]
    for choice in commands._choices_actions:
        command = commands.choices[choice.dest].complete()
        found.append(CompletedCommand(choice.dest, choice.help or "", tuple(_arguments(command))))
    return found


def _arguments(parser: CommandParser) -> Iterator[Completed]:
    if parser.word_flag:
        yield Completed("", "file", "file", repeats=True)
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._SubParsersAction):
            continue
        about = (action.help or "").replace("%%", "%").partition(" (default:")[0]
        repeats = isinstance(action, argparse._AppendAction)
        for name in action.option_strings or [""]:
            values = tuple(map(str, action.choices or _USUAL.get(name, ())))
            yield Completed(name, about, _takes(action), values, repeats)


def _takes(action: argparse.Action) -> Value:
    if action.nargs == 0:
        return "none"
    if action.metavar in _FOLDERS:
        return "folder"
    return "file" if action.metavar in _FILES else "value"


def _bash(commands: Sequence[CompletedCommand]) -> str:
    named = "|".join(command.name for command in commands[1:])
    lines = [
        "# Completion of triptych for bash, made by `triptych completion bash`.",
        "_triptych() {",
        "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}",
        "    local command= at",
        "    COMPREPLY=()",
        "    if [[ $word == = ]]; then  # bash makes three words of --flag=value",
        "        word=",
        "    elif [[ $before == = ]]; then",
        "        before=${COMP_WORDS[COMP_CWORD-2]}",
        "    fi",
        "    for ((at = 1; at < COMP_CWORD; at++)); do",
        f"        case ${{COMP_WORDS[at]}} in {named})",
        "            command=${COMP_WORDS[at]}",
        "            break ;;",
        "        esac",
        "    done",
        "    case $command:$before in",
        *(f"        {case}" for case in _bash_values(commands)),
        "    esac",
        "    case $command in",
        *(f"        {_bash_command(command, commands)}" for command in commands),
        "    esac",
        "}",
        "",
        "_triptych_words() {  # flags, then other words",
        "    local IFS=$' \\t\\n'",
        '    if [[ $word == -* ]]; then set -- "$1"; else set -- "$2"; fi',
        '    COMPREPLY=($(compgen -W "$1" -- "$word"))',
        "}",
        "",
        "_triptych_paths() {  # -f: files, -d: folders",
        "    local IFS=$'\\n'",
        "    compopt -o filenames 2> /dev/null",
        '    COMPREPLY=($(compgen "$1" -- "$word"))',
        "}",
        "",
        "complete -F _triptych triptych",
    ]
    return "\n".join(lines) + "\n"


def _bash_values(commands: Sequence[CompletedCommand]) -> Iterator[str]:
    """What follows a flag that takes a value: the same in every command, or by command."""
    by_flag: dict[str, dict[str, list[str]]] = {}
    for command in commands:
        for flag in command.flags:
            if flag.takes != "none":
                actions = by_flag.setdefault(flag.name, {})
                actions.setdefault(_bash_value(flag), []).append(command.name)
    for name, actions in by_flag.items():
        for action, names in actions.items():
            where = [f"{one}:{name}" for one in names] if len(actions) > 1 else [f"*:{name}"]
            yield f"{'|'.join(where)}) {action}return ;;"


def _bash_value(flag: Completed) -> str:
    if flag.values:
        return f"_triptych_words '' '{' '.join(flag.values)}'; "
    return f"_triptych_paths {_BASH_PATHS[flag.takes]}; " if flag.takes in _BASH_PATHS else ""


def _bash_command(command: CompletedCommand, commands: Sequence[CompletedCommand]) -> str:
    flags = " ".join(flag.name for flag in command.flags)
    names = [other.name for other in commands[1:]] if not command.name else []
    values = " ".join([*names, *(value for word in command.words for value in word.values)])
    pattern = command.name or "''"
    line = f"{pattern}) _triptych_words '{flags}' '{values}'"
    paths = [_BASH_PATHS[word.takes] for word in command.words if word.takes in _BASH_PATHS]
    if paths:
        line = f"{line}; [[ $word == -* || $COMPREPLY ]] || _triptych_paths {paths[0]}"
    return f"{line} ;;"


def _zsh(commands: Sequence[CompletedCommand]) -> str:
    described = (f"{command.name}:{command.about}" for command in commands[1:])
    lines = [
        "#compdef triptych",
        "# Completion of triptych for zsh, made by `triptych completion zsh`.",
        "_triptych() {",
        "    local -a commands=(",
        *(f"        {_quote(text)}" for text in described),
        "    )",
        "    if (( CURRENT == 2 )); then",
        "        _describe command commands",
        f"        _arguments {' '.join(_zsh_argument(flag) for flag in commands[0].flags)}",
        "        return",
        "    fi",
        "    shift words",
        "    (( CURRENT-- ))",
        "    case $words[1] in",
    ]
    for command in commands[1:]:
        lines.append(f"        {command.name}) _arguments \\")
        lines += [f"            {_zsh_argument(one)} \\" for one in command.arguments]
        lines.append("            ;;")
    lines += [
        "    esac",
        "}",
        "if [[ $funcstack[1] == _triptych ]]; then  # loaded from a folder of $fpath",
        '    _triptych "$@"',
        "else",
        "    compdef _triptych triptych",
        "fi",
    ]
    return "\n".join(lines) + "\n"


def _zsh_argument(one: Completed) -> str:
    action = f"({' '.join(one.values)})" if one.values else _ZSH_ACTIONS[one.takes]
    about = one.about.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]")
    if not one.name:
        return _quote(f"{'*' if one.repeats else ''}:{about.replace(':', ' ')}:{action}")
    equals = "=" if one.name.startswith("--") and one.takes != "none" else ""
    value = f":{one.name.strip('-')}:{action}" if one.takes != "none" else ""
    return _quote(f"{'*' if one.repeats else ''}{one.name}{equals}[{about}]{value}")


def _quote(text: str) -> str:
    """For bash and zsh."""
    return "'" + text.replace("'", "'\\''") + "'"


def _fish(commands: Sequence[CompletedCommand]) -> str:
    lines = [
        "# Completion of triptych for fish, made by `triptych completion fish`.",
        "complete -c triptych -f",
    ]
    for command in commands:
        when = "__fish_use_subcommand"
        if command.name:
            about = _quote_fish(command.about)
            lines.append(f"complete -c triptych -n {when} -a {command.name} -d {about}")
            when = f"'__fish_seen_subcommand_from {command.name}'"
        lines += [
            f"complete -c triptych -n {when} {_fish_argument(one)}" for one in command.arguments
        ]
    return "\n".join(lines) + "\n"


def _fish_argument(one: Completed) -> str:
    value = f"-x -a '{' '.join(one.values)}'" if one.values else _FISH_VALUES[one.takes]
    if not one.name:
        return value
    flag = f"-l {one.name[2:]}" if one.name.startswith("--") else f"-s {one.name[1:]}"
    return f"{flag} -d {_quote_fish(one.about)} {value}".rstrip()


def _quote_fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_BASH_PATHS: dict[Value, str] = {"file": "-f", "folder": "-d"}
_ZSH_ACTIONS: dict[Value, str] = {"none": "", "value": " ", "file": "_files", "folder": "_files -/"}
_FISH_VALUES: dict[Value, str] = {
    "none": "",
    "value": "-x",
    "file": "-r -F",
    "folder": "-x -a '(__fish_complete_directories)'",
}
SHELLS: dict[str, Callable[[Sequence[CompletedCommand]], str]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}
