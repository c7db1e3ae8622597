"""Wording shared by messages: the program's name, the command that resumes a run, plurals."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def program() -> str:
    """The program as the user typed it; `service.command` sets argv[0] to chargpt."""
    return "chargpt" if sys.argv[0] == "chargpt" else "python -m training"


def resume_command(out: Path) -> str:
    return f"{program()} train --resume --out {shlex.quote(str(out))}"


def plural(count: int, noun: str) -> str:
    """1 step, 2,000 steps."""
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{ending}"
