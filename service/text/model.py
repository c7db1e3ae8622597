"""What a request in text needs to know of a model. It has no weights."""

from __future__ import annotations

from service.model.checkpoint import Checkpoint
from service.text.patterns import PatternCompiler


class TextModel:
    """The texts of a checkpoint. See Checkpoint for `record_end`."""

    def __init__(self, checkpoint: Checkpoint, max_regex_characters: int):
        self.checkpoint, self.tokenizer = checkpoint, checkpoint.tokenizer
        self.vocab_size = checkpoint.tokenizer.vocab_size
        self.patterns = PatternCompiler(checkpoint.tokenizer.characters, max_regex_characters)
        self.receptive_field = checkpoint.config.receptive_field
        self.record_end = checkpoint.record_end
        self.record_end_character = checkpoint.record_end_character
