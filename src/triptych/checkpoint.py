"""A checkpoint folder as data: what frontend and engines must know of it before loading weights.

Reads the JSON files of an ordinary Hugging Face folder. Loads no weights and no library.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from triptych.errors import UnsupportedModel
from triptych.messages import MediaKind

KINDS: tuple[MediaKind, ...] = ("image", "video", "audio")
T = TypeVar("T")
SAMPLES, SAMPLE_BYTES = 16, 4096  # of a file of weights: two checkpoints differ in some of them


class Model(Struct, frozen=True):
    folder: Path
    family: str  # config.json's model_type: "qwen2_5_vl", "llava" ...
    config: dict[str, Any]
    context: int  # longest sequence
    vocabulary: int  # rows of the embedding: ids below it are legal
    end_ids: tuple[int, ...]  # tokens that end a stream unless ignore_eos
    media_ids: dict[MediaKind, int]  # one of these stands in a prompt for each item of its kind
    revision: str  # identity of configuration and processor settings: part of every media key

    @property
    def name(self) -> str:
        return self.folder.name


def packaged_folder(name: str) -> Path:
    """The folder of a checkpoint that ships with Triptych: ``triptych-demo`` whole, the others
    without weights."""
    return Path(__file__).parent / "assets" / name


def cache_folder() -> Path:
    """The folder of the random checkpoints that the tools of a checkout make."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "triptych"


class _Text(Struct, frozen=True):
    """What we read of a language model's part of a config.json."""

    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None


class _Config(_Text, frozen=True):
    model_type: str = ""
    text_config: _Text | None = None
    thinker_config: dict[str, Any] | None = None  # Qwen2.5-Omni: the part that is served
    image_token_id: int | None = None
    image_token_index: int | None = None
    video_token_id: int | None = None
    video_token_index: int | None = None
    audio_token_id: int | None = None
    audio_token_index: int | None = None

    def placeholder(self, kind: MediaKind) -> int | None:
        for form in ("id", "index"):
            if (found := getattr(self, f"{kind}_token_{form}")) is not None:
                return int(found)
        return None


def open_model(folder: str | Path, max_model_len: int = 0) -> Model:
    path = Path(folder).expanduser().resolve()
    if not (path / "config.json").is_file():
        raise UnsupportedModel(
            f"'{folder}' is not a checkpoint folder: it has no config.json. Give the path of a "
            "folder as `hf download NAME --local-dir DIR` makes it."
        )
    config = read_json(path / "config.json")
    whole = _read(path / "config.json", _Config)
    if whole.thinker_config is not None:
        whole = _convert(whole.thinker_config, f"{path / 'config.json'}: thinker_config")
    text = whole.text_config or whole
    context = text.max_position_embeddings or whole.max_position_embeddings or 2048
    if max_model_len > context:
        raise UnsupportedModel(
            f"max_model_len is {max_model_len}, but the model's context is {context}"
        )
    vocabulary = text.vocab_size or whole.vocab_size
    if not vocabulary:
        raise UnsupportedModel(
            f"{path / 'config.json'} has no vocab_size: it describes no language model that can be "
            "served. Give the folder of a whole checkpoint."
        )
    ends = _read(path / "generation_config.json", _Text).eos_token_id
    for otherwise in (whole.eos_token_id, text.eos_token_id):
        ends = otherwise if ends is None else ends
    media = {kind: id for kind in KINDS if (id := whole.placeholder(kind)) is not None}
    return Model(
        folder=path,
        family=config.get("model_type", ""),
        config=config,
        context=max_model_len or context,
        vocabulary=vocabulary,
        end_ids=ends if isinstance(ends, tuple) else () if ends is None else (ends,),
        media_ids=media,
        revision=_revision(path),
    )


def fingerprint(model: Model) -> str:
    """Tells two checkpoints apart: configuration, tokenizer and weights.

    Reads little of the weights, so that it costs nothing beside loading them: names, sizes and
    samples. Not for telling a damaged file from a whole one.
    """
    digest = hashlib.sha256(model.revision.encode())
    files = [model.folder / "tokenizer.json", *sorted(model.folder.glob("*.safetensors"))]
    for path in (path for path in files if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            if path.suffix == ".json":
                digest.update(file.read())
                continue
            for number in range(SAMPLES):  # the first is the head, the last the tail
                file.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


class AddedToken(Struct, frozen=True):
    """An entry of ``added_tokens``, which are found in a text before all others."""

    id: int
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = True

    @property
    def plain(self) -> bool:
        """Whether it matches wherever it is written, and absorbs no white space beside it."""
        return not (self.lstrip or self.rstrip or self.single_word or self.normalized)


class TokenizerFile(Struct, frozen=True):
    """The part of a tokenizer.json that we read ourselves."""

    added_tokens: tuple[AddedToken, ...] = ()
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


def special_token_ids(folder: Path) -> dict[str, int]:
    """Ids of the tokens that a checkpoint's tokenizer was given besides those it learned."""
    added = _read(folder / "tokenizer.json", TokenizerFile).added_tokens
    return {token.content: token.id for token in added}


def read_json(path: Path) -> dict[str, Any]:
    """The object that a file of a checkpoint holds; an empty one if there is no such file."""
    return _read(path, dict[str, Any])


def _read(path: Path, type: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes() if path.is_file() else b"{}", type=type)
    except msgspec.ValidationError as error:
        raise UnsupportedModel(f"{path} has a wrong value: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnsupportedModel(f"{path} is not valid JSON: {error}") from None


def _convert(part: dict[str, Any], where: str) -> _Config:
    try:
        return msgspec.convert(part, _Config)
    except msgspec.ValidationError as error:
        raise UnsupportedModel(f"{where} has a wrong value: {error}") from None


def _revision(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in (
        "config.json",
        "preprocessor_config.json",
        "video_preprocessor_config.json",
        "processor_config.json",
    ):
        if (folder / name).is_file():
            digest.update(name.encode() + b"\0" + (folder / name).read_bytes())
    return digest.hexdigest()
