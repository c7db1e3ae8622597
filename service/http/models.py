"""The models that requests choose by name, as an HTTP process knows them: all but their weights."""

from __future__ import annotations

from service.catalog import Version
from service.http.patterns import PatternCompiler
from service.http.schemas import ApiError
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


def choose(models: dict[str, Model], name: str | None, default: str) -> Model:
    """The model that a request names; without a name the only one, or the one called `default`.

    Raises:
        ApiError: 404, it is not served; 400, none is named, several are served and none of them is the default.
    """
    if name is None:
        model = next(iter(models.values())) if len(models) == 1 else models.get(default)
        if model is None:
            raise ApiError(400, f"model: must be one of {', '.join(models)}", param="model")
        return model
    if name not in models:
        served = ", ".join(map(repr, models))
        verb = "model is" if len(models) == 1 else "models are"
        message = f"model {name!r} is not served here; the served {verb} {served}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return models[name]
