"""``triptych ask``: one question about one's own files, to a running server or one of our own.

The answer goes to stdout, as it comes; whatever else there is to say, to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from msgspec import Struct

from triptych.client import Client, Heard, Medium
from triptych.config import Config
from triptych.launch import base_url, check, meaning, resolve
from triptych.observe.progress import say
from triptych.own_server import own_server
from triptych.show.stages import bar
from triptych.show.terminal import Terminal, forgive, harmless, write


class Question(Struct, frozen=True):
    text: str
    media: tuple[Medium, ...] = ()  # in the order in which they are to stand
    url: str = ""  # of the server; none: the one of the settings, or a new one
    max_tokens: int | None = None
    json: bool = False


def run(config: Config, question: Question) -> int:
    forgive(sys.stdout)
    parts = [medium.part() for medium in question.media]  # before anything is started for them
    with _server(config, question.url) as client:
        if question.json:
            heard = client.ask(question.text, parts, question.max_tokens)
            write(msgspec.json.encode(heard).decode())
            return 0
        heard = client.ask(question.text, parts, question.max_tokens, _write)
        write("")
        terminal = Terminal.of(sys.stderr)
        for line in (*_cut(heard), *bar(heard.timings, terminal, terminal.width)):
            say(line)
    return 0


def _write(text: str) -> None:
    write(harmless(text) if sys.stdout.isatty() else text, end="")


def _cut(heard: Heard) -> Iterator[str]:
    """A line, if the answer has no end of its own."""
    if heard.finish == "length":
        count = heard.usage.get("completion_tokens")
        after = f" after {count} tokens" if count else ""
        yield f"cut off{after}: by --max-tokens, or because the context is full"


@contextmanager
def _server(config: Config, url: str) -> Iterator[Client]:
    """A server that is there, or one that is started for the question."""
    client = Client(url or base_url(config), next(iter(config.api_keys), ""))
    if url or client.ready():
        yield client
        return
    config = resolve(msgspec.structs.replace(config, enable_multimodal=True))
    check(config)
    about = meaning(config)
    say(f"no server at {client.url}: starting one for this question{about and f' ({about})'}")
    with own_server(config, say) as own:
        yield own
