from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.messages import GetReport, Job, MediaItem, Sampling, Work
from triptych.runtime import frames
from triptych.runtime.authentication import ConnectionKeys, FrameMac, handshake_proof
from triptych.runtime.frames import BrokenFrame, Challenge, ForgedFrame, FrameKind, Hello, Inbox


def pour(inbox: Inbox, data: bytes, sizes: list[int]) -> list[tuple[int, bytes]]:
    """Let ``data`` arrive in pieces of these sizes, over and over."""
    got = []
    at = turn = 0
    while at < len(data):
        room = inbox.get_buffer()
        assert len(room) > 0
        count = min(len(room), len(data) - at, sizes[turn % len(sizes)])
        room[:count] = data[at : at + count]
        at += count
        turn += 1
        got += [(kind, bytes(body)) for kind, body in inbox.received(count)]
    return got


BODIES = st.lists(
    st.one_of(
        st.binary(max_size=50),
        st.sampled_from([b"s" * 4096, b"l" * 4097]),
        st.integers(60_000, 200_000).map(lambda n: b"\xa5" * n),
    ),
    max_size=6,
)


@given(BODIES, st.lists(st.integers(1, 70_000), min_size=1, max_size=5))
def test_frames_are_cut_alike_however_they_arrive(bodies: list[bytes], sizes: list[int]) -> None:
    sizes[0] += 500  # not byte by byte all along: that only takes long
    data = b"".join(frames.frame(FrameKind.ANSWERS, body) for body in bodies)
    got = pour(Inbox(frames.MAX_FRAME), data, sizes)
    assert got == [(FrameKind.ANSWERS, body) for body in bodies]


def test_frames_are_cut_byte_by_byte() -> None:
    bodies = [b"", b"a", b"bc" * 40]
    data = b"".join(frames.frame(FrameKind.OPEN, body) for body in bodies)
    got = pour(Inbox(1000), data, [1])
    assert got == [(FrameKind.OPEN, body) for body in bodies]


def test_a_frame_keeps_its_bytes_while_others_arrive() -> None:
    inbox = Inbox(1000)
    kept = []
    for body in (b"first", b"other"):
        data = frames.frame(FrameKind.OPEN, body)
        inbox.get_buffer()[: len(data)] = data
        kept += [got for _, got in inbox.received(len(data))]
    assert [bytes(body) for body in kept] == [b"first", b"other"]


def test_a_frame_over_the_limit_is_refused_by_its_head() -> None:
    inbox = Inbox(10)
    head = frames.frame(FrameKind.HELLO, b"x" * 11)[:5]
    with pytest.raises(BrokenFrame):
        pour(inbox, head, [5])


@given(st.binary(max_size=300))
def test_garbage_is_refused_or_waited_for_and_nothing_else(data: bytes) -> None:
    try:
        for kind, body in pour(Inbox(100), data, [64]):
            for read in (frames.decode_hello, frames.decode_open, frames.decode_answers):
                read(body)
            assert isinstance(kind, int)
    except frames.UNREADABLE:
        pass


def test_deep_nesting_and_bad_text_are_unreadable() -> None:
    for body in (b"\x94\x01\x91" + b"\x91" * 1000, b"\x94\x01\xa2\xff\xfe\x01\xa1a"):
        with pytest.raises(frames.UNREADABLE):
            frames.decode_hello(body)


def job(*data: bytes | memoryview) -> Job:
    media = tuple(MediaItem("image", i, blob) for i, blob in enumerate(data))
    return Job(Work("r", (1,), media, Sampling(seed=1)))


def body_of(pieces: list[bytes | memoryview]) -> bytes:
    return b"".join(pieces)[5:]


def test_media_are_neither_copied_into_a_frame_nor_out_of_it() -> None:
    picture = bytes(100_000)
    pieces = frames.open_frame(3, job(picture, b"", memoryview(picture)))
    _, _, first_piece, last_piece = pieces  # after the header and the head
    assert first_piece is picture
    assert isinstance(last_piece, memoryview)
    assert last_piece.obj is picture
    body = body_of(pieces)
    call, ask = frames.decode_open(body)
    assert call == 3
    assert isinstance(ask, Job)
    first, second, third = (item.data for item in ask.work.media)
    assert isinstance(first, memoryview)
    assert first.obj is body
    assert first.readonly
    assert (first, second, third) == (picture, b"", picture)


def test_an_ask_without_media_is_whole() -> None:
    assert frames.decode_open(body_of(frames.open_frame(1, job()))) == (1, job())
    assert frames.decode_open(body_of(frames.open_frame(2, GetReport()))) == (2, GetReport())


def test_media_with_another_length_than_declared_are_refused() -> None:
    body = body_of(frames.open_frame(1, job(b"picture")))
    for wrong in (body[:-1], body + b"x", body[:3], b""):
        with pytest.raises(BrokenFrame):
            frames.decode_open(wrong)
    count = frames._COUNT
    for blobs in ((7, 0), (9, -2), ()):
        head = frames.pack(frames.OpenCall(1, job(b""), blobs))
        with pytest.raises(BrokenFrame):
            frames.decode_open(count.pack(len(head)) + head + b"picture")


def test_a_call_too_large_for_a_frame_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME", 1000)
    with pytest.raises(BrokenFrame):
        frames.open_frame(1, job(bytes(1001)))


def test_a_proof_holds_for_its_secret_side_nonces_incarnation_and_binding_only() -> None:
    hello, challenge = Hello(2, "PD-0", 7, b"c" * 32), Challenge(b"s" * 32)
    said = frames.transcript(hello, challenge)
    others = [
        ("Secret", "caller", said),
        ("secret", "worker", said),
        ("secret", "caller", frames.transcript(hello, Challenge(b"t" * 32))),
        ("secret", "caller", frames.transcript(Hello(2, "PD-1", 7, b"c" * 32), challenge)),
        ("secret", "caller", frames.transcript(Hello(2, "PD-0", 8, b"c" * 32), challenge)),
        ("secret", "caller", frames.transcript(hello, challenge, b"certificate")),
    ]
    proof = handshake_proof("secret", "caller", said)
    assert proof == handshake_proof("secret", "caller", said)
    assert len({proof, *(handshake_proof(*other) for other in others)}) == 1 + len(others)
    firsts = {
        ConnectionKeys(*other).sending.tag(b"head", b"body")
        for other in [("secret", "caller", said), *others]
    }
    assert len(firsts) == 1 + len(others)
    assert proof[:16] not in firsts


def test_a_short_nonce_proves_nothing() -> None:
    with pytest.raises(BrokenFrame):
        frames.transcript(Hello(2, "PD-0", 7, b""), Challenge(b"s" * 32))


def tagged(bodies: list[bytes], mac: FrameMac) -> list[bytes]:
    heads = [frames.header(FrameKind.ANSWERS, len(body)) for body in bodies]
    return [
        head + body + mac.tag(head, body[:30], body[30:])
        for head, body in zip(heads, bodies, strict=True)
    ]


@given(BODIES, st.lists(st.integers(1, 70_000), min_size=1, max_size=5))
def test_frames_with_tags_are_cut_alike_however_they_arrive(
    bodies: list[bytes], sizes: list[int]
) -> None:
    sizes[0] += 500
    inbox = Inbox(frames.MAX_FRAME)
    inbox.mac = FrameMac(b"key")
    got = pour(inbox, b"".join(tagged(bodies, FrameMac(b"key"))), sizes)
    assert got == [(FrameKind.ANSWERS, body) for body in bodies]


@pytest.mark.parametrize("size", [0, 40, 4096, 4097, 65_504, 65_520, 65_530, 65_536, 300_000])
@pytest.mark.parametrize("at", [0, 4, 5, -17, -16, -1], ids=str)
def test_f24_a_frame_with_one_bit_changed_is_not_given_out(size: int, at: int) -> None:
    first, second = tagged([b"before", bytes(size)], FrameMac(b"key"))
    changed = bytearray(second)
    changed[at] ^= 1
    inbox = Inbox(frames.MAX_FRAME)
    inbox.mac = FrameMac(b"key")
    got: list[tuple[int, bytes]] = []
    try:
        got += pour(inbox, first, [7])
        got += pour(inbox, bytes(changed), [100_000])
    except ForgedFrame:
        pass  # where the length was changed, the rest is waited for
    assert got == [(FrameKind.ANSWERS, b"before")]
