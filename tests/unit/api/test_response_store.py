"""Stored answers: bounds, expiry, tenants, and conversations over several of them."""

import msgspec
import pytest

from triptych.api.response_objects import ResponsesFormat
from triptych.api.response_requests import ResponseRequest
from triptych.api.response_store import (
    ENTRY_OVERHEAD,
    EarlierTurns,
    ResponseStore,
    StoredResponse,
    called_functions,
)
from triptych.errors import ResponseNotFound
from triptych.prompt.chat_options import EarlierCall, TurnDetails
from triptych.prompt.processor import ChatTurn, MediaPart, TextPart


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def turn(text):
    return ChatTurn("user", text)


def stored(id, *turns, previous=None):
    request = ResponseRequest(model="m", input="Hi", previous_response_id=previous)
    shape = ResponsesFormat(request, bytes, None).response(id, 1, "m", [])
    return StoredResponse(shape, turns or (turn(id),))


def known(store, tenant, *ids):
    found = []
    for id in ids:
        try:
            store.get(tenant, id)
        except ResponseNotFound:
            continue
        found.append(id)
    return found


def test_b60_a_response_belongs_to_its_tenant():
    store = ResponseStore(9, 1 << 20, 60)
    store.put("a", stored("r1"))
    assert store.get("a", "r1").turns == (turn("r1"),)
    for tenant, id in (("b", "r1"), ("", "r1"), ("a", "r2")):
        with pytest.raises(ResponseNotFound):
            store.conversation(tenant, id)


def test_a_conversation_has_the_turns_of_all():
    store = ResponseStore(9, 1 << 20, 60)
    store.put("a", stored("r1", turn("1"), turn("2")))
    store.put("a", stored("r2", turn("3"), previous="r1"))
    store.put("a", stored("r3", turn("4"), previous="r2"))
    store.put("a", stored("other"))
    assert [t.content for t in store.conversation("a", "r3")] == ["1", "2", "3", "4"]
    assert [t.content for t in store.conversation("a", "r2")] == ["1", "2", "3"]


def test_the_count_is_bounded_and_the_least_recently_used_goes():
    store = ResponseStore(3, 1 << 20, 60)
    for id in ("r1", "r2", "r3"):
        store.put("a", stored(id))
    store.conversation("a", "r1")
    store.put("a", stored("r4"))
    assert known(store, "a", "r1", "r2", "r3", "r4") == ["r1", "r3", "r4"]


def test_the_end_of_a_conversation_goes_before_its_beginning():
    store = ResponseStore(3, 1 << 20, 60)
    store.put("a", stored("r1"))
    store.put("a", stored("r2", previous="r1"))
    store.put("a", stored("r3", previous="r2"))
    store.conversation("a", "r3")
    store.put("a", stored("r4", previous="r2"))
    assert known(store, "a", "r1", "r2", "r3", "r4") == ["r1", "r2", "r4"]


def test_bytes_are_bounded_with_media():
    picture = ChatTurn("user", (MediaPart("image", "file", bytes(50_000)), TextPart("x")))
    store = ResponseStore(99, 120_000, 60)
    for id in ("r1", "r2", "r3"):
        store.put("a", stored(id, picture))
    assert known(store, "a", "r1", "r2", "r3") == ["r2", "r3"]
    assert 100_000 + 2 * ENTRY_OVERHEAD < store.held <= 120_000
    big = ChatTurn("user", (MediaPart("image", "file", bytes(200_000)),))
    store.put("a", stored("r4", big))
    assert known(store, "a", "r2", "r3", "r4") == ["r2", "r3"]  # it would fit never


def test_a_tenant_has_a_share():
    store = ResponseStore(99, 200_000, 60, share=100_000)
    store.put("b", stored("other", turn("x" * 40_000)))
    for id in ("r1", "r2", "r3"):
        store.put("a", stored(id, turn("x" * 40_000)))
    assert known(store, "a", "r1", "r2", "r3") == ["r2", "r3"]
    assert known(store, "b", "other") == ["other"]


def test_responses_expire_after_their_last_use():
    clock = Clock()
    store = ResponseStore(9, 1 << 20, 60, clock=clock)
    store.put("a", stored("r1"))
    store.put("a", stored("r2"))
    clock.now = 50
    store.conversation("a", "r1")
    clock.now = 70
    assert known(store, "a", "r1", "r2") == ["r1"]
    clock.now = 200
    assert len(store) == store.held == 0


@pytest.mark.parametrize("limits", [(0, 1 << 20), (9, 0)])
def test_a_store_of_nothing(limits):
    store = ResponseStore(*limits, 60)
    assert not store.enabled
    store.put("a", stored("r1"))
    assert len(store) == 0


def test_earlier_turns_come_after_the_instructions():
    own = (turn("instructions"), turn("new"))
    conversation = EarlierTurns((turn("1"), turn("2")), instructed=True)
    assert conversation.place("messages[1].content[2]") == "messages[1].content[2]"
    joined = conversation.join(own)
    assert [t.content for t in joined] == ["instructions", "1", "2", "new"]
    assert conversation.own == own[1:]
    assert conversation.place("messages[3].content[2]") == "messages[1].content[2]"
    assert conversation.place("messages[1]") == "previous_response_id"
    assert conversation.place("messages[0]") == "messages[0]"
    assert conversation.place("messages") == "messages"
    assert conversation.place(None) is None


def test_called_functions():
    details = TurnDetails(calls=(EarlierCall("c1", "look", "{}", {}),))
    assert called_functions([turn("x"), ChatTurn("assistant", "", details)]) == {"c1": "look"}
    assert msgspec.json.encode(stored("r1").response)
