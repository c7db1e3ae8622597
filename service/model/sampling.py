"""From logits to ids: one vectorised sampler over rows, with a counter-based generator per row.

Knows nothing of models or caches. A row's draw depends on its seed and position alone, so it is the same
whatever else is in the batch.

Fast arithmetic (fp32, batched kernels) gives logits that differ in the last bits from batch to batch. The
sampler therefore also says of each row whether its choice survives such errors up to a `tolerance`; the
caller decides the few others from exact logits. That is what makes "same seed, same text" hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

MAX_SEED = 2**64 - 1
MAX_TEMPERATURE = 100.0


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the next character.

    Raises:
        ValueError: a field is out of its bounds; says which, its value and the bounds.
    """

    temperature: float = 1.0  # 0: the most likely character, whatever the seed
    top_k: int = 0  # keep the k most likely characters; 0: all
    top_p: float = 1.0  # keep the smallest set of likeliest characters that has this much probability
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= MAX_TEMPERATURE:
            raise ValueError(f"temperature must be in [0, {MAX_TEMPERATURE:g}], got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed must be in [0, {MAX_SEED}], got {self.seed}")


def uniforms(seed: int, start: int, count: int) -> np.ndarray:
    """Draws number start … start+count−1 of a seed: (count,) float64 in [0, 1).

    Philox 4×64 (Salmon et al. 2011) is a function of key and counter, so any draw can be had without the
    ones before it; a counter yields four.
    """
    generator = np.random.Philox(key=seed)
    generator.advance(start // 4)
    raw = generator.random_raw(start % 4 + count)[start % 4 :]
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Draws:
    """The draws of one seed, by number, computed in blocks."""

    BLOCK = 256

    def __init__(self, seed: int):
        self.seed = seed
        self._start, self._block = 0, uniforms(seed, 0, 0)

    def __getitem__(self, number: int) -> float:
        if not 0 <= number - self._start < len(self._block):
            self._start = number - number % self.BLOCK
            self._block = uniforms(self.seed, self._start, self.BLOCK)
        return float(self._block[number - self._start])


class SamplingRows:
    """The parameters of B rows as tensors; made once and used for every step in which the rows stay the same."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device | str = "cpu"):
        def column(values: list[Any]) -> Tensor:
            return torch.tensor(values, device=device)[:, None]  # (B, 1)

        self.greedy = column([p.temperature == 0.0 for p in params])
        self.temperature = column([p.temperature or 1.0 for p in params]).double()
        self.top_k = column([p.top_k or 2**31 for p in params])
        self.top_p = column([p.top_p for p in params]).double()
        self.any_greedy = any(p.temperature == 0.0 for p in params)
        self.any_truncated = any(p.top_k or p.top_p < 1.0 for p in params)


class Choice(NamedTuple):
    ids: Tensor  # (B,) int64
    certain: Tensor  # (B,) bool: no error up to the tolerance can change the id


def sample(logits: Tensor, rows: SamplingRows, u: Tensor, tolerance: float = 0.0) -> Choice:
    """One id per row: temperature, then top_k, then top_p, then the inverse of the CDF, in id order, at u.

    logits (B, V); u (B,) fp64 uniform draws; `tolerance` bounds the error of the log-odds between any two
    sets of ids, in nats. All is computed in fp64.
    """
    z = logits.double()  # (B, V)
    V = z.size(1)
    z = (z - z.amax(dim=1, keepdim=True)) / rows.temperature
    error = tolerance / rows.temperature  # (B, 1): of the log-odds after scaling
    weights = z.exp()
    certain = torch.ones(len(z), dtype=torch.bool, device=z.device)
    if rows.any_truncated:
        kept, certain = _truncate(z, weights, rows, error)
        weights = weights * kept
    cdf = weights.cumsum(dim=1)
    cdf = cdf / cdf[:, -1:]
    u = u[:, None]
    # Ids of weight 0 at the end share the CDF's last value, 1 > u: they are never chosen.
    ids = (cdf <= u).sum(dim=1).clamp(max=V - 1)
    # An error e of the log-odds ln(c / (1−c)) moves the CDF at c by e·c·(1−c).
    certain = certain & ((cdf - u).abs() >= error * cdf * (1.0 - cdf)).all(dim=1)
    if rows.any_greedy:
        greedy = rows.greedy[:, 0]
        ids = torch.where(greedy, z.argmax(dim=1), ids)
        if V > 1:
            runner_up = z.topk(2, dim=1).values[:, 1]
            certain = torch.where(greedy, -runner_up >= error[:, 0], certain)
    return Choice(ids, certain)


def _truncate(z: Tensor, weights: Tensor, rows: SamplingRows, error: Tensor) -> tuple[Tensor, Tensor]:
    """Which ids top_k and top_p keep (B, V), and for which rows that is certain (B,)."""
    V = z.size(1)
    sorted_z, order = z.sort(dim=1, descending=True, stable=True)
    by_k = torch.arange(V, device=z.device) < rows.top_k
    mass = (weights.gather(1, order) * by_k).cumsum(dim=1)
    mass = mass / mass[:, -1:]
    before = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), dim=1)
    by_p = (before < rows.top_p) | (rows.top_p == 1.0)  # the id that reaches top_p is kept
    kept_by_rank = by_k & by_p
    # Certain: the last kept and the first dropped logit differ enough, and no sum lies too near top_p.
    count = kept_by_rank.sum(dim=1, keepdim=True)  # (B, 1)
    gap = sorted_z.gather(1, count - 1) - sorted_z.gather(1, count.clamp(max=V - 1))
    near = ((mass - rows.top_p).abs() < error * mass * (1.0 - mass)) & by_k & (rows.top_p < 1.0)
    certain = ((count == V) | (gap >= error))[:, 0] & ~near.any(dim=1)
    return torch.zeros_like(kept_by_rank).scatter(1, order, kept_by_rank), certain
