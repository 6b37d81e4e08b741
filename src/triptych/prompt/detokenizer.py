"""Token ids to text as they arrive: never half a character, never the start of a stop string.

However the ids are divided into pushes, the texts joined together equal what the tokenizer decodes
from all ids at once. Knows neither HTTP nor why a stream ends.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from triptych.prompt.tokenizer import Style, Tokenizer, TokenPieces


class TextDecoder(Protocol):
    """Decodes one token after another."""

    def feed(self, id: int) -> str:
        """The characters that are certain after this token."""

    def pending(self) -> str:
        """What would follow if the stream ended here; "" while a character is incomplete."""

    def finish(self) -> str:
        """The rest at the end of the stream, with U+FFFD for incomplete characters."""


class Detokenizer:
    """The text of one stream.

    A stop string ends it; the string and what follows are left out. Of several the one that is
    complete first counts, and of those the longest. One of ``end_ids`` ends it too, and its own
    text is left out. ``include_stop``: neither is left out. Stop strings that are complete within
    the first ``min_tokens`` tokens do not count. Special tokens have no text, except those in
    ``kept``.
    """

    __slots__ = (
        "_end_ids",
        "_exempt",
        "_feed",
        "_held",
        "_include_stop",
        "_min_tokens",
        "_reach",
        "_starts",
        "_stop",
        "_text",
        "stop_string",
        "stopped",
        "used",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        end_ids: tuple[int, ...] = (),
        kept: tuple[str, ...] = (),
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self.used = 0  # ids of the answer, with the one that ended it
        self.stopped = False  # by a stop string or an end id
        self.stop_string = ""  # the one that ended it
        pieces = tokenizer.pieces_with(kept) if kept else tokenizer.pieces
        self._text: TextDecoder = _DECODERS[tokenizer.style](tokenizer, pieces)
        self._feed = self._text.feed
        self._stop: tuple[str, ...] = ()
        self._reach = 0  # most characters to hold back
        self._starts: frozenset[str] = frozenset()
        if any(stop):
            self._stop = tuple(string for string in stop if string)
            self._reach = max(map(len, self._stop)) - 1
            self._starts = frozenset(string[0] for string in self._stop)
        self._end_ids = frozenset(end_ids)
        self._held = ""  # certain, but possibly the start of a stop string
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._exempt = 0  # characters of what is held that came within ``min_tokens``

    def push(self, ids: Sequence[int], last: bool = False) -> str:
        """New text that is safe to send. ``last``: no more ids follow."""
        if self.stopped:
            return ""
        if not self._stop and not self._end_ids:  # the common case: keep it cheap
            self.used += len(ids)
            text = self._feed(ids[0]) if len(ids) == 1 else "".join(map(self._feed, ids))
            return text + self._text.finish() if last else text
        shown = ""
        for id in ids:
            self.used += 1
            if id in self._end_ids:
                if self._include_stop:
                    shown += self._step(self._feed(id))
                shown += "" if self.stopped else self._end()
                self.stopped = True
            else:
                shown += self._step(self._feed(id))
            if self.stopped:
                return shown
        return shown + self._end() if last else shown

    def _step(self, new: str) -> str:
        if not self._stop:
            return new
        text = self._held + new
        if self.used <= self._min_tokens:
            self._exempt = len(text)
        else:
            whole = text + self._text.pending()
            if (cut := self._find(whole)) is not None:
                self.stopped = True
                return whole[:cut]
        keep = self._safe(text)
        self._held = text[keep:]
        self._exempt = max(0, self._exempt - keep)
        return text[:keep]

    def _end(self) -> str:
        text = self._held + self._text.finish()
        if self.used > self._min_tokens and (cut := self._find(text)) is not None:
            self.stopped = True
            return text[:cut]
        return text

    def _find(self, text: str) -> int | None:
        """Where the text ends if it has a stop string: before the one that is completed first."""
        found = []
        for string in self._stop:
            # A match must end after the characters that are exempt.
            at = text.find(string, max(0, self._exempt - len(string) + 1))
            if at >= 0:
                found.append((at + len(string), at, string))
        if not found:
            return None
        end, at, self.stop_string = min(found)
        return end if self._include_stop else at

    def _safe(self, text: str) -> int:
        """How many characters cannot be the start of a stop string."""
        for at in range(max(0, len(text) - self._reach), len(text)):
            if text[at] in self._starts:
                tail = text[at:]
                for string in self._stop:
                    if string.startswith(tail):
                        return at
        return len(text)


class ByteDecoder:
    """For byte-level vocabularies: every token is bytes, and all bytes together are UTF-8."""

    __slots__ = ("_pending", "_pieces")

    def __init__(self, tokenizer: Tokenizer, pieces: TokenPieces) -> None:
        self._pieces = pieces
        self._pending = b""  # the start of a character

    def feed(self, id: int) -> str:
        piece = self._pieces[id]
        if isinstance(piece, str):
            if self._pending and piece:  # text: the incomplete character before it stays incomplete
                return self.finish() + piece
            return piece
        raw = self._pending + piece
        text, used = codecs.utf_8_decode(raw, "replace", False)
        self._pending = raw[used:]
        return text

    def pending(self) -> str:
        return ""

    def finish(self) -> str:
        text, self._pending = self._pending.decode("utf-8", "replace"), b""
        return text


class ByteFallbackDecoder:
    """For vocabularies with byte fallback: tokens are text, except tokens of one byte each.

    The tokenizer decodes a run of byte tokens as a whole, or to U+FFFD only if any of it is
    invalid. So a run is certain only when it ends; ``pending`` finds a stop string in it earlier.
    """

    __slots__ = ("_lead", "_pieces", "_run")

    def __init__(self, tokenizer: Tokenizer, pieces: TokenPieces) -> None:
        self._pieces = pieces
        self._lead = tokenizer.strips  # the first space of the text is still to be dropped
        self._run = b""

    def feed(self, id: int) -> str:
        piece = self._pieces[id]
        if isinstance(piece, bytes):
            self._run += piece
            return ""
        if self._run and piece:
            piece = self._resolved("�" * len(self._run)) + piece
            self._run = b""
        if self._lead and piece:
            self._lead = False
            return piece.removeprefix(" ")
        return piece

    def pending(self) -> str:
        text = self._resolved("") if self._run else ""
        return text.removeprefix(" ") if self._lead else text

    def finish(self) -> str:
        text = self._resolved("�" * len(self._run))
        self._run = b""
        return text.removeprefix(" ") if self._lead else text

    def _resolved(self, otherwise: str) -> str:
        try:
            return self._run.decode()
        except UnicodeDecodeError:
            return otherwise


class LibraryDecoder:
    """For any other tokenizer: decodes the last few tokens with and without the new one."""

    __slots__ = ("_base", "_decode", "_ids", "_kept", "_shown")

    def __init__(self, tokenizer: Tokenizer, pieces: TokenPieces) -> None:
        self._decode = tokenizer.library.decode
        self._kept = pieces.kept
        self._ids: list[int] = []  # as far back as new text may depend on
        self._base = ""  # text of those that were returned
        self._shown = 0  # how many of them were

    def feed(self, id: int) -> str:
        if id in self._kept:
            rest = self.finish()
            self._base, self._shown = self._decode(self._ids), len(self._ids)
            return rest + self._kept[id]
        self._ids.append(id)
        text = self._decode(self._ids)
        if len(text) <= len(self._base) or text.endswith("�"):
            return ""
        new = text[len(self._base) :]
        self._ids = self._ids[self._shown :]
        self._base, self._shown = self._decode(self._ids), len(self._ids)
        return new

    def pending(self) -> str:
        return ""

    def finish(self) -> str:
        return self._decode(self._ids)[len(self._base) :]


_DECODERS: dict[Style, type[ByteDecoder] | type[ByteFallbackDecoder] | type[LibraryDecoder]] = {
    "bytes": ByteDecoder,
    "runs": ByteFallbackDecoder,
    "other": LibraryDecoder,
}
