"""The models that requests choose by name, as an HTTP process knows them: all but their weights."""

from __future__ import annotations

from service.catalog import Version
from service.http.patterns import PatternCompiler
from service.model.checkpoint import Checkpoint
from service.observe.metrics import ModelMetrics


class Model:
    """A version of a checkpoint. A request that has chosen it keeps it to its end.

    row: of its name, in shared memory; `metrics` are set once the HTTP process has started.
    """

    metrics: ModelMetrics

    def __init__(self, version: Version, checkpoint: Checkpoint, row: int, max_regex_characters: int):
        self.id, self.name, self.digest, self.row = version.id, version.name, version.digest, row
        self.checkpoint, self.tokenizer = checkpoint, checkpoint.tokenizer
        self.patterns = PatternCompiler(checkpoint.tokenizer.characters, max_regex_characters)
        self.created_at = version.created_at

    @property
    def receptive_field(self) -> int:
        return self.checkpoint.receptive_field

    @property
    def record_end(self) -> int | None:
        """See Checkpoint."""
        return self.checkpoint.record_end
