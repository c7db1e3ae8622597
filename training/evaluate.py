"""Losses over a whole text, and the baselines to compare them with.

Losses are in nats per character. All are deterministic: there are no random windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from service.model.gpt import GPT
from training.data import IGNORED, padded, record_pieces, unseen_records, window_pieces

CHUNK = 1 << 20  # characters per count
BATCH_CHARS = 1 << 11  # characters per forward

Advance = Callable[[int], object]  # is told of each forward how many characters it has scored; `int` ignores it


def bits(nats: float) -> float:
    return nats / math.log(2)


def split_losses(
    model: GPT, ids: np.ndarray, *, records: bool, train: np.ndarray | None = None, advance: Advance = int
) -> dict[str, float]:
    """`whole`, in pieces of at most block_size as in training, and `streamed`, as when generating.

    Of records also `unseen`, streamed: of those that are not in `train` too, if there are both kinds.
    """
    if not records:
        return {"whole": whole_loss(model, ids, advance), "streamed": streamed_loss(model, ids, advance)}
    losses = {
        "whole": piece_loss(model, ids, *record_pieces(ids, model.config.block_size), advance),
        "streamed": piece_loss(model, ids, *record_pieces(ids, len(ids)), advance),
    }
    if train is not None:
        unseen = unseen_records(ids, train)
        if 1 < len(unseen) < len(ids):
            losses["unseen"] = piece_loss(model, unseen, *record_pieces(unseen, len(unseen)))
    return losses


def whole_loss(model: GPT, ids: np.ndarray, advance: Advance = int) -> float:
    """Mean loss of every character of `ids` but the first, in consecutive windows of block_size.

    Each window starts without context, as in training: character i of a window is predicted from the i before it.
    nanoGPT's random windows estimate the same quantity.
    """
    return piece_loss(model, ids, *window_pieces(ids, model.config.block_size), advance)


def piece_loss(model: GPT, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray, advance: Advance = int) -> float:
    """Mean loss of the targets of pieces of `ids`, each without what precedes it; 0 if there are none.

    A piece longer than a forward is scored as `streamed_loss` scores a text.
    """
    order = np.argsort(-lengths, kind="stable")  # the longest first
    total, first = 0.0, 0
    while first < len(order):
        start, length = int(starts[order[first]]), int(lengths[order[first]])
        if length > BATCH_CHARS and length > stream_chars(model):
            total += streamed_sum(model, ids[start : start + length + 1], advance)
            first += 1
            continue
        rows = max(1, BATCH_CHARS // length)
        batch = order[first : first + rows]
        idx, targets = padded(ids, starts[batch], lengths[batch])
        total += _loss(model, _tensor(idx, model), _tensor(targets, model))
        advance(int(lengths[batch].sum()))
        first += rows
    return total / max(1, int(lengths.sum()))


def streamed_loss(model: GPT, ids: np.ndarray, advance: Advance = int) -> float:
    """Mean loss of every character of `ids` but the first, each predicted from its full receptive field.

    Equal to one banded forward over the whole text, computed in chunks that overlap by the receptive field; the
    overlap is not scored twice.
    """
    return streamed_sum(model, ids, advance) / (len(ids) - 1)


def stream_chars(model: GPT) -> int:
    """Characters per forward of a streamed text: many times what is computed twice."""
    return max(BATCH_CHARS, 8 * (model.config.receptive_field - 1))


def streamed_sum(model: GPT, ids: np.ndarray, advance: Advance = int) -> float:
    """`streamed_loss`, summed."""
    before, chunk = model.config.receptive_field - 1, stream_chars(model)
    total, scored = 0.0, len(ids) - 1
    for start in range(0, scored, chunk):
        first = max(0, start - before)
        piece = _tensor(ids[first : start + chunk + 1], model)
        total += _loss(model, piece[None, :-1], piece[None, 1:], skip=start - first)
        advance(min(chunk, scored - start))
    return total


@torch.no_grad()
def _loss(model: GPT, idx: Tensor, targets: Tensor, skip: int = 0) -> float:
    """Summed loss of idx (B, T) against targets (B, T), without the first `skip` characters of each row."""
    assert not model.training, "dropout must be off"
    logits = model(idx)[:, skip:].float()
    targets = targets[:, skip:].flatten()
    return F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=IGNORED, reduction="sum").item()


def _tensor(ids: np.ndarray, model: GPT) -> Tensor:
    return torch.from_numpy(ids.astype(np.int64)).to(model.head.weight.device)


def baselines(train: np.ndarray, val: np.ndarray, vocab_size: int) -> dict[str, float]:
    """Losses on `val`, all but its first character, of uniform, unigram and bigram models of `train`.

    Counts have add-one smoothing.
    """
    counts = np.bincount(train[:1], minlength=vocab_size)  # of symbols
    seen, times = np.empty(0, np.int64), np.empty(0, np.int64)  # distinct bigrams a·V + b, and their counts
    for pairs in _pairs(train, vocab_size):
        counts = counts + np.bincount(pairs % vocab_size, minlength=vocab_size)
        found, n = np.unique(np.concatenate((seen, pairs)), return_counts=True)
        n[np.searchsorted(found, seen)] += times - 1
        seen, times = found, n
    contexts = np.bincount(seen // vocab_size, weights=times, minlength=vocab_size)  # of symbols with a successor
    unigram = bigram = 0.0
    for pairs in _pairs(val, vocab_size):
        unigram -= np.log((counts[pairs % vocab_size] + 1) / (counts.sum() + vocab_size)).sum()
        place = np.searchsorted(seen, pairs).clip(max=len(seen) - 1)
        n = np.where(seen[place] == pairs, times[place], 0)
        bigram -= np.log((n + 1) / (contexts[pairs // vocab_size] + vocab_size)).sum()
    scored = len(val) - 1
    return {"uniform": math.log(vocab_size), "unigram": float(unigram / scored), "bigram": float(bigram / scored)}


def _pairs(ids: np.ndarray, vocab_size: int) -> Iterable[np.ndarray]:
    """The bigrams of `ids`, in chunks, each encoded as a·V + b."""
    for start in range(0, len(ids) - 1, CHUNK):
        piece = ids[start : start + CHUNK + 1].astype(np.int64)
        yield piece[:-1] * vocab_size + piece[1:]
