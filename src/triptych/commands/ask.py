"""``triptych ask``: asks about local files, a running server or a temporary one.

The answer streams to stdout, everything else goes to stderr.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Struct

from triptych.checkpoint import open_model, packaged_folder
from triptych.commands.client import ChatAnswer, Client, MediaInput, MessagePart, ServerNotFound
from triptych.commands.drawing import draw_bar
from triptych.commands.launch import DEMO, base_url, check_config, describe_model, resolve
from triptych.commands.temporary_server import temporary_server
from triptych.commands.terminal import (
    Terminal,
    replace_unencodable,
    stdout,
    strip_controls,
    write_stdout,
)
from triptych.config import Config
from triptych.errors import InvalidConfig, RequestError, TriptychError, rebuild_error
from triptych.observe.log import print_status

_PLACE = re.compile(r"messages\[0\]\.content\[([0-9]+)\]")
_DEMO_CAN = """\
          It knows drawn shapes, typed words, emoji, tones and some spoken words; no photographs.
          More under 'What it can' in its card, models/demo/README.md."""


class Question(Struct, frozen=True):
    text: str
    media: tuple[MediaInput, ...] = ()  # in the order of the prompt
    url: str = ""  # of the server; empty: the one at --host and --port, or a temporary one
    max_tokens: int | None = None
    json: bool = False
    own: tuple[str, ...] = ()  # given flags that apply only to a temporary server


def run(config: Config, question: Question) -> int:
    replace_unencodable(stdout())
    parts = [medium.part() for medium in question.media]  # fails before a server is started
    key = next(iter(config.api_keys), "")
    client = Client(question.url or base_url(config), key, "" if question.url else config.tls_cert)
    if question.url and question.own:
        raise InvalidConfig(
            f"--url names a server; leave out {_join_names(question.own)}, or --url"
        )
    if question.url or client.ready():
        if question.own:
            raise InvalidConfig(
                f"a server runs at {client.url}; leave out {_join_names(question.own)}, or give "
                "another --port"
            )
        answer = _ask(client, question, parts)
        _show(answer, question, f"answered by {strip_controls(answer.model)} at {client.url}")
        return 0
    config = _prepare_server(config, client.url)
    with temporary_server(config, print_status) as own:
        _show(_ask(own, question, parts), question)
    return 0


def _prepare_server(config: Config, url: str) -> Config:
    """The settings of a temporary server, checked; prints what its model is."""
    config = resolve(msgspec.structs.replace(config, enable_multimodal=True))
    check_config(config)
    model = open_model(config.model)
    print_status(f"no server at {url}: starting one for this question")
    print_status(f"model     {describe_model(config, model)}")
    if model.folder == packaged_folder(DEMO).resolve() and config.engine != "fake":
        print_status(_DEMO_CAN)
    return config


def _ask(client: Client, question: Question, parts: Sequence[MessagePart]) -> ChatAnswer:
    """The answer, written while it streams unless --json is given."""
    on_text = _ignore if question.json else _write
    try:
        return client.ask(question.text, parts, question.max_tokens, on_text)
    except RequestError as error:
        raise _with_flag_name(error, question.media) from None
    except ServerNotFound as error:
        if not question.url:
            raise
        hint = "Start one with `triptych serve`, or leave out --url"
        raise ServerNotFound(f"{error}. {hint}.") from None


def _with_flag_name(error: RequestError, media: Sequence[MediaInput]) -> TriptychError:
    """The same error, with the flag of the part that the server names."""
    place = _PLACE.match(error.param or "")
    if place is None or int(place[1]) >= len(media):
        return error
    message = f"{media[int(place[1])].name}: {error.message}"
    return rebuild_error(msgspec.structs.replace(error.failure(), message=message))


def _show(answer: ChatAnswer, question: Question, *lines: str) -> None:
    """Print what follows an answer: JSON, or notes and stage times."""
    if question.json:
        write_stdout(msgspec.json.encode(answer).decode())
        return
    write_stdout("")
    terminal = Terminal.of(sys.stderr)
    for line in (
        *_length_note(answer),
        *lines,
        *draw_bar(answer.timings, terminal, terminal.width),
    ):
        print_status(line)


def _join_names(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _ignore(text: str) -> None:
    pass


def _write(text: str) -> None:
    write_stdout(strip_controls(text) if stdout().isatty() else text, end="")


def _length_note(answer: ChatAnswer) -> Iterator[str]:
    """A line that says that the answer was cut off."""
    if answer.finish == "length":
        count = answer.usage.get("completion_tokens")
        after = f" after {count} tokens" if count else ""
        yield f"cut off{after}: by --max-tokens or the end of the context"
