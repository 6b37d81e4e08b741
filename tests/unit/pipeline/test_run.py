"""The pipeline against real request-plane servers whose workers are a few lines each."""

import asyncio
import gc
import weakref

import msgspec
import pytest

from support.relay import Relay, kind_of
from support.site import Site, ticket
from triptych.errors import InvalidMedia, NoWorkers, WorkerLost
from triptych.messages import (
    Delta,
    MediaItem,
    MediaMeta,
    PreparedItem,
    Sampling,
    Work,
)
from triptych.pipeline.membership import Membership
from triptych.pipeline.run import Pipeline
from triptych.runtime.frames import FrameKind
from triptych.runtime.planes import Planes


def work(items=0, tokens=4):
    media = tuple(MediaItem("image", i, b"picture %d" % i) for i in range(items))
    return Work("w", (1, 2, 3), media, Sampling(seed=1, max_tokens=tokens))


async def run(site, one):
    deltas = []
    spent = await site.pipeline.run(one, deltas.append)
    return [i for delta in deltas for i in delta.ids], deltas, spent


@pytest.mark.parametrize("pattern", ["EPD", "E/PD", "E/P/D", "EP/D", "E*2/P/D*2"])
@pytest.mark.parametrize("items", [0, 1, 3])
async def test_every_pattern_gives_the_same_tokens_and_frees_everything(tmp_path, pattern, items):
    async with Site(tmp_path, pattern) as site:
        ids, deltas, _ = await run(site, work(items))
        assert ids == [100, 101, 102, 103]
        assert deltas[-1].finish == "length"
        await site.all_free()


async def test_what_a_hop_brings_is_what_the_one_before_handed_over(tmp_path):
    async with Site(tmp_path, "E*2/P/D") as site:
        _, _, spent = await run(site, work(3))
        assert spent == {"encode": 3.0}
        encodes = [(name, job) for name, job in site.jobs if name.startswith("E")]
        assert {name for name, _ in encodes} == {"E-0", "E-1"}  # fanned out
        for _, job in encodes:  # each carries only its own picture's bytes
            assert [bool(m.data) for m in job.work.media] == [i in job.items for i in range(3)]
        [prefill] = [job for name, job in site.jobs if name == "P-0"]
        assert [e.ticket.serial for e in prefill.embeddings] == [0, 1, 2]  # in order
        assert not any(m.data for m in prefill.work.media)
        [decode] = [job for name, job in site.jobs if name == "D-0"]
        assert decode.handover.kv.serial == 99


async def test_a_first_token_that_is_the_last_needs_no_decode(tmp_path):
    async with Site(tmp_path, "E/P/D") as site:
        ids, _, _ = await run(site, work(0, tokens=1))
        assert ids == [100]
        assert [name for name, _ in site.jobs] == ["P-0"]
        await site.all_free()


async def test_cancelling_frees_every_hop(tmp_path):
    async with Site(tmp_path, "E/P/D") as site:
        first = asyncio.Event()
        task = asyncio.create_task(site.pipeline.run(work(2, 10_000), lambda _: first.set()))
        await first.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await site.all_free()


async def test_a_failed_hop_fails_the_others(tmp_path):
    async with Site(tmp_path, "E*2/PD") as site:
        usual = site.answer

        async def one_bad_picture(name, role, job, reply):
            if role == "E" and job.items == (1,):
                raise InvalidMedia("it is no picture", param="media[1]")
            await usual(name, role, job, reply)

        site.answer = one_bad_picture
        with pytest.raises(InvalidMedia, match="no picture"):
            await run(site, work(3))
        await site.all_free()


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("pattern", ["E/PD*2", "E/P/D*2"])
async def test_another_worker_continues_for_a_lost_one_without_a_repeated_token(
    tmp_path, pattern, resumes
):
    """A worker that can resume continues after the client's tokens; none is generated again."""
    async with Site(tmp_path, pattern, resumes=resumes) as site:
        deltas = []

        def kill_after_two(delta):
            deltas.append(delta)
            if len(deltas) == 2:
                name = site.jobs[-1][0]
                for caller in list(site.servers[name].callers):
                    caller.abort("killed by the test")

        await site.pipeline.run(work(1, 8), kill_after_two)
        assert [i for d in deltas for i in d.ids] == [100 + i for i in range(8)]
        made = [job.work.generated for name, job in site.jobs if "D" in name]
        assert made == [(), (100, 101) if resumes else ()]
        await site.all_free()


@pytest.mark.parametrize("pattern", ["EPD*2", "E/PD*2"])
async def test_a_lost_call_leaves_no_cycle(tmp_path, pattern):
    """Off: Call.done keeps its error, or Together the group of it."""

    class Hearer:
        count = 0

        def __call__(self, delta):
            self.count += 1
            if self.count == 2:
                for caller in list(site.servers[site.jobs[-1][0]].callers):
                    caller.abort("killed by the test")

    async with Site(tmp_path, pattern) as site:
        hearer = Hearer()
        watched = weakref.ref(hearer)
        gc.disable()
        try:
            await site.pipeline.run(work(1, 8), hearer)
            assert hearer.count == 8
            del hearer
            await site.all_free()
            assert watched() is None
        finally:
            gc.enable()


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize(("pattern", "tokens"), [("EPD*2", 4), ("E/P/D*2", 4), ("E/P*2/D", 1)])
async def test_a_loss_after_the_finish_is_the_end(tmp_path, pattern, tokens, resumes):
    """No worker is called again, whatever is lost afterwards. Guard: ``run.finished`` in
    Pipeline._arrives (without it another worker is called, and the client gets two ends)."""
    async with Site(tmp_path, pattern, resumes=resumes) as site:
        usual, deltas, asked = site.answer, [], []

        async def never_ends(name, role, job, reply):
            await usual(name, role, job, reply)
            await reply.wait_until_closed()

        site.answer = never_ends

        def kill_at_the_finish(delta):
            deltas.append(delta)
            if delta.finish:
                asked.append(len(site.jobs))
                for caller in list(site.servers[site.jobs[-1][0]].callers):
                    caller.abort("killed by the test")

        async with asyncio.timeout(10):
            await site.pipeline.run(work(1, tokens), kill_at_the_finish)
        assert [i for d in deltas for i in d.ids] == [100 + i for i in range(tokens)]
        assert asked == [len(site.jobs)]
        await site.all_free()


@pytest.mark.parametrize("pattern", ["EPD*2", "E/P/D*2"])
async def test_an_engine_that_cannot_resume_starts_again(tmp_path, monkeypatch, pattern):
    """A worker of another engine came after it was asked whether all can. Guards: the look at the
    record in Pipeline._call (without it the client gets the beginning twice), and CannotResume in
    FREE_RETRIES (without it this is a second loss, and one too many)."""
    async with Site(tmp_path, pattern, resumes=True) as site:
        deltas = []

        def kill_after_two(delta):
            deltas.append(delta)
            if len(deltas) == 2:
                for peer in site.membership.peers:
                    if "D" in peer.record.role:
                        peer.record = msgspec.structs.replace(peer.record, resumes=False)
                for caller in list(site.servers[site.jobs[-1][0]].callers):
                    caller.abort("killed by the test")

        monkeypatch.setattr(Membership, "can_resume", True)
        async with asyncio.timeout(10):
            await site.pipeline.run(work(0, 8), kill_after_two)
        assert [i for d in deltas for i in d.ids] == [100 + i for i in range(8)]
        assert [job.work.generated for name, job in site.jobs if "D" in name] == [(), ()]
        await site.all_free()


async def test_a_worker_that_lost_a_request_does_not_get_it_again(tmp_path):
    """Its media belong to a worker that is ending, and may be reached again meanwhile."""
    async with Site(tmp_path, "EPD*2", "least-loaded") as site:
        usual, asked = site.answer, []

        async def one_is_ending(name, role, job, reply):
            asked.append(name)
            if name == asked[0]:
                raise WorkerLost("it is ending")
            await usual(name, role, job, reply)

        site.answer = one_is_ending
        for _ in range(3):
            ids, _, _ = await run(site, work(1))
            assert ids == [100, 101, 102, 103]
        assert len(set(asked)) == 2
        await site.all_free()


async def test_a_connection_that_is_breaking_is_not_used(tmp_path):
    """Its loss is reported a turn of the loop later, and a request can migrate twice within one."""
    async with Site(tmp_path, "EPD*2", "least-loaded") as site:
        broken, other = site.membership.peers
        for connection in broken.connections:
            connection.abort("broken by the test")
        chosen = {site.membership.choose(broken.record.role) for _ in range(4)}
        assert broken in site.membership.peers  # its loss is not reported yet
        assert chosen == {other}
        ids, _, _ = await run(site, work(1))
        assert ids == [100, 101, 102, 103]


@pytest.mark.parametrize("limit", [0, 1, 3])
async def test_a_request_migrates_as_often_as_the_limit_allows(tmp_path, limit):
    """Proved by comparing with another number: workers are then asked more or less often."""
    async with Site(tmp_path, "EPD*5") as site:
        site.pipeline = Pipeline(site.topology, site.membership, migrations=limit)
        asked = []

        async def ends(name, role, job, reply):
            asked.append(name)
            raise WorkerLost("it is ending")

        site.answer = ends
        with pytest.raises(WorkerLost):
            await run(site, work(0))
        assert len(asked) == len(set(asked)) == 1 + limit
        await site.all_free()


async def test_without_migration_a_worker_that_drains_is_left_for_another_even_so(tmp_path):
    async with Site(tmp_path, "E/PD*2") as site:
        site.pipeline = Pipeline(site.topology, site.membership, migrations=0)
        site.servers["PD-0"]._draining = True
        for _ in range(3):
            ids, _, _ = await run(site, work(1))
            assert ids == [100, 101, 102, 103]


async def test_a_continuation_that_differs_is_an_error_and_not_a_wrong_answer(tmp_path):
    async with Site(tmp_path, "E/PD*2") as site:
        usual, deltas = site.answer, []

        async def other_tokens(name, role, job, reply):
            if len(site.jobs) > 0:
                reply.send(Delta((7, 7, 7), None))
                await reply.wait_until_closed()
            await usual(name, role, job, reply)

        site.answer = other_tokens

        def kill_after_two(delta):
            deltas.append(delta)
            if len(deltas) == 2:
                for caller in list(site.servers[site.jobs[-1][0]].callers):
                    caller.abort("killed by the test")

        with pytest.raises(WorkerLost):
            await site.pipeline.run(work(0, 8), kill_after_two)
        assert [i for d in deltas for i in d.ids] == [100, 101]


async def test_a_role_without_a_worker_is_named(tmp_path):
    async with Site(tmp_path, "E/PD") as site:
        await site.servers["PD-0"].close()
        async with asyncio.timeout(5):
            while site.pipeline.missing() != ("PD",):
                await asyncio.sleep(0.01)
        with pytest.raises(NoWorkers):
            await run(site, work(0))


async def gone(site, name):
    await site.servers[name].close()
    async with asyncio.timeout(5):
        while site.pipeline.missing() != (name[:-2],) or not site.pipeline.unused:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("missing", ["P-0", "D-0"])
async def test_no_worker_is_called_when_a_later_role_has_none(tmp_path, missing):
    """Proved without ``_check_roles``: E is called, and the client gets P's token first."""
    async with Site(tmp_path, "E/P/D") as site:
        await gone(site, missing)
        deltas = []
        for one in (work(2), work(0)):
            with pytest.raises(NoWorkers, match=f"role {missing[0]} "):
                await site.pipeline.run(one, deltas.append)
        assert (deltas, site.jobs) == ([], [])
        if missing == "D-0":  # which one token does not need
            assert (await run(site, work(1, tokens=1)))[0] == [100]
        await site.all_free()


async def test_a_worker_lost_after_the_first_hop_began_fails_at_its_own_hop(tmp_path):
    async with Site(tmp_path, "E/P/D") as site:
        usual, ids = site.answer, []

        async def d_goes_meanwhile(name, role, job, reply):
            if role == "P":
                await gone(site, "D-0")
            await usual(name, role, job, reply)

        site.answer = d_goes_meanwhile
        with pytest.raises(NoWorkers):
            await site.pipeline.run(work(1), lambda delta: ids.extend(delta.ids))
        assert ids == [100]
        assert [name for name, _ in site.jobs] == ["E-0", "P-0"]
        await site.all_free()


async def test_a_worker_that_is_just_being_reached_may_be_there_in_its_turn(tmp_path, monkeypatch):
    """Its connections broke. Proved by ``ready`` for ``need``: it is refused."""
    async with Site(tmp_path, "E/P/D") as site:
        usual, reach, go = site.answer, site.membership._reach, asyncio.Event()

        async def reach_later(record):
            await go.wait()
            return await reach(record)

        async def p_takes_its_time(name, role, job, reply):
            if role == "P":
                go.set()
                async with asyncio.timeout(5):
                    while site.pipeline.missing():
                        await asyncio.sleep(0.01)
            await usual(name, role, job, reply)

        monkeypatch.setattr(site.membership, "_reach", reach_later)
        site.answer = p_takes_its_time
        for caller in list(site.servers["D-0"].callers):
            caller.abort("broken by the test")
        async with asyncio.timeout(5):
            while not site.pipeline.missing():
                await asyncio.sleep(0.01)
        assert (await run(site, work(1)))[0] == [100, 101, 102, 103]
        await site.all_free()


async def test_a_worker_that_drains_is_left_for_another_at_no_loss(tmp_path):
    async with Site(tmp_path, "E/PD*3") as site:
        for name in ("PD-0", "PD-1"):  # discovery does not know yet
            site.servers[name]._draining = True
        for _ in range(6):
            ids, _, _ = await run(site, work(1))
            assert ids == [100, 101, 102, 103]
        assert {name for name, _ in site.jobs if name.startswith("PD")} == {"PD-2"}
        await site.all_free()


@pytest.mark.parametrize("ticks", range(6))
async def test_a_cancel_beside_a_loss_is_a_cancel(tmp_path, ticks):
    """A TaskGroup that fails forgets that it was cancelled; the client is gone all the same."""
    async with Site(tmp_path, "E/PD*2") as site:
        deltas, loop = [], asyncio.get_running_loop()

        def cancel_after(ticks):
            if ticks:
                loop.call_soon(cancel_after, ticks - 1)
            else:
                task.cancel()

        def kill_after_two(delta):
            deltas.append(delta)
            if len(deltas) == 2:
                name = site.jobs[-1][0]
                [peer] = [p for p in site.membership.peers if p.record.id == name]
                peer.connections[0].on_lost(lambda: cancel_after(ticks))
                for caller in list(site.servers[name].callers):
                    caller.abort("killed by the test")

        task = asyncio.create_task(site.pipeline.run(work(1, 60), kill_after_two))
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(deltas) < 20
        await site.all_free()


async def test_a_bug_in_a_listener_fails_only_its_own_call(tmp_path):
    async with Site(tmp_path, "E/PD") as site:
        other = asyncio.create_task(run(site, work(0, 40)))
        await asyncio.sleep(0.02)

        def deliver(delta):
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await site.pipeline.run(work(0), deliver)
        assert len((await other)[0]) == 40
        await site.all_free()


async def test_an_orderly_stop_is_not_a_loss(tmp_path, caplog):
    async with Site(tmp_path, "E/PD"):
        pass
    assert "is gone" not in caplog.text


class Decoding:
    """Gives every item out as a ticket, and says which offers are still open."""

    def __init__(self):
        self.made, self.open = 0, 0

    async def offer(self, items, salt):
        self.made += 1
        self.open += 1
        return Offered(self, items, self.made)


class Offered:
    def __init__(self, decoding, items, number):
        self.decoding = decoding
        self.items = [
            MediaItem("image", item.at, b"", prepared=PreparedItem(META, ticket(number), 1))
            for item in items
        ]

    def close(self):
        self.decoding.open -= 1


META = MediaMeta(b"k" * 32, 4)


@pytest.mark.parametrize("pattern", ["EPD", "E/PD", "E/P/D", "EP/D"])
async def test_media_decoded_in_the_frontend_are_released_after_the_encoders_answer(
    tmp_path, pattern
):
    async with Site(tmp_path, pattern) as site:
        decoding = site.pipeline._decoding = Decoding()
        open_at = []

        def deliver(delta):
            open_at.append(decoding.open)

        site.prepared = True
        spent = await site.pipeline.run(work(2, tokens=6), deliver)
        assert "prepare" in spent
        assert len(open_at) == 6
        assert set(open_at[1:]) == {0}, "while the answer streams nothing is held"
        [first, *_] = [job for name, job in site.jobs if "E" in name]
        assert not any(item.data for item in first.work.media)
        assert any(item.prepared is not None for item in first.work.media)
        assert "prepare" not in await site.pipeline.run(work(0), deliver)
        assert (decoding.made, decoding.open) == (1, 0)


async def test_a_migrated_request_decodes_again(tmp_path):
    async with Site(tmp_path, "E*2/PD*2") as site:
        decoding = site.pipeline._decoding = Decoding()
        site.prepared = True
        ids, closing = [], []

        def deliver(delta):
            ids.extend(delta.ids)
            if len(ids) == 2:
                [name] = {name for name, _ in site.jobs if name.startswith("PD")}
                closing.append(asyncio.ensure_future(site.servers[name].close()))

        await site.pipeline.run(work(1, tokens=8), deliver)
        assert ids == [100 + i for i in range(8)]
        assert (decoding.made, decoding.open) == (2, 0)


class RelayedSite(Site):
    """Somebody on the network before one worker passes the hello through and changes answers."""

    async def announced(self, name, address):
        if name != "EPD-0":
            return address
        self.relay = Relay(Planes().named("tcp"), address, to_caller=self.change)
        self.scope.push_async_callback(self.relay.close)
        return await self.relay.start()

    def change(self, frame, back):
        if kind_of(frame) != FrameKind.ANSWERS:
            return (frame,)
        changed = frame.replace(b"\x91\x65", b"\x91\x66")  # token 101 becomes 102
        self.changed = self.changed or changed != frame
        return (changed,)

    changed = False


@pytest.mark.parametrize("resumes", [False, True])
async def test_f24_a_request_through_a_relay_continues_elsewhere_with_the_right_tokens(
    tmp_path, resumes
):
    """Proved with the check of the tag in ``Inbox.take`` off: the forged token is given out."""
    async with RelayedSite(tmp_path, "EPD*2", resumes=resumes) as site:
        while not site.changed:  # in turn
            ids, deltas, _ = await run(site, work(1))
            assert ids == [100, 101, 102, 103]
            assert deltas[-1].finish == "length"
        await site.all_free()
