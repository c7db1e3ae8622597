"""The training loop, `Run.train`: steps, evaluations, saves, signals, the final report.

    OUT/last            the newest weights and the state to resume from
    OUT/best            the weights with the lowest validation loss; serve these
    OUT/log.jsonl       one object per line: training losses, evaluations with samples, final losses
    OUT/loss.png        the curves
    OUT/step-00000500   weights kept with --keep-every
    OUT/tensorboard     event files, with --tensorboard

A run that is killed at any moment and resumed on the same CPU ends with the same bytes as an uninterrupted one; a GPU
continues from the same state, but some of torch's sums there have no fixed order.
"""

from __future__ import annotations

import contextlib
import functools
import math
import platform
import shlex
import signal
import statistics
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from service import release
from service.model.checkpoint import Checkpoint
from service.model.gpt import GPT
from service.model.ngrams import NGRAMS
from service.model.params import SamplingParams
from training.check import size_check
from training.config import TrainConfig
from training.data import (
    IGNORED,
    Corpus,
    Part,
    WindowSampler,
    micro_batches,
    record_pieces,
    sampler_of,
    two_halves,
    window_pieces,
)
from training.device import autocast, halves, machine, training_forward
from training.display import ProgressView, draw_curves, print_report, show_forwards, warn_if_vocabulary_is_large
from training.distill import Teachers
from training.distributed import World
from training.evaluate import BATCH_CHARS, baselines, piece_loss, sampled_scores
from training.finetune import Origin
from training.fused import FusedForward
from training.log import RunLog
from training.messages import Refusal, duration, plural, resume_command, say
from training.optim import FlatGradients, Optimizers, lr_scale
from training.sample import beginning_of_record, sample_texts
from training.saving import save_checkpoint
from training.selfcheck import NOT_SERVABLE, first_difference, is_servable
from training.speed import flops_per_character, matmul_peak
from training.state import Progress, ResumeError, Saved, pack

SAMPLED_RECORDS = 5  # shown at each evaluation
# Of as many characters as were trained on, scored in all without being asked: they take less than a tenth of the time.
SCORED_SHARE, MIN_SCORED = 1 / 8, 20_000
ESTIMATE_STEPS = 10  # by which the rest of the run is estimated
TABLE_BYTES = 1 << 30  # of what teachers predict for the whole text


class DivergedError(Refusal):
    """The loss, the gradient or a weight is not finite."""


class StorageError(OSError):
    """The run's folder cannot be written; the message says what was saved and how to resume."""


class InterruptedRun(Exception):
    """A signal ended the run, after a save."""

    def __init__(self, number: signal.Signals, message: str):
        super().__init__(f"{number.name}: {message}")
        self.number = number


@torch.no_grad()
def init_weights(model: GPT) -> None:
    """Embedding of std 1, hidden matrices of std 1/√C, output projections 0: each block starts as the identity."""
    nn.init.normal_(model.embed.weight)
    nn.init.normal_(model.head.weight, std=0.001)
    for name, weight in model.blocks.named_parameters():
        if name.endswith("proj.weight"):
            nn.init.zeros_(weight)
        elif weight.ndim == 2:
            nn.init.normal_(weight, std=model.config.n_embd**-0.5)


class Run:
    """The state of one run: weights, optimizers, sampler, progress, and its folder.

    Every process has a replica; they differ in the windows they take from a batch, and only the main process writes.
    `config` is as requested, `resolved` has the settings that replace "auto".
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
        self.rows = self.sampler.rows(config.tokens_per_step)  # of a step
        self.teachers = Teachers(config, corpus.tokenizer) if config.teachers else None
        self.table: Tensor | None = None  # what they predict at each place of the text
        torch.manual_seed(config.seed)
        self.model = GPT(config.model_config(corpus.tokenizer.vocab_size))
        init_weights(self.model)
        self.model.to(self.device)
        self.forward = training_forward(self.model, config)
        self.gradients = FlatGradients(self.model, extra=5)
        self.lineage = origin.lineage if origin else None
        if origin:
            self.model.load_state_dict(origin.weights)
        self.halves = halves(config, self.rows // world.size)
        self.optimizers = Optimizers(self.model, config, self.halves.map if self.halves else map)
        self.progress = Progress()
        self.run_log: RunLog | None = None  # of the main process, while it trains
        self.scored: dict[str, Any] = {}  # characters and standard error of the final losses, for training.json
        self.saved_at = time.monotonic()
        self.cpu_seconds = 0.0  # this process's last step

    @classmethod
    def resume(cls, saved: Saved, corpus: Corpus, out: Path, world: World) -> Run:
        """Raises ResumeError if a teacher is not the one that the run began with."""
        run = cls(saved.config, saved.resolved, corpus, out, world)
        run.progress = replace(saved.progress, finished=False)
        run.lineage = saved.checkpoint.training.get("init_from")
        run.sampler.position = saved.progress.position
        teachers = saved.checkpoint.training.get("teachers")
        if run.teachers and run.teachers.lineage != teachers:
            raise ResumeError(f"the teachers of this run have changed: expected {teachers}, got {run.teachers.lineage}")
        saved.restore(run.model, run.optimizers.tensors())
        return run

    def train(self, console: Console) -> None:
        """Train from the current step to the end.

        Raises:
            DivergedError: the loss or the gradient is not finite; the last save is from before.
            StorageError: the folder cannot be written; the last save is intact.
            InterruptedRun: SIGINT or SIGTERM was received; the run has been saved.
        """
        config, progress = self.config, self.progress
        console = console if self.world.is_main else Console(quiet=True)
        corpus, steps = self.corpus, config.steps - progress.step
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
            for line in size_check(self.corpus, self.model.config.num_parameters, bool(self.teachers)):
                say(console, line)
        warn_if_vocabulary_is_large(console, config, self.model.config.vocab_size, self.model.config.num_parameters)
        self.check_forward(console)
        view = ProgressView(console, config)
        with self.storage_errors(), contextlib.ExitStack() as stack, catch_signals() as self.received, view:
            if self.world.is_main:
                self.run_log = stack.enter_context(RunLog(self.out, progress, tensorboard=config.tensorboard))
            self.save()
            if self.teachers and self.table_pays:
                self.table = self.table_of(self.teachers, console)
            first_seconds: list[float] = []  # of the first steps
            while True:
                if self.evaluation_is_due:
                    self.save()  # a failing evaluation must not cost any steps
                    view.show_evaluation(progress, self.evaluate())
                if progress.step and config.keep_every and progress.step % config.keep_every == 0:
                    self.save_served(f"step-{progress.step:08}", self.model, {})
                if progress.step == config.steps or progress.is_out_of_patience(config):
                    break
                started = time.monotonic()
                loss = self.step()
                seconds = time.monotonic() - started
                progress.elapsed_seconds += seconds
                view.show_step(progress, loss)
                if len(first_seconds) < ESTIMATE_STEPS:
                    first_seconds.append(seconds)
                    if len(first_seconds) == ESTIMATE_STEPS and self.world.is_main:
                        say(console, self.estimate(statistics.median(first_seconds)))
                if progress.step % config.log_every == 0:
                    self.log_losses()
                if self.stopped or self.save_is_due:
                    self.save()
                if self.stopped:
                    if self.world.is_main:
                        draw_curves(self.out)
                    raise self.interrupted(self.stopped)
            self.finish(console)

    def check_forward(self, console: Console) -> None:
        """Go through autograd where the fast forward does not compute GPT.forward; a line says so."""
        config, model, difference = self.config, self.model.config, None
        if isinstance(self.forward, FusedForward):
            rows = min(config.batch_size, max(1, config.tokens_per_step // config.block_size // self.world.size))
            difference = first_difference(model, self.forward.dtype, rows)
        # Also a barrier: the first save replaces files that every process reads.
        if self.world.all_reduce_(torch.tensor([float(difference is not None)])).item():
            self.forward = self.model
            if self.teachers:
                self.teachers.use_autograd()
        if difference:
            say(console, f"gpt.py has changed: {difference}")
        if self.world.is_main and not is_servable(model):
            say(console, NOT_SERVABLE)

    def interrupted(self, number: int) -> InterruptedRun:
        """By a signal, after a save."""
        saved = f"saved at step {self.progress.step} of {self.config.steps}"
        resuming = resume_command(self.out, self.world.size, {})
        return InterruptedRun(signal.Signals(number), f"{saved}; resume with: {resuming}")

    @property
    def table_pays(self) -> bool:
        """Teachers would see each character more than twice, and their predictions fit in memory."""
        if self.config.records or self.world.size > 1 or self.progress.step == self.config.steps:
            return False
        size = 2 * len(self.corpus.train) * self.model.config.vocab_size
        is_repeated = self.config.steps * self.rows > 2 * self.sampler.per_epoch
        return is_repeated and size <= TABLE_BYTES

    def table_of(self, teachers: Teachers, console: Console) -> Tensor:
        train = self.corpus.train
        with show_forwards(console, "what the teachers predict", len(train) * len(teachers.models)) as advance:

            def advance_or_stop(count: int) -> None:
                advance(count)
                if self.received:
                    raise self.interrupted(self.received[0])

            return teachers.table(train, advance_or_stop)

    def estimate(self, step_seconds: float) -> str:
        """How long the rest takes, steps by the seconds of one now, scoring by those of a forward; of the main process.

        The window grows, and with it a step's time; baselines and samples are not counted.
        """
        config, step = self.config, self.progress.step
        starts, lengths = (part[: max(1, BATCH_CHARS // config.block_size)] for part in self.val_pieces)
        started = time.monotonic()
        self.model.eval()
        piece_loss(self.model, self.corpus.val, starts, lengths)
        self.model.train()
        seconds_each = (time.monotonic() - started) / int(lengths.sum())
        val = len(self.corpus.val)
        scored = min(val, self.scored_characters(config.steps * config.tokens_per_step))
        evaluated = min(config.eval_chars or val, val) * -(-(config.steps - step) // config.eval_every)
        growth = self.flops_per_character(self.mean_window) / self.flops_per_character(config.window_at(step))
        training = (config.steps - step) * step_seconds * growth + evaluated * seconds_each / self.world.size
        scoring = self.scorings * scored * seconds_each
        more = f" of {val:,}; --score-chars all scores the rest" if scored < val else ""
        return (
            f"about {duration(training + scoring)} to the end: {duration(training)} of training, {duration(scoring)} "
            f"of scoring {plural(scored, 'validation character')}{more}"
        )

    @property
    def scorings(self) -> int:
        """How often the final report scores a character: in windows and streamed, unless these are the same."""
        is_same = self.corpus.records is not None and self.val_pieces[1].max() < self.config.block_size
        return 1 if is_same else 2

    def scored_characters(self, trained: int) -> int:
        """Of the validation split, by the final report, after so many characters of training."""
        if self.config.score_chars == "all":
            return len(self.corpus.val)
        if self.config.score_chars == "auto":
            return max(MIN_SCORED, int(trained * SCORED_SHARE) // self.scorings)
        return int(self.config.score_chars)

    @property
    def evaluation_is_due(self) -> bool:
        step, at_end = self.progress.step, self.progress.step == self.config.steps
        is_regular = step % self.config.eval_every == 0 and (step > 0 or self.lineage is not None)
        return step != self.progress.evaluated_step and (is_regular or at_end)

    def step(self) -> float:
        """Take one optimizer step and return the loss before it.

        The gradients' all-reduce also shares signals and due saves, so that all processes act on them at the same
        step.
        """
        started = time.process_time()
        config, corpus, progress, world = self.config, self.corpus, self.progress, self.world
        flat = self.gradients
        flat.all.zero_()
        if config.dropout:  # of seed, step and process alone, so that a resumed run goes on with the same
            torch.manual_seed(zlib.crc32(f"{config.seed} {progress.step} {world.rank}".encode()))
        if self.table is None:
            batch = self.sampler.next_batch(self.rows)
        else:
            assert isinstance(self.sampler, WindowSampler)
            places = self.sampler.next_places(self.rows)
            batch = places, corpus.train[places + 1].astype(np.int64)
        if not config.records:
            window = config.window_at(progress.step)
            batch = batch[0].reshape(-1, window), batch[1].reshape(-1, window)
        count = int((batch[1] != IGNORED).sum())  # targets of all parts

        def learn(parts: list[Part]) -> Tensor:
            total = torch.zeros((), device=self.device)
            for inputs, targets in parts:
                expected = None
                if self.table is not None:
                    expected = self.to_device(self.table[torch.from_numpy(inputs)])
                    inputs = corpus.train[inputs].astype(np.int64)
                total = total + self.loss(self.to_device(inputs), self.to_device(targets), expected) / count
            total.backward()
            return total.detach()

        cells = config.tokens_per_step // (world.size * config.accumulate * (2 if self.halves else 1))  # at once
        own = slice(world.rank, None, world.size)
        parts = micro_batches(batch[0][own], batch[1][own], cells)
        if self.halves:
            losses = self.halves.map(learn, two_halves(parts))
        else:
            losses = map(learn, ([part] for part in parts))
        for loss in losses:
            flat.extra[0] += loss
        save_is_due = time.monotonic() - self.saved_at > config.save_seconds
        signals = signal.SIGINT in self.received, signal.SIGTERM in self.received
        flat.extra[1:] = self.to_device(np.array([self.cpu_seconds, *signals, save_is_due], dtype=np.float32))
        world.all_reduce_(flat.all)
        norm = flat.clip_(config.grad_clip)
        values = torch.cat((flat.extra, norm[None])).tolist()  # the only device synchronization of a step
        value, cpu_seconds, interrupted, terminated, save_is_due, norm_value = values
        if not (math.isfinite(value) and math.isfinite(norm_value)):
            raise self.diverged(progress.step, f"loss {value}, gradient norm {norm_value}")
        self.stopped = signal.SIGTERM if terminated else signal.SIGINT if interrupted else None
        self.save_is_due = bool(save_is_due)
        self.optimizers.step(progress.step, progress.position / self.sampler.per_epoch)
        progress.step += 1
        progress.characters += count
        progress.position = self.sampler.position
        progress.loss_sum += value
        progress.loss_steps += 1
        progress.interval_loss_sum += value
        progress.interval_steps += 1
        progress.cpu_seconds += cpu_seconds
        self.cpu_seconds = time.process_time() - started
        return value

    def to_device(self, values: np.ndarray | Tensor) -> Tensor:
        """Copied beside the device's work, from pinned memory, where that is a GPU."""
        tensor = torch.as_tensor(values)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def diverged(self, step: int, what: str) -> DivergedError:
        config, scale = self.config, lr_scale(step, self.config)
        return DivergedError(
            f"diverged at step {step + 1}: {what}, at muon_lr {config.muon_lr * scale:.3g} and adamw_lr "
            f"{config.adamw_lr * scale:.3g}. The last good checkpoint is {self.out / 'last'}. Try lower learning rates"
            + (" or --dtype float32" if config.dtype == "bfloat16" else "")
        )

    def loss(self, idx: Tensor, targets: Tensor, expected: Tensor | None = None) -> Tensor:
        """Summed loss of idx (B, T) against targets (B, T), which may be IGNORED, or against the teachers there.

        expected: what these predict, (B, T, V), if it is known.
        """
        with autocast(self.config):
            logits = self.forward(idx)  # (B, T, V)
        if self.teachers:
            if expected is None:
                expected = self.teachers(idx) * (targets != IGNORED)[..., None]
            return F.cross_entropy(logits.float().flatten(0, 1), expected.float().flatten(0, 1), reduction="sum")
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")

    def evaluate(self) -> dict[str, Any]:
        """Measure the validation loss, save the weights if they are the best so far, and return the logged record."""
        progress, model = self.progress, self.model
        model.eval()
        val_loss = self.validation_loss(model)
        if not math.isfinite(val_loss):
            raise self.diverged(progress.step - 1, f"validation loss {val_loss}")
        progress.evaluated_step = progress.step
        record = {"event": "evaluation", "step": progress.step, "val_loss": val_loss}
        if steps := progress.interval_steps:
            record |= {"mean_train_loss": progress.interval_loss_sum / steps, "mean_of_steps": steps}
            progress.interval_loss_sum, progress.interval_steps = 0.0, 0
        if self.config.sample_chars and self.world.is_main:
            tokenizer = self.corpus.tokenizer
            prompt = tokenizer.encode("\n") if "\n" in tokenizer else [int(self.corpus.train[0])]
            count, stop = (SAMPLED_RECORDS, (tuple(prompt),)) if self.config.records else (1, ())
            begins = beginning_of_record(tokenizer) if self.config.records else None
            params = SamplingParams(seed=self.config.seed)
            found = sample_texts(model, prompt, count, self.config.sample_chars, params, stop=stop, begins=begins)
            texts = [tokenizer.decode(ids) for _, ids in found]
            record["sample"] = "\n".join(texts) if self.config.records else tokenizer.decode(prompt) + texts[0]
        if progress.best_val_loss is None or val_loss < progress.best_val_loss:
            progress.best_step, progress.best_val_loss = progress.step, val_loss
            progress.best_elapsed_seconds, progress.best_cpu_seconds = progress.elapsed_seconds, progress.cpu_seconds
            progress.best_characters = progress.characters
            self.save_served("best", model, {"val": val_loss})
        self.log(record)
        self.model.train()
        return record

    @functools.cached_property
    def val_pieces(self) -> tuple[np.ndarray, np.ndarray]:
        pieces_of = window_pieces if self.corpus.records is None else record_pieces
        return pieces_of(self.corpus.val, self.config.block_size)

    def validation_loss(self, model: GPT) -> float:
        """Mean loss over the validation split, or its first eval_chars; the processes share the work."""
        ids, world = self.corpus.val, self.world
        starts, lengths = self.val_pieces
        count = len(lengths)
        if self.config.eval_chars:
            count = max(1, int(np.searchsorted(np.cumsum(lengths), self.config.eval_chars, "right")))
        own = world.shard(count)
        with autocast(self.config):  # finish() scores the best weights in fp32, as they are served
            part = piece_loss(model, ids, starts[own], lengths[own]) * int(lengths[own].sum())
        return world.all_reduce_(torch.tensor(part, dtype=torch.float64)).item() / int(lengths[:count].sum())

    def finish(self, console: Console) -> None:
        """Score the best weights and the baselines on the validation split, save, and print the report."""
        self.progress.finished = True
        if not self.world.is_main:
            self.save()
            return
        best = Checkpoint.read(self.out / "best").load_model(self.device)
        corpus, val = self.corpus, self.corpus.val
        count = min(self.scored_characters(self.progress.characters), len(val))
        with show_forwards(console, "scoring the validation split", self.scorings * count) as advance:
            scores = sampled_scores(best, val, count, self.config.records, corpus.train, advance)
        losses = {**scores.losses, **baselines(corpus.train, val, corpus.tokenizer.vocab_size)}
        self.scored = {"scored_characters": scores.characters}
        if scores.standard_error is not None:
            self.scored["standard_error"] = scores.standard_error
        self.save_served("best", best, losses, self.progress.at_best)
        rate = self.progress.characters / self.progress.elapsed_seconds
        devices = 1 if self.device.type == "cpu" else self.world.size
        peak = matmul_peak(self.device, getattr(torch, self.config.dtype)) * devices
        share = rate * self.flops_per_character(self.mean_window) / peak
        speed = {"characters_per_second": rate, "matmul_peak_flops": peak, "peak_share": share}
        self.log({"event": "end", "step": self.progress.step, **losses, **self.scored, **speed})
        draw_curves(self.out)
        self.save()
        print_report(console, self.config, self.progress, losses, speed, self.out, scores, len(val) - 1)

    @property
    def mean_window(self) -> float:
        return sum(self.config.window_at(self.config.steps * i // 100) for i in range(100)) / 100

    def flops_per_character(self, window: float) -> float:
        """Forwards of teachers in each step included."""
        teachers = self.teachers.models if self.teachers and self.table is None else []
        return flops_per_character(self.model, window) + sum(flops_per_character(each, window) / 3 for each in teachers)

    def save(self) -> None:
        """Write OUT/last, with the state to resume from.

        Raises:
            DivergedError: a weight is not finite; nothing was written.
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
        """Write weights to serve, as of `progress`: now if it is None."""
        if not self.world.is_main:
            return
        description = self.describe(losses, progress or self.progress)
        extra, dtype = {NGRAMS: self.corpus.ngrams}, self.config.weights
        save_checkpoint(self.out / name, model, self.corpus.tokenizer, description, extra, dtype)

    def describe(self, losses: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """The contents of training.json."""
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
                    (self.out / "log.jsonl").unlink()  # a folder that has one is refused
            raise StorageError(
                f"cannot write {error.filename or self.out}: {error.strerror or error}. {hint}"
            ) from error

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
    """Collect the number of a SIGINT or SIGTERM in the list; a second signal kills the process."""
    received: list[int] = []

    def record(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for each in previous:
            signal.signal(each, signal.SIG_DFL)

    previous = {number: signal.signal(number, record) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
