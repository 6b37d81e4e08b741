"""Makes ``src/triptych/assets``: small tokenizers with their chat templates.

All are trained on sentences that this file makes up from its own word lists, so they carry nobody
else's text, and every run gives the same bytes. ``qwen`` has the shape of Qwen2.5-VL's tokenizer
(byte-level BPE), ``qwen_audio`` and ``qwen_omni`` are the same with the markers of Qwen2-Audio and
of Qwen2.5-Omni, ``llava`` has that of LLaVA-1.5's (BPE over words marked with a low line, and one
token for every byte), ``llava_next_video`` is the same with a word for videos, and ``llama4`` has
the control tokens of Llama 4. None knows any language well; all give back any text exactly.

    python tools/make_tokenizers.py [FOLDER]
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

ASSETS = Path(__file__).parents[1] / "src" / "triptych" / "assets"
PIECES = 2000  # tokens that are learned, bytes and characters among them
SENTENCES = 12_000
CONTEXT = 131_072

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
QWEN_AUDIO_SPECIAL = (*QWEN_SPECIAL[:3], "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
QWEN_OMNI_SPECIAL = (
    *QWEN_AUDIO_SPECIAL,
    "<|vision_bos|>",
    "<|vision_eos|>",
    "<|vision_pad|>",
    "<|IMAGE|>",
    "<|VIDEO|>",
)
LLAMA4_SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|eom|>",
    "<|eot|>",
    "<|header_start|>",
    "<|header_end|>",
    "<|image_start|>",
    "<|image_end|>",
    "<|tile_x_separator|>",
    "<|tile_y_separator|>",
    "<|image|>",
    "<|patch|>",
    "<|finetune_right_pad|>",
)

WORDS = {
    "thing": """
        picture image photo photograph drawing painting sketch poster map chart diagram
        table window door house street road bridge river lake sea beach island mountain
        hill forest field garden park city village market station airport harbour ship
        boat train bus car truck bicycle plane clock lamp book newspaper letter key cup
        glass bottle plate bowl knife fork spoon chair bed shelf box basket bag hat coat
        shirt shoe ring ball kite drum guitar piano violin camera computer phone screen
        keyboard button wheel engine tree leaf flower grass stone cloud star moon sun
        sky rain snow wind fire water shadow mirror wall roof floor ceiling corner edge
        line circle square triangle rectangle star cross arrow heart number word
        sentence question answer story song game rule model token request server machine
        program result example problem
    """,
    "being": """
        man woman child boy girl person teacher student doctor farmer sailor painter
        writer singer driver cook friend neighbour stranger crowd family dog cat horse
        cow sheep goat pig chicken duck goose bird eagle owl fish whale dolphin shark
        frog snake lizard turtle bee ant butterfly spider mouse rabbit fox wolf bear
        lion tiger elephant giraffe monkey
    """,
    "look": """
        red orange yellow green blue purple pink brown black white grey golden silver
        dark light bright pale large small tiny huge tall short long wide narrow thick
        thin round flat old new young clean dirty empty full open closed broken wooden
        metal paper quiet loud warm cold hot wet dry soft hard smooth rough heavy quick
        slow early late simple strange beautiful ordinary careful happy sad tired hungry
        famous important different several
    """,
    "do": """
        stands sits lies walks runs jumps swims flies waits sleeps works plays reads
        writes speaks listens looks smiles laughs turns falls rises opens closes carries
        holds brings takes gives shows hides finds loses keeps leaves follows leads
        watches sees hears knows thinks believes remembers forgets begins ends changes
        moves stays helps builds makes breaks paints counts describes explains compares
        answers asks
    """,
    "where": """
        in on under over above below behind before beside between near inside outside
        along across through around against towards beyond left right top bottom middle
        front back
    """,
    "when": """
        now then today tomorrow yesterday morning evening night noon often never always
        sometimes usually again already still soon later once twice first second third
        last next
    """,
    "count": """
        one two three four five six seven eight nine ten eleven twelve twenty thirty
        fifty hundred thousand many few some most all both no every each
    """,
    "link": """
        and but or because while although if when so that which who where until since
    """,
    "ask": """
        what which who where when why how many much is are was were does do did can
        could would
    """,
}
FRAMES = """The {look} {thing} {do} {where} the {thing}.
A {look} {being} {do} {where} the {look} {thing}, {link} a {being} {do} {when}.
There are {count} {thing}s {where} the {being}, and {count} of them are {look}.
What is the {being} {where} the {thing} holding? It is a {look} {thing}.
How many {look} {thing}s can you see {where} the picture? I can see {count}.
Please describe this image. It shows a {look} {thing} {where} a {thing} with {count} {being}s.
{when}, the {being} {do}; the {being}'s {thing} isn't {look}.
I don't know {ask} the {thing} is, {link} we've seen it {when}.
Compare the {look} {being} with the {look} one: they're {look}, {link} they'll be {look} {when}.
"{ask} {ask} it?" asked the {being}. "It's {look}," said the {being}, "you'd better wait."
In {number} there were {number} {thing}s, {number} {being}s and {number}% of the {thing}.
{link} {count} {being}s {do} {where} the {thing}: ({look}, {look} and {look}).
def {thing}_{do}({thing}, {being}={number}): return [{number}, {number}] + {thing}
You are a helpful assistant. The user and the assistant speak {when}; the system {do}.
USER: {ask} is the {thing}? ASSISTANT: The {thing} is {look}.
system user assistant: a user asks {when}, an assistant answers {count} {thing}s.
https://example.org/{thing}/{being}?{look}={number}&{when}=true
{{"{thing}": {number}, "{look}": true, "{being}": ["{look}", null]}}"""

QWEN_TEMPLATE = """\
{%- if messages[0]['role'] != 'system' -%}
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part['type'] == 'video' -%}
{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- else -%}
{{ part['text'] }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""
QWEN_AUDIO_TEMPLATE = """\
{%- set sounds = namespace(count=0) -%}
{%- if messages[0]['role'] != 'system' -%}
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'audio' -%}
{%- set sounds.count = sounds.count + 1 -%}
{{ 'Audio ' ~ sounds.count ~ ': <|audio_bos|><|AUDIO|><|audio_eos|>\\n' }}
{%- else -%}
{{ part['text'] }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""
QWEN_OMNI_TEMPLATE = (
    QWEN_TEMPLATE.replace("<|vision_start|>", "<|vision_bos|>")
    .replace("<|vision_end|>", "<|vision_eos|>")
    .replace("<|image_pad|>", "<|IMAGE|>")
    .replace("<|video_pad|>", "<|VIDEO|>")
    .replace(
        "{%- else -%}\n{{ part['text'] }}",
        "{%- elif part['type'] == 'audio' -%}\n{{ '<|audio_bos|><|AUDIO|><|audio_eos|>' }}\n"
        "{%- else -%}\n{{ part['text'] }}",
    )
)
LLAVA_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
{{ 'USER: ' }}
{%- elif message['role'] == 'assistant' -%}
{{ 'ASSISTANT: ' }}
{%- elif message['role'] != 'system' -%}
{{ raise_exception('Roles are system, user and assistant, not ' + message['role']) }}
{%- endif -%}
{%- if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] if part['type'] == 'image' -%}
{{ '<image>\\n' }}
{%- endfor -%}
{%- for part in message['content'] if part['type'] == 'text' -%}
{{ part['text'] }}
{%- endfor -%}
{%- endif -%}
{{ eos_token if message['role'] == 'assistant' else ' ' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ 'ASSISTANT:' }}
{%- endif -%}
"""
LLAVA_TEXTS = "{%- for part in message['content'] if part['type'] == 'text' -%}"
LLAVA_VIDEOS = """\
{%- for part in message['content'] if part['type'] == 'video' -%}
{{ '<video>\\n' }}
{%- endfor -%}
"""
LLAMA4_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{ '<|header_start|>' + message['role'] + '<|header_end|>\\n\\n' }}
{%- if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{{ '<|image|>' if part['type'] == 'image' else part['text'] }}
{%- endfor -%}
{%- endif -%}
{{ '<|eot|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|header_start|>assistant<|header_end|>\\n\\n' }}
{%- endif -%}
"""


class Drawn(dict[str, str]):
    """Gives another word of the kind each time it is asked."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self._draw = draw
        self._words = {kind: words.split() for kind, words in WORDS.items()}

    def __missing__(self, kind: str) -> str:
        if kind == "number":
            return str(self._draw.randrange(3000))
        return self._draw.choice(self._words[kind])


def sentences() -> Iterator[str]:
    draw = random.Random(7)
    words = Drawn(draw)
    frames = FRAMES.splitlines()
    for _ in range(SENTENCES):
        text = draw.choice(frames).format_map(words)
        yield text[0].upper() + text[1:] if draw.random() < 0.5 else text


def learn(text: list[str], split: pre_tokenizers.PreTokenizer, alphabet: list[str]) -> Any:
    """A BPE model as its JSON, its pieces numbered from 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split
    trainer = trainers.BpeTrainer(
        vocab_size=PIECES, initial_alphabet=alphabet, show_progress=False, max_token_length=16
    )
    tokenizer.train_from_iterator(text, trainer)
    return json.loads(tokenizer.to_str())["model"]


def byte_level(text: list[str], split: str) -> Tokenizer:
    """A byte-level BPE tokenizer without control tokens."""
    splits = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    model = learn(text, splits, pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(
            model["vocab"],
            [tuple(merge) for merge in model["merges"]],
            continuing_subword_prefix="",
            end_of_word_suffix="",
        )
    )
    tokenizer.pre_tokenizer = splits
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def make_qwen(
    folder: Path,
    text: list[str],
    special: tuple[str, ...],
    template: str,
    media: dict[str, str],
    markers: dict[str, str],
) -> None:
    tokenizer = byte_level(text, QWEN_SPLIT)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(list(special))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        **{f"{kind}_token": token for kind, token in media.items()},
        **markers,
        "extra_special_tokens": list(special[1:]),
    }
    write(folder, tokenizer, settings, template, ["<|im_end|>", "<|endoftext|>"], media)


def make_qwens(folder: Path, text: list[str]) -> None:
    make_qwen(
        folder / "qwen",
        text,
        QWEN_SPECIAL,
        QWEN_TEMPLATE,
        {"image": "<|image_pad|>", "video": "<|video_pad|>"},
        {
            "video_token": "<|video_pad|>",
            "vision_start_token": "<|vision_start|>",
            "vision_end_token": "<|vision_end|>",
        },
    )
    sound = {"audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
    make_qwen(
        folder / "qwen_audio",
        text,
        QWEN_AUDIO_SPECIAL,
        QWEN_AUDIO_TEMPLATE,
        {"audio": "<|AUDIO|>"},
        sound,
    )
    make_qwen(
        folder / "qwen_omni",
        text,
        QWEN_OMNI_SPECIAL,
        QWEN_OMNI_TEMPLATE,
        {"image": "<|IMAGE|>", "video": "<|VIDEO|>", "audio": "<|AUDIO|>"},
        {**sound, "vision_bos_token": "<|vision_bos|>", "vision_eos_token": "<|vision_eos|>"},
    )


def make_llama4(folder: Path, text: list[str]) -> None:
    tokenizer = byte_level(text, QWEN_SPLIT)
    tokenizer.add_special_tokens(list(LLAMA4_SPECIAL))
    begin = LLAMA4_SPECIAL[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A",
        pair=f"{begin} $A {begin} $B",
        special_tokens=[(begin, tokenizer.token_to_id(begin))],
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": "<|eot|>",
        "pad_token": "<|finetune_right_pad|>",
        "extra_special_tokens": list(LLAMA4_SPECIAL[4:-1]),
    }
    ends = ["<|eot|>", "<|eom|>", "<|end_of_text|>"]
    write(folder, tokenizer, settings, LLAMA4_TEMPLATE, ends, {"image": "<|image|>"})


def make_llava(folder: Path, text: list[str], *, videos: bool) -> None:
    media = {"image": "<image>", "video": "<video>"} if videos else {"image": "<image>"}
    words = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=True)
    model = learn(text, words, [chr(code) for code in range(32, 127)])
    head = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokenizer = Tokenizer(
        models.BPE(
            {piece: id for id, piece in enumerate([*head, *pieces])},
            [tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first", split=False
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", *media.values(), "<pad>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", head.index("<s>"))]
    )
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "add_eos_token": False,
        "legacy": False,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        **{f"{kind}_token": token for kind, token in media.items()},
        "extra_special_tokens": list(media.values()),
    }
    template = LLAVA_TEMPLATE
    if videos:
        template = template.replace(LLAVA_TEXTS, LLAVA_VIDEOS + LLAVA_TEXTS)
    write(folder, tokenizer, settings, template, ["</s>"], media)


def write(
    folder: Path,
    tokenizer: Tokenizer,
    settings: dict[str, Any],
    template: str,
    ends: list[str],
    media: dict[str, str],
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    common = {"clean_up_tokenization_spaces": False, "model_max_length": CONTEXT}
    write_json(folder / "tokenizer_config.json", settings | common)
    end_ids = [tokenizer.token_to_id(end) for end in ends]
    config = {
        "model_type": "fake",
        "max_position_embeddings": CONTEXT,
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": end_ids[0],
        **{f"{kind}_token_id": tokenizer.token_to_id(token) for kind, token in media.items()},
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"eos_token_id": end_ids})


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(folder: Path = ASSETS) -> None:
    text = list(sentences())
    make_qwens(folder, text)
    make_llava(folder / "llava", text, videos=False)
    make_llava(folder / "llava_next_video", text, videos=True)
    make_llama4(folder / "llama4", text)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
