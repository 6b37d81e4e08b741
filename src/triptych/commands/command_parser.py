"""The parser of one command: a short --help, --help-all, and errors that suggest a name.

It adds the flags of a command when the command is used: those of all commands take longer to make
than a question to a running server. Does not know the settings.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from msgspec import Struct

from triptych.commands.terminal import write_stdout

LIKENESS = 0.75  # of a name that is suggested; --host is not --port


class HelpGroup(Struct, frozen=True):
    """Settings that the short help shows together."""

    title: str
    names: tuple[str, ...]  # as attributes of the parsed arguments


class HelpAll(argparse.Action):
    """``--help-all``."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        assert isinstance(parser, CommandParser)
        write_stdout(parser.format_all(), end="")
        parser.exit()


class CommandParser(argparse.ArgumentParser):
    """Reports an error in one line with a pointer to --help, instead of the whole usage."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False} | options)
        self.intermixed = False  # positional arguments may stand between flags
        self.word_flag = ""  # words without a flag are values of this one, in their place
        self.add_flags: Callable[[], None] = lambda: None  # called once, before anything is read
        self.foreign_flags: Mapping[str, str] = {}  # of other programs: what to do instead
        self.details = ""  # what only --help-all says, before the flags
        self.short: tuple[HelpGroup, ...] = ()  # empty: --help shows everything
        self.short_epilog = ""
        self.setting_groups: list[Any] = []  # what --help leaves out

    def complete(self) -> CommandParser:
        """Itself, with its flags."""
        add, self.add_flags = self.add_flags, lambda: None
        add()
        return self

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.complete()
        if self.word_flag:
            args = self._flag_words(args)
        if not self.intermixed:
            return super().parse_known_args(args, namespace)
        self.intermixed = False  # parse_known_intermixed_args calls this method
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self.intermixed = True

    def _flag_words(self, args: Sequence[str]) -> list[str]:
        """argparse reads words apart from flags, and would lose the order of both."""
        words, read = iter(args), list[str]()
        for word in words:
            if word == "--":
                read += [f"{self.word_flag}={rest}" for rest in words]
            elif word == "-" or not word.startswith("-"):
                read.append(f"{self.word_flag}={word}")
            else:
                read.append(word)
                flag = self._option_string_actions.get(word)
                if flag is not None and flag.nargs != 0:
                    read += [value for value in [next(words, None)] if value is not None]
        return read

    def format_help(self) -> str:
        self.complete()
        if not self.short:
            return self.format_all()
        return self._format(self._short_groups(), "", self.short_epilog)

    def format_all(self) -> str:
        groups = [(group.title, group._group_actions) for group in self._action_groups]
        return self._format(groups, self.details, self.epilog or "")

    def _short_groups(self) -> list[tuple[str | None, list[argparse.Action]]]:
        own = [
            (group.title, group._group_actions)
            for group in self._action_groups
            if group not in self.setting_groups
        ]
        known = {action.dest: action for action in self._actions}
        common = [
            (group.title, [known[name] for name in group.names if name in known])
            for group in self.short
        ]
        return own + [(title, actions) for title, actions in common if actions]

    def _format(
        self,
        groups: Iterable[tuple[str | None, list[argparse.Action]]],
        details: str,
        epilog: str,
    ) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        formatter.add_text(details)
        for title, actions in groups:
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(epilog)
        return formatter.format_help()

    def refuse_unknown(self, rest: Sequence[str]) -> NoReturn:
        """``rest``: the words that no flag takes."""
        flag = next((word.partition("=")[0] for word in rest if word.startswith("--")), "")
        known = self._option_string_actions.keys() - {self.word_flag}
        instead = self.foreign_flags.get(flag)
        hint = f". {instead}" if instead else suggest(flag, known)
        self.error(f"unrecognized arguments: {' '.join(rest)}{hint}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = [str(choice) for choice in action.choices]
        hint = suggest(str(value), names)
        if isinstance(action, argparse._SubParsersAction):
            self.error(f"there is no command {value!r}{hint}")
        choices = ", ".join(map(repr, names))
        raise argparse.ArgumentError(
            action, f"invalid choice: {value!r} (choose from {choices}){hint}"
        )

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith("?") else "."
        self.exit(2, f"triptych: {message}{end} See `{self.prog} --help`.\n")


def suggest(wrong: str, known: Iterable[str]) -> str:
    """The end of an error about a name that was probably mistyped, or nothing."""
    near = difflib.get_close_matches(wrong, sorted(known), 1, LIKENESS)
    return f". Did you mean {near[0]}?" if near else ""
