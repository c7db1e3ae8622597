"""An independent sampler, written from the definitions of the parameters: NumPy, one row, explicit loops.

The reference for `service.model.sampling.Sampler`, without rounding errors or batches. At the end: that one, over the
rows of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from service.model.params import SamplingParams
from service.model.sampling import Sampler


def distribution(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    completion: Sequence[int] = (),
    allowed: np.ndarray | None = None,
) -> np.ndarray:
    """The probability of each id (V,) after `prompt` and `completion`; logits (V,), allowed (V,) bool."""
    x = {i: float(logits[i]) for i in range(len(logits))}  # the remaining ids, in id order
    for i, bias in params.logit_bias:
        x[i] += bias
    if allowed is not None:
        x = {i: value for i, value in x.items() if allowed[i]}
    for i in x:
        if i in prompt or i in completion:
            x[i] = x[i] / params.repetition_penalty if x[i] > 0 else x[i] * params.repetition_penalty
        count = list(completion).count(i)
        x[i] -= params.frequency_penalty * count
        if count > 0:
            x[i] -= params.presence_penalty
    out = np.zeros(len(logits))
    if params.temperature == 0:
        out[max(x, key=lambda i: (x[i], -i))] = 1.0
        return out
    x = {i: value / params.temperature for i, value in x.items()}
    if params.top_k:
        x = {i: x[i] for i in sorted(x, key=lambda i: (-x[i], i))[: params.top_k]}
    if params.top_p < 1:
        x = smallest_set(x, sorted(x, key=lambda i: (-x[i], i)), params.top_p)
    if params.min_p > 0:
        p = softmax(x)
        x = {i: x[i] for i in x if p[i] >= params.min_p * max(p.values())}
    if params.typical_p < 1:
        p = softmax(x)
        log_total = math.log(sum(math.exp(value - max(x.values())) for value in x.values()))
        surprise = {i: max(x.values()) + log_total - x[i] for i in x}  # −log p
        entropy = sum(p[i] * surprise[i] for i in x)
        x = smallest_set(x, sorted(x, key=lambda i: (abs(surprise[i] - entropy), i)), params.typical_p)
    for i, weight in softmax(x).items():
        out[i] = weight
    return out


def draw(p: np.ndarray, u: float) -> int:
    """The first id at which the cumulative probability exceeds u; u in [0, 1)."""
    total, last = 0.0, 0
    for i in range(len(p)):
        total += p[i]
        if p[i] > 0:
            last = i
            if total > u:
                break
    return last


def softmax(x: dict[int, float]) -> dict[int, float]:
    top = max(x.values())
    weights = {i: math.exp(value - top) for i, value in x.items()}
    total = sum(weights.values())
    return {i: weight / total for i, weight in weights.items()}


def smallest_set(x: dict[int, float], order: list[int], mass: float) -> dict[int, float]:
    """The shortest prefix of `order` with at least `mass` of the probability."""
    p, kept, total = softmax(x), set(), 0.0
    for i in order:
        kept.add(i)
        total += p[i]
        if total >= mass:
            break
    return {i: value for i, value in x.items() if i in kept}


class History:
    """What a sequence has seen: its prompt, and its completion so far."""

    def __init__(self, vocab_size: int, prompt: list[int]):
        self.prompt, self.counts = list(prompt), torch.zeros(vocab_size, dtype=torch.float64)

    def append(self, id: int) -> None:
        self.counts[id] += 1.0


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    u: Tensor,
    histories: Sequence[History | None] | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """One id per row of a batch, by the sampler that is tested."""
    B, V = logits.shape
    sampler = Sampler(B, V)
    for b in range(B):
        history = histories[b] if histories else None
        sampler.start(b, params[b], history.prompt if history and history.prompt else [0])
        if history:
            sampler.counts[b] = history.counts
            sampler.seen[b] &= bool(history.prompt)
    sampler.send()
    return sampler.choose(logits.double(), slice(0, B), u, allowed, bool(sampler.needs_all.any()))[0]
