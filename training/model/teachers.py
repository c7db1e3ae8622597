"""Knowledge distillation (Hinton et al. 2015): a model learns the mean prediction of its teachers.

The mean prediction of several models that differ in their seeds is better than that of each model. Most of this gain
can be taught to a single model (RECIPE.md has figures).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from service.model.checkpoint import WEIGHTS, Checkpoint
from service.model.tokenizer import CharTokenizer
from training.config import ConfigError, TrainConfig
from training.messages import plural
from training.model.device import autocast, training_forward


class Teachers:
    """The mean prediction of the checkpoints in `config.teachers`.

    Raises:
        CheckpointError: a checkpoint cannot be read.
        ConfigError: a checkpoint has another vocabulary than `tokenizer`, or a smaller block_size than `config`.
    """

    def __init__(self, config: TrainConfig, tokenizer: CharTokenizer):
        self.config = config
        checkpoints = [Checkpoint.read(path) for path in config.teachers]
        for checkpoint in checkpoints:
            if checkpoint.tokenizer.characters != tokenizer.characters:
                raise ConfigError(
                    f"teachers must have the run's vocabulary, {plural(tokenizer.vocab_size, 'character')} in their "
                    f"order: {checkpoint.path} has another, of {checkpoint.tokenizer.vocab_size:,}"
                )
            if checkpoint.config.block_size < config.block_size:
                raise ConfigError(
                    f"teachers must have a block_size of at least {config.block_size}: {checkpoint.path} has "
                    f"{checkpoint.config.block_size}"
                )
        self.lineage: list[dict[str, Any]] = [  # for training.json
            {"path": path, "weights_sha256": checkpoint.files[WEIGHTS].sha256}
            for path, checkpoint in zip(config.teachers, checkpoints, strict=True)
        ]
        self.models = [checkpoint.load_model(config.device) for checkpoint in checkpoints]
        self._forwards = [training_forward(model, replace(config, compile=False)) for model in self.models]

    def use_autograd(self) -> None:
        """Predict with GPT.forward. Call this if the fast forward does not compute the same."""
        self._forwards = list(self.models)

    @torch.no_grad()
    def __call__(self, idx: Tensor, *lengths: Tensor) -> Tensor:
        """Return the probabilities of the next character: ids (B, T) -> (B, T, V), float32.

        lengths: the lengths of packed rows, an argument of FusedForward.
        """
        mean = torch.zeros(())
        with autocast(self.config):
            for forward in self._forwards:
                mean = mean + forward(idx, *lengths).float().softmax(-1) / len(self._forwards)
        return mean
