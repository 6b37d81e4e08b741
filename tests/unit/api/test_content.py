"""Whatever stands in a message, it becomes a turn or an error that names its place."""

import json
import re

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.api import requests
from triptych.api.content import CONTENT_TYPES, MediaPolicy
from triptych.api.request_body import decode_request
from triptych.errors import RequestError
from triptych.prompt.processor import MediaPart, TextPart

CHAT = msgspec.json.Decoder(requests.ChatRequest)
ALLOWED = MediaPolicy(True, 8, {"video": 1})

urls = st.sampled_from(
    [
        "",
        "data:",
        "data:;base64,AAAA",
        "data:image;base64,AAAA",
        "data:video/jpeg;base64,AA==,AA==",
        "DATA:audio/wav;base64,AA==",
        "http://a/",
        "media://a",
        "x",
    ]
)
strings = urls | st.text(max_size=5)
scalars = st.none() | st.booleans() | st.integers() | strings
payloads = st.one_of(
    scalars,
    st.fixed_dictionaries({"url": strings}),
    st.fixed_dictionaries({"file_data": strings}),
    st.fixed_dictionaries({"data": strings, "format": st.sampled_from(["wav", "mp3", "zip"])}),
    st.dictionaries(st.sampled_from(["url", "data", "format", "detail", "x"]), scalars, max_size=3),
)
good = st.sampled_from(
    [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "data:;base64,AAAA"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "video_embeds", "video_embeds": "AAAA"},
    ]
)
loose = st.dictionaries(st.sampled_from([*CONTENT_TYPES, "x"]), payloads, max_size=3).flatmap(
    lambda part: st.sampled_from([*CONTENT_TYPES, "film", None]).map(
        lambda type: part | {"type": type}
    )
)
typed = st.sampled_from(CONTENT_TYPES).flatmap(
    lambda type: payloads.map(lambda payload: {"type": type, type: payload})
)
contents = scalars | st.lists(good | typed | loose | scalars, max_size=4)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "king"]), "content": contents}
    ),
    max_size=3,
)


def read(raw):
    try:
        request, slices = decode_request(raw, CHAT, len(raw), 1 << 20, 32)
        return requests.to_turns(request.messages, slices, ALLOWED), None
    except RequestError as error:
        return (), error


@settings(max_examples=400, deadline=None)
@given(messages)
def test_every_message_is_accepted_or_refused_by_its_place(given):
    raw = json.dumps({"model": "m", "messages": given}).encode()
    turns, refusal = read(raw)
    if refusal is not None:
        assert re.match(r"messages($|\[\d+\])", refusal.param)
        return
    assert [turn.role for turn in turns] == [message["role"] for message in given]
    for turn, message in zip(turns, given, strict=True):
        if isinstance(turn.content, str):
            assert turn.content == (message["content"] or "")
            continue
        for part, was in zip(turn.content, message["content"], strict=True):
            if was["type"] in ("text", "input_text"):
                assert part == TextPart(was["text"])
            else:
                assert isinstance(part, MediaPart)
                assert was["type"].startswith(
                    (part.kind, f"input_{part.kind}", "file", "input_file")
                )
                assert (part.form == "embeds") == was["type"].endswith("_embeds")
