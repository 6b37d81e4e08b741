"""``triptych ask``: asks one question about files, a running server or a temporary one.

The answer streams to stdout, everything else goes to stderr.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from triptych.commands.asked_server import ServerChoice, asked_server
from triptych.commands.attachments import media_input, names_file, source_kind
from triptych.commands.client import GREEDY, ChatAnswer, Client, MediaInput, ServerNotFound
from triptych.commands.conversation import Attachment, Content, Conversation
from triptych.commands.drawing import draw_bar
from triptych.commands.terminal import (
    Terminal,
    replace_unencodable,
    stdout,
    strip_controls,
    write_answer,
    write_stdout,
)
from triptych.config import Config
from triptych.errors import InvalidConfig, RequestError, StartError
from triptych.messages import MediaKind
from triptych.observe.log import print_status

STDIN = "-"
_STDIN_BYTES = 8 << 20  # as much JSON as a server takes by default
_MISSING = "the question is missing: write it before the files, or give it on stdin"

_QUESTION_FIRST = "The question comes first: triptych ask QUESTION FILE ..."


class Question(Struct, frozen=True):
    text: str
    media: tuple[MediaInput, ...] = ()  # in the order of the prompt
    system: str = ""
    parameters: Mapping[str, Any] = GREEDY  # of the request
    json: bool = False


def run(config: Config, question: Question, choice: ServerChoice) -> int:
    replace_unencodable(stdout())
    files = [Attachment.read(medium) for medium in question.media]  # fails before a server starts
    with asked_server(config, choice, "question") as server:
        answer = _ask(server.client, question, (*files, question.text), choice)
        name = f"answered by {strip_controls(answer.model)} at {server.client.url}"
        _show(answer, question, *([name] if server.runs else []))
    return 0


def read_question(words: list[tuple[MediaKind | None, str]]) -> tuple[str, tuple[MediaInput, ...]]:
    """The text and the media of a command line. A word without a kind was given without a flag:
    the first is the text, unless a file has this name, and the others are files."""
    plain = [number for number, (kind, _) in enumerate(words) if kind is None]
    text, files = None, list(words)
    if plain and not names_file(words[plain[0]][1]):
        _, text = files.pop(plain[0])
    misplaced = text is None or (not re.search(r"\s", text) and source_kind(text) is not None)
    media = tuple(
        MediaInput(kind, source) if kind else _named_input(source, misplaced)
        for kind, source in files
    )
    if text is None and (sys.stdin is None or sys.stdin.isatty()):
        raise InvalidConfig(_MISSING)
    if text in (None, STDIN):
        text = _read_stdin()
    if not text.strip():
        raise InvalidConfig(_MISSING)
    return text, media


def _named_input(source: str, misplaced: bool) -> MediaInput:
    """``misplaced``: a file stands where the question belongs, so this may be the question."""
    try:
        return media_input(source)
    except StartError as error:
        if not misplaced:
            raise
        raise StartError(f"{error}. {_QUESTION_FIRST}") from None


def _read_stdin() -> str:
    if sys.stdin is None:
        raise InvalidConfig(_MISSING)
    data = sys.stdin.buffer.read(_STDIN_BYTES + 1)
    if len(data) > _STDIN_BYTES:
        raise InvalidConfig(f"the question on stdin has more than {_STDIN_BYTES >> 20} MiB")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidConfig(
            "the question on stdin is not UTF-8 text. Stdin gives only the question: name a "
            "picture, clip or sound as a file"
        ) from None


def _ask(client: Client, question: Question, content: Content, choice: ServerChoice) -> ChatAnswer:
    """The answer, written while it streams unless --json is given."""
    conversation = Conversation(question.system)
    on_text = _ignore if question.json else write_answer
    try:
        return client.chat(conversation.messages(content), question.parameters, on_text)
    except RequestError as error:
        raise conversation.name_file(error, content) from None
    except ServerNotFound as error:
        if not choice.url:
            raise
        hint = "Start one with `triptych serve`, or leave out --url"
        raise ServerNotFound(f"{error}. {hint}.") from None


def _show(answer: ChatAnswer, question: Question, *lines: str) -> None:
    """Print what follows an answer: JSON, or notes and stage times."""
    if question.json:
        write_stdout(msgspec.json.encode(answer).decode())
        return
    write_stdout("")
    terminal = Terminal.of(sys.stderr)
    for line in (
        *length_note(answer),
        *lines,
        *draw_bar(answer.timings, terminal, terminal.width),
    ):
        print_status(line)


def _ignore(text: str) -> None:
    pass


def length_note(answer: ChatAnswer) -> Iterator[str]:
    """A line that says that the answer was cut off."""
    if answer.finish == "length":
        count = answer.usage.get("completion_tokens")
        after = f" after {count} tokens" if count else ""
        yield f"cut off{after}: by --max-tokens or the end of the context"
