"""From logits to ids: one vectorised sampler over rows, with a counter-based generator per row.

Knows nothing of models or caches. A row's draw depends on its seed and position alone, so it is the same
whatever else is in the batch.

Fast arithmetic (fp32, batched kernels) gives logits that differ in the last bits from batch to batch. The
sampler therefore also says of each row whether its choice survives such errors up to a `tolerance`; the
caller decides the few others from exact logits. That is what makes "same seed, same text" hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from service.model.params import SamplingParams

MAX_LOGIT = 1e300  # what a repetition penalty may make of a logit: a penalty near 0 must not make it infinite


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


class History:
    """Which characters a sequence holds, for the penalties; kept on the CPU."""

    def __init__(self, vocab_size: int, prompt: Sequence[int]):
        # The tensors share the arrays' memory: NumPy writes one element ten times as fast.
        self._seen = np.zeros(vocab_size, dtype=bool)
        self._counts = np.zeros(vocab_size)
        self._seen[list(prompt)] = True
        self.seen = torch.from_numpy(self._seen)  # (V,) bool: in prompt or completion
        self.counts = torch.from_numpy(self._counts)  # (V,) float64: how often in the completion

    def append(self, id: int) -> None:
        """Take in the completion's next character."""
        self._seen[id] = True
        self._counts[id] += 1.0


class SamplingRows:
    """The parameters of B rows as tensors; made once and used for every step in which the rows stay the same."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device | str = "cpu"):
        def column(values: list[Any], dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]  # (B, 1)

        self.any_greedy = any(p.temperature == 0.0 for p in params)
        self.any_ranked = any(p.top_k > 0 or p.top_p < 1.0 or p.min_p for p in params)
        self.any_min_p = any(p.min_p for p in params)
        self.any_typical = any(p.typical_p < 1.0 for p in params)
        self.greedy = column([p.temperature == 0.0 for p in params], torch.bool)
        self.temperature = column([p.temperature or 1.0 for p in params])
        if self.any_ranked:
            self.top_k = column([p.top_k if p.top_k > 0 else 2**31 for p in params], torch.int64)
            self.top_p = column([p.top_p for p in params])
        if self.any_min_p:
            self.log_min_p = column([p.min_p for p in params]).log()
        if self.any_typical:
            self.typical_p = column([p.typical_p for p in params])

        # Entry by entry: (row, id, bias).
        entries = [(b, id, bias) for b, p in enumerate(params) for id, bias in p.logit_bias]
        self.max_biased_id = max((id for _, id, _ in entries), default=-1)
        if entries:
            self.biased = tuple(torch.tensor([entry[i] for entry in entries], device=device) for i in (0, 1))
            self.bias = torch.tensor([entry[2] for entry in entries], dtype=torch.float64, device=device)

        self.penalised = [b for b, p in enumerate(params) if p.needs_history]
        if self.penalised:
            few = [params[b] for b in self.penalised]
            self.which = torch.tensor(self.penalised, device=device)
            self.repetition = column([p.repetition_penalty for p in few])
            self.presence = column([p.presence_penalty for p in few])
            self.frequency = column([p.frequency_penalty for p in few])

        # How many times as large an error of a logit can become: a penalty r multiplies or divides by r.
        gain = [min(max(p.repetition_penalty, 1.0 / p.repetition_penalty), MAX_LOGIT) for p in params]
        self.gain = column(gain)
        self.max_gain = max((g / (p.temperature or 1.0) for g, p in zip(gain, params, strict=True)), default=1.0)


class Choice(NamedTuple):
    ids: Tensor  # (B,) int64
    certain: Tensor  # (B,) bool: no error up to the tolerance can change the id


def sample(
    logits: Tensor,
    rows: SamplingRows,
    u: Tensor,
    tolerance: float = 0.0,
    histories: Sequence[History | None] | None = None,
    allowed: Tensor | None = None,
) -> Choice:
    """One id per row, by the inverse of the CDF, in id order, at u.

    In this order, each on what the one before left:

    1. `logit_bias` is added.
    2. `allowed`: other ids cannot be chosen.
    3. `repetition_penalty` r: the logits of ids in prompt or completion, x > 0 becomes x/r, others x·r
       (Keskar et al. 2019, as transformers and vLLM).
    4. `frequency_penalty` times an id's count in the completion, and `presence_penalty` where the count is
       not 0, are subtracted (OpenAI).
    5. `temperature` divides; 0 takes the likeliest id now.
    6. `top_k` (Fan et al. 2018).
    7. `top_p` (Holtzman et al. 2020); the id that reaches it is kept.
    8. `min_p` (Nguyen et al. 2024).
    9. `typical_p` (Meister et al. 2022): the ids in the order of |−log p − H|; the one that reaches it is kept.

    Probabilities are renormalised after each. Of ids that tie, the lower goes first. All is computed in fp64.

    logits (B, V); u (B,) fp64 uniform draws; histories: one per row, needed where the parameters'
    `needs_history` holds; allowed (B, V) bool, in each row one id at least. A row whose logits are not finite
    gets some id, which is not certain, and leaves the others alone. `tolerance`, in nats, bounds how
    far the errors of two logits of a row lie apart, which bounds the error of the log-odds between any two
    sets of ids; where a row has a repetition penalty, which an error common to all its logits does not leave
    alone, it must bound each logit's own error as well.

    Raises:
        ValueError: a bias is for an id beyond the vocabulary.
    """
    z = logits.double()  # (B, V)
    V = z.size(1)
    if rows.max_biased_id >= V:
        raise ValueError(f"logit_bias must be of ids below {V}, got id {rows.max_biased_id}")
    if rows.max_biased_id >= 0:
        z = z.index_put(rows.biased, rows.bias, accumulate=True)
    if rows.penalised:
        assert histories is not None, "rows with penalties need their histories"
        z = _penalise(z, rows, histories)
    if allowed is not None:
        z = z.masked_fill(~allowed, -torch.inf)
    z = z - z.amax(dim=1, keepdim=True)
    spread = tolerance * rows.gain  # (B, 1): how far errors lie apart now
    behind = z  # how far each id's logit lies behind the best
    z = z / rows.temperature
    error = spread / rows.temperature
    odds = error.expm1()
    weights = z.exp()
    certain = None
    if rows.any_ranked or rows.any_typical:
        kept, certain = _truncate(z, weights, rows, error, odds)
        weights = weights * kept
    cdf = weights.cumsum(dim=1)
    cdf = cdf / cdf[:, -1:]
    u = u[:, None]
    # Ids of weight 0 at the end share the CDF's last value, 1 > u: they are never chosen.
    ids = (cdf <= u).sum(dim=1).clamp(max=V - 1)
    steady = ((cdf - u).abs() >= _reach(cdf, odds)).all(dim=1)
    certain = steady if certain is None else certain & steady
    if rows.any_greedy or tolerance * rows.max_gain > 1.0:
        greedy = rows.greedy[:, 0]
        ids = torch.where(greedy, z.argmax(dim=1), ids)
        if V > 1:
            # Near temperature 0 the CDF is too steep to tell, but who leads by 40 + ln V nats more than an
            # error can take keeps more than 1 − 2⁻⁵³ of the probability: all draws but 0.
            lead = -behind.topk(2, dim=1).values[:, 1] - spread[:, 0]
            leads = (lead >= (40.0 + math.log(V)) * rows.temperature[:, 0]) & (u[:, 0] > 0.0)
            certain = torch.where(greedy, lead >= 0.0, certain | leads)
    return Choice(ids, certain)


def _reach(p: Tensor, odds: Tensor) -> Tensor:
    """How far an error e of its log-odds can move a probability, at most; odds is exp(e) − 1.

    p becomes p·q / (1 − p + p·q) with q within exp(±e), which is no further than (exp(e) − 1)·p·(1 − p).
    1 − p is what rounding leaves of it, so more than sums over some thousand ids can lose is added to it.
    """
    return odds * p * (1.0 + 1e-12 - p)


def _penalise(z: Tensor, rows: SamplingRows, histories: Sequence[History | None]) -> Tensor:
    """Logits (B, V) with the penalties of those rows that have some."""
    few = [history for b in rows.penalised if (history := histories[b]) is not None]
    assert len(few) == len(rows.penalised), "a row with penalties needs its history"
    seen = torch.stack([history.seen for history in few]).to(z.device)
    counts = torch.stack([history.counts for history in few]).to(z.device)
    x = z[rows.which]
    repeated = torch.where(x > 0.0, x / rows.repetition, x * rows.repetition).clamp(max=MAX_LOGIT)
    x = torch.where(seen, repeated, x)
    x = x - (rows.frequency * counts + rows.presence * (counts > 0.0))
    return z.index_copy(0, rows.which, x)


def _truncate(z: Tensor, weights: Tensor, rows: SamplingRows, error: Tensor, odds: Tensor) -> tuple[Tensor, Tensor]:
    """Which ids the parameters keep (B, V), and for which rows that is certain (B,)."""
    if not rows.any_ranked:
        return _keep_typical(z, weights, weights > 0.0, rows, error, odds)
    kept, certain = _keep_likeliest(z, weights, rows, error, odds)
    if rows.any_typical:
        kept, typical_certain = _keep_typical(z, weights, kept & (weights > 0.0), rows, error, odds)
        certain = certain & typical_certain
    return kept, certain


def _keep_likeliest(
    z: Tensor, weights: Tensor, rows: SamplingRows, error: Tensor, odds: Tensor
) -> tuple[Tensor, Tensor]:
    """What top_k, top_p and min_p keep: the first ids by rank.

    The value at a rank moves no further than an error does, whoever holds the rank. So it is enough that the
    number of ranks kept is certain and that nobody can cross its end.
    """
    V = z.size(1)
    sorted_z, order = z.sort(dim=1, descending=True, stable=True)
    by_k = torch.arange(V, device=z.device) < rows.top_k
    mass = (weights.gather(1, order) * by_k).cumsum(dim=1)
    mass = mass / mass[:, -1:]
    before = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), dim=1)
    by_p = (before < rows.top_p) | (rows.top_p == 1.0)  # the id that reaches top_p is kept
    kept_by_rank = by_k & by_p
    # Uncertain: a sum lies too near top_p, …
    near = ((mass - rows.top_p).abs() < _reach(mass, odds)) & by_k & (rows.top_p < 1.0)
    if rows.any_min_p:
        # … a ratio to the likeliest, whose own is 1 whoever that is, lies too near min_p, …
        near[:, 1:] |= ((sorted_z - rows.log_min_p).abs() < error)[:, 1:] & kept_by_rank[:, 1:]
        kept_by_rank = kept_by_rank & ~(sorted_z < rows.log_min_p)  # NaN stays: each row keeps an id
    # … or the last kept logit and the first dropped one lie too near; -inf − -inf, of ids not allowed, does not.
    count = kept_by_rank.sum(dim=1, keepdim=True)  # (B, 1)
    gap = sorted_z.gather(1, count - 1) - sorted_z.gather(1, count.clamp(max=V - 1))
    certain = ((count == V) | ~(gap < error))[:, 0] & ~near.any(dim=1)
    return torch.zeros_like(kept_by_rank).scatter(1, order, kept_by_rank), certain


def _keep_typical(
    z: Tensor, weights: Tensor, kept: Tensor, rows: SamplingRows, error: Tensor, odds: Tensor
) -> tuple[Tensor, Tensor]:
    """What typical_p keeps of `kept` (B, V), all of which have a weight."""
    V = z.size(1)
    p = weights * kept
    p = p / p.sum(dim=1, keepdim=True)
    z = z.masked_fill(~kept, 0.0)
    # −log p − H is the mean logit less the logit.
    deviation = z - (p * z).sum(dim=1, keepdim=True)
    key, order = deviation.abs().masked_fill(~kept, torch.inf).sort(dim=1, stable=True)
    p_sorted = p.gather(1, order)
    mass = p_sorted.cumsum(dim=1)
    p_sorted, mass = p_sorted / mass[:, -1:], mass / mass[:, -1:]
    by_key = (F.pad(mass[:, :-1], (1, 0)) < rows.typical_p) | (rows.typical_p == 1.0)  # the one that reaches it is kept
    count = by_key.sum(dim=1, keepdim=True)  # (B, 1)
    # An error e moves the mean by its own mean and, to first order, by its covariance with the logits, at most
    # sd·e/2; on the way there the variance grows by no more than the probabilities do, exp(e). Two keys on
    # different sides of the mean move against each other by twice what one moves.
    sd = (p * deviation.square()).sum(dim=1, keepdim=True).sqrt()
    move = 2.0 * error * (1.0 + 0.5 * (0.5 * error).exp() * sd)
    last = key.gather(1, count - 1)
    crossed = (count < V) & (key.gather(1, count.clamp(max=V - 1)) - last < move)
    # The sum that reaches typical_p must, and without its last id, whoever may become that, must not.
    reached = mass.gather(1, count - 1)
    without = reached - p_sorted
    early = by_key & (key > last - move) & (without + _reach(without, odds) > rows.typical_p)
    uncertain = crossed | (reached - _reach(reached, odds) < rows.typical_p) | early.any(dim=1, keepdim=True)
    certain = ~(uncertain & (rows.typical_p < 1.0))[:, 0]
    return kept & torch.zeros_like(by_key).scatter(1, order, by_key), certain
