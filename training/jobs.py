"""The command `train`, from its flags to the loop: start a run or resume one.

The main process decides the settings of the run and sends them to the other processes. Each process then builds the run
and trains.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from service.model.checkpoint import Checkpoint
from training.config import SHAPE, ConfigError, TrainConfig
from training.distributed import World
from training.fit.minutes import Plan, Speed
from training.fit.origin import Origin, describe_origin, inherited, load_origin, refuse_short_text
from training.fit.presets import SETTINGS, explanation, fitted
from training.folders import restore_folder
from training.loop import Run
from training.messages import plural, say
from training.model.device import pick_device, resolve_auto
from training.model.loading import find_checkpoint
from training.model.selfcheck import refuse_other_weights
from training.model.teachers import Teachers
from training.run import DivergedError, InterruptedRun
from training.speed import keep_freed_memory
from training.state import ResumeError, Saved, changed_settings
from training.text.corpus import Corpus, prepare, recode, sampler_of
from training.text.records import LINES

TIMED_STEPS = 3  # steps timed for each size of window


def command(args: argparse.Namespace) -> None:
    given = {field.name: getattr(args, field.name) for field in fields(TrainConfig) if hasattr(args, field.name)}
    flags = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    try:
        _train(args, dict(flags))
    except ConfigError as error:
        name, _, rest = str(error).partition(" ")
        if name not in flags:
            raise
        raise ConfigError(f"--{name.replace('_', '-')} {rest}") from None  # as the user typed it


def _train(args: argparse.Namespace, given: dict[str, Any]) -> None:
    if args.resume and args.overwrite:
        raise ConfigError("--resume continues a run, --overwrite replaces it; pass only one of them")
    console = Console(stderr=True, highlight=False)
    if "init_from" in given:
        given["init_from"] = str(find_checkpoint(given["init_from"]))
    if "teachers" in given:
        given["teachers"] = tuple(str(find_checkpoint(path)) for path in given["teachers"])
    if not args.resume:
        if given.get("minutes"):
            refuse_both(given, args.preset)
        if "init_from" in given:
            taken_over = inherited(given["init_from"])
            if given.get("column") is not None:
                taken_over["records"] = LINES
            given = taken_over | given
        preset = TrainConfig.from_preset(args.preset or "cpu")
        config = TrainConfig.from_preset(args.preset or "cpu", **given)
        adaptable = SETTINGS - given.keys()
        start(config, args.out, console, overwrite=args.overwrite, adaptable=adaptable, preset=preset)
        return
    data = given.pop("data", None)
    if args.preset:
        wanted = TrainConfig.from_preset(args.preset, **given).as_dict()
        # The shape comes from init_from, which may be gone by now. The text may also have been too small for the
        # preset.
        fixed = {*SHAPE, "records", "window_stages"} if "init_from" in given else set()
        left_out = {"data", "minutes", *((fixed | SETTINGS) - given.keys())}
        given = {name: value for name, value in wanted.items() if name not in left_out}
    resume(args.out, given, console, data=data)


def refuse_both(given: dict[str, Any], preset: str | None) -> None:
    """Raise ConfigError if a flag is given that --minutes excludes."""
    others = {"preset": preset, "steps": given.get("steps")}
    for name, value in others.items():
        if value is not None:
            raise ConfigError(
                f"--minutes {given['minutes']:g} decides what --{name} {value} does; pass only one of them"
            )
    if "teachers" in given:
        raise ConfigError("--minutes does not know how long teachers take; pass --steps with --teachers instead")


def start(
    config: TrainConfig,
    out: Path,
    console: Console,
    *,
    overwrite: bool = False,
    adaptable: Set[str] = frozenset(),
    preset: TrainConfig | None = None,
) -> None:
    """Train a new run in `out` to its end.

    adaptable: names of the settings that may be adapted to the text. preset: the config before the user's settings.

    Raises:
        ResumeError: `out` is not empty and `overwrite` is false.
    """
    with created(out), joined(out) as world:
        decided = world.from_main(lambda: _new_run(config, out, console, overwrite, adaptable, preset, world))
        if decided is None:
            return
        config, resolved = decided
        corpus, origin = _corpus_of(config), None
        if config.init_from:
            origin = load_origin(config, corpus)
            corpus = recode(corpus, origin.tokenizer)
        Run(config, resolved, corpus, out, world, origin).train(console)


def _new_run(
    config: TrainConfig,
    out: Path,
    console: Console,
    overwrite: bool,
    adaptable: Set[str],
    preset: TrainConfig | None,
    world: World,
) -> tuple[TrainConfig, dict[str, Any]]:
    """Return the run's settings and the values that replace "auto" on this machine.

    Every check is made before an earlier run is removed.
    """
    _refuse_folder(config, out, overwrite)
    corpus = _corpus_of(config)
    tokenizer, recoded, origin = corpus.tokenizer, corpus, None
    for note in corpus.notes:
        say(console, note)
    if config.init_from:
        origin = load_origin(config, corpus)
        say(console, describe_origin(config, origin, corpus))
        refuse_short_text(config, corpus)
        tokenizer = origin.tokenizer
        recoded = recode(corpus, tokenizer)
        for note in recoded.notes[len(corpus.notes) :]:
            say(console, note)
    longest = min((Checkpoint.read(path).config.block_size for path in config.teachers), default=None)
    parts = world.size * config.accumulate
    if config.minutes:
        refuse_other_weights(config.model_config(tokenizer.vocab_size))  # before the plan measures speeds
        plan = Plan(config, recoded, adaptable, parts, lambda each: measured_speed(each, recoded, world, origin))
        config = plan.config
        for line in plan.explanation():
            say(console, line)
    else:
        config, changes = fitted(config, corpus, adaptable, parts, longest, preset)
        if changes:
            say(console, explanation(corpus, changes))
    refuse_other_weights(config.model_config(tokenizer.vocab_size))  # this refuses an impossible shape too
    sampler_of(corpus, config.block_size, config.seed)  # refuses a text that is too short for block_size
    resolved = resolve_auto(config, world.size)
    if config.teachers:
        Teachers(replace(config, **resolved), tokenizer)
    _remove_run(out)
    return config, resolved


def measured_speed(config: TrainConfig, corpus: Corpus, world: World, origin: Origin | None) -> Speed:
    """Measure the speed with these settings.

    Times steps with each size of window and weights each by its share of the run's steps.
    """
    own = replace(config, batch_size=config.batch_size // world.size)
    run = Run(own, resolve_auto(own, 1), corpus, Path(), World(), origin)
    run.check_forward(Console(quiet=True))
    windows = Counter(config.window_at(config.steps * i // 100) for i in range(100))  # percent of steps per window
    seconds = 0.0  # seconds per character
    for window, percent in windows.items():
        times = []
        for _ in range(TIMED_STEPS):
            run.progress.step = next(step for step in range(config.steps) if config.window_at(step) == window)
            before, started = run.progress.characters, time.monotonic()
            run.step()
            times.append((time.monotonic() - started) / (run.progress.characters - before))
        seconds += percent / 100 * min(times)  # the first step is slower
    return Speed(world.size / seconds, 1 / run.evaluation_seconds())


def _refuse_folder(config: TrainConfig, out: Path, overwrite: bool) -> None:
    """Raise ResumeError or ConfigError if a new run may not replace what is in `out`."""
    existing = sorted(path.name for path in out.iterdir())
    if existing and not overwrite:
        found, resuming = ", ".join(existing[:5]), "--resume to continue that run, " if "last" in existing else ""
        raise ResumeError(f"{out} already contains {found}; pass {resuming}--overwrite to replace it, or another --out")
    for path in (*config.teachers, *([config.init_from] if config.init_from else [])):
        if Path(path).resolve().is_relative_to(out.resolve()):
            raise ConfigError(f"{path} is in {out}, which this run would replace; pass another --out")


def _remove_run(out: Path) -> None:
    for name in ("last", "best", "tensorboard", *(path.name for path in out.glob("step-" + 8 * "[0-9]"))):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in ("log.jsonl", "loss.png", "report.html"):
        (out / name).unlink(missing_ok=True)


def _corpus_of(config: TrainConfig) -> Corpus:
    """Return the corpus of the config's text.

    --min-count is not applied if the run starts from a checkpoint, because `load_origin` then decides which characters
    are rare.
    """
    min_count = 1 if config.init_from else config.min_count
    return prepare(
        config.data,
        records=config.records,
        column=config.column,
        glob=config.glob,
        exclude=config.exclude,
        min_count=min_count,
    )


def resume(out: Path, given: dict[str, Any], console: Console, *, data: tuple[str, ...] | None = None) -> None:
    """Continue the run in `out` to its end.

    Settings in `given` must equal the saved ones, except those in CHANGEABLE. A finished run goes on if it is given
    more steps, and a run that stopped early if it is given more patience. `data`: the new paths of the text if it has
    moved.

    Raises:
        ResumeError: there is no saved run, or the settings, the machine or the text differ.
        CheckpointError: a saved file is missing or altered.
    """
    if not out.is_dir():
        raise ResumeError(f"nothing to resume: {out} does not exist")
    with joined(out) as world:
        config = world.from_main(lambda: _continued(out, given, console, data, world))
        if config is None:
            return
        saved = replace(Saved.read(out / "last"), config=config)
        corpus = _corpus_of(config)
        Run.resume(saved, recode(corpus, saved.checkpoint.tokenizer), out, world).train(console)


def _continued(
    out: Path, given: dict[str, Any], console: Console, data: tuple[str, ...] | None, world: World
) -> TrainConfig | None:
    """Return the settings with which the run goes on, or None if it is finished."""
    if not (out / "last").is_dir():
        raise ResumeError(f"nothing to resume: {out / 'last'} does not exist")
    saved = Saved.read(out / "last")
    changes = changed_settings(saved.config.as_dict(), given)
    config, progress = replace(saved.config, **changes, data=data or saved.config.data), saved.progress
    if progress.finished and not changes.keys() & {"steps", "patience"}:
        say(
            console,
            f"{out} is already finished: step {progress.step} of {saved.config.steps}, best at step "
            f"{progress.best_step}"
            + ("; it stopped early, and goes on with a larger --patience" if progress.step < config.steps else ""),
        )
        return None
    if progress.finished and progress.is_out_of_patience(config):
        raise ResumeError(
            f"{out} stopped at step {progress.step}, as the validation loss has not improved since step "
            f"{progress.best_step}; to go on, pass a larger --patience too, or 0"
        )
    if config.steps <= progress.step and "steps" in changes:
        raise ResumeError(f"steps must be more than the {progress.step:,} taken, got {config.steps:,}")
    saved.checkpoint.load_model()  # raises in the main process alone
    corpus = _corpus_of(config)
    if (corpus.sha256, corpus.records) != (saved.data["sha256"], saved.data["records"]):
        raise ResumeError(
            f"{corpus.name} is not the text of this run: it has {plural(len(corpus.ids), 'character')} and SHA-256 "
            f"{corpus.sha256}, expected {saved.data['characters']:,} and {saved.data['sha256']}"
        )
    if world.size != saved.processes:
        raise ResumeError(
            f"{out} must be resumed with {plural(saved.processes, 'process')} as before, got {world.size}; "
            "torchrun starts several"
        )
    try:
        pick_device(saved.resolved["device"])
    except ConfigError as error:
        raise ResumeError(
            f"{out} cannot go on here: {error}; --init-from {shlex.quote(str(out / 'last'))} starts another run from "
            "its weights"
        ) from None
    return config


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
