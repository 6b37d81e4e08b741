"""file: URLs: regular files below one folder, and nothing else, with one error for all."""

import asyncio
import gc
import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.errors import InvalidConfig, LocalMediaForbidden, MediaFetchTimeout, MediaTooLarge
from triptych.sources.files import MAX_READS, READ_STEP, MediaFolder, file_forbidden


@pytest.fixture
def place(tmp_path):
    """A permitted folder with a secret beside it."""
    (tmp_path / "secret.png").write_bytes(b"secret")
    media = tmp_path / "media"
    (media / "deep" / "er").mkdir(parents=True)
    (media / "a.png").write_bytes(b"a")
    (media / "deep" / "er" / "b c%20.png").write_bytes(b"b")
    return media


@pytest.fixture
def folder(place):
    folder = MediaFolder(str(place))
    yield folder
    folder.close()


async def load(folder, url, limit=1 << 20, seconds=10):
    return await folder.read(folder.find(url), limit, seconds)


async def test_reads_files_below_the_folder(folder, place):
    for url in (f"file://{place}/a.png", f"file:{place}/a.png", f"FILE://LocalHost{place}/a.png"):
        assert await load(folder, url) == b"a"
    assert await load(folder, f"file://{place}//deep/er/b%20c%2520.png") == b"b"


async def test_reads_by_the_folders_real_name_and_by_the_operators(place, tmp_path):
    (tmp_path / "link").symlink_to(place)
    folder = MediaFolder(str(tmp_path / "link"))
    assert await load(folder, f"file://{tmp_path}/link/a.png") == b"a"
    assert await load(folder, f"file://{place}/a.png") == b"a"
    folder.close()


def hostile(place):
    """Everything that must not be read, or is not there."""
    os.mkfifo(place / "pipe")
    (place / "link.png").symlink_to(place / "a.png")
    (place / "out.png").symlink_to(place.parent / "secret.png")
    (place / "zero.png").symlink_to("/dev/zero")
    (place / "linked").symlink_to(place / "deep")
    (place / "up").symlink_to(place.parent)
    (place / "closed.png").write_bytes(b"x")
    (place.parent / "media2").mkdir()
    (place.parent / "media2" / "a.png").write_bytes(b"x")
    below = f"file://{place}"
    return [
        "file:///etc/passwd",
        "file:/etc/passwd",
        "file:///dev/zero",
        "file:///dev/stdin",
        "file:///proc/self/environ",
        "file://",
        "file:",
        "file:///",
        "file:a.png",
        "file:../secret.png",
        below,
        f"{below}/",
        f"{below}/deep",
        f"{below}/missing.png",
        f"{below}/a.png/x",
        f"{below}/pipe",
        f"{below}/link.png",
        f"{below}/out.png",
        f"{below}/zero.png",
        f"{below}/linked/er/b%20c%2520.png",
        f"{below}/up/secret.png",
        f"{below}/../secret.png",
        f"{below}/deep/../../secret.png",
        f"{below}/deep/../a.png",
        f"{below}/./a.png",
        f"{below}/%2e%2e/secret.png",
        f"{below}/%2e%2e%2fsecret.png",
        f"{below}/..%2fsecret.png",
        f"{below}%2f..%2fsecret.png",
        f"{below}/%252e%252e/secret.png",
        f"{below}/a.png%00",
        f"{below}/a.png\0",
        f"{below}/a.png?x",
        f"{below}/a.png#x",
        f"{below}\\a.png",
        f"{below}/\ud800",
        f"{below}/{'x' * 300}",
        f"{below}/{'x/' * 3000}a",
        f"{below}/{'x' * 9000}",
        f"file://{place.parent}/media2/a.png",
        f"file://{place.parent}/secret.png",
        f"file://other{place}/a.png",
        f"file://127.0.0.1{place}/a.png",
        f"file://localhost:80{place}/a.png",
        f"file://user@localhost{place}/a.png",
    ]


async def test_b22_all_else_is_forbidden_in_the_same_words(folder, place):
    for url in hostile(place):
        with pytest.raises(LocalMediaForbidden) as caught:
            await load(folder, url)
        assert caught.value.failure() == file_forbidden().failure(), url
        assert str(place) not in caught.value.message


async def test_b22_a_file_that_may_not_be_read_is_forbidden_too(folder, place, monkeypatch):
    def refuse(*args, **more):
        raise PermissionError

    monkeypatch.setattr(os, "read", refuse)
    with pytest.raises(LocalMediaForbidden):
        await load(folder, f"file://{place}/a.png")


async def test_b22_without_a_folder_nothing_is_read(place):
    folder = MediaFolder("")
    for url in (f"file://{place}/a.png", "file:///etc/passwd"):
        with pytest.raises(LocalMediaForbidden):
            folder.find(url)
    folder.close()


async def test_b22_a_folder_put_in_the_place_of_another_is_not_followed(folder, place):
    """What counts is the folder that was opened, not what its name means by now."""
    elsewhere = place.parent / "elsewhere"
    place.rename(elsewhere)
    place.symlink_to("/etc")
    with pytest.raises(LocalMediaForbidden):
        await load(folder, f"file://{place}/passwd")
    assert await load(folder, f"file://{place}/a.png") == b"a"


@settings(deadline=None)
@given(st.lists(st.sampled_from(["..", ".", "", "%2e", "%2F", "deep", "up", "media", "a"])))
def test_b22_no_path_leads_out(parts):
    folder = MediaFolder("/usr")
    try:
        found = folder.find("file:///usr/" + "/".join(parts))
    except LocalMediaForbidden:
        return
    finally:
        folder.close()
    assert found
    assert not {b"..", b".", b""} & set(found)
    assert not any(b"/" in name for name in found)


async def test_a_file_over_the_limit_is_too_large(folder, place):
    (place / "big").write_bytes(bytes(1001))
    url = f"file://{place}/big"
    assert len(await load(folder, url, limit=1001)) == 1001
    with pytest.raises(MediaTooLarge):
        await load(folder, url, limit=1000)


async def test_reads_large_files_whole(folder, place):
    data = os.urandom(2 * READ_STEP + 7)
    (place / "big").write_bytes(data)
    assert await load(folder, f"file://{place}/big", limit=1 << 30) == data


async def test_a_file_that_grows_is_read_up_to_the_limit(folder, place, monkeypatch):
    (place / "grows").write_bytes(b"x")
    monkeypatch.setattr(os, "read", lambda file, count: b"x" * count)
    with pytest.raises(MediaTooLarge):
        await load(folder, f"file://{place}/grows", limit=5 * READ_STEP)


async def test_a_disk_that_hangs_delays_only_its_own_caller(folder, place, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(os, "read", lambda file, count: bytes(not go.wait(10)))
    with pytest.raises(MediaFetchTimeout):
        await load(folder, f"file://{place}/a.png", seconds=0.05)
    go.set()


async def test_a_disk_that_hangs_uses_up_no_threads_of_others(folder, place, monkeypatch):
    """Neither those that everybody uses, nor another tenant's."""
    go, default = threading.Event(), min(32, (os.cpu_count() or 1) + 4)
    path, read = folder.find(f"file://{place}/a.png"), os.read
    monkeypatch.setattr(os, "read", lambda file, count: bytes(not go.wait(10)))
    hung = [folder.read(path, 10, 0.1, "slow") for _ in range(max(default, 2 * MAX_READS))]
    errors = await asyncio.gather(*hung, return_exceptions=True)
    assert {type(error) for error in errors} == {MediaFetchTimeout}
    monkeypatch.setattr(os, "read", read)
    async with asyncio.timeout(5):
        assert await asyncio.to_thread(int) == 0
        assert await folder.read(path, 10, 5, "other") == b"a"
    go.set()


async def test_leaves_no_descriptor_behind(place):
    gc.collect()  # what earlier tests left is not ours to count
    before = len(os.listdir("/proc/self/fd"))
    folder = MediaFolder(str(place))
    for url in hostile(place):
        with pytest.raises(LocalMediaForbidden):
            await load(folder, url)
    with pytest.raises(MediaTooLarge):
        await load(folder, f"file://{place}/a.png", limit=0)
    await asyncio.gather(*(load(folder, f"file://{place}/a.png") for _ in range(20)))
    folder.close()
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(LocalMediaForbidden):
        await load(folder, f"file://{place}/a.png")


@pytest.mark.parametrize("path", ["missing", "a.png"])
def test_a_folder_that_is_none_is_refused_at_the_start(place, path):
    with pytest.raises(InvalidConfig, match="allowed-media-path"):
        MediaFolder(str(place / path))
