"""Sample ids from logits: a vectorised sampler over rows, with a counter-based random generator per row.

Independent of models and caches. A row's draw depends only on its seed and position, not on the rest of the batch. This
is the definition of every sampling parameter; a backend that samples by itself is tested against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from service.model.params import SamplingParams


def uniforms(seed: int, start: int, count: int) -> np.ndarray:
    """Draws start … start+count−1 of a seed: (count,) float64 in [0, 1).

    Philox 4×64 (Salmon et al. 2011) is a function of key and counter, so draws are random access; a counter value
    yields four.
    """
    generator = np.random.Philox(key=seed)
    generator.advance(start // 4)
    raw = generator.random_raw(start % 4 + count)[start % 4 :]
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Draws:
    """The draws of S sequences in turn, of each one `ahead` computed at once."""

    def __init__(self, sequences: int, ahead: int):
        self._seeds = np.zeros(sequences, dtype=np.uint64)
        self._taken = np.zeros(sequences, dtype=np.int64)
        self._first = np.full(sequences, -ahead, dtype=np.int64)  # number of the first draw that is there
        self._draws = np.zeros((sequences, ahead))

    def start(self, sequence: int, seed: int) -> None:
        self._seeds[sequence] = seed
        self._taken[sequence], self._first[sequence] = 0, -self._draws.shape[1]  # no draw is there yet

    def take(self, sequences: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """The next counts[b] ≤ `ahead` draws of sequences[b], and others after them: (B, counts.max()) float64."""
        most, ahead = int(counts.max()), self._draws.shape[1]
        offset = self._taken[sequences] - self._first[sequences]
        for b in np.flatnonzero(offset + most > ahead).tolist():
            which = sequences[b]
            self._first[which] = self._taken[which]
            self._draws[which] = uniforms(int(self._seeds[which]), int(self._taken[which]), ahead)
            offset[b] = 0
        self._taken[sequences] += counts
        return self._draws[sequences[:, None], offset[:, None] + np.arange(most)]


class History:
    """Character counts of a sequence, for the penalties; on the CPU."""

    def __init__(self, vocab_size: int, prompt: Sequence[int]):
        # The tensors share the arrays' memory: NumPy sets an element ten times as fast.
        self._seen = np.zeros(vocab_size, dtype=bool)
        self._counts = np.zeros(vocab_size)
        self._seen[list(prompt)] = True
        self.seen = torch.from_numpy(self._seen)  # (V,) bool: in prompt or completion
        self.counts = torch.from_numpy(self._counts)  # (V,) float64: occurrences in the completion

    def append(self, id: int) -> None:
        """Add the completion's next id."""
        self._seen[id] = True
        self._counts[id] += 1.0


class Filters(NamedTuple):
    """Steps 5 to 9 of `sample` for B rows: a column (B, 1) per parameter, None for a step that no row needs.

    A step changes nothing in rows whose parameter is neutral.
    """

    temperature: Tensor  # fp64, > 0
    is_greedy: Tensor | None = None  # bool
    top_k: Tensor | None = None  # neutral: V or more; with top_p, or both None
    top_p: Tensor | None = None  # neutral: 1
    log_min_p: Tensor | None = None  # neutral: −∞; needs top_k and top_p
    typical_p: Tensor | None = None  # neutral: 1


class SamplingRows:
    """The parameters of B rows as tensors, for all steps until the rows change."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device | str = "cpu"):
        def column(values: list[Any], dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]  # (B, 1)

        is_greedy = [p.temperature == 0.0 for p in params]
        is_ranked = any(p.top_k > 0 or p.top_p < 1.0 or p.min_p for p in params)
        self.filters = Filters(
            column([p.temperature or 1.0 for p in params]),
            column(is_greedy, torch.bool) if any(is_greedy) else None,
            column([p.top_k if p.top_k > 0 else 2**31 for p in params], torch.int64) if is_ranked else None,
            column([p.top_p for p in params]) if is_ranked else None,
            column([p.min_p for p in params]).log() if any(p.min_p for p in params) else None,
            column([p.typical_p for p in params]) if any(p.typical_p < 1.0 for p in params) else None,
        )

        # (row, id, bias)
        entries = [(b, id, bias) for b, p in enumerate(params) for id, bias in p.logit_bias]
        self.max_biased_id = max((id for _, id, _ in entries), default=-1)
        if entries:
            self.biased = tuple(torch.tensor([entry[i] for entry in entries], device=device) for i in (0, 1))
            self.bias = torch.tensor([entry[2] for entry in entries], dtype=torch.float64, device=device)

        self.penalised = [b for b, p in enumerate(params) if p.needs_history]
        if self.penalised:
            few = [params[b] for b in self.penalised]
            self.which = torch.tensor(self.penalised, device=device)
            self.penalties = (
                column([p.repetition_penalty for p in few]),
                column([p.presence_penalty for p in few]),
                column([p.frequency_penalty for p in few]),
            )


def sample(
    logits: Tensor,
    rows: SamplingRows,
    u: Tensor,
    histories: Sequence[History | None] | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """Sample one id per row, (B,) int64: the inverse CDF, in id order, at u.

    The distribution, step by step:

    1. Add `logit_bias`.
    2. Exclude ids that are not in `allowed`.
    3. `repetition_penalty` r, for ids in prompt or completion: a logit x > 0 becomes x/r, any other x·r (Keskar et al.
       2019, as transformers and vLLM).
    4. Subtract `frequency_penalty` times an id's count in the completion, and `presence_penalty` if the count is not 0
       (OpenAI).
    5. Divide by `temperature`; 0 returns the most likely id here.
    6. `top_k` (Fan et al. 2018).
    7. `top_p` (Holtzman et al. 2020): the id that reaches the sum is kept.
    8. `min_p` (Nguyen et al. 2024).
    9. `typical_p` (Meister et al. 2022): ids ordered by |−log p − H|; the id that reaches the sum is kept.

    Probabilities are renormalised after each step. Ties go to the lower id. All arithmetic is fp64.

    logits (B, V); u (B,) fp64 uniform draws; histories: one per row, required where `needs_history` holds; allowed
    (B, V) bool, at least one id per row. A row with logits that are not finite gets an arbitrary id and does not affect
    other rows.

    Raises:
        ValueError: a bias is for an id outside the vocabulary.
    """
    z = logits.double()  # (B, V)
    V = z.size(1)
    if rows.max_biased_id >= V:
        raise ValueError(f"logit_bias ids must be below {V}, got {rows.max_biased_id}")
    if rows.max_biased_id >= 0:
        z = z.index_put(rows.biased, rows.bias, accumulate=True)
    if rows.penalised:
        assert histories is not None, "rows with penalties need histories"
        few = [history for b in rows.penalised if (history := histories[b]) is not None]
        assert len(few) == len(rows.penalised), "a row with penalties needs its history"
        seen = torch.stack([history.seen for history in few]).to(z.device)
        counts = torch.stack([history.counts for history in few]).to(z.device)
        z = z.index_copy(0, rows.which, penalise(z[rows.which], seen, counts, *rows.penalties))
    return choose(z, rows.filters, u, allowed)


def penalise(
    z: Tensor, seen: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Steps 3 and 4 of `sample`: z (B, V) fp64, seen (B, V) bool, counts (B, V) fp64, a column per parameter."""
    z = torch.where(seen, torch.where(z > 0.0, z / repetition, z * repetition), z)
    return z - (frequency * counts + presence * (counts > 0.0))


def choose(z: Tensor, filters: Filters, u: Tensor, allowed: Tensor | None = None) -> Tensor:
    """Steps 2 and 5 to 9 of `sample`, and the choice: (B,) int64 from z (B, V) fp64."""
    if allowed is not None:
        z = z.masked_fill(~allowed, -torch.inf)
    z = (z - z.amax(dim=1, keepdim=True)) / filters.temperature
    weights = z.exp()
    if filters.top_k is not None:
        weights = weights * _keep_likeliest(z, weights, filters)
    if filters.typical_p is not None:
        weights = weights * _keep_typical(z, weights, filters.typical_p)
    cdf = weights.cumsum(dim=1)
    cdf = cdf / cdf[:, -1:]
    # Ids of weight 0 at the end share the CDF's last value, 1 > u: they are never chosen.
    ids = (cdf <= u[:, None]).sum(dim=1).clamp(max=z.size(1) - 1)
    return ids if filters.is_greedy is None else torch.where(filters.is_greedy[:, 0], z.argmax(dim=1), ids)


def _keep_likeliest(z: Tensor, weights: Tensor, filters: Filters) -> Tensor:
    """top_k, top_p and min_p, which keep a prefix of the ranking: (B, V) bool."""
    assert filters.top_k is not None and filters.top_p is not None
    V = z.size(1)
    sorted_z, order = z.sort(dim=1, descending=True, stable=True)
    by_k = torch.arange(V, device=z.device) < filters.top_k
    kept = by_k & _reaching(weights.gather(1, order) * by_k, filters.top_p)
    if filters.log_min_p is not None:
        kept &= ~(sorted_z < filters.log_min_p)  # NaN stays: each row keeps an id
    return torch.zeros_like(kept).scatter(1, order, kept)


def _keep_typical(z: Tensor, weights: Tensor, typical_p: Tensor) -> Tensor:
    """typical_p, among the ids of positive weight: (B, V) bool."""
    kept = weights > 0.0
    p = weights / weights.cumsum(dim=1)[:, -1:]  # in id order, as `sum` does not promise
    # −log p − H is the mean logit less the logit.
    z = z.masked_fill(~kept, 0.0)
    deviation = z - (p * z).cumsum(dim=1)[:, -1:]
    _, order = deviation.abs().masked_fill(~kept, torch.inf).sort(dim=1, stable=True)
    by_key = _reaching(p.gather(1, order), typical_p)
    return kept & torch.zeros_like(by_key).scatter(1, order, by_key)


def _reaching(weights: Tensor, p: Tensor) -> Tensor:
    """(B, V) bool: the shortest prefix of a row of weights with a share p (B, 1) of their sum; all of it for p = 1."""
    mass = weights.cumsum(dim=1)
    mass = mass / mass[:, -1:]
    return (F.pad(mass[:, :-1], (1, 0)) < p) | (p == 1.0)
