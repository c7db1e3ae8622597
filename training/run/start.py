"""Start a run: decide its settings, build it, and train it.

The main process decides the settings of the run and sends them to the other processes. Each process then builds the run
and trains.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from service.model.checkpoint import Checkpoint
from training.config import ConfigError, TrainConfig
from training.fit.minutes import Plan, Speed
from training.fit.origin import Origin, describe_origin, load_origin, refuse_short_text
from training.fit.presets import explanation, fitted
from training.messages import say
from training.model.device import resolve_auto
from training.model.selfcheck import refuse_other_weights
from training.model.teachers import Teachers
from training.run.distributed import World
from training.run.folder import created, joined, remove_run
from training.run.loop import Run
from training.run.saved import ResumeError
from training.text.corpus import Corpus, prepare, recode, sampler_of

TIMED_STEPS = 3  # steps timed for each size of window


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
        corpus, origin = corpus_of(config), None
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
    corpus = corpus_of(config)
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
    remove_run(out)
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


def corpus_of(config: TrainConfig) -> Corpus:
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
