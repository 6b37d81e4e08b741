"""Two servers for all clients: one says scripted replies, the other computes with the demo's model.

The tests run in the clients' environment (``make setup-clients``); the servers run in the main one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.client_scenes import script
from support.servers import TestServer, serving
from support.templates import template

KEY = "sesame-open"
MODEL = "panel"


@dataclass(frozen=True)
class Endpoint:
    """What a client must know of a server."""

    server: TestServer
    key: str = KEY
    model: str = MODEL

    @property
    def root(self) -> str:
        return self.server.url

    @property
    def url(self) -> str:
        return f"{self.server.url}/v1"

    def require(self, path: str) -> None:
        """Skip the test if the server has no such route."""
        if self.server.request(path, {}).status == 404:
            pytest.skip(f"this server has no {path}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--server-python", default=sys.executable, help="that has triptych and torch")
    parser.addoption("--npm-folder", default="", help="with node_modules of npm/package-lock.json")


@pytest.fixture(scope="session")
def scripted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Endpoint]:
    file = tmp_path_factory.mktemp("script") / "replies.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in script()))
    flags = ("--engine=fake", f"--chat-template={template('hermes')}", f"--fake-replies={file}")
    yield from _endpoint(request, *flags)


@pytest.fixture(scope="session")
def demo(request: pytest.FixtureRequest) -> Iterator[Endpoint]:
    yield from _endpoint(request, "--engine=torch", "--device=cpu")


def _endpoint(request: pytest.FixtureRequest, *flags: str) -> Iterator[Endpoint]:
    common = ("--pattern=E/PD", "--enable-multimodal", f"--served-model-name={MODEL}")
    python = str(Path(request.config.getoption("--server-python")).absolute())
    with serving(*flags, *common, env={"TRIPTYCH_API_KEY": KEY}, python=python) as server:
        yield Endpoint(server)
