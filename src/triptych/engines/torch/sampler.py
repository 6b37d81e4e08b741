"""Logits to tokens, for all sequences of a step at once.

The random number of a token depends on its request's seed and its place in the sequence and on
nothing else, so a request gives the same tokens in every batch and on every worker. One uniform
number selects a token from the cumulative probabilities in order of token ids: an order by
probability would swap near-equal tokens whenever another batch rounds differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from triptych.messages import PromptLogprob, Sampling, TokenLogprob, TopLogprob

_MASK = (1 << 64) - 1
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_LOW = float("-inf")
# The score of a token that must not come next. Finite: if no other token is allowed, the best of
# these comes.
_AVOIDED = torch.finfo(torch.float32).min
_MOST = torch.finfo(torch.float32).max
_LEAST = torch.finfo(torch.float32).tiny
_COLDEST = 1e-9  # lower temperatures choose the same tokens


@dataclass(frozen=True, slots=True)
class SampledTokens:
    ids: list[int]
    finite: list[bool]  # False: the logits were not finite, so the id means nothing
    logprobs: dict[int, TokenLogprob]  # by index in ids, where asked for


@dataclass(frozen=True, slots=True)
class PermittedTokens:
    """Which tokens the grammars of a step permit. Other sequences may have any token."""

    sequences: list[int]  # those with a grammar, as indices of the step's logits
    tokens: np.ndarray  # [those sequences, vocabulary] bool; each has one at least

    def mask(self, logits: Tensor) -> Tensor:
        """A copy of ``logits`` [sequences, vocabulary], -inf where a token is not permitted."""
        masked = logits.clone()
        rows = torch.tensor(self.sequences, device=logits.device)
        tokens = torch.from_numpy(self.tokens).to(logits.device)
        masked[rows] = masked[rows].masked_fill_(~tokens, _LOW)
        return masked


class Sampler:
    """Holds settings and token counts of every running sequence, by row.

    ``end_ids``: the model's end tokens, which ``min_tokens`` puts off.
    """

    def __init__(
        self,
        rows: int,
        vocabulary: int,
        device: torch.device,
        end_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._vocabulary = vocabulary
        self._device = device
        self._end_ids = end_ids
        self._numbers = np.zeros((rows, 4))  # temperature, top_k, top_p, min_p
        self._seeds = np.zeros(rows, np.uint64)
        self._logprobs = np.full(rows, -1)
        self._bias: dict[int, tuple[Tensor, Tensor]] = {}  # ids and what is added to them, by row
        self._restrictions: dict[int, _Restriction] = {}  # by row
        self._adjusted = np.zeros(rows, bool)  # rows with a bias, penalties or a restriction
        self._penalized = np.zeros(rows, bool)
        self._penalties: _Penalties | None = None  # made when first asked for: it is large
        self._rows = rows

    def assign(self, row: int, sampling: Sampling, ids: Sequence[int], prompt: int) -> None:
        """Assign a row to a sequence whose first ``prompt`` ids are the prompt.

        ``ids`` is read again with every token: the caller appends the tokens to it.
        """
        s = sampling
        self._numbers[row] = s.temperature, s.top_k, s.top_p, s.min_p
        self._seeds[row] = s.seed & _MASK
        self._logprobs[row] = -1 if s.logprobs is None else s.logprobs
        self._bias.pop(row, None)
        if s.logit_bias:
            tokens, added = zip(*s.logit_bias.items(), strict=True)
            self._bias[row] = (
                torch.tensor(tokens, device=self._device),
                torch.tensor(added, dtype=torch.float32, device=self._device),
            )
        strengths = (s.repetition_penalty, s.frequency_penalty, s.presence_penalty)
        self._penalized[row] = strengths != (1.0, 0.0, 0.0)
        if self._penalized[row]:
            if self._penalties is None:
                self._penalties = _Penalties(self._rows, self._vocabulary, self._device)
            self._penalties.assign(row, strengths, ids, prompt)
        self._restrictions.pop(row, None)
        if s.min_tokens or s.bad_words or s.allowed_token_ids:
            self._restrictions[row] = self._restriction(s, ids, prompt)
        self._adjusted[row] = self._penalized[row] or row in self._bias or row in self._restrictions

    def _restriction(self, s: Sampling, ids: Sequence[int], prompt: int) -> _Restriction:
        # A stop token outside the vocabulary never comes.
        ends = tuple(id for id in (*self._end_ids, *s.stop_token_ids) if id < self._vocabulary)
        restriction = _Restriction(ids, prompt, s.min_tokens, ends)
        for *prefix, last in s.bad_words:
            if prefix:
                restriction.continued.setdefault(prefix[-1], []).append((prefix, last))
            else:
                restriction.never.append(last)
        if s.allowed_token_ids:
            allowed = torch.tensor(s.allowed_token_ids, device=self._device)
            restriction.forbidden = torch.ones(
                self._vocabulary, dtype=torch.bool, device=self._device
            ).index_fill_(0, allowed, False)
        return restriction

    def choose(
        self,
        logits: Tensor,
        rows: Sequence[int],
        positions: Sequence[int],
        permitted: PermittedTokens | None = None,
    ) -> SampledTokens:
        """One token for each row of ``logits`` [sequences, vocabulary], at these positions."""
        index = np.asarray(rows)
        given = logits.float()
        raw = given if permitted is None else permitted.mask(given)
        scores = self._adjust(raw, index)
        best = scores.max(dim=-1)
        ids = best.indices
        # Of the model's logits: settings never make a score that is not finite.
        finite = (best.values if scores is given else given.amax(dim=-1)).isfinite()
        random = np.flatnonzero(self._numbers[index, 0] > 0)
        if len(random):
            where = torch.from_numpy(random).to(self._device)
            uniform = uniforms(self._seeds[index[random]], np.asarray(positions)[random])
            ids[where] = _draw(
                scores[where],
                torch.from_numpy(self._numbers[index[random]]).to(self._device),
                torch.from_numpy(uniform).to(self._device),
            )
        tokens, good = torch.stack((ids, finite.long())).tolist()
        chosen = SampledTokens(tokens, [bool(x) for x in good], self._rank(raw, index, ids))
        if self._penalties is not None:  # last, so that a failed step can run again
            self._penalties.count(torch.from_numpy(index).to(self._device), ids)
        return chosen

    def _adjust(self, raw: Tensor, index: np.ndarray) -> Tensor:
        """Scores with bias, penalties and restrictions; does not change ``raw``."""
        if not self._adjusted[index].any():
            return raw
        rows, scores = index.tolist(), raw.clone()
        for at, row in enumerate(rows):
            if row in self._bias:
                ids, added = self._bias[row]
                scores[at].index_add_(0, ids, added)
        penalized = np.flatnonzero(self._penalized[index])
        if len(penalized) and self._penalties is not None:
            where = torch.from_numpy(penalized).to(self._device)
            scores[where] = self._penalties.apply(
                scores[where], torch.from_numpy(index[penalized]).to(self._device)
            )
        self._restrict(scores, rows)
        return scores

    def _restrict(self, scores: Tensor, rows: Sequence[int]) -> None:
        """Lower the scores of tokens that must not come next, of all rows at once."""
        known = self._restrictions
        found = [(at, known[row]) for at, row in enumerate(rows) if row in known]
        avoided = [(at, token) for at, one in found for token in one.avoided()]
        if avoided:
            where, tokens = torch.tensor(avoided, device=self._device).unbind(1)
            # What a grammar does not permit stays lower: it never comes.
            scores[where, tokens] = scores[where, tokens].clamp(max=_AVOIDED)
        masks = [(at, one.forbidden) for at, one in found if one.forbidden is not None]
        if masks:
            where = torch.tensor([at for at, _ in masks], device=self._device)
            forbidden = torch.stack([mask for _, mask in masks])
            scores[where] = scores[where].masked_fill(forbidden, _LOW)

    def _rank(self, raw: Tensor, index: np.ndarray, ids: Tensor) -> dict[int, TokenLogprob]:
        """Log-probabilities of the model among the permitted tokens, before any other setting
        changes them; a token that is not permitted is no candidate."""
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
                tuple(
                    TopLogprob(token, value)
                    for token, value in zip(
                        tokens[i][: counts[i]], values[i][: counts[i]], strict=True
                    )
                    if value > _LOW
                ),
            )
            for i, at in enumerate(asked.tolist())
        }


@dataclass(slots=True)
class _Restriction:
    """Which tokens a row must not get next: a function of its tokens so far."""

    ids: Sequence[int]  # prompt and generated tokens; grows
    prompt: int
    min_tokens: int
    ends: tuple[int, ...]  # avoided before ``min_tokens``
    never: list[int] = field(default_factory=list)
    # Bad words of several tokens, by the last but one: what stands before the last, and the last.
    continued: dict[int, list[tuple[list[int], int]]] = field(default_factory=dict)
    forbidden: Tensor | None = None  # [vocabulary]: True for tokens that are not allowed at all

    def avoided(self) -> list[int]:
        """Tokens that must not come next, unless no other is allowed."""
        ids, generated = self.ids, len(self.ids) - self.prompt
        tokens = [*self.never, *self.ends] if generated < self.min_tokens else [*self.never]
        if generated and self.continued:
            for prefix, last in self.continued.get(ids[-1], ()):
                # As vLLM: a bad word does not begin in the prompt.
                if len(prefix) <= generated and ids[-len(prefix) :] == prefix:
                    tokens.append(last)
        return tokens


class _Penalties:
    """Tokens that every row has seen and generated, and its penalties."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self._device = device
        self._strengths = torch.zeros(rows, 3, device=device)
        self._seen = torch.zeros(rows, vocabulary, dtype=torch.bool, device=device)
        self._counts = torch.zeros(rows, vocabulary, dtype=torch.int32, device=device)

    def assign(
        self, row: int, strengths: tuple[float, float, float], ids: Sequence[int], prompt: int
    ) -> None:
        every = torch.tensor(ids, dtype=torch.long, device=self._device)
        self._strengths[row] = torch.tensor(strengths, device=self._device)
        self._seen[row] = False
        self._seen[row, every] = True
        self._counts[row] = torch.bincount(every[prompt:], minlength=self._counts.shape[1])

    def apply(self, scores: Tensor, rows: Tensor) -> Tensor:
        """The scores [n, vocabulary] of these rows, penalized."""
        repetition, frequency, presence = self._strengths[rows].unsqueeze(-1).unbind(1)
        # A value that float32 rounds to 0 would give 0 / 0.
        repetition = repetition.clamp(min=_LEAST)
        pushed = torch.where(scores < 0, scores * repetition, scores / repetition)
        pushed = pushed.clamp(max=_MOST)  # a strong one overflows
        counts = self._counts[rows]
        scores = torch.where(self._seen[rows], pushed, scores)
        return scores - frequency * counts - presence * (counts > 0)

    def count(self, rows: Tensor, ids: Tensor) -> None:
        """Count the new tokens of these rows; harmless for rows without penalties."""
        self._seen[rows, ids] = True
        self._counts[rows, ids] += 1


def _draw(scores: Tensor, settings: Tensor, uniform: Tensor) -> Tensor:
    """Tokens of ``scores`` [n, vocabulary] by ``uniform`` [n] in [0, 1)."""
    temperature, top_k, top_p, min_p = settings.unsqueeze(-1).unbind(1)  # each [n, 1]
    scores = scores.double() / temperature.clamp(min=_COLDEST)
    if bool(((top_k > 0) | (top_p < 1)).any()):
        scores = _cut(scores, top_k, top_p)
    probabilities = scores.softmax(dim=-1)
    if bool((min_p > 0).any()):
        floor = min_p * probabilities.amax(dim=-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < floor, 0)
    total = probabilities.cumsum(dim=-1)
    # right=True skips tokens of probability 0; the last sum is the total after rounding
    found = torch.searchsorted(total, uniform[:, None] * total[:, -1:], right=True)[:, 0]
    last = (probabilities > 0).long().cumsum(-1).argmax(-1)
    return torch.minimum(found, last)


def _cut(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keep the k best, and of these the fewest that together have probability p."""
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


def rank_prompt(logits: Tensor, ids: Sequence[int], count: int) -> list[PromptLogprob]:
    """Log-probabilities of the prompt's tokens ``ids`` by ``logits`` [tokens, vocabulary] of the
    positions before them, and of the ``count`` best."""
    logprobs = logits.float().log_softmax(dim=-1)
    own = logprobs.gather(1, torch.tensor(ids, device=logits.device)[:, None])
    ranks = ((logprobs > own).sum(dim=-1) + 1).tolist()
    best = logprobs.topk(min(count, logprobs.shape[1]), dim=-1)
    return [
        PromptLogprob(id, logprob, rank, tuple(map(TopLogprob, tokens, values)))
        for id, (logprob,), rank, tokens, values in zip(
            ids, own.tolist(), ranks, best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]
