"""Chats and raw prompts to ids, beside transformers and under attack."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import triptych
from triptych.checkpoint import open_model
from triptych.config import Config
from triptych.errors import ContextLengthExceeded, InvalidConfig, InvalidValue, UnsupportedModel
from triptych.messages import MediaKind
from triptych.prompt.processor import (
    TURN_CHARACTERS,
    ChatTurn,
    MediaPart,
    PromptProcessor,
    TextPart,
)
from triptych.prompt.tokenizer import INLINE_CHARACTERS

ASSETS = Path(triptych.__file__).parent / "assets"
NAMES = sorted(path.parent.name for path in ASSETS.glob("*/config.json"))


def image(data: bytes) -> MediaPart:
    return MediaPart("image", "file", data)


def kinds_of(name: str) -> list[MediaKind]:
    return list(open_model(ASSETS / name).media_ids)


@cache
def processor(name: str, prompt_template: str = "") -> PromptProcessor:
    return PromptProcessor(open_model(ASSETS / name), Config(prompt_template=prompt_template))


@cache
def theirs(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    return transformers.AutoTokenizer.from_pretrained(str(ASSETS / name))


def rendered_by_transformers(name: str, turns: list[ChatTurn]) -> list[int]:
    messages = [
        {
            "role": turn.role,
            "content": turn.content
            if isinstance(turn.content, str)
            else [
                {"type": "text", "text": part.text}
                if isinstance(part, TextPart)
                else {"type": part.kind}
                for part in turn.content
            ],
        }
        for turn in turns
    ]
    text = theirs(name).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = theirs(name).encode(text, add_special_tokens=False)
    return ids


words = st.text("ab é你🎉\n<>|'\"{}", max_size=12).filter(lambda text: "<s>" not in text)


def chats(name: str) -> st.SearchStrategy[list[ChatTurn]]:
    media = st.builds(
        MediaPart,
        st.sampled_from(kinds_of(name)),
        st.sampled_from(["file", "embeds"]),
        st.one_of(st.binary(max_size=3), st.just("https://example.org/a")),
    )
    parts = st.one_of(words.map(TextPart), media)
    contents = st.one_of(words, st.lists(parts, max_size=4).map(tuple))
    turn = st.builds(ChatTurn, st.sampled_from(["system", "user", "assistant"]), contents)
    return st.lists(turn, min_size=1, max_size=4)


def words_of(name: str, ids: tuple[int, ...]) -> list[str]:
    return [processor(name).tokenizer.library.id_to_token(id) for id in ids]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
async def test_chats_equal_those_of_transformers(name: str, data: st.DataObject) -> None:
    turns = data.draw(chats(name))
    prompt = await processor(name).chat(turns)
    assert list(prompt.ids) == rendered_by_transformers(name, turns)
    media_ids = open_model(ASSETS / name).media_ids
    assert [(item.at, media_ids[item.part.kind]) for item in prompt.media] == [
        (at, id) for at, id in enumerate(prompt.ids) if id in media_ids.values()
    ]
    for kind in media_ids:
        given = [
            (f"messages[{i}].content[{j}]", part)
            for i, turn in enumerate(turns)
            for j, part in enumerate(turn.content)
            if isinstance(part, MediaPart) and part.kind == kind
        ]
        assert [(p.place, p.part) for p in prompt.media if p.part.kind == kind] == given


@pytest.mark.parametrize("name", NAMES)
async def test_b15_typed_placeholders_stay_text(name: str) -> None:
    known = processor(name)
    for kind in kinds_of(name):
        part = MediaPart(kind, "file", b"i")
        plain = await known.chat([ChatTurn("user", (part, TextPart("a (X) b")))])
        for word in known.tokenizer.specials:
            typed = await known.chat([ChatTurn("user", (part, TextPart(f"a {word}{word} b")))])
            controls, expected = (
                [id for id in prompt.ids if id in known.tokenizer.specials.values()]
                for prompt in (typed, plain)
            )
            assert controls == expected
            assert [item.part for item in typed.media] == [part]
            assert f"a {word}{word} b" in known.tokenizer.library.decode(typed.ids)


WRITTEN = {  # what stock templates write for a media item, besides its placeholder
    "qwen": {"image": ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]},
    "qwen_omni": {
        "image": ["<|vision_bos|>", "<|IMAGE|>", "<|vision_eos|>"],
        "video": ["<|vision_bos|>", "<|VIDEO|>", "<|vision_eos|>"],
        "audio": ["<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"],
    },
    "qwen_audio": {"audio": ["<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"]},
    "llava": {"image": ["<image>"]},
    "llava_next_video": {"image": ["<image>"], "video": ["<video>"]},
    "llama4": {"image": ["<|image|>"]},
}


@pytest.mark.parametrize(
    ("name", "kind", "word"),
    [
        (name, kind, word)
        for name, kinds in WRITTEN.items()
        for kind, words in kinds.items()
        for word in words
    ],
)
async def test_b15_typed_placeholders_stay_text_in_raw_prompts(
    name: str, kind: MediaKind, word: str
) -> None:
    """The placeholder of every kind, and the words around it; other control tokens do not."""
    known = processor(name)
    id, end = known.tokenizer.specials[word], open_model(ASSETS / name).end_ids[0]
    typed = await known.text(f"see {word} here{known.tokenizer.token(end)}")
    assert id not in typed.ids
    assert end in typed.ids
    assert f"see {word} here" in known.tokenizer.library.decode(typed.ids)
    chat = await known.chat([ChatTurn("user", (MediaPart(kind, "file", b""), TextPart("a")))])
    assert id in chat.ids  # which is what is typed in vain


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
async def test_b15_no_text_makes_a_control_token(name: str, data: st.DataObject) -> None:
    """Whole control tokens, their pieces, and pieces that only parts put together make whole."""
    known = processor(name)
    specials = known.tokenizer.specials
    word = st.sampled_from(list(specials))
    piece = st.one_of(
        word,
        st.tuples(word, st.integers(0, 14)).map(lambda cut: cut[0][: cut[1]]),
        st.tuples(word, st.integers(0, 14)).map(lambda cut: cut[0][cut[1] :]),
        st.sampled_from([" ", "a", "\U0010ff00"]),
    )
    texts = data.draw(st.lists(st.lists(piece, max_size=4).map("".join), min_size=1, max_size=4))
    prompt = await known.chat([ChatTurn("user", tuple(map(TextPart, texts)))])
    harmless = await known.chat([ChatTurn("user", "a")])
    controls = set(specials.values())
    assert [id for id in prompt.ids if id in controls] == [
        id for id in harmless.ids if id in controls
    ]
    decoded = known.tokenizer.library.decode(prompt.ids)
    assert "".join(texts) in decoded


@pytest.mark.parametrize("name", NAMES)
async def test_encoding_in_pieces_changes_nothing_else(name: str) -> None:
    """A text that only looks dangerous gets the same ids as ever."""
    known = processor(name)
    begun = known.tokenizer.token(next(iter(open_model(ASSETS / name).media_ids.values())))
    assert begun is not None
    begun = begun[:-2]
    for text in ("is 1 <", f"x {begun}", f"hello  {begun}", "< ", "<"):
        assert known._chat_escaper.needs_escaping(text)
        for turns in ([ChatTurn("user", text)], [ChatTurn("system", text), ChatTurn("user", "hi")]):
            assert list((await known.chat(turns)).ids) == rendered_by_transformers(name, turns)


@pytest.mark.parametrize("name", NAMES)
async def test_long_chats_equal_those_of_transformers(name: str) -> None:
    phrase = "the cat sits é "
    turns = [ChatTurn("user", phrase * (INLINE_CHARACTERS // len(phrase) + 1))]
    assert list((await processor(name).chat(turns)).ids) == rendered_by_transformers(name, turns)


@pytest.mark.parametrize("name", NAMES)
async def test_chats_of_many_turns(name: str) -> None:
    turns = [
        ChatTurn("user", f"{number} <s>") for number in range(INLINE_CHARACTERS // TURN_CHARACTERS)
    ]
    ids = (await processor(name).chat(turns)).ids
    specials = set(processor(name).tokenizer.specials.values())
    two = (await processor(name).chat([ChatTurn("user", "a")] * 2)).ids
    one = (await processor(name).chat([ChatTurn("user", "a")])).ids
    frame = sum(id in specials for id in two) - sum(id in specials for id in one)
    start = sum(id in specials for id in one) - frame
    assert sum(id in specials for id in ids) == start + frame * len(turns)


async def test_one_long_turn_is_read_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    known = processor("qwen")
    seen: list[bool] = []

    def spied(inner: Any) -> Any:
        def spy(*given: Any) -> Any:
            seen.append(threading.current_thread() is threading.main_thread())
            return inner(*given)

        return spy

    for name in ("_written", "_text_ids"):
        monkeypatch.setattr(known, name, spied(getattr(known, name)))
    text = "<|im_end|>" * (INLINE_CHARACTERS // 10 + 1)
    for ask in (known.text, lambda text: known.chat([ChatTurn("user", text)])):
        await ask("hi")
        await ask(text)
    assert seen == [True, False, True, False]


async def test_texts_beyond_the_context_are_refused() -> None:
    known = PromptProcessor(open_model(ASSETS / "qwen", max_model_len=100), Config())
    for text in ("a " * 200, "a " * INLINE_CHARACTERS, "<|im_end|>" * 50):
        with pytest.raises(ContextLengthExceeded, match="holds 100"):
            await known.chat([ChatTurn("user", text)])
        with pytest.raises(ContextLengthExceeded, match="holds 100"):
            await known.text(text + "<|image_pad|>" + text)


@pytest.mark.parametrize("name", NAMES)
async def test_raw_prompts(name: str) -> None:
    known = processor(name)
    library = known.tokenizer.library
    assert list((await known.text("The cat")).ids) == library.encode("The cat").ids
    assert (await known.text([5, 6])).ids == (5, 6)
    model = open_model(ASSETS / name)
    end = known.tokenizer.token(model.end_ids[0])
    assert model.end_ids[0] in (await known.text(f"a{end}")).ids
    for id in model.media_ids.values():
        typed = await known.text(f"see {known.tokenizer.token(id)}")
        assert typed.ids[:1] == (await known.text("see")).ids[:1]  # <s> where the tokenizer has it
        with pytest.raises(InvalidValue, match="placeholder"):
            await known.text([5, id])
    for wrong in ("", [], [model.vocabulary], [-1]):
        with pytest.raises(InvalidValue):
            await known.text(wrong)


@pytest.mark.parametrize("name", NAMES)
async def test_messages_that_are_not_a_chat_are_refused(name: str) -> None:
    for turns in ([], [ChatTurn("tool<|im_end|>", "a")]):  # type: ignore[arg-type]
        with pytest.raises(InvalidValue):
            await processor(name).chat(turns)


def copied(name: str, folder: Path, template: str | None, **config: Any) -> Path:
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(ASSETS / name / file, folder)
    whole = json.loads((ASSETS / name / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(whole))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def made(folder: Path, **config: Any) -> PromptProcessor:
    return PromptProcessor(open_model(folder), Config(**config))


async def test_a_template_that_refuses_is_a_client_error(tmp_path: Path) -> None:
    template = (
        "{% if messages|length > 1 %}{{ raise_exception('one turn only') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    known = made(copied("qwen", tmp_path, template))
    await known.chat([ChatTurn("user", "a")])
    with pytest.raises(InvalidValue, match="one turn only"):
        await known.chat([ChatTurn("user", "a"), ChatTurn("user", "b")])


@pytest.mark.parametrize(
    "line", ["{{ m.role + ': ' + m.content }}", "{{ m.role }}: {{ m.content }}"]
)
async def test_a_template_that_knows_only_strings(line: str, tmp_path: Path) -> None:
    folder = copied("llava", tmp_path, f"{{% for m in messages %}}{line}{{% endfor %}}")
    known = made(folder)
    turn = ChatTurn("user", (TextPart("a"), image(b"1"), TextPart("b <image>")))
    prompt = await known.chat([turn])
    assert known.tokenizer.library.decode(prompt.ids, skip_special_tokens=False) == (
        "<s> user: a\n<image>\nb <image>"
    )
    assert [item.part.source for item in prompt.media] == [b"1"]


async def test_a_template_that_knows_only_parts(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% for c in m.content | selectattr('type', 'equalto', 'text') %}"
        "{% generation %}{{ c.text | trim }}{% endgeneration %}{% endfor %}{% endfor %}"
    )
    known = made(copied("llava", tmp_path, template))
    prompt = await known.chat([ChatTurn("user", " hello ")])
    assert known.tokenizer.library.decode(prompt.ids) == "hello"
    with pytest.raises(InvalidValue, match="places for 0 images"):
        await known.chat([ChatTurn("user", (image(b""),))])


async def test_a_first_token_is_neither_missing_nor_doubled(tmp_path: Path) -> None:
    for template in ("{{ messages[0].content }}", "{{ bos_token + messages[0].content }}"):
        known = made(copied("llava", tmp_path, template))
        assert (
            words_of("llava", (await known.chat([ChatTurn("user", "cat")])).ids).count("<s>") == 1
        )
    bare = made(copied("llava", tmp_path, "{{ messages[0].content }}", image_token_id=None))
    assert "<s>" not in words_of("llava", (await bare.chat([ChatTurn("user", "cat")])).ids)


def test_template_files(tmp_path: Path) -> None:
    folder = copied("llava", tmp_path, None)
    with pytest.raises(InvalidConfig, match="--prompt-template"):
        made(folder)
    made(folder, prompt_template="Q: <prompt>")
    settings_file = folder / "tokenizer_config.json"
    plain = json.loads(settings_file.read_text())
    named = [{"name": "tool", "template": "{{"}, {"name": "default", "template": "{{ bos_token }}"}]
    settings_file.write_text(json.dumps(plain | {"chat_template": named}))
    made(folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{"}))
    with pytest.raises(UnsupportedModel, match="line 1"):
        made(folder)
    (folder / "chat_template.jinja").write_bytes(b"caf\xe9")
    with pytest.raises(UnsupportedModel, match="not UTF-8"):
        made(folder)
    settings_file.write_text("{")
    with pytest.raises(UnsupportedModel, match="not valid JSON"):
        made(folder)


def test_a_placeholder_without_a_token(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="placeholder"):
        made(copied("qwen", tmp_path, "{{ messages }}", image_token_id=999_999))


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [("qwen_audio", "image", "no images"), ("llava", "audio", "no sounds")],
)
async def test_media_that_the_model_does_not_take_are_named(
    name: str, kind: MediaKind, said: str
) -> None:
    turns = [
        ChatTurn("user", "a"),
        ChatTurn("user", (TextPart("b"), MediaPart(kind, "file", "file:x"))),
    ]
    with pytest.raises(InvalidValue, match=said) as caught:
        await processor(name).chat(turns)
    assert caught.value.param == "messages[1].content[1]"


async def test_media_stand_in_the_order_of_the_prompt() -> None:
    """This template writes all images of a turn before its videos."""
    film, picture = MediaPart("video", "file", "film"), MediaPart("image", "file", "picture")
    turns = [ChatTurn("user", (film, TextPart("a"), picture)), ChatTurn("user", (picture,))]
    prompt = await processor("llava_next_video").chat(turns)
    assert [p.part.source for p in prompt.media] == ["picture", "film", "picture"]
    assert sorted(prompt.media, key=lambda placed: placed.at) == list(prompt.media)
    for item, place in enumerate(("messages[0].content[2]", "messages[0].content[0]")):
        assert prompt.place(f"media[{item}]") == place
    assert prompt.place("media[3]") == "media[3]"
    assert prompt.place("n") == "n"
    assert prompt.place(None) is None


async def test_a_template_may_write_another_word_than_the_models(tmp_path: Path) -> None:
    """Llama 4's template writes <|image|>; what config.json names stands for a part of an image."""
    specials = processor("llama4").tokenizer.specials
    template = (ASSETS / "llama4" / "chat_template.jinja").read_text()
    patch = specials["<|patch|>"]
    folder = copied("llama4", tmp_path, template, image_token_id=None, image_token_index=patch)
    picture = image(b"1")
    for known in (made(folder), made(folder, prompt_template="<|image|><prompt>")):
        prompt = await known.chat([ChatTurn("user", (picture, TextPart("a <|image|> <|patch|>")))])
        assert [prompt.ids[placed.at] for placed in prompt.media] == [patch]
        assert prompt.ids.count(patch) == 1
        assert specials["<|image|>"] not in prompt.ids
        for id in (patch, specials["<|image|>"]):
            with pytest.raises(InvalidValue, match="placeholder"):
                await known.text([5, id])


@pytest.mark.parametrize("test", ["'audio' in c", "'audio_url' in c"])
async def test_templates_that_look_for_a_payload(test: str, tmp_path: Path) -> None:
    """Older ones do not ask a part for its type."""
    template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        f"{{% for c in m.content %}}{{% if {test} %}}<|audio_bos|><|AUDIO|><|audio_eos|>"
        "{% elif 'text' in c %}{{ c.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )
    known = made(copied("qwen_audio", tmp_path, template))
    prompt = await known.chat([ChatTurn("user", (MediaPart("audio", "file", b"1"), TextPart("a")))])
    assert len(prompt.media) == 1


async def test_sounds_are_counted_across_turns() -> None:
    sound = MediaPart("audio", "file", b"1")
    turns = [ChatTurn("user", (sound, TextPart("a"), sound)), ChatTurn("user", (sound,))]
    prompt = await processor("qwen_audio").chat(turns)
    text = processor("qwen_audio").tokenizer.library.decode(prompt.ids, skip_special_tokens=False)
    assert [f"Audio {n}: <|audio_bos|><|AUDIO|><|audio_eos|>\n" in text for n in (1, 2, 3, 4)] == [
        True, True, True, False,
    ]  # fmt: skip


async def test_prompt_templates_for_several_kinds() -> None:
    film, sound = MediaPart("video", "file", b"1"), MediaPart("audio", "file", b"2")
    seen = "<|vision_bos|><|VIDEO|><|vision_eos|>"
    heard = "<|audio_bos|><|AUDIO|><|audio_eos|>"
    for template, content, expected in (
        ("<prompt>!", (sound, TextPart("a"), film), f"{heard}\n{seen}\na!"),
        (f"{seen}<prompt>!", (sound, TextPart("a"), film), f"{seen}{heard}\na!"),
        (f"{seen}\n{heard}\n<prompt>!", (film, film, TextPart("a")), f"{seen}\n{seen}\na!"),
    ):
        known = processor("qwen_omni", template)
        prompt = await known.chat([ChatTurn("user", content)])
        text = known.tokenizer.library.decode(prompt.ids, skip_special_tokens=False)
        assert text == expected
        assert len(prompt.media) == sum(isinstance(part, MediaPart) for part in content)


async def test_a_broken_chat_template_does_not_matter_beside_a_prompt_template(
    tmp_path: Path,
) -> None:
    folder = copied("qwen_audio", tmp_path, "{{")
    with pytest.raises(UnsupportedModel):
        made(folder)
    known = made(folder, prompt_template="<prompt>")
    prompt = await known.chat([ChatTurn("user", (MediaPart("audio", "file", b"1"), TextPart("a")))])
    assert len(prompt.media) == 1


PICTURE = image(b"1")


@pytest.mark.parametrize(
    ("template", "content", "expected"),
    [
        (
            "USER: <image>\n<prompt> ASSISTANT:",
            (PICTURE, TextPart("hi")),
            "USER: <image>\nhi ASSISTANT:",
        ),
        ("USER: <image>\n<prompt> ASSISTANT:", "hi", "USER: hi ASSISTANT:"),
        ("<image>\n<prompt>", (PICTURE, TextPart("a"), PICTURE), "<image>\n<image>\na"),
        ("Q: <prompt>", (TextPart("a"), PICTURE, TextPart("b")), "Q: <image>\na\nb"),
        (
            "<image><prompt><image>",
            (PICTURE, PICTURE, TextPart("x <image>")),
            "<image>x <image><image>",
        ),
        ("<s>Q: <prompt>", "<s>", "Q: <s>"),
    ],
)
async def test_prompt_templates(template: str, content: Any, expected: str) -> None:
    known = processor("llava", template)
    prompt = await known.chat([ChatTurn("user", content)])
    assert prompt.ids[0] == known.tokenizer.specials["<s>"]
    text = known.tokenizer.library.decode(prompt.ids[1:], skip_special_tokens=False)
    assert text.replace(" <", "<").lstrip() == expected.replace(" <", "<")
    assert len(prompt.media) == prompt.ids.count(known.tokenizer.specials["<image>"])


async def test_prompt_template_with_a_frame_around_pictures(tmp_path: Path) -> None:
    specials = processor("qwen").tokenizer.specials
    ids = {
        "vision_start_token_id": specials["<|vision_start|>"],
        "vision_end_token_id": specials["<|vision_end|>"],
    }
    folder = copied("qwen", tmp_path, None, **ids)
    unit = "<|vision_start|><|image_pad|><|vision_end|>"
    for template, content, expected in (
        (f"{unit}<prompt>!", "hi", "hi!"),
        (f"{unit}<prompt>!", (PICTURE, PICTURE, TextPart("hi")), f"{unit}{unit}hi!"),
        ("<prompt>!", (PICTURE, TextPart("hi")), f"{unit}\nhi!"),
    ):
        known = made(folder, prompt_template=template)
        prompt = await known.chat([ChatTurn("user", content)])
        assert known.tokenizer.library.decode(prompt.ids, skip_special_tokens=False) == expected


async def test_prompt_templates_that_cannot_be_filled() -> None:
    for template in ("USER: ASSISTANT:", "<prompt> <prompt>"):
        with pytest.raises(InvalidConfig, match="<prompt>"):
            processor("llava", template)
    two = processor("llava", "<image><image><prompt>")
    with pytest.raises(InvalidValue, match="takes 2 images"):
        await two.chat([ChatTurn("user", (PICTURE, TextPart("a")))])


@pytest.mark.parametrize(
    "turns",
    [
        [ChatTurn("assistant", "a")],
        [ChatTurn("system", "be brief"), ChatTurn("user", "a")],
        [ChatTurn("user", "a"), ChatTurn("assistant", "b"), ChatTurn("user", "c")],
    ],
)
async def test_what_a_prompt_template_has_no_place_for_is_refused(turns: list[ChatTurn]) -> None:
    with pytest.raises(InvalidValue, match="one message from the user") as caught:
        await processor("llava", "USER: <prompt> ASSISTANT:").chat(turns)
    assert caught.value.param == "messages"


def test_the_processor_loads_no_heavy_library() -> None:
    code = (
        "import sys, triptych.prompt.processor, triptych.prompt.detokenizer; "
        "print([m for m in ('torch', 'numpy', 'transformers', 'PIL') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
