"""Prompts as language models see them: placeholders expanded, a position for every token.

Families whose positions count up, or that place media on grids, share the functions below. Knows
keys and shapes of media, never their embeddings; imports no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from triptych.messages import MediaMeta, MediaSpan, Work


@dataclass(frozen=True, slots=True)
class EmbeddingSpan:
    """A run of placeholders and the embedding rows in their place: ``rows[row : row + length]``."""

    offset: int  # in Layout.ids
    length: int
    item: int  # index of the media item
    row: int = 0  # first row of its embedding


@dataclass(frozen=True, slots=True)
class Layout:
    """A prompt as the language model sees it."""

    ids: tuple[int, ...]  # expanded: one placeholder id for each row of an embedding
    spans: tuple[EmbeddingSpan, ...]  # by offset; an item may have several, with text between
    positions: np.ndarray  # [axes, tokens] int64
    next_position: int  # of the first generated token; the following ones count up from it
    places: tuple[tuple[int, int], ...] = ()  # of each item: first token and count, with markers


class LayoutBuilder:
    """Writes a Layout from left to right. ``position`` is that of the next text token."""

    def __init__(self, axes: int) -> None:
        self.position = 0
        self._axes = axes
        self._ids: list[int] = []
        self._spans: list[EmbeddingSpan] = []
        self._positions: list[np.ndarray] = []
        self._prompt_text: list[tuple[int, int]] = []  # begin and end of each run

    @property
    def after_prompt_text(self) -> bool:
        """The last run of the prompt's text has tokens."""
        begin, end = self._prompt_text[-1]
        return begin < end

    def add_prompt_text(self, ids: Sequence[int]) -> None:
        """Text of the prompt. What is added between two of these belongs to a media item."""
        begin = len(self._ids)
        self.add_text(ids)
        self._prompt_text.append((begin, len(self._ids)))

    def add_text(self, ids: Sequence[int]) -> None:
        self._ids.extend(ids)
        self._positions.append(self._counting(len(ids)))
        self.position += len(ids)

    def add_rows(self, item: int, id: int, length: int, row: int = 0) -> None:
        """Rows of an item's embedding, from ``row`` on, whose positions count up like text."""
        self.add_placed_rows(item, id, self._counting(length) - self.position, length, row)

    def add_placed_rows(
        self, item: int, id: int, positions: np.ndarray, advance: int, row: int = 0
    ) -> None:
        """Rows of an item's embedding, from ``row`` on, at ``positions`` [axes, rows].

        These count from the current position, which then moves on by ``advance``.
        """
        length = positions.shape[1]
        self._spans.append(EmbeddingSpan(len(self._ids), length, item, row))
        self._ids.extend([id] * length)
        self._positions.append(positions + self.position)
        self.position += advance

    def build(self) -> Layout:
        joined = np.concatenate([np.zeros((self._axes, 0), np.int64), *self._positions], axis=1)
        # Some positions of a video may lie beyond those of the text after it, which nevertheless
        # counts on from the video's start.
        last = self._spans[-1] if self._spans else None
        ends_with_media = last is not None and last.offset + last.length == len(self._ids)
        return Layout(
            ids=tuple(self._ids),
            spans=tuple(self._spans),
            positions=joined,
            next_position=int(joined.max(initial=-1)) + 1 if ends_with_media else self.position,
            places=tuple(
                (end, begin - end) for (_, end), (begin, _) in itertools.pairwise(self._prompt_text)
            ),
        )

    def _counting(self, length: int) -> np.ndarray:
        """Positions [axes, length] that count up from here, the same on every axis."""
        line = np.arange(self.position, self.position + length, dtype=np.int64)
        return np.broadcast_to(line, (self._axes, length))


PlaceItem = Callable[[LayoutBuilder, int, int, MediaMeta], None]


def build_layout(
    axes: int,
    prompt: Sequence[int],
    at: Sequence[int],
    media: Sequence[MediaMeta],
    place: PlaceItem,
) -> Layout:
    """Replace each placeholder by what ``place(builder, item, placeholder id, meta)`` adds."""
    builder = LayoutBuilder(axes)
    start = 0
    for item, index in enumerate(at):
        builder.add_prompt_text(prompt[start:index])
        place(builder, item, prompt[index], media[item])
        start = index + 1
    builder.add_prompt_text(prompt[start:])
    return builder.build()


def sequential_layout(
    prompt: Sequence[int], at: Sequence[int], media: Sequence[MediaMeta]
) -> Layout:
    """Positions count up through text and media alike."""

    def place(builder: LayoutBuilder, item: int, id: int, meta: MediaMeta) -> None:
        builder.add_rows(item, id, meta.tokens)

    return build_layout(1, prompt, at, media, place)


def grid_positions(frames: int, rows: int, columns: int, interval: float = 1.0) -> np.ndarray:
    """Positions [3, tokens] on a grid of merged patches: time, row and column.

    ``interval``: the distance of two frames, rounded in float32 as in the stock models.
    """
    axes = np.indices((frames, rows, columns), dtype=np.int64).reshape(3, -1)
    if interval != 1:
        axes[0] = axes[0].astype(np.float32) * np.float32(interval)
    return axes


def locate_media(layout: Layout, work: Work, media: Sequence[MediaMeta]) -> tuple[MediaSpan, ...]:
    """The place of each media item in the expanded prompt; empty if the family gives no places."""
    if len(layout.places) != len(media):
        return ()
    spans = []
    for item, meta, (start, length) in zip(work.media, media, layout.places, strict=True):
        ids = layout.ids[start : start + length]
        only_placeholders = ids.count(work.prompt[item.at]) == length
        spans.append(MediaSpan(meta.key, start, length, () if only_placeholders else ids))
    return tuple(spans)
