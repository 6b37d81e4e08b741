import pytest

from triptych.messages import MediaItem, Sampling, Work
from triptych.pipeline.plan import plan
from triptych.topology import Topology


def work(items):
    media = tuple(MediaItem("image", i, b"x") for i in range(items))
    return Work("w", tuple(range(8)), media, Sampling(seed=1))


@pytest.mark.parametrize(
    ("pattern", "items", "steps"),
    [
        ("EPD", 0, [[("EPD", ())]]),
        ("EPD", 2, [[("EPD", (0, 1))]]),
        ("E/PD", 0, [[("PD", ())]]),
        ("E/PD", 1, [[("E", (0,))], [("PD", ())]]),
        ("E*2/PD", 3, [[("E", (0,)), ("E", (1,)), ("E", (2,))], [("PD", ())]]),
        ("E/P/D", 0, [[("P", ())], [("D", ())]]),
        ("E/P/D", 1, [[("E", (0,))], [("P", ())], [("D", ())]]),
        ("EP/D", 0, [[("EP", ())], [("D", ())]]),
        ("EP/D", 2, [[("EP", (0, 1))], [("D", ())]]),
    ],
)
def test_a_plan_is_the_topology_less_what_the_work_does_not_need(pattern, items, steps):
    planned = plan(work(items), Topology.parse(pattern))
    assert [[(hop.role, hop.items) for hop in step] for step in planned] == steps


@pytest.mark.parametrize(
    ("pattern", "only_decode"),
    [
        ("E/P/D", True),
        ("EP/D*2", True),
        ("E/PD", False),  # the decode worker prefills anyway
        ("EPD", False),
    ],
)
def test_a_decode_worker_with_the_prompt_in_its_cache_is_the_only_hop(pattern, only_decode):
    topology = Topology.parse(pattern)
    planned = plan(work(2), topology, from_cache=True)
    if only_decode:
        [[hop]] = planned
        assert (hop.role, hop.items, hop.from_cache) == ("D", (), True)
    else:
        assert planned == plan(work(2), topology)
