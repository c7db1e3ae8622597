"""The models that requests choose by name. An HTTP process has everything except their weights."""

from __future__ import annotations

from service.catalog import Version
from service.http.text.patterns import PatternCompiler, PatternThread
from service.model.checkpoint import Checkpoint
from service.observe.metrics import ModelMetrics


class Model:
    """A version of a checkpoint. A request that has chosen it keeps it until its end.

    row: row of its name in shared memory. `metrics` are set when the HTTP process has started.
    """

    metrics: ModelMetrics

    def __init__(
        self, version: Version, checkpoint: Checkpoint, row: int, max_regex_characters: int, patterns: PatternThread
    ):
        self.id, self.name, self.digest, self.row = version.id, version.name, version.digest, row
        self.checkpoint, self.tokenizer = checkpoint, checkpoint.tokenizer
        self.vocab_size = checkpoint.tokenizer.vocab_size
        self.patterns = PatternCompiler(checkpoint.tokenizer.characters, max_regex_characters, patterns)
        self.created_at = version.created_at
        self.receptive_field = checkpoint.config.receptive_field
        self.record_end = checkpoint.record_end  # see Checkpoint
        self.record_end_character = checkpoint.record_end_character
