"""Starts and resumes runs: what may be overwritten or changed, and the lock on a run's folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from service.model.checkpoint import restore_folder
from training.config import ConfigError, TrainConfig
from training.data import prepare, recode
from training.device import resolve_auto
from training.distill import Teachers
from training.distributed import World
from training.finetune import describe_origin, load_origin
from training.loop import DivergedError, InterruptedRun, Run
from training.messages import plural
from training.recipe import explanation, fitted
from training.speed import keep_freed_memory
from training.state import ResumeError, Saved, changed_settings


@dataclass(frozen=True)
class Job:
    """What every process of a run receives."""

    config: TrainConfig
    resolved: dict[str, Any]  # settings that replace "auto"
    data: tuple[str, ...]
    out: Path
    resumed: bool


def start(
    config: TrainConfig,
    out: Path,
    console: Console,
    *,
    overwrite: bool = False,
    adaptable: Set[str] = frozenset(),
) -> None:
    """Train a new run in `out` to its end.

    adaptable: the settings that the text may change.

    Raises:
        ResumeError: `out` is not empty and `overwrite` is false.
    """

    def prepare_job(world: World) -> Job:
        nonlocal config
        existing = sorted(path.name for path in out.iterdir())
        if existing and not overwrite:
            raise ResumeError(
                f"{out} already contains {', '.join(existing[:5])}; pass --resume to continue that run, --overwrite to "
                "replace it, or another --out"
            )
        corpus = prepare(config.data, records=config.records, glob=config.glob)
        tokenizer = corpus.tokenizer
        for note in corpus.notes:
            console.print(note, markup=False, soft_wrap=True)
        for path in (*config.teachers, *([config.init_from] if config.init_from else [])):
            if Path(path).resolve().is_relative_to(out.resolve()):
                raise ConfigError(f"{path} is in {out}, which this run would replace; pass another --out")
        if config.init_from:
            origin = load_origin(config, corpus.tokenizer.characters)
            console.print(describe_origin(config, origin), markup=False, soft_wrap=True)
            tokenizer = origin.tokenizer
        config, changes = fitted(config, corpus, adaptable, world.size * config.accumulate)
        if changes:
            console.print(explanation(corpus, changes), markup=False, soft_wrap=True)
        resolved = resolve_auto(config, tokenizer.vocab_size, world.size)
        if config.teachers:
            Teachers(replace(config, **resolved), tokenizer)  # refused here, before an earlier run is replaced
        for name in ("last", "best", "tensorboard", *(path.name for path in out.glob("step-" + 8 * "[0-9]"))):
            shutil.rmtree(out / name, ignore_errors=True)
        for name in ("log.jsonl", "loss.png"):
            (out / name).unlink(missing_ok=True)
        return Job(config, resolved, config.data, out, resumed=False)

    out.mkdir(parents=True, exist_ok=True)
    _run_job(out, console, prepare_job)


def resume(out: Path, given: dict[str, Any], console: Console, *, data: tuple[str, ...] | None = None) -> None:
    """Continue the run in `out` to its end.

    Settings in `given` must equal the saved ones, except for CHANGEABLE ones; with more steps a finished run goes on,
    and with more patience one that stopped early. `data`: the new path of the text, if it has moved.

    Raises:
        ResumeError: there is no saved run, or the settings, the number of processes or the text differ.
        CheckpointError: a saved file is missing or altered.
    """

    def prepare_job(world: World) -> Job | None:
        if not (out / "last").is_dir():
            raise ResumeError(f"nothing to resume: {out / 'last'} does not exist")
        saved = Saved.read(out / "last")
        changes = changed_settings(saved.config.as_dict(), given)
        config, progress = replace(saved.config, **changes), saved.progress
        if progress.finished and not changes.keys() & {"steps", "patience"}:
            console.print(
                f"{out} is already finished: step {progress.step} of {saved.config.steps}, best at step "
                f"{progress.best_step}"
                + ("; it stopped early, and goes on with a larger --patience" if progress.step < config.steps else ""),
                soft_wrap=True,
            )
            return None
        if progress.finished and progress.is_out_of_patience(config):
            raise ResumeError(
                f"{out} stopped at step {progress.step}, as the validation loss has not improved since step "
                f"{progress.best_step}; to go on, pass a larger --patience too, or 0"
            )
        if config.steps <= progress.step and "steps" in changes:
            raise ResumeError(f"steps must be more than the {progress.step:,} taken, got {config.steps:,}")
        corpus = prepare(data or config.data, records=config.records, glob=config.glob)
        if corpus.sha256 != saved.data["sha256"]:
            raise ResumeError(
                f"{corpus.name} is not the text of this run: it has {plural(len(corpus.ids), 'character')} and SHA-256 "
                f"{corpus.sha256}, expected {saved.data['characters']:,} and {saved.data['sha256']}"
            )
        if world.size != saved.processes:
            raise ResumeError(
                f"{out} must be resumed with {plural(saved.processes, 'process')} as before, got {world.size}; "
                "torchrun starts several"
            )
        return Job(config, saved.resolved, data or config.data, out, resumed=True)

    if not out.is_dir():
        raise ResumeError(f"nothing to resume: {out} does not exist")
    _run_job(out, console, prepare_job)


def _run_job(out: Path, console: Console, prepare_job: Callable[[World], Job | None]) -> None:
    """Train in this process, or in those that torchrun started."""
    with World.join() as world, exclusive(out) if world.is_main else contextlib.nullcontext():
        if world.is_main:
            for name in ("last", "best"):  # of a killed run; the lock is ours
                restore_folder(out / name)
            for partial in out.glob(".*.saving-*"):
                shutil.rmtree(partial)
        try:
            job = prepare_job(world) if world.is_main else None
        except Exception:
            world.broadcast(None)  # the others end without a word
            raise
        job = world.broadcast(job)
        # What ends the run ends it in all processes at the same step, and the main one reports it.
        reported = () if world.is_main else (InterruptedRun, DivergedError, ResumeError, ConfigError)
        with contextlib.suppress(*reported):
            if job:
                _train(job, world, console)


def _train(job: Job, world: World, console: Console) -> None:
    keep_freed_memory()
    corpus = prepare(job.data, records=job.config.records, glob=job.config.glob)
    if job.resumed:
        saved = replace(Saved.read(job.out / "last"), config=job.config)
        run = Run.resume(saved, recode(corpus, saved.checkpoint.tokenizer), job.out, world)
    elif job.config.init_from:
        origin = load_origin(job.config, corpus.tokenizer.characters)
        run = Run(job.config, job.resolved, recode(corpus, origin.tokenizer), job.out, world, origin)
    else:
        run = Run(job.config, job.resolved, corpus, job.out, world)
    run.train(console if world.is_main else Console(quiet=True))


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
