"""Lines that a person types, with a history that outlives the process; or lines of a pipe."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from triptych.observe.log import print_status

HISTORY_ENTRIES = 1000
PROMPT, CONTINUED = "> ", ". "
_CONTINUES = "\\"


class InputHistory:
    """Entries in a file that only its owner may read, one JSON string per line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: str | None = None

    def load(self) -> list[str]:
        """The newest entries. Cuts a file that has grown to twice as many."""
        try:
            lines = self._path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        entries = [entry for line in lines if (entry := _decode(line)) is not None]
        newest = entries[-HISTORY_ENTRIES:]
        if len(lines) >= 2 * HISTORY_ENTRIES:
            self._write(newest)
        self._last = newest[-1] if newest else None
        return newest

    def add(self, entry: str) -> None:
        if entry == self._last:
            return
        self._last = entry
        with open(self._path, "ab", opener=_open_private) as file:
            file.write(msgspec.json.encode(entry) + b"\n")

    def _write(self, entries: list[str]) -> None:
        new = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with open(new, "wb", opener=_open_private) as file:
            file.writelines(msgspec.json.encode(entry) + b"\n" for entry in entries)
        new.replace(self._path)


def _open_private(path: str, flags: int) -> int:
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o600)  # it may be older
    return descriptor


def _decode(line: bytes) -> str | None:
    try:
        return msgspec.json.decode(line, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None  # a line that a full disk has cut


def history_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Below XDG_STATE_HOME, as the XDG base directories say: relative paths do not count."""
    state = Path(environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():
        state = Path.home() / ".local" / "state"
    return state / "triptych" / "chat_history"


class LineInput:
    """Reads inputs from stdin. ``read`` returns None at the end.

    At a terminal, readline edits lines, completes paths and ``names``, and inserts a paste of
    several lines as one input.
    """

    def __init__(self, names: Iterable[str] = (), *, history: bool = True) -> None:
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._history: InputHistory | None = None
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")
        if self.interactive:
            _set_up_readline(names)
            if history:
                self._open_history()

    def read(self) -> str | None:
        """The next input: one line, or several that end in a backslash except the last."""
        lines: list[str] = []
        while True:
            line = self._line(CONTINUED if lines else PROMPT)
            if line is None:
                return "\n".join(lines) if lines else None
            if not line.endswith(_CONTINUES):
                text = "\n".join([*lines, line])
                self._remember(text)
                return text
            lines.append(line.removesuffix(_CONTINUES))

    def _line(self, prompt: str) -> str | None:
        if self.interactive:
            try:
                return input(prompt)
            except EOFError:
                return None
        line = sys.stdin.readline()
        return line.removesuffix("\n") if line else None

    def _open_history(self) -> None:
        import readline

        def load() -> None:
            path = history_path()
            path.parent.mkdir(0o700, parents=True, exist_ok=True)
            self._history = InputHistory(path)
            for entry in self._history.load():
                readline.add_history(entry)

        self._without_history_if(load)

    def _remember(self, text: str) -> None:
        if not self.interactive or not text.strip():
            return
        import readline

        readline.add_history(text)
        if (history := self._history) is not None:
            self._without_history_if(lambda: history.add(text))

    def _without_history_if(self, fails: Callable[[], None]) -> None:
        try:
            fails()
        except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
            self._history = None
            print_status(f"inputs are not kept: {error}")


def complete_input(word: str, names: Iterable[str]) -> list[str]:
    """What a word may become: one of the names, or a path. Spaces of a path get a backslash."""
    found = [name for name in names if name.startswith(word)]
    folder, _, start = re.sub(r"\\(.)", r"\1", word).rpartition("/")
    typed = word[: word.rfind("/") + 1]
    try:
        with os.scandir(os.path.expanduser(f"{folder}/" if typed else ".")) as entries:
            here = [entry.name + "/" * entry.is_dir() for entry in entries]
    except OSError:
        here = []
    hidden = start.startswith(".")
    paths = [n for n in here if n.startswith(start) and (hidden or not n.startswith("."))]
    return found + sorted(typed + re.sub(r"([\s'\"\\])", r"\\\1", name) for name in paths)


def _set_up_readline(names: Iterable[str]) -> None:
    import readline

    def complete(word: str, number: int) -> str | None:
        return dict(enumerate(complete_input(word, names))).get(number)

    readline.set_completer(complete)
    readline.set_completer_delims(" \t\n")
    readline.set_auto_history(False)  # an input of several lines is one entry
    if "libedit" in (readline.__doc__ or ""):
        readline.parse_and_bind("bind ^I rl_complete")
    else:
        readline.parse_and_bind("tab: complete")
        readline.parse_and_bind("set enable-bracketed-paste on")
