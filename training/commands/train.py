"""The command `train`: start a run, or resume one."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import IO, Any, cast

from rich.console import Console

from training.config import PRESETS, ConfigError, TrainConfig
from training.fit.settings import ADAPTABLE, Settings
from training.model.loading import find_checkpoint
from training.run.resume import resume
from training.run.signals import StandardError
from training.run.start import start


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
    console = Console(file=cast(IO[str], StandardError()), highlight=False)
    if "init_from" in given:
        given["init_from"] = str(find_checkpoint(given["init_from"]))
    if "teachers" in given:
        given["teachers"] = tuple(str(find_checkpoint(path)) for path in given["teachers"])
    if args.resume:
        resume(args.out, _for_resume(given, args.preset), console)
        return
    if given.get("minutes"):
        refuse_both(given, args.preset)
    start(Settings(given, preset=args.preset or "cpu"), args.out, console, overwrite=args.overwrite)


def _for_resume(given: dict[str, Any], preset: str | None) -> dict[str, Any]:
    """Return the settings that a resumed run is given: with a preset, its values too.

    A plan may have adapted some of them to the text, so these are not compared.
    """
    named = {name: value for name, value in PRESETS[preset].items() if name not in ADAPTABLE} if preset else {}
    return named | given


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
