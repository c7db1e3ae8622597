"""The log-likelihood of each line of a text, in batches.

As /v1/score of the service has it: a line is a text of its own, whose first character has nothing before it and is not
scored; its line break is no part of it. Or each line is scored as a record, from the line break before it to its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from service.model.gpt import GPT
from service.model.tokenizer import UnknownCharacterError
from training.data import DataError
from training.encoding import Encoder
from training.evaluate import bits, stream_chars, streamed_sum

BATCH_CHARS = 1 << 14  # characters per forward, padding included
LINES = 4096  # per group that is sorted by length
SURROGATE = 0xDC00  # plus a byte that is not UTF-8, as `data.read_lines` gives it


def score_lines(
    model: GPT, encoder: Encoder, lines: Iterable[str], *, records: bool, refused: Callable[[int, str], None]
) -> Iterator[dict[str, Any]]:
    """The scores of each line, in order; `characters` are those scored, with `records` the line break too.

    A line that is not UTF-8 or has unknown characters is left out: `refused` is called with its number, from 1, and
    the reason.

    Raises:
        DataError: with `records`, the vocabulary has no line break.
    """
    if records and "\n" not in encoder.tokenizer:
        raise DataError("--records needs a model whose vocabulary includes the line break; this one does not")
    end = encoder.tokenizer.encode("\n") if records else []
    group: list[tuple[int, str, list[int]]] = []
    for number, line in enumerate(lines, 1):
        try:
            if offset := next((i for i, c in enumerate(line, 1) if "\ud800" <= c <= "\udfff"), 0):
                refused(number, f"byte 0x{ord(line[offset - 1]) - SURROGATE:02X} at offset {offset - 1} is not UTF-8")
                continue
            group.append((number, line, end + encoder.encode(line) + end))
        except UnknownCharacterError as error:
            refused(number, str(error))
        if len(group) == LINES:
            yield from _score_group(model, group)
            group = []
    yield from _score_group(model, group)


def _score_group(model: GPT, group: list[tuple[int, str, list[int]]]) -> Iterator[dict[str, Any]]:
    nats = [0.0] * len(group)
    by_length = sorted((i for i in range(len(group)) if len(group[i][2]) > 1), key=lambda i: len(group[i][2]))
    while by_length:
        longest = len(group[by_length[-1]][2])
        if longest > stream_chars(model):  # in pieces
            i = by_length.pop()
            nats[i] = streamed_sum(model, np.array(group[i][2]))
            continue
        rows = max(1, BATCH_CHARS // longest)
        batch, by_length = by_length[-rows:], by_length[:-rows]
        for i, value in zip(batch, _nats(model, [group[i][2] for i in batch]).tolist(), strict=True):
            nats[i] = value
    for (number, line, ids), value in zip(group, nats, strict=True):
        count = max(0, len(ids) - 1)
        mean = value / count if count else None
        yield {
            "line": number,
            "text": line,
            "characters": count,
            "nats": value,
            "nats_per_character": mean,
            "bits_per_character": None if mean is None else bits(mean),
            "perplexity": None if mean is None else math.exp(mean),
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
