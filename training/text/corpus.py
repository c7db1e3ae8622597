"""Prepare the corpus of a run: split a text, encode it once into a cache, and memory-map it.

A text is one or more files or folders, plain or gzip. It is encoded in chunks into 1, 2 or 4 bytes per character, in
a cache folder named by its SHA-256. A run can therefore train on a text larger than memory. Records take about 50 bytes
of memory each. This module knows nothing about models.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from service.model.counts import Counts
from service.model.tokenizer import RECORD_SEPARATOR, UNKNOWN, CharTokenizer
from training.folders import replacing_folder
from training.messages import plural
from training.text.batches import RecordSampler, WindowSampler, places_of, random_order
from training.text.encoding import encode_array, id_dtype
from training.text.files import CHUNK_BYTES, DataError, cache_dir, find_texts
from training.text.records import BLANK, LINES, MAX_SHOWN, source_text, split_text

FORMAT_VERSION = 5
TRAIN_SHARE = 0.9  # the first 90 % of a text is the training split, the rest the validation split
VAL_EVERY = 10  # one record in ten goes to the validation split
RECORDS_ORDER = 2  # version of the order in which records are shuffled before the split
MAX_SYMBOLS = 1 << 16  # more than any script has; a file with more is probably not text
EXAMPLE_CHARACTERS = 16
EXAMPLE_OF_CHARACTERS = 1 << 20  # characters searched for an example prompt
MIN_BLANK_LINES = 20  # blank lines left out of a list before a note suggests --records blank
MIN_CHARACTERS = 20  # leaves the validation split one character to predict


@dataclass(frozen=True)
class Source:
    """The text of a corpus: its files, and how they are split into records."""

    files: tuple[Path, ...]
    separator: str  # of records: LINES, BLANK or a mark; "": the text is not split
    column: str | None  # the table's column whose cells are the records

    @property
    def name(self) -> str:
        first, *others = self.files
        return f"{first.name} and {len(others)} more" if others else first.name

    def text(self, notes: set[str] | None = None) -> Iterator[str]:
        """Yield the text that is hashed, in pieces."""
        return source_text(self.files, self.column, notes)

    def sha256(self, notes: set[str]) -> str:
        digest = hashlib.sha256()
        for text in self.text(notes):
            digest.update(text.encode())
        return digest.hexdigest()

    def split(self, texts: Iterable[str], end: str) -> Iterable[str]:
        """Yield `texts` with `end` after each record."""
        return split_text(texts, self.separator, self.column, end, self.name)

    def cache_folder(self, sha256: str, tokenizer: CharTokenizer | None = None) -> Path:
        """Return the cache folder of the encoded text. `tokenizer`: the vocabulary, if it is not the text's own."""
        name = f"{sha256}-v{FORMAT_VERSION}{'-records' if self.separator else ''}"
        if self.column is not None:
            name += "-column"  # sha256 is the hash of this column's cells
        elif self.separator not in ("", LINES):
            name += f"-{hashlib.sha256(self.separator.encode()).hexdigest()[:16]}"
        if tokenizer:
            name += f"-{hashlib.sha256(''.join(tokenizer.characters).encode()).hexdigest()[:16]}"
        return cache_dir() / "corpora" / name


@dataclass(frozen=True)
class Corpus:
    """An encoded text, memory-mapped."""

    source: Source
    sha256: str  # hash of the uncompressed text in UTF-8, or of a column's cells with U+001E after each
    tokenizer: CharTokenizer  # the text's own characters, sorted, or a vocabulary that includes them
    symbols: int  # number of distinct characters of the text, the unknown symbol included
    ids: np.ndarray  # (characters,) uint8, uint16 or uint32: the training split, then the validation split
    num_train: int
    records: int | None  # number of records; None: the text is not split into records
    notes: tuple[str, ...] = ()  # sentences for the user about changes made while reading the files
    record_end: str | None = None  # the character that precedes each record and ends it
    replaced: tuple[int, int] = (0, 0)  # distinct characters and occurrences that became the unknown symbol

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def train(self) -> np.ndarray:
        return self.ids[: self.num_train]

    @property
    def val(self) -> np.ndarray:
        return self.ids[self.num_train :]

    @functools.cached_property
    def example_prompt(self) -> str:
        """A frequent beginning of the text's lines, else the text's first characters; empty for records.

        It is the longest beginning of at most EXAMPLE_CHARACTERS characters that more than one line in 300 shares, and
        at least 3 lines. A line break counts as a character. The beginning does not end within a word if the text has
        spaces.
        """
        if self.records is not None:
            return ""
        text = self.tokenizer.decode(self.train[:EXAMPLE_OF_CHARACTERS].tolist())
        if self.tokenizer.unknown_id is not None:  # nobody types the unknown symbol
            text = text.replace(UNKNOWN, "")
        lines = [line for line in text.splitlines(keepends=True) if line[:1].isalnum() and len(line.strip()) > 1]
        has_spaces = " " in text

        def is_inside_word(line: str, length: int) -> bool:
            return has_spaces and len(line) > length and line[length - 1 : length + 1].isalnum()

        for length in range(EXAMPLE_CHARACTERS, 1, -1):
            beginnings = Counter([line[:length] for line in lines if not is_inside_word(line, length)])
            for beginning, count in beginnings.most_common(1):
                if count > max(2, len(lines) / 300):
                    return beginning
        first = text.lstrip()
        length = EXAMPLE_CHARACTERS
        while length > 1 and is_inside_word(first, length):
            length -= 1
        return first[: length if length > 1 else EXAMPLE_CHARACTERS] or text[:1]

    @functools.cached_property
    def counts(self) -> Counts:
        """The counts of the training split, as a checkpoint's file holds them."""
        vocab_size = self.tokenizer.vocab_size
        end = None if self.record_end is None else self.tokenizer.encode(self.record_end)[0]
        return Counts.load(Counts.count(self.train, vocab_size, end=end).dump(), vocab_size)

    def describe(self) -> dict[str, Any]:
        characters, occurrences = self.replaced
        return {
            "name": self.name,
            "sha256": self.sha256,
            "characters": len(self.ids),
            "symbols": self.symbols,
            "train_characters": len(self.train),
            "val_characters": len(self.val),
            "records": self.records,
            "split": RECORDS_ORDER if self.records is not None else None,
            **({} if self.record_end in (None, "\n") else {"record_end": self.record_end}),
            **({"replaced": {"symbols": characters, "characters": occurrences}} if characters else {}),
        }

    def texts_of(self, split: np.ndarray) -> list[str]:
        """Return the records of a split, without the character that ends each."""
        assert self.record_end is not None
        return self.tokenizer.decode_array(split)[1:].removesuffix(self.record_end).split(self.record_end)

    def occurrences(self) -> np.ndarray:
        """Count the occurrences of each id: (vocab_size,) int64."""
        total = np.zeros(self.tokenizer.vocab_size, np.int64)
        for start in range(0, len(self.ids), CHUNK_BYTES):  # in pieces that fit memory
            total += np.bincount(self.ids[start : start + CHUNK_BYTES], minlength=len(total))
        return total


def prepare(
    data: str | Sequence[str],
    *,
    records: str | bool = "",
    column: str | None = None,
    glob: Sequence[str] = (),
    exclude: Sequence[str] = (),
    min_count: int = 1,
) -> Corpus:
    """Return the corpus of `--data`, `--glob` and `--exclude`; encode it on first use, then read it from the cache.

    Characters that occur fewer than `min_count` times become the unknown symbol. Line breaks and ends of records stay.

    records: the separator of records: LINES (or True), BLANK lines or a mark. The text is not split if it is "" or
    False. Empty records are left out. The records are always shuffled into the same order, because files are often
    sorted, and one in VAL_EVERY goes to the validation split. A record ends with its line break, or with U+001E if it
    is not a line. Each split begins with that character too, so that every record follows one.
    column: the files are tables, and the cells of this column are the records. They end with U+001E if one of them has
    several lines.

    Raises:
        DataError: a file is missing, not UTF-8 or not such a table, or the text is too short or has too many distinct
            characters, or nothing separates its records, or `min_count` is negative or leaves fewer than two
            characters.
    """
    if min_count < 0:
        raise DataError(f"--min-count must be at least 0, got {min_count}")
    separator = LINES if records is True or (column is not None and not records) else records or ""
    notes: set[str] = set()
    files = find_texts([data] if isinstance(data, str) else data, glob, exclude, notes)
    source = Source(tuple(files), separator, column)
    sha256 = source.sha256(notes)
    folder = source.cache_folder(sha256)
    if not folder.is_dir():
        tokenizer, end = _vocabulary(source)
        with _writing_cache():
            _encode(source, sha256, tokenizer, end, folder)
    corpus = _read(source, sha256, folder, notes)
    return corpus if min_count <= 1 else _without_rare(corpus, min_count)


def _read(source: Source, sha256: str, folder: Path, notes: set[str]) -> Corpus:
    """Return the corpus that `_encode` has written to a cache folder. notes: those of reading the files."""
    about = json.loads((folder / "corpus.json").read_bytes())
    tokenizer = CharTokenizer(about["characters"])
    return Corpus(
        source,
        sha256,
        tokenizer,
        symbols=tokenizer.vocab_size,
        ids=np.memmap(folder / "ids.bin", dtype=id_dtype(tokenizer.vocab_size), mode="r"),
        num_train=about["num_train"],
        records=about["records"],
        notes=(*sorted(notes), *about["notes"]),
        record_end=about.get("record_end", "\n") if source.separator else None,
    )


def _vocabulary(source: Source) -> tuple[CharTokenizer, str]:
    """Return the characters of the text, and the one that ends its records."""
    end = "\n" if source.separator == LINES and source.column is None else RECORD_SEPARATOR
    characters = _characters_of(source.split(source.text(), end), source.name)
    if source.column is not None and "\n" not in characters:
        end = "\n"
        characters.remove(RECORD_SEPARATOR)
    return CharTokenizer(sorted({*characters, end}) if source.separator else characters), end


def _characters_of(texts: Iterable[str], name: str) -> list[str]:
    """Return the distinct characters of a text in order. Raises DataError: there are too few or too many."""
    seen, count = np.zeros(0x110000, dtype=bool), 0  # code points
    for text in texts:
        seen[np.frombuffer(text.encode("utf-32-le"), dtype="<u4")] = True
        count += len(text)
    characters = [chr(code) for code in np.flatnonzero(seen)]
    if len(characters) < 2:
        content = f"contains only the character {characters[0]!r}" if characters else "is empty"
        raise DataError(f"{name} {content}; a text needs at least 2 distinct characters")
    if count < MIN_CHARACTERS:
        raise DataError(f"{name} has {plural(count, 'character')}; a text needs at least {MIN_CHARACTERS}")
    if len(characters) > MAX_SYMBOLS:
        raise DataError(f"{name} has {len(characters):,} distinct characters; at most {MAX_SYMBOLS:,} are allowed")
    return characters


def rare_characters(corpus: Corpus, min_count: int) -> set[str]:
    """Return the characters that occur fewer than `min_count` times, except line breaks, ends of records and U+FFFD."""
    if min_count <= 1:
        return set()
    counts = corpus.occurrences()
    characters = corpus.tokenizer.characters
    return {characters[id] for id in np.flatnonzero(counts < min_count)} - {"\n", UNKNOWN, corpus.record_end}


def _without_rare(corpus: Corpus, min_count: int) -> Corpus:
    """Return the corpus with its rare characters replaced by the unknown symbol.

    Raises:
        DataError: fewer than two other characters stay.
    """
    characters = set(corpus.tokenizer.characters)
    kept = characters - rare_characters(corpus, min_count)
    if len(kept - {UNKNOWN}) < 2:
        counts = dict(zip(corpus.tokenizer.characters, corpus.occurrences().tolist(), strict=True))
        counts |= {UNKNOWN: 1} | {c: len(corpus.ids) for c in ("\n", corpus.record_end or "\n") if c in counts}
        most = sorted(counts.values())[-2]
        raise DataError(
            f"--min-count {min_count:,} leaves {len(kept - {UNKNOWN})} of the {len(characters):,} distinct characters "
            f"of {corpus.name}; a text needs at least 2: pass at most {most:,}"
        )
    if kept == characters and UNKNOWN not in characters:
        return corpus
    corpus = recode(corpus, CharTokenizer(sorted({*kept, UNKNOWN}), has_unknown=True))
    return replace(corpus, symbols=corpus.tokenizer.vocab_size)


def recode(corpus: Corpus, tokenizer: CharTokenizer) -> Corpus:
    """Return the same text in another vocabulary; map it id by id on first use, then read it from the cache.

    Characters that the vocabulary lacks become its unknown symbol.

    Raises:
        UnknownCharacterError: the vocabulary lacks a character of the text and has no unknown symbol.
    """
    if tokenizer.characters == corpus.tokenizer.characters and tokenizer.unknown_id == corpus.tokenizer.unknown_id:
        return corpus
    dtype = id_dtype(tokenizer.vocab_size)
    lacking = [c not in tokenizer for c in corpus.tokenizer.characters]
    if any(lacking) and tokenizer.unknown_id is not None:
        occurrences = int(corpus.occurrences()[lacking].sum())
        note = (
            f"{plural(sum(lacking), 'rare symbol')} with {plural(occurrences, 'occurrence')}, "
            f"{1e6 * occurrences / len(corpus.ids):.3g} per million characters, became the unknown symbol, U+FFFD"
        )
        corpus = replace(corpus, replaced=(sum(lacking), occurrences), notes=(*corpus.notes, note))
    table = encode_array(tokenizer, "".join(corpus.tokenizer.characters), replaces=True).astype(dtype)
    folder = corpus.source.cache_folder(corpus.sha256, tokenizer)
    if not folder.is_dir():
        with _writing_cache(), replacing_folder(folder) as new, open(new / "ids.bin", "wb") as file:
            for start in range(0, len(corpus.ids), CHUNK_BYTES):
                file.write(table[corpus.ids[start : start + CHUNK_BYTES]].tobytes())
    return replace(corpus, tokenizer=tokenizer, ids=np.memmap(folder / "ids.bin", dtype=dtype, mode="r"))


@contextlib.contextmanager
def _writing_cache() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{error.filename or cache_dir()} cannot be written: {error.strerror or error}; set XDG_CACHE_HOME to a "
            "folder for encoded texts that can"
        ) from None


def _encode(source: Source, sha256: str, tokenizer: CharTokenizer, end: str, folder: Path) -> None:
    """Write the ids of a text to a cache folder, records shuffled, with what `_read` needs.

    Raises:
        DataError: the text is no longer the one of this hash, or cannot be divided into records.
    """
    dtype = id_dtype(tokenizer.vocab_size)
    digest, num_long = hashlib.sha256(), 0  # cells of several lines

    def digested() -> Iterator[str]:
        nonlocal num_long
        for text in source.text():
            digest.update(text.encode())
            if source.column is not None and "\n" in text:
                num_long += sum("\n" in cell for cell in text.split(RECORD_SEPARATOR))
            yield text

    end_id = tokenizer.encode(end)[0] if source.separator else None
    with replacing_folder(folder) as new:
        count, num_blank = _write_ids(new / "ids.bin", source.split(digested(), end), tokenizer, dtype, end_id)
        if digest.hexdigest() != sha256:
            raise DataError(f"{source.files[0]} or another file changed while being read; try again")
        num_train, num_records = int(count * TRAIN_SHARE), None
        if end_id is not None:
            if source.separator != LINES:
                _refuse_undivided(new / "ids.bin", tokenizer, end_id, source)
            num_train, num_records = _shuffle_records(new / "ids.bin", dtype, end_id, source.files[0])
        about = {
            "characters": tokenizer.characters,
            "num_train": num_train,
            "records": num_records,
            "record_end": None if end_id is None else end,
            "notes": [*_notes(source, num_blank, num_long, num_records or 0)],
        }
        (new / "corpus.json").write_text(json.dumps(about), encoding="utf-8")


def _notes(source: Source, num_blank: int, num_long: int, num_records: int) -> Iterator[str]:
    """Yield notes about empty records, which were left out, and about cells of several lines."""
    if num_blank:
        is_line = source.column is None and source.separator == LINES
        kind = "empty cell" if source.column is not None else "empty line" if is_line else "empty record"
        is_blocks = is_line and MIN_BLANK_LINES <= num_blank and 2 * num_blank <= num_records
        advice = "; if they separate records of several lines, pass --records blank" if is_blocks else ""
        yield f"{plural(num_blank, kind)} left out{advice}"
    if num_long:
        yield f"{plural(num_long, 'cell')} of several lines"


def _write_ids(
    path: Path, texts: Iterable[str], tokenizer: CharTokenizer, dtype: np.dtype[Any], end_id: int | None
) -> tuple[int, int]:
    """Write the ids of a text. Return their number, and the number of empty records, which are left out.

    end_id: ends each record; None: the text has no records.
    """
    last, num_blank = end_id, 0
    with open(path, "wb") as file:
        for text in texts:
            ids = encode_array(tokenizer, text).astype(dtype)
            if end_id is not None and len(ids):
                is_end = ids == end_id
                is_blank = is_end & np.concatenate(([last == end_id], is_end[:-1]))
                last, num_blank = int(ids[-1]), num_blank + int(is_blank.sum())
                ids = ids[~is_blank]
            file.write(ids.tobytes())
        if end_id is not None and last != end_id:  # the last record needs its end too
            file.write(np.array([end_id], dtype).tobytes())
        return file.tell() // dtype.itemsize, num_blank


def _refuse_undivided(path: Path, tokenizer: CharTokenizer, end_id: int, source: Source) -> None:
    """Raise DataError if nothing in the text separates records."""
    ids = np.memmap(path, dtype=id_dtype(tokenizer.vocab_size), mode="r")
    if len(places_of(ids, end_id)) > 1:
        return
    first = tokenizer.decode_array(ids[:EXAMPLE_OF_CHARACTERS]).split("\n")[:MAX_SHOWN]
    shown = "".join(f"\n  {line[:100].rstrip(RECORD_SEPARATOR)}" for line in first)
    what = "blank line" if source.separator == BLANK else repr(source.separator)
    raise DataError(f"{source.name} has a single record: --records found no {what} between two. It begins:{shown}")


def _shuffle_records(path: Path, dtype: np.dtype[Any], end_id: int, name: Path) -> tuple[int, int]:
    """Shuffle the records of a file of ids. The last ones, one in VAL_EVERY, become the validation split.

    Takes about 50 bytes of memory per record. Returns the length of the training split and the number of records.

    Raises:
        DataError: there are fewer than VAL_EVERY records.
    """
    ids = np.memmap(path, dtype=dtype, mode="r")
    ends = places_of(ids, end_id) + 1
    if len(ends) < VAL_EVERY:
        raise DataError(f"{name} has {plural(len(ends), 'record')}; --records needs at least {VAL_EVERY}")
    starts = np.concatenate(([0], ends[:-1]))
    order, _ = random_order(len(ends), seed=0, epoch=0)
    num_train = len(order) - len(order) // VAL_EVERY
    shuffled = path.with_name("shuffled.bin")
    with open(shuffled, "wb") as file:
        for split in (order[:num_train], order[num_train:]):
            file.write(np.array([end_id], dtype).tobytes())
            for record in split:
                file.write(ids[starts[record] : ends[record]].tobytes())
    shuffled.replace(path)
    return 1 + int((ends[order[:num_train]] - starts[order[:num_train]]).sum()), len(ends)


def sampler_of(corpus: Corpus, block_size: int, seed: int) -> WindowSampler | RecordSampler:
    """Return the sampler of the training split, which draws records, or windows of a text without records."""
    return (WindowSampler if corpus.records is None else RecordSampler)(corpus.train, block_size, seed)
