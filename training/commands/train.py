"""The command `train`: start a run, or resume one."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from rich.console import Console

from training.config import SHAPE, ConfigError, TrainConfig
from training.fit.origin import inherited
from training.fit.presets import SETTINGS
from training.model.loading import find_checkpoint
from training.run.resume import resume
from training.run.start import start
from training.text.records import LINES


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
