"""Load row 5, its budget: large bodies wait their turn unread, and small ones never do."""

import asyncio

import pytest

from triptych.config import Limits
from triptych.http.bodies import (
    LARGE_BODY,
    MIN_READ_BYTES,
    READ_BYTES,
    RESUMED_PER_TURN,
    TURN_BYTES,
    BodyAdmission,
)

CHAT = "/v1/chat/completions"
SMALL = b'{"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}'
BIG = b" " * (1 << 20) + SMALL
STREAMED = BIG.replace(b'"tiny"', b'"tiny", "stream": true')


class Receiver:
    def __init__(self):
        self.admissions = self.pauses = self.resumes = 0

    def admitted(self):
        self.admissions += 1

    def pause_reading(self):
        self.pauses += 1

    def resume_reading(self):
        self.resumes += 1


@pytest.fixture
async def admission():
    return BodyAdmission(asyncio.get_running_loop(), 100, 1000)


async def test_a_body_waits_until_others_are_released(admission):
    first, second, third = Receiver(), Receiver(), Receiver()
    assert admission.admit(first, 60, "a")
    assert not admission.admit(second, 50, "a")
    assert not admission.admit(third, 10, "a")  # it would fit, but came later
    assert (admission.bytes, admission.waiting) == (60, 2)
    admission.release(first)
    assert (second.admissions, third.admissions) == (1, 1)
    assert (admission.bytes, admission.waiting, admission.peak_bytes) == (60, 0, 60)


async def test_a_body_over_the_limit_is_admitted_alone(admission):
    small, huge, later = Receiver(), Receiver(), Receiver()
    assert admission.admit(small, 1, "a")
    assert not admission.admit(huge, 1000, "a")
    admission.release(small)
    assert huge.admissions
    assert not admission.admit(later, 1, "a")
    admission.release(huge)
    assert later.admissions


async def test_a_released_waiting_body_is_never_admitted_and_lets_others_pass(admission):
    first, second, third = Receiver(), Receiver(), Receiver()
    admission.admit(first, 60, "a")
    admission.admit(second, 60, "a")
    admission.admit(third, 40, "a")
    admission.release(second)
    assert (second.admissions, third.admissions) == (0, 1)
    admission.release(third)
    admission.release(third)
    admission.release(first)
    assert admission.bytes == 0


async def test_a_body_that_is_smaller_than_announced_frees_bytes(admission):
    first, second = Receiver(), Receiver()
    admission.admit(first, 100, "a")
    admission.admit(second, 60, "a")
    admission.complete(first, 40)
    assert second.admissions
    assert admission.bytes == 100


async def test_no_more_is_received_than_is_processed():
    admission = BodyAdmission(asyncio.get_running_loop(), 100, 30)
    readers = [Receiver() for _ in range(6)]
    assert [admission.admit(reader, 20, "a") for reader in readers] == [True] + [False] * 5
    for reader in readers[:4]:
        admission.processed(reader)
        admission.processed(reader)
    assert [reader.admissions for reader in readers] == [0, 1, 1, 1, 1, 0]  # five of 20 are there
    admission.release(readers[0])
    assert readers[5].admissions == 0  # the fifth has no answer yet
    admission.release(readers[4])
    assert readers[5].admissions == 1
    for reader in readers:
        admission.release(reader)
    assert (admission.bytes, admission._unprocessed) == (0, 0)


async def test_the_owner_with_the_fewest_bytes_is_admitted_first(admission):
    """One client's flood keeps out others no longer than what is inside already."""
    flood = [Receiver() for _ in range(6)]
    assert [admission.admit(reader, 40, "a") for reader in flood] == [True, True] + [False] * 4
    others = [Receiver() for _ in range(3)]
    assert admission.admit(others[0], 20, "b")  # it fits, and its owner has nothing here
    assert not admission.admit(others[1], 40, "b")
    admission.release(flood[0])
    assert (flood[2].admissions, others[1].admissions) == (0, 1)
    assert not admission.admit(others[2], 1, "c")  # the budget is used up
    admission.release(others[0])
    assert (flood[2].admissions, others[2].admissions) == (0, 1)
    admission.release(others[1])
    assert flood[2].admissions  # of one's own in order
    for reader in (*flood, *others):
        admission.release(reader)
    assert (admission.bytes, admission._unprocessed, admission._owner_bytes) == (0, 0, {})


async def test_a_large_body_is_not_starved_by_others(admission):
    first, large, small = Receiver(), Receiver(), Receiver()
    assert admission.admit(first, 60, "a")
    assert not admission.admit(large, 100, "b")
    assert not admission.admit(small, 10, "c")  # its owner has no bytes, but came later
    admission.release(first)
    assert (large.admissions, small.admissions) == (1, 0)


async def test_one_growing_body_may_exceed_the_limit_and_no_other(admission):
    first, second = Receiver(), Receiver()
    assert admission.admit(first, 40, "a")
    assert admission.admit(second, 40, "a")
    assert admission.grow(first, 60)
    assert admission.grow(second, 50)
    assert admission.grow(second, 60)
    assert not admission.grow(first, 61)
    admission.release(second)
    assert admission.grow(first, 200)
    admission.release(first)
    assert admission.bytes == 0


async def test_a_slow_body_counts_only_what_has_arrived():
    admission = BodyAdmission(asyncio.get_running_loop(), 1000 << 20, 40 << 20)
    slow, second, third = Receiver(), Receiver(), Receiver()
    assert admission.admit(slow, 120 << 20, "a")  # a quarter counts
    assert not admission.admit(second, 60 << 20, "a")
    admission.slow_down(slow, 1000)
    assert second.admissions
    admission.complete(second, 60 << 20)
    assert not admission.admit(third, 1, "a")
    admission.processed(second)
    assert third.admissions


async def test_a_turn_has_a_limit_and_paused_receivers_take_turns(admission):
    assert admission.read_bytes == READ_BYTES
    assert admission.count_read(TURN_BYTES - 1)
    assert not admission.count_read(1)
    assert admission.read_bytes == MIN_READ_BYTES
    readers = [Receiver() for _ in range(RESUMED_PER_TURN + 1)]
    for reader in readers:
        admission.pause(reader)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert admission.read_bytes == READ_BYTES
    assert [reader.pauses for reader in readers] == [1] * len(readers)
    for _ in range(3):
        await asyncio.sleep(0)
    assert [reader.resumes for reader in readers] == [1] * len(readers)


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def test_many_large_bodies_at_once_hold_no_more_than_the_budget(open_site):
    async with open_site(Limits(media_in_flight_bytes=3 << 20)) as web:
        answers = await asyncio.gather(*(web.ask(CHAT, BIG) for _ in range(20)))
        assert [answer.status for answer in answers] == [200] * 20
        admission = web.server.admission
        assert 2 * len(BIG) <= admission.peak_bytes <= 3 << 20
        await until(lambda: admission.bytes == 0)
        assert admission.waiting == 0


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_waiting_body_is_not_read_and_small_bodies_pass(open_site, wire, chunked):
    request, read = wire
    async with open_site(Limits(media_in_flight_bytes=1 << 20, body_seconds=1.0)) as web:
        web.pipeline.gate = asyncio.Event()
        first = asyncio.create_task(web.ask(CHAT, BIG))
        await until(lambda: web.pipeline.works)
        reader, writer = await web.connect()
        if chunked:
            head = request(
                "POST", CHAT, b"", {"Transfer-Encoding": "chunked", "Content-Length": None}
            )
            writer.write(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BIG), BIG))
        else:
            writer.write(request("POST", CHAT, BIG))
        await until(lambda: web.server.admission.waiting)
        await asyncio.sleep(1.3)  # its body's time is over, and did not run
        small = asyncio.create_task(web.ask(CHAT, SMALL))
        await until(lambda: len(web.pipeline.works) == 2)
        assert web.server.admission.waiting == 1
        web.pipeline.gate.set()
        assert [(await answer).status for answer in (first, small)] == [200, 200]
        assert (await read(reader)).status == 200
        writer.close()


async def test_waiting_ends_in_a_429_that_says_when_to_come_back(open_site):
    async with open_site(Limits(media_in_flight_bytes=1 << 20, body_wait_seconds=0.3)) as web:
        web.pipeline.gate = asyncio.Event()
        first = asyncio.create_task(web.ask(CHAT, BIG))
        await until(lambda: web.pipeline.works)
        refused = await web.ask(CHAT, BIG)
        assert (refused.status, refused.code) == (429, "server_overloaded")
        assert refused.headers["retry-after"]
        assert web.server.admission.refused == 1
        web.pipeline.gate.set()
        assert (await first).status == 200
        assert (await web.ask(CHAT, BIG)).status == 200


async def test_discarding_a_body_after_a_refusal_takes_turns_too(open_site, wire, monkeypatch):
    request, read = wire
    async with open_site(Limits(media_in_flight_bytes=1 << 20, body_wait_seconds=0.2)) as web:
        web.pipeline.gate = asyncio.Event()
        first = asyncio.create_task(web.ask(CHAT, BIG))
        await until(lambda: web.pipeline.works)
        paused = []
        pause = web.server.admission.pause
        monkeypatch.setattr(web.server.admission, "pause", lambda r: (paused.append(r), pause(r)))
        reader, writer = await web.connect()
        writer.write(request("POST", CHAT, BIG * 8))
        refused = await read(reader)
        assert refused.status == 429
        await until(lambda: any(one._lingered > 4 << 20 for one in set(paused)))
        web.pipeline.gate.set()
        assert (await first).status == 200
        writer.close()


async def test_no_more_wait_than_may_be_served(open_site):
    async with open_site(Limits(media_in_flight_bytes=1 << 20, requests=2)) as web:
        web.pipeline.gate = asyncio.Event()
        first = [asyncio.create_task(web.ask(CHAT, BIG)) for _ in range(3)]
        await until(lambda: web.pipeline.works and web.server.admission.waiting == 2)
        refused = await web.ask(CHAT, BIG)
        assert (refused.status, refused.code) == (429, "server_overloaded")
        web.pipeline.gate.set()
        assert [(await answer).status for answer in first] == [200] * 3


async def test_the_first_token_lets_the_next_body_in(open_site):
    async with open_site(Limits(media_ahead_bytes=1 << 20)) as web:
        web.pipeline.endless = True
        first, second = (asyncio.create_task(stream(web)) for _ in range(2))
        await until(lambda: len(web.pipeline.works) == 2)
        assert web.server.admission.bytes == 2 * len(STREAMED)
        first.cancel()
        second.cancel()


async def stream(web):
    reader, writer = await web.connect()
    head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    writer.write(head % (CHAT.encode(), len(STREAMED)) + STREAMED)
    while await reader.read(1000):
        pass


async def silent(web, count, head):
    for _ in range(count):
        _, writer = await web.connect()
        writer.write(head)
    await until(lambda: len(web.server.connections) == count)


DECLARED = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {64 << 20}\r\n\r\n".encode()
CHUNKED = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()


@pytest.mark.parametrize(
    "sent", [DECLARED, DECLARED + b"a", CHUNKED + b"50000\r\n" + bytes(0x50000) + b"\r\n"]
)
async def test_a_body_that_declares_much_and_sends_little_blocks_no_other(open_site, sent):
    async with open_site(Limits(body_wait_seconds=3, body_seconds=30, header_seconds=1)) as web:
        await silent(web, 20, sent)
        assert (await web.ask(CHAT, BIG)).status == 200


async def test_a_body_that_stalls_while_others_wait_is_refused(open_site, wire):
    _, read = wire
    limits = Limits(media_in_flight_bytes=64 << 20, body_wait_seconds=3, header_seconds=1)
    async with open_site(limits) as web:
        reader, writer = await web.connect()
        writer.write(DECLARED)
        await until(lambda: web.server.admission.bytes)
        await asyncio.sleep(1)  # no other body waits
        assert web.server.admission.bytes == 64 << 20
        assert (await web.ask(CHAT, BIG)).status == 200
        assert (await read(reader)).code == "request_timeout"
        writer.close()


async def test_a_body_that_keeps_its_rate_while_others_wait_continues(open_site, wire):
    request, read = wire
    limits = Limits(
        media_in_flight_bytes=1 << 20, body_wait_seconds=3, body_seconds=20, header_seconds=1
    )
    async with open_site(limits) as web:
        reader, writer = await web.connect()
        sent = request("POST", CHAT, BIG)
        writer.write(sent[:1000])
        await until(lambda: web.server.admission.bytes)
        waiting = asyncio.create_task(web.ask(CHAT, BIG))
        await until(lambda: web.server.admission.waiting)
        step = len(sent) // 8 + 1
        for at in range(1000, len(sent), step):
            writer.write(sent[at : at + step])
            await asyncio.sleep(0.15)
        assert (await read(reader)).status == 200
        assert (await waiting).status == 200
        writer.close()


async def test_a_slow_body_blocks_no_other_body(open_site):
    """It keeps up, so it stays; others come in beside it."""
    limits = Limits(media_ahead_bytes=2 << 20, body_wait_seconds=3, header_seconds=1)
    async with open_site(limits) as web:
        _, writer = await web.connect()
        writer.write(DECLARED + bytes(LARGE_BODY))
        await until(lambda: web.server.admission.bytes)
        answer = asyncio.create_task(web.ask(CHAT, BIG))
        for _ in range(30):
            writer.write(bytes(64 << 10))
            await asyncio.sleep(0.02)
            if answer.done():
                break
        assert (await answer).status == 200
        assert web.server.admission.bytes == 64 << 20
        writer.close()


async def test_chunked_bodies_reserve_the_bytes_that_they_need(open_site):
    async with open_site(Limits(media_in_flight_bytes=8 << 20)) as web:
        parts = b"".join(
            b"%x\r\n%b\r\n" % (len(part), part)
            for part in (BIG[at : at + 100_000] for at in range(0, len(BIG), 100_000))
        )
        web.pipeline.gate = asyncio.Event()
        answers = [asyncio.create_task(web.raw(CHUNKED + parts + b"0\r\n\r\n")) for _ in range(3)]
        await until(lambda: len(web.pipeline.works) == 3)
        assert web.server.admission.bytes == 3 * len(BIG)
        web.pipeline.gate.set()
        assert [(await answer).status for answer in answers] == [200] * 3


@pytest.mark.parametrize("start", ["GET /health", "GET /live", "POST /health", f"GET {CHAT}"])
@pytest.mark.parametrize("how", [f"Content-Length: {64 << 20}", "Transfer-Encoding: chunked"])
async def test_a_large_body_on_a_route_without_one_is_refused(open_site, start, how):
    async with open_site() as web:
        head = f"{start} HTTP/1.1\r\nHost: x\r\n{how}\r\n\r\n".encode()
        body = b"" if "Content" in how else b"5000\r\n" + bytes(0x5000) + b"\r\n"
        refused = await web.raw(head + body)
        assert (refused.status, refused.code) == (413, "payload_too_large")
        assert web.server.admission.peak_bytes == 0
        assert (await web.ask("/health", b"{}", "GET")).status == 200


async def test_one_address_does_not_keep_out_another(open_site, wire):
    request, read = wire
    async with open_site(Limits(media_in_flight_bytes=3 << 20)) as web:
        web.pipeline.gate = asyncio.Event()
        flood = [asyncio.create_task(web.ask(CHAT, BIG)) for _ in range(8)]
        await until(lambda: len(web.pipeline.works) == 2 and web.server.admission.waiting == 6)
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", web.server.port, local_addr=("127.0.0.2", 0)
        )
        body = BIG.replace(b"Hi", b"Other")
        writer.write(request("POST", CHAT, body))
        await until(lambda: web.server.admission.waiting == 7)
        flood[0].cancel()  # one leaves: who comes in is not of those who were there before
        await until(lambda: len(web.pipeline.works) == 3)
        assert web.server.admission._owner_bytes["127.0.0.2"] == len(body)
        web.pipeline.gate.set()
        assert (await read(reader)).status == 200
        assert [(await answer).status for answer in flood[1:]] == [200] * 7
        writer.close()


async def test_a_client_that_leaves_releases_its_bytes(open_site, wire):
    request, _ = wire
    async with open_site(Limits(media_in_flight_bytes=1 << 20)) as web:
        _, writer = await web.connect()
        writer.write(request("POST", CHAT, BIG)[: len(BIG) // 2])
        await until(lambda: web.server.admission.bytes)
        _, waiting = await web.connect()
        waiting.write(request("POST", CHAT, BIG))
        await until(lambda: web.server.admission.waiting)
        waiting.transport.abort()
        writer.transport.abort()
        await until(lambda: not web.server.admission.waiting and not web.server.admission.bytes)
        assert (await web.ask(CHAT, BIG)).status == 200


async def test_continue_is_sent_once_bytes_are_free(open_site, wire):
    request, read = wire
    async with open_site(Limits(media_in_flight_bytes=1 << 20)) as web:
        web.pipeline.gate = asyncio.Event()
        first = asyncio.create_task(web.ask(CHAT, BIG))
        await until(lambda: web.pipeline.works)
        reader, writer = await web.connect()
        writer.write(
            request("POST", CHAT, b"", {"Content-Length": len(BIG), "Expect": "100-continue"})
        )
        await until(lambda: web.server.admission.waiting)
        web.pipeline.gate.set()
        assert (await first).status == 200
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        writer.write(BIG)
        assert (await read(reader)).status == 200
        writer.close()


async def test_a_small_body_reserves_nothing(open_site):
    async with open_site(Limits(media_in_flight_bytes=1024)) as web:
        assert (await web.ask(CHAT, SMALL.rjust(LARGE_BODY))).status == 200
        assert web.server.admission.peak_bytes == 0
