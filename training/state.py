"""What a run needs to go on exactly where it stopped: two more files in the folder OUT/last, and no pickle.

    state.json          config, counters, best loss so far, generators, length of the log
    state.safetensors   optimizers' tensors, average of the weights, torch's generators

The weights are the checkpoint's own. Tensors are written and read by name into the live objects, so the one
who holds a tensor is the one who names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from service.model.checkpoint import Checkpoint
from service.model.gpt import GPT
from training.config import TrainConfig

FORMAT_VERSION = 2
STATE = "state.json"
TENSORS = "state.safetensors"


class ResumeError(ValueError):
    """A run that cannot go on, or must not be overwritten; says why and what to do."""


@dataclass
class Progress:
    """How far a run is. `step` counts the optimizer steps taken."""

    step: int = 0
    position: int = 0  # windows drawn: the sampler's cursor
    evaluated_step: int | None = None  # the last one after which there was an evaluation
    best_step: int | None = None
    best_val_loss: float | None = None
    elapsed_seconds: float = 0.0  # of steps, before and after every resume
    cpu_seconds: float = 0.0  # of the processors in them, over all processes; without the last step's
    loss_sum: float = 0.0  # of the training losses since the last line of the log
    loss_steps: int = 0
    log_bytes: int = 0  # what the log held at the save; later lines are of work that is done again
    finished: bool = False


def pack(
    config: TrainConfig,
    found: Mapping[str, Any],
    data: Mapping[str, Any],
    progress: Progress,
    tensors: Mapping[str, Tensor],
    generators: Sequence[Mapping[str, Tensor]],
) -> dict[str, bytes]:
    """The files to add to a checkpoint.

    `found` is what the config's "auto" came to, `data` describes the corpus, `tensors` are the live ones by name,
    `generators` the states of torch's generators in each process.
    """
    state = {
        "format_version": FORMAT_VERSION,
        "config": config.as_dict(),
        "found": dict(found),
        "data": dict(data),
        "progress": asdict(progress),
    }
    of_ranks = {f"{name}.{rank}": state for rank, states in enumerate(generators) for name, state in states.items()}
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in {**tensors, **of_ranks}.items()}
    return {STATE: (json.dumps(state, indent=2) + "\n").encode(), TENSORS: save(held)}


@dataclass(frozen=True)
class Saved:
    """A run as it was saved."""

    checkpoint: Checkpoint
    config: TrainConfig
    found: dict[str, Any]
    data: dict[str, Any]
    progress: Progress

    @classmethod
    def read(cls, path: Path) -> Saved:
        """Verify and read all but the tensors.

        Raises:
            CheckpointError: a file is missing or altered.
            ResumeError: the folder is a checkpoint, but not one of a run that can go on, or of another version.
        """
        checkpoint = Checkpoint.read(path)
        try:
            state = json.loads((path / STATE).read_bytes())
        except FileNotFoundError:
            raise ResumeError(f"{path} holds weights but no {STATE}: it cannot be resumed") from None
        if state["format_version"] != FORMAT_VERSION:
            raise ResumeError(
                f"{path / STATE}: format_version is {state['format_version']}, this program reads {FORMAT_VERSION}"
            )
        config, progress = TrainConfig(**state["config"]), Progress(**state["progress"])
        return cls(checkpoint, config, state["found"], state["data"], progress)

    def restore(self, model: GPT, tensors: Mapping[str, Tensor], rank: int) -> None:
        """Write what was saved into `model`, the tensors of the same names, and torch's generators of a process."""
        model.load_state_dict(self.checkpoint.load_model().state_dict())
        held = load((self.checkpoint.path / TENSORS).read_bytes())
        for name, tensor in tensors.items():
            tensor.detach().copy_(held[name])
        torch.set_rng_state(held[f"generator.cpu.{rank}"])
        for kind, module in _accelerators().items():
            if f"generator.{kind}.{rank}" in held:
                module.set_rng_state(held[f"generator.{kind}.{rank}"])


def generator_states() -> dict[str, Tensor]:
    """Of torch's generators in this process."""
    states = {"generator.cpu": torch.get_rng_state()}
    return states | {f"generator.{kind}": module.get_rng_state() for kind, module in _accelerators().items()}


def _accelerators() -> dict[str, Any]:
    """The modules of the accelerators that this machine has."""
    here = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return {kind: getattr(torch, kind) for kind in here if here[kind]}


def refuse_changes(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise ResumeError where `wanted` (some settings) differs from what the run was started with."""
    different = {name: (saved[name], value) for name, value in wanted.items() if saved[name] != value}
    if different:
        listed = "; ".join(f"{name} was {was!r}, now {now!r}" for name, (was, now) in different.items())
        raise ResumeError(f"a resumed run keeps its settings: {listed}. Leave them out, or start another run")
