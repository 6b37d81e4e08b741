"""Requests as a plain engine takes them that reads no files: turns for its template, media raw."""

from __future__ import annotations

import base64
import io
from typing import Any

import av
import numpy as np

from support.families import Asked, Shown


def plain(asked: Asked) -> dict[str, Any]:
    return {"turns": [turn(t) for t in asked.turns], "media": [item(m) for m in asked.media]}


def turn(turn: dict[str, Any]) -> dict[str, Any]:
    """As a chat template takes it: parts that say their kind."""
    if isinstance(turn["content"], str):
        return turn
    parts = [
        part if part["type"] == "text" else {"type": part["type"].removesuffix("_url")}
        for part in turn["content"]
    ]
    return turn | {"content": parts}


def item(shown: Shown) -> dict[str, Any]:
    data, shape = shown.data, ()
    if shown.kind == "video":
        with av.open(io.BytesIO(data)) as clip:
            frames = [frame.to_ndarray(format="rgb24") for frame in clip.decode(video=0)]
        pixels = np.stack(frames)
        data, shape = pixels.tobytes(), pixels.shape
    return {"kind": shown.kind, "data": base64.b64encode(data).decode(), "shape": shape}
