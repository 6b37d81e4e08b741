"""The torch engine on a CPU, over HTTP, beside sequential ``transformers.generate``: tiny model,
the same prompts, the same tokens (checked)."""

from __future__ import annotations

import http.client
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks import servers
from benchmarks.load import first_model
from benchmarks.record import Figure

FAMILY = "qwen2_5_vl"
AT_ONCE = 16
TOKENS = 128
TARGET = 4.0


@dataclass(frozen=True)
class Answer:
    prompt: list[int]
    output: list[int]


def run(quick: bool) -> tuple[list[Figure], dict[str, Any]]:
    from tools import tiny

    folder = str(tiny.ensure_checkpoint(FAMILY))
    rounds = 2 if quick else 5
    reference = Reference(folder)
    ours: list[float] = []
    theirs: list[float] = []
    with servers.triptych(folder, "--engine", "torch", "--device", "cpu") as server:
        model = first_model(server.port)
        _ask_all(server.port, model, "warm-up")
        for turn in range(rounds):
            start = time.perf_counter()
            answers = _ask_all(server.port, model, f"turn {turn}")
            ours.append(AT_ONCE * TOKENS / (time.perf_counter() - start))
            theirs.append(reference.speed(answers))
    ratio = median(ours) / median(theirs)
    detail = f"{median(ours):.0f} tokens/s beside {median(theirs):.0f}"
    figures = [Figure(f"{AT_ONCE} requests at once", ratio, "x", TARGET, True, detail)]
    return figures, {"tokens_per_s": {"triptych": ours, "transformers": theirs}}


def _ask_all(port: int, model: str, salt: str) -> list[Answer]:
    def ask(number: int) -> Answer:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": f"{salt}, {number}: tell a story."}],
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        headers = {"Content-Type": "application/json"}
        client.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = client.getresponse()
        text = answer.read()
        client.close()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {text[:400]!r}")
        found = json.loads(text)
        return Answer(found["prompt_token_ids"], found["choices"][0]["token_ids"])

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(ask, range(AT_ONCE)))


class Reference:
    """The same checkpoint in transformers, with the number of threads that suits it best."""

    def __init__(self, folder: str) -> None:
        import torch
        from transformers import AutoModelForImageTextToText

        self._torch = torch
        self._model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self._model.eval()
        prompt = list(range(10, 40))
        timed = {}
        for threads in {1, len(os.sched_getaffinity(0))}:
            torch.set_num_threads(threads)
            self._generate(prompt)
            start = time.perf_counter()
            self._generate(prompt)
            timed[threads] = time.perf_counter() - start
        torch.set_num_threads(min(timed, key=lambda threads: timed[threads]))

    def speed(self, answers: list[Answer]) -> float:
        """Tokens a second, one request after the other; refuses other tokens than the answers'."""
        start = time.perf_counter()
        outputs = [self._generate(answer.prompt) for answer in answers]
        seconds = time.perf_counter() - start
        if outputs != [answer.output for answer in answers]:
            raise RuntimeError("transformers.generate gave other tokens")
        return AT_ONCE * TOKENS / seconds

    def _generate(self, prompt: list[int]) -> list[int]:
        ids = self._torch.tensor([prompt])
        made = self._model.generate(
            input_ids=ids,
            attention_mask=self._torch.ones_like(ids),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
        output: list[int] = made[0, len(prompt) :].tolist()
        return output
