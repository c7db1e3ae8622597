"""Text to training windows: encode once into a cache, memory-map, draw windows without replacement.

A text is one or more files or folders, plain or gzip. It is encoded in chunks into 1, 2 or 4 bytes per character, in
a cache folder named by its SHA-256, so that a text larger than memory trains in constant memory. Knows nothing about
models.
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
from training.messages import plural

FORMAT_VERSION = 2
CHUNK_BYTES = 1 << 22
TRAIN_SHARE = 0.9  # the first 90 % of a text is the training split, the rest the validation split
VAL_EVERY = 10  # with records, every tenth goes to the validation split
MAX_SYMBOLS = 1 << 16  # more than any script has; a text with more is probably not text
MIN_CHARACTERS = 20  # leaves the validation split one character to predict

TINYSHAKESPEARE = "tinyshakespeare"
TINYSHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TINYSHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


class DataError(ValueError):
    """A text that cannot be found, read or trained on; the message says why and what to do."""


def cache_dir() -> Path:
    """The folder of downloads and encoded corpora: $XDG_CACHE_HOME/chargpt, or ~/.cache/chargpt."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "chargpt"


def find_texts(data: Sequence[str]) -> list[Path]:
    """The files of `--data`; a folder stands for all files below it, sorted, except hidden ones.

    Raises:
        DataError: a folder has no files, or as `find_text`.
    """
    files = []
    for name in data:
        if Path(name).is_dir():
            below = (path.relative_to(name) for path in Path(name).rglob("*") if path.is_file())
            found = [Path(name) / path for path in sorted(below) if not any(p.startswith(".") for p in path.parts)]
            if not found:
                raise DataError(f"the folder {name} has no files")
            files += found
        else:
            files.append(find_text(name))
    return files


def find_text(data: str) -> Path:
    """The file at path `data`; tinyshakespeare is taken from $CHARGPT_DATA_DIR or downloaded once.

    Raises:
        DataError: the file does not exist, the download failed, or tinyshakespeare has the wrong SHA-256.
    """
    if data != TINYSHAKESPEARE or Path(data).is_file():
        if not Path(data).is_file():
            refusal = f"{data} is not a regular file or folder" if Path(data).exists() else f"no file or folder {data}"
            raise DataError(
                f"{refusal}; --data takes UTF-8 files, plain or gzip, folders of them, or the name {TINYSHAKESPEARE}"
            )
        return Path(data)
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
    except (urllib.error.URLError, OSError) as error:
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
    sha256: str  # of the text in UTF-8, uncompressed
    tokenizer: CharTokenizer  # the text's own characters, sorted, or a vocabulary that includes them
    symbols: int  # number of distinct characters of the text
    ids: np.ndarray  # (characters,) uint8, uint16 or uint32: the training split, then the validation split
    num_train: int
    records: int | None  # number of records; None: the text is not split into records

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
    """The corpus of `--data`, encoded on first use and read from the cache afterwards.

    With `records`, each line is a record that ends with its line break. One in VAL_EVERY goes to the validation
    split. Each split begins with a line break, so that every record follows one.

    Raises:
        DataError: a file is missing or not UTF-8, or the text is too short or has too many distinct characters.
    """
    files = find_texts([data] if isinstance(data, str) else data)
    name = files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more"
    sha256 = _sha256(files)
    folder = _cache_folder(sha256, records)
    if not folder.is_dir():
        characters, count = _scan(files)
        if len(characters) < 2:
            content = f"contains only the character {characters[0]!r}" if characters else "is empty"
            raise DataError(f"{name} {content}; a text needs at least 2 distinct characters")
        if count < MIN_CHARACTERS:
            raise DataError(f"{name} has {count} characters; a text needs at least {MIN_CHARACTERS}")
        if len(characters) > MAX_SYMBOLS:
            raise DataError(f"{name} has {len(characters):,} distinct characters; at most {MAX_SYMBOLS:,} are allowed")
        if records:
            characters = sorted({*characters, "\n"})
        _encode(files, CharTokenizer(characters), sha256, folder, records)
    about = json.loads((folder / "corpus.json").read_bytes())
    tokenizer = CharTokenizer(about["characters"])
    ids = np.memmap(folder / "ids.bin", dtype=id_dtype(tokenizer.vocab_size), mode="r")
    return Corpus(name, sha256, tokenizer, tokenizer.vocab_size, ids, about["num_train"], about["records"])


def recode(corpus: Corpus, tokenizer: CharTokenizer) -> Corpus:
    """The same text in another vocabulary, mapped id by id on first use and read from the cache afterwards.

    Raises:
        UnknownCharacterError: a character of the text is not in the vocabulary.
    """
    if tokenizer.characters == corpus.tokenizer.characters:
        return corpus
    dtype = id_dtype(tokenizer.vocab_size)
    table = tokenizer.encode_array("".join(corpus.tokenizer.characters)).astype(dtype)
    folder = _cache_folder(corpus.sha256, corpus.records is not None, tokenizer)
    if not folder.is_dir():
        with replacing_folder(folder) as new, open(new / "ids.bin", "wb") as file:
            for start in range(0, len(corpus.ids), CHUNK_BYTES):
                file.write(table[corpus.ids[start : start + CHUNK_BYTES]].tobytes())
            file.flush()
            os.fsync(file.fileno())
    return replace(corpus, tokenizer=tokenizer, ids=np.memmap(folder / "ids.bin", dtype=dtype, mode="r"))


def _cache_folder(sha256: str, records: bool, tokenizer: CharTokenizer | None = None) -> Path:
    """`tokenizer`: the vocabulary, if it is not the text's own."""
    name = f"{sha256}-v{FORMAT_VERSION}{'-records' if records else ''}"
    if tokenizer:
        name += f"-{hashlib.sha256(''.join(tokenizer.characters).encode()).hexdigest()[:16]}"
    return cache_dir() / "corpora" / name


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned type that fits every id, little-endian."""
    return np.dtype("u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")


def read_text(files: Sequence[Path]) -> Iterator[str]:
    """The concatenated files, in chunks; line breaks are not translated.

    A line break is inserted between files where one is missing.

    Raises:
        DataError: a file cannot be read or is not UTF-8 (gives the byte offset), or one named .gz is not gzip.
    """
    for file in files:
        decoder = codecs.getincrementaldecoder("utf-8")()
        start, last = 0, "\n"
        for chunk in itertools.chain(_read_bytes(file), [b""]):
            pending = len(decoder.getstate()[0])  # bytes of a character that the last chunk cut in two
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                offset = start - pending + error.start
                raise DataError(
                    f"{file} is not UTF-8: byte 0x{error.object[error.start]:02X} at offset {offset}"
                    f" ({error.reason}); convert it first, for example with iconv -f LATIN1 -t UTF-8"
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
        raise DataError(f"{file} is not a complete gzip file: {error}") from None
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from None


def read_lines(file: Path) -> Iterator[str]:
    """The lines of a text, split at \\n alone and without it.

    Raises:
        DataError: the file cannot be read, or is not UTF-8; gives the byte offset.
    """
    rest = ""
    for text in read_text([file]):
        *lines, rest = (rest + text).split("\n")
        yield from lines
    if rest:
        yield rest


def encode_files(files: Sequence[Path], tokenizer: CharTokenizer) -> np.ndarray:
    """The ids of the concatenated files: (characters,) in `id_dtype`.

    Raises:
        DataError: a file is not UTF-8, or all together have fewer than two characters.
        UnknownCharacterError: a character is not in the vocabulary; gives its offset in the concatenated text.
    """
    pieces, start = [np.empty(0, id_dtype(tokenizer.vocab_size))], 0
    for text in read_text(files):
        try:
            pieces.append(tokenizer.encode_array(text).astype(pieces[0].dtype))
        except UnknownCharacterError as error:
            raise UnknownCharacterError(error.character, start + error.offset) from None
        start += len(text)
    if start < 2:
        raise DataError(f"{files[0]} has {plural(start, 'character')}; scoring needs at least 2")
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
                    number = num_records + np.cumsum(ends) - ends  # record number of each character
                    validates = number % VAL_EVERY == VAL_EVERY - 1
                    train.write(ids[~validates].tobytes())
                    val.write(ids[validates].tobytes())
                    num_records += int(ends.sum())
                    last = text[-1]
                else:
                    train.write(ids.tobytes())
            if last != "\n":  # the last record needs its line break too
                split = val if num_records % VAL_EVERY == VAL_EVERY - 1 else train
                split.write(np.array([break_id], dtype).tobytes())
                num_records += 1
            num_train = train.tell() // dtype.itemsize if records else int(written * TRAIN_SHARE)
            val.seek(0)
            shutil.copyfileobj(val, train)
            train.flush()
            os.fsync(train.fileno())
        if digest.hexdigest() != sha256:
            raise DataError(f"{files[0]} or another file changed while being read; try again")
        if records and num_records < VAL_EVERY:
            raise DataError(f"{files[0]} has {plural(num_records, 'record')}; --records needs at least {VAL_EVERY}")
        about = {
            "sha256": sha256,
            "characters": tokenizer.characters,
            "num_train": num_train,
            "records": num_records if records else None,
        }
        (new / "corpus.json").write_text(json.dumps(about), encoding="utf-8")


class WindowSampler:
    """Draws every window of the text once per epoch, in an order determined by the seed.

    A window's place is a pure function of its number, so the only state is `position`, the number of windows drawn.
    Each epoch cuts the text into consecutive windows from a random phase in [0, block_size), so the characters left
    out at both ends, at most block_size each, differ from epoch to epoch.

    Raises:
        DataError: the text is shorter than two windows.
    """

    def __init__(self, ids: np.ndarray, block_size: int, seed: int, position: int = 0):
        self.ids, self.block_size, self.seed, self.position = ids, block_size, seed, position
        # Leaves room for any phase and for the last target, one character past the inputs.
        self.windows_per_epoch = (len(ids) - block_size) // block_size
        if self.windows_per_epoch < 1:
            raise DataError(
                f"the training split has {plural(len(ids), 'character')}; block_size {block_size} needs at least "
                f"{2 * block_size:,}: pass a longer text or a smaller block_size"
            )

    def starts(self, numbers: np.ndarray) -> np.ndarray:
        """Start offsets of the windows with these numbers: (B,) -> (B,) int64."""
        epoch, place = np.divmod(numbers.astype(np.uint64), np.uint64(self.windows_per_epoch))
        key = _mix(np.uint64(self.seed) + _mix(epoch))
        phase = _mix(key) % np.uint64(self.block_size)
        window = _permute(place, self.windows_per_epoch, key)
        return (phase + window * np.uint64(self.block_size)).astype(np.int64)

    def next_batch(self, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs, and targets one character ahead: each (batch_size, block_size) int64."""
        starts = self.starts(np.arange(self.position, self.position + batch_size))
        self.position += batch_size
        windows = self.ids[starts[:, None] + np.arange(self.block_size + 1)].astype(np.int64)
        return windows[:, :-1], windows[:, 1:]


def _mix(x: np.ndarray) -> np.ndarray:
    """A pseudo-random bijection of 64-bit integers: SplitMix64's finalizer (Steele et al. 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def _permute(x: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """Apply to each of x (B,) the pseudo-random permutation of 0 … n−1 that its `key` (B,) selects, without a table.

    A Feistel network over the next power of four, with cycle walking back below n (Black & Rogaway 2002).
    """
    half = np.uint64(((n - 1).bit_length() + 1) // 2)
    low = (np.uint64(1) << half) - np.uint64(1)
    x = x.copy()
    todo = np.arange(len(x))
    while todo.size:
        left, right = x[todo] >> half, x[todo] & low
        for i in range(6):
            left, right = right, left ^ (_mix(right ^ _mix(key[todo] + np.uint64(i))) & low)
        x[todo] = (left << half) | right
        todo = todo[x[todo] >= n]
    return x
