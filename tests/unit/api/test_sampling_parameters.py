"""Fields that concern sampling and completions, as clients of other servers send them."""

import threading

import msgspec
import pytest

from triptych.api.requests import find_bad_words
from triptych.api.responses import TextFormat
from triptych.errors import InvalidValue

GENERATE = "/inference/v1/generate"
TEXT = "Hello there, wörld! 🎉 done"
ROUTES = ("/v1/chat/completions", "/v1/completions", GENERATE)


def body(path, **fields):
    if path == GENERATE:
        return {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2} | fields}
    prompt = (
        {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "a"}
    )
    return {"model": "tiny", "max_tokens": 2} | prompt | fields


async def text(web, **fields):
    reply = await web.ask("/v1/completions", {"model": "tiny", "prompt": "Once"} | fields)
    assert reply.status == 200, reply.body
    return reply.json


def sampling(web):
    return web.pipeline.works[-1].sampling


# --- what is taken


@pytest.mark.parametrize("path", ROUTES)
async def test_every_route_takes_the_same_fields(web, path):
    fields = {
        "top_k": -1,
        "seed": -1,
        "min_tokens": 1,
        "bad_words": ["a"],
        "allowed_token_ids": [3],
    }
    reply = await web.ask(path, body(path, **fields))
    assert reply.status == 200, reply.body
    found = sampling(web)
    assert (found.top_k, found.seed, found.min_tokens) == (0, (1 << 63) - 1, 1)
    assert found.allowed_token_ids == (3,)
    assert found.bad_words


@pytest.mark.parametrize(("seed", "mapped"), [(-(1 << 63), 0), (-7, (1 << 63) - 7), (7, 7)])
async def test_negative_seeds_are_mapped_and_others_stay(web, seed, mapped):
    await text(web, seed=seed)
    assert sampling(web).seed == mapped


async def test_completions_default_to_16_tokens_and_chats_to_the_context(web):
    web.pipeline.ids = [5] * 40
    answer = await text(web)
    assert answer["usage"]["completion_tokens"] == 16
    await web.ask(GENERATE, {"token_ids": [5], "sampling_params": {}})
    assert sampling(web).max_tokens == 16
    await web.chat()
    assert sampling(web).max_tokens is None


async def test_the_default_is_less_where_the_context_ends(web):
    context = web.app.handlers._model.context
    await text(web, prompt=[5] * (context - 3))
    assert sampling(web).max_tokens == 3


async def test_max_completion_tokens_win(web):
    await web.chat(max_tokens=3, max_completion_tokens=2)
    assert sampling(web).max_tokens == 2


HINTS = {
    "metadata": {"a": "b"}, "safety_identifier": "x", "prompt_cache_key": "x", "store": True,
    "prompt_cache_retention": "24h", "service_tier": "flex", "verbosity": "low", "user": "x",
    "prediction": {"type": "content", "content": "x"},
}  # fmt: skip
DEFAULTS = {
    "use_beam_search": False, "length_penalty": 1, "early_stopping": False, "priority": 0,
    "spaces_between_special_tokens": True, "best_of": 1, "echo": False, "no_stop_trim": False,
    "return_tokens_as_token_ids": False, "skip_special_tokens": True, "min_tokens": 0,
    "include_stop_str_in_output": False, "bad_words": [], "n": 1,
}  # fmt: skip
OTHER_VALUES = {
    "use_beam_search": True, "length_penalty": 1.5, "early_stopping": True, "priority": 1,
    "spaces_between_special_tokens": False, "best_of": 2, "no_stop_trim": True,
    "return_tokens_as_token_ids": True, "web_search_options": {}, "audio": {"voice": "x"},
    "modalities": ["text", "audio"], "suffix": "x",
}  # fmt: skip


@pytest.mark.parametrize("path", ROUTES[:2])
async def test_hints_and_defaults_of_other_servers_change_nothing(web, path):
    plain = body(path, seed=4)
    assert (await web.ask(path, plain)).status == 200
    reply = await web.ask(path, plain | HINTS | DEFAULTS | {"length_penalty": 1.0})
    assert reply.status == 200, reply.body
    first, second = (work.sampling for work in web.pipeline.works)
    assert first == second


@pytest.mark.parametrize("path", ROUTES[:2])
@pytest.mark.parametrize("name", OTHER_VALUES)
async def test_other_values_are_refused_by_name(web, path, name):
    reply = await web.ask(path, body(path, **{name: OTHER_VALUES[name]}))
    assert (reply.status, reply.code, reply.param) == (400, "unsupported_parameter", name)


WRONG = {  # of each field: a type, a range, something inside
    "min_tokens": ["1", -1, 3, 1.5],
    "bad_words": ["a", [""], [" "], [1], ["a" * 257], ["a"] * 257],
    "allowed_token_ids": [[], 3, [-1], [1 << 30], ["a"]],
    "skip_special_tokens": [0, "no"],
    "include_stop_str_in_output": [1, "yes"],
    "prompt_logprobs": [-1, 21, "1", True],
    "top_k": [-2, 0.5],
    "seed": [-(1 << 63) - 1, 1 << 63, "1"],
}  # fmt: skip


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("name", "value"), [(n, v) for n, each in WRONG.items() for v in each])
async def test_wrong_types_and_ranges_name_the_field(web, path, name, value):
    reply = await web.ask(path, body(path, **{name: value}))
    prefix = "sampling_params." if path == GENERATE else ""
    assert (reply.status, reply.code) == (400, "invalid_value")
    assert reply.param.partition("[")[0] == prefix + name


@pytest.mark.parametrize("name", sorted(HINTS))
async def test_hints_of_another_type_are_refused(web, name):
    reply = await web.chat(**{name: 3.5})
    assert (reply.status, reply.code, reply.param) == (400, "invalid_value", name)


def test_bad_words_are_found_at_the_start_and_within(web):
    tokenizer = web.pipeline.tokenizer
    start, within = tuple(tokenizer.ids("a")), tuple(tokenizer.ids(" a"))
    assert find_bad_words(["a", " a"], tokenizer) == (start, within)
    # As vLLM: with a space it is one token and not two, and so another word.
    assert find_bad_words(["no"], tokenizer) == (tuple(tokenizer.ids("no")),)
    with pytest.raises(InvalidValue):
        find_bad_words(["\n "], tokenizer)


# --- unknown parameters


async def test_unknown_parameters_are_refused_unless_null(web):
    assert (await web.chat(colour=None)).status == 200
    reply = await web.chat(colour="red")
    assert (reply.status, reply.code, reply.param) == (400, "unsupported_parameter", "colour")


@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_parameters_are_ignored_and_named_where_that_is_set(open_site, stream):
    async with open_site(unknown_parameters="ignore") as web:
        reply = await web.chat(colour="red", nvext={"a": 1}, shape=None, stream=stream)
        assert reply.status == 200
        assert reply.headers["x-triptych-ignored-parameters"] == "colour, nvext"
        assert "x-triptych-ignored-parameters" not in (await web.chat(stream=stream)).headers
        refused = await web.chat(use_beam_search=True)  # known, and not supported
        assert (refused.status, refused.param) == (400, "use_beam_search")
        refused = await web.chat(colour="red", n=0)
        assert (refused.status, refused.param) == (400, "n")


async def test_unknown_members_below_the_top_level_are_refused_all_the_same(open_site):
    """As docs/interface.md says."""
    async with open_site(unknown_parameters="ignore") as web:
        reply = await web.chat(stream=True, stream_options={"colour": "red"})
        assert (reply.status, reply.param) == (400, "stream_options.colour")
        reply = await web.ask(GENERATE, body(GENERATE, colour="red"))
        assert (reply.status, reply.param) == (400, "sampling_params.colour")


async def test_the_header_is_bounded_and_safe(open_site):
    async with open_site(unknown_parameters="ignore") as web:
        hostile = {"a\r\nset-cookie: x": 1, "ü" * 5000: 1} | {f"p{i}": 1 for i in range(5000)}
        reply = await web.chat(**hostile)
        assert reply.status == 200
        named = reply.headers["x-triptych-ignored-parameters"]
        assert named.startswith("a__set-cookie__x, ____")
        assert named.endswith(", ...")
        assert len(named) < 400
        assert "set-cookie" not in reply.headers


# --- text


async def test_special_tokens_are_shown_where_asked_for(web):
    special = web.pipeline.tokenizer.specials["<|im_start|>"]
    web.pipeline.ids = [*web.pipeline.tokenizer.ids("a"), special]
    assert (await text(web, max_tokens=2))["choices"][0]["text"] == "a"
    shown = await text(web, max_tokens=2, skip_special_tokens=False)
    assert shown["choices"][0]["text"] == "a<|im_start|>"


async def test_an_end_token_is_shown_with_the_stop_alone(web):
    end = web.app.handlers._model.end_ids[0]
    web.pipeline.ids = [*web.pipeline.tokenizer.ids("a"), end]
    fields = {"max_tokens": 2, "skip_special_tokens": False}
    assert (await text(web, **fields))["choices"][0]["text"] == "a"
    name = web.pipeline.tokenizer.token(end)
    shown = await text(web, **fields, include_stop_str_in_output=True)
    assert shown["choices"][0]["text"] == f"a{name}"
    ignored = await text(web, **fields, ignore_eos=True)
    assert ignored["choices"][0]["text"] == f"a{name}"


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_in_the_output_and_before_min_tokens(web, stream):
    async def said(**fields):
        given = {"model": "tiny", "prompt": "Once", "max_tokens": 99, "stream": stream} | fields
        reply = await web.ask("/v1/completions", given)
        events = reply.events[:-1] if stream else [reply.json]
        return "".join(event["choices"][0]["text"] for event in events)

    assert await said(stop="there") == "Hello "
    assert await said(stop="there", include_stop_str_in_output=True) == "Hello there"
    tokens = len(web.pipeline.tokenizer.ids("Hello there"))
    assert (await said(stop="there", min_tokens=tokens)).startswith(TEXT + "Hello ")


# --- logprobs and echo


async def test_logprobs_0_name_the_sampled_token(web):
    logprobs = (await text(web, logprobs=0, max_tokens=2))["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [
        {logprobs["tokens"][0]: -0.5},
        {logprobs["tokens"][1]: -0.5},
    ]


async def test_logprobs_of_the_prompt(web):
    answer = await text(web, prompt="Once upon a time", prompt_logprobs=1, n=2, max_tokens=1)
    ids = web.pipeline.works[0].prompt
    for choice in answer["choices"]:
        first, *rest = choice["prompt_logprobs"]
        assert first is None
        for id, found in zip(ids[1:], rest, strict=True):
            assert found[str(id)]["logprob"] == -0.25
            assert found[str(id)]["rank"] == 3
            assert found["40"] == {"logprob": -0.125, "rank": 1, "decoded_token": "I"}
    chat = (await web.chat(prompt_logprobs=0, max_tokens=1)).json
    assert len(chat["prompt_logprobs"]) == len(web.pipeline.works[-1].prompt)
    assert "prompt_logprobs" not in (await web.chat(max_tokens=1)).json
    reply = await web.chat(prompt_logprobs=0, stream=True)
    assert (reply.status, reply.param) == (400, "prompt_logprobs")


async def test_too_many_logprobs_of_the_prompt_are_refused(web):
    """Encoding them would hold up all other clients."""
    long = {"model": "tiny", "prompt": [5] * 1000, "n": 16, "max_tokens": 1}
    for fields, param in (
        ({"prompt_logprobs": 20}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 20}, "logprobs"),
        ({"echo": True, "logprobs": 20, "stream": True}, "logprobs"),
        ({"prompt": [[5] * 1000] * 16, "n": 1, "prompt_logprobs": 20}, "prompt_logprobs"),
    ):
        reply = await web.ask("/v1/completions", long | fields)
        assert (reply.status, reply.code, reply.param) == (400, "invalid_value", param)
        assert "336000" in reply.json["error"]["message"]
        assert "262144" in reply.json["error"]["message"]
    assert web.pipeline.works == []
    assert (await web.ask("/v1/completions", long | {"logprobs": 20})).status == 200


async def test_tokens_of_media_count_among_the_logprobs_of_a_prompt(web, monkeypatch):
    """The frontend learns how many they are from the engine."""
    plain = web.pipeline._tokens

    async def expanded(work, deliver):
        return await plain(
            msgspec.structs.replace(work, prompt=[*work.prompt, *[5] * 999]), deliver
        )

    monkeypatch.setattr(web.pipeline, "_tokens", expanded)
    monkeypatch.setattr("triptych.api.requests.MAX_PROMPT_LOGPROBS", 500)
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUFB"}}
    reply = await web.chat([picture], prompt_logprobs=0, max_tokens=1)
    assert (reply.status, reply.param) == (400, "prompt_logprobs")


async def test_a_thread_writes_the_logprobs_of_a_prompt(web, monkeypatch):
    threads, plain = [], TextFormat.with_prompt_logprobs

    def watched(self, response, prompts):
        threads.append(threading.current_thread())
        return plain(self, response, prompts)

    monkeypatch.setattr(TextFormat, "with_prompt_logprobs", watched)
    await text(web, prompt_logprobs=1)
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


@pytest.mark.parametrize("path", ROUTES)
async def test_one_choice_of_a_prompt_asks_for_its_logprobs(web, path):
    reply = await web.ask(path, body(path, n=3, prompt_logprobs=2))
    assert reply.status == 200
    asked = [work.sampling.prompt_logprobs for work in web.pipeline.works]
    assert asked == [2, None, None]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_has_those_of_the_prompt_in_every_choice(web, stream):
    given = {"model": "tiny", "prompt": ["Once upon", "a b c"], "n": 2, "echo": True}
    fields = {"logprobs": 1, "max_tokens": 1, "stream": stream}
    reply = await web.ask("/v1/completions", given | fields)
    found = {}
    for event in reply.events[:-1] if stream else [reply.json]:
        for choice in event["choices"]:
            found.setdefault(choice["index"], choice["logprobs"]["token_logprobs"])
    for index, work in enumerate(web.pipeline.works):
        assert found[index][1 : len(work.prompt)] == [-0.25] * (len(work.prompt) - 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_begins_with_the_prompt(web, stream):
    ids = web.pipeline.tokenizer.ids(" a b")
    given = {"model": "tiny", "prompt": ["Once ", ids], "n": 2, "echo": True, "max_tokens": 99}
    reply = await web.ask("/v1/completions", given | {"stream": stream, "stop": "there"})
    texts = [""] * 4
    for event in reply.events[:-1] if stream else [reply.json]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["Once Hello ", "Once Hello ", " a bHello ", " a bHello "]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("most", [0, 2])
async def test_echo_with_logprobs_has_those_of_the_prompt(web, stream, most):
    given = {"model": "tiny", "prompt": "Once upon", "echo": True, "logprobs": 1}
    reply = await web.ask("/v1/completions", given | {"max_tokens": most, "stream": stream})
    events = reply.events[:-1] if stream else [reply.json]
    choices = [event["choices"][0] for event in events]
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    found = {name: [x for part in parts for x in part[name]] for name in parts[0]}
    ids = web.pipeline.works[0].prompt
    prompt = [web.pipeline.tokenizer.token_bytes(id).decode() for id in ids]
    told = "".join(choice["text"] for choice in choices)
    assert told == ("Once uponHell" if most else "Once upon")
    assert found["tokens"][: len(ids)] == prompt
    assert "".join(found["tokens"]) == told
    assert found["token_logprobs"] == [None] + [-0.25] * (len(ids) - 1) + [-0.5] * most
    assert found["top_logprobs"][0] is None
    assert found["top_logprobs"][1] == {"I": -0.125, prompt[1]: -0.25}
    assert found["text_offset"] == [told.index(token) for token in found["tokens"]]
    assert web.pipeline.works[0].sampling.max_tokens == max(most, 1)
    if not stream:
        assert reply.json["usage"]["completion_tokens"] == most


async def test_no_tokens_are_for_echo_alone(web):
    reply = await web.ask("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 0})
    assert (reply.status, reply.param) == (400, "max_tokens")


# --- small routes


async def test_from_tokens_to_tokens(web):
    given = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3, "logprobs": 1}}
    answer = (await web.ask(GENERATE, given)).json
    assert web.pipeline.works[0].prompt == (5, 6)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == web.pipeline.ids[:3]
    assert choice["finish_reason"] == "length"
    names = [token["token"] for token in choice["logprobs"]["content"]]
    assert names == [f"token_id:{id}" for id in web.pipeline.ids[:3]]
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["request_id"].startswith("gen-")
    mine = (await web.ask(GENERATE, given | {"request_id": "mine", "model": "tiny"})).json
    assert mine["request_id"] == "mine"


async def test_from_tokens_to_tokens_streamed(web):
    given = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3}, "stream": True}
    *events, done = (await web.ask(GENERATE, given)).events
    assert done == "[DONE]"
    ids = [id for event in events for choice in event["choices"] for id in choice["token_ids"]]
    assert ids == web.pipeline.ids[:3]
    assert events[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"token_ids": []}, 400, "token_ids"),
        ({"token_ids": [1 << 30]}, 400, "token_ids"),
        ({"token_ids": "a"}, 400, "token_ids"),
        ({"features": {"a": 1}}, 400, "features"),
        ({"kv_transfer_params": {}}, 400, "kv_transfer_params"),
        ({"sampling_params": None}, 400, "sampling_params"),
        ({"sampling_params": {"output_kind": 2}}, 400, "sampling_params.output_kind"),
        ({"model": "other"}, 404, "model"),
        ({"priority": 0, "features": None, "sampling_params": {"detokenize": False}}, 200, None),
    ],
)
async def test_what_is_refused_from_tokens_to_tokens(web, fields, status, param):
    reply = await web.ask(GENERATE, {"token_ids": [5], "sampling_params": {}} | fields)
    assert reply.status == status
    assert status == 200 or reply.param == param


async def test_a_prompt_that_is_too_long_is_named_token_ids(web):
    given = {"token_ids": [5] * (1 << 18), "sampling_params": {}}
    reply = await web.ask(GENERATE, given)
    assert (reply.code, reply.param) == ("context_length_exceeded", "token_ids")


async def test_ping_and_version(web):
    reply = await web.ask("/ping")
    assert (reply.status, reply.body) == (200, b"")
    assert set((await web.ask("/version")).json) == {"version"}
    web.pipeline.absent = ("D",)
    reply = await web.ask("/ping")
    assert (reply.status, reply.body) == (503, b"")


async def test_a_model_card_names_its_checkpoint(open_site):
    async with open_site(served_model_name="mine") as web:
        card = (await web.ask("/v1/models/mine")).json
        assert (card["id"], card["root"], card["parent"]) == ("mine", "qwen", None)
