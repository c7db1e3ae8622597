"""How good a model is: losses over all of a text, and baselines to hold them against.

Losses are nats per character; every figure is deterministic: no random windows. Divide by ln 2 for bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from service.model.gpt import GPT

CHUNK = 1 << 20  # characters counted at a time
BATCH_CHARS = 1 << 11  # characters per forward


def bits(nats: float) -> float:
    return nats / math.log(2)


def whole_loss(model: GPT, ids: np.ndarray) -> float:
    """Mean loss of every character of `ids` but the first, in consecutive windows of block_size.

    Each window starts without context, as in training: character i of a window is predicted from the i before it
    and one before the window's end is never seen twice. This is what nanoGPT's random windows estimate.
    """
    T = model.config.block_size
    rows = max(1, BATCH_CHARS // T)
    total, scored = 0.0, len(ids) - 1
    for start in range(0, scored, rows * T):
        piece = _tensor(ids[start : start + rows * T + 1], model)
        n = (len(piece) - 1) // T * T  # what whole windows hold; the rest is one shorter window
        if n:
            total += _loss(model, piece[:n].view(-1, T), piece[1 : n + 1].view(-1, T))
        if n < len(piece) - 1:
            total += _loss(model, piece[None, n:-1], piece[None, n + 1 :])
    return total / scored


def streamed_loss(model: GPT, ids: np.ndarray) -> float:
    """Mean loss of every character of `ids` but the first, in one pass: each from all that the model can see.

    Equal to one banded forward over the whole text. It goes in chunks, each with the characters before it
    that can reach it (`receptive_field`), which are not scored again.
    """
    before = model.config.receptive_field - 1
    chunk = max(BATCH_CHARS, 8 * before)
    total, scored = 0.0, len(ids) - 1
    for start in range(0, scored, chunk):
        first = max(0, start - before)
        piece = _tensor(ids[first : start + chunk + 1], model)
        total += _loss(model, piece[None, :-1], piece[None, 1:], skip=start - first)
    return total / scored


@torch.no_grad()
def _loss(model: GPT, idx: Tensor, targets: Tensor, skip: int = 0) -> float:
    """Summed loss of idx (B, T) against targets (B, T), all but the first `skip` characters of each row."""
    assert not model.training, "dropout is for training"
    logits = model(idx)[:, skip:].float()
    return F.cross_entropy(logits.flatten(0, 1), targets[:, skip:].flatten(), reduction="sum").item()


def _tensor(ids: np.ndarray, model: GPT) -> Tensor:
    return torch.from_numpy(ids.astype(np.int64)).to(model.head.weight.device)


def baselines(train: np.ndarray, val: np.ndarray, vocab_size: int) -> dict[str, float]:
    """Losses on `val` (all but its first character) of models that only count, made from `train`.

    uniform: every symbol alike; unigram: by its frequency; bigram: by its frequency after the symbol before.
    Each count starts at one, so that what never occurred in `train` still has a probability.
    """
    counts = np.bincount(train[:1], minlength=vocab_size)  # of symbols
    seen, times = np.empty(0, np.int64), np.empty(0, np.int64)  # pairs a·V + b, and how often
    for pairs in _pairs(train, vocab_size):
        counts = counts + np.bincount(pairs % vocab_size, minlength=vocab_size)
        found, n = np.unique(np.concatenate((seen, pairs)), return_counts=True)
        n[np.searchsorted(found, seen)] += times - 1
        seen, times = found, n
    after = np.bincount(seen // vocab_size, weights=times, minlength=vocab_size)  # how often a symbol has a next one
    unigram = bigram = 0.0
    for pairs in _pairs(val, vocab_size):
        unigram -= np.log((counts[pairs % vocab_size] + 1) / (counts.sum() + vocab_size)).sum()
        place = np.searchsorted(seen, pairs).clip(max=len(seen) - 1)
        n = np.where(seen[place] == pairs, times[place], 0)
        bigram -= np.log((n + 1) / (after[pairs // vocab_size] + vocab_size)).sum()
    scored = len(val) - 1
    return {"uniform": math.log(vocab_size), "unigram": float(unigram / scored), "bigram": float(bigram / scored)}


def _pairs(ids: np.ndarray, vocab_size: int) -> Iterable[np.ndarray]:
    for start in range(0, len(ids) - 1, CHUNK):
        piece = ids[start : start + CHUNK + 1].astype(np.int64)
        yield piece[:-1] * vocab_size + piece[1:]
