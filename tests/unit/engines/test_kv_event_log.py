"""Which media are in which block, as it is reported."""

from triptych.engines.block_pool import KvEventLog, media_in_blocks
from triptych.messages import KvRemoved, MediaSpan

ONE, TWO = MediaSpan(b"1", 3, 6), MediaSpan(b"2", 9, 2)


def test_an_item_is_named_in_every_block_that_it_stands_in():
    assert media_in_blocks([TWO, ONE], 0, 16, 4) == (
        ((b"1", 3),),
        ((b"1", 3),),
        ((b"1", 3), (b"2", 9)),
        (),
    )


def test_offsets_count_from_the_first_reported_token():
    assert media_in_blocks([ONE, TWO], 8, 16, 4) == (((b"1", -5), (b"2", 1)), ())
    assert media_in_blocks([ONE, TWO], 4, 8, 4) == (((b"1", -1),),)


def test_where_none_stands_nothing_is_said():
    assert media_in_blocks([ONE, TWO], 12, 20, 4) == ()
    assert media_in_blocks([ONE], 0, 0, 4) == ()


def test_an_item_ends_where_it_ends():
    assert media_in_blocks([MediaSpan(b"1", 0, 4)], 0, 8, 4) == (((b"1", 0),), ())
    assert media_in_blocks([MediaSpan(b"1", 4, 4)], 0, 4, 4) == ()


def test_nothing_is_logged_without_a_listener():
    kv_events = KvEventLog(4)
    kv_events.record_removed(bytes(8))
    assert kv_events.drain() == []
    kv_events.enabled = True
    kv_events.record_removed(b"\1" + bytes(31))
    kv_events.record_removed(b"\2" + bytes(31))
    assert kv_events.drain() == [KvRemoved((1, 2))]
    assert kv_events.drain() == []
