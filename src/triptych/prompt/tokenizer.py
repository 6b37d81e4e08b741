"""A model's tokenizer: text to token ids, and what each single id stands for.

Reads the folder's ``tokenizer.json`` with the ``tokenizers`` library only. Knows nothing of chat
templates (``template``), streams (``detokenizer``) or control tokens in texts (``control_tokens``).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import msgspec
import tokenizers

from triptych.checkpoint import AddedToken, Model, TokenizerFile
from triptych.errors import ContextLengthExceeded, InvalidValue, UnsupportedModel

# A thread costs 0.1 to 0.4 ms, encoding about 0.25 us a character: more characters would block the
# event loop for over a millisecond.
INLINE_CHARACTERS = 4096
CHARACTERS_PER_TOKEN = 4  # of ordinary text
PIECE_CHARACTERS = 1 << 16  # encoded at a time in a text that hardly fits the context
CUT_TOKENS = 64  # allowed for each cut through a text, which adds one or two
CACHED_SEGMENTS = 4096
MAX_SEGMENT_CHARACTERS = 512  # of one that is cached
LONE_SURROGATE = "The text is not valid Unicode: it has a lone surrogate."

Style = Literal["bytes", "runs", "other"]
T = TypeVar("T")


class Tokenizer:
    """Encodes and decodes without blocking the event loop.

    ``style`` says how tokens become text. "bytes": every token is some bytes, and all bytes
    together are UTF-8. "runs": tokens are text, except tokens of one byte each, and a run of these
    is one piece of UTF-8 (``strips``: the first space of the text is dropped). "other": only the
    library can decode them.
    """

    def __init__(self, model: Model) -> None:
        path = model.folder / "tokenizer.json"
        if not path.is_file():
            raise UnsupportedModel(
                f"{model.folder} has no tokenizer.json. Make one with transformers: "
                "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
            )
        try:
            self.description = msgspec.json.decode(path.read_bytes(), type=TokenizerFile)
        except msgspec.MsgspecError as error:
            raise UnsupportedModel(
                f"{path} is not a valid tokenizer: {error}. Download it again."
            ) from None
        self.library = tokenizers.Tokenizer.from_file(str(path))
        self.library.no_truncation()
        self.library.no_padding()
        self.vocabulary = self.library.get_vocab_size(with_added_tokens=True)
        self.specials = {
            token.content: token.id for token in self.description.added_tokens if token.special
        }
        self.style, self.strips = _style(self.description.decoder)
        self._segments = SegmentEncoder.of(self.library, self.description)
        self.pieces = TokenPieces(self)
        self._kept_pieces: dict[tuple[str, ...], TokenPieces] = {}
        # Threads of their own for encoding; very long texts do not delay the others.
        self._threads = ThreadPoolExecutor(2, "text"), ThreadPoolExecutor(1, "long text")

    async def run(self, characters: int, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that takes as long as encoding so many characters: at once if that is
        short, else in a thread."""
        if characters <= INLINE_CHARACTERS:
            return function(*arguments)
        threads = self._threads[characters > PIECE_CHARACTERS]
        return await asyncio.get_running_loop().run_in_executor(threads, function, *arguments)

    async def encode(self, text: str, special: bool = False, limit: int | None = None) -> list[int]:
        """Token ids; ``special`` adds what the tokenizer puts around a text (such as <s>).

        Raises ContextLengthExceeded for more than ``limit`` tokens.
        """
        return await self.run(len(text), self.ids, text, special, limit)

    def ids(self, text: str, special: bool = False, limit: int | None = None) -> list[int]:
        """As ``encode``, in the calling thread."""
        if self._segments is None or len(text) > INLINE_CHARACTERS:
            return encode_text(self.library, text, special, limit)
        ids = self._segments.encode(text)
        check_length(len(ids), limit)
        return ids

    async def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        if ids and not (min(ids) >= 0 and max(ids) < 1 << 31):
            raise InvalidValue("Token ids are numbers from 0 up to the size of the vocabulary.")
        (text,) = await self.run(
            CHARACTERS_PER_TOKEN * len(ids), self.library.decode_batch, [ids], skip_special
        )
        return text

    def pieces_with(self, kept: tuple[str, ...]) -> TokenPieces:
        """``pieces`` in which these special tokens are text; other strings change nothing. Made
        once for each ``kept``: take them from a table, not from a client."""
        found = self._kept_pieces.get(kept)
        if found is None:
            ids = {self.specials[token]: token for token in kept if token in self.specials}
            found = self._kept_pieces[kept] = TokenPieces(self, ids) if ids else self.pieces
        return found

    def token_bytes(self, id: int) -> bytes:
        """The bytes of this token alone; for a special token, its name."""
        piece = self.pieces[id]
        if isinstance(piece, bytes):
            return piece
        return (piece or self.token(id) or "").encode()

    def token(self, id: int) -> str | None:
        """Its entry in the vocabulary; None for an unknown id."""
        return self.library.id_to_token(id) if 0 <= id < 1 << 32 else None


class SegmentEncoder:
    """Encodes a text segment by segment, and caches the segments between control tokens.

    A tokenizer splits a text at its added tokens and then encodes each segment alone, so the result
    is the same. Chats repeat most of their segments: those of the template, the system message, and
    with every turn all turns before it.
    """

    def __init__(self, library: tokenizers.Tokenizer, added: Sequence[AddedToken]) -> None:
        longest_first = sorted((token.content for token in added), key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})").split
        self._added = {token.content: (token.id,) for token in added}
        self._library = library
        self._known: dict[str, tuple[int, ...]] = dict(self._added)

    @classmethod
    def of(cls, library: tokenizers.Tokenizer, description: TokenizerFile) -> SegmentEncoder | None:
        """None unless segments are known to be independent of each other."""
        written = msgspec.json.encode(description.pre_tokenizer)
        alone = _style(description.decoder)[0] == "bytes" and (
            b'"add_prefix_space":true' not in written
        )
        plain = bool(description.added_tokens) and all(t.plain for t in description.added_tokens)
        if alone and plain and not library.num_special_tokens_to_add(is_pair=False):
            return cls(library, description.added_tokens)
        return None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for segment in self._split(text):
            known = self._known.get(segment)
            ids += self._encode(segment) if known is None else known
        return ids

    def _encode(self, segment: str) -> tuple[int, ...]:
        ids = tuple(_encoded(self._library, segment).ids)
        if len(segment) <= MAX_SEGMENT_CHARACTERS:
            # Starting over is cheaper than noting the use of each.
            if len(self._known) - len(self._added) >= CACHED_SEGMENTS:
                self._known = dict(self._added)
            self._known[segment] = ids
        return ids


class TokenPieces(dict[int, str | bytes]):
    """What each id adds to a text: characters, or bytes that are not whole characters.

    Filled on demand: an answer uses little of a vocabulary of 150,000. Special tokens and unknown
    ids add nothing, except those in ``kept``.
    """

    def __init__(self, tokenizer: Tokenizer, kept: Mapping[int, str] | None = None) -> None:
        self.kept = kept or {}
        super().__init__(self.kept)
        self._tokenizer = tokenizer

    def __missing__(self, id: int) -> str | bytes:
        token = self._tokenizer.token(id)
        if token is None:
            return ""  # not stored: there are endlessly many
        piece = self[id] = self._piece(id, token)
        return piece

    def _piece(self, id: int, token: str) -> str | bytes:
        tokenizer = self._tokenizer
        if token in tokenizer.specials:
            return ""
        match tokenizer.style:
            case "bytes":
                return _characters(_spelled(token))
            case "runs":
                byte = _byte(token)
                return token.replace("▁", " ") if byte is None else byte
            case _:
                return tokenizer.library.decode([id], skip_special_tokens=True)


def encode_text(
    library: tokenizers.Tokenizer, text: str, special: bool = False, limit: int | None = None
) -> list[int]:
    """Token ids. Refuses more than ``limit``; far more, before it has encoded all of them."""
    if limit is not None and len(text) > max(PIECE_CHARACTERS, CHARACTERS_PER_TOKEN * limit):
        least = 0
        for at in range(0, len(text), PIECE_CHARACTERS):
            least += len(_encoded(library, text[at : at + PIECE_CHARACTERS])) - CUT_TOKENS
            check_length(least, limit, "over ")
    encoding = _encoded(library, text, special)
    check_length(len(encoding), limit)  # before millions of ids become Python objects
    return encoding.ids


def check_length(tokens: int, limit: int | None, about: str = "") -> None:
    if limit is not None and tokens > limit:
        raise ContextLengthExceeded(
            f"The prompt has {about}{tokens} tokens, but the context holds {limit}. Shorten it."
        )


def _encoded(
    library: tokenizers.Tokenizer, text: str, special: bool = False
) -> tokenizers.Encoding:
    """By the one function of the library that releases the GIL and computes only what we need.

    A batch of one is encoded in the calling thread.
    """
    try:
        (encoding,) = library.encode_batch_fast([text], add_special_tokens=special)
    except TypeError:  # for half a surrogate pair
        raise InvalidValue(LONE_SURROGATE) from None
    return encoding


def _style(decoder: dict[str, Any] | None) -> tuple[Style, bool]:
    match decoder:
        case {"type": "ByteLevel"} | {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}:
            return "bytes", False
        case {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *rest,
            ],
        }:
            match rest:
                case []:
                    return "runs", False
                case [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]:
                    return "runs", True
    return "other", False


def _alphabet() -> dict[str, int]:
    """The characters by which byte-level vocabularies write bytes.

    A byte that is a visible Latin-1 character stands for itself, the others for U+0100 and on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {
        chr(0x100 + place): byte for place, byte in enumerate(hidden)
    }


_BYTE_OF = _alphabet()
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def _spelled(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:  # an added token that is not written in bytes
        return token.encode()


def _characters(raw: bytes) -> str | bytes:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _byte(token: str) -> bytes | None:
    """The byte of a token like ``<0x0A>``."""
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes.fromhex(match[1]) if match else None
