"""From a text to windows of ids: prepare once, memory-map for ever, draw without replacement.

A corpus is encoded in chunks into one file of 1, 2 or 4 bytes per character, in a cache folder named by the
text's SHA-256, so a text larger than memory prepares and trains in constant memory. Knows nothing of models.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from service.model.checkpoint import replacing_folder
from service.model.tokenizer import CharTokenizer, UnknownCharacterError

FORMAT_VERSION = 1
CHUNK_BYTES = 1 << 22
TRAIN_SHARE = 0.9  # the first 90 % train, the rest validates; nothing is shuffled

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


def find_text(data: str) -> Path:
    """The file that `--data` means; the one known name is looked up, or downloaded once.

    Raises:
        DataError: there is no such file, the download failed, or its SHA-256 is not the known one.
    """
    if data != TINYSHAKESPEARE or Path(data).is_file():
        if not Path(data).is_file():
            raise DataError(f"no text file at {data}; --data takes a UTF-8 file or the name {TINYSHAKESPEARE}")
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
    """A prepared text: its vocabulary and its ids, memory-mapped."""

    name: str
    sha256: str  # of the text's bytes
    tokenizer: CharTokenizer
    ids: np.ndarray  # (characters,) uint8, uint16 or uint32

    @property
    def train(self) -> np.ndarray:
        return self.ids[: int(len(self.ids) * TRAIN_SHARE)]

    @property
    def val(self) -> np.ndarray:
        return self.ids[int(len(self.ids) * TRAIN_SHARE) :]

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "sha256": self.sha256,
            "characters": len(self.ids),
            "symbols": self.tokenizer.vocab_size,
            "train_characters": len(self.train),
            "val_characters": len(self.val),
        }


def prepare(data: str) -> Corpus:
    """The corpus of `--data`, encoded on first use and from the cache afterwards.

    Raises:
        DataError: no such file, not UTF-8, or a text without two different characters.
    """
    file = find_text(data)
    sha256 = _sha256(file)
    folder = cache_dir() / "corpora" / f"{sha256}-v{FORMAT_VERSION}"
    if not folder.is_dir():
        characters, count = _scan(file)
        if len(characters) < 2:
            found = f"only the character {characters[0]!r}" if characters else "nothing"
            raise DataError(f"{file} holds {found}; a text needs at least two different characters")
        if count < MIN_CHARACTERS:
            raise DataError(f"{file} holds {count} characters; a text needs at least {MIN_CHARACTERS}")
        _encode(file, CharTokenizer(characters), count, sha256, folder)
    about = json.loads((folder / "corpus.json").read_bytes())
    tokenizer = CharTokenizer(about["characters"])
    ids = np.memmap(folder / "ids.bin", dtype=id_dtype(tokenizer.vocab_size), mode="r")
    return Corpus(file.name, sha256, tokenizer, ids)


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest type that holds every id, little-endian."""
    return np.dtype("u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")


def read_text(file: Path) -> Iterator[str]:
    """The text in pieces, character for character: line ends stay as they are.

    Raises:
        DataError: the file is not UTF-8; says at which byte.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    start = 0
    with open(file, "rb") as binary:
        while True:
            chunk = binary.read(CHUNK_BYTES)
            held = len(decoder.getstate()[0])  # bytes of a character that the last chunk broke off
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                offset = start - held + error.start
                raise DataError(
                    f"{file} is not UTF-8: byte 0x{error.object[error.start]:02X} at offset {offset}"
                    f" ({error.reason}); convert it first, e.g. iconv -f LATIN1 -t UTF-8"
                ) from None
            if not chunk:
                return
            start += len(chunk)
            yield text


def read_lines(file: Path) -> Iterator[str]:
    """The lines of a text, without the line break (\\n) that ends each.

    Raises:
        DataError: the file is not UTF-8; says at which byte.
    """
    rest = ""
    for text in read_text(file):
        *lines, rest = (rest + text).split("\n")
        yield from lines
    if rest:
        yield rest


def encode_file(file: Path, tokenizer: CharTokenizer) -> np.ndarray:
    """The ids of a text in a vocabulary made elsewhere: (characters,) in `id_dtype`.

    Raises:
        DataError: the file is not UTF-8 or holds fewer than two characters.
        UnknownCharacterError: the text holds a character that the vocabulary lacks.
    """
    pieces, start = [np.empty(0, id_dtype(tokenizer.vocab_size))], 0
    for text in read_text(file):
        try:
            pieces.append(tokenizer.encode_array(text).astype(pieces[0].dtype))
        except UnknownCharacterError as error:
            raise UnknownCharacterError(error.character, start + error.offset) from None
        start += len(text)
    if start < 2:
        raise DataError(f"{file} holds {start} characters; scoring needs at least two")
    return np.concatenate(pieces)


def _sha256(file: Path) -> str:
    with open(file, "rb") as binary:
        return hashlib.file_digest(binary, "sha256").hexdigest()


def _scan(file: Path) -> tuple[list[str], int]:
    """The sorted unique characters of a text, and its length."""
    seen, count = np.zeros(0x110000, dtype=bool), 0
    for text in read_text(file):
        seen[np.frombuffer(text.encode("utf-32-le"), dtype="<u4")] = True
        count += len(text)
    return [chr(code) for code in np.flatnonzero(seen)], count


def _encode(file: Path, tokenizer: CharTokenizer, count: int, sha256: str, folder: Path) -> None:
    dtype = id_dtype(tokenizer.vocab_size)
    digest, written = hashlib.sha256(), 0
    with replacing_folder(folder) as new:
        with open(new / "ids.bin", "wb") as binary:
            for text in read_text(file):
                digest.update(text.encode())
                binary.write(tokenizer.encode_array(text).astype(dtype).tobytes())
                written += len(text)
            binary.flush()
            os.fsync(binary.fileno())
        if digest.hexdigest() != sha256 or written != count:
            raise DataError(f"{file} changed while it was read; run again")
        about = {"sha256": sha256, "characters": tokenizer.characters}
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
