from collections import Counter
from dataclasses import dataclass

from triptych.pipeline.router import ROUTINGS


@dataclass
class Peer:
    name: str
    load: int = 0


def test_round_robin_takes_turns():
    peers = [Peer("a"), Peer("b"), Peer("c")]
    choose = ROUTINGS["round-robin"]()
    assert [choose(peers).name for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]


def test_random_reaches_everyone():
    peers = [Peer("a"), Peer("b")]
    choose = ROUTINGS["random"]()
    assert set(Counter(choose(peers).name for _ in range(100))) == {"a", "b"}


def test_least_loaded_takes_the_idlest_and_takes_turns_among_equals():
    choose = ROUTINGS["least-loaded"]()
    assert choose([Peer("a", 3), Peer("b", 1), Peer("c", 2)]).name == "b"
    peers = [Peer("a"), Peer("b")]
    assert Counter(choose(peers).name for _ in range(10)) == {"a": 5, "b": 5}
