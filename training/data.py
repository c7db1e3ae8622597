"""Turn text into training windows: encode it once into a cache, memory-map it, draw windows without replacement.

A text is one or more files or folders, plain or gzip. It is encoded in chunks into 1, 2 or 4 bytes per character, in
a cache folder named by its SHA-256. A run can therefore train on a text larger than memory. The order of the windows
takes 8 bytes of memory per window, and records take about 50 bytes each. This module knows nothing about models.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import functools
import gzip
import hashlib
import io
import itertools
import json
import os
import shlex
import urllib.request
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from service.model.ngrams import NGrams
from service.model.tokenizer import RECORD_SEPARATOR, UNKNOWN, CharTokenizer, UnknownCharacterError
from training.folders import replacing_folder
from training.messages import plural
from training.records import BLANK, LINES, MAX_SHOWN, blocks, cells, is_table, without_white_lines
from training.records import DataError as DataError

FORMAT_VERSION = 5
CHUNK_BYTES = 1 << 22
TRAIN_SHARE = 0.9  # the first 90 % of a text is the training split, the rest the validation split
VAL_EVERY = 10  # one record in ten goes to the validation split
RECORDS_ORDER = 2  # version of the order in which records are shuffled before the split
IGNORED = -1  # a target that the loss ignores
PADDING = 16  # a part of a batch may be padding to at most one in so many characters
PACK = 32  # characters
MAX_SYMBOLS = 1 << 16  # more than any script has; a file with more is probably not text
BYTE_ORDER_MARK = "\ufeff"
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
HEAD_BYTES = 1 << 13  # bytes read to recognize a binary file
PACKED = {b"\xfd7zXZ\0": "xz -dk", b"BZh": "bunzip2 -k", b"PK\3\4": "unzip", b"\x28\xb5\x2f\xfd": "zstd -d"}
MAX_LISTED = 5  # binary files named in a message
EXAMPLE_CHARACTERS = 16
EXAMPLE_OF_CHARACTERS = 1 << 20  # characters searched for an example prompt
MIN_BLANK_LINES = 20  # blank lines left out of a list before a note suggests --records blank
MIN_CHARACTERS = 20  # leaves the validation split one character to predict

TINYSHAKESPEARE = "tinyshakespeare"
TINYSHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TINYSHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def command(args: argparse.Namespace) -> None:
    """Run the command `prepare`."""
    glob, exclude = args.glob or (), args.exclude or ()
    corpus = prepare(
        args.data, records=args.records, column=args.column, glob=glob, exclude=exclude, min_count=args.min_count
    )
    print(
        f"{corpus.name}: {plural(len(corpus.ids), 'character')}, {plural(corpus.symbols, 'symbol')}; "
        f"{len(corpus.train):,} for training, {len(corpus.val):,} for validation\n"
        f"SHA-256 {corpus.sha256}, encoded in {cache_dir() / 'corpora'}",
        *corpus.notes,
        sep="\n",
    )


def cache_dir() -> Path:
    """Return the folder of downloads and encoded corpora: $XDG_CACHE_HOME/chargpt, or ~/.cache/chargpt."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "chargpt"
    try:
        return Path.home() / ".cache" / "chargpt"
    except RuntimeError:
        raise DataError(
            "there is no home folder to keep encoded texts in: set HOME or XDG_CACHE_HOME to a folder you can write"
        ) from None


def find_texts(
    data: Sequence[str], glob: Sequence[str] = (), exclude: Sequence[str] = (), notes: set[str] | None = None
) -> list[Path]:
    """Return the files of `--data`. A folder stands for all text files below it, sorted, except hidden ones.

    glob: patterns such as *.py or docs/*.md. A file below a folder must match one of them; a path is matched from the
    right. exclude: patterns that a file below a folder must not match.
    Binary files below a folder are skipped. A file with several names, such as a link or a folder given twice, is
    read once, under the first. `notes` counts both, and names the patterns of `exclude` that match nothing.

    Raises:
        DataError: a folder has no such files, or `find_text` raises it.
    """
    notes = set() if notes is None else notes
    files, unused, folders = list[Path](), [*exclude], [name for name in data if Path(name).is_dir()]
    for name in data:
        if name in folders:
            seen = _files_below(name)
            files += _texts_among(seen, name, glob, exclude, notes)
            unused = [pattern for pattern in unused if not any(path.match(pattern) for path in seen)]
        else:
            files.append(find_text(name))
    if unused:
        where = f"no file in {', '.join(folders)}" if folders else "nothing: --data names no folder"
        notes.add(f"--exclude {shlex.join(unused)} matches {where}")
    once, again = dict[tuple[int, int], Path](), list[Path]()
    for file in files:
        about = file.stat()
        if once.setdefault((about.st_dev, about.st_ino), file) is not file:
            again.append(file)
    if again:
        notes.add(f"read once, under its first name: {_listed(again, 'file')}")
    return [*once.values()]


def _files_below(folder: str) -> list[Path]:
    """Return the relative paths of all files that are not hidden, sorted."""
    below = sorted(path.relative_to(folder) for path in Path(folder).rglob("*") if path.is_file())
    return [path for path in below if not any(part.startswith(".") for part in path.parts)]


def _texts_among(
    seen: list[Path], folder: str, glob: Sequence[str], exclude: Sequence[str], notes: set[str]
) -> list[Path]:
    """Return the text files among those seen in a folder, as `find_texts` chooses them."""
    if not seen:
        raise DataError(f"the folder {folder} has no files")
    matching = [path for path in seen if not glob or any(path.match(pattern) for pattern in glob)]
    if not matching:
        raise DataError(f"none of the {plural(len(seen), 'file')} in {folder} matches --glob {' '.join(glob)}")
    chosen = [path for path in matching if not any(path.match(pattern) for pattern in exclude)]
    if not chosen:
        raise DataError(f"--exclude {' '.join(exclude)} leaves none of {plural(len(matching), 'file')} in {folder}")
    binary = [path for path in chosen if _is_binary(Path(folder) / path)]
    if len(binary) == len(chosen):
        raise DataError(f"the folder {folder} has no text files: skipped {_listed(binary)}")
    if binary:
        notes.add(f"{folder}: skipped {_listed(binary)}")
    return [Path(folder) / path for path in chosen if path not in set(binary)]


def _listed(paths: list[Path], noun: str = "binary file") -> str:
    """Return the number of paths and the names of the first MAX_LISTED."""
    more = f" and {len(paths) - MAX_LISTED:,} more" if len(paths) > MAX_LISTED else ""
    return f"{plural(len(paths), noun)}: {', '.join(str(path) for path in paths[:MAX_LISTED])}{more}"


def _is_binary(file: Path) -> bool:
    """Return whether a file's first bytes include a NUL, or are neither UTF-8 nor printable Latin-1.

    UTF-16 and UTF-32 count as text.
    """
    head = next(_read_bytes(file, HEAD_BYTES), b"")
    encoding = _encoding(head)
    if b"\0" in head and encoding == "utf-8":
        return True
    try:
        codecs.getincrementaldecoder(encoding)().decode(head)  # may end within a character
    except UnicodeDecodeError:
        return encoding != "utf-8" or any(byte < 32 and byte not in b"\t\n\f\r\x1b" for byte in head)
    return False


def _encoding(head: bytes) -> str:
    """Return utf-32 or utf-16 if there is a byte-order mark, else utf-16-le or utf-16-be if over three quarters of the
    high bytes are NUL and no low byte is, else utf-8.
    """
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):  # UTF-32's LE mark begins with UTF-16's
        return "utf-32"
    if head.startswith(UTF16_MARKS):
        return "utf-16"
    evens, odds = (head[start:HEAD_BYTES:2] for start in (0, 1))
    for encoding, high, low in (("utf-16-le", odds, evens), ("utf-16-be", evens, odds)):
        if high.count(0) > 0.75 * len(high) and 0 not in low:
            return encoding
    return "utf-8"


def find_text(data: str) -> Path:
    """Return the file at path `data`. tinyshakespeare is read from $CHARGPT_DATA_DIR or downloaded once.

    Raises:
        DataError: the file does not exist, the download failed, or tinyshakespeare has the wrong SHA-256.
    """
    if Path(data).is_file():
        return Path(data)
    if data != TINYSHAKESPEARE:
        refusal = f"{data} is not a regular file or folder" if Path(data).exists() else f"no file or folder {data}"
        raise DataError(
            f"{refusal}; --data takes UTF-8 files, plain or gzip, folders of them, or the name {TINYSHAKESPEARE}"
        )
    name = f"{TINYSHAKESPEARE}.txt"
    folder = os.environ.get("CHARGPT_DATA_DIR")
    if folder and (Path(folder) / name).is_file():
        file = Path(folder) / name
    else:
        file = cache_dir() / name
        if not file.is_file():
            _download(TINYSHAKESPEARE_URL, file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != TINYSHAKESPEARE_SHA256:
        raise DataError(
            f"{file} is not {TINYSHAKESPEARE}: SHA-256 {digest}, expected {TINYSHAKESPEARE_SHA256}; delete the file"
        )
    return file


def _download(url: str, file: Path) -> None:
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            content = response.read()
    except OSError as error:
        reason = getattr(error, "reason", None) or error
        raise DataError(
            f"cannot download {url} ({reason}); pass a text of your own with --data FILE, or save the file as {file}"
        ) from None
    file.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(content)
    part.replace(file)


@dataclass(frozen=True)
class Corpus:
    """An encoded text, memory-mapped."""

    name: str
    sha256: str  # hash of the uncompressed text in UTF-8, or of a column's cells with U+001E after each
    tokenizer: CharTokenizer  # the text's own characters, sorted, or a vocabulary that includes them
    symbols: int  # number of distinct characters of the text, the unknown symbol included
    ids: np.ndarray  # (characters,) uint8, uint16 or uint32: the training split, then the validation split
    num_train: int
    records: int | None  # number of records; None: the text is not split into records
    notes: tuple[str, ...] = ()  # sentences for the user about changes made while reading the files
    record_end: str | None = None  # the character that precedes each record and ends it
    separator: str = ""  # separates the records: LINES, BLANK or a mark
    column: str | None = None  # the table's column whose cells are the records
    replaced: tuple[int, int] = (0, 0)  # distinct characters and occurrences that became the unknown symbol

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
    def ngrams(self) -> bytes:
        """The content of the file of the training split's n-grams, which the service reads."""
        return NGrams.count(self.train).dump()

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

    def counts(self) -> np.ndarray:
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
    name = files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more"
    digest = hashlib.sha256()
    for text in source_text(files, column, notes):
        digest.update(text.encode())
    sha256 = digest.hexdigest()
    folder = _cache_folder(sha256, separator, column)
    if not folder.is_dir():
        end = "\n" if separator == LINES and column is None else RECORD_SEPARATOR
        characters = _characters_of(split_text(source_text(files, column), separator, column, end, name), name)
        if column is not None and "\n" not in characters:
            end = "\n"
            characters.remove(RECORD_SEPARATOR)
        if separator:
            characters = sorted({*characters, end})
        with _writing_cache():
            _encode(files, CharTokenizer(characters), sha256, folder, separator, column, end, name)
    about = json.loads((folder / "corpus.json").read_bytes())
    tokenizer = CharTokenizer(about["characters"])
    ids = np.memmap(folder / "ids.bin", dtype=id_dtype(tokenizer.vocab_size), mode="r")
    corpus = Corpus(
        name, sha256, tokenizer, tokenizer.vocab_size, ids,
        num_train=about["num_train"], records=about["records"], notes=(*sorted(notes), *about["notes"]),
        record_end=about.get("record_end", "\n") if separator else None, separator=separator, column=column,
    )  # fmt: skip
    return corpus if min_count <= 1 else _without_rare(corpus, min_count)


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
    counts = corpus.counts()
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
        counts = dict(zip(corpus.tokenizer.characters, corpus.counts().tolist(), strict=True))
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


@functools.lru_cache(maxsize=2)  # lines are encoded one by one
def _ids_by_code_point(tokenizer: CharTokenizer) -> np.ndarray:
    """Return the table from code point to id, −1 for an unknown one; its last entry stands for all larger ones."""
    known = [ord(c) for c in tokenizer.characters]
    table = np.full(max(known) + 2, -1)
    table[known] = np.arange(len(known))
    return table


def encode_array(tokenizer: CharTokenizer, text: str, replaces: bool = False) -> np.ndarray:
    """Encode bulk text like `CharTokenizer.encode`, about four times as fast: (len(text),) int64.

    replaces: unknown characters become the unknown symbol if there is one.

    Raises:
        UnknownCharacterError: a character is not in the vocabulary and is not replaced.
    """
    table = _ids_by_code_point(tokenizer)
    ids = table[np.minimum(np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4"), len(table) - 1)]
    if replaces and tokenizer.unknown_id is not None:
        return np.where(ids < 0, tokenizer.unknown_id, ids)
    wrong = np.flatnonzero(ids < 0)
    if wrong.size:
        raise UnknownCharacterError(text[wrong[0]], int(wrong[0]))
    return ids


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
        occurrences = int(corpus.counts()[lacking].sum())
        note = (
            f"{plural(sum(lacking), 'rare symbol')} with {plural(occurrences, 'occurrence')}, "
            f"{1e6 * occurrences / len(corpus.ids):.3g} per million characters, became the unknown symbol, U+FFFD"
        )
        corpus = replace(corpus, replaced=(sum(lacking), occurrences), notes=(*corpus.notes, note))
    table = encode_array(tokenizer, "".join(corpus.tokenizer.characters), replaces=True).astype(dtype)
    folder = _cache_folder(corpus.sha256, corpus.separator, corpus.column, tokenizer)
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


def _cache_folder(sha256: str, separator: str, column: str | None, tokenizer: CharTokenizer | None = None) -> Path:
    """Return the cache folder of an encoded text. `tokenizer`: the vocabulary, if it is not the text's own."""
    name = f"{sha256}-v{FORMAT_VERSION}{'-records' if separator else ''}"
    if column is not None:
        name += "-column"  # sha256 is the hash of this column's cells
    elif separator not in ("", LINES):
        name += f"-{hashlib.sha256(separator.encode()).hexdigest()[:16]}"
    if tokenizer:
        name += f"-{hashlib.sha256(''.join(tokenizer.characters).encode()).hexdigest()[:16]}"
    return cache_dir() / "corpora" / name


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest little-endian unsigned type that holds every id."""
    return np.dtype("u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")


def read_text(files: Sequence[Path], notes: set[str] | None = None, errors: str = "strict") -> Iterator[str]:
    """Yield the concatenated files in chunks, as if each had been written on Linux.

    Line breaks of Windows and of old Macs are read as \\n, a file's byte-order mark is left out, and UTF-16 and UTF-32
    are decoded. `notes` gets a sentence about each of these. A line break is inserted between two files if it is
    missing. `errors`: the argument of bytes.decode.

    Raises:
        DataError: a file cannot be read or is not UTF-8, or a file named .gz is not gzip. For bytes that are not UTF-8
            the message gives the offset, and the other such files.
    """
    notes = set() if notes is None else notes
    for number, file in enumerate(files):
        chunks = itertools.chain(_read_bytes(file), [b""])
        head = next(chunks)
        encoding = _encoding(head)
        decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(encoding)(errors), translate=True)
        start, last, is_first = 0, "\n", True
        for chunk in itertools.chain([head], chunks):
            pending = len(decoder.getstate()[0])  # bytes of a character that the last chunk cut in two
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                offset, byte = start - pending + error.start, error.object[error.start]
                hint = _decoding_hint(file, head, encoding, is_alone=len(files) == 1)
                others = [str(other) for other in files[number + 1 :] if not _is_decodable(other)]
                if others:
                    hint += f"; {plural(len(others), 'other file')} likewise: {', '.join(others)}"
                raise DataError(
                    f"{file} is not {encoding.upper()}: byte 0x{byte:02X} at offset {offset} ({error.reason}); {hint}"
                ) from None
            start += len(chunk)
            if text and is_first:
                is_first = False
                if encoding != "utf-8":
                    notes.add(f"{file.name}: {encoding[:6].upper()} read as text")
                if text[0] == BYTE_ORDER_MARK:
                    text = text[1:]
                    notes.add(f"{file.name}: byte-order mark left out")
            if text:
                last = text[-1]
                yield text
        if set(decoder.newlines or ()) - {"\n"}:
            notes.add(f"{file.name}: line breaks of Windows or an old Mac read as \\n")
        if file is not files[-1] and last != "\n":
            yield "\n"


def _decoding_hint(file: Path, head: bytes, encoding: str, is_alone: bool) -> str:
    """Return what to do about a file that is not in its encoding. head: its first bytes."""
    path = shlex.quote(str(file))
    if head.startswith(b"\x1f\x8b"):
        return "it is compressed by gzip: its name must end with .gz"
    if packed := next((name for magic, name in PACKED.items() if head.startswith(magic)), None):
        return f"it is packed: unpack it first, with {packed} {path}"
    if _is_binary(file):
        return "it is a binary file; of a folder, binary files are skipped"
    if encoding != "utf-8":
        return "it may be cut off"
    source = f"zcat {path} | iconv" if file.suffix == ".gz" else f"iconv {path}"
    return (
        f"convert it first, with {source} -f ENCODING -t UTF-8 > converted.txt; ENCODING is for example "
        "WINDOWS-1252 for Western European, GB18030 for Chinese and SHIFT_JIS for Japanese texts"
    ) + ("" if is_alone else f", or leave it out with --exclude {shlex.quote(file.name)}")


def _is_decodable(file: Path) -> bool:
    try:
        return all(True for _ in read_text([file]))  # reads the file to its end
    except DataError:
        return False


def _read_bytes(file: Path, size: int = 0) -> Iterator[bytes]:
    try:
        with gzip.open(file) if file.suffix == ".gz" else open(file, "rb") as binary:
            while chunk := binary.read(size or CHUNK_BYTES):
                yield chunk
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{file} is not a complete gzip file: {error}") from None
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from None


def source_text(files: Sequence[Path], column: str | None, notes: set[str] | None = None) -> Iterator[str]:
    """Yield the text that is hashed: the concatenated files, or a column's cells as `records.cells` yields them."""
    if column is None:
        yield from read_text(files, notes)
        return
    for file in files:
        yield from cells(file, _lines(read_text([file], notes)), column)


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a text, with their line breaks."""
    rest = ""
    for text in texts:
        *lines, rest = (rest + text).split("\n")
        yield from (f"{line}\n" for line in lines)
    if rest:
        yield rest


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


def read_lines(file: Path) -> Iterator[str]:
    """Yield the lines of a text, without their line breaks. Bytes that are not UTF-8 become lone surrogates.

    Raises:
        DataError: the file cannot be read.
    """
    for line in _lines(read_text([file], errors="surrogateescape")):
        yield line.removesuffix("\n")


def _encode(
    files: Sequence[Path],
    tokenizer: CharTokenizer,
    sha256: str,
    folder: Path,
    separator: str,
    column: str | None,
    end: str,
    name: str,
) -> None:
    dtype = id_dtype(tokenizer.vocab_size)
    digest, num_long = hashlib.sha256(), 0  # cells of several lines

    def digested() -> Iterator[str]:
        nonlocal num_long
        for text in source_text(files, column):
            digest.update(text.encode())
            if column is not None and "\n" in text:
                num_long += sum("\n" in cell for cell in text.split(RECORD_SEPARATOR))
            yield text

    end_id = tokenizer.encode(end)[0] if separator else None
    with replacing_folder(folder) as new:
        texts = split_text(digested(), separator, column, end, name)
        count, num_blank = _write_ids(new / "ids.bin", texts, tokenizer, dtype, end_id)
        if digest.hexdigest() != sha256:
            raise DataError(f"{files[0]} or another file changed while being read; try again")
        num_train, num_records = int(count * TRAIN_SHARE), None
        if end_id is not None:
            if separator != LINES:
                _refuse_undivided(new / "ids.bin", tokenizer, end_id, separator, name)
            num_train, num_records = _shuffle_records(new / "ids.bin", dtype, end_id, files[0])
        kind = "empty cell" if column is not None else "empty line" if separator == LINES else "empty record"
        note = f"{plural(num_blank, kind)} left out"
        if kind == "empty line" and MIN_BLANK_LINES <= num_blank and 2 * num_blank <= (num_records or 0):
            note += "; if they separate records of several lines, pass --records blank"
        about = {
            "characters": tokenizer.characters,
            "num_train": num_train,
            "records": num_records,
            "record_end": end if separator else None,
            "notes": [note] * (num_blank > 0) + [f"{plural(num_long, 'cell')} of several lines"] * (num_long > 0),
        }
        (new / "corpus.json").write_text(json.dumps(about), encoding="utf-8")


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


def _refuse_undivided(path: Path, tokenizer: CharTokenizer, end_id: int, separator: str, name: str) -> None:
    """Raise DataError if nothing in the text separates records."""
    ids = np.memmap(path, dtype=id_dtype(tokenizer.vocab_size), mode="r")
    if len(_places_of(ids, end_id)) > 1:
        return
    first = tokenizer.decode_array(ids[:EXAMPLE_OF_CHARACTERS]).split("\n")[:MAX_SHOWN]
    shown = "".join(f"\n  {line[:100].rstrip(RECORD_SEPARATOR)}" for line in first)
    what = "blank line" if separator == BLANK else repr(separator)
    raise DataError(f"{name} has a single record: --records found no {what} between two. It begins:{shown}")


def _shuffle_records(path: Path, dtype: np.dtype[Any], end_id: int, name: Path) -> tuple[int, int]:
    """Shuffle the records of a file of ids. The last ones, one in VAL_EVERY, become the validation split.

    Takes about 50 bytes of memory per record. Returns the length of the training split and the number of records.

    Raises:
        DataError: there are fewer than VAL_EVERY records.
    """
    ids = np.memmap(path, dtype=dtype, mode="r")
    ends = _places_of(ids, end_id) + 1
    if len(ends) < VAL_EVERY:
        raise DataError(f"{name} has {plural(len(ends), 'record')}; --records needs at least {VAL_EVERY}")
    starts = np.concatenate(([0], ends[:-1]))
    order, _ = _epoch(len(ends), seed=0, epoch=0)
    num_train = len(order) - len(order) // VAL_EVERY
    shuffled = path.with_name("shuffled.bin")
    with open(shuffled, "wb") as file:
        for split in (order[:num_train], order[num_train:]):
            file.write(np.array([end_id], dtype).tobytes())
            for record in split:
                file.write(ids[starts[record] : ends[record]].tobytes())
    shuffled.replace(path)
    return 1 + int((ends[order[:num_train]] - starts[order[:num_train]]).sum()), len(ends)


class WindowSampler:
    """Draws every window of the text once per epoch, in an order determined by the seed.

    A window's place is a pure function of its number. The only state is `position`, the number of windows drawn.
    Each epoch cuts the text into consecutive windows from a random phase in [0, block_size). The characters left out at
    the two ends, fewer than 2 block_size together, therefore differ from epoch to epoch.

    Raises:
        DataError: the text is shorter than two windows.
    """

    def __init__(self, ids: np.ndarray, block_size: int, seed: int, position: int = 0):
        self.ids, self.block_size, self.seed, self.position = ids, block_size, seed, position
        # This count leaves room for any phase, and for the last target, one character past the inputs.
        self.per_epoch = (len(ids) - block_size) // block_size
        if self.per_epoch < 1:
            raise DataError(
                f"the training split has {plural(len(ids), 'character')}; block_size {block_size} needs at least "
                f"{2 * block_size:,}: pass a longer text or a smaller block_size"
            )

    def rows(self, characters: int) -> int:
        """Return the number of windows in a step of `characters` characters."""
        return characters // self.block_size

    def starts(self, numbers: np.ndarray) -> np.ndarray:
        """Return the start offsets of the windows with these numbers: (B,) -> (B,) int64."""
        places, phases = _places(numbers, self.per_epoch, self.seed)
        return places * self.block_size + (phases * self.block_size).astype(np.int64)

    def next_batch(self, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs of the next windows, and targets one character ahead: (batch_size, block_size) int64 each."""
        starts = self.starts(np.arange(self.position, self.position + batch_size))
        self.position += batch_size
        places = starts[:, None] + np.arange(self.block_size)
        return self.ids[places].astype(np.int64), self.ids[places + 1].astype(np.int64)


def sampler_of(corpus: Corpus, block_size: int, seed: int) -> WindowSampler | RecordSampler:
    """Return the sampler of the training split, which draws records, or windows of a text without records."""
    return (WindowSampler if corpus.records is None else RecordSampler)(corpus.train, block_size, seed)


class RecordSampler:
    """Draws every record once per epoch, as WindowSampler draws windows. Each record has a row of its own.

    A row begins with the end of the previous record, as in the service, and holds nothing else of another record. A
    record longer than block_size is cut into pieces, each in its own row. `position` is the number of pieces drawn.
    """

    def __init__(self, ids: np.ndarray, block_size: int, seed: int, position: int = 0):
        self.ids, self.seed, self.position = ids, seed, position
        self.pieces = record_pieces(ids, block_size)
        self.per_epoch = len(self.pieces[0])
        self.mean = float(self.pieces[1].mean())  # mean number of characters of a piece

    def rows(self, characters: int) -> int:
        """Return the number of pieces that hold about `characters` characters, at least 1."""
        return max(1, round(characters / self.mean))

    def next_batch(self, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw the next pieces. Return their inputs and targets as `padded` does: (batch_size, longest) int64 each."""
        numbers = np.arange(self.position, self.position + batch_size)
        self.position += batch_size
        piece, _ = _places(numbers, self.per_epoch, self.seed)
        return padded(self.ids, *(part[piece] for part in self.pieces))


def record_pieces(ids: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the start and the number of inputs of each piece of all records in a split: (pieces,) int64 each.

    A record's first piece begins with the end of the previous record. The last target of its last piece is its own end.
    """
    breaks = _places_of(ids, ids[0])
    lengths = np.diff(breaks)
    counts = -(-lengths // longest)
    offsets = longest * (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts))
    return np.repeat(breaks[:-1], counts) + offsets, np.minimum(longest, np.repeat(lengths, counts) - offsets)


def _places_of(ids: np.ndarray, id: int) -> np.ndarray:
    """Return the places of an id in a memory-mapped text, (n,) int64. Reads the text in chunks that fit memory."""
    starts = range(0, len(ids), CHUNK_BYTES)
    return np.concatenate([start + np.flatnonzero(ids[start : start + CHUNK_BYTES] == id) for start in starts])


def unseen_records(ids: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Return for each record of the split `ids` whether the split `train` lacks it: (records,) bool."""
    known = {hash(record) for record in _records(train)}  # two records collide with probability 2⁻⁶⁴
    return np.array([hash(record) not in known for record in _records(ids)])


def _records(ids: np.ndarray) -> Iterator[bytes]:
    """Yield the ids of each record of a split, its end included."""
    for start, length in zip(*record_pieces(ids, len(ids)), strict=True):
        yield ids[start + 1 : start + 1 + length].tobytes()


def window_pieces(ids: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the start and the number of inputs of consecutive windows: (pieces,) int64 each.

    The last window may be shorter.
    """
    starts = np.arange(0, len(ids) - 1, length)
    return starts, np.minimum(length, len(ids) - 1 - starts)


def padded(ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs of pieces of a text, and targets one character ahead: (pieces, longest) int64 each.

    Inputs are padded with 0 and targets with IGNORED, both on the right. Padding there does not affect a causal model's
    other outputs.
    """
    within = np.arange(lengths.max())
    is_padding = within >= lengths[:, None]
    places = np.minimum(starts[:, None] + within, len(ids) - 2)
    idx, targets = (ids[places + ahead].astype(np.int64) for ahead in (0, 1))
    idx[is_padding], targets[is_padding] = 0, IGNORED
    return idx, targets


Part = tuple[np.ndarray, ...]  # idx and targets (B, T); a packed part also has the lengths of its rows


def micro_batches(idx: np.ndarray, targets: np.ndarray, cells: int) -> Iterator[Part]:
    """Yield the rows of a padded batch, the longest first, in parts of at most `cells` characters, padding included.

    A part has at most `cells` / PADDING characters of padding, which cost as much time as another part. A part may be
    larger than `cells` if it is a single row.
    """
    lengths = (targets != IGNORED).sum(axis=1)
    order, first = np.argsort(-lengths, kind="stable"), 0
    while first < len(order):
        longest = int(lengths[order[first]])
        rows = order[first : first + max(1, cells // longest)]
        rows = rows[np.cumsum(longest - lengths[rows]) <= cells // PADDING]
        yield idx[rows, :longest], targets[rows, :longest]
        first += len(rows)


def packed(idx: np.ndarray, targets: np.ndarray, count: int) -> list[Part]:
    """Pack the rows of a padded batch into at most `count` parts of about equally many characters.

    A part is a single row that holds its rows one after another: idx and targets (1, N), and the lengths of these rows,
    (rows,) int64. N is a multiple of PACK, because torch compiles bfloat16 products anew for each N. Rows of padding
    fill it up.
    """
    lengths = (targets != IGNORED).sum(axis=1)
    dealt = np.arange(len(lengths)) % (2 * count)  # deals rows to the parts back and forth, the longest first
    order, owner = np.argsort(-lengths, kind="stable"), np.minimum(dealt, 2 * count - 1 - dealt)
    parts: list[Part] = []
    for own in (order[owner == part] for part in range(min(count, len(lengths)))):
        is_kept = targets[own] != IGNORED
        padding = -int(lengths[own].sum()) % PACK
        rows = np.diff([*range(0, padding, int(lengths.max())), padding])
        parts.append((
            np.pad(idx[own][is_kept], (0, padding))[None],
            np.pad(targets[own][is_kept], (0, padding), constant_values=IGNORED)[None],
            np.concatenate((lengths[own], rows)),
        ))  # fmt: skip
    return parts


def two_halves(parts: Iterable[Part]) -> list[list[Part]]:
    """Divide the parts into two lists of about equally many characters. Return one list if there is one part."""
    halves: tuple[list[Part], list[Part]] = [], []
    for part in parts:
        min(halves, key=lambda half: sum(each[0].size for each in half)).append(part)
    return [half for half in halves if half]


def _places(numbers: np.ndarray, per_epoch: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the places of numbers (B,) in their epochs, (B,) int64 in [0, per_epoch), and the epochs' phases, (B,) in
    [0, 1).
    """
    epochs, within = np.divmod(numbers, per_epoch)
    places, phases = np.empty(len(numbers), np.int64), np.empty(len(numbers))
    for epoch in np.unique(epochs):
        own = epochs == epoch
        order, phases[own] = _epoch(per_epoch, seed, int(epoch))
        places[own] = order[within[own]]
    return places, phases


@functools.lru_cache(maxsize=2)  # a batch may straddle two epochs
def _epoch(n: int, seed: int, epoch: int) -> tuple[np.ndarray, float]:
    """Return a random order of 0 … n−1 and a random number in [0, 1), the same in every version of NumPy."""
    words = [*divmod(seed, 1 << 32), *divmod(epoch, 1 << 32)]
    random, order = np.random.RandomState(words), np.arange(n, dtype=np.uint32)  # frozen, unlike np.random.Generator
    random.shuffle(order)
    return order, random.random_sample()
