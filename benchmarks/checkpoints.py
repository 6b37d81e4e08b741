"""Random Qwen2.5-VL checkpoints that every engine loads, made when first asked for.

``tiny`` shows what a server costs without a model; ``middle`` (about 100 million parameters) has
enough of one to measure its arithmetic. Heads of the text model have 64 values, fewer of which
vLLM's attention on a CPU does not take. As a command: ``python -m benchmarks.checkpoints middle``.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSION = 1  # of the recipe: another one makes another folder
HEAD = 64
CONTEXT = 4096


@dataclass(frozen=True)
class Size:
    hidden: int  # of the text model
    inner: int
    layers: int
    kv_heads: int
    tower: int  # hidden size of the vision tower
    tower_inner: int
    tower_heads: int
    depth: int


SIZES = {
    "tiny": Size(128, 256, 3, 1, 64, 128, 2, 4),
    "middle": Size(768, 2304, 12, 4, 512, 1024, 8, 6),
}


def ensure(name: str) -> Path:
    """The folder of one, which appears whole or not at all."""
    from triptych.checkpoint import cache_folder

    folder = cache_folder() / f"bench-{name}-v{VERSION}"
    if not (folder / "config.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            _write(SIZES[name], making)
            making.chmod(0o755)
            making.rename(folder)
        finally:
            shutil.rmtree(making, ignore_errors=True)
    return folder


def _write(size: Size, folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer
    from tools.tiny_builders import (
        qwen_end_ids,
        qwen_files,
        qwen_text,
        qwen_vision_tokens,
    )
    from tools.tiny_folder import TOKENIZER_FILES, tokenizer_folder
    from transformers import GenerationConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer_folder("qwen2_5_vl") / name, folder / name)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = Qwen2_5_VLConfig(
        text_config=qwen_text(tokenizer) | _text(size),
        vision_config=_vision(size),
        **qwen_vision_tokens(tokenizer),
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    _fill(model, torch)
    ends = qwen_end_ids(tokenizer)
    model.generation_config = GenerationConfig(
        eos_token_id=list(ends), pad_token_id=ends[0], do_sample=False
    )
    model.save_pretrained(folder)
    for name, content in qwen_files().items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def _text(size: Size) -> dict[str, Any]:
    return {
        "hidden_size": size.hidden,
        "intermediate_size": size.inner,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.hidden // HEAD,
        "num_key_value_heads": size.kv_heads,
        "max_position_embeddings": CONTEXT,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [8, 12, 12],
        },
    }


def _vision(size: Size) -> dict[str, Any]:
    return {
        "depth": size.depth,
        "hidden_size": size.tower,
        "intermediate_size": size.tower_inner,
        "num_heads": size.tower_heads,
        "out_hidden_size": size.hidden,
        "window_size": 112,
        "fullatt_block_indexes": [size.depth // 2 - 1, size.depth - 1],
    }


def _fill(model: Any, torch: Any) -> None:
    """Weights that keep the size of what comes in, and a head that makes one token the best."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.ndim > 1:
                gain = 4.0 if name.startswith("lm_head") else 1.0
                weight.normal_(0, gain / math.sqrt(weight[0].numel()), generator=generator)
            elif name.endswith("weight"):
                weight.fill_(1)
            else:
                weight.normal_(0, 0.1, generator=generator)
        model.get_input_embeddings().weight.mul_(math.sqrt(model.config.text_config.hidden_size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=sorted(SIZES))
    print(ensure(parser.parse_args().name))


if __name__ == "__main__":
    main()
