"""Read a command's inputs: a checkpoint, the text it was trained on, other texts as ids, and patterns.

The terms and rules are those of the service (service/text/encoding.py, service/text/patterns.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from service.constrain.automaton import Automaton
from service.constrain.regex import RegexError, compile_regex
from service.model.checkpoint import MANIFEST, Checkpoint
from service.model.gpt import GPT
from service.model.tokenizer import UNKNOWN, CharTokenizer, UnknownCharacterError
from training.config import ConfigError
from training.data import Corpus, DataError, encode_array, id_dtype, prepare, recode, source_text, split_text
from training.device import pick_device
from training.messages import plural, unescaped
from training.records import LINES, is_table

MAX_STATES = {"--regex": 1000, "--stop-regex": 256}  # the service's limits; a stop may cost time at each character


def find_checkpoint(path: Path | str) -> Path:
    """Return the checkpoint at `path`. If `path` is a run's folder, return its best checkpoint and print a line.

    Raises:
        ConfigError: the run's folder has a `last` but no `best` yet.
    """
    path = Path(path)
    if (path / MANIFEST).is_file():
        return path
    if (path / "best" / MANIFEST).is_file():
        print(f"{path} is a run's folder: taking its best, {path / 'best'}", file=sys.stderr)
        return path / "best"
    if (path / "last" / MANIFEST).is_file():
        raise ConfigError(
            f"{path} is the folder of a run that has no best yet, as it was not evaluated; its newest weights are "
            f"{path / 'last'}"
        )
    return path


def load_model(args: argparse.Namespace) -> tuple[Checkpoint, GPT]:
    """Return the checkpoint of --checkpoint and its model on --device. Set torch's threads to --threads.

    Raises:
        ConfigError: --threads is out of bounds, or --device is not available.
        CheckpointError: the checkpoint cannot be read, or gpt.py is not the one that trained it.
    """
    if not 0 <= args.threads <= 4096:
        raise ConfigError(f"--threads must be in [0, 4096], got {args.threads}")
    if args.threads:
        torch.set_num_threads(args.threads)
    checkpoint = Checkpoint.read(find_checkpoint(args.checkpoint))
    return checkpoint, checkpoint.load_model(pick_device(args.device))


def training_corpus(checkpoint: Checkpoint, args: argparse.Namespace) -> Corpus:
    """Return the text that a checkpoint was trained on, in its vocabulary.

    The text is read from --data, or else from the path that the run read.

    Raises:
        ConfigError: the checkpoint does not record its training text, the text is a different one, or an older version
            shuffled its records in another order.
    """
    recipe, expected = (checkpoint.training.get(name, {}) for name in ("recipe", "data"))
    data = recipe.get("data") if args.data is None else args.data
    if data is None:
        raise ConfigError(f"{checkpoint.path / 'training.json'} does not record the training text; pass --data")
    glob = recipe.get("glob", ()) if args.glob is None else args.glob
    exclude = recipe.get("exclude", ()) if args.exclude is None else args.exclude
    separator, column, _ = splitting_of(checkpoint)
    corpus = prepare(data, records=separator, column=column, glob=glob, exclude=exclude)
    if corpus.sha256 != expected.get("sha256"):
        raise ConfigError(
            f"{' '.join(data)} is not the training text of {checkpoint.path}: "
            f"SHA-256 {corpus.sha256}, expected {expected.get('sha256')}"
        )
    if any(corpus.describe()[name] != expected.get(name) for name in ("split", "records")):
        raise ConfigError(
            f"{checkpoint.path} was trained by an older version, which shuffled records in another order or counted "
            "others: it is not known which of them it has seen"
        )
    return recode(corpus, checkpoint.tokenizer)


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


class Encoder:
    """Encodes texts and counts the unknown characters that it replaced or dropped."""

    def __init__(self, tokenizer: CharTokenizer, policy: str = "refuse", replacement: str | None = None):
        replacement = tokenizer.replacement if replacement is None else replacement
        if len(replacement) != 1:
            raise ConfigError(f"--replacement-character must be a single character, got {replacement!r}")
        self.tokenizer, self.policy, self.replacement = tokenizer, policy, replacement
        self.num_unknown = 0  # unknown characters replaced or dropped

    @classmethod
    def of(cls, args: argparse.Namespace, checkpoint: Checkpoint) -> Encoder:
        replacement = args.replacement_character
        return cls(checkpoint.tokenizer, args.unknown_characters, replacement and unescaped(replacement))

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, (T,) int64.

        Raises:
            UnknownCharacterError: the text has unknown characters and the policy is to refuse them.
            ConfigError: the replacement for unknown characters is not in the vocabulary.
        """
        unknown = [] if self.policy == "refuse" else [c for c in set(text) if c not in self.tokenizer]
        if unknown and self.policy == "replace" and self.replacement not in self.tokenizer:
            raise ConfigError(f"--replacement-character {self.replacement!r} is not in the vocabulary")
        self.num_unknown += sum(map(text.count, unknown))
        other = self.replacement if self.policy == "replace" else ""
        return encode_array(self.tokenizer, text.translate(dict.fromkeys(map(ord, unknown), other)))

    def encode_counting(self, text: str) -> tuple[np.ndarray, int]:
        """Return the ids of a text and the number of its unknown characters, the model's unknown symbol included."""
        before = self.num_unknown
        ids = self.encode(text)
        own = 0 if self.tokenizer.unknown_id is None else text.count(UNKNOWN)
        return ids, self.num_unknown - before + own

    def report(self) -> None:
        """Print a line about the unknown characters on standard error if there were any."""
        if self.num_unknown:
            done = "replaced" if self.policy == "replace" else "dropped"
            print(f"{plural(self.num_unknown, 'unknown character')} {done}", file=sys.stderr)


def encode_files(files: Sequence[Path], encoder: Encoder, splitting: Splitting = OF_TEXT) -> np.ndarray:
    """Return the ids of the concatenated files, (characters,) in `id_dtype`. Records have the form of a split.

    With a column, its cells are read if all files are tables. Otherwise the files are split at the separator.

    Raises:
        DataError: a file is not UTF-8, the files together have fewer than two characters or no records, or
            `source_text` or `split_text` raises it.
        UnknownCharacterError: a character is not in the vocabulary and is refused. The error has its offset in the
            concatenated text.
    """
    tokenizer = encoder.tokenizer
    pieces, start = [np.empty(0, id_dtype(tokenizer.vocab_size))], 0
    separator, column, end = splitting
    column = column if all(map(is_table, files)) else None
    for text in split_text(source_text(files, column), separator, column, end, files[0].name):
        try:
            pieces.append(encoder.encode(text).astype(pieces[0].dtype))
        except UnknownCharacterError as error:
            raise UnknownCharacterError(error.character, start + error.offset) from None
        start += len(text)
    ids = np.concatenate(pieces)
    if len(ids) < 2:
        raise DataError(f"{files[0]} has {plural(len(ids), 'character')}; scoring needs at least 2")
    if end:
        edge = np.array(tokenizer.encode(end), ids.dtype)
        ids = np.concatenate((edge, ids, edge))
        ids = ids[np.concatenate(([True], (ids[1:] != edge) | (ids[:-1] != edge)))]  # leaves out empty records
        if len(ids) < 2:
            raise DataError(f"{files[0]} has no records")
    return ids


def compile_pattern(
    flag: str, pattern: str, tokenizer: CharTokenizer, allowed: frozenset[str] | None = None
) -> Automaton:
    """Compile the pattern of a flag. allowed: the characters that the pattern may match; None: all.

    Raises:
        ConfigError: the pattern is invalid or too large, nothing can match it, or that of --stop-regex matches the
            empty text.
    """
    try:
        automaton = compile_regex(pattern, tokenizer.characters, allowed=allowed, max_states=MAX_STATES[flag])
    except RegexError as error:
        raise ConfigError(f"{flag}: {error}") from None
    if flag == "--stop-regex" and automaton.accepting[0]:
        raise ConfigError(f"{flag}: must not match the empty text, got {pattern!r}")
    return automaton
