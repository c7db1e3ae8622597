"""Encode text as ids, in bulk."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from service.model.tokenizer import CharTokenizer, UnknownCharacterError


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


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest little-endian unsigned type that holds every id."""
    return np.dtype("u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")
