"""A training run: steps, evaluations, saves, signals, the report. `Run.train` is the loop and reads straight down.

    OUT/last       the newest weights and all that a resumed run needs
    OUT/best       the weights of the lowest validation loss: what to serve
    OUT/log.jsonl  one object per line: training losses, evaluations, samples
    OUT/loss.png   the curves
    OUT/step-00000500, OUT/tensorboard   weights that stay, event files, if asked for

A run that is killed, at any moment, and resumed ends with the same bytes as one that was not.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import platform
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from service.model.checkpoint import Checkpoint, save_checkpoint
from service.model.gpt import GPT
from service.model.params import SamplingParams
from training.board import Board
from training.config import ConfigError, TrainConfig
from training.data import Corpus, WindowSampler, prepare, recode
from training.display import ProgressView, draw_curves, print_report, read_log, warn_of_symbols
from training.distributed import World, launch
from training.evaluate import baselines, streamed_loss, whole_loss
from training.finetune import Origin, begin_from, describe_origin
from training.fused import FusedForward
from training.optim import FlatGradients, Optimizers, WeightAverage, lr_scale
from training.sample import sample_texts
from training.speed import flops_per_character, keep_freed_memory, matmul_peak
from training.state import Progress, ResumeError, Saved, generator_states, pack, refuse_changes


def resume_command(out: Path) -> str:
    return f"python -m training train --resume --out {shlex.quote(str(out))}"


class DivergedError(RuntimeError):
    """The loss or the gradient is no number any more."""


class StorageError(OSError):
    """The run's folder takes no more; says what is left."""


class InterruptedRun(Exception):
    """A signal ended the run, after a save."""

    def __init__(self, number: int, out: Path, step: int, steps: int):
        super().__init__(
            f"{signal.Signals(number).name}: saved at step {step} of {steps}; go on with: {resume_command(out)}"
        )
        self.number = number


class Run:
    """One run and all that it changes: weights, optimizers, sampler, progress, and its folder.

    Each process of a world has one, equal but for the windows of a batch that it takes; the main one writes.
    """

    def __init__(
        self,
        config: TrainConfig,
        found: dict[str, Any],
        corpus: Corpus,
        out: Path,
        world: World,
        origin: Origin | None = None,
    ):
        self.asked, self.found, self.corpus, self.out, self.world = config, found, corpus, out, world
        self.config = config = replace(config, **found)
        torch.set_num_threads(max(1, config.threads // config.processes))
        self.device = torch.device(config.device)
        self.sampler = WindowSampler(corpus.train, config.block_size, config.seed)
        torch.manual_seed(config.seed)
        self.model = GPT(config.model_config(corpus.tokenizer.vocab_size)).to(self.device)
        self.forward = forward_for(self.model, config)
        self.gradients = FlatGradients(self.model, extra=5)
        self.lineage = origin.lineage if origin else None
        if origin:
            self.model.load_state_dict(origin.weights)
        self.optimizers = Optimizers(self.model, config, world)
        self.average = WeightAverage(self.model, config.ema_decay) if config.ema_decay else None
        self.progress = Progress()
        self.saved_at = time.monotonic()
        self.cpu_seconds = 0.0  # of this process's last step
        self._board: Board | None = None
        torch.manual_seed(config.seed + world.rank)  # of dropout

    @classmethod
    def resume(cls, saved: Saved, corpus: Corpus, out: Path, world: World) -> Run:
        run = cls(saved.config, saved.found, corpus, out, world)
        run.progress = saved.progress
        run.lineage = saved.checkpoint.training.get("init_from")
        run.sampler.position = saved.progress.position
        saved.restore(run.model, run.tensors(), world.rank)
        return run

    def tensors(self) -> dict[str, Tensor]:
        """What changes besides the weights, by name."""
        return {**self.optimizers.tensors(), **(self.average.tensors() if self.average else {})}

    def train(self, console: Console) -> None:
        """From wherever the run is to its end.

        Raises:
            DivergedError: the loss or the gradient is not finite; the last save is from before that.
            StorageError: the disk is full, or the like; the last save is as it was.
            InterruptedRun: SIGINT or SIGTERM came; the run was saved.
        """
        config, progress = self.config, self.progress
        console.print(
            f"{self.corpus.name}: {len(self.corpus.ids):,} characters, {self.corpus.symbols:,} symbols; "
            f"{self.model.num_parameters:,} parameters, {config.dtype} on {config.device}, {config.threads} threads in "
            f"{config.processes} processes; {config.steps - progress.step} steps of "
            f"{config.tokens_per_step:,} characters",
            markup=False,
            soft_wrap=True,
        )
        warn_of_symbols(console, config, self.model.config.vocab_size, self.model.num_parameters)
        self.world.sum_(torch.zeros(1))  # all have read what the first save replaces
        view = ProgressView(console, config)
        with self.storage(), self.open_log(), stop_signal() as self.received, view:
            self.save()
            while True:
                if self.evaluation_is_due:
                    self.save()  # nothing that goes wrong in an evaluation costs the run
                    view.evaluated(progress, self.evaluate())
                if progress.step and config.keep_every and progress.step % config.keep_every == 0:
                    self.save_served(f"step-{progress.step:08}", self.served_model, progress.step, {})
                if progress.step == config.steps or self.is_out_of_patience:
                    break
                started = time.monotonic()
                loss = self.step()
                progress.elapsed_seconds += time.monotonic() - started
                view.stepped(progress, loss)
                if progress.step % config.log_every == 0:
                    self.log_losses()
                if self.stopped or self.save_is_due:
                    self.save()
                if self.stopped:
                    raise InterruptedRun(self.stopped, self.out, progress.step, config.steps)
            self.finish(console)

    @property
    def evaluation_is_due(self) -> bool:
        step, at_end = self.progress.step, self.progress.step == self.config.steps
        is_regular = step % self.config.eval_every == 0 and (step > 0 or self.lineage is not None)
        return step != self.progress.evaluated_step and (is_regular or at_end)

    @property
    def is_out_of_patience(self) -> bool:
        progress, config = self.progress, self.config
        if not config.patience or progress.best_step is None or progress.evaluated_step is None:
            return False
        return progress.evaluated_step - progress.best_step >= config.patience * config.eval_every

    def step(self) -> float:
        """One optimizer step; the loss before it. All processes learn of a signal, or that it is time to save."""
        began = time.process_time()
        config, progress, world = self.config, self.progress, self.world
        parts = world.size * config.accumulate
        flat = self.gradients
        flat.zero_()
        windows = self.sampler.next_batch(config.batch_size)
        mine = [torch.from_numpy(x[world.rank :: world.size]).to(self.device) for x in windows]
        for idx, targets in zip(*(x.chunk(config.accumulate) for x in mine), strict=True):
            loss = self.loss(idx, targets) / parts
            loss.backward()
            flat.extra[0] += loss.detach()
        late = time.monotonic() - self.saved_at > config.save_seconds
        signals = signal.SIGINT in self.received, signal.SIGTERM in self.received
        flat.extra[1:] = torch.tensor([self.cpu_seconds, *signals, late])
        world.sum_(flat.all)
        norm = flat.clip_(config.grad_clip)
        figures = torch.cat((flat.extra, norm[None])).tolist()  # the step's one wait for the device
        value, cpu_seconds, interrupted, terminated, late, norm_value = figures
        if not (math.isfinite(value) and math.isfinite(norm_value)):
            lr = lr_scale(progress.step, config)
            raise DivergedError(
                f"step {progress.step + 1}: the loss is {value}, the norm of the gradient {norm_value}, at muon_lr "
                f"{config.muon_lr * lr:.3g} and adamw_lr {config.adamw_lr * lr:.3g}. Stopped before the update; "
                f"the last good checkpoint is {self.out / 'last'}. Try lower learning rates or dtype float32"
            )
        self.stopped = signal.SIGTERM if terminated else signal.SIGINT if interrupted else None
        self.save_is_due = bool(late)
        self.optimizers.step(progress.step)
        if self.average:
            self.average.update(progress.step)
        progress.step += 1
        progress.position = self.sampler.position
        progress.loss_sum += value
        progress.loss_steps += 1
        progress.cpu_seconds += cpu_seconds
        self.cpu_seconds = time.process_time() - began
        return value

    def loss(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of idx (B, T) against targets (B, T), with products in the run's dtype."""
        with self.autocast():
            logits = self.forward(idx)  # (B, T, V)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def autocast(self) -> torch.autocast:
        """Matrix products in the run's dtype."""
        return autocast(self.config)

    @property
    def served_model(self) -> GPT:
        """The weights to evaluate and serve: the average where there is one."""
        return self.average.model if self.average else self.model

    def evaluate(self) -> dict[str, Any]:
        """Score the validation split, keep the weights if they are the best, and log; what was logged."""
        progress, model = self.progress, self.served_model
        model.eval()
        val_loss = self.validation_loss(model)
        progress.evaluated_step = progress.step
        record = {"event": "evaluation", "step": progress.step, "val_loss": val_loss}
        if self.config.sample_chars and self.world.is_main:
            tokenizer = self.corpus.tokenizer
            prompt = tokenizer.encode("\n") if "\n" in tokenizer else [int(self.corpus.train[0])]
            params = SamplingParams(seed=self.config.seed)
            [(_, ids)] = sample_texts(model, prompt, 1, self.config.sample_chars, params)
            record["sample"] = tokenizer.decode(prompt + ids)
        if progress.best_val_loss is None or val_loss < progress.best_val_loss:
            progress.best_step, progress.best_val_loss = progress.step, val_loss
            self.save_served("best", model, progress.step, {"val": val_loss})
        self.log(record)
        self.model.train()
        return record

    def validation_loss(self, model: GPT) -> float:
        """Mean loss over the validation split, or its first eval_chars; each process scores a part."""
        cap = self.config.eval_chars
        ids = self.corpus.val[: cap + 1] if cap else self.corpus.val
        first, end = self.world.share(len(ids) - 1, model.config.block_size)
        with self.autocast():  # finish() scores the best in fp32, as it is served
            part = whole_loss(model, ids[first : end + 1]) * (end - first) if first < end else 0.0
        return self.world.sum_(torch.tensor(part, dtype=torch.float64)).item() / (len(ids) - 1)

    def finish(self, console: Console) -> None:
        """Score the best weights over the whole split, both ways, beside the baselines; report and save."""
        self.progress.finished = True
        if not self.world.is_main:
            self.save()
            return
        torch.set_num_threads(self.config.threads)
        best = Checkpoint.read(self.out / "best").load_model(self.device)
        corpus = self.corpus
        losses = {
            "whole": whole_loss(best, corpus.val),
            "streamed": streamed_loss(best, corpus.val),
            **baselines(corpus.train, corpus.val, corpus.tokenizer.vocab_size),
        }
        self.save_served("best", best, self.progress.best_step, losses)
        speed = self.speed()
        self.log({"event": "end", "step": self.progress.step, **losses, **speed})
        draw_curves(self.out / "log.jsonl", self.out / "loss.png")
        self.save()
        print_report(console, self.config, self.progress, losses, speed, self.out)

    def speed(self) -> dict[str, float]:
        """Characters per second, and what share that is of what the machine's matrix products reach, measured now."""
        rate = self.progress.step * self.config.tokens_per_step / self.progress.elapsed_seconds
        peak = matmul_peak(self.device, getattr(torch, self.config.dtype)) * (
            1 if self.device.type == "cpu" else self.world.size
        )
        share = rate * flops_per_character(self.model) / peak
        return {"characters_per_second": rate, "matmul_peak_flops": peak, "peak_share": share}

    def save(self) -> None:
        """OUT/last, with all that a resumed run needs."""
        generators = self.world.gather(generator_states())
        self.optimizers.muon.collect()
        self.saved_at = time.monotonic()
        if generators is None:
            return
        self._log.flush()
        os.fsync(self._log.fileno())
        self.progress.log_bytes = self._log.tell()
        extra = pack(self.asked, self.found, self.corpus.describe(), self.progress, self.tensors(), generators)
        description = self.describe({"best_val": self.progress.best_val_loss})
        save_checkpoint(self.out / "last", self.model, self.corpus.tokenizer, description, extra)

    def save_served(self, name: str, model: GPT, step: int | None, losses: dict[str, float]) -> None:
        if not self.world.is_main:
            return
        description = self.describe(losses)
        description["step"] = step
        save_checkpoint(self.out / name, model, self.corpus.tokenizer, description, dtype=self.config.weights)

    def describe(self, losses: dict[str, Any]) -> dict[str, Any]:
        """training.json: what made these weights."""
        progress, config = self.progress, self.config
        return {
            "step": progress.step,
            "characters_seen": progress.step * config.tokens_per_step,
            "training_seconds": round(progress.elapsed_seconds, 3),
            "training_cpu_seconds": round(progress.cpu_seconds, 3),
            "losses": losses,  # nats per character
            "parameters": self.model.num_parameters,
            "data": self.corpus.describe(),
            "recipe": self.asked.as_dict(),
            "seed": config.seed,
            **({"init_from": self.lineage} if self.lineage else {}),
            "versions": {name: version(name) for name in ("chargpt", "torch", "numpy", "safetensors")}
            | {"python": platform.python_version()},
            "machine": {**machine(self.device), **self.found},
            "command": shlex.join(["python", "-m", "training", *sys.argv[1:]]),
        }

    @contextlib.contextmanager
    def storage(self) -> Iterator[None]:
        """Errors of the disk say what they leave and how to go on."""
        try:
            yield
        except OSError as error:
            left = "Nothing had been saved before"
            if (self.out / "last").is_dir():
                left = (
                    f"The last good checkpoint is {self.out / 'last'}; when that is put right, go on with: "
                    f"{resume_command(self.out)}"
                )
            raise StorageError(
                f"cannot write {error.filename or self.out}: {error.strerror or error}. {left}"
            ) from error

    @contextlib.contextmanager
    def open_log(self) -> Iterator[None]:
        """OUT/log.jsonl, cut back to what it held at the save that the run goes on from."""
        if not self.world.is_main:
            yield
            return
        with open(self.out / "log.jsonl", "ab") as self._log:
            self._log.truncate(self.progress.log_bytes)
            self._log.seek(0, os.SEEK_END)  # truncate() leaves the position, which save() notes, where the end was
            if self.config.tensorboard:
                records = read_log(self.out / "log.jsonl")
                self._board = Board(self.out / "tensorboard", records, self.progress.elapsed_seconds)
            try:
                yield
            finally:
                if self._board:
                    self._board.close()

    def log(self, record: dict[str, Any]) -> None:
        if not self.world.is_main:
            return
        record["elapsed_seconds"] = round(self.progress.elapsed_seconds, 3)
        record["cpu_seconds"] = round(self.progress.cpu_seconds, 3)
        self._log.write((json.dumps(record, ensure_ascii=False) + "\n").encode())
        self._log.flush()
        if self._board:
            self._board.add(record)

    def log_losses(self) -> None:
        """Mean training loss since the last such line."""
        progress, config = self.progress, self.config
        scale = lr_scale(progress.step - 1, config)
        characters = progress.step * config.tokens_per_step
        self.log(
            {
                "event": "train",
                "step": progress.step,
                "train_loss": progress.loss_sum / progress.loss_steps,
                "muon_lr": config.muon_lr * scale,
                "adamw_lr": config.adamw_lr * scale,
                "characters_per_second": round(characters / progress.elapsed_seconds),
            }
        )
        progress.loss_sum, progress.loss_steps = 0.0, 0


@dataclass(frozen=True)
class Job:
    """What every process of a run is told."""

    config: TrainConfig
    found: dict[str, Any]  # what "auto" came to
    data: tuple[str, ...]
    out: Path
    resumed: bool


def start(config: TrainConfig, out: Path, console: Console, *, overwrite: bool = False) -> None:
    """A new run in `out`, from its first step to its end.

    Raises:
        ResumeError: `out` holds something already, and `overwrite` is false.
    """

    def job(world: World) -> Job:
        held = sorted(path.name for path in out.iterdir())
        if held and not overwrite:
            raise ResumeError(
                f"{out} holds {', '.join(held[:5])} already: pass --resume to go on, --overwrite to replace that run, "
                "or another --out"
            )
        corpus, vocab_size = prepare(config.data, records=config.records), None
        if config.init_from:
            if Path(config.init_from).resolve().is_relative_to(out.resolve()):
                raise ConfigError(f"{config.init_from} lies in {out}, which this run would replace: pass another --out")
            origin = begin_from(config, corpus.tokenizer.characters)
            console.print(describe_origin(config, origin), markup=False, soft_wrap=True)
            vocab_size = origin.tokenizer.vocab_size
        found = find_out(config, vocab_size or corpus.tokenizer.vocab_size, world.size)
        for name in ("last", "best", "tensorboard", *(path.name for path in out.glob("step-" + 8 * "[0-9]"))):
            shutil.rmtree(out / name, ignore_errors=True)
        for name in ("log.jsonl", "loss.png"):
            (out / name).unlink(missing_ok=True)
        return Job(config, found, config.data, out, resumed=False)

    out.mkdir(parents=True, exist_ok=True)
    _drive(out, console, job)


def resume(out: Path, given: dict[str, Any], console: Console, *, data: tuple[str, ...] | None = None) -> None:
    """Go on with the run in `out`; `given` are settings that the caller repeats, which must be the same.

    `data` may name the text at another place; it must be the same text.

    Raises:
        ResumeError: there is nothing to go on from, or the settings, the processes or the text differ.
        CheckpointError: what was saved has been altered.
    """

    def job(world: World) -> Job | None:
        saved = Saved.read(out / "last")
        refuse_changes(saved.config.as_dict(), given)
        if saved.progress.finished:
            done = saved.progress
            console.print(
                f"{out} is finished: step {done.step} of {saved.config.steps}, the best at step {done.best_step}; "
                "nothing to do",
                soft_wrap=True,
            )
            return None
        corpus = prepare(data or saved.config.data, records=saved.config.records)
        if corpus.sha256 != saved.data["sha256"]:
            raise ResumeError(
                f"{corpus.name} is not the text that this run began with: {len(corpus.ids):,} characters, SHA-256 "
                f"{corpus.sha256}; that one had {saved.data['characters']:,}, SHA-256 {saved.data['sha256']}"
            )
        if world.size not in (1, saved.found["processes"]):
            raise ResumeError(
                f"{out} was trained by {saved.found['processes']} processes and goes on with as many, not {world.size}"
            )
        return Job(saved.config, saved.found, data or saved.config.data, out, resumed=True)

    if not (out / "last").is_dir():
        raise ResumeError(f"nothing to resume: {out / 'last'} does not exist")
    _drive(out, console, job)


def _drive(out: Path, console: Console, job_for: Callable[[World], Job | None]) -> None:
    """Train in the processes that torchrun started, or in as many as the job asks for, started here."""
    with World.join() as world, exclusive(out) if world.is_main else contextlib.nullcontext():
        if world.is_main:
            for half_written in out.glob(".*.saving-*"):  # by a run that was killed: this one has the folder alone
                shutil.rmtree(half_written)
        job = world.broadcast(job_for(world) if world.is_main else None)
        if job is None:
            return
        if world.size > 1:
            _train(job, world, console)
            return
        with launch(job.found["processes"], _work, job):
            _work(job, console)


def _work(job: Job, console: Console | None = None) -> None:
    with World.join() as world:
        _train(job, world, console)


def _train(job: Job, world: World, console: Console | None) -> None:
    keep_freed_memory()
    corpus = prepare(job.data, records=job.config.records)
    if job.resumed:
        saved = Saved.read(job.out / "last")
        run = Run.resume(saved, recode(corpus, saved.checkpoint.tokenizer), job.out, world)
    elif job.config.init_from:
        origin = begin_from(job.config, corpus.tokenizer.characters)
        run = Run(job.config, job.found, recode(corpus, origin.tokenizer), job.out, world, origin)
    else:
        run = Run(job.config, job.found, corpus, job.out, world)
    run.train(console if console and world.is_main else Console(quiet=True))


def find_out(config: TrainConfig, vocab_size: int, world_size: int) -> dict[str, Any]:
    """What the config's "auto" comes to here; a resumed run does not look again, since its bits depend on it.

    Raises:
        ConfigError: the machine has no such device, or the batch does not divide among the processes.
    """
    device = pick_device(config.device)
    if config.compile and device == "cpu":
        raise ConfigError("compile is for cuda and mps: on a cpu the steps are written out and need no compiler")
    threads = config.threads or torch.get_num_threads()
    processes = config.processes
    if world_size > 1 and processes not in (0, world_size):
        raise ConfigError(f"processes must be 0 or the {world_size} that torchrun started, got {processes}")
    if processes == 0:
        # Windows per process that make its products large enough.
        fitting = (n for n in range(threads, 1, -1) if config.batch_size % (n * config.accumulate * 4) == 0)
        processes = world_size if world_size > 1 or device != "cpu" else next(fitting, 1)
    if config.batch_size % (processes * config.accumulate):
        raise ConfigError(
            f"batch_size must be a multiple of processes x accumulate, got {config.batch_size}, {processes} and "
            f"{config.accumulate}"
        )
    found: dict[str, Any] = {"device": device, "dtype": config.dtype, "threads": threads, "processes": processes}
    if config.dtype == "auto":
        torch.set_num_threads(max(1, threads // processes))
        found["dtype"] = faster_dtype(replace(config, **found), vocab_size)
    return found


def faster_dtype(config: TrainConfig, vocab_size: int) -> Literal["float32", "bfloat16"]:
    """Which of the two types makes a step faster on this machine: a few steps of each, timed."""
    if config.device == "mps" or (config.device == "cuda" and not torch.cuda.is_bf16_supported()):
        return "float32"
    if config.device == "cuda":
        return "bfloat16"
    model = GPT(config.model_config(vocab_size))
    idx = torch.zeros(config.batch_size // config.processes // config.accumulate, config.block_size, dtype=torch.long)
    forwards = {}
    for dtype in ("float32", "bfloat16"):
        of_dtype = replace(config, dtype=dtype)
        forwards[dtype] = of_dtype, forward_for(model, of_dtype)
    seconds = dict.fromkeys(forwards, math.inf)
    for _ in range(3):
        for dtype, (of_dtype, forward) in forwards.items():
            started = time.perf_counter()
            with autocast(of_dtype):
                logits = forward(idx)
            F.cross_entropy(logits.float().flatten(0, 1), idx.flatten()).backward()
            seconds[dtype] = min(seconds[dtype], time.perf_counter() - started)
    return "bfloat16" if seconds["bfloat16"] < seconds["float32"] else "float32"


def forward_for(model: GPT, config: TrainConfig) -> Callable[[Tensor], Tensor]:
    """idx (B, T) -> logits (B, T, V), in the way that is fastest for training on the config's device."""
    if config.device == "cpu":
        return FusedForward(model, torch.bfloat16 if config.dtype == "bfloat16" else torch.float32)
    compiled: Callable[[Tensor], Tensor] = torch.compile(model) if config.compile else model
    return compiled


def autocast(config: TrainConfig) -> torch.autocast:
    return torch.autocast(config.device, torch.bfloat16, enabled=config.dtype == "bfloat16")


def pick_device(device: str) -> Literal["cpu", "cuda", "mps"]:
    if device in ("auto", "cuda") and torch.cuda.is_available():
        return "cuda"
    if device in ("auto", "mps") and torch.backends.mps.is_available():
        return "mps"
    if device in ("auto", "cpu"):
        return "cpu"
    raise ConfigError(f"device must be one that this machine has, got {device!r}")


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures were measured on."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    return {"system": platform.system(), "cpu": name, "cores": os.cpu_count(), **gpu}


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold a folder against other runs; the system lets go when the process ends, however it ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResumeError(f"another run is writing to {folder}") from None
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def stop_signal() -> Iterator[list[int]]:
    """A list that holds the number of the SIGINT or SIGTERM that came, if one did. A second one ends at once."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for each in before:
            signal.signal(each, signal.SIG_DFL)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
