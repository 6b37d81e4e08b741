"""Twenty thousand exchanges with a client that checks every byte, over few connections.

Keep-alive and pipelined, streams of every shape, errors of every kind, bodies cut anywhere, clients
that leave, half-close or read slowly. A failure names its seed; with TRIPTYCH_SEED set to it the
same requests come again, though not in the same order between connections.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from support.servers import image_part, serving, text_part
from support.strict_client import Broken, Responses

SEED = int(os.environ.get("TRIPTYCH_SEED", "14"))
EXCHANGES = 20_000
DRIVERS = 12
KEY = "strict-key"
PROMPTS = 20
CHAT = "/v1/chat/completions"
GROWN = 32 << 20  # bytes of memory that are no growth yet
SECONDS = 30.0  # for anything that must come at once
WAYS = {"kept": 60, "half-close": 12, "slow": 8, "killed": 10, "old": 5, "continue": 5}


@dataclass(frozen=True)
class Asked:
    """A request, and what must come of it."""

    method: str
    path: str
    status: int
    body: bytes = b""
    code: str = ""  # of an error
    key: str | None = KEY
    answer: Any = None  # what must be in the JSON
    spec: Any = None  # of a completion
    refused: bool = False  # before its body is read: the connection ends
    raw: bytes = b""  # instead of all of it

    def check(self, response):
        assert response.status == self.status, (self, response)
        if self.method == "HEAD":
            return
        if self.code:
            assert response.json["error"]["code"] == self.code, (self, response)
        if self.answer is not None:
            assert self.answer.items() <= response.json.items(), (self, response)
        if self.spec is not None:
            self.spec.check(json.loads(self.body), response)


@dataclass(frozen=True)
class Spec:
    """A completion, and what it gave when it was asked for in the plainest way."""

    path: str
    fields: Any
    choices: Any
    usage: Any

    @classmethod
    def of(cls, server, path, fields):
        asked = {"model": server.model} | fields
        answer = server.request(path, asked | {"return_token_ids": True})
        assert answer.status == 200, answer.body
        choices = {
            choice["index"]: (_text(choice), choice["token_ids"], choice["finish_reason"])
            for choice in answer.json["choices"]
        }
        return cls(path, asked, choices, answer.json["usage"])

    def check(self, asked, response):
        tell_ids = asked.get("return_token_ids", False)
        if not asked.get("stream"):
            choices = {c["index"]: c for c in response.json["choices"]}
            found = {
                i: (_text(c), c.get("token_ids"), c["finish_reason"]) for i, c in choices.items()
            }
            usage = response.json["usage"]
        else:
            stream = response.stream()
            assert stream.done, (asked, stream)
            found = {
                i: (stream.texts.get(i, ""), stream.ids.get(i) if tell_ids else None, finish)
                for i, finish in stream.finishes.items()
            }
            usage = stream.usage
        expected = {i: (t, ids if tell_ids else None, f) for i, (t, ids, f) in self.choices.items()}
        assert found == expected, (asked, found)
        if not asked.get("stream") or asked.get("stream_options"):
            for name in ("prompt_tokens", "completion_tokens"):
                assert usage[name] == self.usage[name], (asked, usage)
        else:
            assert usage is None


def _text(choice):
    return choice["text"] if "text" in choice else choice["message"]["content"]


def specs(server):
    """Chats and completions that all differ; a stop string that withholds the first delta, one
    that is met, several choices, pictures."""
    found = []
    for number in range(PROMPTS):
        path = ("/v1/completions", "/v1/chat/completions")[number % 2]
        asked = {"temperature": 0, "max_tokens": 1 + number % 7}
        if number % 2 == 0:
            asked["prompt"] = f"Number {number}"
        else:
            picture = image_part(b"picture %d " % number * (30_000 if number == 15 else 1))
            content = [text_part(f"Number {number}?"), *([picture] if number % 3 == 0 else [])]
            asked["messages"] = [{"role": "user", "content": content}]
        plain = Spec.of(server, path, asked)
        first = Spec.of(server, path, asked | {"max_tokens": 1}).choices[0][0]
        met = plain.choices[0][0][len(first) : len(first) + 3]
        found += [
            plain,
            Spec.of(server, path, asked | {"stop": first + "Z"}),
            Spec.of(server, path, asked | {"n": 3, "seed": number, "temperature": 1}),
            Spec.of(server, path, asked | {"stop": [met or first, "none"], "logprobs": None}),
        ]
    return found


class Traffic:
    """Requests of all kinds, drawn at random."""

    def __init__(self, specs, model):
        self._specs = specs
        self._model = model
        self._kinds = {
            self._completion: 50,
            self._small: 25,
            self._upload: 12,
            self._tokens: 5,
            self._error: 15,
            self._refused: 1,
        }

    def draw(self, rnd):
        (kind,) = rnd.choices(list(self._kinds), list(self._kinds.values()))
        return kind(rnd)

    def _completion(self, rnd):
        spec = rnd.choice(self._specs)
        fields = dict(spec.fields)
        if rnd.random() < 0.75:
            fields["stream"] = True
            if rnd.random() < 0.3:
                fields["stream_options"] = {"include_usage": True}
        if rnd.random() < 0.2:
            fields["return_token_ids"] = True
        return Asked("POST", spec.path, 200, json.dumps(fields).encode(), spec=spec)

    def _small(self, rnd):
        ok = {"status": "ok"}
        return rnd.choice(
            [
                Asked("GET", "/live", 200, answer=ok), Asked("GET", "/health", 200, answer=ok),
                Asked("HEAD", "/health", 200), Asked("OPTIONS", "/v1/completions", 200),
                Asked("GET", "/v1/models", 200, answer={"object": "list"}),
                Asked("HEAD", "/v1/models", 200), Asked("GET", "/live", 200, b"x" * 9, answer=ok),
            ]
        )  # fmt: skip

    def _upload(self, rnd):
        """Whatever the bytes look like, they are the body, and all of it."""
        parts = [b"\r\n\r\n", b"0\r\n\r\n", b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n", b"{}"]
        body = b"".join(rnd.choice(parts) for _ in range(rnd.randint(1, 20)))
        if rnd.random() < 0.01:
            body += rnd.randbytes(600_000)
        else:
            body += rnd.randbytes(rnd.choice((0, 1, 100, 3000)))
        return Asked("POST", "/v1/media", 200, body, answer={"bytes": len(body)})

    def _tokens(self, rnd):
        tokens = [rnd.randrange(200) for _ in range(rnd.randint(1, 9))]
        if rnd.random() < 0.5:
            return Asked("POST", "/detokenize", 200, json.dumps({"tokens": tokens}).encode())
        text = " ".join(map(str, tokens))
        return Asked("POST", "/tokenize", 200, json.dumps({"prompt": text}).encode())

    def _error(self, rnd):
        """Which leaves the connection open."""
        body = {"model": self._model, "prompt": "x", "max_tokens": 2}
        chats = "/v1/completions"

        def wrong(code, status=400, **fields):
            return Asked("POST", chats, status, json.dumps(body | fields).encode(), code)

        return rnd.choice(
            [
                wrong("model_not_found", 404, model="no"), wrong("invalid_value", n="x"),
                wrong("invalid_value", n=-1), wrong("unsupported_parameter", nothing=1),
                wrong("context_length_exceeded", max_tokens=10**7, stream=True),
                Asked("POST", chats, 400, b"{", "invalid_json"),
                Asked("POST", chats, 400, b'{"prompt": "\xed\xa0\x80", "n": "x"}', "invalid_json"),
                Asked("POST", "/health", 405, b"{}", "method_not_allowed"),
                Asked("HEAD", chats, 405), Asked("GET", chats, 405, code="method_not_allowed"),
                Asked("POST", "/v1/media", 400, b"", "invalid_media"),
                Asked("DELETE", "/v1/media/none", 404, code="media_not_found"),
                Asked("GET", "/v1/models/none", 404, code="model_not_found"),
            ]
        )  # fmt: skip

    def _refused(self, rnd):
        """Which ends the connection."""
        host = b"Host: x\r\n"
        raw = [
            (b"SOURCE / ICE/1.0\r\n" + host, 400, "invalid_http"),
            (b"DESCRIBE / RTSP/1.0\r\n" + host, 400, "invalid_http"),
            (b"GET / HTTP/1.1\r\n", 400, "invalid_http"),
            (b"POST / HTTP/1.1\r\n" + host + b"Content-Length: " + b"0" * 5000 + b"\r\n",
             400, "invalid_http"),
            (b"GET /live HTTP/1.1\r\n" + host + b"A: b\r\n" * 9000, 431, "headers_too_large"),
            (b"POST /v1/media HTTP/1.1\r\n" + host + b"Authorization: Bearer " + KEY.encode()
             + b"\r\nTransfer-Encoding: chunked\r\n\r\nz", 400, "invalid_http"),
        ]  # fmt: skip
        if rnd.random() < 0.5:
            data, status, code = rnd.choice(raw)
            return Asked("GET", "", status, code=code, refused=True, raw=data + b"\r\n")
        method = rnd.choice(("GET", "HEAD"))
        return rnd.choice(
            [
                Asked(method, "/nothing", 404, code="not_found", refused=True),
                Asked(method, "/v1/models", 401, code="invalid_api_key", key=None, refused=True),
                Asked("POST", "/v1/media", 401, b"x" * 99, "invalid_api_key", "no", refused=True),
                Asked("POST", "/live", 413, b"x" * 20_000, "payload_too_large", refused=True),
            ]
        )


def written(rnd, asked, old=False, expect=False):
    """Head and body of a request, as some client might write them."""
    if asked.raw:
        return asked.raw, b""
    lines = [f"{asked.method} {asked.path} HTTP/1.{0 if old else 1}", "Host: x"]
    if asked.key is not None:
        lines.append(f"Authorization: Bearer {asked.key}")
    if expect:
        lines.append("Expect: 100-continue")
    body = asked.body
    if not old and (body or asked.method == "POST") and rnd.random() < 0.4:
        lines.append("Transfer-Encoding: chunked")
        body = chunked(rnd, body)
    elif body or asked.method == "POST":
        lines.append(f"Content-Length: {len(body)}")
    head = "\r\n".join(lines).encode() + b"\r\n\r\n"
    if rnd.random() < 0.05:
        head = b"\r\n" + head
    return head, body


def chunked(rnd, body):
    cuts = sorted({0, len(body), *(rnd.randint(0, len(body)) for _ in range(rnd.randint(0, 4)))})
    extension = rnd.choice((b"", b"", b";a=b"))
    parts = [body[a:b] for a, b in itertools.pairwise(cuts) if b > a]
    trailer = rnd.choice((b"", b"", b"X-Sum: 1\r\n"))
    whole = b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts)
    return whole + b"0\r\n" + trailer + b"\r\n"


class Client:
    """One connection, and what is due on it."""

    def __init__(self, reader, writer, slow):
        self.reader, self.writer, self.slow = reader, writer, slow
        self.responses = Responses()
        self.checked = 0

    async def send(self, rnd, data):
        """In pieces that are cut anywhere, or at once."""
        if rnd.random() < 0.3:
            for _ in range(rnd.randint(1, 6)):
                size = rnd.randint(0, min(len(data), rnd.choice((3, 40, 4000))))
                self.writer.write(data[:size])
                data = data[size:]
                await asyncio.sleep(0)
        self.writer.write(data)
        await self.writer.drain()

    async def read(self, rnd, asked, until_closed):
        """Read and check what comes, to the last answer that is due or to the end."""
        asked = iter(asked)
        while self.responses.due or until_closed:
            data = await self.reader.read(rnd.randint(1, 700) if self.slow else 1 << 16)
            if not data:
                self.responses.end()
                self._check(asked)
                assert not self.responses.due, f"{self.responses.due} requests without an answer"
                return
            self.responses.feed(data)
            self._check(asked)

    def _check(self, asked):
        for response in self.responses.take():
            next(asked).check(response)
            self.checked += 1


async def connect(port, slow):
    sock = socket.socket()
    if slow:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    return await asyncio.open_connection(sock=sock)


async def one_connection(port, traffic, rnd):
    """Exchanges that were checked on one connection, of one way to use it."""
    (way,) = rnd.choices(list(WAYS), list(WAYS.values()))
    client = Client(*await connect(port, way == "slow"), way == "slow")
    try:
        if way in ("old", "continue"):
            await _alone(client, traffic, rnd, way)
        else:
            await _together(client, traffic, rnd, way)
    finally:
        client.writer.transport.abort()
        with contextlib.suppress(OSError):
            await client.writer.wait_closed()
    return client.checked


async def _together(client, traffic, rnd, way):
    batches = 1 if way in ("half-close", "killed") else rnd.randint(1, 8)
    for number in range(batches):
        batch = []
        for _ in range(rnd.choice((1, 1, 5, 30))):
            batch.append(asked := traffic.draw(rnd))
            if asked.refused:
                break
        ends = batch[-1].refused
        for asked in batch:
            client.responses.expect("HEAD" if asked.method == "HEAD" else "GET")
        data = b"".join(part for asked in batch for part in written(rnd, asked))
        if way == "killed":
            await _kill(client, rnd, batch, data)
            return
        half = way == "half-close" and number == batches - 1
        async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as group:
            reading = group.create_task(client.read(rnd, batch, ends or half))
            await client.send(rnd, data)
            if half and not ends:
                client.writer.write_eof()
            await reading
        if ends:
            return


async def _kill(client, rnd, batch, data):
    """Leave somewhere; what has come until then is right as far as it goes."""
    data = data[: rnd.randint(0, len(data))]
    await client.send(rnd, data)
    if rnd.random() < 0.7:
        with_time = rnd.choice((0.0, 0.001, 0.02))
        await asyncio.sleep(with_time)
        try:
            async with asyncio.timeout(0.01):
                client.responses.feed(await client.reader.read(1 << 16))
        except TimeoutError:
            pass
        client._check(iter(batch))


async def _alone(client, traffic, rnd, way):
    """One request: of HTTP/1.0, or one that waits for leave to send its body."""
    asked = traffic.draw(rnd)
    while asked.raw or asked.refused or (way == "continue" and not asked.body):
        asked = traffic.draw(rnd)
    head, body = written(rnd, asked, old=way == "old", expect=True)
    client.responses.expect("HEAD" if asked.method == "HEAD" else "GET")
    async with asyncio.timeout(SECONDS):
        await client.send(rnd, head)
        if way == "continue":
            interim = await client.reader.readexactly(25)
            assert interim == b"HTTP/1.1 100 Continue\r\n\r\n", interim
        await client.send(rnd, body)
        await client.read(rnd, [asked], way == "old")


async def drive(port, traffic, rnd, state, exchanges):
    """Connections one after the other, until all drivers have checked enough together."""
    while state["checked"] < exchanges:
        try:
            checked = await one_connection(port, traffic, rnd)
        except (Exception, Broken) as error:
            error.add_note(f"SEED={SEED}, {state['checked']} exchanges were right before")
            raise
        state["checked"] += checked
        state["connections"] += 1


@pytest.fixture(scope="module")
def server():
    flags = ("--engine=fake", "--pattern=EPD", "--enable-multimodal", "--fake-step-ms=0")
    with serving(*flags, env={"TRIPTYCH_API_KEY": KEY}) as running:
        yield running


def memory(server):
    """Bytes that the frontend has in use."""
    return psutil.Process(server.pids()["frontend"]).memory_info().rss


@pytest.mark.timeout(600)
def test_twenty_thousand_exchanges_are_right_to_the_byte(server):
    """And what they take of the frontend's memory ends: the second half adds next to nothing."""
    traffic = Traffic(specs(server), server.model)
    state = {"checked": 0, "connections": 0}

    async def until(exchanges, half):
        async with asyncio.TaskGroup() as group:
            for number in range(DRIVERS):
                rnd = random.Random(f"{SEED} {half} {number}")
                group.create_task(drive(server.port, traffic, rnd, state, exchanges))

    asyncio.run(until(EXCHANGES // 2, 0))
    middle = memory(server)
    asyncio.run(until(EXCHANGES, 1))
    grown = memory(server) - middle
    print(f"SEED={SEED}: {state}, grown by {grown >> 10} KiB in the second half")
    assert grown < GROWN
    server.wait(
        lambda: not server.state()["frontend"]["in_flight"], what="nothing is left in flight"
    )
    assert "Traceback" not in server.tail(), server.tail()


def test_memory_of_large_bodies_is_released(server):
    """However many came: a while later the frontend has what it had before them."""
    before = memory(server)
    picture = image_part(bytes(16 << 20))
    asked = {"model": server.model, "messages": [{"role": "user", "content": [picture]}]}
    body = json.dumps(asked | {"max_tokens": 1}).encode()
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: server.request(CHAT, body), range(48)))
    assert {answer.status for answer in answers} == {200}
    print(f"{(memory(server) - before) >> 20} MiB more, right after them")
    server.wait(lambda: memory(server) < before + GROWN, what=f"less than {GROWN} bytes more")
    print(f"{(memory(server) - before) >> 20} MiB more, then")
