"""Find a checkpoint, load its model, and open a model to sample."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from service.engine.engine import Engine
from service.local import Model
from service.model.checkpoint import MANIFEST, Checkpoint
from service.model.counts import Counts
from service.model.gpt import GPT
from service.text.model import TextModel
from service.text.requests import MAX_ID
from training.config import ConfigError
from training.model.device import pick_device
from training.model.selfcheck import checked_runner

STEP_SECONDS = 0.02  # of the engine; longer than a service's, as nobody waits for a first character


def find_checkpoint(path: Path | str) -> Path:
    """Return the checkpoint at `path`. If `path` is a run's folder, return its best checkpoint and print a line.

    Raises:
        ConfigError: the run's folder has a `last` but no `best` yet.
    """
    path = Path(path)
    if (path / MANIFEST).is_file():
        return path
    if (path / "best" / MANIFEST).is_file():
        print(f"{path} is a run's folder: taking its best, {path / 'best'}", file=sys.stderr)
        return path / "best"
    if (path / "last" / MANIFEST).is_file():
        raise ConfigError(
            f"{path} is the folder of a run that has no best yet, as it was not evaluated; its newest weights are "
            f"{path / 'last'}"
        )
    return path


def load_model(args: argparse.Namespace) -> tuple[Checkpoint, GPT]:
    """Return the checkpoint of --checkpoint and its model on --device. Set torch's threads to --threads.

    Raises:
        ConfigError: --threads is out of bounds, or --device is not available.
        CheckpointError: the checkpoint cannot be read, or gpt.py is not the one that trained it.
    """
    if not 0 <= args.threads <= 4096:
        raise ConfigError(f"--threads must be in [0, 4096], got {args.threads}")
    if args.threads:
        torch.set_num_threads(args.threads)
    checkpoint = Checkpoint.read(find_checkpoint(args.checkpoint))
    return checkpoint, checkpoint.load_model(pick_device(args.device))


def open_model(model: GPT, text: TextModel, slots: int, device: str = "cpu", counts: Counts | None = None) -> Model:
    """Return a model that samples and scores texts as the service does. It has its own copy of the weights."""
    runner = checked_runner(model, counts, slots=slots, threads=torch.get_num_threads(), device=device)
    return Model(text, Engine(runner, max_waiting=MAX_ID, step_seconds=STEP_SECONDS))
