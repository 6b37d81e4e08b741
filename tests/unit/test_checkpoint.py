"""Checkpoint folders as data: what is read of them, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from triptych.checkpoint import SAMPLE_BYTES, fingerprint, open_model, packaged_folder, read_json
from triptych.errors import UnsupportedModel


def written(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"{}", "no vocab_size"),
        (b'{"model_type": "llama"}', "no vocab_size"),
        (b'{"vocab_size": "many"}', "vocab_size"),
        (b'{"vocab_size": 9, "text_config": []}', "text_config"),
        (b'{"vocab_size": 9, "eos_token_id": ["</s>"]}', "eos_token_id"),
        (
            b'{"thinker_config": {"vocab_size": "many"}}',
            r"thinker_config has a wrong value.*vocab_size",
        ),
        (b"[]", "Expected `object`"),
        (b'{"vocab_size": ', "not valid JSON"),
        (b'{"model_type": "caf\xe9"}', "not valid JSON"),
        (b'{"other": "caf\xe9", "vocab_size": 9}', "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
    ],
)
def test_a_config_that_is_none_is_refused_in_words(
    content: bytes, what: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UnsupportedModel, match=what) as caught:
        open_model(tmp_path)
    assert "config.json" in str(caught.value)


def test_a_folder_without_a_checkpoint_is_refused_with_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="`hf download NAME --local-dir DIR`"):
        open_model(tmp_path)


def test_what_stands_in_the_text_config_goes_first(tmp_path: Path) -> None:
    text = {"vocab_size": 20, "max_position_embeddings": 64, "eos_token_id": 3}
    model = open_model(written(tmp_path, vocab_size=10, image_token_index=0, text_config=text))
    assert (model.vocabulary, model.context, model.end_ids) == (20, 64, (3,))
    assert model.media_ids == {"image": 0}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    assert open_model(tmp_path).end_ids == (0, 7)
    assert open_model(tmp_path, max_model_len=32).context == 32
    with pytest.raises(UnsupportedModel, match="context is 64"):
        open_model(tmp_path, max_model_len=65)


def test_a_file_that_is_missing_is_an_empty_object(tmp_path: Path) -> None:
    assert read_json(tmp_path / "config.json") == {}


def test_the_fingerprint_distinguishes_checkpoints(tmp_path: Path) -> None:
    def now() -> str:
        return fingerprint(open_model(tmp_path))

    for file in ("config.json", "tokenizer.json"):
        shutil.copy(packaged_folder("qwen") / file, tmp_path)
    assert now() == fingerprint(open_model(packaged_folder("qwen")))  # neither has weights
    weights = bytearray(64 * SAMPLE_BYTES)
    seen = [now()]
    for at in (0, len(weights) // 5 * 3, len(weights) - 1):  # head, somewhere within, tail
        weights[at : at + 3 * SAMPLE_BYTES] = b"\1" * len(weights[at : at + 3 * SAMPLE_BYTES])
        (tmp_path / "model.safetensors").write_bytes(weights)
        seen.append(now())
    assert now() == seen[-1]
    (tmp_path / "model.safetensors").write_bytes(weights + b"\0")
    seen.append(now())
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    seen.append(now())
    (tmp_path / "empty.safetensors").write_bytes(b"")
    seen.append(now())
    (tmp_path / "tokenizer.json").write_bytes((tmp_path / "tokenizer.json").read_bytes() + b" ")
    seen.append(now())
    (tmp_path / "config.json").write_bytes((tmp_path / "config.json").read_bytes() + b" ")
    seen.append(now())
    assert len(set(seen)) == len(seen)
