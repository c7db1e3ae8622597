"""The state from which a run resumes exactly where it stopped: two files in the checkpoint OUT/last, without pickle.

    state.json          settings, counters, best loss, length of the log
    state.safetensors   optimizer state

Tensors are copied by name into the live objects. The objects' `tensors` methods name them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from service.model.checkpoint import Checkpoint
from service.model.gpt import GPT
from training.config import TrainConfig
from training.fit.settings import Settings
from training.run.errors import ResumeError

FORMAT_VERSION = 7
STATE = "state.json"
TENSORS = "state.safetensors"


# The settings that a resumed run may change: how long it trains, and what it writes. Any other change would make it
# another run.
CHANGEABLE = frozenset(
    "steps patience log_every save_seconds keep_every sample_chars score_chars weights mixed tensorboard".split()
)


@dataclass
class Progress:
    """Counters of a run."""

    step: int = 0  # optimizer steps taken
    position: int = 0  # windows or records drawn by the sampler
    characters: int = 0  # targets trained on
    evaluated_step: int | None = None  # step of the last evaluation
    best_step: int | None = None
    best_val_loss: float | None = None
    best_characters: int = 0  # this and the next two: the counters of those names at the best step
    best_elapsed_seconds: float = 0.0
    best_cpu_seconds: float = 0.0
    elapsed_seconds: float = 0.0  # spent in steps, over all resumes
    cpu_seconds: float = 0.0  # CPU time of these steps except the last, over all processes
    loss_sum: float = 0.0  # training losses since the last log line
    loss_steps: int = 0
    interval_loss_sum: float = 0.0  # training losses since the last evaluation
    interval_steps: int = 0
    log_bytes: int = 0  # length of the log at the save; a resumed run cuts off later lines
    finished: bool = False

    def count_step(self, loss: float, characters: int, position: int, cpu_seconds: float) -> None:
        self.step += 1
        self.characters += characters
        self.position = position
        self.loss_sum += loss
        self.loss_steps += 1
        self.interval_loss_sum += loss
        self.interval_steps += 1
        self.cpu_seconds += cpu_seconds

    def set_best(self, val_loss: float) -> None:
        """Note that the present weights are the best so far."""
        self.best_step, self.best_val_loss, self.best_characters = self.step, val_loss, self.characters
        self.best_elapsed_seconds, self.best_cpu_seconds = self.elapsed_seconds, self.cpu_seconds

    def is_out_of_patience(self, config: TrainConfig) -> bool:
        """Return whether `config.patience` evaluations have passed without a new best."""
        if not config.patience or self.best_step is None or self.evaluated_step is None:
            return False
        return self.evaluated_step - self.best_step >= config.patience * config.eval_every

    @property
    def at_best(self) -> Progress:
        """The progress at the best evaluation."""
        return replace(
            self, step=self.best_step or 0, characters=self.best_characters,
            elapsed_seconds=self.best_elapsed_seconds, cpu_seconds=self.best_cpu_seconds,
        )  # fmt: skip


def pack(
    settings: Settings, data: Mapping[str, Any], progress: Progress, tensors: Mapping[str, Tensor], processes: int
) -> dict[str, bytes]:
    """Return the files to add to a checkpoint. data: `Corpus.describe()`. tensors: the live tensors by name."""
    state = {
        "format_version": FORMAT_VERSION,
        "config": settings.requested.as_dict(),
        "found": dict(settings.resolved),
        "processes": processes,
        "data": dict(data),
        "progress": asdict(progress),
    }
    saved = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return {STATE: (json.dumps(state, indent=2, allow_nan=False) + "\n").encode(), TENSORS: save(saved)}


@dataclass(frozen=True)
class Saved:
    """A saved run."""

    checkpoint: Checkpoint
    config: TrainConfig
    resolved: dict[str, Any]
    processes: int
    data: dict[str, Any]
    progress: Progress

    @classmethod
    def read(cls, path: Path) -> Saved:
        """Verify the folder and read everything except the tensors.

        Raises:
            CheckpointError: a file is missing or altered.
            ResumeError: the checkpoint has no state, or one of another format version.
        """
        checkpoint = Checkpoint.read(path)
        if STATE not in checkpoint.files:
            raise ResumeError(f"{path} cannot be resumed: it has weights but no {STATE}")
        state = json.loads(checkpoint.read_file(STATE))
        if state["format_version"] != FORMAT_VERSION:
            raise ResumeError(f"{path / STATE}: format_version must be {FORMAT_VERSION}, got {state['format_version']}")
        config, progress = TrainConfig(**state["config"]), Progress(**state["progress"])
        return cls(checkpoint, config, state["found"], state["processes"], state["data"], progress)

    def settings(self, given: Mapping[str, Any]) -> Settings:
        """Return the settings with which the run goes on if the user gives some of them.

        The paths of its text may change, because it may have moved.

        Raises:
            ResumeError: a setting differs from the saved one and is not CHANGEABLE.
        """
        before = self.config.as_dict()
        changed = {name: value for name, value in given.items() if name == "data" or before[name] != value}
        wrong = [
            f"{name} was {before[name]!r}, got {changed[name]!r}"
            for name in changed
            if name not in {*CHANGEABLE, "data"}
        ]
        if wrong:
            raise ResumeError(
                f"settings cannot be changed on resume: {'; '.join(wrong)}. Omit them, or start another run; what can "
                f"be changed is {', '.join(sorted(CHANGEABLE))}"
            )
        return Settings(changed, inherited=before, resolved=self.resolved)

    def restore(self, model: GPT, tensors: Mapping[str, Tensor]) -> None:
        """Copy the saved state into `model`, and into `tensors` by name."""
        model.load_state_dict(self.checkpoint.load_model().state_dict())
        saved = load(self.checkpoint.read_file(TENSORS))
        for name, tensor in tensors.items():
            tensor.detach().copy_(saved[name])
