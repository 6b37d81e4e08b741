"""What every part of the media floor speaks of: a media item that is ready for an encoder."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.messages import MediaMeta
from triptych.transfer.base import Array


@dataclass(frozen=True, slots=True)
class PreparedMedia:
    """A media item as an encoder takes it: what a recipe made of a file.

    ``encoded``: the client brought the embedding itself, and ``arrays`` is that. Else 8-bit pixels
    or a spectrum, as the recipe says.
    """

    meta: MediaMeta
    arrays: tuple[Array, ...]
    cost: int  # patches or spectrum frames in the encoder: what a batch is measured in
    encoded: bool = False

    @property
    def size(self) -> int:
        return sum(array.buffer.nbytes for array in self.arrays)
