"""From a text to windows of ids: prepare once, memory-map for ever, draw without replacement.

A corpus is encoded in chunks into one file of 1, 2 or 4 bytes per character, in a cache folder named by the
text's SHA-256, so a text larger than memory prepares and trains in constant memory. A text is a file, several, or
a folder of them, plain or gzip. Knows nothing of models.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import itertools
import json
import os
import shutil
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from service.model.checkpoint import replacing_folder
from service.model.tokenizer import CharTokenizer, UnknownCharacterError

FORMAT_VERSION = 2
CHUNK_BYTES = 1 << 22
TRAIN_SHARE = 0.9  # of a text the first 90 % train, the rest validates; nothing is shuffled
VAL_EVERY = 10  # of records, one in ten validates, wherever it stands
MAX_SYMBOLS = 1 << 16  # more than all of Unicode's scripts in use; past it the text is hardly one of characters

MIN_CHARACTERS = 20  # so that the validation split has one to predict

TINYSHAKESPEARE = "tinyshakespeare"
TINYSHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TINYSHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


class DataError(ValueError):
    """A text that cannot be trained on, or cannot be had; says why and what to do."""


def cache_dir() -> Path:
    """Where downloads and encoded corpora are kept: $XDG_CACHE_HOME/chargpt, or ~/.cache/chargpt."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "chargpt"


def find_texts(data: Sequence[str]) -> list[Path]:
    """The files that `--data` means: of a folder all those below it, by name, but hidden ones.

    Raises:
        DataError: there is no such file, a folder has none, or as `find_text`.
    """
    files = []
    for name in data:
        if Path(name).is_dir():
            below = (path.relative_to(name) for path in Path(name).rglob("*") if path.is_file())
            found = [Path(name) / path for path in sorted(below) if not any(p.startswith(".") for p in path.parts)]
            if not found:
                raise DataError(f"the folder {name} holds no file")
            files += found
        else:
            files.append(find_text(name))
    return files


def find_text(data: str) -> Path:
    """The file of a name; the one known name is looked up, or downloaded once.

    Raises:
        DataError: there is no such file, the download failed, or its SHA-256 is not the known one.
    """
    if data != TINYSHAKESPEARE or Path(data).is_file():
        if not Path(data).is_file():
            raise DataError(
                f"no text at {data}; --data takes UTF-8 files, plain or gzip, folders of them, "
                f"or the name {TINYSHAKESPEARE}"
            )
        return Path(data)
    name = f"{TINYSHAKESPEARE}.txt"
    given = os.environ.get("CHARGPT_DATA_DIR")
    for folder in [Path(given)] if given else []:
        if (folder / name).is_file():
            return _checked(folder / name)
    file = cache_dir() / name
    if not file.is_file():
        _download(TINYSHAKESPEARE_URL, file)
    return _checked(file)


def _checked(file: Path) -> Path:
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != TINYSHAKESPEARE_SHA256:
        raise DataError(f"{file} is not {TINYSHAKESPEARE}: SHA-256 {found}, not {TINYSHAKESPEARE_SHA256}; delete it")
    return file


def _download(url: str, file: Path) -> None:
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            content = response.read()
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise DataError(
            f"{url} cannot be downloaded ({reason}). Without internet pass a text file: --data FILE; "
            f"or put the file at {file}"
        ) from None
    file.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(content)
    part.replace(file)


@dataclass(frozen=True)
class Corpus:
    """A prepared text: its ids in a vocabulary, memory-mapped."""

    name: str
    sha256: str  # of the text's bytes, unpacked
    tokenizer: CharTokenizer  # the text's own characters, sorted, or a vocabulary that holds them
    symbols: int  # different characters of the text
    ids: np.ndarray  # (characters,) uint8, uint16 or uint32: what trains, then what validates
    num_train: int
    records: int | None  # how many, where the text is one record a line

    @property
    def train(self) -> np.ndarray:
        return self.ids[: self.num_train]

    @property
    def val(self) -> np.ndarray:
        return self.ids[self.num_train :]

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "sha256": self.sha256,
            "characters": len(self.ids),
            "symbols": self.symbols,
            "train_characters": len(self.train),
            "val_characters": len(self.val),
            "records": self.records,
        }


def prepare(data: str | Sequence[str], *, records: bool = False) -> Corpus:
    """The corpus of `--data`, encoded on first use and from the cache afterwards.

    `records`: each line is one, the line break its end. One in VAL_EVERY validates, and each split begins with a
    line break, so that every record follows one.

    Raises:
        DataError: no such file, not UTF-8, not a text that can be trained on.
    """
    files = find_texts([data] if isinstance(data, str) else data)
    name = files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more"
    sha256 = _sha256(files)
    folder = _folder(sha256, records)
    if not folder.is_dir():
        characters, count = _scan(files)
        if len(characters) < 2:
            found = f"only the character {characters[0]!r}" if characters else "nothing"
            raise DataError(f"{name} holds {found}; a text needs at least two different characters")
        if count < MIN_CHARACTERS:
            raise DataError(f"{name} holds {count} characters; a text needs at least {MIN_CHARACTERS}")
        if len(characters) > MAX_SYMBOLS:
            raise DataError(f"{name} holds {len(characters):,} different characters, more than {MAX_SYMBOLS:,}")
        if records:
            characters = sorted({*characters, "\n"})
        _encode(files, CharTokenizer(characters), sha256, folder, records)
    about = json.loads((folder / "corpus.json").read_bytes())
    tokenizer = CharTokenizer(about["characters"])
    ids = np.memmap(folder / "ids.bin", dtype=id_dtype(tokenizer.vocab_size), mode="r")
    return Corpus(name, sha256, tokenizer, tokenizer.vocab_size, ids, about["num_train"], about["records"])


def recode(corpus: Corpus, tokenizer: CharTokenizer) -> Corpus:
    """The same text in a vocabulary made elsewhere, looked up id by id on first use and from the cache afterwards.

    Raises:
        UnknownCharacterError: the vocabulary lacks a character of the text.
    """
    if tokenizer.characters == corpus.tokenizer.characters:
        return corpus
    dtype = id_dtype(tokenizer.vocab_size)
    table = tokenizer.encode_array("".join(corpus.tokenizer.characters)).astype(dtype)
    folder = _folder(corpus.sha256, corpus.records is not None, tokenizer)
    if not folder.is_dir():
        with replacing_folder(folder) as new, open(new / "ids.bin", "wb") as file:
            for start in range(0, len(corpus.ids), CHUNK_BYTES):
                file.write(table[corpus.ids[start : start + CHUNK_BYTES]].tobytes())
            file.flush()
            os.fsync(file.fileno())
    return replace(corpus, tokenizer=tokenizer, ids=np.memmap(folder / "ids.bin", dtype=dtype, mode="r"))


def _folder(sha256: str, records: bool, tokenizer: CharTokenizer | None = None) -> Path:
    """Where a text lies encoded; `tokenizer`: in another vocabulary than its own."""
    name = f"{sha256}-v{FORMAT_VERSION}{'-records' if records else ''}"
    if tokenizer:
        name += f"-{hashlib.sha256(''.join(tokenizer.characters).encode()).hexdigest()[:16]}"
    return cache_dir() / "corpora" / name


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest type that holds every id, little-endian."""
    return np.dtype("u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")


def read_text(files: Sequence[Path]) -> Iterator[str]:
    """Texts one after the other, in pieces, character for character: line ends stay as they are.

    Where a file but the last does not end with a line break, one is put.

    Raises:
        DataError: a file is not UTF-8, and at which byte; or one named .gz is not gzip.
    """
    for file in files:
        decoder = codecs.getincrementaldecoder("utf-8")()
        start, last = 0, "\n"
        for chunk in itertools.chain(_read_bytes(file), [b""]):
            held = len(decoder.getstate()[0])  # bytes of a character that the last chunk broke off
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                offset = start - held + error.start
                raise DataError(
                    f"{file} is not UTF-8: byte 0x{error.object[error.start]:02X} at offset {offset}"
                    f" ({error.reason}); convert it first, e.g. iconv -f LATIN1 -t UTF-8"
                ) from None
            start += len(chunk)
            if text:
                last = text[-1]
                yield text
        if file is not files[-1] and last != "\n":
            yield "\n"


def _read_bytes(file: Path) -> Iterator[bytes]:
    try:
        with gzip.open(file) if file.suffix == ".gz" else open(file, "rb") as binary:
            while chunk := binary.read(CHUNK_BYTES):
                yield chunk
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{file} is not a whole gzip file: {error}") from None


def read_lines(file: Path) -> Iterator[str]:
    """The lines of a text, without the line break (\\n) that ends each.

    Raises:
        DataError: the file is not UTF-8; says at which byte.
    """
    rest = ""
    for text in read_text([file]):
        *lines, rest = (rest + text).split("\n")
        yield from lines
    if rest:
        yield rest


def encode_files(files: Sequence[Path], tokenizer: CharTokenizer) -> np.ndarray:
    """The ids of texts in a vocabulary made elsewhere: (characters,) in `id_dtype`.

    Raises:
        DataError: a file is not UTF-8, or all hold fewer than two characters.
        UnknownCharacterError: a text holds a character that the vocabulary lacks.
    """
    pieces, start = [np.empty(0, id_dtype(tokenizer.vocab_size))], 0
    for text in read_text(files):
        try:
            pieces.append(tokenizer.encode_array(text).astype(pieces[0].dtype))
        except UnknownCharacterError as error:
            raise UnknownCharacterError(error.character, start + error.offset) from None
        start += len(text)
    if start < 2:
        raise DataError(f"{files[0]} holds {start} characters; scoring needs at least two")
    return np.concatenate(pieces)


def _sha256(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for text in read_text(files):
        digest.update(text.encode())
    return digest.hexdigest()


def _scan(files: Sequence[Path]) -> tuple[list[str], int]:
    """The sorted unique characters of a text, and its length."""
    seen, count = np.zeros(0x110000, dtype=bool), 0
    for text in read_text(files):
        seen[np.frombuffer(text.encode("utf-32-le"), dtype="<u4")] = True
        count += len(text)
    return [chr(code) for code in np.flatnonzero(seen)], count


def _encode(files: Sequence[Path], tokenizer: CharTokenizer, sha256: str, folder: Path, records: bool) -> None:
    dtype = id_dtype(tokenizer.vocab_size)
    digest = hashlib.sha256()
    written = num_train = num_records = 0
    break_id = tokenizer.encode("\n")[0] if records else -1
    with replacing_folder(folder) as new:
        with open(new / "ids.bin", "w+b") as train, tempfile.TemporaryFile(dir=new) as val:
            if records:
                train.write(np.array([break_id], dtype).tobytes())
                val.write(np.array([break_id], dtype).tobytes())
            last = "\n"
            for text in read_text(files):
                digest.update(text.encode())
                ids = tokenizer.encode_array(text).astype(dtype)
                written += len(ids)
                if records:
                    ends = ids == break_id
                    number = num_records + np.cumsum(ends) - ends  # of the record that each character belongs to
                    validates = number % VAL_EVERY == VAL_EVERY - 1
                    train.write(ids[~validates].tobytes())
                    val.write(ids[validates].tobytes())
                    num_records += int(ends.sum())
                    last = text[-1]
                else:
                    train.write(ids.tobytes())
            if last != "\n":  # the last record has its end too
                split = val if num_records % VAL_EVERY == VAL_EVERY - 1 else train
                split.write(np.array([break_id], dtype).tobytes())
                num_records += 1
            num_train = train.tell() // dtype.itemsize if records else int(written * TRAIN_SHARE)
            val.seek(0)
            shutil.copyfileobj(val, train)
            train.flush()
            os.fsync(train.fileno())
        if digest.hexdigest() != sha256:
            raise DataError(f"{files[0]} or another file changed while it was read; run again")
        if records and num_records < VAL_EVERY:
            raise DataError(f"{files[0]} holds {num_records} records; --records needs at least {VAL_EVERY}")
        about = {
            "sha256": sha256,
            "characters": tokenizer.characters,
            "num_train": num_train,
            "records": num_records if records else None,
        }
        (new / "corpus.json").write_text(json.dumps(about), encoding="utf-8")


class WindowSampler:
    """Every window of the text once per epoch, in an order and at a phase that (seed, epoch) fix.

    Which window comes when is a pure function of its number, so `position`, the count of windows given so
    far, is all there is to save. The text is cut into windows of `block_size` from a random phase on; up to
    `block_size` characters at each end are left out of an epoch, others in the next.

    Raises:
        DataError: the text is shorter than two windows.
    """

    def __init__(self, ids: np.ndarray, block_size: int, seed: int, position: int = 0):
        self.ids, self.block_size, self.seed, self.position = ids, block_size, seed, position
        # One character more than the inputs, for the last target, at any phase in [0, block_size).
        self.windows_per_epoch = (len(ids) - block_size) // block_size
        if self.windows_per_epoch < 1:
            raise DataError(
                f"the training split holds {len(ids)} characters; block_size {block_size} needs at least "
                f"{2 * block_size}: pass a longer text or a smaller block_size"
            )

    def starts(self, numbers: np.ndarray) -> np.ndarray:
        """Where windows number `numbers` (B,) begin: (B,) int64."""
        epoch, place = np.divmod(numbers.astype(np.uint64), np.uint64(self.windows_per_epoch))
        key = _mix(np.uint64(self.seed) + _mix(epoch))
        phase = _mix(key) % np.uint64(self.block_size)
        window = _permute(place, self.windows_per_epoch, key)
        return (phase + window * np.uint64(self.block_size)).astype(np.int64)

    def next_batch(self, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, the inputs shifted by one: each (batch_size, block_size) int64."""
        starts = self.starts(np.arange(self.position, self.position + batch_size))
        self.position += batch_size
        windows = self.ids[starts[:, None] + np.arange(self.block_size + 1)].astype(np.int64)
        return windows[:, :-1], windows[:, 1:]


def _mix(x: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit numbers that looks random (SplitMix64's finaliser, Steele et al. 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def _permute(x: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """Where a permutation of 0 … n−1, chosen by `key` (B,), puts each of x (B,): no table, constant memory.

    A Feistel network permutes the numbers below the next power of four; whoever lands at n or above walks on
    (Black & Rogaway 2002).
    """
    half = np.uint64(((n - 1).bit_length() + 1) // 2)
    low = (np.uint64(1) << half) - np.uint64(1)
    x = x.copy()
    todo = np.arange(len(x))
    while todo.size:
        left, right = x[todo] >> half, x[todo] & low
        for turn in range(6):
            left, right = right, left ^ (_mix(right ^ _mix(key[todo] + np.uint64(turn))) & low)
        x[todo] = (left << half) | right
        todo = todo[x[todo] >= n]
    return x
