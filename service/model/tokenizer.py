"""A character-level tokenizer: each Unicode code point has one id, and there are no merges. Loads without torch.

A vocabulary may have an unknown symbol, U+FFFD. Training replaces rare characters by it (`--min-count`). `encode` still
raises an error for characters outside the vocabulary: callers replace them first if the user asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

UNKNOWN = "\ufffd"  # REPLACEMENT CHARACTER
RECORD_SEPARATOR = "\x1e"  # ends records of several lines
NEVER = -100.0  # logit bias: an id with this bias is sampled only if no other id is allowed


class UnknownCharacterError(ValueError):
    """A text contains a character that is not in the vocabulary."""

    def __init__(self, character: str, offset: int):
        super().__init__(
            f"character {character!r} (U+{ord(character):04X}) at offset {offset} is not in the vocabulary"
        )
        self.character = character
        self.offset = offset


class CharTokenizer:
    """A fixed vocabulary. The id of a character is its index.

    has_unknown: True: UNKNOWN is the unknown symbol. False: UNKNOWN is an ordinary character if the vocabulary has it.

    Raises:
        ValueError: the vocabulary is empty, or lacks UNKNOWN with `has_unknown`. Or an entry is not a single character,
            is a duplicate, or is a lone surrogate, which UTF-8 cannot encode.
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
        """The default replacement of unknown characters: the unknown symbol, or a space if there is no such symbol.

        The vocabulary may lack the space.
        """
        return " " if self.unknown_id is None else UNKNOWN

    @property
    def sampling_bias(self) -> tuple[tuple[int, float], ...]:
        """The logit bias that keeps the unknown symbol out of generated texts. Scores do not use it."""
        return () if self.unknown_id is None else ((self.unknown_id, NEVER),)

    def __contains__(self, character: str) -> bool:
        return character in self._ids

    def adapted(self, text: str) -> str:
        """Return the text with each unknown character replaced by some character of the vocabulary.

        The length stays the same. So an example text can serve for any model.
        """
        return "".join([c if c in self else self.characters[i % len(self.characters)] for i, c in enumerate(text)])

    def encode(self, text: str) -> list[int]:
        """Return the ids of the characters of a text.

        Raises:
            UnknownCharacterError: a character is not in the vocabulary. The error names the first one.
        """
        try:
            return [self._ids[c] for c in text]
        except KeyError:
            offset, character = next((i, c) for i, c in enumerate(text) if c not in self._ids)
            raise UnknownCharacterError(character, offset) from None

    def decode(self, ids: Iterable[int]) -> str:
        return "".join([self.characters[i] for i in ids])

    def decode_array(self, ids: np.ndarray) -> str:
        """Decode many ids fast: an array (N,) of an integer type."""
        return self._code_points[ids].tobytes().decode("utf-32-le")
