"""The command `score`: print the log-likelihood of each line of a text, or its strangest lines.

Lines are scored as by the service's /v1/score. A line is a text of its own, without its line break. Its first character
has nothing before it and is not scored. A model of records scores each record as in training: the context is the end of
the previous record, and the record's own end is scored too.
"""

from __future__ import annotations

import argparse
import heapq
import math
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from service.local import Model, RequestError
from service.model.checkpoint import Checkpoint
from service.model.tokenizer import CharTokenizer
from service.text.encoding import unknown_characters
from service.text.model import TextModel
from training.commands.inputs import refusing, report_unknown, unknown_options
from training.commands.rows import write_rows
from training.config import ConfigError
from training.measure.losses import SLOTS, Advance
from training.messages import plural
from training.model.loading import load_model, open_model
from training.run.progress import show_forwards
from training.text.files import DataError
from training.text.records import OF_TEXT, Splitting, read_records, splitting_of

GROUP_LINES, GROUP_BYTES = 4096, 1 << 18  # lines are scored together up to these limits
SURROGATE = 0xDC00  # plus a byte that is not UTF-8, as `files.read_lines` gives it
MAX_REPORTED = 20  # refused lines named on standard error
COLUMNS = (
    "line", "text", "characters", "nats", "nats_per_character", "bits_per_character", "perplexity",
    "unknown_characters",
)  # fmt: skip

Row = dict[str, Any]  # a value for each of COLUMNS


class Line(NamedTuple):
    number: int  # from 1
    text: str
    num_bytes: int  # in UTF-8, with the line break


class Tally:
    """Counts lines and unknown characters, and reports on standard error the first MAX_REPORTED lines not scored."""

    num_lines = num_refused = replaced = dropped = 0

    def refuse(self, number: int, reason: str) -> None:
        self.num_refused += 1
        if self.num_refused <= MAX_REPORTED:
            print(f"line {number:,}: {reason}", file=sys.stderr)

    def require_all(self, file: Path) -> None:
        """Raise DataError unless all lines of the file were scored, and there was one."""
        if not self.num_lines:
            raise DataError(f"{file} has no lines to score")
        if self.num_refused:
            more = f", the first {MAX_REPORTED} of which are named above" if self.num_refused > MAX_REPORTED else ""
            raise DataError(f"{plural(self.num_refused, 'line')} of {self.num_lines:,} not scored{more}")


def command(args: argparse.Namespace) -> None:
    if args.top is not None and args.top < 1:
        raise ConfigError(f"--top must be at least 1, got {args.top}")
    checkpoint, gpt = load_model(args)
    tokenizer, tally = checkpoint.tokenizer, Tally()
    separator, column, end = splitting_to_score(checkpoint, args.records)
    text = TextModel(tokenizer, end or None, checkpoint.config.receptive_field)
    device = str(gpt.head.weight.device)
    if args.unknown_characters is None:
        can_replace = args.replacement_character is not None or tokenizer.replacement in tokenizer
        args.unknown_characters = "replace" if can_replace else "drop"
    is_ranked = args.sort or args.top is not None
    with refusing(), open_model(gpt, text, SLOTS, device, checkpoint.load_counts()) as model:
        with show_progress(args.data, among_rows=not is_ranked) as advance:
            lines = read_records(args.data, separator, column)
            rows = score_lines(model, tokenizer, lines, unknown_options(args), tally=tally, advance=advance)
            if is_ranked:
                rows = iter(strangest(rows, args.top))
            else:
                write_rows(rows, COLUMNS, args.format)
    if is_ranked:  # below the bar
        write_rows(rows, COLUMNS, args.format)
    report_unknown(tally.replaced, tally.dropped)
    tally.require_all(args.data)


def splitting_to_score(checkpoint: Checkpoint, records: bool | None) -> Splitting:
    """Return how a file is split. records: --records, by default as the model was trained.

    Raises:
        DataError: the vocabulary lacks the end of a record.
    """
    if not (checkpoint.record_end is not None if records is None else records):
        return OF_TEXT
    separator, column, end = splitting_of(checkpoint)
    if (end := end or "\n") not in checkpoint.tokenizer:
        raise DataError("--records needs a model whose vocabulary includes the line break; this one does not")
    return Splitting(separator, column, end)


def show_progress(file: Path, among_rows: bool) -> AbstractContextManager[Advance]:
    """Return a progress bar of the bytes scored, or none if rows are printed on the terminal meanwhile."""
    if among_rows and sys.stdout.isatty():
        return nullcontext(int)
    return show_forwards(Console(stderr=True), "scoring", file.stat().st_size, "bytes")


def score_lines(
    model: Model,
    tokenizer: CharTokenizer,
    lines: Iterable[str],
    options: dict[str, Any],
    *,
    tally: Tally,
    advance: Advance = int,
) -> Iterator[Row]:
    """Yield the row of each line or record in order. Its `characters` are the number scored, with a record's end too.

    A line that is not UTF-8 is left out, and so is a line with unknown characters if `options` refuse them; the tally
    counts these. options: fields of /v1/score. `advance` is called with the number of bytes scored.
    """
    is_refused = options["unknown_characters"] == "refuse"
    for group in groups(readable(lines, tokenizer, is_refused, tally)):
        try:
            scores = model.score([line.text for line in group], characters=False, **options)
        except RequestError as error:  # it names an item of the group
            which = re.search(r"\btexts\.(\d+)", str(error))
            named = (
                str(error) if which is None else str(error).replace(which[0], f"line {group[int(which[1])].number:,}")
            )
            raise RequestError(named, error.param, error.code) from None
        tally.replaced += scores.replaced_characters
        tally.dropped += scores.dropped_characters
        for line, score in zip(group, scores, strict=True):
            row = {name: getattr(score, name) for name in COLUMNS[1:]}
            yield {"line": line.number, **row, "unknown_characters": score.unknown_characters or 0}
        advance(sum(line.num_bytes for line in group))


def readable(lines: Iterable[str], tokenizer: CharTokenizer, refuses_unknown: bool, tally: Tally) -> Iterator[Line]:
    for number, text in enumerate(lines, 1):
        tally.num_lines += 1
        try:
            line = Line(number, text, len(text.encode()) + 1)
        except UnicodeEncodeError as error:
            byte = ord(text[error.start]) - SURROGATE
            tally.refuse(number, f"byte 0x{byte:02X} at offset {error.start} is not UTF-8")
            continue
        unknown = [(i, c) for i, c in enumerate(text) if c not in tokenizer] if refuses_unknown else []
        if unknown:
            tally.refuse(number, unknown_characters(unknown, len(unknown), "").message.removeprefix(": "))
        else:
            yield line


def groups(lines: Iterable[Line]) -> Iterator[list[Line]]:
    """Yield lines in groups that are scored together."""
    group: list[Line] = []
    num_bytes = 0
    for line in lines:
        group.append(line)
        num_bytes += line.num_bytes
        if len(group) == GROUP_LINES or num_bytes > GROUP_BYTES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def strangest(rows: Iterable[Row], count: int | None) -> list[Row]:
    """Return the first `count` rows, or all if it is None, by falling bits per character.

    Rows with equal values keep the order of their lines.
    """

    def strangeness(row: Row) -> tuple[float, int]:
        each = row["bits_per_character"]
        return -math.inf if each is None else each, -row["line"]

    return sorted(rows, key=strangeness, reverse=True) if count is None else heapq.nlargest(count, rows, strangeness)
