"""The folder of a run: created, locked against other runs, and cleared of an earlier one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from training.config import ConfigError
from training.folders import restore_folder
from training.run.distributed import World
from training.run.saved import ResumeError
from training.run.speed import keep_freed_memory
from training.run.state import DivergedError, InterruptedRun


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
