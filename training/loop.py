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
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from service.model.checkpoint import Checkpoint, save_checkpoint
from service.model.gpt import GPT
from service.model.sampling import SamplingParams
from training.board import Board
from training.config import ConfigError, TrainConfig
from training.data import Corpus, WindowSampler, prepare, recode
from training.display import ProgressView, draw_curves, print_report, read_log, warn_of_symbols
from training.evaluate import baselines, streamed_loss, whole_loss
from training.finetune import Origin, begin_from, describe_origin
from training.optim import Optimizers, WeightAverage, lr_scale
from training.sample import sample_texts
from training.state import Progress, ResumeError, Saved, pack, refuse_changes


class DivergedError(RuntimeError):
    """The loss or the gradient is no number any more."""


class InterruptedRun(Exception):
    """A signal ended the run, after a save."""

    def __init__(self, number: int, out: Path, step: int, steps: int):
        super().__init__(
            f"{signal.Signals(number).name}: saved at step {step} of {steps}; "
            f"go on with: python -m training train --resume --out {shlex.quote(str(out))}"
        )
        self.number = number


class Run:
    """One run and all that it changes: weights, optimizers, sampler, progress, and its folder."""

    def __init__(
        self,
        config: TrainConfig,
        corpus: Corpus,
        out: Path,
        console: Console,
        found: dict[str, Any] | None = None,
        origin: Origin | None = None,
    ):
        self.asked, self.corpus, self.out, self.console = config, corpus, out, console
        config = replace(config, **(found or {}))
        config = replace(config, device=pick_device(config.device), threads=config.threads or torch.get_num_threads())
        torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        self.device = torch.device(config.device)
        self.sampler = WindowSampler(corpus.train, config.block_size, config.seed)
        self.model = GPT(config.model_config(corpus.tokenizer.vocab_size)).to(self.device)
        self.lineage = origin.lineage if origin else None
        if origin:
            self.model.load_state_dict(origin.weights)
        if config.dtype == "auto":
            config = replace(config, dtype=self.faster_dtype(config.batch_size))
        self.config = config  # as asked, with what was found out about the machine in place of "auto"
        self.forward: Callable[[Tensor], Tensor] = torch.compile(self.model) if config.compile else self.model
        self.optimizers = Optimizers(self.model, config)
        self.average = WeightAverage(self.model, config.ema_decay) if config.ema_decay else None
        self.progress = Progress()
        self._board: Board | None = None
        torch.manual_seed(config.seed)

    @classmethod
    def resume(cls, saved: Saved, corpus: Corpus, out: Path, console: Console) -> Run:
        run = cls(saved.config, corpus, out, console, saved.found)
        run.progress = saved.progress
        run.lineage = saved.checkpoint.training.get("init_from")
        run.sampler.position = saved.progress.position
        saved.restore(run.model, run.tensors())
        return run

    @property
    def found(self) -> dict[str, Any]:
        """What "auto" came to; a resumed run does not look again, since its bits depend on it."""
        return {name: getattr(self.config, name) for name in ("device", "dtype", "threads")}

    def tensors(self) -> dict[str, Tensor]:
        """What changes besides the weights, by name."""
        return {**self.optimizers.tensors(), **(self.average.tensors() if self.average else {})}

    def train(self) -> None:
        """From wherever the run is to its end.

        Raises:
            DivergedError: the loss or the gradient is not finite; the last save is from before that.
            InterruptedRun: SIGINT or SIGTERM came; the run was saved.
        """
        config, progress = self.config, self.progress
        self.console.print(
            f"{self.corpus.name}: {len(self.corpus.ids):,} characters, {self.corpus.symbols:,} symbols; "
            f"{self.model.num_parameters:,} parameters, {config.dtype} on {config.device}, {config.threads} threads; "
            f"{config.steps - progress.step} steps of {config.tokens_per_step:,} characters",
            markup=False,
            soft_wrap=True,
        )
        warn_of_symbols(self.console, config, self.model.config.vocab_size, self.model.num_parameters)
        with self.open_log(), stop_signal() as stopped, ProgressView(self.console, config) as view:
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
                if stopped:
                    self.save()
                    raise InterruptedRun(stopped[0], self.out, progress.step, config.steps)
                if time.monotonic() - self.saved_at > config.save_seconds:
                    self.save()
            self.finish()

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
        """One optimizer step; the loss before it."""
        config, progress = self.config, self.progress
        idx, targets = (torch.from_numpy(x).to(self.device) for x in self.sampler.next_batch(config.batch_size))
        loss = self.loss(idx, targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), config.grad_clip or math.inf)
        value, norm_value = torch.stack((loss.detach(), norm)).tolist()  # the step's one wait for the device
        if not (math.isfinite(value) and math.isfinite(norm_value)):
            lr = lr_scale(progress.step, config)
            raise DivergedError(
                f"step {progress.step + 1}: the loss is {value}, the norm of the gradient {norm_value}, at muon_lr "
                f"{config.muon_lr * lr:.3g} and adamw_lr {config.adamw_lr * lr:.3g}. Stopped before the update; "
                f"the last good checkpoint is {self.out / 'last'}. Try lower learning rates or dtype float32"
            )
        self.optimizers.step(progress.step)
        self.model.zero_grad(set_to_none=True)
        if self.average:
            self.average.update(progress.step)
        progress.step += 1
        progress.position = self.sampler.position
        progress.loss_sum += value
        progress.loss_steps += 1
        return value

    def loss(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of idx (B, T) against targets (B, T), with products in the run's dtype."""
        with self.autocast():
            logits = self.forward(idx)  # (B, T, V)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def autocast(self) -> torch.autocast:
        """Matrix products in the run's dtype."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.dtype == "bfloat16")

    @property
    def served_model(self) -> GPT:
        """The weights to evaluate and serve: the average where there is one."""
        return self.average.model if self.average else self.model

    def evaluate(self) -> dict[str, Any]:
        """Score the validation split, keep the weights if they are the best, and log; what was logged."""
        progress, model = self.progress, self.served_model
        cap = self.config.eval_chars
        model.eval()
        with self.autocast():  # finish() scores the best in fp32, as it is served
            val_loss = whole_loss(model, self.corpus.val[: cap + 1] if cap else self.corpus.val)
        progress.evaluated_step = progress.step
        record = {"event": "evaluation", "step": progress.step, "val_loss": val_loss}
        if self.config.sample_chars:
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

    def finish(self) -> None:
        """Score the best weights over the whole split, both ways, beside the baselines; report and save."""
        best = Checkpoint.read(self.out / "best").load_model(self.device)
        corpus = self.corpus
        losses = {
            "whole": whole_loss(best, corpus.val),
            "streamed": streamed_loss(best, corpus.val),
            **baselines(corpus.train, corpus.val, corpus.tokenizer.vocab_size),
        }
        self.save_served("best", best, self.progress.best_step, losses)
        self.log({"event": "end", "step": self.progress.step, **losses})
        draw_curves(self.out / "log.jsonl", self.out / "loss.png")
        self.progress.finished = True
        self.save()
        print_report(self.console, self.config, self.progress, losses, self.out)

    def save(self) -> None:
        """OUT/last, with all that a resumed run needs."""
        self._log.flush()
        os.fsync(self._log.fileno())
        self.progress.log_bytes = self._log.tell()
        extra = pack(self.asked, self.found, self.corpus.describe(), self.progress, self.tensors())
        description = self.describe({"best_val": self.progress.best_val_loss})
        save_checkpoint(self.out / "last", self.model, self.corpus.tokenizer, description, extra)
        self.saved_at = time.monotonic()

    def save_served(self, name: str, model: GPT, step: int | None, losses: dict[str, float]) -> None:
        description = self.describe(losses)
        description["step"] = step
        save_checkpoint(self.out / name, model, self.corpus.tokenizer, description)

    def describe(self, losses: dict[str, Any]) -> dict[str, Any]:
        """training.json: what made these weights."""
        progress, config = self.progress, self.config
        return {
            "step": progress.step,
            "characters_seen": progress.step * config.tokens_per_step,
            "training_seconds": round(progress.elapsed_seconds, 3),
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
    def open_log(self) -> Iterator[None]:
        """OUT/log.jsonl, cut back to what it held at the save that the run goes on from."""
        with open(self.out / "log.jsonl", "ab") as self._log:
            self._log.truncate(self.progress.log_bytes)
            if self.config.tensorboard:
                records = read_log(self.out / "log.jsonl")
                self._board = Board(self.out / "tensorboard", records, self.progress.elapsed_seconds)
            try:
                yield
            finally:
                if self._board:
                    self._board.close()

    def log(self, record: dict[str, Any]) -> None:
        record["elapsed_seconds"] = round(self.progress.elapsed_seconds, 3)
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

    def faster_dtype(self, batch_size: int) -> Literal["float32", "bfloat16"]:
        """Which of the two types makes a step of this model faster on this machine: a few steps of each, timed."""
        if self.device.type == "mps" or (self.device.type == "cuda" and not torch.cuda.is_bf16_supported()):
            return "float32"
        if self.device.type == "cuda":
            return "bfloat16"
        T = self.sampler.block_size
        idx = torch.zeros(batch_size, T, dtype=torch.long)
        seconds = {False: math.inf, True: math.inf}
        for _ in range(3):
            for bf16 in seconds:
                started = time.perf_counter()
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    logits = self.model(idx)
                F.cross_entropy(logits.float().flatten(0, 1), idx.flatten()).backward()
                seconds[bf16] = min(seconds[bf16], time.perf_counter() - started)
        self.model.zero_grad(set_to_none=True)
        return "bfloat16" if seconds[True] < seconds[False] else "float32"


def start(config: TrainConfig, out: Path, console: Console, *, overwrite: bool = False) -> None:
    """A new run in `out`, from its first step to its end.

    Raises:
        ResumeError: `out` holds something already, and `overwrite` is false.
    """
    out.mkdir(parents=True, exist_ok=True)
    with exclusive(out):
        held = sorted(path.name for path in out.iterdir())
        if held and not overwrite:
            raise ResumeError(
                f"{out} holds {', '.join(held[:5])} already: pass --resume to go on, --overwrite to replace that run, "
                "or another --out"
            )
        corpus, origin = prepare(config.data, records=config.records), None
        if config.init_from:
            if Path(config.init_from).resolve().is_relative_to(out.resolve()):
                raise ConfigError(f"{config.init_from} lies in {out}, which this run would replace: pass another --out")
            origin = begin_from(config, corpus.tokenizer.characters)
            corpus = recode(corpus, origin.tokenizer)
            console.print(describe_origin(config, origin), markup=False, soft_wrap=True)
        run = Run(config, corpus, out, console, origin=origin)
        for name in ("last", "best", "tensorboard", *(path.name for path in out.glob("step-" + 8 * "[0-9]"))):
            shutil.rmtree(out / name, ignore_errors=True)
        for name in ("log.jsonl", "loss.png"):
            (out / name).unlink(missing_ok=True)
        run.train()


def resume(out: Path, given: dict[str, Any], console: Console, *, data: tuple[str, ...] | None = None) -> None:
    """Go on with the run in `out`; `given` are settings that the caller repeats, which must be the same.

    `data` may name the text at another place; it must be the same text.

    Raises:
        ResumeError: there is nothing to go on from, or the settings or the text differ.
        CheckpointError: what was saved has been altered.
    """
    if not (out / "last").is_dir():
        raise ResumeError(f"nothing to resume: {out / 'last'} does not exist")
    with exclusive(out):
        saved = Saved.read(out / "last")
        refuse_changes(saved.config.as_dict(), given)
        if saved.progress.finished:
            done = saved.progress
            console.print(
                f"{out} is finished: step {done.step} of {saved.config.steps}, the best at step {done.best_step}; "
                "nothing to do",
                soft_wrap=True,
            )
            return
        corpus = prepare(data or saved.config.data, records=saved.config.records)
        if corpus.sha256 != saved.data["sha256"]:
            raise ResumeError(
                f"{corpus.name} is not the text that this run began with: {len(corpus.ids):,} characters, SHA-256 "
                f"{corpus.sha256}; that one had {saved.data['characters']:,}, SHA-256 {saved.data['sha256']}"
            )
        Run.resume(saved, recode(corpus, saved.checkpoint.tokenizer), out, console).train()


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
