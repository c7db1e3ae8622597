"""`score`: the log-likelihood of each line of a text, in batches.

As /v1/score of the service has it: a line is a text of its own, whose first character has nothing before it and is not
scored; its line break is no part of it. Of a model of records each record is scored as it is trained on, from the end
of the one before to its own.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from service.model.gpt import GPT
from service.model.tokenizer import UnknownCharacterError
from training.data import DataError, read_records
from training.evaluate import bits, piece_sums
from training.inputs import OF_TEXT, Encoder, load_model, splitting_of
from training.messages import plural

LINES = 4096  # scored together
SURROGATE = 0xDC00  # plus a byte that is not UTF-8, as `data.read_lines` gives it
MAX_REPORTED = 20  # lines that are not scored


def command(args: argparse.Namespace) -> None:
    checkpoint, model = load_model(args)
    encoder = Encoder.of(args, checkpoint)
    num_scored = num_refused = 0

    def refused(number: int, reason: str) -> None:
        nonlocal num_refused
        num_refused += 1
        if num_refused <= MAX_REPORTED:
            print(f"line {number:,}: {reason}", file=sys.stderr)

    records = checkpoint.record_end is not None if args.records is None else args.records
    separator, column, end = splitting_of(checkpoint) if records else OF_TEXT
    lines = read_records(args.data, separator, column)
    for record in score_lines(model, encoder, lines, records=records, end=end or "\n", refused=refused):
        num_scored += 1
        print(json.dumps(record, ensure_ascii=False))
    encoder.report()
    if num_refused:
        more = f", the first {MAX_REPORTED} of which are named above" if num_refused > MAX_REPORTED else ""
        raise DataError(f"{plural(num_refused, 'line')} of {num_scored + num_refused:,} not scored{more}")


def score_lines(
    model: GPT,
    encoder: Encoder,
    lines: Iterable[str],
    *,
    records: bool,
    end: str = "\n",
    refused: Callable[[int, str], None],
) -> Iterator[dict[str, Any]]:
    """The scores of each line, or record, in order; `characters` are those scored, with `records` the `end` too.

    A line that is not UTF-8 or has unknown characters is left out: `refused` is called with its number, from 1, and
    the reason.

    Raises:
        DataError: with `records`, the vocabulary has no `end`.
    """
    if records and end not in encoder.tokenizer:
        raise DataError("--records needs a model whose vocabulary includes the line break; this one does not")
    edge = np.array(encoder.tokenizer.encode(end) if records else [], np.int64)
    group: list[tuple[int, str, np.ndarray]] = []
    for number, line in enumerate(lines, 1):
        try:
            if offset := next((i for i, c in enumerate(line, 1) if "\ud800" <= c <= "\udfff"), 0):
                refused(number, f"byte 0x{ord(line[offset - 1]) - SURROGATE:02X} at offset {offset - 1} is not UTF-8")
                continue
            group.append((number, line, np.concatenate((edge, encoder.encode(line), edge))))
        except UnknownCharacterError as error:
            refused(number, str(error))
        if len(group) == LINES:
            yield from _score_group(model, group)
            group = []
    yield from _score_group(model, group)


def _score_group(model: GPT, group: list[tuple[int, str, np.ndarray]]) -> Iterator[dict[str, Any]]:
    sizes = np.array([len(ids) for _, _, ids in group], np.int64)
    counts, starts = (sizes - 1).clip(min=0), np.cumsum(sizes) - sizes
    sums = piece_sums(model, np.concatenate([np.empty(0, np.int64), *(ids for _, _, ids in group)]), starts, counts)
    for (number, line, _), count, nats in zip(group, counts.tolist(), sums.tolist(), strict=True):
        mean = nats / count if count else None
        yield {
            "line": number,
            "text": line,
            "characters": count,
            "nats": nats,
            "nats_per_character": mean,
            "bits_per_character": None if mean is None else bits(mean),
            "perplexity": None if mean is None else math.exp(mean),
        }
