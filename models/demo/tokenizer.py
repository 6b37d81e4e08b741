"""Makes the tokenizer: byte-level BPE in Qwen2's form, learned from the recipe's own sentences.

Words in capitals are left out, so that these are spelled letter by letter: the model can read out
words it never saw. (The tokenizer that ships has 38 pieces of capitals, such as "CK": they were
left out of one task only when it was made.) Any other text is given back exactly too, byte by byte
at worst.

    python -m models.demo.tokenizer [FOLDER]
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from models.demo import network
from models.demo.recipe.sample import Split
from models.demo.recipe.systems import SYSTEMS
from models.demo.recipe.tasks import MAKERS
from triptych.checkpoint import packaged_folder

PIECES = 2000
SAMPLES = 1500  # of each maker


def sentences() -> Iterator[str]:
    rng = random.Random(0)
    yield "system\nuser\nassistant\n"
    for maker in MAKERS.values():
        for _ in range(SAMPLES):
            for turn in maker(rng, Split.TRAIN, 2).turns:
                for text in (turn.question, turn.answer):
                    yield re.sub(r"[A-Z]{2,}", "", text)
        yield SYSTEMS.ask(rng, Split.TRAIN)


def make() -> Tokenizer:
    """How text is cut before pieces are learned is as in Qwen2's, which ships in small."""
    like = network.read_tokenizer(packaged_folder("qwen_omni"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = like.normalizer
    tokenizer.pre_tokenizer = like.pre_tokenizer
    tokenizer.decoder = like.decoder
    trainer = trainers.BpeTrainer(
        vocab_size=PIECES,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences(), trainer)
    tokenizer.add_special_tokens(list(network.SPECIAL))
    return tokenizer


def main(folder: Path = network.FOLDER) -> None:
    if (folder / "model.safetensors").exists():
        sys.exit(
            f"the weights in {folder} were trained with the tokenizer beside them, and know no "
            "other. Name another folder, or remove the weights to begin anew."
        )
    folder.mkdir(parents=True, exist_ok=True)
    made = make()
    made.save(str(folder / "tokenizer.json"))
    print(f"{folder / 'tokenizer.json'}: {made.get_vocab_size()} tokens")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
