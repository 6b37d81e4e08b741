"""The request of the banner's `curl` line: about a picture where the server takes pictures."""

from __future__ import annotations

from typing import Any

# A red circle on white, 64 x 64, as a PNG of two colours: short enough to be pasted.
CIRCLE = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABAAQMAAACQp+OdAAAABlBMVEX////cFB4F8PUcAAAAZklEQVR42r2Q"
    "sQ2AMAwEgyhSZgRGYTQYjVEyQkoKxEFs9CCBKPONr7Al/4XQNuPms4PZIEI2SFAMBlh9F3x7gt2AM9e13/cV"
    "lifECvkTUoXSBn7eeP+sOip4V5YEaZEoqZNM6W2WAxYvo88dmikOAAAAAElFTkSuQmCC"
)


def first_request(model: str, *, picture: bool) -> dict[str, Any]:
    """The body of a chat request."""
    content: Any = "Hello"
    if picture:
        content = [
            {"type": "image_url", "image_url": {"url": CIRCLE}},
            {"type": "text", "text": "What colour is the circle?"},
        ]
    messages = [{"role": "user", "content": content}]
    return {"model": model, "max_tokens": 32, "messages": messages}
