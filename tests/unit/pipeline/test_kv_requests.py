"""Requests go where their KV cache is: workers that cache blocks and report them."""

import asyncio
from collections import Counter

import msgspec
import pytest

from support.site import CachingSite
from triptych.errors import WorkerLost
from triptych.messages import MediaItem, Sampling, Work
from triptych.pipeline.kv.routing import KvRouting
from triptych.pipeline.membership import Membership
from triptych.pipeline.router import sample_digest

TEXT = tuple(range(1, 30))


def work(prompt=TEXT, media=(), salt="", tokens=3):
    return Work("w", tuple(prompt), tuple(media), Sampling(seed=1, max_tokens=tokens), salt)


def about(picture, question=0):
    """A question about a picture that stands behind ten tokens."""
    item = MediaItem("image", 10, picture)
    return work((*TEXT[:10], 99, *(1000 * question + t for t in TEXT[:12])), (item,))


async def ask(site, one):
    """Give the worker that prefilled it."""
    ids = []
    before = len(site.jobs)
    await site.pipeline.run(one, lambda delta: ids.extend(delta.ids))
    assert ids == [100, 101, 102]
    await site.all_free()
    assert not any(peer.prefilling for peer in site.membership.peers)
    jobs = site.jobs[before:]
    [name] = [name for name, job in jobs if "P" in name or job.cached_media is not None]
    return name


def kill(site):
    """The worker that was called last."""
    for caller in list(site.servers[site.jobs[-1][0]].callers):
        caller.abort("killed by the test")


@pytest.mark.parametrize("pattern", ["EPD*3", "E/PD*3", "E/P*3/D*2", "EP*3/D"])
async def test_the_second_question_about_a_picture_goes_where_the_first_went(tmp_path, pattern):
    """Proved by ``--routing least-loaded`` in the site: they take turns."""
    async with CachingSite(tmp_path, pattern) as site:
        for picture in (b"sea", b"hill", b"town", b"lake"):
            first = await ask(site, about(picture))
            await site.heard()
            for question in range(1, 4):
                assert await ask(site, about(picture, question)) == first
                await site.heard()
                assert site.cached[-1] >= 12  # beyond the text before it
        assert site.kv.counters["matched_blocks"] > 0
        assert site.kv.counters["changes_missed"] == 0


async def test_a_tenant_never_gets_blocks_of_another(tmp_path):
    """Proved by ``blocks.root("")`` in the chain: the second tenant is sent after the first."""
    async with CachingSite(tmp_path, "EPD*2") as site:
        for salt in ("one", "two", "three", "four"):
            await ask(site, work(salt=salt))
            await site.heard()
        assert site.kv.counters["matched_blocks"] == 0
        assert set(site.cached) == {0}
        assert {name for name, _ in site.jobs} == {"EPD-0", "EPD-1"}
        await ask(site, work(salt="one"))
        assert site.cached[-1] == 28


async def test_requests_that_come_together_stay_together_before_events_arrive(tmp_path):
    """Proved by leaving out ``kv.sent`` in the visit: they spread over all."""
    async with CachingSite(tmp_path, "EPD*4") as site:
        site.change = lambda *_, **__: None  # no worker reports anything
        long = work(range(400))
        await asyncio.gather(*(site.pipeline.run(long, lambda _: None) for _ in range(4)))
        assert len({name for name, _ in site.jobs}) == 1
        assert site.kv.counters["predicted_blocks"] == 3 * 99


async def test_a_lost_change_costs_hits_and_a_snapshot_is_requested(tmp_path):
    """F21. Proved by leaving out the close in ``cache_watch``: no frontend subscribes again."""
    async with CachingSite(tmp_path, "EPD*2") as site:
        name = await ask(site, work())
        await site.heard()
        assert sorted(site.watches) == ["EPD-0", "EPD-1"]
        site.kept[name].clear()
        site.change(name, gone=[1], skip=1)
        await site.heard()
        assert sorted(site.watches) == sorted(["EPD-0", "EPD-1", name])
        await ask(site, work())
        assert site.cached[-1] == 0
        await site.heard()
        assert await ask(site, work()) == (await ask(site, work()))
        assert site.cached[-1] == 28


async def test_a_worker_that_leaves_is_forgotten_and_subscribed_again_on_return(tmp_path):
    """Proved by leaving out ``kv.drop`` in the membership: its blocks stay in the index."""
    async with CachingSite(tmp_path, "EPD*2") as site:
        name = await ask(site, work())
        await site.heard()
        for caller in list(site.servers[name].callers):
            caller.abort("broken by the test")
        async with asyncio.timeout(5):
            while site.kv.index.reported:
                await asyncio.sleep(0.001)
        await site.heard()  # it was reached again, and sent a snapshot
        assert await ask(site, work()) == name
        assert site.cached[-1] == 28


async def test_a_new_frontend_catches_up_and_agrees(tmp_path):
    async with CachingSite(tmp_path, "EPD*3") as site:
        names = {}
        for start in range(0, 3000, 1000):
            one = work(range(start, start + 30))
            names[start] = await ask(site, one)
            await site.heard()
        kv = KvRouting(site.kv.settings)
        secret = site.membership._secret
        other = Membership(site.topology, site.directory, secret, "kv", "m", kv=kv)
        async with other, asyncio.timeout(10):
            while kv.index.reported != site.kv.index.reported:
                await asyncio.sleep(0.01)
            site.pipeline._membership, site.pipeline._kv = other, kv
            for start, name in names.items():
                assert await ask(site, work(range(start, start + 30))) == name
        assert kv.index.reported == site.kv.index.reported  # ours to the end


async def test_without_events_requests_go_where_others_like_them_went(tmp_path):
    """No worker is asked to report. Proved by leaving out ``_expect_cached``: what a picture became
    is known, but not that it is cached."""
    async with CachingSite(tmp_path, "EPD*3", events=False) as site:
        for picture in (b"sea", b"hill", b"town"):
            first = await ask(site, about(picture))
            for question in range(1, 3):
                assert await ask(site, about(picture, question)) == first
                assert site.cached[-1] >= 12
        assert site.watches == []
        assert site.kv.counters["indexed_blocks"] == 0
        text = range(500, 530)
        for one, matched in ((text, 0), ((*text, 100, 101, 7, 8), 8)):  # with the answer: 8 full
            before = site.kv.counters
            await ask(site, work(one))
            after = site.kv.counters
            for what in ("predicted_blocks", "matched_blocks"):
                assert after[what] - before[what] == matched


async def test_without_events_nothing_is_expected_of_a_worker_that_is_lost_at_the_end(tmp_path):
    """Proved by leaving out ``ready`` in ``_expect_cached``: it draws requests once it is back."""
    async with CachingSite(tmp_path, "EPD*2", events=False) as site:

        def kill_at_the_finish(delta):
            if delta.finish:
                kill(site)

        await site.pipeline.run(work(), kill_at_the_finish)
        assert site.kv.counters["expected_blocks"] == 0


async def test_a_watcher_does_not_delay_a_worker_that_stops(tmp_path):
    """Its call would keep it from draining. Proved by leaving out ``stop_watching_cache``: drain
    takes its whole time."""
    async with CachingSite(tmp_path, "EPD*2") as site:
        async with asyncio.timeout(5):
            while len(site.watches) < 2:
                await asyncio.sleep(0.01)
        for peer in site.membership.peers:
            peer.mark_draining()
        async with asyncio.timeout(5):
            while any(site.ears.values()):
                await asyncio.sleep(0.01)


async def test_a_worker_that_reports_no_cache_serves_all_the_same(tmp_path, caplog):
    async with CachingSite(tmp_path, "EPD*2") as site:

        async def ends_at_once(name, reply):
            site.watches.append(name)

        site.tell = ends_at_once
        for caller in list(site.servers["EPD-0"].callers):
            caller.abort("so that it is watched anew")
        async with asyncio.timeout(10):
            while site.watches.count("EPD-0") < 3:
                await asyncio.sleep(0.01)
        await ask(site, work())


@pytest.mark.parametrize("pattern", ["E/P/D*3", "EP/D*3"])
async def test_a_decode_worker_that_holds_the_start_prefills_the_rest(tmp_path, pattern):
    """Proved by False in ``_has_prompt_cached``: P is asked every time."""
    async with CachingSite(tmp_path, pattern, max_local_prefill=8) as site:
        await ask(site, about(b"sea"))
        [holder] = [name for name, _ in site.jobs if name.startswith("D")]
        await site.heard()
        more = about(b"sea")
        more = work((*more.prompt, *range(70, 78)), more.media)  # the next turn
        assert await ask(site, more) == holder
        assert site.jobs[-1][1].cached_media
        assert not any(item.data for item in site.jobs[-1][1].work.media)
        assert site.kv.counters["decode_only"] == 1
        long = work((*more.prompt, *range(80, 120)), more.media)
        assert "P" in await ask(site, long)  # too much is left
        assert "P" in await ask(site, about(b"hill"))  # another picture
        ranked = msgspec.structs.replace(more.sampling, prompt_logprobs=0)
        ranked = msgspec.structs.replace(more, sampling=ranked)
        assert "P" in await ask(site, ranked)  # a cache has no logits
        assert site.kv.counters["decode_only"] == 1


async def test_an_idle_worker_that_decodes_gets_its_share_of_prompts_that_another_holds(tmp_path):
    """It has come without the prefix that all have in common. Proved by the least that is left in
    ``best_can_prefill``: the other one gets all."""
    async with CachingSite(tmp_path, "E/P/D*2") as site:
        await ask(site, work(TEXT[:6]))
        [holder] = [name for name, _ in site.jobs if name.startswith("D")]
        await site.heard()
        site.jobs.clear()
        short = [work((*TEXT[:4], 100 + i)) for i in range(40)]
        await asyncio.gather(*(site.pipeline.run(one, lambda _: None) for one in short))
        got = Counter(name for name, _ in site.jobs)
        assert got[holder] >= 10
        assert got["D-0"] + got["D-1"] == 40
        assert got["D-0"] + got["D-1"] - got[holder] >= 10
        await site.all_free()


@pytest.mark.parametrize(("lost_after", "alone"), [(3, True), (20, False)])
async def test_generated_tokens_count_in_what_is_left_to_prefill(tmp_path, lost_after, alone):
    """The decode worker holds the prompt, not what another generated. Proved by ``()`` for it in
    ``KvRouting.hash_prompt``: D is asked to prefill all of it."""
    site = CachingSite(tmp_path, "EP/D*2", max_local_prefill=8)
    site.resumes = True
    async with site:
        await ask(site, work())
        for name in ("D-0", "D-1"):
            site.kept[name] = dict(site.kept["EP-0"])
            site.change(name, site.kept[name])
        await site.heard()
        site.jobs.clear()
        ids = []

        def deliver(delta):
            ids.extend(delta.ids)
            if len(ids) == lost_after:
                kill(site)

        await site.pipeline.run(work(tokens=30), deliver)
        assert ids == [100 + i for i in range(30)]
        asked = [(name[:-2], len(job.work.generated)) for name, job in site.jobs]
        again = ["D"] if alone else ["EP", "D"]
        assert asked == [("D", 0), *((role, lost_after) for role in again)]
        await site.all_free()


@pytest.mark.parametrize("pattern", ["E/P/D", "EP/D"])
async def test_a_picture_is_not_confused_with_another_of_its_trait(tmp_path, pattern):
    """Frames of one camera: of one size, and different only where routing does not look. Proved
    without the digest in ``chain``: D is asked with the first one's key."""
    first = bytes(400_000)
    second = first[:1000] + b"a bird" + first[1006:]
    async with CachingSite(tmp_path, pattern) as site:
        one, other = about(first), about(second)
        assert sample_digest(one.media[0]) == sample_digest(other.media[0])
        await ask(site, one)
        await site.heard()
        assert "P" in await ask(site, other)
        assert site.kv.counters["decode_only"] == 0
        await site.heard()
        await ask(site, other)
        assert site.kv.counters["decode_only"] == 1


async def test_a_cache_that_is_gone_meanwhile_costs_one_more_attempt_only(tmp_path):
    """Proved by leaving PrefixGone out of FREE_RETRIES: after one loss the request fails."""
    async with CachingSite(tmp_path, "E/P/D") as site:
        await ask(site, about(b"sea"))
        await site.heard()
        site.kept["D-0"].clear()  # without a report
        usual, lost = site.answer, []

        async def loses_one(name, role, job, reply):
            if role == "P" and not lost:
                lost.append(name)
                raise WorkerLost("lost by the test")
            await usual(name, role, job, reply)

        site.answer = loses_one
        assert await ask(site, about(b"sea")) == "P-0"
        assert (site.kv.counters["decode_only"], lost) == (1, ["P-0"])
        await ask(site, about(b"sea"))


async def test_text_alone_needs_nothing_of_an_engine(tmp_path):
    async with CachingSite(tmp_path, "E/P/D") as site:
        await ask(site, work())
        await site.heard()
        for server in site.membership.peers:
            server.record = msgspec.structs.replace(server.record, can_prefill_from_cache=False)
        assert await ask(site, work()) == "D-0"
        await ask(site, about(b"sea"))
        await site.heard()
        assert "P" in await ask(site, about(b"sea"))
