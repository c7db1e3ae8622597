"""A run: its model, optimizers, sampler and progress. loop.py trains it."""

from __future__ import annotations

import functools
import signal
from collections import deque
from dataclasses import replace
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from service.model.gpt import GPT
from training.config import ConfigError
from training.fit.origin import Origin
from training.fit.settings import Settings
from training.measure.counts import Predictions
from training.messages import plural
from training.model.device import halves, training_forward
from training.model.fused import FusedForward
from training.model.optim import FlatGradients, Optimizers, lr_scale
from training.model.selfcheck import refuse_other_weights
from training.model.teachers import Teachers
from training.run.distributed import World
from training.run.errors import DivergedError, ResumeError
from training.run.saved import Progress, Saved
from training.run.signals import STOPPING
from training.text.batches import IGNORED, Part, micro_batches, packed, record_pieces, window_pieces
from training.text.corpus import Corpus, sampler_of

ESTIMATE_STEPS = 10  # steps timed to estimate the rest of the run


@torch.no_grad()
def init_weights(model: GPT) -> None:
    """Draw the embedding with std 1, the head with 0.001 and hidden matrices with 1/√C. Set output projections to 0.

    Each block therefore starts as the identity.
    """
    nn.init.normal_(model.embed.weight)
    nn.init.normal_(model.head.weight, std=0.001)
    for name, weight in model.blocks.named_parameters():
        if name.endswith("proj.weight"):
            nn.init.zeros_(weight)
        elif weight.ndim == 2:
            nn.init.normal_(weight, std=model.config.n_embd**-0.5)


class Run:
    """A model in training, its optimizers, the sampler of its text, and how far they are.

    Every process has a replica, and each takes its own rows of every batch.

    Raises:
        ConfigError: the model's shape is impossible, or a teacher does not fit.
        DataError: the text is too short for block_size.
        Refusal: a checkpoint cannot hold the model's weights.
    """

    def __init__(self, settings: Settings, corpus: Corpus, world: World, origin: Origin | None = None):
        self.settings, self.corpus, self.world = settings, corpus, world
        self.config = config = settings.config
        torch.set_num_threads(config.threads)
        self.device = torch.device(config.device)
        self.sampler = sampler_of(corpus, config.block_size, config.seed)
        self.rows = self.sampler.rows(config.tokens_per_step)  # windows or records in a step, over all processes
        self.teachers = Teachers(config, corpus.tokenizer) if config.teachers else None
        self.predictions = Predictions(corpus.counts) if config.counted else None
        if self.predictions and not self.predictions.lengths:
            raise ConfigError(
                f"counted must be 0 for a vocabulary of {plural(corpus.tokenizer.vocab_size, 'symbol')}: the table of "
                f"predictions has room for no contexts, got {config.counted:g}"
            )
        torch.manual_seed(config.seed)
        self.model = GPT(config.model_config(corpus.tokenizer.vocab_size))
        refuse_other_weights(self.model)
        init_weights(self.model)
        self.model.to(self.device)
        self.forward = training_forward(self.model, config)
        self.gradients = FlatGradients(self.model, extra=3 + len(STOPPING))
        self.lineage = origin.lineage if origin else None
        if origin:
            self.model.load_state_dict(origin.weights)
        self.halves = halves(self.model, config, self.rows // world.size)
        self.optimizers = Optimizers(self.model, config, self.halves.map if self.halves else map)
        self.progress = Progress()
        self.received: list[int] = []  # numbers of the signals received
        self.stopped: signal.Signals | None = None  # the signal that a process has received, as all processes know it
        self.save_is_due = False
        self.step_seconds: deque[float] = deque(maxlen=ESTIMATE_STEPS + 1)  # seconds of each of the last steps
        self.cpu_seconds = 0.0  # CPU seconds of this process's last step

    @classmethod
    def resume(cls, saved: Saved, settings: Settings, corpus: Corpus, world: World) -> Self:
        """Return the saved run with its state restored.

        Raises:
            ResumeError: a teacher is not the one that the run began with.
            CheckpointError: a file is altered, or gpt.py is not the one that was trained.
        """
        run = cls(settings, corpus, world)
        run.progress = replace(saved.progress, finished=False)
        run.lineage = saved.checkpoint.training.get("init_from")
        run.sampler.position = saved.progress.position
        teachers = saved.checkpoint.training.get("teachers")
        if run.teachers and run.teachers.lineage != teachers:
            raise ResumeError(f"the teachers of this run have changed: expected {teachers}, got {run.teachers.lineage}")
        saved.restore(run.model, run.optimizers.tensors())
        return run

    def next_parts(self) -> tuple[list[Part], int]:
        """Return this process's micro-batches of the next batch, and the number of targets in the whole batch."""
        config, world = self.config, self.world
        idx, targets = self.sampler.next_batch(self.rows)
        if not config.records:
            window = config.window_at(self.progress.step)
            idx, targets = idx.reshape(-1, window), targets.reshape(-1, window)
        count, own = int((targets != IGNORED).sum()), slice(world.rank, None, world.size)
        number = config.accumulate * (2 if self.halves else 1)
        if config.records and isinstance(self.forward, FusedForward):
            return packed(idx[own], targets[own], number), count
        return list(micro_batches(idx[own], targets[own], config.tokens_per_step // (world.size * number))), count

    def to_device(self, values: np.ndarray | Tensor) -> Tensor:
        """Return the values on the run's device. A copy to a GPU, from pinned memory, runs while the GPU computes."""
        tensor = torch.as_tensor(values)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    @functools.cached_property
    def val_pieces(self) -> tuple[np.ndarray, np.ndarray]:
        pieces_of = window_pieces if self.corpus.records is None else record_pieces
        return pieces_of(self.corpus.val, self.config.block_size)

    def diverged(self, step: int, what: str) -> DivergedError:
        config, scale = self.config, lr_scale(step, self.config)
        return DivergedError(
            f"diverged at step {step + 1}: {what}, at muon_lr {config.muon_lr * scale:.3g} and adamw_lr "
            f"{config.adamw_lr * scale:.3g}"
        )
