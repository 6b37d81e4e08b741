"""Uploads: stored under unguessable ids, by tenant, for a while, within a limit."""

import re
import time

import pytest

from triptych.errors import (
    MediaDisabled,
    MediaNotFound,
    MediaTooLarge,
    Overloaded,
    UnknownMediaUUID,
)
from triptych.sources import uploads as module
from triptych.sources.uploads import UPLOAD_OVERHEAD, UploadStore


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def test_gives_a_handle_and_then_the_bytes():
    uploads = UploadStore(1 << 20, 60)
    upload = uploads.put("a", b"picture")
    assert re.fullmatch(r"media://[0-9a-f]{32}", upload.id)
    assert upload.size == 7
    assert 0 < upload.expires - time.time() <= 60
    assert uploads.get("a", upload.id) == b"picture"
    assert uploads.put("a", b"picture").id != upload.id


def test_another_tenants_handle_is_as_unknown_as_one_that_never_was():
    uploads = UploadStore(1 << 20, 60)
    upload = uploads.put("a", b"secret")
    with pytest.raises(MediaNotFound) as theirs:
        uploads.get("b", upload.id)
    with pytest.raises(MediaNotFound) as none:
        uploads.get("b", "media://" + "0" * 32)
    assert theirs.value.failure() == none.value.failure()
    assert theirs.value.status == 404
    with pytest.raises(MediaNotFound):
        uploads.drop("b", upload.id)
    assert uploads.get("a", upload.id) == b"secret"


def test_a_deleted_upload_is_gone_and_frees_its_bytes():
    uploads = UploadStore(UPLOAD_OVERHEAD + 10, 60)
    upload = uploads.put("a", b"x" * 10)
    uploads.drop("a", upload.id)
    assert uploads.held == 0
    with pytest.raises(MediaNotFound):
        uploads.get("a", upload.id)
    with pytest.raises(MediaNotFound):
        uploads.drop("a", upload.id)
    uploads.put("a", b"y" * 10)


def test_expires_by_its_own_clock():
    clock = Clock()
    uploads = UploadStore(1 << 20, 60, clock=clock)
    upload = uploads.put("a", b"x")
    clock.now += 59
    assert uploads.get("a", upload.id) == b"x"
    clock.now += 1
    with pytest.raises(MediaNotFound):
        uploads.get("a", upload.id)
    assert (uploads.held, len(uploads)) == (0, 0)


def test_a_full_store_drops_expired_uploads_or_refuses():
    clock = Clock()
    uploads = UploadStore(2 * (UPLOAD_OVERHEAD + 10), 60, clock=clock)
    uploads.put("a", b"x" * 10)
    clock.now += 30
    second = uploads.put("a", b"y" * 10)
    with pytest.raises(Overloaded):
        uploads.put("b", b"z")
    assert uploads.get("a", second.id) == b"y" * 10
    clock.now += 30
    third = uploads.put("b", b"z" * 10)
    assert uploads.get("b", third.id) == b"z" * 10
    assert uploads.get("a", second.id) == b"y" * 10
    assert uploads.held == 2 * (UPLOAD_OVERHEAD + 10)


def test_one_tenant_cannot_fill_the_store():
    uploads = UploadStore(10 * UPLOAD_OVERHEAD, 60, share=5 * UPLOAD_OVERHEAD)
    ids = [uploads.put("a", b"").id for _ in range(5)]
    with pytest.raises(Overloaded):
        uploads.put("a", b"")
    with pytest.raises(MediaTooLarge):
        uploads.put("b", bytes(5 * UPLOAD_OVERHEAD))
    for _ in range(5):
        uploads.put("b", b"")
    with pytest.raises(Overloaded):
        uploads.put("c", b"")
    uploads.drop("a", ids[0])
    uploads.put("c", b"")


def test_many_tiny_uploads_are_bounded_too():
    uploads = UploadStore(10 * UPLOAD_OVERHEAD, 60)
    for _ in range(10):
        uploads.put("a", b"")
    with pytest.raises(Overloaded):
        uploads.put("a", b"")


def test_what_can_never_fit_is_too_large():
    with pytest.raises(MediaTooLarge):
        UploadStore(1000, 60).put("a", b"x" * 1000)
    with pytest.raises(MediaDisabled):
        UploadStore(0, 60).put("a", b"x")


# --- media with a uuid


def test_media_with_a_uuid_are_found_by_their_tenant_until_they_expire():
    now = 0.0
    store = UploadStore(10_000, 60, clock=lambda: now)
    store.remember("a", "cat", b"1")
    assert store.recall("a", "cat") == b"1"
    with pytest.raises(UnknownMediaUUID):
        store.recall("b", "cat")
    store.remember("a", "cat", b"22")
    assert store.recall("a", "cat") == b"22"
    assert store.held == 2 + UPLOAD_OVERHEAD
    now = 61.0
    with pytest.raises(UnknownMediaUUID):
        store.recall("a", "cat")
    assert store.held == 0


def test_media_with_a_uuid_give_way_and_uploads_do_not():
    size = 1000
    store = UploadStore(3 * (size + UPLOAD_OVERHEAD), 60)
    for name in "abc":
        store.remember("t", name, bytes(size))
    store.recall("t", "a")  # b is the least recently used now
    upload = store.put("t", bytes(size))
    with pytest.raises(UnknownMediaUUID):
        store.recall("t", "b")
    assert store.recall("t", "a") == store.recall("t", "c") == bytes(size)
    store.put("t", bytes(size))
    store.put("t", bytes(size))
    store.remember("t", "d", bytes(size))  # no room left
    with pytest.raises(UnknownMediaUUID):
        store.recall("t", "d")
    assert store.get("t", upload.id) == bytes(size)
    with pytest.raises(Overloaded):
        store.put("t", b"")


def test_a_tenant_drops_only_its_own_while_its_share_is_full():
    cost = 1000 + UPLOAD_OVERHEAD
    store = UploadStore(4 * cost, 60, share=2 * cost)
    store.remember("a", "1", bytes(1000))
    for name in "123":
        store.remember("b", name, bytes(1000))
    assert store.recall("a", "1")
    with pytest.raises(UnknownMediaUUID):
        store.recall("b", "1")
    store.remember("b", "4", bytes(3 * cost))  # can never fit, and drops nothing
    assert store.recall("b", "2")
    assert store.recall("b", "3")


def test_what_is_not_stored_costs_nothing():
    store = UploadStore(0, 60)
    store.remember("a", "cat", b"1")
    assert store.held == 0


def test_the_number_of_uuids_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_NAMED", 3)
    store = UploadStore(1 << 20, 60)
    for name in "abcd":
        store.remember("t", name, b"1")
    with pytest.raises(UnknownMediaUUID):
        store.recall("t", "a")
    assert store.held == 3 * (1 + UPLOAD_OVERHEAD)
