"""The command `score`: print the log-likelihood of each line of a text, or its strangest lines.

Lines are scored as by the service's /v1/score. A line is a text of its own, without its line break. Its first character
has nothing before it and is not scored. A model of records scores each record as in training: the context is the end of
the previous record, and the record's own end is scored too.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from service.model.checkpoint import Checkpoint
from service.model.gpt import GPT
from service.model.tokenizer import UnknownCharacterError
from training.config import ConfigError
from training.data import DataError, read_records
from training.display import show_forwards
from training.evaluate import Advance, bits, fast_piece_sums
from training.inputs import OF_TEXT, Encoder, load_model, splitting_of
from training.messages import plural
from training.rows import write_rows

LINES = 4096  # lines scored together
SURROGATE = 0xDC00  # plus a byte that is not UTF-8, as `data.read_lines` gives it
MAX_REPORTED = 20  # refused lines named on standard error
COLUMNS = (
    "line", "text", "characters", "nats", "nats_per_character", "bits_per_character", "perplexity",
    "unknown_characters",
)  # fmt: skip

Row = dict[str, Any]  # a value for each of COLUMNS


class Line(NamedTuple):
    """A line that can be scored."""

    number: int  # from 1
    text: str
    ids: np.ndarray  # (T,) int64, with the end of a record on both sides if the line is a record
    num_unknown: int
    num_bytes: int  # length in UTF-8 plus 1 for the line break


class Tally:
    """Counts lines, and reports on standard error the first MAX_REPORTED that are not scored."""

    num_lines = num_refused = 0

    def counted(self, lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            self.num_lines += 1
            yield line

    def refuse(self, number: int, reason: str) -> None:
        self.num_refused += 1
        if self.num_refused <= MAX_REPORTED:
            print(f"line {number:,}: {reason}", file=sys.stderr)


def command(args: argparse.Namespace) -> None:
    if args.top is not None and args.top < 1:
        raise ConfigError(f"--top must be at least 1, got {args.top}")
    checkpoint, model = load_model(args)
    encoder, tally = encoder_of(args, checkpoint), Tally()
    records = checkpoint.record_end is not None if args.records is None else args.records
    is_ranked = args.sort or args.top is not None
    with show_progress(args.data, among_rows=not is_ranked) as advance:
        separator, column, end = splitting_of(checkpoint) if records else OF_TEXT
        lines = tally.counted(read_records(args.data, separator, column))
        rows = score_lines(
            model, encoder, lines, records=records, end=end or "\n", refused=tally.refuse, advance=advance
        )
        if is_ranked:
            rows = iter(strangest(rows, args.top))
        else:
            write_rows(rows, COLUMNS, args.format)
    if is_ranked:  # below the bar
        write_rows(rows, COLUMNS, args.format)
    encoder.report()
    if not tally.num_lines:
        raise DataError(f"{args.data} has no lines to score")
    if tally.num_refused:
        more = f", the first {MAX_REPORTED} of which are named above" if tally.num_refused > MAX_REPORTED else ""
        raise DataError(f"{plural(tally.num_refused, 'line')} of {tally.num_lines:,} not scored{more}")


def show_progress(file: Path, among_rows: bool) -> AbstractContextManager[Advance]:
    """Return a progress bar of the bytes scored, or none if rows are printed on the terminal meanwhile."""
    if among_rows and sys.stdout.isatty():
        return nullcontext(int)
    return show_forwards(Console(stderr=True), "scoring", file.stat().st_size, "bytes")


def encoder_of(args: argparse.Namespace, checkpoint: Checkpoint) -> Encoder:
    """Return the encoder for the arguments.

    Without --unknown-characters, unknown characters are replaced, or dropped if the vocabulary lacks the default
    replacement and no other is given.
    """
    if args.unknown_characters is None:
        tokenizer = checkpoint.tokenizer
        can_replace = args.replacement_character is not None or tokenizer.replacement in tokenizer
        args.unknown_characters = "replace" if can_replace else "drop"
    return Encoder.of(args, checkpoint)


def score_lines(
    model: GPT,
    encoder: Encoder,
    lines: Iterable[str],
    *,
    records: bool,
    end: str = "\n",
    refused: Callable[[int, str], None],
    advance: Advance = int,
) -> Iterator[Row]:
    """Yield the row of each line or record in order. Its `characters` are the number scored, with records' `end` too.

    A line that is not UTF-8 is left out, and so is a line with unknown characters if the encoder refuses them.
    `refused` is called with the line's number, from 1, and the reason. `advance` is called with the number of bytes
    scored.

    Raises:
        DataError: with `records`, the vocabulary has no `end`.
    """
    if records and end not in encoder.tokenizer:
        raise DataError("--records needs a model whose vocabulary includes the line break; this one does not")
    sums_of = fast_piece_sums(model)
    encoded = encoded_lines(encoder, lines, encoder.tokenizer.encode(end) if records else [], refused)
    while group := list(itertools.islice(encoded, LINES)):
        sizes = np.array([len(line.ids) for line in group], np.int64)
        counts, starts = (sizes - 1).clip(min=0), np.cumsum(sizes) - sizes
        bytes_each = sum(line.num_bytes for line in group) / max(1, counts.sum())
        ids = np.concatenate([line.ids for line in group])
        sums = sums_of(ids, starts, counts, lambda count, each=bytes_each: advance(round(count * each)))
        for line, count, nats in zip(group, counts.tolist(), sums.tolist(), strict=True):
            yield row_of(line, count, nats)


def encoded_lines(
    encoder: Encoder, lines: Iterable[str], end: list[int], refused: Callable[[int, str], None]
) -> Iterator[Line]:
    """Yield the lines that can be encoded, and call `refused` for the others. end: the ids on both sides of a line."""
    for number, text in enumerate(lines, 1):
        try:
            num_bytes = len(text.encode()) + 1
            ids, num_unknown = encoder.encode_counting(text)
        except UnicodeEncodeError as error:
            byte = ord(text[error.start]) - SURROGATE
            refused(number, f"byte 0x{byte:02X} at offset {error.start} is not UTF-8")
        except UnknownCharacterError as error:
            refused(number, str(error))
        else:
            yield Line(number, text, np.concatenate((end, ids, end)).astype(np.int64), num_unknown, num_bytes)


def row_of(line: Line, count: int, nats: float) -> Row:
    mean = nats / count if count else None
    return {
        "line": line.number,
        "text": line.text,
        "characters": count,
        "nats": nats,
        "nats_per_character": mean,
        "bits_per_character": None if mean is None else bits(mean),
        "perplexity": None if mean is None else math.exp(mean),
        "unknown_characters": line.num_unknown,
    }


def strangest(rows: Iterable[Row], count: int | None) -> list[Row]:
    """Return the first `count` rows, or all if it is None, by falling bits per character.

    Rows with equal values keep the order of their lines.
    """

    def strangeness(row: Row) -> tuple[float, int]:
        each = row["bits_per_character"]
        return -math.inf if each is None else each, -row["line"]

    return sorted(rows, key=strangeness, reverse=True) if count is None else heapq.nlargest(count, rows, strangeness)
