"""Keeps what users type from becoming control tokens: a typed ``<|im_end|>`` stays plain text.

In a text that holds a control token, or ends with the beginning of one, a mark is inserted into
each: a character that occurs nowhere else, so that neither a template nor the tokenizer takes it
for a control token. After rendering, the segments with marks are encoded as plain text. Other texts
stay as they are: ordinary requests are encoded in one call.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import tokenizers

from triptych.errors import InvalidValue
from triptych.prompt.tokenizer import Tokenizer, check_length, encode_text

SEARCH_STEP = 1 << 16  # characters: a search holds the GIL until it ends
_MARKS = tuple(chr(code) for code in range(0x10FF00, 0x10FFFE))  # private use


class ControlTokenEscaper:
    """Escapes the given control tokens; all others keep their meaning."""

    def __init__(self, tokenizer: Tokenizer, controls: Iterable[int]) -> None:
        escaped = frozenset(controls)
        added = tokenizer.description.added_tokens
        words = [token.content for token in added if token.id in escaped and len(token.content) > 1]
        self._tokenizer = tokenizer
        self._escaped = escaped
        self._words = words
        self._typed = re.compile("|".join(map(re.escape, words)) or "(?!)")
        self._firsts = frozenset(word[0] for word in words)
        self._heads = frozenset(word[:end] for word in words for end in range(1, len(word)))
        self._reach = max(map(len, words), default=1) - 1
        self._real = {
            token.content: token for token in added if token.special or token.id in escaped
        }
        longest_first = sorted(self._real, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._longest = max(map(len, longest_first), default=1)
        self._plain = {first: self._twin(first) for first in (True, False)}
        self._around = _around(tokenizer)

    def needs_escaping(self, text: str) -> bool:
        """Whether the text holds a control token, or ends with the beginning of one."""
        if len(text) <= SEARCH_STEP:
            typed = self._typed.search(text) is not None
        else:
            steps = range(0, len(text), SEARCH_STEP)
            typed = any(
                self._typed.search(text, at, at + SEARCH_STEP + self._reach) for at in steps
            )
        return typed or bool(self._begun(text))

    def _begun(self, text: str) -> list[int]:
        """Positions inside of the unfinished control tokens that the text ends with."""
        places = []
        end = len(text.rstrip())  # templates trim
        for first in self._firsts:
            at = text.find(first, max(0, end - self._reach), end)
            while at >= 0:
                if text[at:end] in self._heads:
                    places.append(at + 1)
                at = text.find(first, at + 1, end)
        return places

    def choose_mark(self, texts: Sequence[str]) -> str:
        """A character that none of the texts contains."""
        for mark in _MARKS:
            if not any(mark in text for text in texts):
                return mark
        raise InvalidValue("The text uses all private characters of the last Unicode plane.")

    def escape(self, text: str, mark: str) -> str:
        """The text with the mark inside of everything that could become a control token."""
        parts = []
        for at in range(0, len(text), SEARCH_STEP):
            part = text[at : at + SEARCH_STEP]
            for word in self._words:
                if word in text[max(0, at - len(word) + 1) : at + len(word) - 1]:  # across the step
                    part = mark + part.removeprefix(mark)
                while word in part:  # again if it overlaps itself
                    part = part.replace(word, word[0] + mark + word[1:])
            parts.append(part)
        text = "".join(parts)
        for at in sorted(self._begun(text), reverse=True):
            text = text[:at] + mark + text[at:]
        return text

    def encode(
        self, text: str, mark: str, special: bool = False, limit: int | None = None
    ) -> list[int]:
        """Ids of a rendered text, without its marks."""
        before, after = self._around if special else ((), ())
        ids = [*before]
        at = 0
        for segment, plain in self._segments(text, mark):
            if plain:
                ids += self._checked(encode_text(self._plain[at == 0], segment, limit=limit))
            else:
                ids += self._tokenizer.ids(segment, limit=limit)
            check_length(len(ids), limit)
            at += len(segment)
        return [*ids, *after]

    def _segments(self, text: str, mark: str) -> Iterator[tuple[str, bool]]:
        """Segments and whether they are plain. Plain ones hold a mark and reach from one control
        token to the next."""
        begin = at = 0
        for start, end in self._controls(text):
            if text.find(mark, at, start) >= 0:
                if begin < at:
                    yield text[begin:at], False
                yield _without(mark, text[at:start]), True
                begin = start
            at = end
        if text.find(mark, at) >= 0:
            if begin < at:
                yield text[begin:at], False
            yield _without(mark, text[at:]), True
        elif begin < len(text):
            yield text[begin:], False

    def _controls(self, text: str) -> Iterator[tuple[int, int]]:
        """Start and end of real control tokens, with the white space that some of them absorb."""
        at = done = 0
        while at < len(text):
            edge = at + SEARCH_STEP
            for match in self._control.finditer(text, at, edge + self._longest - 1):
                start, end = match.span()
                if start >= edge:
                    break
                token = self._real[match[0]]
                if token.lstrip:
                    start = done + len(text[done:start].rstrip())
                while token.rstrip and text[end : end + 1].isspace():
                    end += 1
                yield start, end
                done = end
            at = max(done, edge)

    def _twin(self, first: bool) -> tokenizers.Tokenizer:
        """A tokenizer that shares the vocabulary in memory and reads control tokens as plain text.

        ``first``: for the first segment, which gets the prefix space of some tokenizers.
        """
        library, description = self._tokenizer.library, self._tokenizer.description
        twin = tokenizers.Tokenizer(library.model)
        if library.normalizer is not None:
            twin.normalizer = library.normalizer
        if library.pre_tokenizer is not None:
            twin.pre_tokenizer = (
                library.pre_tokenizer if first else _never_first(description.pre_tokenizer)
            )
        twin.add_tokens(
            [
                tokenizers.AddedToken(
                    token.content,
                    special=token.special or token.id in self._escaped,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    single_word=token.single_word,
                    normalized=token.normalized,
                )
                for token in description.added_tokens
            ]
        )
        twin.encode_special_tokens = True  # encode special tokens as text
        return twin

    def _checked(self, ids: list[int]) -> list[int]:
        if self._escaped.isdisjoint(ids):
            return ids
        raise InvalidValue("The text holds a control token that this model cannot read as text.")


def _without(mark: str, text: str) -> str:
    steps = range(0, len(text), SEARCH_STEP)
    return "".join(text[at : at + SEARCH_STEP].replace(mark, "") for at in steps)


def _around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer adds before and after a text."""
    bare, full = tokenizer.ids("a"), tokenizer.ids("a", special=True)
    for at in range(len(full) - len(bare) + 1):
        if full[at : at + len(bare)] == bare:
            return full[:at], full[at + len(bare) :]
    return [], []


def _never_first(pre_tokenizer: dict[str, Any] | None) -> tokenizers.pre_tokenizers.PreTokenizer:
    """The same with every ``prepend_scheme`` changed from first to never."""
    written = msgspec.json.encode(pre_tokenizer)
    changed = written.replace(b'"prepend_scheme":"first"', b'"prepend_scheme":"never"')
    empty = msgspec.json.decode(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    whole = msgspec.json.encode(empty | {"pre_tokenizer": msgspec.Raw(changed)})
    made: tokenizers.pre_tokenizers.PreTokenizer
    made = tokenizers.Tokenizer.from_str(whole.decode()).pre_tokenizer
    return made
