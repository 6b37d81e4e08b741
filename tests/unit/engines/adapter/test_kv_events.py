"""What vLLM and SGLang publish of their caches, read from frames that vLLM has sent."""

import base64

import msgspec
import pytest

from triptych.engines.adapter.kv_events import BatchSequence, decode_kv_batch
from triptych.messages import KvCleared, KvRemoved, KvStored

# Recorded from vLLM 0.32: a prompt of 68 tokens with a picture of 6 tokens at 8, salted; a block
# that ends in its answer; and another prompt later, for which these had to go.
BEGUN = (
    "k8tB2r5wXA91X5GLpHR5cGWrQmxvY2tTdG9yZWSsYmxvY2tfaGFzaGVzks8SxZ9MwUTFTs/gW3JFk8U767FwYXJlbnRf"
    "YmxvY2tfaGFzaMCpdG9rZW5faWRz3ABAzIbM9c0BJ3TMpcyCzOLNB9PNB9bNB9bNB9bNB9bNB9bNB9bNB9TNASbM18zc"
    "zQEKzMXMmXzM4GvMx8zSzP/NASfNAShkzQEWzNbMqM0BHMyezPt+zLVraWrNAQrM7mbMxc0BE8ybzNDNAR1rzOvMnM0B"
    "J8zUzOLM8cyfzLzMn80BEcyczQEmzNnMrqpibG9ja19zaXplIKdsb3JhX2lkwKZtZWRpdW2jR1BVqWxvcmFfbmFtZcCq"
    "ZXh0cmFfa2V5c5KSktlRZTAxMDYxNDIxZWZhMzIxYTAxYjY4MDFhYzE1YjBhYjdkMzk5ZTc5MDUwNjlmMWM4YTRmYTcy"
    "YWZlYTRkOTk2NzplOWRhODZkMzUxY2Y5YTc2CKZ0ZW5hbnTAqWdyb3VwX2lkeACya3ZfY2FjaGVfc3BlY19raW5krmZ1"
    "bGxfYXR0ZW50aW9uAA=="
)
GONE_ON = (
    "k8tB2r5wXDazApGLpHR5cGWrQmxvY2tTdG9yZWSsYmxvY2tfaGFzaGVzkc+uYMqpa2DWKLFwYXJlbnRfYmxvY2tfaGFz"
    "aM/gW3JFk8U766l0b2tlbl9pZHPcACBpzM7M8s0BCM0CQs0CY80B480DqM0CvszazQRPzQcEzQHVzQYLzQN3zQHdOc0B"
    "5M0EJM0CjM0Bxs0FJs0FzM0Bxs0De80D78zCzQIEzQUEzQJQzQGoL6pibG9ja19zaXplIKdsb3JhX2lkwKZtZWRpdW2j"
    "R1BVqWxvcmFfbmFtZcCqZXh0cmFfa2V5c5HAqWdyb3VwX2lkeACya3ZfY2FjaGVfc3BlY19raW5krmZ1bGxfYXR0ZW50"
    "aW9uAA=="
)
REPLACED = (
    "k8tB2r5wXEkXPZaEpHR5cGWsQmxvY2tSZW1vdmVkrGJsb2NrX2hhc2hlc5HPrmDKqWtg1iimbWVkaXVto0dQValncm91"
    "cF9pZHgAhKR0eXBlrEJsb2NrUmVtb3ZlZKxibG9ja19oYXNoZXORz+BbckWTxTvrpm1lZGl1baNHUFWpZ3JvdXBfaWR4"
    "AISkdHlwZaxCbG9ja1JlbW92ZWSsYmxvY2tfaGFzaGVzkc8SxZ9MwUTFTqZtZWRpdW2jR1BVqWdyb3VwX2lkeACEpHR5"
    "cGWsQmxvY2tSZW1vdmVkrGJsb2NrX2hhc2hlc5HPX0GafVv9yS6mbWVkaXVto0dQValncm91cF9pZHgAhKR0eXBlrEJs"
    "b2NrUmVtb3ZlZKxibG9ja19oYXNoZXORz7IGEKmx1Rs1pm1lZGl1baNHUFWpZ3JvdXBfaWR4AIukdHlwZatCbG9ja1N0"
    "b3JlZKxibG9ja19oYXNoZXOcz6Tw2rEN4EQBz/PB/9L0jvxqz8DrJE9zHAs8z68CY2UpQsyEzzhasjp8XooYzyP/kmr3"
    "Tan4zyKweydzCS9Hz5wckv+fgU5Xz9PhviQG9uGqz+Sj5Y73R59szzDDFmCJ/dBpz4XWVosQLphgsXBhcmVudF9ibG9j"
    "a19oYXNowKl0b2tlbl9pZHPcAYDM3cyozQEMzOvNAQ7MvcyIzMVmzMPM38yqzQEIzNnNARTM/cyezPJkzQENzQEDzInM"
    "1MzCzI3MusyZc8z3zJd3zOfNARPMus0BEszLemhzzQENzObMnXvM0MzVzIDNAQ3M0MyGzO7MtM0BA8zyzI3NARZxzPLM"
    "j8zleczKzP/Mz80BD8z8zNzM3sz/zMbM7mvNAQjNAR15zJXNAQ3Mpsy/zMDNARTMxs0BEMyzzIHMpMygzLnMwczDzObM"
    "9s0BJ8zkzJFrzMXM0mzM6GrMnM0BEMzRb8zHzJjNASnM/37NASTM8MyczJF3zQEWzKptzNLMqszjzLzM/s0BB80BHXHM"
    "58zZzMLMmcy6zKzM2MzdzQEWzN/MocyOzNrM8MzBzJLMlM0BKM0BI8yczP9lzKjNASnMu8yRzKFmzORuzKPNAQLMgczA"
    "zO/M5MyLasy2zQEPzKvNAQfMgsyezOrM5MzezOHNAQTMvsynzQETzNXNASHMjczWzK7NAQFvzKvMuMznzQEHzQEWzNXN"
    "ARjMms0BH8yszOnMpWvNARJkzQEVasyFzPLMqMzPzIfMocyXzNPM3HPM88z1zQEDzQEczKbNASZuzM7M0sz6e8zLzJbM"
    "+MzyzLzMws0BB80BIMzGzPTMjWjNARTNARnMi2ttdszOzOzMl8zFfc0BGcy+zJTMs8ypzQEUzQETzO7M4c0BA80BAMyD"
    "zJrM7Mz9zQEXzQERzMjM+MyidszMzL/MtnnNARPMucyIzQETe80BHMyzzLPNARbMks0BJs0BEc0BDM0BB8zTzMHMkWvM"
    "mczgzQEDzNXM4MyRcs0BDsz8zLvM2MyhzLd8zJ1lzMDMwcyrzJfNARTM0syvzJzM6MyJzOTNARbMucyNzOTM2szHzP/M"
    "5M0BGMyjzNnM2XDNASnMnszMzO3NARbNASbMyczpzQEQzNTNAQ1xf8zxzPbNARLMs8y9zQEnzQEfaMy2zQEqzOPMwM0B"
    "BcyyzI/MhszezJ3M78yGzKTM4m/M0czBzK3MzM0BBMz9zKzMx8z/zLbMicyEzKbNAQhszQEMzP/MxMzNzNCqYmxvY2tf"
    "c2l6ZSCnbG9yYV9pZMCmbWVkaXVto0dQValsb3JhX25hbWXAqmV4dHJhX2tleXOcwMDAwMDAwMDAwMDAqWdyb3VwX2lk"
    "eACya3ZfY2FjaGVfc3BlY19raW5krmZ1bGxfYXR0ZW50aW9uAA=="
)
KEY = bytes.fromhex("e01061421efa321a01b6801ac15b0ab7d399e7905069f1c8a4fa72afea4d9967")
FIRST, SECOND, THIRD = 1352662415103542606, 16166640930534013931, 12565265789363476008


def recorded(text):
    [event] = decode_kv_batch(base64.b64decode(text))
    return event


def batch(**event):
    return msgspec.msgpack.encode([0.0, [event], 0])


def stored(**more):
    known = {"block_hashes": [1], "parent_block_hash": None, "token_ids": [5, 6], "block_size": 2}
    return batch(type="BlockStored", **(known | more))


def test_blocks_that_begin_a_prompt():
    event = recorded(BEGUN)
    assert isinstance(event, KvStored)
    assert event.blocks == (FIRST, SECOND)
    assert event.parent is None
    assert event.block_size == 32
    assert len(event.tokens) == 64
    assert event.tokens[:9] == (134, 245, 295, 116, 165, 130, 226, 2003, 2006)
    assert event.media == (((KEY, 8),), ())
    assert event.salt == "tenant"


def test_blocks_that_go_on():
    event = recorded(GONE_ON)
    assert isinstance(event, KvStored)
    assert (event.blocks, event.parent, event.media, event.salt) == ((THIRD,), SECOND, (), "")
    assert len(event.tokens) == 32


def test_blocks_that_went():
    *gone, stored = decode_kv_batch(base64.b64decode(REPLACED))
    assert gone[:3] == [KvRemoved((THIRD,)), KvRemoved((SECOND,)), KvRemoved((FIRST,))]
    assert isinstance(stored, KvStored)
    assert (len(stored.blocks), len(stored.tokens), stored.salt) == (12, 12 * 32, "")


def test_all_went():
    assert decode_kv_batch(batch(type="AllBlocksCleared")) == [KvCleared()]


def test_several_items_keep_their_places():
    far = [["aa" * 32, 1], ["bb" * 32, 3], "salt"]
    payload = stored(
        block_hashes=[1, 2],
        token_ids=list(range(8)),
        block_size=4,
        extra_keys=[far, [["bb" * 32, -1], ["cc" * 32, 2]]],
    )
    [event] = decode_kv_batch(payload)
    assert event.media == (
        ((b"\xaa" * 32, 1), (b"\xbb" * 32, 3)),
        ((b"\xbb" * 32, 3), (b"\xcc" * 32, 6)),
    )
    assert event.salt == "salt"


def test_an_item_that_began_before_these_blocks():
    [event] = decode_kv_batch(stored(parent_block_hash=7, extra_keys=[[["aa" * 32, -40]]]))
    assert event.media == (((b"\xaa" * 32, -40),),)


def test_what_is_added_to_a_key_is_not_of_it():
    key = "aa" * 32
    names = [[key, 1], [f"{key}:0123abcd", 1], [f"{key}:0123abcd:sound", 1], ["another's", 2]]
    [event] = decode_kv_batch(stored(extra_keys=[names]))
    assert event.media == (((b"\xaa" * 32, 1), (b"another's", 2)),)


def test_the_name_of_an_adapter_is_not_a_salt():
    [event] = decode_kv_batch(stored(lora_name="adapter", extra_keys=[["adapter", "salt"]]))
    assert event.salt == "salt"


def test_names_as_bytes_are_those_as_numbers():
    digest = bytes(24) + FIRST.to_bytes(8, "big")
    [event] = decode_kv_batch(stored(block_hashes=[digest], parent_block_hash=digest))
    assert event.blocks == (FIRST,)
    assert event.parent == FIRST


def test_sglangs_have_a_field_for_the_salt():
    [event] = decode_kv_batch(stored(lora_id=None, medium="GPU", cache_salt="tenant"))
    assert (event.salt, event.media) == ("tenant", ())


def test_what_lies_elsewhere_or_is_of_other_layers_is_left_out():
    assert decode_kv_batch(stored(medium="CPU")) == []
    assert decode_kv_batch(stored(group_idx=1)) == []
    assert len(decode_kv_batch(stored(group_idx=0, medium=None))) == 1


@pytest.mark.parametrize("payload", [b"", b"\x90", stored(block_size="2")], ids=["", "[]", "text"])
def test_a_body_that_is_not_a_batch_is_refused(payload):
    with pytest.raises(msgspec.DecodeError):
        decode_kv_batch(payload)


def test_batches_are_read_in_order_and_once():
    sequence = BatchSequence()
    assert [sequence.place(n) for n in (0, 1, 1, 0, 3, 2, 3)] == [
        "next", "next", "old", "old", "gap", "next", "next",
    ]  # fmt: skip
    assert sequence.missed == 0
    sequence.skip_to(9)
    assert (sequence.place(9), sequence.missed) == ("next", 5)
