"""Split a text into records: lines, blocks between blank lines or marks, or the cells of a table's column.

This module knows nothing about ids.
"""

from __future__ import annotations

import csv
import functools
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from service.model.checkpoint import Checkpoint
from service.model.tokenizer import RECORD_SEPARATOR
from training.messages import plural
from training.text.files import DataError, read_lines, read_text, split_lines

LINES, BLANK = "lines", "blank"  # separators of records; any other separator is a mark
TABLES = {".csv": ",", ".tsv": "\t", ".jsonl": ""}  # delimiter of a table by its suffix
BATCH = 1 << 20  # characters of cells joined into one piece
MAX_SHOWN = 5  # lines of a text shown in a message

_SPACES = rf"[^\S\n{RECORD_SEPARATOR}]*"  # the content of a blank line
_WHITE_LINE = re.compile(rf"^[^\S\n{RECORD_SEPARATOR}]+$", re.MULTILINE)
_BLANK_LINES = re.compile(rf"\n(?:{_SPACES}\n)+")
_MARKS = re.compile(rf"(?:\n{_SPACES})*{RECORD_SEPARATOR}(?:{_SPACES}(?:\n|(?={RECORD_SEPARATOR})))*")


def without_white_lines(texts: Iterable[str]) -> Iterator[str]:
    """Yield a text in pieces of whole lines. Lines of white space alone are empty."""
    rest = ""
    for text in texts:
        lines, end, rest = (rest + text).rpartition("\n")
        yield _WHITE_LINE.sub("", lines + end)
    yield _WHITE_LINE.sub("", rest)


def blocks(texts: Iterable[str], separator: str, name: str) -> Iterator[str]:
    """Yield a text in pieces. U+001E ends each record and occurs nowhere else.

    separator: BLANK or a mark. BLANK stands for lines that are empty or have only white space; a mark may stand
    anywhere. Line breaks and blank lines around a record do not belong to it. Two marks without text between them give
    two ends.
    name: the text's name, for messages.

    Raises:
        DataError: the text has U+001E itself.
    """
    pattern, edge = (_BLANK_LINES, "\n\n") if separator == BLANK else (_MARKS, RECORD_SEPARATOR)
    rest, is_first = edge, True  # as if a record had ended before
    for text in _marked(texts, separator, name):
        rest += text
        cut = len(rest.rstrip())  # the white space at the end may begin a separator
        found, rest = pattern.sub(RECORD_SEPARATOR, rest[:cut]), rest[cut:]
        if is_first:
            found = found.lstrip(RECORD_SEPARATOR)
        if found:
            is_first = False
            yield found
    if not is_first:
        yield pattern.sub(RECORD_SEPARATOR, rest + edge).rstrip(RECORD_SEPARATOR) + RECORD_SEPARATOR


def _marked(texts: Iterable[str], separator: str, name: str) -> Iterator[str]:
    """Yield the text with each mark replaced by U+001E.

    Raises:
        DataError: the text has U+001E itself.
    """
    rest, line = "", 1
    for text in itertools.chain(texts, [None]):
        parts = [text or ""] if separator == BLANK else (rest + (text or "")).split(separator)
        if separator != BLANK and text is not None:
            last = parts.pop()
            cut = max(0, len(last) - len(separator) + 1)  # the characters after it may begin a mark
            rest = last[cut:]
            parts.append(last[:cut])
        for number, part in enumerate(parts):
            line += separator.count("\n") * (number > 0)
            if RECORD_SEPARATOR in part:
                line += part[: part.index(RECORD_SEPARATOR)].count("\n")
                raise DataError(
                    f"{name} has U+001E (RECORD SEPARATOR) in line {line:,}, the character that ends records of "
                    "several lines: take it out, or pass it as the mark, --records=$'\\x1e', if it separates them"
                )
            line += part.count("\n")
        yield RECORD_SEPARATOR.join(parts)


def separator_between(records: str, end: str) -> str:
    """Return the text to print between two records so that the same `records` reads them again.

    end: the character that ends a record. Cells of several lines are separated by U+001E, which --records=$'\\x1e'
    reads.
    """
    if end == "\n":
        return "\n"
    if records == BLANK:
        return "\n\n"
    mark = end if records == LINES else records
    return ("" if mark.startswith("\n") else "\n") + mark + ("" if mark.endswith("\n") else "\n")


def split_printed(text: str, records: str, end: str) -> list[str]:
    """Return the records of a text printed with `separator_between`, or of a text in the same form."""
    if end == "\n":
        return text.removesuffix("\n").split("\n") if text else []
    separator = end if records == LINES else records
    return [record for record in "".join(blocks([text], separator, "the text")).split(end) if record]


def is_table(file: Path) -> bool:
    return _suffix(file) in TABLES


def _suffix(file: Path) -> str:
    return Path(file.stem if file.suffix == ".gz" else file.name).suffix.lower()


def cells(file: Path, lines: Iterable[str], column: str) -> Iterator[str]:
    """Yield a column's cells of a CSV or TSV file or of JSON lines, in pieces of many cells. U+001E ends each cell.

    lines: the file's lines, with their line breaks. Line breaks around a cell do not belong to it.

    Raises:
        DataError: the file is not a table or lacks the column, or a row has no text in the column. The message gives
            the line of the row.
    """
    if not is_table(file):
        raise DataError(f"--column reads files named {', '.join(TABLES)}, plain or gzip, got {file}")
    found, length = list[str](), 0
    delimiter = TABLES[_suffix(file)]
    for number, cell in _delimited(file, lines, column, delimiter) if delimiter else _objects(file, lines, column):
        cell = cell.replace("\r\n", "\n").replace("\r", "\n").strip("\n")
        if RECORD_SEPARATOR in cell:
            raise DataError(f"{file}, line {number:,}: the cell has U+001E (RECORD SEPARATOR), which ends records")
        found.append((cell if cell.strip() else "") + RECORD_SEPARATOR)
        length += len(found[-1])
        if length >= BATCH:
            yield "".join(found)
            found, length = [], 0
    yield "".join(found)


def _delimited(file: Path, lines: Iterable[str], column: str, delimiter: str) -> Iterator[tuple[int, str]]:
    # TSV has no quotes: a cell ends at the next tab or line break.
    reader = functools.partial(csv.reader, quoting=csv.QUOTE_NONE) if delimiter == "\t" else csv.reader
    rows = reader(lines, delimiter=delimiter, strict=True)
    csv.field_size_limit(sys.maxsize)  # 131,072 characters by default
    try:
        names = next(rows, [])
        if names.count(column) != 1:
            raise _no_column(file, column, names)
        place = names.index(column)
        for row in rows:
            if row and len(row) <= place:
                cells = plural(len(row), "cell")
                raise DataError(f"{file}, line {rows.line_num:,}: the row has {cells}, and no {column!r}")
            if row:
                yield rows.line_num, row[place]
    except csv.Error as error:
        raise DataError(f"{file}, line {rows.line_num:,}: {error}") from None


def _objects(file: Path, lines: Iterable[str], column: str) -> Iterator[tuple[int, str]]:
    is_first = True
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{file}, line {number:,}"
        try:
            row: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected a JSON object, got {line.strip():.40}")
        if column not in row and is_first:
            raise _no_column(file, column, list(row))
        if not isinstance(value := row.get(column), str):
            got = f"got {json.dumps(value):.40}" if column in row else "the object has none"
            raise DataError(f"{where}: {column!r} must be a text, {got}")
        if any("\ud800" <= c <= "\udfff" for c in value):
            raise DataError(f"{where}: {column!r} has half of a surrogate pair, which is no character")
        is_first = False
        yield number, value
    if is_first:
        raise DataError(f"{file} has no rows")


def _no_column(file: Path, column: str, names: list[str]) -> DataError:
    if names.count(column) > 1:
        return DataError(f"{file} has {names.count(column)} columns {column!r}: rename one of them")
    return DataError(f"{file} has no column {column!r}; its columns: {', '.join(names) or 'none, it is empty'}")


def source_text(files: Sequence[Path], column: str | None, notes: set[str] | None = None) -> Iterator[str]:
    """Yield the text that is hashed: the concatenated files, or a column's cells as `records.cells` yields them."""
    if column is None:
        yield from read_text(files, notes)
        return
    for file in files:
        yield from cells(file, split_lines(read_text([file], notes)), column)


def split_text(texts: Iterable[str], separator: str, column: str | None, end: str, name: str) -> Iterable[str]:
    """Return the text to encode, in pieces. `end` follows each record; several in a row mean empty records.

    texts: a text, or the cells of a column as `source_text` yields them.

    Raises:
        DataError: `blocks` raises it.
    """
    if column is None and separator not in ("", LINES):
        return blocks(texts, separator, name)
    if column is None:
        return without_white_lines(texts) if separator else texts
    return texts if end == RECORD_SEPARATOR else (text.replace(RECORD_SEPARATOR, end) for text in texts)


def read_records(file: Path, separator: str, column: str | None) -> Iterator[str]:
    """Yield the records of a file in order, through `read_lines` if they are lines.

    column: the column to read if the file is a table. Any other file is split at the separator.

    Raises:
        DataError: `read_text`, `blocks` or `cells` raises it.
    """
    if column is not None and is_table(file):
        texts = source_text([file], column)
    elif separator in ("", LINES):
        yield from read_lines(file)
        return
    else:
        texts = blocks(read_text([file], errors="surrogateescape"), separator, file.name)
    rest = ""
    for text in texts:
        *records, rest = (rest + text).split(RECORD_SEPARATOR)
        yield from filter(None, records)


class Splitting(NamedTuple):
    """How a checkpoint's training text was split into records."""

    separator: str  # the argument `records` of `prepare`; "": the text was not split
    column: str | None
    end: str  # the character that precedes each record and ends it; "": there are no records


OF_TEXT, OF_LINES = Splitting("", None, ""), Splitting(LINES, None, "\n")


def splitting_of(checkpoint: Checkpoint) -> Splitting:
    end, recipe = checkpoint.record_end_character, checkpoint.training.get("recipe", {})
    if end is None:
        return OF_TEXT
    separator, column = recipe["records"], recipe.get("column")
    return Splitting(LINES if separator is True else str(separator), None if column is None else str(column), end)
