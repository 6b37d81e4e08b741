"""The tokenizers that ship with the package, beside transformers."""

from __future__ import annotations

import importlib.util
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import triptych
from triptych.checkpoint import open_model
from triptych.prompt.tokenizer import Tokenizer

ASSETS = Path(triptych.__file__).parent / "assets"
TOOL = Path(__file__).parents[3] / "tools" / "make_tokenizers.py"
NAMES = ("qwen", "qwen_audio", "qwen_omni", "llava", "llava_next_video", "llama4")
SPECIAL = ("<|im_end|>", "<|image_pad|>", "<image>", "<s>", "</s>")

texts = st.one_of(
    st.text(max_size=40),
    st.lists(
        st.sampled_from(
            ("hello", " ", "  ", "\n", "é", "e\u0301", "你", "🎉", "▁", "<0x41>", "12", *SPECIAL)
        ),
        max_size=8,
    ).map("".join),
)


@cache
def ours(name: str) -> Tokenizer:
    return Tokenizer(open_model(ASSETS / name))


@cache
def theirs(name: str) -> tuple[Any, Any]:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    folder = str(ASSETS / name)
    return (
        transformers.AutoTokenizer.from_pretrained(folder),
        transformers.PreTrainedTokenizerFast.from_pretrained(folder),
    )


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(text=texts, special=st.booleans())
def test_ids_equal_those_of_transformers(name: str, text: str, special: bool) -> None:
    ids = ours(name).library.encode(text, add_special_tokens=special).ids
    for tokenizer in theirs(name):
        assert tokenizer.encode(text, add_special_tokens=special) == ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == ours(name).library.decode(ids)


@settings(max_examples=300, deadline=None)
@given(text=st.text())
@pytest.mark.parametrize("name", NAMES)
def test_any_text_comes_back(name: str, text: str) -> None:
    library = ours(name).library
    typed = any(word in text for word in ours(name).specials)
    back = library.decode(library.encode(text, add_special_tokens=False).ids)
    if name.startswith("llava"):  # U+2581 is how it writes a space, and drops a first space
        assert typed or back == text.replace("▁", " ").removeprefix(" ")
    else:
        assert typed or back == (text if name == "llama4" else unicodedata.normalize("NFC", text))


@pytest.mark.parametrize("name", NAMES)
def test_config_fits_the_tokenizer(name: str) -> None:
    model = open_model(ASSETS / name)
    assert model.vocabulary == ours(name).vocabulary
    assert set(model.media_ids.values()) <= set(ours(name).specials.values())
    assert ("audio" if name == "qwen_audio" else "image") in model.media_ids
    assert set(model.end_ids) <= set(ours(name).specials.values())


def test_the_script_makes_the_files_that_ship(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("make_tokenizers", TOOL)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    tool.main(tmp_path)
    made = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*.*")}
    ships = {path.relative_to(ASSETS): path.read_bytes() for path in ASSETS.glob("*/*.*")}
    assert made == {path: ships[path] for path in made}
    assert all(len(data) < 300_000 for data in made.values())
