"""The folder of a run: created, locked against other runs, written, and cleared of an earlier run.

OUT/last            the newest weights and the state to resume from
OUT/best            the weights with the lowest validation loss; serve these
OUT/log.jsonl       one object per line: training losses, evaluations with samples, final losses
OUT/loss.png        the curves
OUT/step-00000500   weights kept with --keep-every
OUT/tensorboard     event files, with --tensorboard
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from service import release
from service.model.counts import COUNTS, Counts
from service.model.gpt import GPT
from training.config import ConfigError
from training.folders import restore_folder
from training.messages import resume_command
from training.model.device import keep_freed_memory, machine
from training.run.curves import draw_curves
from training.run.distributed import World
from training.run.errors import DivergedError, InterruptedRun, ResumeError, StorageError
from training.run.log import RunLog
from training.run.run import Run
from training.run.saved import Progress, Saved, pack
from training.run.saving import save_checkpoint


class RunFolder:
    """Writes the folder of a run. It writes nothing in the processes that torchrun starts beside the main one."""

    def __init__(self, path: Path, run: Run):
        self.path, self.run = path, run
        self.is_main = run.world.is_main
        self.saved_at = time.monotonic()
        self.scored: dict[str, Any] = {}  # characters and standard error of the final losses, for training.json
        self._log: RunLog | None = None  # open in the main process while the run trains

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Keep the log open. Turn OSError into StorageError, and add to a DivergedError what to do."""
        with self._helpful_errors(), contextlib.ExitStack() as stack:
            if self.is_main:
                log = RunLog(self.path, self.run.progress, tensorboard=self.run.config.tensorboard)
                self._log = stack.enter_context(log)
            yield

    def save(self) -> None:
        """Write OUT/last with the state to resume from.

        Raises:
            DivergedError: a weight is not finite. Nothing was written.
        """
        run = self.run
        if not all(bool(weight.isfinite().all()) for weight in run.model.parameters()):
            raise run.diverged(run.progress.step - 1, "weights are not finite")
        self.saved_at = time.monotonic()
        if not self.is_main:
            return
        assert self._log
        progress = run.progress
        progress.log_bytes = self._log.sync()
        extra = pack(run.settings, run.corpus.describe(), progress, run.optimizers.tensors(), run.world.size)
        description = self._describe({"best_val": progress.best_val_loss}, progress)
        save_checkpoint(self.path / "last", run.model, run.corpus.tokenizer, description, extra)

    def save_served(
        self,
        name: str,
        model: GPT,
        losses: dict[str, float],
        progress: Progress | None = None,
        counts: Counts | None = None,
    ) -> None:
        """Write weights to serve.

        progress: the run's progress at these weights, by default the current one.
        counts: with the weights of the mixture, by default without.
        """
        if not self.is_main:
            return
        run = self.run
        description = self._describe(losses, progress or run.progress)
        extra, dtype = {COUNTS: (counts or run.corpus.counts).dump()}, run.config.weights
        save_checkpoint(self.path / name, model, run.corpus.tokenizer, description, extra, dtype)

    def log(self, record: dict[str, Any]) -> None:
        if self._log:
            self._log.add(record)

    def draw(self) -> None:
        """Draw the curves of the log."""
        if self.is_main:
            draw_curves(self.path)

    def interrupted(self) -> InterruptedRun:
        """Return the error for the signal that ended the run after a save."""
        run = self.run
        assert run.stopped
        saved = f"saved at step {run.progress.step} of {run.config.steps}"
        resuming = resume_command(self.path, run.world.size, {})
        return InterruptedRun(run.stopped, f"{saved}; resume with: {resuming}")

    def _describe(self, losses: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """Return the contents of training.json."""
        run = self.run
        return {
            "step": progress.step,
            "characters_seen": progress.characters,
            "training_seconds": round(progress.elapsed_seconds, 3),
            "training_cpu_seconds": round(progress.cpu_seconds, 3),
            "losses": losses,  # nats per character
            **self.scored,
            "parameters": run.model.config.num_parameters,
            "data": run.corpus.describe(),
            "example_prompt": run.corpus.example_prompt,
            "recipe": run.settings.requested.as_dict(),
            "seed": run.config.seed,
            **({"init_from": run.lineage} if run.lineage else {}),
            **({"teachers": run.teachers.lineage} if run.teachers else {}),
            "versions": {name: release(name) for name in ("chargpt", "torch", "numpy", "safetensors")}
            | {"python": platform.python_version()},
            "machine": {**machine(run.device), **run.settings.resolved, "processes": run.world.size},
            "command": shlex.join(["python", "-m", "training", *sys.argv[1:]]),
        }

    @contextlib.contextmanager
    def _helpful_errors(self) -> Iterator[None]:
        try:
            yield
        except DivergedError as error:
            is_rounded = self.run.config.dtype == "bfloat16"
            raise DivergedError(
                f"{error}. The last good checkpoint is {self.path / 'last'}. Try lower learning rates"
                + (" or --dtype float32" if is_rounded else "")
            ) from None
        except OSError as error:
            if (last := self.path / "last").is_dir():
                saved = Saved.read(last).config.as_dict()
                requested = self.run.settings.requested.as_dict()
                changes = {name: value for name, value in requested.items() if value != saved[name]}
                resuming = resume_command(self.path, self.run.world.size, changes)
                hint = f"The last good checkpoint is {last}; once the problem is solved, resume with: {resuming}"
            else:
                hint = "Nothing has been saved yet; once the problem is solved, run the same command again"
                with contextlib.suppress(OSError):
                    (self.path / "log.jsonl").unlink()  # a new run refuses a folder that has a log
            raise StorageError(
                f"cannot write {error.filename or self.path}: {error.strerror or error}. {hint}"
            ) from error


@contextlib.contextmanager
def created(folder: Path) -> Iterator[None]:
    """Create the folder for the block. Afterwards remove it and the folders above it if they are new and empty."""
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {folder} cannot be created: {error.strerror}; pass another --out") from None
        yield
    finally:
        for each in new:
            with contextlib.suppress(OSError):
                each.rmdir()


@contextlib.contextmanager
def joined(out: Path) -> Iterator[World]:
    """Yield the world of this process or of the processes that torchrun started, and lock the run's folder for it."""
    with World.join() as world, exclusive(out) if world.is_main else contextlib.nullcontext():
        if world.is_main:
            for name in ("last", "best"):  # a killed run may have left them aside; this process holds the lock
                restore_folder(out / name)
            for partial in out.glob(".*.saving-*"):
                shutil.rmtree(partial)
        keep_freed_memory()
        # These errors end the run in all processes at the same step, and the main process reports them.
        reported = () if world.is_main else (InterruptedRun, DivergedError, ResumeError, ConfigError)
        with contextlib.suppress(*reported):
            yield world


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Lock a folder against other runs; the kernel releases the lock when the process ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResumeError(f"another run is writing to {folder}; wait for it, or pass another --out") from None
        yield
    finally:
        os.close(descriptor)


def remove_run(out: Path) -> None:
    for name in ("last", "best", "tensorboard", *(path.name for path in out.glob("step-" + 8 * "[0-9]"))):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in ("log.jsonl", "loss.png", "report.html"):
        (out / name).unlink(missing_ok=True)
