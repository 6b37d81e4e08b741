"""One step of learning: loss, gradients, weights, and what was right by task.

Knows the network and a batch's arrays, not where batches come from.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.demo.batch import NOTHING
from models.demo.padded import Padded
from models.demo.recipe.tasks import TASKS
from models.demo.stream import varied

PEAK = 1e-3  # learning rate

Found = dict[str, tuple[float, float, int]]  # by task: loss of a turn, share right, turns


class Weights:
    """Half-width weights that are computed with, and exact ones that learn."""

    def __init__(self, parts: torch.nn.Module, dtype: torch.dtype) -> None:
        self.exact = {n: p.detach().clone().float() for n, p in parts.named_parameters()}
        parts.to(dtype)
        self.used = dict(parts.named_parameters())
        decayed = [w for n, w in self.exact.items() if w.ndim > 1 and "embed_tokens" not in n]
        kept = [w for n, w in self.exact.items() if w.ndim <= 1 or "embed_tokens" in n]
        groups = [{"params": decayed, "weight_decay": 0.05}, {"params": kept, "weight_decay": 0.0}]
        device = decayed[0].device
        self.rate = torch.tensor(0.0, device=device)
        cuda = device.type == "cuda"
        self.optimiser = torch.optim.AdamW(
            groups, lr=self.rate, betas=(0.9, 0.98), fused=cuda, capturable=cuda
        )
        for weight in self.exact.values():
            weight.grad = torch.zeros_like(weight)

    def step(self) -> Tensor:
        """Learn from the gradients; gives their norm."""
        exact = list(self.exact.values())
        both = [(self.exact[name].grad, weight.grad) for name, weight in self.used.items()]
        given = [(to, new) for to, new in both if to is not None and new is not None]
        torch._foreach_copy_([to for to, _ in given], [new for _, new in given])
        norm = torch.nn.utils.clip_grad_norm_(exact, 1.0)
        self.optimiser.step()
        self.copy()
        return norm

    @torch.no_grad()
    def copy(self) -> None:
        torch._foreach_copy_(list(self.used.values()), list(self.exact.values()))

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """What the optimiser keeps of each weight, copied."""
        state = self.optimiser.state
        return {
            name: {kind: value.clone() for kind, value in state[weight].items()}
            for name, weight in self.exact.items()
            if weight in state
        }

    @torch.no_grad()
    def put_back(self, moments: dict[str, dict[str, Tensor]]) -> None:
        """In place: a recorded step goes on with the same tensors. What is not there is 0."""
        for name, weight in self.exact.items():
            for kind, value in self.optimiser.state[weight].items():
                kept = moments.get(name, {}).get(kind)
                value.zero_() if kept is None else value.copy_(kept)


class Score:
    """Loss and share of right turns by task, kept on the device until somebody looks."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(3, len(TASKS) + 1, device=device)  # loss, right turns, turns

    def add(self, losses: Tensor, logits: Tensor, batch: dict[str, Tensor]) -> None:
        turn = batch["turn"]
        tasks = torch.where(batch["turn_tasks"] < 0, len(TASKS), batch["turn_tasks"])
        wrong = ((logits.argmax(-1) != batch["want"]) & (batch["want"] >= 0)).float()
        missed = torch.zeros(len(tasks), device=losses.device).index_add_(0, turn, wrong)
        spent = torch.zeros(len(tasks), device=losses.device).index_add_(0, turn, losses)
        self._sums[0].index_add_(0, tasks, spent)
        self._sums[1].index_add_(0, tasks, (missed == 0).float())
        self._sums[2].index_add_(0, tasks, torch.ones_like(missed))

    def take(self) -> Found:
        """Loss of a turn, share right, and how many; and begin anew."""
        loss, right, turns = self._sums.tolist()
        self._sums.zero_()
        return {
            task: (loss[i] / turns[i], right[i] / turns[i], int(turns[i]))
            for i, task in enumerate(TASKS)
            if turns[i]
        }


def graded(padded: Padded, batch: dict[str, Tensor], score: Score) -> Tensor:
    """Losses of the answers' tokens; 0 where the batch is not filled."""
    logits = padded(batch).float()
    losses = F.cross_entropy(logits, batch["want"], reduction="none", ignore_index=NOTHING)
    with torch.no_grad():
        score.add(losses.detach(), logits, batch)
    return losses


class Step:
    """One step of learning. On a GPU it is recorded once and played back: launching its kernels
    one by one takes longer than computing them."""

    def __init__(self, padded: Padded, weights: Weights, score: Score) -> None:
        self._padded, self._weights, self._score = padded, weights, score
        self._inputs: dict[str, Tensor] = {}
        self._graph: torch.cuda.CUDAGraph | None = None
        self.norm = torch.zeros(())

    def prepare(self, batch: dict[str, Tensor]) -> None:
        """Compile and record with a batch of the shape to come; nothing is learned from it."""
        self._inputs = {name: array.clone() for name, array in batch.items()}
        if not self._weights.rate.is_cuda:
            return
        self._weights.rate.fill_(0.0)
        before = self._weights.moments()
        for _ in range(3):
            self._compute()  # compiles, and makes what a recording may not make
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._compute()
        self._weights.put_back(before)
        self._score.take()

    def __call__(self, batch: dict[str, Tensor]) -> None:
        for name, array in batch.items():
            self._inputs[name].copy_(array, non_blocking=True)
        if self._graph is None:
            self._compute()
        else:
            self._graph.replay()
            torch.cuda.current_stream().synchronize()

    def _compute(self) -> None:
        for weight in self._weights.used.values():
            weight.grad = None
        losses = graded(self._padded, varied(self._inputs), self._score)
        (losses.sum() / (self._inputs["want"] >= 0).sum()).backward()
        self.norm = self._weights.step()
