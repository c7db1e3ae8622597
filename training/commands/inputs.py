"""Read a command's inputs: the text that a checkpoint was trained on, and other texts as ids."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from service.local import RequestError
from service.model.checkpoint import Checkpoint
from service.model.tokenizer import CharTokenizer, UnknownCharacterError
from service.text.encoding import Encoder
from service.text.errors import InvalidRequestError
from service.text.limits import Limits
from service.text.model import TextModel
from service.text.reading import parse
from service.text.requests import GenerationRequest, TextRequest
from service.text.work import run
from training.config import ConfigError
from training.messages import plural, unescaped
from training.text.corpus import Corpus, prepare, recode
from training.text.encoding import encode_array, id_dtype
from training.text.files import DataError
from training.text.records import OF_TEXT, Splitting, is_table, source_text, split_text, splitting_of

# A field in the error of a request: the first word names the one that is wrong.
_COMPOUND = "|".join(name for name in GenerationRequest.model_fields if "_" in name)
_FIELD = re.compile(rf"^[a-z_]+(?=: )|(?<=combined with )[a-z_]+|\b(?:{_COMPOUND})\b")


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


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Turn the errors of requests, which name fields, into ConfigErrors, which name flags."""
    try:
        yield
    except (RequestError, InvalidRequestError) as error:
        message = _FIELD.sub(lambda name: "--" + name[0].replace("_", "-"), str(error))
        raise ConfigError(message) from None


def unknown_options(args: argparse.Namespace) -> dict[str, str | None]:
    """Return the fields of a request for --unknown-characters and --replacement-character."""
    replacement = args.replacement_character
    return {
        "unknown_characters": args.unknown_characters,
        "replacement_character": None if replacement is None else unescaped(replacement),
    }


def encoder_of(tokenizer: CharTokenizer, **options: str | None) -> Encoder:
    """Return an encoder with `unknown_options`; by default, unknown characters are refused. Raises ConfigError."""
    with refusing():
        return Encoder(Limits(), TextModel(tokenizer, None, 1), parse(TextRequest, options))


def report_unknown(replaced: int, dropped: int) -> None:
    """Print a line about the unknown characters on standard error if there were any."""
    if replaced or dropped:
        print(
            f"{plural(replaced or dropped, 'unknown character')} {'replaced' if replaced else 'dropped'}",
            file=sys.stderr,
        )


def encode_files(files: Sequence[Path], encoder: Encoder, splitting: Splitting = OF_TEXT) -> np.ndarray:
    """Return the ids of the concatenated files, (characters,) in `id_dtype`. Records have the form of a split.

    With a column, its cells are read if all files are tables. Otherwise the files are split at the separator.

    Raises:
        DataError: a file is not UTF-8, the files together have fewer than two characters or no records, or
            `source_text` or `split_text` raises it.
        UnknownCharacterError: a character is not in the vocabulary and is refused. The error has its offset in the
            concatenated text.
        InvalidRequestError: the character that is to replace unknown ones is unknown too.
    """
    tokenizer = encoder.tokenizer
    dtype, start = id_dtype(tokenizer.vocab_size), 0
    pieces = [np.empty(0, dtype)]
    separator, column, end = splitting
    column = column if all(map(is_table, files)) else None
    for text in split_text(source_text(files, column), separator, column, end, files[0].name):
        try:
            pieces.append(encode_array(tokenizer, text).astype(dtype))
        except UnknownCharacterError as error:
            if encoder.policy == "refuse":
                raise UnknownCharacterError(error.character, start + error.offset) from None
            pieces.append(np.array(run(encoder.encode(text, "data")), dtype))
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
