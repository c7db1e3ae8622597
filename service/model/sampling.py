"""A vectorised sampler of ids from logits, with a counter-based random generator for each sequence.

The module is independent of models and caches. The draw of a row depends only on its seed and position, not on the
other rows of the batch. This sampler defines every sampling parameter, and tests compare other samplers with it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from service.model.params import SamplingParams


def uniforms(seed: int, start: int, count: int) -> np.ndarray:
    """Return the draws start … start+count−1 of a seed: (count,) float64 in [0, 1).

    Philox 4×64 (Salmon et al. 2011) is a function of key and counter, so any draw can be computed without the draws
    before it. Each value of the counter gives four draws.
    """
    generator = np.random.Philox(key=seed)
    generator.advance(start // 4)
    raw = generator.random_raw(start % 4 + count)[start % 4 :]
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Draws:
    """The draws of S sequences, each in order. AHEAD draws of a sequence are computed at once."""

    AHEAD = 1024

    def __init__(self, sequences: int):
        self._seeds = np.zeros(sequences, dtype=np.uint64)
        self._taken = np.zeros(sequences, dtype=np.int64)
        self._first = np.full(sequences, -self.AHEAD, dtype=np.int64)  # number of the first computed draw
        self._draws = np.zeros((sequences, self.AHEAD))

    def start(self, sequence: int, seed: int, taken: int = 0) -> None:
        """Begin a sequence. taken: the number of its next draw."""
        self._seeds[sequence] = seed
        self._taken[sequence], self._first[sequence] = taken, taken - self.AHEAD  # no draw is computed yet

    def take(self, sequences: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Take the next counts[b] ≤ AHEAD draws of sequences[b]; return (B, counts.max()) float64.

        Draws after the first counts[b] of row b are not taken: the next call returns them again.
        """
        most = int(counts.max())
        offset = self._taken[sequences] - self._first[sequences]
        for b in np.flatnonzero(offset + most > self.AHEAD).tolist():
            which = sequences[b]
            self._first[which] = self._taken[which]
            self._draws[which] = uniforms(int(self._seeds[which]), int(self._taken[which]), self.AHEAD)
            offset[b] = 0
        self._taken[sequences] += counts
        return self._draws[sequences[:, None], offset[:, None] + np.arange(most)]


# The columns of a row of parameters, in fp64.
TEMPERATURE, IS_GREEDY, TOP_K, TOP_P, LOG_MIN_P, TYPICAL_P, REPETITION, PRESENCE, FREQUENCY = range(9)


def row_of(params: SamplingParams) -> np.ndarray:
    """Return the parameters as a row for `Sampler.choose`, (9,) float64."""
    temperature, *others = params.factors
    return np.array([temperature or 1.0, temperature == 0.0, params.top_k if params.top_k > 0 else 2**31, *others])


NEUTRAL = row_of(SamplingParams())


class Sampler:
    """The parameters of S sequences, and the characters that their penalties count.

    The tensors keep their addresses, because CUDA graphs refer to them.
    """

    def __init__(self, sequences: int, vocab_size: int, device: torch.device | str = "cpu"):
        place = functools.partial(torch.zeros, device=device)
        self.table = place(sequences, len(NEUTRAL), dtype=torch.float64)
        self.bias = place(sequences, vocab_size, dtype=torch.float64)
        # `seen` and `counts` are valid only for sequences with a penalty.
        self.seen = place(sequences, vocab_size, dtype=torch.bool)  # True if the id is in the prompt
        self.counts = place(sequences, vocab_size, dtype=torch.float64)  # occurrences of the id in the completion
        self.needs_all = np.zeros(sequences, dtype=bool)  # True: has parameters beyond temperature, bias and seed
        self._host_table, self._is_sent = np.tile(NEUTRAL, (sequences, 1)), False
        self._is_biased = np.zeros(sequences, dtype=bool)

    def start(self, sequence: int, params: SamplingParams, prompt: Sequence[int], written: Sequence[int] = ()) -> None:
        """Set the parameters of a sequence, and count the ids of its prompt and those written if a penalty is set.

        written: the ids of the completion so far.

        Raises:
            ValueError: an id of the prompt, of `written` or of a bias is outside the vocabulary.
        """
        V, row = self.bias.size(1), row_of(params)
        ids = [*prompt, *written]
        if not 0 <= min(ids) <= max(ids) < V:
            raise ValueError(f"prompt ids must be in [0, {V - 1}], got {min(ids)} to {max(ids)}")
        if any(id >= V for id, _ in params.logit_bias):
            raise ValueError(f"logit_bias ids must be below {V}, got {max(params.logit_bias)[0]}")
        if not np.array_equal(row, self._host_table[sequence]):
            self._host_table[sequence], self._is_sent = row, False
        self.needs_all[sequence] = not np.array_equal(row[TOP_K:], NEUTRAL[TOP_K:])
        if params.logit_bias or self._is_biased[sequence]:
            self._is_biased[sequence] = bool(params.logit_bias)
            bias = np.zeros(V)
            for id, value in params.logit_bias:
                bias[id] = value
            send(bias, self.bias[sequence])
        if params.needs_history:
            seen = np.zeros(V, dtype=bool)
            seen[np.asarray(prompt)] = True
            send(seen, self.seen[sequence])
            counts = np.bincount(np.asarray(written, dtype=np.int64), minlength=V).astype(np.float64)
            send(counts, self.counts[sequence])

    def send(self) -> None:
        """Copy changed parameters to the device. Call it before `choose`."""
        if not self._is_sent:
            send(self._host_table, self.table)
            self._is_sent = True

    def choose(
        self, logits: Tensor, which: Tensor | slice, u: Tensor, allowed: Tensor | None = None, needs_all: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Choose an id for each row, (B,) int64. Return the ids, and whether each row's logits are finite, (B,) bool.

        The chosen id is the inverse CDF at u, in the order of ids. These steps give the distribution:

        1. Add `logit_bias`.
        2. Apply `repetition_penalty` r to ids in the prompt or the completion: a logit x > 0 becomes x/r, any other
           becomes x·r (Keskar et al. 2019, as in transformers and vLLM).
        3. Subtract `frequency_penalty` times the id's count in the completion, and subtract `presence_penalty` if the
           count is not 0 (OpenAI).
        4. Exclude ids that are not in `allowed`.
        5. Divide by `temperature`. If it is 0, the most likely id is chosen here.
        6. Apply `top_k` (Fan et al. 2018).
        7. Apply `top_p` (Holtzman et al. 2020). The id that reaches the sum is kept.
        8. Apply `min_p` (Nguyen et al. 2024).
        9. Apply `typical_p` (Meister et al. 2022): order the ids by |−log p − H|. The id that reaches the sum is kept.

        Probabilities are renormalised after each step. Ties go to the lower id. All arithmetic is fp64. A step does not
        change a row that has the neutral value of its parameter. A row with logits that are not finite gets an
        arbitrary id, and does not affect other rows.

        logits: (B, V) fp64.
        which: the sequences of the rows.
        u: (B,) fp64, uniform draws.
        allowed: (B, V) bool, with at least one id in each row; None: all ids are allowed.
        needs_all: False if `self.needs_all` is False for all of these sequences; steps 2, 3 and 6 to 9 are then
            skipped.
        """
        columns = self.table[which].unsqueeze(2).unbind(1)  # (B, 1) each
        z = logits + self.bias[which]
        if needs_all:
            counts = self.counts[which]
            seen = self.seen[which] | (counts > 0.0)
            z = torch.where(seen, torch.where(z > 0.0, z / columns[REPETITION], z * columns[REPETITION]), z)
            z = z - (columns[FREQUENCY] * counts + columns[PRESENCE] * (counts > 0.0))
        if allowed is not None:
            z = z.masked_fill(~allowed, -torch.inf)
        z = (z - z.amax(dim=1, keepdim=True)) / columns[TEMPERATURE]
        weights = z.exp()
        if needs_all:
            weights = weights * _keep_likeliest(z, weights, columns[TOP_K], columns[TOP_P], columns[LOG_MIN_P])
            weights = weights * _keep_typical(z, weights, columns[TYPICAL_P])
        cdf = weights.cumsum(dim=1)
        cdf = cdf / cdf[:, -1:]
        # Ids of weight 0 at the end have the last value of the CDF, which is 1 > u, so they are never chosen.
        ids = (cdf <= u[:, None]).sum(dim=1).clamp(max=z.size(1) - 1)
        ids = torch.where(columns[IS_GREEDY][:, 0] > 0.0, z.argmax(dim=1), ids)
        return ids, logits.abs().amax(dim=1) < torch.inf


def send(array: np.ndarray, to: Tensor) -> None:
    """Copy an array to a tensor without waiting for the device. The caller may change the array at once."""
    host = torch.from_numpy(array)
    to.copy_(host.pin_memory() if to.is_cuda else host, non_blocking=True)


def _keep_likeliest(z: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> Tensor:
    """Return the ids that top_k, top_p and min_p keep, (B, V) bool: a prefix of the ids ordered by logit."""
    sorted_z, order = z.sort(dim=1, descending=True, stable=True)
    by_k = torch.arange(z.size(1), device=z.device) < top_k
    kept = by_k & _reaching(weights.gather(1, order) * by_k, top_p)
    kept &= ~(sorted_z < log_min_p)  # NaN is kept, so each row keeps at least one id
    return torch.zeros_like(kept).scatter(1, order, kept)


def _keep_typical(z: Tensor, weights: Tensor, typical_p: Tensor) -> Tensor:
    """Return the ids of positive weight that typical_p keeps, (B, V) bool."""
    kept = weights > 0.0
    p = weights / weights.cumsum(dim=1)[:, -1:]  # cumsum adds in the order of ids; `sum` has no fixed order
    # −log p − H is the mean logit minus the logit.
    z = z.masked_fill(~kept, 0.0)
    deviation = z - (p * z).cumsum(dim=1)[:, -1:]
    _, order = deviation.abs().masked_fill(~kept, torch.inf).sort(dim=1, stable=True)
    by_key = _reaching(p.gather(1, order), typical_p)
    return kept & torch.zeros_like(by_key).scatter(1, order, by_key)


def _reaching(weights: Tensor, p: Tensor) -> Tensor:
    """Return the shortest prefix of each row of weights that has a share p (B, 1) of their sum, (B, V) bool.

    For p = 1, return the whole row.
    """
    mass = weights.cumsum(dim=1)
    mass = mass / mass[:, -1:]
    return (F.pad(mass[:, :-1], (1, 0)) < p) | (p == 1.0)
