"""The settings of a run: four layers, merged in one function.

Each layer wins over those below it:

    resolved   for this machine: the values that replace "auto"
    given      by the user
    inherited  from the checkpoint of --init-from, or, on --resume, from the run
    fitted     to the text or the time, by plan.py
    preset     the values of a name in PRESETS
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from training.config import MODEL_SIZES, TrainConfig

# What a plan may set, unless the user or a checkpoint has.
ADAPTABLE = frozenset(MODEL_SIZES) | {"dropout", "weight_decay", "block_size", "batch_size", "muon_lr", "adamw_lr"}
ADAPTABLE |= {"steps", "warmup_steps", "eval_every", "eval_chars", "score_chars", "patience", "counted"}


@dataclass(frozen=True)
class Settings:
    """The layers, each by field of TrainConfig."""

    given: Mapping[str, Any]
    preset: str = "cpu"
    inherited: Mapping[str, Any] = field(default_factory=dict)
    fitted: Mapping[str, Any] = field(default_factory=dict)
    resolved: Mapping[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def requested(self) -> TrainConfig:
        """The layers but the machine's, as a run records them. Raises ConfigError: a value is out of bounds."""
        return TrainConfig.from_preset(self.preset, **{**self.fitted, **self.inherited, **self.given})

    @functools.cached_property
    def config(self) -> TrainConfig:
        """All layers. Raises ConfigError: a value is out of bounds."""
        return replace(self.requested, **self.resolved)

    @functools.cached_property
    def open(self) -> frozenset[str]:
        """The names of the settings that a plan may set."""
        return ADAPTABLE - self.given.keys() - self.inherited.keys()
