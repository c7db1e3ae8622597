"""`make mutants`: breaks one line of the project at a time, in a copy, and runs the tests that must notice.

list.toml names the changes. A change that no test notices has survived, and fails the run. The tests must pass in the
unchanged copy first.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent.parent
LIBRARIES = ("service/engine/_native_*.so", "training/_fused_*.so")
# Bytecode is of the unchanged sources. Hypothesis draws the same examples each time. Threads: as in conftest.py.
ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "1", "CI": "true", "OMP_NUM_THREADS": "1"}
HANG_SECONDS = 120  # of one test, which then fails; pytest-timeout ends it even where it does not return to Python
PASSED, FAILED = 0, 1  # pytest's exit statuses; others are no verdict on a change


class Mutant(NamedTuple):
    file: str
    old: str  # occurs exactly once in the file
    new: str
    tests: str  # a node of pytest

    def __str__(self) -> str:
        return f"{self.file}: {self.old.strip()} → {self.new.strip() or 'nothing'}"

    def applied(self, folder: Path) -> str:
        """The changed content of the file. Raises ValueError: the text occurs never, or more than once."""
        content = (folder / self.file).read_text(encoding="utf-8")
        if content.count(self.old) != 1:
            raise ValueError(f"{self.file} must have {self.old!r} once, has it {content.count(self.old)} times")
        return content.replace(self.old, self.new)


def listed() -> list[Mutant]:
    tables = tomllib.loads(Path(__file__).with_name("list.toml").read_text(encoding="utf-8"))
    return [Mutant(file, **entry) for file, entries in tables.items() for entry in entries]


def in_rotation(mutants: list[Mutant], count: int, day: int) -> list[Mutant]:
    """`count` of them, other ones each day, far apart in the list."""
    step = -(-len(mutants) // count)
    return mutants[day % step :: step]


def copy_to(folder: Path) -> None:
    """All files that git does not ignore, and the compiled libraries."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    libraries = [str(path.relative_to(ROOT)) for pattern in LIBRARIES for path in ROOT.glob(pattern)]
    for name in filter(None, [*names, *libraries]):
        if (ROOT / name).is_file():  # not deleted
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    subprocess.run([sys.executable, "-m", "compileall", "-q", folder / "service", folder / "training"], check=True)


def run(folder: Path, tests: Iterable[str]) -> tuple[int, str]:
    """The exit status of pytest, and its last lines. A fork of this process runs it, which has imported torch once."""
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if not child:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os.chdir(folder)
            sys.path[0] = str(folder)
            for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
                del sys.modules[name]
            options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "tools or not tools"]
            options += [f"--timeout={HANG_SECONDS}", "--timeout-method=thread"]
            os._exit(pytest.main([*options, *tests]))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        return status, "".join(output.readlines()[-12:])


def verdict_of(status: int, output: str) -> str:
    if status == FAILED:
        return "hung" if "+ Timeout +" in output else "found"
    if status == PASSED:
        return "SURVIVED" if " passed" in output else "skipped"  # for want of a program, see tests/toolbox/needs.py
    return "ERROR"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--rotate", type=int, metavar="N", help="try N of the changes, other ones each day")
    parser.add_argument("--only", default="", metavar="TEXT", help="try the changes whose file or text contains TEXT")
    arguments = parser.parse_args()
    mutants = [mutant for mutant in listed() if arguments.only in f"{mutant} {mutant.tests}"]
    if arguments.rotate:
        mutants = in_rotation(mutants, arguments.rotate, datetime.date.today().toordinal())
    started, counts = time.monotonic(), Counter[str]()
    os.environ |= ENVIRONMENT
    sys.dont_write_bytecode = True
    importlib.import_module("torch")
    with tempfile.TemporaryDirectory(prefix="chargpt-mutants-") as name:
        folder = Path(name)
        copy_to(folder)
        status, output = run(folder, sorted({mutant.tests for mutant in mutants}))
        if status != PASSED:
            print(f"{output}\nmake mutants: the tests must pass before a change", file=sys.stderr)
            return 2
        for number, mutant in enumerate(mutants, 1):
            began, file, unchanged = time.monotonic(), folder / mutant.file, folder / "unchanged"
            shutil.copy2(file, unchanged)  # its time too, which its bytecode has
            file.write_text(mutant.applied(folder), encoding="utf-8")
            status, output = run(folder, [mutant.tests])
            unchanged.replace(file)
            verdict = verdict_of(status, output)
            counts[verdict] += 1
            seconds = time.monotonic() - began
            print(f"{number:3}/{len(mutants)} {verdict:8} {seconds:4.0f} s  {mutant}", flush=True)
            if verdict in ("SURVIVED", "ERROR"):
                print(output, flush=True)
    minutes = (time.monotonic() - started) / 60
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()), f"in {minutes:.1f} minutes")
    return 1 if counts["SURVIVED"] or counts["ERROR"] else 0


if __name__ == "__main__":
    sys.exit(main())
