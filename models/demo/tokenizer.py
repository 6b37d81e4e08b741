"""Makes the tokenizer: byte-level BPE in Qwen2's form, learned from the recipe's own sentences.

Words in capitals never occur among them, so that these are spelled letter by letter: the model can
read out words it never saw. Any other text is given back exactly too, byte by byte at worst.

    python -m models.demo.tokenizer
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from models.demo import network
from models.demo.recipe.sample import Split
from models.demo.recipe.systems import SYSTEMS
from models.demo.recipe.tasks import MAKERS

PIECES = 2000
SAMPLES = 1500  # of each maker
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def sentences() -> Iterator[str]:
    rng = random.Random(0)
    yield "system\nuser\nassistant\n"
    for name, maker in MAKERS.items():
        for _ in range(SAMPLES):
            for turn in maker(rng, Split.TRAIN, 2).turns:
                yield turn.question
                if name != "word":
                    yield turn.answer
        yield SYSTEMS.ask(rng, Split.TRAIN)


def make() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=PIECES,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences(), trainer)
    tokenizer.add_special_tokens(list(network.SPECIAL))
    return tokenizer


if __name__ == "__main__":
    network.FOLDER.mkdir(parents=True, exist_ok=True)
    made = make()
    made.save(str(network.FOLDER / "tokenizer.json"))
    print(f"{network.FOLDER / 'tokenizer.json'}: {made.get_vocab_size()} tokens")
