"""The server that ``ask`` and ``chat`` talk to: one that runs, or a temporary one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import msgspec
from msgspec import Struct

from triptych.commands.client import Client, base_url
from triptych.config import Config
from triptych.errors import InvalidConfig
from triptych.observe.log import print_status

_DEMO_CAN = """\
          It knows drawn shapes, typed words, emoji, tones and some spoken words; no photographs.
          More under 'What it can' in its card, models/demo/README.md."""


class ServerChoice(Struct, frozen=True):
    """Which server to ask."""

    url: str = ""  # empty: the one at --host and --port, or a temporary one
    own: tuple[str, ...] = ()  # given flags that apply only to a temporary server


class AskedServer(Struct, frozen=True):
    client: Client
    runs: bool  # False: it was started for this command, and its model was shown


@contextmanager
def asked_server(
    config: Config, choice: ServerChoice, purpose: Literal["question", "chat"]
) -> Iterator[AskedServer]:
    """A ready server. A temporary one ends with the scope."""
    key = next(iter(config.api_keys), "")
    client = Client(choice.url or base_url(config), key, "" if choice.url else config.tls_cert)
    if choice.url and choice.own:
        raise InvalidConfig(f"--url names a server; leave out {_join_names(choice.own)}, or --url")
    if choice.url or client.ready():
        if choice.own:
            raise InvalidConfig(
                f"a server runs at {client.url}; leave out {_join_names(choice.own)}, or give "
                "another --port"
            )
        yield AskedServer(client, runs=True)
        return
    # These modules load what a server needs, which takes longer than a question to one that runs.
    from triptych.commands.temporary_server import temporary_server

    config = _prepare_server(config, client.url, purpose)
    with temporary_server(config, print_status) as own:
        yield AskedServer(own, runs=False)


def _prepare_server(config: Config, url: str, purpose: str) -> Config:
    """The settings of a temporary server, checked; prints what its model is."""
    from triptych.checkpoint import open_model, packaged_folder
    from triptych.commands.launch import DEMO, check_config, describe_model, resolve

    config = resolve(msgspec.structs.replace(config, enable_multimodal=True))
    check_config(config)
    model = open_model(config.model)
    print_status(f"no server at {url}: starting one for this {purpose}")
    print_status(f"model     {describe_model(config, model)}")
    if model.folder == packaged_folder(DEMO).resolve() and config.engine != "fake":
        print_status(_DEMO_CAN)
    return config


def _join_names(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
