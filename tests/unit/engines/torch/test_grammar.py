"""Answers of the demo model follow their grammar, in every way that a sequence can run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator

import msgspec
import pytest
import tokenizers
from tools.json_schemas import check_answer, random_schema, recursive_schema

from support.torch_engine import Answer, Bench, settled, split, whole
from triptych.checkpoint import packaged_folder
from triptych.engines.torch import grammar_checker, grammar_process
from triptych.engines.torch.engine import TorchEngine
from triptych.engines.torch.grammar import CACHED_GRAMMARS, GrammarCompiler
from triptych.engines.torch.grammar_checker import GrammarChecker
from triptych.engines.torch.grammar_messages import CheckedGrammar
from triptych.errors import InvalidSchema, Overloaded
from triptych.messages import Grammar, Sampling

FOLDER = packaged_folder("triptych-demo")
TOKENIZER = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
PROMPT = [5, 6, 7, 8]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 100},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def of_schema(schema: object) -> Grammar:
    return Grammar("json", json.dumps(schema))


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(FOLDER)


@pytest.fixture(scope="module")
def engine(bench: Bench) -> Iterator[TorchEngine]:
    with bench.engine() as engine:
        yield engine


def text(answer: Answer) -> str:
    return TOKENIZER.decode(answer.ids, skip_special_tokens=True)


def finish(answer: Answer) -> str | None:
    return answer.deltas[-1].finish


async def ask(
    bench: Bench, engine: TorchEngine, grammar: Grammar | None, **sampling: object
) -> Answer:
    options = {"temperature": 1.0, "max_tokens": 300, "grammar": grammar, **sampling}
    return await whole(engine, *bench.work(PROMPT, **options))


@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        (
            Grammar("choice", '["red","gr\\u00fcn \\ud83e\\udd8a","\\"q\\\\"]'),
            {"red", "grün 🦊", '"q\\'},
        ),
        (Grammar("regex", "(ab){2}|c"), {"abab", "c"}),
        (Grammar("regex", "^x$"), {"x"}),
        (Grammar("grammar", 'root ::= "x" | "y" "z"'), {"x", "yz"}),
        (Grammar("grammar", 'start: "x" | "y" "z"'), {"x", "yz"}),
        (of_schema({"enum": [1, "a"]}), {"1", '"a"'}),
    ],
)
async def test_every_kind_of_grammar_is_followed_to_its_end(bench, engine, grammar, texts):
    for seed in range(4):
        answer = await ask(bench, engine, grammar, seed=seed)
        assert text(answer) in texts
        assert finish(answer) == "stop"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_json_follows_its_schema(bench, engine, temperature):
    answer = await ask(bench, engine, of_schema(PERSON), temperature=temperature)
    assert finish(answer) == "stop"
    check_answer(text(answer), PERSON)


def test_objects_have_the_properties_that_their_schema_names():
    """Unless it says otherwise, or is combined with others."""
    inner = {"properties": {"properties": {"type": "integer"}}}
    closed = inner | {"additionalProperties": False}
    for schema, expected in [
        (inner, closed),
        ({"items": inner, "enum": [inner]}, {"items": closed, "enum": [inner]}),
        (
            {"$defs": {"a": inner}, "anyOf": [inner, True]},
            {"$defs": {"a": closed}, "anyOf": [closed, True]},
        ),
        (inner | {"additionalProperties": True}, inner | {"additionalProperties": True}),
        (inner | {"patternProperties": {}}, inner | {"patternProperties": {}}),
        (inner | {"anyOf": [inner]}, inner | {"anyOf": [inner]}),
        ({"type": "object"}, {"type": "object"}),
        (True, True),
    ]:
        assert grammar_process.close_objects(schema) == expected


async def test_an_object_ends_though_more_properties_would_be_valid(bench, engine):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    found = json.loads(text(await ask(bench, engine, of_schema(schema))))
    assert found.keys() == {"a"}


async def test_a_recursive_schema_is_followed(bench, engine):
    schema = recursive_schema()
    check_answer(text(await ask(bench, engine, of_schema(schema), seed=4)), schema)


async def test_prefill_and_decode_apart_give_the_same_tokens(bench, engine):
    with bench.engine() as second:
        for seed in range(3):
            options = {"temperature": 1.0, "max_tokens": 300, "seed": seed}
            work, media = bench.work(PROMPT, grammar=of_schema(PERSON), **options)
            alone = await whole(engine, work, media)
            assert (await split(engine, second, work, media)).ids == alone.ids
            assert finish(alone) == "stop"


async def test_a_resumed_request_continues_in_the_grammar(bench, engine):
    work, media = bench.work(PROMPT, grammar=of_schema(PERSON), temperature=1.0, max_tokens=300)
    answer = await whole(engine, work, media)
    for cut in (1, len(answer.ids) // 2, len(answer.ids) - 1):
        rest = msgspec.structs.replace(work, generated=tuple(answer.ids[:cut]))
        assert (await whole(engine, rest, media)).ids == answer.ids[cut:]


async def test_sixteen_at_once_beside_others_and_preempted_give_the_same(bench, engine):
    """And the tokens of requests without a grammar do not change."""
    grammars = [of_schema(PERSON), None, of_schema(random_schema(1)), None] * 4
    options = {"temperature": 0.8, "max_tokens": 36, "logprobs": 1}
    alone = [
        await ask(bench, engine, grammar, seed=seed, **options)
        for seed, grammar in enumerate(grammars)
    ]
    with bench.engine(kv_blocks=16) as small:
        together = await asyncio.gather(
            *(
                ask(bench, small, grammar, seed=seed, **options)
                for seed, grammar in enumerate(grammars)
            )
        )
        assert small.report().counters["preemptions"] > 0
        assert await settled(small)
    assert [answer.ids for answer in together] == [answer.ids for answer in alone]


async def test_log_probabilities_are_of_the_permitted_tokens(bench, engine):
    answer = await ask(bench, engine, Grammar("choice", '["7","8"]'), logprobs=20, temperature=0.0)
    first = answer.logprobs[0]
    assert len(first.top) == 2
    assert sum(2.718281828**entry.logprob for entry in first.top) == pytest.approx(1, abs=1e-4)
    assert first.logprob == first.top[0].logprob


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 1},
        {"top_p": 0.01},
        {"min_p": 1.0},
        {"logit_bias": {64: 100.0, 2002: 100.0}},
        {"repetition_penalty": 50.0, "frequency_penalty": 2.0},
        {"temperature": 50.0},
    ],
    ids=lambda settings: next(iter(settings)),
)
async def test_other_settings_choose_among_the_permitted_tokens(bench, engine, settings):
    answer = await ask(bench, engine, Grammar("regex", "[0-9]{4}"), seed=1, **settings)
    assert len(text(answer)) == 4
    assert text(answer).isdigit()


async def test_ignored_end_tokens_end_only_what_cannot_go_on(bench, engine):
    answer = await ask(bench, engine, Grammar("regex", "[ab]{1,9}"), ignore_eos=True)
    assert len(text(answer)) == 9
    assert finish(answer) == "stop"


async def test_max_tokens_cuts_and_a_complete_text_stops(bench, engine):
    cut = await ask(bench, engine, Grammar("regex", "[0-9]{9}"), max_tokens=2)
    assert finish(cut) == "length"
    assert len(cut.ids) == 2
    whole_text = await ask(bench, engine, Grammar("regex", "[0-9]"), max_tokens=1)
    assert finish(whole_text) == "stop"


async def test_tokens_that_do_not_fit_the_grammar_fail_the_request(bench, engine):
    work, media = bench.work(PROMPT, grammar=Grammar("regex", "[0-9]{4}"))
    wrong = msgspec.structs.replace(work, generated=(5, 6))
    with pytest.raises(InvalidSchema, match="beyond 2 tokens"):
        await whole(engine, wrong, media)
    assert await settled(engine)


HOSTILE = {
    "bad regex": Grammar("regex", "(("),
    "look-ahead": Grammar("regex", "(?=a)b"),
    "bad type": of_schema({"type": "nonsense"}),
    "unsupported keyword": of_schema({"type": "array", "uniqueItems": True}),
    "never ends": of_schema({"$ref": "#"}),
    "another file": of_schema({"$ref": "file:///etc/passwd"}),
    "another host": of_schema({"$ref": "http://127.0.0.1/"}),
    "slow multipleOf": of_schema({"type": "integer", "multipleOf": 99999999}),
    "huge enumeration": of_schema({"enum": [f"value{i}" for i in range(100_000)]}),
    "many properties": of_schema(
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}
    ),
    "doubling": of_schema(
        {
            "$defs": {
                f"a{i}": {
                    "allOf": [
                        {"anyOf": [{"properties": {f"{n}{i}": {}}} for n in "xy"]},
                        {"$ref": f"#/$defs/a{i + 1}"},
                    ]
                }
                for i in range(25)
            }
            | {"a25": {"type": "object"}},
            "$ref": "#/$defs/a0",
        }
    ),
    "bad grammar": Grammar("grammar", "start: missing"),
    "deep grammar": Grammar("grammar", "start: " + "(" * 100_000),
    "deep EBNF": Grammar("grammar", "root ::= " + "(" * 100_000),
    "three complements": Grammar("grammar", "start: A\nA: /.*a.{25}/ & /.*b.{25}/ & ~/.*c.{25}/"),
}


@pytest.mark.timeout(120)
async def test_b13_hostile_grammars_are_refused_while_others_are_served(bench, engine):
    """One of them would compile for minutes."""
    refusals = {
        name: asyncio.create_task(ask(bench, engine, grammar)) for name, grammar in HOSTILE.items()
    }
    plain = await ask(bench, engine, None, max_tokens=20, temperature=0.0)
    assert len(plain.ids) == 20
    for name, refusal in refusals.items():
        with pytest.raises(InvalidSchema) as refused:
            await refusal
        assert refused.value.status == 400, name
        assert len(refused.value.message) < 500
    assert finish(await ask(bench, engine, Grammar("regex", "(a|b)+c"), max_tokens=50)) is not None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("root ::= foo", "Rule 'foo' not found"),
        ("root := foo", "Expected ::= at line 1"),
        ("hello", "Expected ::= at line 1"),
        ("root ::= [\\", "it is not valid EBNF"),
    ],
)
async def test_a_wrong_ebnf_is_explained_by_a_process_that_lives_on(bench, text, why):
    compiler = GrammarCompiler(bench.model, 5.0)
    await compiler.matcher(Sampling(seed=1, grammar=Grammar("regex", "a+")))
    process = compiler._checker._process
    with pytest.raises(InvalidSchema, match=why):
        await compiler.matcher(Sampling(seed=1, grammar=Grammar("grammar", text)))
    assert compiler._checker._process is process
    compiler.close()


async def test_b13_nested_repetition_is_linear(bench, engine):
    answer = await ask(bench, engine, Grammar("regex", "(a+)+b"), seed=2)
    assert set(text(answer)) <= {"a", "b"}


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("grammar", "start: " + " | ".join(f'"word{i}"' for i in range(400))),
        of_schema({"type": "object", "properties": {f"p{i}": {} for i in range(200)}}),
    ],
    ids=["alternatives", "optional properties"],
)
async def test_large_grammars_that_are_clear_are_taken(bench, grammar):
    compiler = GrammarCompiler(bench.model, 5.0)
    await compiler.matcher(Sampling(seed=1, grammar=grammar))
    compiler.close()


async def test_an_ambiguous_grammar_fails_before_others_wait_long_for_its_masks(bench):
    """The time for each mask grows with the cube of the tokens."""
    compiler = GrammarCompiler(bench.model, 5.0)
    ambiguous = Grammar("grammar", 'start: s\ns: s s s s | "a" s "a" | "a" | ""')
    matcher = await compiler.matcher(Sampling(seed=1, grammar=ambiguous))
    matcher.prepare([TOKENIZER.token_to_id("a")] * 120)
    assert "The grammar cannot be followed" in matcher.error
    compiler.close()


async def test_a_grammar_does_not_wait_for_others_for_ever(bench, monkeypatch):
    monkeypatch.setattr(grammar_checker, "WAIT_SECONDS", 0.05)
    compiler = GrammarCompiler(bench.model, 1.0)
    slow = Sampling(seed=1, grammar=HOSTILE["slow multipleOf"])
    hostile = asyncio.create_task(compiler.matcher(slow))
    await asyncio.sleep(0.01)
    with pytest.raises(Overloaded):
        await compiler.matcher(Sampling(seed=1, grammar=Grammar("regex", "a+")))
    with pytest.raises(InvalidSchema):
        await hostile
    await compiler.matcher(Sampling(seed=1, grammar=Grammar("regex", "a+")))
    compiler.close()


async def test_a_grammar_that_was_not_finished_in_time_is_tried_again(bench, monkeypatch):
    """The machine may have been busy."""
    compiler = GrammarCompiler(bench.model, 5.0)
    sampling = Sampling(seed=1, grammar=Grammar("regex", "a+"))
    await compiler.matcher(Sampling(seed=1, grammar=Grammar("regex", "b+")))
    process = compiler._checker._process
    assert process is not None
    process._process.send_signal(signal.SIGSTOP)
    await asyncio.to_thread(os.waitpid, process._process.pid, os.WUNTRACED)  # until it has
    with monkeypatch.context() as busy:
        busy.setattr(compiler._checker, "_seconds", 0.05)
        with pytest.raises(InvalidSchema, match="to compile"):
            await compiler.matcher(sampling)
    await compiler.matcher(sampling)
    compiler.close()


async def test_a_grammar_is_not_refused_since_the_process_died_before(bench):
    compiler = GrammarCompiler(bench.model, 5.0)
    await compiler.matcher(Sampling(seed=1, grammar=Grammar("regex", "a+")))
    process = compiler._checker._process
    assert process is not None
    process._process.kill()
    process._process.wait()
    await compiler.matcher(Sampling(seed=1, grammar=Grammar("regex", "b+")))
    compiler.close()


async def test_tenants_take_turns_whatever_salts_they_choose(bench, monkeypatch):
    compiler = GrammarCompiler(bench.model, 5.0)
    order: list[str] = []
    waited = threading.Event()

    def check(grammar: Grammar) -> CheckedGrammar:
        waited.wait(10)
        order.append(grammar.text)
        return CheckedGrammar(error="no")

    monkeypatch.setattr(compiler._checker, "_check", check)

    async def ask_for(tenant: str, number: int) -> None:
        grammar = Grammar("regex", f"{tenant}{number}")
        with pytest.raises(InvalidSchema):
            await compiler.matcher(Sampling(seed=1, grammar=grammar), f"{tenant}\n{number}")

    asked = [asyncio.create_task(ask_for("a", number)) for number in range(4)]
    asked += [asyncio.create_task(ask_for("b", 0))]
    await asyncio.sleep(0)
    while compiler._checker._turns.waiting < 4:
        await asyncio.sleep(0)
    waited.set()
    await asyncio.gather(*asked)
    assert order == ["a0", "a1", "b0", "a2", "a3"]
    compiler.close()


async def test_who_leaves_keeps_the_turn_until_the_grammar_is_compiled(bench, monkeypatch):
    checker = GrammarChecker(bench.model, 5.0)
    waited = threading.Event()
    monkeypatch.setattr(checker, "_check", lambda grammar: waited.wait(10) and CheckedGrammar("x"))
    leaving = asyncio.create_task(checker.check(Grammar("regex", "a"), ""))
    while not checker._turns.in_use:
        await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert checker._turns.in_use == 1
    waited.set()
    assert await checker.check(Grammar("regex", "b"), "") == "x"
    checker.close()


async def test_a_grammar_is_compiled_once(bench, monkeypatch):
    compiler = GrammarCompiler(bench.model, 5.0)
    built: list[str] = []
    build = compiler._build
    monkeypatch.setattr(compiler, "_build", lambda *given: built.append(given[0]) or build(*given))
    sampling = Sampling(seed=1, grammar=Grammar("regex", "a+"))
    await asyncio.gather(*(compiler.matcher(sampling) for _ in range(8)))
    await compiler.matcher(sampling)
    assert len(built) == 1
    for number in range(CACHED_GRAMMARS):
        await compiler.matcher(Sampling(seed=1, grammar=Grammar("regex", f"a{number}")))
    await compiler.matcher(sampling)
    assert len(built) == 1 + CACHED_GRAMMARS + 1, "the oldest was evicted"
    compiler.close()
