"""Uploads: stored under unguessable ids, by tenant, for a while, within a limit."""

import re
import time

import pytest

from triptych.errors import MediaDisabled, MediaNotFound, MediaTooLarge, Overloaded
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
