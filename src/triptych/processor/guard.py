"""Keeps what users type from becoming control tokens: a typed ``<|im_end|>`` stays plain text.

A text that holds a control token, or the beginning of one at its end, is marked: a character that
occurs nowhere else is put inside of every such place, so that neither a template nor the tokenizer
takes it for the real one. After rendering, the stretches with marks are encoded as plain text.
Texts without any are left alone: ordinary requests are encoded in one go, as everywhere else.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import tokenizers

from triptych.errors import InvalidValue
from triptych.processor.tokenizer import Added, Tokenizer, check_length, encode

_MARKS = tuple(chr(code) for code in range(0x10FF00, 0x10FFFE))  # private use


class Guard:
    """Guards the given control tokens; all others mean what they say."""

    def __init__(self, tokenizer: Tokenizer, controls: Iterable[int]) -> None:
        guarded = frozenset(controls)
        added = tokenizer.description.added_tokens
        words = [token.content for token in added if token.id in guarded and len(token.content) > 1]
        self._tokenizer = tokenizer
        self._guarded = guarded
        self._typed = re.compile("|".join(map(re.escape, words)) or "(?!)")
        self._each = re.compile(f"(?={self._typed.pattern})")  # also those that overlap
        self._firsts = frozenset(word[0] for word in words)
        self._heads = frozenset(word[:end] for word in words for end in range(1, len(word)))
        self._reach = max(map(len, words), default=1) - 1
        self._real = _real([token for token in added if token.special or token.id in guarded])
        self._plain: dict[bool, tokenizers.Tokenizer] = {}

    def touches(self, text: str) -> bool:
        """Whether the text holds a control token, or begins one that what follows may complete."""
        return self._typed.search(text) is not None or any(self._begun(text))

    def _begun(self, text: str) -> Iterator[int]:
        """Places inside of the unfinished control tokens that the text ends with."""
        end = len(text.rstrip())  # templates trim
        for first in self._firsts:
            at = text.find(first, max(0, end - self._reach), end)
            while at >= 0:
                if text[at:end] in self._heads:
                    yield at + 1
                at = text.find(first, at + 1, end)

    def mark_for(self, texts: Iterable[str]) -> str:
        """A character that is in none of the texts."""
        used = set().union(*texts)
        for mark in _MARKS:
            if mark not in used:
                return mark
        raise InvalidValue("The text uses up all private characters of the last Unicode plane.")

    def marked(self, text: str, mark: str) -> str:
        """The text with the mark inside of everything that might be taken for a control token."""
        places = {match.start() + 1 for match in self._each.finditer(text)}
        edges = [0, *sorted(places.union(self._begun(text))), len(text)]
        return mark.join(text[a:b] for a, b in itertools.pairwise(edges))

    async def encode(
        self, text: str, mark: str, special: bool = False, limit: int | None = None
    ) -> list[int]:
        """Ids of a rendered text, its marks taken out again."""
        ids, after = await self._around() if special else ([], [])
        at = 0
        for stretch, plain in self._stretches(text, mark):
            if plain:
                library = await self._plainly(first=at == 0)
                ids += self._checked(await encode(library, stretch, limit=limit))
            else:
                ids += await self._tokenizer.encode(stretch, limit=limit)
            check_length(len(ids), limit)
            at += len(stretch)
        return ids + after

    def _stretches(self, text: str, mark: str) -> Iterator[tuple[str, bool]]:
        """Stretches and whether they are plain: those from one real control token to the next
        with a mark in them, and whatever lies between."""
        begin = at = 0
        for match in self._real.finditer(text):
            if mark in text[at : match.start()]:
                if begin < at:
                    yield text[begin:at], False
                yield text[at : match.start()].replace(mark, ""), True
                begin = match.start()
            at = match.end()
        if mark in text[at:]:
            if begin < at:
                yield text[begin:at], False
            yield text[at:].replace(mark, ""), True
        elif begin < len(text):
            yield text[begin:], False

    async def _plainly(self, first: bool) -> tokenizers.Tokenizer:
        """A twin of the tokenizer that knows no control token.

        Made when first needed. A text that is not the ``first`` gets no mark of a beginning.
        """
        if first not in self._plain:
            self._plain[first] = await asyncio.to_thread(self._twin, first)
        return self._plain[first]

    def _twin(self, first: bool) -> tokenizers.Tokenizer:
        description = msgspec.json.decode(self._tokenizer.file.read_bytes(), type=dict[str, Any])
        for token in description["added_tokens"]:
            token["special"] = token["special"] or token["id"] in self._guarded
        if not first:
            _never_first(description.get("pre_tokenizer"))
        twin = tokenizers.Tokenizer.from_str(msgspec.json.encode(description).decode())
        twin.encode_special_tokens = True  # that is: as if they were no special tokens
        twin.no_truncation()
        twin.no_padding()
        return twin

    def _checked(self, ids: list[int]) -> list[int]:
        if self._guarded.isdisjoint(ids):
            return ids
        raise InvalidValue("The text holds a control token that this model cannot read as text.")

    async def _around(self) -> tuple[list[int], list[int]]:
        """What the tokenizer puts before and after a text."""
        bare, full = await self._tokenizer.encode("a"), await self._tokenizer.encode("a", True)
        for at in range(len(full) - len(bare) + 1):
            if full[at : at + len(bare)] == bare:
                return full[:at], full[at + len(bare) :]
        return [], []


def _real(tokens: list[Added]) -> re.Pattern[str]:
    """Finds control tokens as the tokenizer does, with the white space that some swallow."""
    longest_first = sorted(tokens, key=lambda token: len(token.content), reverse=True)
    patterns = (
        (r"\s*" if token.lstrip else "")
        + re.escape(token.content)
        + (r"\s*" if token.rstrip else "")
        for token in longest_first
    )
    return re.compile("|".join(patterns) or r"(?!)")


def _never_first(step: Any) -> None:
    """Changes ``prepend_scheme`` from first to never, wherever in a pre-tokenizer it stands."""
    if isinstance(step, dict):
        if step.get("prepend_scheme") == "first":
            step["prepend_scheme"] = "never"
        for part in step.get("pretokenizers", ()):
            _never_first(part)
