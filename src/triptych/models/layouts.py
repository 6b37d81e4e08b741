"""Prompts as language models see them: placeholders expanded, every token with its position.

A Draft is written from left to right; families whose positions simply count, or that place media on
grids, share what is below. Knows identities and shapes of media, never their rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from triptych.messages import MediaMeta
from triptych.models.family import EmbeddingSpan, Layout


class LayoutBuilder:
    """A Layout that is being written. ``position`` is that of the next token of text."""

    def __init__(self, axes: int) -> None:
        self.position = 0
        self._axes = axes
        self._ids: list[int] = []
        self._spans: list[EmbeddingSpan] = []
        self._positions: list[np.ndarray] = []
        self._words: list[tuple[int, int]] = []  # where text of the prompt begins and ends

    def words(self, ids: Sequence[int]) -> None:
        """Text of the prompt: what is written between two of these is a media item's."""
        begin = len(self._ids)
        self.text(ids)
        self._words.append((begin, len(self._ids)))

    def text(self, ids: Sequence[int]) -> None:
        self._ids.extend(ids)
        self._positions.append(self._line(len(ids)))
        self.position += len(ids)

    def rows(self, item: int, id: int, length: int, row: int = 0) -> None:
        """Rows of an item's embedding whose positions count like those of text."""
        self.placed(item, id, self._line(length) - self.position, length, row)

    def placed(self, item: int, id: int, where: np.ndarray, advance: int, row: int = 0) -> None:
        """Rows of an item's embedding, from ``row`` on, at positions ``where`` [axes, rows].

        These count from here; what follows stands ``advance`` further on.
        """
        length = where.shape[1]
        self._spans.append(EmbeddingSpan(len(self._ids), length, item, row))
        self._ids.extend([id] * length)
        self._positions.append(where + self.position)
        self.position += advance

    def layout(self) -> Layout:
        joined = np.concatenate([np.zeros((self._axes, 0), np.int64), *self._positions], axis=1)
        # Some positions of a video may lie beyond those of the text that follows it, which
        # nevertheless counts on.
        ends = bool(self._spans) and self._spans[-1].offset + self._spans[-1].length
        last = int(joined.max(initial=-1)) + 1 if ends == len(self._ids) else self.position
        return Layout(
            ids=tuple(self._ids),
            spans=tuple(self._spans),
            positions=torch.from_numpy(joined),
            next_position=last,
            places=tuple(
                (end, begin - end) for (_, end), (begin, _) in itertools.pairwise(self._words)
            ),
        )

    def _line(self, length: int) -> np.ndarray:
        """Positions [axes, length] from here on: the same on every axis."""
        line = np.arange(self.position, self.position + length, dtype=np.int64)
        return np.broadcast_to(line, (self._axes, length))


def split_at_placeholders(
    prompt: Sequence[int], at: Sequence[int]
) -> Iterator[tuple[Sequence[int], int | None]]:
    """The text before each placeholder, and its place; then the rest, and None."""
    start = 0
    for place in at:
        yield prompt[start:place], place
        start = place + 1
    yield prompt[start:], None


def sequential_layout(
    prompt: Sequence[int], at: Sequence[int], media: Sequence[MediaMeta]
) -> Layout:
    """Positions that count up through text and media alike."""
    draft = LayoutBuilder(1)
    for item, (text, place) in enumerate(split_at_placeholders(prompt, at)):
        draft.words(text)
        if place is not None:
            draft.rows(item, prompt[place], media[item].tokens)
    return draft.layout()


def grid_positions(frames: int, rows: int, columns: int, interval: float = 1.0) -> np.ndarray:
    """Positions [3, tokens] on a grid of merged patches: time, row and column.

    ``interval``: how far two moments lie apart; rounded in float32, as the stock models do.
    """
    axes = np.indices((frames, rows, columns), dtype=np.int64).reshape(3, -1)
    if interval != 1:
        axes[0] = axes[0].astype(np.float32) * np.float32(interval)
    return axes
