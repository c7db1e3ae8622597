"""Resume a run where its last save is."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from training.config import ConfigError, TrainConfig
from training.messages import plural, say
from training.model.device import pick_device
from training.run.distributed import World
from training.run.folder import joined
from training.run.loop import Run
from training.run.saved import ResumeError, Saved, changed_settings
from training.run.start import corpus_of
from training.text.corpus import recode


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
        corpus = corpus_of(config)
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
    corpus = corpus_of(config)
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
