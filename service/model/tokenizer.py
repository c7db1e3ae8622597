"""Character-level tokenizer: one Unicode code point, one id; no merges. Loads without torch.

A vocabulary may have an unknown symbol, U+FFFD, which training puts in place of rare characters (`--min-count`).
`encode` raises for characters outside such a vocabulary too: callers replace them first, where the user asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

UNKNOWN = "\ufffd"  # REPLACEMENT CHARACTER
RECORD_SEPARATOR = "\x1e"  # ends records of several lines
NEVER = -100.0  # as a logit bias: what has it is sampled only where nothing else is allowed


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

    has_unknown: UNKNOWN is its unknown symbol, not a character like any other.

    Raises:
        ValueError: the vocabulary is empty, or an entry is not a single character, is a duplicate, or is a lone
            surrogate (which UTF-8 cannot encode), or it lacks UNKNOWN with `has_unknown`.
    """

    def __init__(self, characters: Sequence[str], has_unknown: bool = False):
        self.characters = list(characters)
        if not self.characters:
            raise ValueError("the vocabulary must have at least one character")
        self._ids: dict[str, int] = {}
        for i, c in enumerate(self.characters):
            if len(c) != 1 or "\ud800" <= c <= "\udfff" or c in self._ids:
                raise ValueError(f"vocabulary entry {i} must be a single, unique Unicode character, got {c!r:.50}")
            self._ids[c] = i
        if has_unknown and UNKNOWN not in self._ids:
            raise ValueError("the vocabulary must have its unknown symbol, U+FFFD")
        self.unknown_id = self._ids[UNKNOWN] if has_unknown else None
        self._code_points = np.array([ord(c) for c in self.characters], dtype="<u4")

    @property
    def vocab_size(self) -> int:
        return len(self.characters)

    @property
    def replacement(self) -> str:
        """What replaces unknown characters where nothing else is chosen; a vocabulary may lack the space."""
        return " " if self.unknown_id is None else UNKNOWN

    @property
    def sampling_bias(self) -> tuple[tuple[int, float], ...]:
        """The logit bias by which answers do not contain the unknown symbol; scores stay the model's."""
        return () if self.unknown_id is None else ((self.unknown_id, NEVER),)

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
