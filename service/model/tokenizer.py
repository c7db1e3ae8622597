"""Character-level tokenizer: one Unicode code point, one id; no merges, no unknown token. Loads without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


class UnknownCharacterError(ValueError):
    """A text contains a character that is not in the vocabulary."""

    def __init__(self, character: str, offset: int):
        super().__init__(
            f"character {character!r} (U+{ord(character):04X}) at offset {offset} is not in the vocabulary"
        )
        self.character = character
        self.offset = offset


class CharTokenizer:
    """A fixed vocabulary; a character's id is its index.

    Raises:
        ValueError: the vocabulary is empty, or an entry is not a single character, is a duplicate, or is a lone
            surrogate (which UTF-8 cannot encode).
    """

    def __init__(self, characters: Sequence[str]):
        self.characters = list(characters)
        if not self.characters:
            raise ValueError("the vocabulary must have at least one character")
        self._ids: dict[str, int] = {}
        for i, c in enumerate(self.characters):
            if len(c) != 1 or "\ud800" <= c <= "\udfff" or c in self._ids:
                raise ValueError(f"vocabulary entry {i} must be a single, unique Unicode character, got {c!r:.50}")
            self._ids[c] = i
        self._code_points = np.array([ord(c) for c in self.characters], dtype="<u4")

    @property
    def vocab_size(self) -> int:
        return len(self.characters)

    def __contains__(self, character: str) -> bool:
        return character in self._ids

    def adapted(self, text: str) -> str:
        """A text as long, with characters of the vocabulary in place of unknown ones: an example of any model."""
        return "".join([c if c in self else self.characters[i % len(self.characters)] for i, c in enumerate(text)])

    def encode(self, text: str) -> list[int]:
        """
        Raises:
            UnknownCharacterError: for the first character that is not in the vocabulary.
        """
        try:
            return [self._ids[c] for c in text]
        except KeyError:
            offset, character = next((i, c) for i, c in enumerate(text) if c not in self._ids)
            raise UnknownCharacterError(character, offset) from None

    def decode(self, ids: Iterable[int]) -> str:
        return "".join([self.characters[i] for i in ids])

    def decode_array(self, ids: np.ndarray) -> str:
        """`decode` for bulk text: (N,) of an integer type."""
        return self._code_points[ids].tobytes().decode("utf-32-le")
