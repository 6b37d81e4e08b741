"""Checks a JPEG by its markers, before anything is decoded: how many scans, how much data.

A progressive JPEG may have any number of scans, each over the whole picture and of a few bytes: a
small file can take minutes. And libjpeg does not report data that end after a few blocks: it leaves
the rest of the picture grey. Both are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from triptych.errors import InvalidMedia

MAX_SCANS = 100  # encoders write 1 to some 20
MAX_SEGMENTS = 10_000  # a file of 64 MiB has some 1,000 of the largest

_SOF = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SEQUENTIAL = frozenset({0xC0, 0xC1})  # Huffman coded: every block has code words of its own
_PROGRESSIVE = 0xC2
_SOS, _EOI = 0xDA, 0xD9
_PADDING = bytes(range(1, 255))
# In a scan's data 0xFF is followed by 0 (a byte 0xFF), by a restart marker, or by itself.
_MARKER = re.compile(rb"\xff([^\x00\xd0-\xd7\xff])", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Frame:
    """The frame header: the picture's size, and each component's share of it."""

    coding: int  # the marker
    height: int
    width: int
    sampling: dict[int, tuple[int, int]]  # horizontal and vertical, by component

    def blocks(self, component: int) -> int:
        """Blocks of 8 x 8 that a scan of this component has at least."""
        across, down = self.sampling.get(component, (0, 0))
        widest = max(h for h, _ in self.sampling.values())
        tallest = max(v for _, v in self.sampling.values())
        columns = -(-(self.width * across) // (8 * widest)) if widest else 0
        rows = -(-(self.height * down) // (8 * tallest)) if tallest else 0
        return columns * rows


def check_jpeg(data: bytes | memoryview) -> None:
    """Raises InvalidMedia for a JPEG that would take too long or has too little data."""
    if bytes(data[:2]) != b"\xff\xd8":
        return
    frame: _Frame | None = None
    scans = 0
    for marker, start, end in _segments(data):
        if marker in _SOF:
            frame = _frame(marker, bytes(data[start:end]))
        if marker != _SOS:
            continue
        scans += 1
        if scans > MAX_SCANS:
            raise InvalidMedia(
                f"The image is a JPEG of more than {MAX_SCANS} scans. Save it anew as an ordinary "
                "JPEG."
            )
        if frame is not None:
            _check_scan(frame, bytes(data[start:end]), _scan_end(data, end) - end)


def pad_jpeg(data: bytes | memoryview) -> bytes | None:
    """The file with bytes added after the last scan's data; None where that shows nothing.

    A decoder that had all blocks skips them. One that lacks some decodes them as these blocks, and
    yields another picture.
    """
    end, coding = 0, 0
    for marker, _, body_end in _segments(data):
        if marker in _SOF:
            coding = marker
        if marker == _SOS:
            end = _scan_end(data, body_end)
    if coding not in _SEQUENTIAL or not end:
        return None
    return bytes(data[:end]) + _PADDING + bytes(data[end:])


def _segments(data: bytes | memoryview) -> Iterator[tuple[int, int, int]]:
    """Marker, start and end of the body of every segment up to the end of the picture."""
    at = 2
    for _ in range(MAX_SEGMENTS):
        found = _MARKER.search(data, at)
        if found is None or found[1][0] == _EOI:
            return
        marker, at = found[1][0], found.end()
        if marker < 0xC0:  # has no body
            continue
        end = at + max(2, int.from_bytes(data[at : at + 2]))
        yield marker, at + 2, min(end, len(data))
        at = end
    raise InvalidMedia(f"The image is a JPEG of more than {MAX_SEGMENTS} segments.")


def _scan_end(data: bytes | memoryview, start: int) -> int:
    found = _MARKER.search(data, start)
    return len(data) if found is None else found.start()


def _frame(coding: int, body: bytes) -> _Frame | None:
    """None if it is incomplete, which the decoder reports."""
    if len(body) < 6 or len(body) < 6 + 3 * body[5]:
        return None
    parts = [body[at : at + 2] for at in range(6, 6 + 3 * body[5], 3)]
    sampling = {part[0]: (part[1] >> 4, part[1] & 15) for part in parts}
    height, width = int.from_bytes(body[1:3]), int.from_bytes(body[3:5])
    return _Frame(coding, height, width, sampling) if sampling else None


def _check_scan(frame: _Frame, head: bytes, size: int) -> None:
    """A block has a code word for its average and, in a single scan, at least one for the rest.

    A code word has at least one bit. Later scans of a progressive file may skip many blocks at
    once.
    """
    if not head or len(head) < 4 + 2 * head[0]:
        return
    components = head[1 : 1 + 2 * head[0] : 2]
    first = head[1 + 2 * head[0]]
    if frame.coding in _SEQUENTIAL:
        bits = 2
    elif frame.coding == _PROGRESSIVE and first == 0:
        bits = 1
    else:
        return
    if 8 * size < bits * sum(frame.blocks(component) for component in components):
        raise InvalidMedia("The image is damaged or cut short: most of its data are missing.")
