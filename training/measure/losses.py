"""Losses over a whole text.

Losses are in nats per character. All are deterministic, because no windows are drawn at random.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from service.engine import native
from service.engine.engine import BrokenRunnerError, Engine
from service.engine.runner import Runner
from service.engine.selfcheck import SelfCheckError
from service.model.gpt import GPT
from service.model.kv_cache import CacheRows, KVCache
from service.model.params import SamplingParams
from service.wire import Submit
from training.model.selfcheck import computes
from training.text.batches import IGNORED, padded, record_pieces, unseen_records, window_pieces

BATCH_CHARS = 1 << 11  # characters per forward
STRETCH_WINDOWS = 4  # windows in each stretch of a sample
SLOTS = 32  # pieces that the engine scores at a time, if their keys and values fit in CACHE_BYTES
CACHE_BYTES = 1 << 28
SCORED_SECONDS = 1.0  # of a step of the engine: long enough that all threads have pieces
GREEDY = SamplingParams(temperature=0.0)

Advance = Callable[[int], object]  # receives the number of characters that each forward scored; `int` ignores it


def bits(nats: float) -> float:
    return nats / math.log(2)


@dataclass(frozen=True)
class Scores:
    """Losses of a split, or of a sample of it."""

    losses: dict[str, float]
    characters: int  # number of characters scored in each of `whole` and `streamed`
    standard_error: float | None  # standard error of `whole` as an estimate for the split; None: all of it was scored
    each: np.ndarray  # (T,) float32: the streamed loss of each character of the split; NaN if it was not scored


def split_losses(
    model: GPT, ids: np.ndarray, records: bool, train: np.ndarray | None = None, advance: Advance = int
) -> dict[str, float]:
    """Return the losses `whole`, in pieces of at most block_size as in training, and `streamed`, as in generation.

    For records, also return `unseen`, the streamed loss of the records that `train` lacks, if some of the records are
    in `train` and some are not.
    """
    return sampled_scores(model, ids, len(ids), records, train, advance).losses


def sampled_scores(
    model: GPT, ids: np.ndarray, count: int, records: bool, train: np.ndarray | None = None, advance: Advance = int
) -> Scores:
    """Return `split_losses` of about `count` characters: stretches of a text at equal distances, or the first records.

    Records that all fit the window are scored once, because both losses are the same.
    """
    window, sums_of = model.config.block_size, fast_piece_sums(model)
    each = np.full(len(ids), np.nan, np.float32)
    if records:
        part = beginning(ids, count)
        starts, lengths = record_pieces(part, len(part))
        sums = sums_of(part, starts, lengths, advance, each=each)
        streamed = whole = float(sums.sum()) / int(lengths.sum())
        if lengths.max() > window:
            cut_starts, cut_lengths = record_pieces(part, window)
            whole = float(sums_of(part, cut_starts, cut_lengths, advance).sum()) / int(cut_lengths.sum())
        losses = {"whole": whole, "streamed": streamed}
        if train is not None:
            is_unseen = unseen_records(part, train)
            if 0 < is_unseen.sum() < len(is_unseen):
                losses["unseen"] = float(sums[is_unseen].sum()) / int(lengths[is_unseen].sum())
    else:
        places = stretches(len(ids), count, window)
        pieces = [window_pieces(ids[start:end], window) for start, end in places]
        starts = np.concatenate([start + its for (start, _), (its, _) in zip(places, pieces, strict=True)])
        all_sums = sums_of(ids, starts, np.concatenate([its for _, its in pieces]), advance)
        ends = np.cumsum([len(its) for _, its in pieces])[:-1]
        sums = np.array([part.sum() for part in np.split(all_sums, ends)])
        lengths = np.array([its.sum() for _, its in pieces])
        contexts = np.array([min(start, window) for start, _ in places])
        firsts = np.array([start for start, _ in places]) - contexts
        streamed_sums = sums_of(ids, firsts, lengths + contexts, advance, contexts, each)
        losses = {"whole": float(sums.sum()), "streamed": float(streamed_sums.sum())}
        losses = {name: total / int(lengths.sum()) for name, total in losses.items()}
    scored = int(lengths.sum())
    return Scores(losses, scored, None if scored >= len(ids) - 1 else _standard_error(sums, lengths), each)


def _standard_error(sums: np.ndarray, lengths: np.ndarray) -> float:
    """Return the standard error of the mean loss per character, estimated from clusters (n,).

    sums, lengths: the summed loss and the number of characters of each cluster.
    """
    n, total = len(sums), lengths.sum()
    return float(np.sqrt(n / max(1, n - 1) * ((sums - sums.sum() / total * lengths) ** 2).sum()) / total)


def stretches(length: int, count: int, window: int) -> list[tuple[int, int]]:
    """Return the starts and ends of stretches at equal distances in a text of `length` characters.

    Without their first characters, the stretches have about `count` characters together. There is one stretch, the
    whole text, if `count` covers it.
    """
    if count >= length - 1:
        return [(0, length)]
    number = max(1, min(count, max(2, count // (STRETCH_WINDOWS * window))))
    size = count // number
    return [(start, start + size + 1) for start in np.linspace(0, length - size - 1, number).astype(int).tolist()]


def beginning(ids: np.ndarray, count: int) -> np.ndarray:
    """Return the first whole records of a split, about `count` characters and at least one record."""
    if count >= len(ids):
        return ids
    lengths = np.cumsum(record_pieces(ids, len(ids))[1])
    return ids[: 1 + int(lengths[max(0, int(np.searchsorted(lengths, count - 1, "right")) - 1)])]


def whole_loss(model: GPT, ids: np.ndarray, advance: Advance = int) -> float:
    """Return the mean loss of every character of `ids` but the first, in consecutive windows of block_size.

    Each window starts without context, as in training. The model predicts target i of a window, counted from 1, from i
    characters. nanoGPT's random windows estimate the same quantity.
    """
    return piece_loss(model, ids, *window_pieces(ids, model.config.block_size), advance)


def piece_loss(model: GPT, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray, advance: Advance = int) -> float:
    """Return the mean loss of the targets of pieces of `ids`, or 0 if there are none.

    No piece sees the text before it.
    """
    return float(piece_sums(model, ids, starts, lengths, advance).sum()) / max(1, int(lengths.sum()))


def fast_piece_sums(model: GPT) -> Callable[..., np.ndarray]:
    """Return `piece_sums` for a model, computed by the native engine if that computes this model here."""
    assert not model.training, "dropout must be off"
    runner = _native_runner(model)
    return partial(piece_sums, model) if runner is None else partial(engine_sums, runner)


def _native_runner(model: GPT) -> Runner | None:
    """Return a runner that computes in float32 throughout, as GPT.forward does."""
    weight, config, threads = model.head.weight, model.config, torch.get_num_threads()
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or native.why_not() is not None:
        return None
    slot_bytes = 2 * 4 * config.n_layer * config.n_kv_head * config.block_size * config.head_dim
    slots = max(threads, min(SLOTS, CACHE_BYTES // slot_bytes))
    weights = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    try:
        runner = native.NativeRunner(config, weights, slots, threads, half_cache=False)
    except SelfCheckError:  # gpt.py has other weights
        return None
    return runner if computes(runner, model) else None


def engine_sums(
    runner: Runner,
    ids: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    advance: Advance = int,
    skips: np.ndarray | None = None,
    each: np.ndarray | None = None,
) -> np.ndarray:
    """Return what `piece_sums` returns. Each piece is a prompt of the service's engine, which scores it."""
    if not all(((starts + lengths) < len(ids)) | (lengths == 0)):
        raise ValueError("a piece ends beyond the text")
    skips = np.zeros_like(lengths) if skips is None else skips
    sums, waiting = np.zeros(len(lengths)), iter(np.argsort(-lengths, kind="stable").tolist())  # the longest first
    engine = Engine(runner, max_waiting=2 * runner.slots, step_seconds=SCORED_SECONDS)
    values: dict[int, bytearray] = {}
    while True:
        for piece in itertools.islice(waiting, 2 * runner.slots - len(values)):
            if lengths[piece] > skips[piece]:
                prompt = ids[starts[piece] : starts[piece] + lengths[piece] + 1].tolist()
                engine.submit(Submit(piece, prompt, 0, GREEDY, logprobs=0, score_from=int(skips[piece]) + 1))
                values[piece] = bytearray()
        if not values:
            return sums
        try:
            deltas = engine.step()
        except BrokenRunnerError:  # no logits are finite
            return np.full(len(lengths), np.nan)
        for delta in deltas:
            if delta.prompt_logprobs is not None:
                values[delta.id] += delta.prompt_logprobs.values
                advance(len(delta.prompt_logprobs))
            if delta.finish_reason is not None:
                logprobs = np.frombuffer(values.pop(delta.id))
                sums[delta.id] = -logprobs.sum() if delta.finish_reason == "length" else np.nan
                if each is not None:
                    first = int(starts[delta.id] + skips[delta.id]) + 1
                    each[first : first + len(logprobs)] = -logprobs


@torch.no_grad()
def piece_sums(
    model: GPT,
    ids: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    advance: Advance = int,
    skips: np.ndarray | None = None,
    each: np.ndarray | None = None,
) -> np.ndarray:
    """Return the summed loss of each piece's targets, without the first `skips` of them: (pieces,) float64.

    A piece of more than BATCH_CHARS targets is scored as `streamed_loss` scores a text. each: (T,) receives the loss of
    each target at its place in `ids`.
    """
    assert not model.training, "dropout must be off"
    sums, first = np.zeros(len(lengths)), 0
    skips = np.zeros_like(lengths) if skips is None else skips
    order = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]  # the longest first
    while first < len(order):
        start, length = int(starts[order[first]]), int(lengths[order[first]])
        if length > BATCH_CHARS:
            text, own = slice(start, start + length + 1), None if each is None else each[start : start + length + 1]
            sums[order[first]] = streamed_sum(model, ids[text], advance, int(skips[order[first]]), own)
            first += 1
            continue
        rows = max(1, BATCH_CHARS // length)
        batch = order[first : first + rows]
        idx, targets = padded(ids, starts[batch], lengths[batch])
        targets[np.arange(targets.shape[1]) < skips[batch, None]] = IGNORED
        losses = _losses(model(torch.from_numpy(idx.astype(np.int64)).to(model.head.weight.device)), targets)
        sums[batch] = losses.sum(dim=1).numpy()
        if each is not None:
            is_target = targets != IGNORED
            at = starts[batch, None] + 1 + np.arange(targets.shape[1])
            each[at[is_target]] = losses.numpy()[is_target]
        advance(int((lengths - skips)[batch].sum()))
        first += rows
    return sums


def streamed_loss(model: GPT, ids: np.ndarray, advance: Advance = int) -> float:
    """Return the mean loss of every character of `ids` but the first, each predicted from its full receptive field."""
    return streamed_sum(model, ids, advance) / (len(ids) - 1)


def streamed_sum(
    model: GPT, ids: np.ndarray, advance: Advance = int, skip: int = 0, each: np.ndarray | None = None
) -> float:
    """Return the summed loss of `streamed_loss`, without the first `skip` targets, which serve only as context.

    each: (T,) receives the loss of each target at its place in `ids`.
    """
    total, scored = 0.0, 0
    for logits in streamed_logits(model, ids):
        targets = ids[scored + 1 : scored + 1 + logits.size(1)].astype(np.int64)
        targets[: max(0, skip - scored)] = IGNORED
        losses, is_target = _losses(logits, targets[None])[0], targets != IGNORED
        total += float(losses.sum())
        if each is not None:
            each[scored + 1 : scored + 1 + len(targets)][is_target] = losses.numpy()[is_target]
        scored += len(targets)
        advance(int((targets != IGNORED).sum()))
    return total


@torch.no_grad()
def streamed_logits(model: GPT, ids: np.ndarray) -> Iterator[Tensor]:
    """Yield the logits after each character of a text but the last, through a KV cache: (1, T, V) for T characters.

    They equal the logits of one banded forward over the whole text.
    """
    assert not model.training, "dropout must be off"
    weight, size = model.head.weight, max(16, BATCH_CHARS // 8)  # memory and masked work grow with the size
    cache = KVCache(model.config, 1, weight.device, weight.dtype)
    for start in range(0, len(ids) - 1, size):
        piece = torch.from_numpy(ids[None, start : min(start + size, len(ids) - 1)].astype(np.int64))
        yield model(piece.to(weight.device), CacheRows(cache, [0], [piece.size(1)]))


def _losses(logits: Tensor, targets: np.ndarray) -> Tensor:
    """Return the losses of logits (B, T, V) against targets (B, T): (B, T) float64; 0 for IGNORED targets."""
    expected = torch.from_numpy(targets.astype(np.int64)).to(logits.device)
    losses = F.cross_entropy(logits.float().flatten(0, 1), expected.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view(expected.shape).double().cpu()
