"""Media go where they were encoded before, unless that worker has too much to do."""

from collections import Counter
from dataclasses import dataclass

from triptych.messages import MediaItem, MediaMeta, PreparedItem
from triptych.pipeline.router import by_media_affinity, sample_digest


@dataclass
class Peer:
    name: str
    load: int = 0


def picture(number: int, size: int = 5000) -> MediaItem:
    return MediaItem("image", 0, number.to_bytes(4, "big") * (size // 4))


def test_the_same_media_find_the_same_worker_whatever_the_order():
    peers = [Peer(f"E-{i}") for i in range(4)]
    for number in range(50):
        item = picture(number)
        assert by_media_affinity(peers, item) is by_media_affinity(peers[::-1], item)


def test_media_spread_over_all_workers():
    peers = [Peer(f"E-{i}") for i in range(4)]
    count = Counter(by_media_affinity(peers, picture(number)).name for number in range(400))
    assert len(count) == 4
    assert min(count.values()) > 50


def test_a_worker_that_leaves_moves_only_its_own_share():
    peers = [Peer(f"E-{i}") for i in range(4)]
    for number in range(100):
        before = by_media_affinity(peers, picture(number))
        after = by_media_affinity(peers[:3], picture(number))
        assert after is before or before is peers[3]


def test_a_busy_worker_passes_its_media_on():
    peers = [Peer("E-0"), Peer("E-1")]
    own = by_media_affinity(peers, picture(1))
    own.load = 9
    assert by_media_affinity(peers, picture(1)) is not own
    for peer in peers:
        peer.load = 9
    assert by_media_affinity(peers, picture(1)) is own


def test_what_distinguishes_media():
    base = bytes(100_000)
    marks = {sample_digest(MediaItem("image", 0, base))}
    marks.add(sample_digest(MediaItem("video", 0, base)))
    marks.add(sample_digest(MediaItem("image", 0, base, "embeds")))
    marks.add(sample_digest(MediaItem("image", 0, base + b"\0")))
    marks.add(sample_digest(MediaItem("image", 0, b"x" + base[1:])))
    marks.add(sample_digest(MediaItem("image", 0, base[1:] + b"x")))
    assert len(marks) == 6
    assert sample_digest(MediaItem("image", 0, b"")) == sample_digest(
        MediaItem("image", 7, memoryview(b""))
    )
    prepared = PreparedItem(MediaMeta(b"key", 1), None, 1)
    assert sample_digest(MediaItem("image", 0, b"", prepared=prepared)) == b"key"
