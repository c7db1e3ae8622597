"""Fine-tuning: a run that begins with the weights of a checkpoint, in its shape and its vocabulary.

The vocabulary keeps the checkpoint's order, and characters that the text has not; what it lacks is refused or, on
request, added at its end. So every id of the checkpoint means the same character in the run's own checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from service.model.checkpoint import MANIFEST, WEIGHTS, Checkpoint
from service.model.tokenizer import CharTokenizer
from training.config import SHAPE, ConfigError, TrainConfig

LISTED = 20  # characters that a refusal names


@dataclass(frozen=True)
class Origin:
    """What a run begins with."""

    tokenizer: CharTokenizer  # the run's
    weights: dict[str, Tensor]  # of the run's model, by name
    lineage: dict[str, Any]  # where they come from, for training.json


def shape_of(path: str) -> dict[str, Any]:
    """The settings that the checkpoint at `path` fixes.

    Raises:
        CheckpointError: it cannot be read.
    """
    hyperparameters = Checkpoint.read(path).hyperparameters
    return {name: hyperparameters[name] for name in SHAPE}


def begin_from(config: TrainConfig, characters: Sequence[str]) -> Origin:
    """What a run of `config` on a text of these characters begins with: the checkpoint at `config.init_from`.

    Raises:
        CheckpointError: it cannot be read.
        ConfigError: its shape is not the config's; or it lacks characters, and is not to be extended.
    """
    assert config.init_from is not None
    checkpoint = Checkpoint.read(config.init_from)
    shape = config.model_config(checkpoint.tokenizer.vocab_size)
    differences = [
        f"{name} is {checkpoint.hyperparameters[name]} there, {getattr(shape, name)} was asked for"
        for name in SHAPE
        if checkpoint.hyperparameters[name] != getattr(shape, name)
    ]
    if differences:
        raise ConfigError(
            f"a run from {config.init_from} keeps its shape: {'; '.join(differences)}. "
            "Leave it out, or train without --init-from"
        )
    known = checkpoint.tokenizer
    added = [c for c in characters if c not in known]
    if added and not config.extend_vocabulary:
        listed = ", ".join(f"{c!r} (U+{ord(c):04X})" for c in added[:LISTED])
        more = f" and {len(added) - LISTED:,} more" if len(added) > LISTED else ""
        unused = known.vocab_size - (len(characters) - len(added))
        raise ConfigError(
            f"{config.init_from} lacks {len(added):,} of the text's {len(characters):,} characters: {listed}{more}. "
            f"Take them out of the text, or pass --extend-vocabulary to add them. (It has {unused:,} that the text "
            "has not; those it keeps.)"
        )
    weights = checkpoint.load_model().state_dict()
    if added:
        generator = torch.Generator().manual_seed(config.seed)
        weights |= new_rows(weights, len(added), generator)
    manifest = json.loads((checkpoint.path / MANIFEST).read_bytes())
    about = checkpoint.training
    lineage = {
        "path": config.init_from,
        "manifest_sha256": checkpoint.digest,
        "weights_sha256": manifest["files"][WEIGHTS]["sha256"],
        "step": about.get("step"),
        "data": about.get("data"),
        "added_characters": "".join(added),
        "init_from": about.get("init_from"),  # its own
    }
    return Origin(CharTokenizer(known.characters + added), weights, lineage)


def new_rows(weights: dict[str, Tensor], count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Embedding and head with `count` rows more; the old ones stay.

    A new head row is the mean of the old ones: its logit is the mean logit, below the log of the mean probability,
    so that the old characters lose little. A new embedding row is drawn around the mean, as far from it as the old
    ones are, so that two new characters differ from the start (Hewitt 2021).
    """
    embed, head = weights["embed.weight"], weights["head.weight"]
    std, mean = torch.std_mean(embed, dim=0, correction=0)
    drawn = mean + std * torch.randn(count, embed.size(1), generator=generator)
    return {
        "embed.weight": torch.cat((embed, drawn)),
        "head.weight": torch.cat((head, head.mean(dim=0).expand(count, -1))),
    }


def describe_origin(config: TrainConfig, origin: Origin) -> str:
    """What a run begins with, in a line."""
    added = len(origin.lineage["added_characters"])
    return (
        f"begins with {config.init_from}: {', '.join(f'{name} {getattr(config, name)}' for name in SHAPE[:5])}, "
        f"{origin.tokenizer.vocab_size - added:,} characters" + (f" and {added:,} new ones" if added else "")
    )
