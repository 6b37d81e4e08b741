"""Where the media items of a request stand in the prompt as the model sees it."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.messages import MediaMeta, MediaSpan, Work
from triptych.models.family import Layout


def locate_media(layout: Layout, work: Work, media: Sequence[MediaMeta]) -> tuple[MediaSpan, ...]:
    """Of all items, in order. None: the family does not tell."""
    if len(layout.places) != len(media):
        return ()
    places = []
    for item, meta, (start, length) in zip(work.media, media, layout.places, strict=True):
        ids = layout.ids[start : start + length]
        plain = ids.count(work.prompt[item.at]) == length
        places.append(MediaSpan(meta.key, start, length, () if plain else ids))
    return tuple(places)
