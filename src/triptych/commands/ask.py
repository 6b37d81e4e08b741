"""``triptych ask``: one question about one's own files, to a running server or one of our own.

The answer goes to stdout, as it comes; whatever else there is to say, to stderr.
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
from triptych.observe.progress import print_status

_PLACE = re.compile(r"messages\[0\]\.content\[([0-9]+)\]")
_DEMO_CAN = """\
          It knows drawn shapes, typed words, emoji, tones and some spoken words; no photographs.
          More under 'What it can' in its card, models/demo/README.md."""


class Question(Struct, frozen=True):
    text: str
    media: tuple[MediaInput, ...] = ()  # in the order in which they are to stand
    url: str = ""  # of the server; none: the one of the settings, or a new one
    max_tokens: int | None = None
    json: bool = False
    own: tuple[str, ...] = ()  # flags that were given and only a server of our own can heed


def run(config: Config, question: Question) -> int:
    replace_unencodable(stdout())
    parts = [medium.part() for medium in question.media]  # before anything is started for them
    client = Client(question.url or base_url(config), next(iter(config.api_keys), ""))
    if question.url and question.own:
        raise InvalidConfig(f"--url names a server; leave out {_listed(question.own)}, or --url")
    if question.url or client.ready():
        if question.own:
            raise InvalidConfig(
                f"a server runs at {client.url}; leave out {_listed(question.own)}, or give "
                "another --port"
            )
        heard = _asked(client, question, parts)
        _tell(heard, question, f"answered by {strip_controls(heard.model)} at {client.url}")
        return 0
    config = _introduced(config, client.url)
    with temporary_server(config, print_status) as own:
        _tell(_asked(own, question, parts), question)
    return 0


def _introduced(config: Config, url: str) -> Config:
    """What a server of our own is started with, after a word about its model."""
    config = resolve(msgspec.structs.replace(config, enable_multimodal=True))
    check_config(config)
    model = open_model(config.model)
    print_status(f"no server at {url}: starting one for this question")
    print_status(f"model     {describe_model(config, model)}")
    if model.folder == packaged_folder(DEMO).resolve() and config.engine != "fake":
        print_status(_DEMO_CAN)
    return config


def _asked(client: Client, question: Question, parts: Sequence[MessagePart]) -> ChatAnswer:
    """The answer, written as it comes unless it is wanted as JSON."""
    hear = _unheard if question.json else _write
    try:
        return client.ask(question.text, parts, question.max_tokens, hear)
    except RequestError as error:
        raise _named(error, question.media) from None
    except ServerNotFound as error:
        if not question.url:
            raise
        hint = "Start one with `triptych serve`, or leave out --url"
        raise ServerNotFound(f"{error}. {hint}.") from None


def _named(error: RequestError, media: Sequence[MediaInput]) -> TriptychError:
    """The same, with the flag that gave the part which the server names."""
    place = _PLACE.match(error.param or "")
    if place is None or int(place[1]) >= len(media):
        return error
    told = f"{media[int(place[1])].name}: {error.message}"
    return rebuild_error(msgspec.structs.replace(error.failure(), message=told))


def _tell(heard: ChatAnswer, question: Question, *lines: str) -> None:
    """What there is to say after an answer."""
    if question.json:
        write_stdout(msgspec.json.encode(heard).decode())
        return
    write_stdout("")
    terminal = Terminal.of(sys.stderr)
    for line in (*_cut(heard), *lines, *draw_bar(heard.timings, terminal, terminal.width)):
        print_status(line)


def _listed(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _unheard(text: str) -> None:
    pass


def _write(text: str) -> None:
    write_stdout(strip_controls(text) if stdout().isatty() else text, end="")


def _cut(heard: ChatAnswer) -> Iterator[str]:
    """A line, if the answer has no end of its own."""
    if heard.finish == "length":
        count = heard.usage.get("completion_tokens")
        after = f" after {count} tokens" if count else ""
        yield f"cut off{after}: by --max-tokens, or because the context is full"
