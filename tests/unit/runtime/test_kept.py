"""What is kept, what goes first, and what is not kept at all."""

from triptych.runtime.caching import LRUCache


def test_the_longest_unused_goes_first_and_is_given_back():
    kept = LRUCache(100)
    for key in "abcd":
        assert kept.keep(key, key.upper(), 25) == []
    assert kept.find("a") == "A"
    assert kept.keep("e", "E", 45) == ["B", "C"]
    assert [key for key in "abcde" if kept.find(key)] == ["a", "d", "e"]
    assert (kept.bytes, kept.evictions, sorted(kept.values)) == (95, 2, ["A", "D", "E"])


def test_what_is_too_large_is_not_kept_and_costs_no_other_its_place():
    kept = LRUCache(100, largest=25)
    kept.keep("a", "A", 25)
    assert kept.keep("b", "B", 26) == []
    assert (kept.find("a"), kept.find("b")) == ("A", None)
    for nothing in (LRUCache(0), LRUCache(0, largest=100), LRUCache(100, largest=0)):
        nothing.keep("a", "A", 1)
        assert len(nothing) == nothing.bytes == nothing.evictions == 0


def test_what_is_there_stays_until_it_is_dropped():
    kept = LRUCache(100)
    kept.keep("a", "old", 10)
    assert kept.keep("a", "new", 20) == []
    assert (kept.find("a"), kept.bytes) == ("old", 10)
    kept.drop("a")
    kept.drop("a")
    kept.keep("a", "new", 20)
    assert (kept.find("a"), kept.bytes, kept.evictions) == ("new", 20, 0)
    kept.clear()
    assert (kept.find("a"), kept.bytes) == (None, 0)


def test_there_are_never_more_than_may_be():
    kept = LRUCache(100, most=2)
    gone = [kept.keep(number, number, 1) for number in range(4)]
    assert gone == [[], [], [0], [1]]
    assert len(kept) == kept.bytes == 2
