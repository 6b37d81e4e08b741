"""An HTTP interface over a pipeline that is a stub: no worker, no engine, the real processor."""

import asyncio
import json
import os
from contextlib import asynccontextmanager

import psutil
import pytest
import uvloop

from triptych.api.app import App, start_server
from triptych.checkpoint import open_model, packaged_folder
from triptych.config import Config, Limits
from triptych.errors import UnsupportedURLScheme
from triptych.messages import (
    Delta,
    ParameterCounts,
    PromptInfo,
    PromptLogprob,
    TokenLogprob,
    TopLogprob,
    WorkerReport,
)
from triptych.pipeline.unused_workers import UnusedWorker
from triptych.prompt.processor import PromptProcessor
from triptych.runtime.discovery import DiscoveryStatus
from triptych.sources.budget import MediaBudget
from triptych.sources.uploads import UploadStore

MODEL = packaged_folder("qwen")


class StubPipeline:
    """Says ``text``, a token at a time; keeps what it was asked and how that ended."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.ids = tokenizer.library.encode("Hello there, wörld! 🎉 done").ids
        self.works = []
        self.cancelled = []
        self.paused = 0
        self.resumed = 0
        self.error = None
        self.fail_after = None  # tokens
        self.gate = None  # an Event that must be set before each run's first token
        self.endless = False
        self.absent = ()
        self.tensor_bytes = 0
        self.unused = (UnusedWorker("E-0", "E", "gpu-2", "10.0.0.2:1", "It serves another model."),)
        self.discovery_status = DiscoveryStatus("nats://n:4222", True, "default")

    async def run(self, work, deliver, flow=None):
        self.works.append(work)
        flow.attach(self)
        try:
            if self.gate is not None:
                await self.gate.wait()
            if self.error is not None and self.fail_after is None:
                raise self.error
            return await self._tokens(work, deliver)
        except asyncio.CancelledError:
            self.cancelled.append(work.id)
            raise

    async def _tokens(self, work, deliver):
        told = work.prompt if work.return_prompt_ids else None
        ranked = self._ranked(work.prompt, work.sampling.prompt_logprobs)
        info = PromptInfo(len(work.prompt), 1, told, (), ranked)
        most = work.sampling.max_tokens or len(self.ids)
        count = 0
        while True:
            if self.fail_after == count:
                raise self.error
            id = self.ids[count % len(self.ids)]
            count += 1
            last = count == most and not self.endless
            deliver(
                Delta((id,), "length" if last else None, self._scores(work, id), info),
            )
            info = None
            if last:
                return {"queue": 0.001, "prefill": 0.002, "decode": 0.003}
            await asyncio.sleep(0)
            while self.paused > self.resumed:
                await asyncio.sleep(0.001)

    def _scores(self, work, id):
        if work.sampling.logprobs is None:
            return ()
        top = tuple(TopLogprob(id + i, -0.5 - i) for i in range(work.sampling.logprobs))
        return (TokenLogprob(-0.5, top),)

    def _ranked(self, prompt, count):
        if count is None:
            return ()
        return tuple(
            PromptLogprob(id, -0.25, 3, tuple(TopLogprob(40 + i, -0.125 - i) for i in range(count)))
            for id in prompt[1:]
        )

    def pause(self):
        self.paused += 1

    def resume(self):
        self.resumed += 1

    def missing(self):
        return self.absent

    @property
    def routing(self):
        return {"lookups": 4.0, "indexed_blocks": 2.0}

    async def cluster(self):
        report = WorkerReport(
            id="EPD-0", role="EPD", pid=1, epoch=1, state="ready", engine="fake",
            parameters=ParameterCounts(1, 2), queued=0, running=1, kv_blocks_total=8,
            kv_blocks_free=7, tickets=0, segments=0, descriptors=9,
            bytes_sent={"shm": 5}, bytes_received={}, counters={"steps": 3.0},
            host="gpu-1", address="10.0.0.1:1", request_plane="tcp", event_plane="zmq",
            device="cuda:1",
        )  # fmt: skip
        return [report]


class StubSources:
    """Bytes pass, uploads are looked up, and what else is asked for is recorded and answered."""

    counters: dict[str, float] = {}  # noqa: RUF012

    def __init__(self, uploads):
        self.uploads = uploads
        self.asked = []
        self.files = {}  # by URL: bytes, or an error to raise

    def reserve(self, scope):
        return MediaBudget(Config()).reserve(scope)

    async def load(self, source, kind, form, scope, reservation):
        self.asked.append((source, kind, form, scope))
        if not isinstance(source, str):
            return source
        await asyncio.sleep(0)
        if source.startswith("media:"):
            return self.uploads.get(scope.partition("\n")[0], source)
        found = self.files.get(source, UnsupportedURLScheme("no such scheme"))
        if isinstance(found, Exception):
            raise found
        return found


class Reply:
    def __init__(self, status, headers, body):
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def code(self):
        error = self.json["error"]
        return error["details"]["error_code"] if "details" in error else error["code"]

    @property
    def param(self):
        error = self.json["error"]
        return error.get("details", error)["param"]

    @property
    def events(self):
        """The data of all events, decoded except for [DONE]."""
        found = [e for e in self.body.decode().split("\n\n") if e and not e.startswith(":")]
        lines = [e.removeprefix("data: ") for e in found]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    @property
    def named_events(self):
        """The names and the decoded data of all events."""
        found = [e for e in self.body.decode().split("\n\n") if e and not e.startswith(":")]
        pairs = [e.split("\n") for e in found]
        return [
            (name.removeprefix("event: "), json.loads(data.removeprefix("data: ")))
            for name, data in pairs
        ]


class Site:
    """A running interface and its stub."""

    def __init__(self, server, app, pipeline, sources):
        self.server = server
        self.sources = sources
        self.app = app
        self.pipeline = pipeline
        self._writers = []

    async def connect(self):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        self._writers.append(writer)
        return reader, writer

    async def hang_up(self):
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*(w.wait_closed() for w in self._writers), return_exceptions=True)

    async def raw(self, data):
        """Send bytes, read one reply."""
        reader, writer = await self.connect()
        try:
            writer.write(data)
            return await read(reader, "HEAD" if data.startswith(b"HEAD ") else "GET")
        finally:
            writer.close()

    async def ask(self, path, body=None, method=None, headers=None):
        method = method or ("GET" if body is None else "POST")
        if not isinstance(body, bytes):
            body = b"" if body is None else json.dumps(body).encode()
        return await self.raw(request(method, path, body, headers))

    async def chat(self, content="Hi", **fields):
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}]} | fields
        return await self.ask("/v1/chat/completions", body)


def request(method, path, body=b"", headers=None):
    lines = {"Host": "x", "Content-Length": str(len(body))} | (headers or {})
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value is not None)
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


async def read(reader, method="GET"):
    """One reply to a request of this method."""
    async with asyncio.timeout(30):
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        body = b""
        if method == "HEAD":
            pass
        elif headers.get("transfer-encoding") == "chunked":
            while size := int(await reader.readline(), 16):
                body += await reader.readexactly(size)
                await reader.readexactly(2)
            await reader.readexactly(2)
        elif "content-length" in headers:
            body = await reader.readexactly(int(headers["content-length"]))
        else:
            body = await reader.read()
    return Reply(int(lines[0].split()[1]), headers, body)


@asynccontextmanager
async def site(limits=None, **fields):
    config = Config(
        **{
            "model": str(MODEL),
            "port": 0,
            "served_model_name": "tiny",
            "enable_multimodal": True,
            "limits": limits or Limits(),
        }
        | fields
    )
    model = open_model(config.model)
    processor = PromptProcessor(model, config)
    uploads = UploadStore(config.limits.upload_bytes, config.limits.upload_seconds)
    sources = StubSources(uploads)
    pipeline = StubPipeline(processor.tokenizer)
    app = App(config, model, processor, pipeline, sources, uploads)
    server = await start_server(config, app)
    running = Site(server, app, pipeline, sources)
    try:
        yield running
    finally:
        await running.hang_up()
        await server.close()


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}  # the loop that the server runs on


@pytest.fixture
async def web():
    async with site() as running:
        yield running


@pytest.fixture
def open_site():
    return site


@pytest.fixture
def wire():
    """The functions that speak HTTP by hand."""
    return request, read


@pytest.fixture
def memory():
    """Bytes of this process."""
    return psutil.Process(os.getpid()).memory_info
