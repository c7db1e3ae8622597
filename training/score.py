"""The log-likelihood of each line of a text, in batches.

A line is scored in its usual context: preceded by a line break, and including the line break that ends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from service.model.gpt import GPT
from service.model.tokenizer import CharTokenizer, UnknownCharacterError
from training.data import DataError
from training.evaluate import bits

BATCH_CHARS = 1 << 14  # characters per forward, padding included
LINES = 4096  # per group that is sorted by length


def score_lines(model: GPT, tokenizer: CharTokenizer, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The record of each line, in order; `characters` counts the line break that ends it.

    Raises:
        DataError: a line has a character that is not in the vocabulary, or the vocabulary has no line break.
    """
    if "\n" not in tokenizer:
        raise DataError("score needs a model whose vocabulary includes the line break; this one does not: use evaluate")
    group: list[tuple[str, list[int]]] = []
    number = 0
    for line in lines:
        number += 1
        try:
            group.append((line, tokenizer.encode(f"\n{line}\n")))
        except UnknownCharacterError as error:
            place = f"line {number}, character {error.offset}"  # from 1, as a line break precedes the line
            raise DataError(f"{place}: {error.character!r} is not in the vocabulary") from None
        if len(group) == LINES:
            yield from _score_group(model, group)
            group = []
    yield from _score_group(model, group)


def _score_group(model: GPT, group: list[tuple[str, list[int]]]) -> Iterator[dict[str, Any]]:
    nats = [0.0] * len(group)
    by_length = sorted(range(len(group)), key=lambda i: len(group[i][1]))
    while by_length:
        longest = len(group[by_length[-1]][1])
        rows = max(1, BATCH_CHARS // longest)
        batch, by_length = by_length[-rows:], by_length[:-rows]
        for i, value in zip(batch, _nats(model, [group[i][1] for i in batch]).tolist(), strict=True):
            nats[i] = value
    for (line, ids), value in zip(group, nats, strict=True):
        count = len(ids) - 1
        yield {
            "text": line,
            "characters": count,
            "nats": value,
            "nats_per_character": value / count,
            "bits_per_character": bits(value / count),
        }


@torch.no_grad()
def _nats(model: GPT, rows: list[list[int]]) -> Tensor:
    """Summed loss of each row, without its first id: (len(rows),) fp64."""
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in rows], batch_first=True, padding_value=-1)
    idx, targets = padded[:, :-1].clamp(min=0), padded[:, 1:]  # (B, T); padding on the right is never attended to
    device = model.head.weight.device
    logits = model(idx.to(device)).float().cpu()
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none")
    return losses.view(targets.shape).double().sum(dim=1)
