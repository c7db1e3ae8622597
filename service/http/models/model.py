"""The models that requests choose by name. An HTTP process has everything except their weights."""

from __future__ import annotations

from service.catalog import Version
from service.http.models.patterns import PatternCache, PatternThread
from service.model.checkpoint import Checkpoint
from service.observe.metrics import ModelMetrics
from service.text.encoding import Encoder
from service.text.model import TextModel

MAX_REGEX_CHARACTERS = 1000


class Model(TextModel):
    """A version of a checkpoint. A request that has chosen it keeps it until its end.

    row: row of its name in shared memory. `metrics` are set when the HTTP process has started.
    """

    metrics: ModelMetrics

    def __init__(self, version: Version, checkpoint: Checkpoint, row: int, thread: PatternThread):
        super().__init__(
            checkpoint.tokenizer,
            checkpoint.record_end_character,
            checkpoint.config.receptive_field,
            MAX_REGEX_CHARACTERS,
        )
        self.checkpoint = checkpoint
        self.id, self.place, self.row = version.id, version.place, row
        self.name, self.digest = version.name, version.digest
        self.cache = PatternCache(thread)
        self.created_at = version.created_at

    def count_unknown(self, encoder: Encoder) -> None:
        """Add the unknown characters of an accepted request to the metrics."""
        if encoder.replaced or encoder.dropped:
            self.metrics.unknown_characters("replace").inc(encoder.replaced)
            self.metrics.unknown_characters("drop").inc(encoder.dropped)
