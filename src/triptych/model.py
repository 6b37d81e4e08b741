"""A checkpoint folder as data: what frontend and engines must know of it before loading weights.

Reads the JSON files of an ordinary Hugging Face folder. Loads no weights and no library.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from triptych.errors import UnsupportedModel


class Model(Struct, frozen=True):
    folder: Path
    family: str  # config.json's model_type: "qwen2_5_vl", "llava" ...
    config: dict[str, Any]
    context: int  # longest sequence
    vocabulary: int  # rows of the embedding: ids below it are legal
    end_ids: tuple[int, ...]  # tokens that end a stream unless ignore_eos
    image_id: int | None  # placeholder token of an image
    revision: str  # identity of configuration and processor settings, part of media keys

    @property
    def name(self) -> str:
        return self.folder.name


def packaged(name: str) -> Path:
    """The folder of a checkpoint's JSON files that ships with Triptych (without weights)."""
    return Path(__file__).parent / "assets" / name


def open_model(folder: str | Path, max_model_len: int = 0) -> Model:
    path = Path(folder).expanduser().resolve()
    if not (path / "config.json").is_file():
        raise UnsupportedModel(
            f"'{folder}' is no checkpoint folder: it has no config.json. Give the path of a folder "
            "as `huggingface-cli download NAME --local-dir DIR` makes it."
        )
    config = _json(path / "config.json")
    text = config.get("text_config") or config
    context = text.get("max_position_embeddings") or config.get("max_position_embeddings") or 2048
    if max_model_len > context:
        raise UnsupportedModel(
            f"max_model_len is {max_model_len}, but the model's context is {context}"
        )
    generation = _json(path / "generation_config.json")
    ends = generation.get("eos_token_id", config.get("eos_token_id", text.get("eos_token_id")))
    image = config.get("image_token_id", config.get("image_token_index"))
    return Model(
        folder=path,
        family=config.get("model_type", ""),
        config=config,
        context=max_model_len or context,
        vocabulary=text.get("vocab_size") or config["vocab_size"],
        end_ids=tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,),
        image_id=image,
        revision=_revision(path),
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict)
    except msgspec.MsgspecError as error:
        raise UnsupportedModel(f"{path} is not valid JSON: {error}") from None
    return value


def _revision(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in ("config.json", "preprocessor_config.json", "processor_config.json"):
        if (folder / name).is_file():
            digest.update(name.encode() + b"\0" + (folder / name).read_bytes())
    return digest.hexdigest()
