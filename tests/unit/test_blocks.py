"""What distinguishes the blocks of prompts, for routing."""

from triptych.blocks import hash_blocks, hash_salt

KEY, OTHER = b"k" * 32, b"o" * 32
IDS = list(range(12))


def of(tokens=IDS, salt="", media=(), size=4):
    return list(hash_blocks(hash_salt(salt), tokens, size, media))


def test_only_full_blocks_have_names():
    assert len(of()) == 3
    assert len(of(IDS[:11])) == 2
    assert of(IDS[:3]) == []


def test_a_name_depends_on_all_that_comes_before():
    changed = of([99, *IDS[1:]])
    assert not set(changed) & set(of())
    assert of([*IDS[:11], 99])[:2] == of()[:2]


def test_tenants_share_no_name():
    assert not set(of(salt="a")) & set(of(salt="b"))


def test_media_key_and_offset_distinguish_block_hashes():
    with_key = of(media=[[], [(KEY, 5)], [(KEY, 5)]])
    assert with_key[0] == of()[0]
    assert with_key[1:] != of(media=[[], [(OTHER, 5)], [(OTHER, 5)]])[1:]
    assert with_key[1] != of(media=[[], [(KEY, 6)], []])[1]


def test_a_prompt_can_be_named_in_pieces():
    """As a worker hears of it: an item that began in an earlier piece has a negative index."""
    whole = of(media=[[], [(KEY, 5)], [(KEY, 5)]])
    first = of(IDS[:8], media=[[], [(KEY, 5)]])
    rest = list(hash_blocks(first[-1], IDS[8:], 4, [[(KEY, -3)]]))
    assert first + rest == whole
