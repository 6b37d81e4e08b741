"""Which media stand in which block, as it is told."""

from triptych.engines.journal import Journal, standing
from triptych.messages import KvRemoved, MediaPlace

ONE, TWO = MediaPlace(b"1", 3, 6), MediaPlace(b"2", 9, 2)


def test_an_item_is_named_in_every_block_that_it_stands_in():
    assert standing([TWO, ONE], 0, 16, 4) == (
        ((b"1", 3),),
        ((b"1", 3),),
        ((b"1", 3), (b"2", 9)),
        (),
    )


def test_places_count_from_the_first_token_that_is_told():
    assert standing([ONE, TWO], 8, 16, 4) == (((b"1", -5), (b"2", 1)), ())
    assert standing([ONE, TWO], 4, 8, 4) == (((b"1", -1),),)


def test_where_none_stands_nothing_is_said():
    assert standing([ONE, TWO], 12, 20, 4) == ()
    assert standing([ONE], 0, 0, 4) == ()


def test_an_item_ends_where_it_ends():
    assert standing([MediaPlace(b"1", 0, 4)], 0, 8, 4) == (((b"1", 0),), ())
    assert standing([MediaPlace(b"1", 4, 4)], 0, 4, 4) == ()


def test_nothing_is_written_while_nobody_listens():
    journal = Journal(4)
    journal.removed(bytes(8))
    assert journal.take() == []
    journal.listening = True
    journal.removed(b"\1" + bytes(31))
    journal.removed(b"\2" + bytes(31))
    assert journal.take() == [KvRemoved((1, 2))]
    assert journal.take() == []
