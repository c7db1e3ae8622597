"""The state of a run: weights, optimizers, sampler and progress, its folder and its output. loop.py trains it.

OUT/last            the newest weights and the state to resume from
OUT/best            the weights with the lowest validation loss; serve these
OUT/log.jsonl       one object per line: training losses, evaluations with samples, final losses
OUT/loss.png        the curves
OUT/step-00000500   weights kept with --keep-every
OUT/tensorboard     event files, with --tensorboard
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import select
import shlex
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Self

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from service import release
from service.model.gpt import GPT
from service.model.ngrams import NGRAMS
from training.config import MIN_SCORED, SCORED_SHARE, TrainConfig
from training.fit.origin import Origin
from training.fit.warnings import size_check
from training.measure.losses import BATCH_CHARS, STRETCH_WINDOWS, piece_loss, sampled_scores
from training.messages import Refusal, duration, plural, resume_command, say
from training.model.device import halves, machine, training_forward
from training.model.fused import FusedForward
from training.model.optim import FlatGradients, Optimizers, lr_scale
from training.model.selfcheck import NOT_SERVABLE, first_difference, is_servable
from training.model.teachers import Teachers
from training.run.distributed import World
from training.run.log import RunLog
from training.run.saved import Progress, ResumeError, Saved, pack
from training.run.saving import save_checkpoint
from training.run.speed import flops_per_character
from training.text.batches import record_pieces, window_pieces
from training.text.corpus import Corpus, sampler_of

ESTIMATE_STEPS = 10  # steps timed to estimate the rest of the run
# Signals that end a run after a save. If several arrive, the first of these counts. A closed terminal sends SIGHUP.
STOPPING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class DivergedError(Refusal):
    """The loss, the gradient or a weight is not finite."""


class StorageError(OSError):
    """The run's folder cannot be written; the message says what was saved and how to resume."""


class InterruptedRun(Exception):
    """A signal ended the run after a save."""

    def __init__(self, number: signal.Signals, message: str):
        super().__init__(f"{number.name}: {message}")
        self.number = number


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


class RunState:
    """The state of one run.

    Every process has a replica. Each takes a different part of a batch, and only the main process writes files.
    `config` has the settings as requested, `resolved` the values that replace "auto".
    """

    def __init__(
        self,
        config: TrainConfig,
        resolved: dict[str, Any],
        corpus: Corpus,
        out: Path,
        world: World,
        origin: Origin | None = None,
    ):
        self.requested, self.resolved, self.corpus, self.out, self.world = config, resolved, corpus, out, world
        self.config = config = replace(config, **resolved)
        torch.set_num_threads(config.threads)
        self.device = torch.device(config.device)
        self.sampler = sampler_of(corpus, config.block_size, config.seed)
        self.rows = self.sampler.rows(config.tokens_per_step)  # windows or records in a step, over all processes
        self.teachers = Teachers(config, corpus.tokenizer) if config.teachers else None
        torch.manual_seed(config.seed)
        self.model = GPT(config.model_config(corpus.tokenizer.vocab_size))
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
        self.run_log: RunLog | None = None  # the log, open in the main process while it trains
        self.received: list[int] = []  # numbers of the signals received
        self.scored: dict[str, Any] = {}  # characters and standard error of the final losses, for training.json
        self.step_seconds: deque[float] = deque(maxlen=ESTIMATE_STEPS + 1)  # seconds of each of the last steps
        self.stopped: signal.Signals | None = None
        self.save_is_due = False
        self.saved_at = time.monotonic()
        self.cpu_seconds = 0.0  # CPU seconds of this process's last step

    @classmethod
    def resume(cls, saved: Saved, corpus: Corpus, out: Path, world: World) -> Self:
        """Return the saved run with its state restored.

        Raises:
            ResumeError: a teacher is not the one that the run began with.
        """
        run = cls(saved.config, saved.resolved, corpus, out, world)
        run.progress = replace(saved.progress, finished=False)
        run.lineage = saved.checkpoint.training.get("init_from")
        run.sampler.position = saved.progress.position
        teachers = saved.checkpoint.training.get("teachers")
        if run.teachers and run.teachers.lineage != teachers:
            raise ResumeError(f"the teachers of this run have changed: expected {teachers}, got {run.teachers.lineage}")
        saved.restore(run.model, run.optimizers.tensors())
        return run

    def introduce(self, console: Console) -> None:
        """Print the sizes of the text and the run, and before the first step the warnings of `size_check`."""
        config, progress, corpus = self.config, self.progress, self.corpus
        steps = config.steps - progress.step
        epochs = f"{steps * self.rows / self.sampler.per_epoch:.3g}"
        in_a_step = plural(self.rows, "record") if config.records else plural(config.tokens_per_step, "character")
        say(
            console,
            f"{corpus.name}: {plural(len(corpus.ids), 'character')}, {plural(corpus.symbols, 'symbol')}; "
            f"{self.model.config.num_parameters:,} parameters; {config.dtype} on {config.device}, "
            f"{plural(self.world.size, 'process')} of {plural(config.threads, 'thread')}; "
            f"{plural(steps, 'step')} of {in_a_step}, "
            f"{epochs} epoch{'' if epochs == '1' else 's'}",
        )
        if progress.step == 0 and self.world.is_main:
            for line in size_check(corpus, config, self.model.config.num_parameters):
                say(console, line)

    def check_forward(self, console: Console) -> None:
        """Replace the fast forward by autograd, and print a line, if it does not compute GPT.forward."""
        config, model, difference = self.config, self.model.config, None
        if isinstance(self.forward, FusedForward):
            rows = min(config.batch_size, max(1, config.tokens_per_step // config.block_size // self.world.size))
            difference = first_difference(model, self.forward.dtype, rows)
        # This call is also a barrier, because the first save replaces files that every process reads.
        if self.world.all_reduce_(torch.tensor([float(difference is not None)])).item():
            self.forward = self.model
            if self.teachers:
                self.teachers.use_autograd()
        if difference:
            say(console, f"gpt.py has changed: {difference}")
        if self.world.is_main and not is_servable(model):
            say(console, NOT_SERVABLE)

    def estimate(self, step_seconds: float) -> str:
        """Estimate how long the rest of the run takes. Only the main process calls this.

        step_seconds: the time of a step now. Measures an evaluation and a report on a part of the validation split.
        The estimate allows for the growth of the window, which lengthens a step. It leaves out baselines and samples.
        """
        config, step = self.config, self.progress.step
        seconds_each = self.evaluation_seconds()
        self.model.eval()
        started = time.monotonic()
        count = max(BATCH_CHARS, 2 * STRETCH_WINDOWS * config.block_size)
        reported = sampled_scores(self.model, self.corpus.val, count, self.corpus.records is not None)
        seconds_scored = (time.monotonic() - started) / reported.characters
        self.model.train()
        val = len(self.corpus.val)
        scored = min(val, self.scored_characters(config.steps * config.tokens_per_step))
        evaluated = min(config.eval_chars or val, val) * -(-(config.steps - step) // config.eval_every)
        growth = self.flops_per_character(self.mean_window) / self.flops_per_character(config.window_at(step))
        training = (config.steps - step) * step_seconds * growth + evaluated * seconds_each / self.world.size
        scoring = scored * seconds_scored
        more = f" of {val:,}; --score-chars all scores the rest" if scored < val else ""
        return (
            f"about {duration(training + scoring)} to the end: {duration(training)} of training, {duration(scoring)} "
            f"of scoring {plural(scored, 'validation character')}{more}"
        )

    def evaluation_seconds(self) -> float:
        """Measure on a part of the validation split how long the evaluation of a character takes."""
        starts, lengths = (part[: max(1, BATCH_CHARS // self.config.block_size)] for part in self.val_pieces)
        self.model.eval()
        started = time.monotonic()
        piece_loss(self.model, self.corpus.val, starts, lengths)
        seconds = time.monotonic() - started
        self.model.train()
        return seconds / int(lengths.sum())

    @property
    def scorings(self) -> int:
        """How often the final report scores each character: 2, in windows and streamed, or 1 if these are the same."""
        is_same = self.corpus.records is not None and self.val_pieces[1].max() < self.config.block_size
        return 1 if is_same else 2

    def scored_characters(self, trained: int) -> int:
        """Return how many characters of the validation split the final report scores after training on `trained`.

        The number may exceed the length of the split.
        """
        if self.config.score_chars == "all":
            return len(self.corpus.val)
        if self.config.score_chars == "auto":
            return max(MIN_SCORED, int(trained * SCORED_SHARE) // self.scorings)
        return int(self.config.score_chars)

    @functools.cached_property
    def val_pieces(self) -> tuple[np.ndarray, np.ndarray]:
        pieces_of = window_pieces if self.corpus.records is None else record_pieces
        return pieces_of(self.corpus.val, self.config.block_size)

    @property
    def mean_window(self) -> float:
        return sum(self.config.window_at(self.config.steps * i // 100) for i in range(100)) / 100

    def flops_per_character(self, window: float) -> float:
        """Return the FLOPs to train on a character, the teachers' forwards in each step included.

        window: the number of characters in a window.
        """
        teachers = self.teachers.models if self.teachers else []
        return flops_per_character(self.model, window) + sum(flops_per_character(each, window) / 3 for each in teachers)

    def to_device(self, values: np.ndarray | Tensor) -> Tensor:
        """Return the values on the run's device. A copy to a GPU, from pinned memory, runs while the GPU computes."""
        tensor = torch.as_tensor(values)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def save(self) -> None:
        """Write OUT/last with the state to resume from.

        Raises:
            DivergedError: a weight is not finite. Nothing was written.
        """
        if not all(bool(weight.isfinite().all()) for weight in self.model.parameters()):
            raise self.diverged(self.progress.step - 1, "weights are not finite")
        self.saved_at = time.monotonic()
        if not self.world.is_main:
            return
        assert self.run_log
        self.progress.log_bytes = self.run_log.sync()
        corpus = self.corpus.describe()
        tensors, processes = self.optimizers.tensors(), self.world.size
        extra = pack(self.requested, self.resolved, corpus, self.progress, tensors, processes)
        description = self.describe({"best_val": self.progress.best_val_loss}, self.progress)
        save_checkpoint(self.out / "last", self.model, self.corpus.tokenizer, description, extra)

    def save_served(self, name: str, model: GPT, losses: dict[str, float], progress: Progress | None = None) -> None:
        """Write weights to serve. `progress`: the run's progress at these weights, by default the current one."""
        if not self.world.is_main:
            return
        description = self.describe(losses, progress or self.progress)
        extra, dtype = {NGRAMS: self.corpus.ngrams}, self.config.weights
        save_checkpoint(self.out / name, model, self.corpus.tokenizer, description, extra, dtype)

    def describe(self, losses: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """Return the contents of training.json."""
        config = self.config
        return {
            "step": progress.step,
            "characters_seen": progress.characters,
            "training_seconds": round(progress.elapsed_seconds, 3),
            "training_cpu_seconds": round(progress.cpu_seconds, 3),
            "losses": losses,  # nats per character
            **self.scored,
            "parameters": self.model.config.num_parameters,
            "data": self.corpus.describe(),
            "example_prompt": self.corpus.example_prompt,
            "recipe": self.requested.as_dict(),
            "seed": config.seed,
            **({"init_from": self.lineage} if self.lineage else {}),
            **({"teachers": self.teachers.lineage} if self.teachers else {}),
            "versions": {name: release(name) for name in ("chargpt", "torch", "numpy", "safetensors")}
            | {"python": platform.python_version()},
            "machine": {**machine(self.device), **self.resolved, "processes": self.world.size},
            "command": shlex.join(["python", "-m", "training", *sys.argv[1:]]),
        }

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Keep the log open, and turn OSError into StorageError."""
        with self.storage_errors(), contextlib.ExitStack() as stack:
            if self.world.is_main:
                self.run_log = stack.enter_context(RunLog(self.out, self.progress, tensorboard=self.config.tensorboard))
            yield

    @contextlib.contextmanager
    def storage_errors(self) -> Iterator[None]:
        """Turn OSError into StorageError."""
        try:
            yield
        except OSError as error:
            if (last := self.out / "last").is_dir():
                saved = Saved.read(last).config.as_dict()
                changes = {name: value for name, value in self.requested.as_dict().items() if value != saved[name]}
                resuming = resume_command(self.out, self.world.size, changes)
                hint = f"The last good checkpoint is {last}; once the problem is solved, resume with: {resuming}"
            else:
                hint = "Nothing has been saved yet; once the problem is solved, run the same command again"
                with contextlib.suppress(OSError):
                    (self.out / "log.jsonl").unlink()  # a new run refuses a folder that has a log
            raise StorageError(
                f"cannot write {error.filename or self.out}: {error.strerror or error}. {hint}"
            ) from error

    def interrupted(self, number: int) -> InterruptedRun:
        """Return the error for a signal that ended the run after a save."""
        saved = f"saved at step {self.progress.step} of {self.config.steps}"
        resuming = resume_command(self.out, self.world.size, {})
        return InterruptedRun(signal.Signals(number), f"{saved}; resume with: {resuming}")

    def diverged(self, step: int, what: str) -> DivergedError:
        config, scale = self.config, lr_scale(step, self.config)
        return DivergedError(
            f"diverged at step {step + 1}: {what}, at muon_lr {config.muon_lr * scale:.3g} and adamw_lr "
            f"{config.adamw_lr * scale:.3g}. The last good checkpoint is {self.out / 'last'}. Try lower learning rates"
            + (" or --dtype float32" if config.dtype == "bfloat16" else "")
        )

    def log(self, record: dict[str, Any]) -> None:
        if self.run_log:
            self.run_log.add(record)

    def log_losses(self) -> None:
        """Log the mean training loss since the previous call."""
        progress, config = self.progress, self.config
        scale = lr_scale(progress.step - 1, config)
        self.log({
            "event": "train",
            "step": progress.step,
            "train_loss": progress.loss_sum / progress.loss_steps,
            "muon_lr": config.muon_lr * scale,
            "adamw_lr": config.adamw_lr * scale,
            "characters_per_second": round(progress.characters / progress.elapsed_seconds),
        })  # fmt: skip
        progress.loss_sum, progress.loss_steps = 0.0, 0


@contextlib.contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Append the number of a signal in STOPPING to the list that is yielded. A second signal kills the process.

    SIGHUP stays ignored if the process was started so, by nohup.
    """
    received: list[int] = []

    def record(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if number == signal.SIGHUP:
            leave_terminal()
        for each in previous:
            signal.signal(each, signal.SIG_DFL)

    caught = [number for number in STOPPING if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, record) for number in caught}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def leave_terminal() -> None:
    """Send what is printed to /dev/null if the terminal is closed, where each write would fail."""
    for descriptor in (1, 2):
        polled = select.poll()
        polled.register(descriptor, 0)
        if polled.poll(0):  # POLLHUP or POLLERR
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
