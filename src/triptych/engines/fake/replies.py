"""Scripted replies of the fake engine, so that tests can decide what a model says.

A file of JSON lines; the first line whose ``prompt`` is part of the prompt's text gives the reply.
Prompts that no line names get tokens of the hash, as without a file.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import tokenizers
from msgspec import Struct

from triptych.checkpoint import Model
from triptych.errors import InvalidConfig
from triptych.messages import Work

EXAMPLE = '{"prompt": "weather", "reply": "Sunny."}, with "split": true or false if you need it'


class ScriptedReply(Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the file."""

    prompt: str  # a part of the prompt as text, control tokens included; empty: any prompt
    reply: str
    split: bool = False  # a token for each character; no control tokens then


class ReplyScript:
    """The replies of one file, as tokens."""

    def __init__(self, model: Model, path: str) -> None:
        self._library = tokenizers.Tokenizer.from_file(str(model.folder / "tokenizer.json"))
        self._library.no_truncation()
        self._library.no_padding()
        self._replies = [(line.prompt, self._ids(line, model)) for line in read_replies(path)]

    def find(self, work: Work) -> tuple[int, ...] | None:
        """The tokens of the reply to this prompt; None: the file has none."""
        text = self._library.decode(list(work.prompt), skip_special_tokens=False)
        return next((ids for prompt, ids in self._replies if prompt in text), None)

    def _ids(self, line: ScriptedReply, model: Model) -> tuple[int, ...]:
        pieces = list(line.reply) if line.split else [line.reply]
        ids = [
            id
            for piece in pieces
            for id in self._library.encode(piece, add_special_tokens=False).ids
        ]
        return (*ids, *model.end_ids[:1])


def read_replies(path: str) -> list[ScriptedReply]:
    """The lines of the file. Raises InvalidConfig."""
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise InvalidConfig(f"--fake-replies {path} cannot be read: {error.strerror}") from None
    replies: list[ScriptedReply] = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                replies.append(msgspec.json.decode(line, type=ScriptedReply))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            where = f"--fake-replies {path}, line {number}"
            raise InvalidConfig(f"{where} {_explain(error)}. Write it as {EXAMPLE}") from None
    return replies


def _explain(error: Exception) -> str:
    if not isinstance(error, msgspec.ValidationError):
        return "is not JSON"
    what, _, place = str(error).partition(" - at `$.")
    if field := place.rstrip("`"):
        return f"has a wrong '{field}'"
    named = re.search("`(.*)`", what)
    if named is None or "field" not in what:
        return "is not an object"
    return f"has {'no' if 'missing' in what else 'an unknown'} '{named[1]}'"
