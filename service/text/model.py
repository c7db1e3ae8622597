"""What a request in text needs to know of a model. It has no weights."""

from __future__ import annotations

import functools

from service.model.checkpoint import Checkpoint
from service.model.tokenizer import RECORD_SEPARATOR, CharTokenizer
from service.text.patterns import PatternCompiler

MAX_REGEX_CHARACTERS = 10_000  # in Python; a server allows fewer


class TextModel:
    """The characters of a model's texts, and the end of its records.

    record_end_character: precedes each record and ends it; None if the model does not write records.
    """

    def __init__(
        self,
        tokenizer: CharTokenizer,
        record_end_character: str | None,
        receptive_field: int,
        max_regex_characters: int = MAX_REGEX_CHARACTERS,
    ):
        self.tokenizer, self.vocab_size = tokenizer, tokenizer.vocab_size
        self.patterns = PatternCompiler(tokenizer.characters, max_regex_characters)
        self.receptive_field = receptive_field
        self.record_end_character = record_end_character
        self.record_end = None if record_end_character is None else tokenizer.encode(record_end_character)[0]

    @staticmethod
    def of(checkpoint: Checkpoint) -> TextModel:
        return TextModel(checkpoint.tokenizer, checkpoint.record_end_character, checkpoint.config.receptive_field)

    @functools.cached_property
    def text_characters(self) -> frozenset[str] | None:
        """The characters that patterns may match within a record; None if they may match all.

        Patterns may not match the U+001E that ends records of several lines. They may match a line break that ends a
        record, because users see lines.
        """
        if self.record_end_character != RECORD_SEPARATOR:
            return None
        return frozenset(self.tokenizer.characters) - {RECORD_SEPARATOR}
