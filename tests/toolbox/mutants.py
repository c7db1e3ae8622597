"""`make mutants`: makes small changes to a copy of one source file with mutmut, and prints those that no test notices.

mutmut changes operators, numbers, strings and arguments in functions. It does not change decorated functions, such as
properties, or code outside functions. A change is killed if a test fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import psutil
import pytest
from mutmut.configuration import config
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.state import state
from mutmut.utils.format_utils import get_mutant_name

from service.settings import available_cpus
from tests.toolbox.launch import ROOT

LIBRARIES = ("service/engine/_native_*.so", "training/model/_fused_*.so")
# Hypothesis draws the same examples each time. Threads: as in conftest.py.
ENVIRONMENT = {"CI": "true", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
# By the exit status of the process that ran pytest.
VERDICTS = {0: "survived", 1: "killed", 33: "not reached"}
VERDICTS |= dict.fromkeys((-24, 24, 152), "timed out")  # SIGXCPU


# The three hooks: pytest loads this module as a plugin wherever mutmut runs tests.
def pytest_configure() -> None:
    if os.environ.get("MUTANT_UNDER_TEST") == "stats":  # a process that a test starts cannot report its calls
        del os.environ["MUTANT_UNDER_TEST"]
    # mutmut collects all tests once, then forks. From the same modules pytest would escape backslashes in ids again.
    for name in [name for name in sys.modules if ".test_" in name]:
        del sys.modules[name]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts by file and line, so that the server of a module starts once. mutmut names tests in any order."""
    files = [name.partition("::")[0] for name in config().pytest_add_cli_args_test_selection]
    items.sort(key=lambda item: (files.index(item.nodeid.partition("::")[0]), item.location[1] or 0))


@pytest.hookimpl(tryfirst=True)  # before mutmut reads the calls
def pytest_runtest_teardown() -> None:
    """Counts a test that calls no function of the file for all of them: a process that it starts may call them."""
    state()._stats = state()._stats or set(state().current_function_hashes)


def copy_to(folder: Path) -> None:
    """All files that git does not ignore, and the compiled libraries."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    libraries = [str(path.relative_to(ROOT)) for pattern in LIBRARIES for path in ROOT.glob(pattern)]
    for name in filter(None, [*names, *libraries]):
        if (ROOT / name).is_file():  # not deleted
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def mirror(file: Path) -> str:
    """The test file of a source file: tests/engine/test_worker.py of service/engine/worker.py."""
    folder = file.parts[:1] if file.parts[0] == "training" else file.parts[1:-1][:1]
    return str(Path("tests", *folder, f"test_{file.name}"))


def configure(file: Path, tests: list[str]) -> None:
    settings = {
        "source_paths": ["service", "training"],
        "only_mutate": [str(file)],
        "also_copy": [entry for entry in os.listdir() if entry not in ("service", "training", "tests")],
        "pytest_add_cli_args_test_selection": tests,
        "pytest_add_cli_args": ["-p", "tests.toolbox.mutants"],
        "process_isolation": ["forkserver"],  # torch is not safe to fork once it has run
        "timeout_multiplier": ["3"],  # of the tests' time
        "timeout_constant": ["10"],  # seconds, before the multiplication
    }
    lines = (f"{key} = " + "\n  ".join(values) for key, values in settings.items())
    Path("setup.cfg").write_text("\n".join(["[mutmut]", *lines]), encoding="utf-8")


def source(name: str) -> Path:
    path = Path(name).resolve()
    if not path.is_file() or not any(ROOT / folder in path.parents for folder in ("service", "training")):
        raise argparse.ArgumentTypeError(f"{name} is not a file under service or training")
    return path.relative_to(ROOT)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.toolbox.mutants", description=__doc__)
    parser.add_argument("file", type=source, help="under service or training")
    parser.add_argument("--tests", nargs="*", help="test files, fastest first (default: the one that mirrors the file)")
    parser.add_argument("--count", type=int, default=60, help="changes to make, chosen at random (default 60; 0: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice (default 0)")
    given = parser.parse_args()
    file, tests = given.file, given.tests or [mirror(given.file)]
    if missing := [test for test in tests if not (ROOT / test.partition("::")[0]).is_file()]:
        parser.error(f"{missing[0]} does not exist: name the tests of {file} with TESTS='tests/…'")
    os.environ |= ENVIRONMENT
    with tempfile.TemporaryDirectory(prefix="chargpt-mutants-", ignore_cleanup_errors=True) as name:
        copy_to(Path(name))
        os.chdir(name)
        configure(file, tests)
        found = mutate_file_contents(str(file), file.read_text(encoding="utf-8")).mutant_names
        chosen = random.Random(given.seed).sample(found, min(given.count or len(found), len(found)))
        names = [get_mutant_name(file, mutant) for mutant in chosen]
        command = [Path(sys.executable).with_name("mutmut"), "run", "--max-children", str(available_cpus())]
        try:
            run = subprocess.run([*command, *names])
        except KeyboardInterrupt:
            return 130
        finally:
            for process in psutil.process_iter(["cwd"]):  # left by tests that timed out
                if (process.info["cwd"] or "").startswith(name) and process.pid != os.getpid():
                    process.kill()
        if run.returncode:
            return run.returncode
        statuses = json.loads(Path(f"mutants/{file}.meta").read_text(encoding="utf-8"))["exit_code_by_key"]
        verdicts = {name: VERDICTS.get(statuses[name], f"unclear (status {statuses[name]})") for name in names}
        for name, verdict in verdicts.items():
            if verdict != "killed":
                print(f"\n{name} {verdict}\n{get_diff_for_mutant(name, path=file)}")
    counts = ", ".join(f"{count} {verdict}" for verdict, count in Counter(verdicts.values()).most_common())
    print(f"\n{file}, {len(names)} of {len(found)} changes, seed {given.seed}, {' '.join(tests)}: {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
