"""The placeholders of media in a prompt, and what a template writes around them.

A model names one token for each kind of media that it takes. Its chat template may write another
one (Llama 4's ``<|image|>``), with tokens around it; rendering a probe finds both. Does not know
requests: ``processor`` finds the placeholders of one.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from msgspec import Struct

from triptych.checkpoint import Model
from triptych.errors import InvalidValue, UnsupportedModel
from triptych.messages import MediaKind
from triptych.prompt.template import ChatTemplate
from triptych.prompt.tokenizer import Tokenizer

_PROBE = {"type": "text", "text": "triptychprobe"}
_AROUND: dict[MediaKind, str] = {"image": "vision", "video": "vision", "audio": "audio"}


class Placeholder(Struct, frozen=True):
    """How one kind of media is written."""

    id: int  # the model's token, one of which stands for each item in a prompt
    word: str  # what a template writes for it,
    written: int  # and the token of that
    frame: tuple[str, str]  # tokens directly before and after it, as text
    part: dict[str, Any]  # of a message, for which a template writes it

    @property
    def whole(self) -> str:
        return f"{self.frame[0]}{self.word}{self.frame[1]}"


def find_placeholders(
    model: Model, tokenizer: Tokenizer, template: ChatTemplate | None
) -> dict[MediaKind, Placeholder]:
    """The placeholder of each kind that the model takes."""
    found: dict[MediaKind, Placeholder] = {}
    for kind, id in model.media_ids.items():
        word = tokenizer.token(id)
        if not word:
            raise UnsupportedModel(
                f"config.json says that {id} is the placeholder of {kind}, but the tokenizer has "
                "no such token"
            )
        probed = None
        if template is not None and template.takes_parts:
            probed = _probe(kind, id, word, tokenizer, template)
        found[kind] = probed or Placeholder(
            id, word, id, _configured(model, tokenizer, kind), {"type": kind}
        )
    return found


def _probe(
    kind: MediaKind, id: int, word: str, tokenizer: Tokenizer, template: ChatTemplate
) -> Placeholder | None:
    """What the template writes for a part of this kind; None if it writes nothing."""
    ids = {token.content: token.id for token in tokenizer.description.added_tokens}
    longest_first = sorted(ids, key=len, reverse=True)
    control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
    for part in ({"type": kind}, {"type": kind, kind: ""}, {"type": kind, f"{kind}_url": ""}):
        try:
            with_it, without = (
                template.render([{"role": "user", "content": content}])
                for content in ([part, _PROBE], [_PROBE])
            )
        except InvalidValue:
            continue
        new = Counter(control.findall(with_it)) - Counter(control.findall(without))
        if word in new:
            written = word
        elif len(new) == 1:
            (written,) = new
        else:
            continue
        frame = _frame(with_it, written, control, new)
        return Placeholder(id, written, ids[written], frame, part)
    return None


def _frame(text: str, word: str, control: re.Pattern[str], new: Counter[str]) -> tuple[str, str]:
    """The control tokens of a part directly before and after its placeholder."""
    at = text.index(word)
    before = [match[0] for match in control.finditer(text) if match.end() == at]
    after = control.match(text, at + len(word))
    return (
        next((found for found in before if found in new), ""),
        after[0] if after is not None and after[0] in new else "",
    )


def _configured(model: Model, tokenizer: Tokenizer, kind: MediaKind) -> tuple[str, str]:
    """The tokens around it that config.json names."""
    config = model.config.get("thinker_config") or model.config
    ids = (config.get(f"{_AROUND[kind]}_{side}_token_id") for side in ("start", "end"))
    before, after = ((tokenizer.token(id) or "") if isinstance(id, int) else "" for id in ids)
    return before, after
