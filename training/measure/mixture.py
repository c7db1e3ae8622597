"""Mix a network with the counts of its training text: fit the weights of the mixture, and measure what it gains.

The weights are few, and they are fitted on the validation split, which neither expert has learned from. So that no loss
is reported on text by which its weights were fitted, each half of the split is scored with weights fitted on the other
half. The checkpoint gets the weights of both halves together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from service.model.counts import Counts
from training.measure.counts import counted

MAX_FITTED, MAX_SCORED = 100_000, 2_000_000  # characters; 5,000 fit the weights to 0.002 nats


@dataclass(frozen=True)
class Mixture:
    """The result of a fit."""

    counts: Counts  # with weights fitted on characters of both halves
    loss: float  # nats per character, of each half with the weights of the other


def fit_mixture(counts: Counts, ids: np.ndarray, each: np.ndarray) -> Mixture:
    """Fit the weights that mix a network with counts.

    ids: (T,) a text that neither has seen. each: (T,) the network's loss of each character; NaN if it was not scored.
    """
    experts = _experts(counts, ids, each)
    half = len(experts[0]) // 2
    first, second = tuple(part[:half] for part in experts), tuple(part[half:] for part in experts)
    total = _loss(_fitted(counts, *first), *second) + _loss(_fitted(counts, *second), *first)
    return Mixture(_fitted(counts, *experts), total / len(experts[0]))


def _fitted(counts: Counts, *experts: np.ndarray) -> Counts:
    """Fit the weights on at most MAX_FITTED characters, at equal distances."""
    stride = -(-len(experts[0]) // MAX_FITTED)
    return counts.fitted(*(part[::stride] for part in experts))


def mixed_loss(counts: Counts, ids: np.ndarray, each: np.ndarray) -> float:
    """Return the loss of the mixture by the weights of `counts`, in nats per character. ids, each: as above."""
    experts = _experts(counts, ids, each)
    return _loss(counts, *experts) / len(experts[0])


def _experts(counts: Counts, ids: np.ndarray, each: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the probability of each scored character by network and counts, and the class of its history.

    Of more than MAX_SCORED, it takes so many at equal distances.
    """
    at = np.flatnonzero(~np.isnan(each))
    at = at[:: -(-len(at) // MAX_SCORED)]
    return np.exp(-each[at].astype(np.float64)), *counted(counts, ids, at)


def _loss(counts: Counts, network: np.ndarray, p: np.ndarray, classes: np.ndarray) -> float:
    """Return the summed loss of the mixture."""
    w = counts.weights.ravel()[classes]
    return float(-np.log((1 - w) * network + w * p).sum())
