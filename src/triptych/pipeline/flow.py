"""Back pressure of one request: whoever reads the tokens can pause whoever makes them."""

from __future__ import annotations

from typing import Protocol


class Pausable(Protocol):
    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Backpressure:
    """Joins a reader that may be slow to the call that feeds it, which may change on the way."""

    def __init__(self) -> None:
        self._paused = False
        self._source: Pausable | None = None

    def attach(self, source: Pausable) -> None:
        self._source = source
        if self._paused:
            source.pause()

    def pause(self) -> None:
        if not self._paused:
            self._paused = True
            if self._source is not None:
                self._source.pause()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            if self._source is not None:
                self._source.resume()
