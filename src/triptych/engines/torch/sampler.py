"""Logits to tokens, for all sequences of a step at once.

The random number of a token depends on its request's seed and its place in the sequence and on
nothing else, so a request gives the same tokens in every batch and on every worker. A token is
found by one uniform number in the cumulative probabilities in order of token ids: an order by
probability would swap near-equal tokens whenever another batch rounds differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from triptych.messages import Sampling, TokenLogprob, TopLogprob

_MASK = (1 << 64) - 1
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_LOW = float("-inf")


@dataclass(frozen=True, slots=True)
class Chosen:
    ids: list[int]
    finite: list[bool]  # False: the logits were no numbers, so the id means nothing
    logprobs: dict[int, TokenLogprob]  # by index in ids, where asked for


class Sampler:
    """Keeps every running sequence's settings and token counts in its row."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._device = device
        self._numbers = np.zeros((rows, 4))  # temperature, top_k, top_p, min_p
        self._seeds = np.zeros(rows, np.uint64)
        self._logprobs = np.full(rows, -1)
        self._adjusted = np.zeros(rows, bool)  # has bias or penalties
        self._adjustments: dict[int, _Adjustment] = {}

    def assign(self, row: int, sampling: Sampling, ids: Sequence[int], prompt: int) -> None:
        """Take up a sequence of which ``prompt`` tokens were given and the others generated."""
        s = sampling
        self._numbers[row] = s.temperature, s.top_k, s.top_p, s.min_p
        self._seeds[row] = s.seed & _MASK
        self._logprobs[row] = -1 if s.logprobs is None else s.logprobs
        self._adjusted[row] = bool(
            s.logit_bias or s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1.0
        )
        self._adjustments.pop(row, None)
        if self._adjusted[row]:
            self._adjustments[row] = _Adjustment(s, ids, prompt, self._vocabulary, self._device)

    def choose(self, logits: Tensor, rows: Sequence[int], positions: Sequence[int]) -> Chosen:
        """One token for each of ``logits`` [sequences, vocabulary], whose places are given."""
        index = np.asarray(rows)
        random = np.flatnonzero(self._numbers[index, 0] > 0)
        adjusted = np.flatnonzero(self._adjusted[index])
        raw = logits.float()
        scores = raw.clone() if len(adjusted) else raw
        for at in adjusted.tolist():
            self._adjustments[rows[at]].apply(scores[at])
        best = scores.max(dim=-1)
        ids, finite = best.indices, best.values.isfinite()
        if len(random):
            where = torch.from_numpy(random).to(self._device)
            uniform = uniforms(self._seeds[index[random]], np.asarray(positions)[random])
            ids[where] = _draw(
                scores[where],
                torch.from_numpy(self._numbers[index[random]]).to(self._device),
                torch.from_numpy(uniform).to(self._device),
            )
        chosen, good = torch.stack((ids, finite.long())).tolist()
        for at in adjusted.tolist():
            self._adjustments[rows[at]].count(chosen[at])
        return Chosen(chosen, [bool(x) for x in good], self._rank(raw, index, ids))

    def _rank(self, raw: Tensor, index: np.ndarray, ids: Tensor) -> dict[int, TokenLogprob]:
        """Log-probabilities as the model gave them, before any setting changed them."""
        asked = np.flatnonzero(self._logprobs[index] >= 0)
        if not len(asked):
            return {}
        where = torch.from_numpy(asked).to(self._device)
        logprobs = raw[where].log_softmax(dim=-1)
        own = logprobs.gather(1, ids[where, None])[:, 0].tolist()
        counts = self._logprobs[index[asked]].tolist()
        best = logprobs.topk(min(max(counts), logprobs.shape[1]), dim=-1)
        values, tokens = best.values.tolist(), best.indices.tolist()
        return {
            at: TokenLogprob(
                own[i],
                tuple(map(TopLogprob, tokens[i][: counts[i]], values[i][: counts[i]])),
            )
            for i, at in enumerate(asked.tolist())
        }


class _Adjustment:
    """Bias and penalties of one sequence."""

    def __init__(
        self, s: Sampling, ids: Sequence[int], prompt: int, vocabulary: int, device: torch.device
    ) -> None:
        self._bias_ids = torch.tensor(list(s.logit_bias), dtype=torch.long, device=device)
        self._bias = torch.tensor(list(s.logit_bias.values()), device=device)
        self._repetition = s.repetition_penalty
        self._frequency = s.frequency_penalty
        self._presence = s.presence_penalty
        every = torch.tensor(ids, dtype=torch.long, device=device)
        self._seen = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self._seen[every] = True
        self._counts = torch.bincount(every[prompt:], minlength=vocabulary).float()

    def apply(self, scores: Tensor) -> None:
        """Change ``scores`` [vocabulary] in place."""
        if len(self._bias_ids):
            scores[self._bias_ids] += self._bias
        if self._repetition != 1.0:
            pushed = torch.where(scores < 0, scores * self._repetition, scores / self._repetition)
            scores.copy_(torch.where(self._seen, pushed, scores))
        if self._frequency:
            scores.sub_(self._counts, alpha=self._frequency)
        if self._presence:
            scores.sub_((self._counts > 0).float(), alpha=self._presence)

    def count(self, token: int) -> None:
        self._seen[token] = True
        self._counts[token] += 1


def _draw(scores: Tensor, settings: Tensor, uniform: Tensor) -> Tensor:
    """Tokens of ``scores`` [n, vocabulary] by ``uniform`` [n] in [0, 1)."""
    temperature, top_k, top_p, min_p = settings.unsqueeze(-1).unbind(1)  # each [n, 1]
    scores = scores.double() / temperature
    if bool(((top_k > 0) | (top_p < 1)).any()):
        scores = _cut(scores, top_k, top_p)
    probabilities = scores.softmax(dim=-1)
    if bool((min_p > 0).any()):
        floor = min_p * probabilities.amax(dim=-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < floor, 0)
    total = probabilities.cumsum(dim=-1)
    # right=True skips tokens of probability 0; the last sum is the whole, whatever it rounds to
    found = torch.searchsorted(total, uniform[:, None] * total[:, -1:], right=True)[:, 0]
    last = (probabilities > 0).long().cumsum(-1).argmax(-1)
    return torch.minimum(found, last)


def _cut(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Only the k best stay, and of these the fewest that together have probability p."""
    vocabulary = scores.shape[-1]
    ordered = scores.sort(dim=-1, descending=True, stable=True).values
    k = torch.where(top_k > 0, top_k, vocabulary).clamp(1, vocabulary).long()
    least = ordered.gather(1, k - 1)
    scores = scores.masked_fill(scores < least, _LOW)
    ordered = ordered.masked_fill(ordered < least, _LOW)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = ((before < top_p) | (top_p >= 1)).sum(dim=-1, keepdim=True).clamp(min=1)
    return scores.masked_fill(scores < ordered.gather(1, kept - 1), _LOW)


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1), each a function of its (seed, position) alone."""
    with np.errstate(over="ignore"):
        key = _mix(seeds.astype(np.uint64) + _GAMMA)
        bits = _mix(_mix(key + positions.astype(np.uint64) * _GAMMA) ^ key)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64: every bit of x changes half of the bits of the result."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed
