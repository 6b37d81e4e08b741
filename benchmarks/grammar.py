"""Structured output: what a grammar costs, and llguidance beside xgrammar.

The libraries compile random JSON schemas (``tools.json_schemas``) for a vocabulary of 150,000
tokens, and each follows a text that the schema takes, one mask for each token. xgrammar runs where
it is installed; Triptych does not need it. Hostile grammars run in a process with a time limit.

The torch engine then generates with 16 requests at once, with a grammar and without one in turns,
on a CPU. No server.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from benchmarks.record import Figure

VOCABULARY = 150_000
AT_ONCE = 16
TOKENS = 96
WALK = 40  # tokens of a text that is followed
HOSTILE_SECONDS = 6.0
COST_TARGET, FIRST_TOKEN_TARGET_MS = 1.15, 5.0
END = 256
PEOPLE = {  # never complete within TOKENS
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    "minItems": 1000,
}
HOSTILE = {
    "multipleOf 99999999": {"type": "integer", "multipleOf": 99999999},
    "2,000 properties": {
        "type": "object",
        "properties": {f"p{i}": {"type": "string"} for i in range(2000)},
    },
    "enumeration of 100,000": {"enum": [f"value{i}" for i in range(100_000)]},
    "minItems 100,000": {"type": "array", "items": {"type": "string"}, "minItems": 100_000},
    "maxLength 10,000,000": {"type": "string", "maxLength": 10_000_000},
}

Mask = Callable[[], None]
# Compiles a schema; gives a function that computes the next mask, and one that takes a token.
Compile = Callable[[str], tuple[Mask, Callable[[int], bool]]]


def run(quick: bool) -> tuple[list[Figure], dict[str, Any]]:
    schemas = 20 if quick else 200
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    for name, load in LIBRARIES.items():
        if importlib.util.find_spec(name) is None:
            print(f"  {name} is not installed: left out")
            continue
        figures += _library(name, load(), schemas, details)
        if not quick:
            details[name]["hostile"] = {kind: _hostile(name, kind) for kind in HOSTILE}
    figures += asyncio.run(_engine(2 if quick else 5, details))
    return figures, details


def _library(name: str, compile: Compile, schemas: int, details: dict[str, Any]) -> list[Figure]:
    from tools.json_schemas import random_schema

    compiled: list[float] = []
    masks: list[float] = []
    refused = 0
    for number in range(schemas):
        schema = json.dumps(random_schema(number))
        start = time.perf_counter()
        try:
            mask, take = compile(schema)
        except (ValueError, RuntimeError):
            refused += 1
            continue
        compiled.append((time.perf_counter() - start) * 1e3)
        for token in b'{"name": "Ada", "id": 12, "list": [1, 2], "of": true, "x-y": null}'[:WALK]:
            start = time.perf_counter()
            mask()
            masks.append((time.perf_counter() - start) * 1e6)
            if not take(token):
                break
    details[name] = {"compile_ms": compiled, "masks": len(masks), "refused": refused}
    return [
        Figure(
            f"{name}: compile a schema, p99",
            _high(compiled),
            "ms",
            detail=f"p50 {median(compiled):.3g} ms; {schemas} schemas, {refused} refused",
        ),
        Figure(
            f"{name}: a mask, p99",
            _high(masks),
            "us",
            detail=f"p50 {median(masks):.3g} us; {VOCABULARY} tokens",
        ),
    ]


def _high(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def _vocabulary() -> list[bytes]:
    """Every byte, an end token, and random words."""
    draw = random.Random(5)
    words = {b" ", b'"', b'":', b'", "', b'{"', b'"}', b"],", b"true", b"null"}
    while len(words) < VOCABULARY - END - 1:
        letters = "abcdefghijklmnopqrstuvwxyz" if draw.random() < 0.9 else "0123456789.,:-"
        word = "".join(draw.choices(letters, k=draw.randint(2, 8)))
        words.add((" " * (draw.random() < 0.5) + word).encode())
    return [*(bytes([byte]) for byte in range(256)), b"<|end|>", *sorted(words)]


def _llguidance() -> Compile:
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    class Tokenizer:
        eos_token_id = END
        bos_token_id = None
        special_token_ids = (END,)
        tokens = _vocabulary()

        def __call__(self, text: str) -> list[int]:
            return list(text.encode())

    tokenizer = LLTokenizer(TokenizerWrapper(Tokenizer()))

    def compile(schema: str) -> tuple[Mask, Callable[[int], bool]]:
        source = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": " ?"})
        matcher = LLMatcher(tokenizer, source, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())

        def mask() -> None:
            matcher.compute_bitmask()
            if matcher.is_error():
                raise ValueError(matcher.get_error())

        return mask, lambda token: matcher.try_consume_tokens([token]) == 1

    return compile


def _xgrammar() -> Compile:
    import xgrammar

    info = xgrammar.TokenizerInfo(
        _vocabulary(), xgrammar.VocabType.RAW, vocab_size=VOCABULARY, stop_token_ids=[END]
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    bitmask = xgrammar.allocate_token_bitmask(1, VOCABULARY)

    def compile(schema: str) -> tuple[Mask, Callable[[int], bool]]:
        matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(schema))
        return lambda: matcher.fill_next_token_bitmask(bitmask), matcher.accept_token

    return compile


LIBRARIES: dict[str, Callable[[], Compile]] = {"llguidance": _llguidance, "xgrammar": _xgrammar}


def _hostile(library: str, kind: str) -> str:
    """What becomes of a hostile schema: its time and memory in a process of its own."""
    code = f"from benchmarks import grammar; grammar.compile_hostile({library!r}, {kind!r})"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=HOSTILE_SECONDS * 2,
        )
    except subprocess.TimeoutExpired:
        return f"not done after {HOSTILE_SECONDS * 2:g} s"
    return done.stdout.strip() or f"the process died: {done.returncode}"


def compile_hostile(library: str, kind: str) -> None:
    import resource

    compile = LIBRARIES[library]()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, result = time.perf_counter(), "compiled"
    try:
        mask, _ = compile(json.dumps(HOSTILE[kind]))
        mask()
    except (ValueError, RuntimeError) as error:
        result = f"refused ({str(error).splitlines()[0][:60]})"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    print(f"{result} after {time.perf_counter() - start:.2f} s, {grown} MB more")


async def _engine(rounds: int, details: dict[str, Any]) -> list[Figure]:
    """Times of the torch engine with the demo's model."""
    from triptych.messages import Grammar

    grammar = Grammar("json", json.dumps(PEOPLE))
    with _torch_engine() as ask:
        start = time.perf_counter()
        await ask(grammar, 1, 1)
        first_ever = (time.perf_counter() - start) * 1e3
        seconds: dict[str, list[float]] = {"with": [], "without": []}
        delays: dict[str, list[float]] = {"with": [], "without": []}
        for turn in range(rounds):
            for name, chosen in (("with", grammar), ("without", None)):
                start = time.perf_counter()
                await asyncio.gather(*(ask(chosen, turn * 100 + i, TOKENS) for i in range(AT_ONCE)))
                seconds[name].append(time.perf_counter() - start)
                for number in range(20):
                    start = time.perf_counter()
                    await ask(chosen, turn * 1000 + number, 1)
                    delays[name].append((time.perf_counter() - start) * 1e3)
    cost = median(seconds["with"]) / median(seconds["without"])
    delay = median(delays["with"]) - median(delays["without"])
    details["engine"] = {"seconds": seconds, "first_token_ms": delays, "first_ever_ms": first_ever}
    each = {name: median(values) / TOKENS * 1e3 for name, values in seconds.items()}
    return [
        Figure(
            f"torch engine, {AT_ONCE} at once: a step, with a grammar over without",
            cost,
            "x",
            COST_TARGET,
            detail=f"{each['with']:.2f} ms beside {each['without']:.2f} ms",
        ),
        Figure(
            "first token, once the grammar is compiled: later by",
            delay,
            "ms",
            FIRST_TOKEN_TARGET_MS,
            detail=f"{median(delays['with']):.2f} ms beside {median(delays['without']):.2f} ms; "
            f"{first_ever:.0f} ms with the very first grammar of a worker",
        ),
    ]


@contextmanager
def _torch_engine() -> Iterator[Callable[..., Any]]:
    import torch

    from triptych import models
    from triptych.checkpoint import open_model, packaged_folder
    from triptych.config import TorchSettings
    from triptych.engines.base import Generation
    from triptych.engines.torch import packed_linear, weights
    from triptych.engines.torch.engine import TorchEngine
    from triptych.messages import Delta, Grammar, Sampling, Work
    from triptych.transfer.base import Array

    def no_memory(dtype: str, shape: tuple[int, ...]) -> Array:
        raise AssertionError("nothing is handed over")

    torch.set_num_threads(1)
    model = open_model(packaged_folder("triptych-demo"))
    family = models.find_family(model)
    module = weights.load_part(family, model, "language", "cpu", torch.float32)
    packed_linear.pack_linear_layers(module)
    engine = TorchEngine(
        family.language(module), family.layout, model, TorchSettings(kv_blocks=1024), no_memory
    )

    async def ask(grammar: Grammar | None, seed: int, tokens: int) -> None:
        sampling = Sampling(
            seed=seed, max_tokens=tokens, ignore_eos=grammar is None, grammar=grammar
        )
        prompt = tuple(random.Random(seed).randrange(100, 1900) for _ in range(16))
        deltas: list[Delta] = []
        work = Work(f"{seed}", prompt, (), sampling)
        await engine.generate(Generation(work, "PD", ()), deltas.append)  # type: ignore[arg-type]
        assert sum(len(delta.ids) for delta in deltas) == tokens

    try:
        yield ask
    finally:
        engine.close()
