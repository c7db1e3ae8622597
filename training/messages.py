"""Texts that several commands print: refusals, commands to run next, flags, plurals and durations; escapes in flags."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print a line without markup, and without breaking it, as `visible`."""
    console.print(visible(text), style=style, markup=False, soft_wrap=True)


def visible(text: str) -> str:
    r"""Return a text with escapes such as \x1b for the control characters that a terminal would obey."""
    return re.sub(r"[\0-\x08\x0b-\x1f\x7f-\x9f]", lambda match: f"\\x{ord(match[0]):02x}", text)


class Refusal(ValueError):
    """An error that the user can correct. The message gives the given value, the allowed values and what to do."""


def program() -> str:
    """Return the program as the user started it. `service.command` sets argv[0] to chargpt."""
    return "chargpt" if sys.argv[0] == "chargpt" else f"{_word(Path(sys.executable))} -m training"


def resume_command(out: Path, processes: int, changes: Mapping[str, Any]) -> str:
    """Return the command that resumes the run in `out`.

    changes: the settings that differ from those in the last save.
    """
    if processes > 1:
        entry = "--no-python chargpt" if program() == "chargpt" else "-m training"
        start = f"torchrun --nproc-per-node {processes} {entry}"
    elif program() == "chargpt":
        start = _word(Path(sys.executable).with_name("chargpt"))
    else:
        start = program()
    return f"{start} train --resume --out {shlex.quote(str(out))}{flags(changes)}"


def _word(program: Path) -> str:
    """Return a word by which the shell finds a program: its name if the search path has it, else its path."""
    if shutil.which(program.name) == str(program) or not program.exists():
        return program.name
    if program.is_relative_to(Path.cwd()):
        program = program.relative_to(Path.cwd())
    return shlex.quote(str(program))


def flags(settings: Mapping[str, Any]) -> str:
    """Return the flags that set these settings, with a space before each flag."""
    text = ""
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            text += f" --{flag}" if value else f" --no-{flag}"
        else:
            text += f" --{flag} {shlex.join(map(str, value if isinstance(value, tuple) else [value]))}"
    return text


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: 1 step, 2,000 steps."""
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{ending}"


def duration(seconds: float) -> str:
    """Return a duration with about two digits: 8 s, 12 min, 3 h 20 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours > 1 else f"{60 * hours + minutes} min"


def unescaped(text: str) -> str:
    r"""Return the value of a flag with \n, \t and \\ replaced by a line break, a tab and a backslash.

    All other backslashes stay, because a SMILES string has them.
    """
    return re.sub(r"\\([nt\\])", lambda match: {"n": "\n", "t": "\t", "\\": "\\"}[match[1]], text)
