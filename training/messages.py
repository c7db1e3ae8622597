"""Wording shared by commands: the program's name, the command that resumes a run, plurals, escapes in flags."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path


def program(python: str = "python") -> str:
    """The program as the user typed it; `service.command` sets argv[0] to chargpt."""
    return "chargpt" if sys.argv[0] == "chargpt" else f"{python} -m training"


def resume_command(out: Path, processes: int) -> str:
    start = program(shlex.quote(_python()))
    if processes > 1:
        start = f"torchrun --nproc-per-node {processes} -m training"
    return f"{start} train --resume --out {shlex.quote(str(out))}"


def _python() -> str:
    """What runs this interpreter in this shell: python, or its path where another one, or none, has that name."""
    if shutil.which("python") == sys.executable:
        return "python"
    path = Path(sys.executable)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def plural(count: int, noun: str) -> str:
    """1 step, 2,000 steps."""
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{ending}"


def plural_number(number: float, noun: str) -> str:
    """`plural` of a number that need not be whole, to three digits: 1 epoch, 0.5 epochs."""
    return f"{number:.3g} {noun}{'' if f'{number:.3g}' == '1' else 's'}"


def unescaped(text: str) -> str:
    r"""A text given as a flag: \n, \t and \\ stand for a line break, a tab and a backslash.

    Any other backslash is itself, as in a SMILES string.
    """
    return re.sub(r"\\([nt\\])", lambda match: {"n": "\n", "t": "\t", "\\": "\\"}[match[1]], text)
