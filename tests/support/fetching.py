"""A fetcher for the length of a test, and what holds of all its refusals."""

import pytest

from support.origin import NamedGate
from triptych.config import CacheSettings, Config, Limits
from triptych.errors import MediaError
from triptych.sources.budget import MediaBudget
from triptych.sources.fetch import Fetcher
from triptych.sources.fetch_channel import FetchResponse, read_body
from triptych.sources.http_client import HttpClient

LIMIT = 100_000  # bytes of a file


def settings(seconds=20.0, cache=0, **more):
    limits = Limits(fetch_seconds=seconds, media_bytes=LIMIT)
    return Config(limits=limits, cache=CacheSettings(fetched=cache), **more)


class InProcessClient(HttpClient):
    """Takes the place of FetchProcess: fetches in the process of the test."""

    losses = 0

    def permits(self, address):
        return self.gate.permits(address)

    def start(self):
        pass

    async def get(self, request, reserve):
        status, headers, size, fd = await self.get_file(request, reserve)
        body = b"" if fd is None else await read_body(fd, size, request.limit)
        return FetchResponse(status, headers, body)


class Fetching:
    """A fetcher for the length of a test, whose client works in this process if none is given."""

    def __init__(self, config=None, gate=None, client=None):
        self.gate = gate or NamedGate()
        self.client = client or InProcessClient(self.gate)
        config = config or settings()
        self.budget = MediaBudget(config)
        self.fetcher = Fetcher(config, self.client, self.budget)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        await self.fetcher.close()

    async def get(self, url, scope="tenant\n"):
        with self.budget.reserve(scope.partition("\n")[0]) as reservation:
            return await self.fetcher.fetch(url, scope, reservation)

    async def refused(self, kind, url):
        with pytest.raises(MediaError) as caught:
            await self.get(url)
        error = caught.value
        assert type(error) is kind, error.message
        assert error.param is None
        for secret in ("127.0", "169.254", "ok.test", "::1", "hidden"):
            assert secret not in error.message
        return error

    def count(self, name):
        return self.fetcher.counters[name]
