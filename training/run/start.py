"""Start a run: decide its settings, build it, and train it.

The main process decides the settings and builds its run, which makes every check, before an earlier run is removed. It
then sends the settings to the other processes, which build their runs.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from service.model.checkpoint import Checkpoint
from service.model.counts import MAX_COUNTED
from training.config import ConfigError, TrainConfig
from training.fit.origin import Origin, describe_origin, inherited, load_origin, refuse_short_text
from training.fit.plan import Speed, plan
from training.fit.settings import Settings
from training.messages import plural, say
from training.model.device import resolve_auto
from training.run.distributed import World
from training.run.errors import ResumeError
from training.run.estimate import Estimate
from training.run.folder import RunFolder, created, joined, remove_run
from training.run.loop import check_forward, step, train
from training.run.run import Run
from training.text.corpus import Corpus, prepare, recode

TIMED_STEPS = 3  # steps timed for each size of window


def start(settings: Settings, out: Path, console: Console, *, overwrite: bool = False) -> None:
    """Train a new run in `out` to its end.

    settings: the layers of the user and the preset; the others are added here.

    Raises:
        ResumeError: `out` is not empty and `overwrite` is false.
    """
    run: Run | None = None

    def decide() -> Settings:
        nonlocal run
        run = _new_run(settings, out, console, overwrite, world)
        remove_run(out)
        return run.settings

    with created(out), joined(out) as world:
        decided = world.from_main(decide)
        if decided is None:
            return
        if run is None:
            corpus, origin = material_of(decided.requested)
            run = Run(decided, corpus, world, origin)
        train(run, RunFolder(out, run), console)


def _new_run(settings: Settings, out: Path, console: Console, overwrite: bool, world: World) -> Run:
    _refuse_folder(settings.requested, out, overwrite)
    checkpoint, config = None, settings.requested
    if config.init_from:
        checkpoint = Checkpoint.read(config.init_from)
        settings = replace(settings, inherited=inherited(checkpoint, config.column))
        config = settings.requested
    corpus, origin = material_of(config, checkpoint)
    for note in corpus.notes:
        say(console, note)
    if origin:
        say(console, describe_origin(config, origin, corpus))
        refuse_short_text(config, corpus)
    seconds = count_ngrams(corpus, console)
    windows = (Checkpoint.read(path).config.block_size for path in config.teachers)
    parts = world.size * config.accumulate
    planned = plan(
        settings, corpus, parts, min(windows, default=None),
        lambda each: measured_speed(each, corpus, world, origin), seconds,
    )  # fmt: skip
    for line in planned.lines:
        say(console, line)
    settings = replace(settings, fitted=planned.fitted)
    settings = replace(settings, resolved=resolve_auto(settings.requested, world.size))
    return Run(settings, corpus, world, origin)


def count_ngrams(corpus: Corpus, console: Console) -> float:
    """Count the n-grams of the training split, say so if it is a sample, and return the seconds that it took."""
    began = time.monotonic()
    if MAX_COUNTED < len(corpus.train):
        trained = plural(len(corpus.train), "training character")
        say(console, f"counting n-grams in a sample: {MAX_COUNTED:,} of {trained}")
    assert corpus.counts.order  # counts on first use
    return time.monotonic() - began


def material_of(config: TrainConfig, checkpoint: Checkpoint | None = None) -> tuple[Corpus, Origin | None]:
    """Return the corpus in the run's vocabulary, and the origin of a run that starts from a checkpoint.

    checkpoint: that of `config.init_from`, if it has been read.
    """
    corpus = corpus_of(config)
    if config.init_from is None:
        return corpus, None
    origin = load_origin(checkpoint or Checkpoint.read(config.init_from), config, corpus)
    return recode(corpus, origin.tokenizer), origin


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


def measured_speed(config: TrainConfig, corpus: Corpus, world: World, origin: Origin | None) -> Speed:
    """Measure the speed with these settings.

    Times steps with each size of window and weights each by its share of the run's steps.
    """
    began = time.monotonic()
    own = replace(config, batch_size=config.batch_size // world.size)
    layers = Settings(own.as_dict(), resolved=resolve_auto(own, 1))
    run = Run(layers, corpus, World(), origin)
    check_forward(run, Console(quiet=True))
    windows = Counter(config.window_at(config.steps * i // 100) for i in range(100))  # percent of steps per window
    seconds = 0.0  # seconds per character
    for window, percent in windows.items():
        times = []
        for _ in range(TIMED_STEPS):
            run.progress.step = next(number for number in range(config.steps) if config.window_at(number) == window)
            before, started = run.progress.characters, time.monotonic()
            step(run)
            times.append((time.monotonic() - started) / (run.progress.characters - before))
        seconds += percent / 100 * min(times)  # the first step is slower
    evaluated = 1 / Estimate(run).evaluation_seconds()
    return Speed(world.size / seconds, evaluated, time.monotonic() - began)


def _refuse_folder(config: TrainConfig, out: Path, overwrite: bool) -> None:
    """Raise ResumeError or ConfigError if a new run may not replace what is in `out`."""
    existing = sorted(path.name for path in out.iterdir())
    if existing and not overwrite:
        found, resuming = ", ".join(existing[:5]), "--resume to continue that run, " if "last" in existing else ""
        raise ResumeError(f"{out} already contains {found}; pass {resuming}--overwrite to replace it, or another --out")
    for path in (*config.teachers, *([config.init_from] if config.init_from else [])):
        if Path(path).resolve().is_relative_to(out.resolve()):
            raise ConfigError(f"{path} is in {out}, which this run would replace; pass another --out")
