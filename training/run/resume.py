"""Resume a run where its last save is."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from training.config import ConfigError
from training.fit.settings import Settings
from training.messages import plural, say
from training.model.device import pick_device
from training.run.distributed import World
from training.run.errors import ResumeError
from training.run.folder import RunFolder, joined
from training.run.loop import train
from training.run.run import Run
from training.run.saved import Saved
from training.run.start import corpus_of
from training.text.corpus import Corpus, recode


def resume(out: Path, given: Mapping[str, Any], console: Console) -> None:
    """Continue the run in `out` to its end.

    Settings in `given` must equal the saved ones, except those in CHANGEABLE and `data`, the paths of the text, which
    may have moved. A finished run goes on if it is given more steps, and a run that stopped early if it is given more
    patience. With other settings of its report, it is scored and saved again.

    Raises:
        ResumeError: there is no saved run, or the settings, the machine or the text differ.
        CheckpointError: a saved file is missing or altered.
    """
    if not out.is_dir():
        raise ResumeError(f"nothing to resume: {out} does not exist")
    run: Run | None = None

    def decide() -> Settings | None:
        nonlocal run
        if not (out / "last").is_dir():
            raise ResumeError(f"nothing to resume: {out / 'last'} does not exist")
        saved = Saved.read(out / "last")
        settings = saved.settings(given)
        if _is_finished(saved, settings, out, console):
            return None
        _refuse_machine(saved, out, world)
        corpus = corpus_of(settings.requested)
        _refuse_other_text(saved, corpus)
        run = Run.resume(saved, settings, recode(corpus, saved.checkpoint.tokenizer), world)
        return settings

    with joined(out) as world:
        settings = world.from_main(decide)
        if settings is None:
            return
        if run is None:
            saved = Saved.read(out / "last")
            corpus = recode(corpus_of(settings.requested), saved.checkpoint.tokenizer)
            run = Run.resume(saved, settings, corpus, world)
        train(run, RunFolder(out, run), console)


def _is_finished(saved: Saved, settings: Settings, out: Path, console: Console) -> bool:
    """Return whether nothing is left to train, and say so.

    Raises:
        ResumeError: the changes allow no further step.
    """
    config, progress, changes = settings.requested, saved.progress, settings.given
    if progress.finished and not changes.keys() & {"steps", "patience", "mixed", "weights", "score_chars"}:
        say(
            console,
            f"{out} is already finished: step {progress.step} of {saved.config.steps}, best at step "
            f"{progress.best_step}"
            + ("; it stopped early, and goes on with a larger --patience" if progress.step < config.steps else ""),
        )
        return True
    if progress.finished and "steps" in changes and progress.is_out_of_patience(config):
        raise ResumeError(
            f"{out} stopped at step {progress.step}, as the validation loss has not improved since step "
            f"{progress.best_step}; to go on, pass a larger --patience too, or 0"
        )
    if config.steps <= progress.step and "steps" in changes:
        raise ResumeError(f"steps must be more than the {progress.step:,} taken, got {config.steps:,}")
    return False


def _refuse_machine(saved: Saved, out: Path, world: World) -> None:
    """Raise ResumeError if the machine or the number of processes does not allow to continue the run."""
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


def _refuse_other_text(saved: Saved, corpus: Corpus) -> None:
    if (corpus.sha256, corpus.records) != (saved.data["sha256"], saved.data["records"]):
        raise ResumeError(
            f"{corpus.name} is not the text of this run: it has {plural(len(corpus.ids), 'character')} and SHA-256 "
            f"{corpus.sha256}, expected {saved.data['characters']:,} and {saved.data['sha256']}"
        )
