"""Shared by the measuring programs: command-line options, the context of a run, functions in fresh processes."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import multiprocessing
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from service.settings import cpus_per_worker
from tests.toolbox.figures import write_figures
from training.device import machine

BUSY_LOAD = 0.5  # load average above which figures are unreliable


class BenchError(RuntimeError):
    """A measurement failed; the message says why."""


# Command line


def build_parser(module: str, doc: str | None, out: str) -> argparse.ArgumentParser:
    """A parser with `doc` as its help and the option --out."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, default=Path(out), metavar="DIR", help="(default: %(default)s)")
    return parser


def add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads", type=int, default=cpus_per_worker({}), metavar="N",
        help="CPU threads per engine (default: %(default)s, as the service)",
    )  # fmt: skip


def integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be comma-separated integers, got {text!r}") from None


def add_only(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """The option --only, comma-separated; its value is in the order of `names`."""
    allowed = list(names)

    def convert(text: str) -> list[str]:
        if unknown := set(text.split(",")) - set(allowed):
            raise argparse.ArgumentTypeError(f"unknown {', '.join(sorted(unknown))}; allowed: {', '.join(allowed)}")
        return [name for name in allowed if name in text.split(",")]

    parser.add_argument("--only", type=convert, metavar="PARTS", help=f"of {','.join(allowed)} (default: all)")


# A run


def prepare_process() -> None:
    """Set up signals and OpenMP for this process and the engines that it starts."""
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # as python -m service and python -m training do
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C


def context(module: str, *packages: str) -> dict[str, Any]:
    """Date, command, revision, machine and versions of a run."""
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "revision": revision(),
        "machine": machine(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "load_average": os.getloadavg()[0],  # before the first measurement; near 0 on a quiet machine
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
    }


def revision() -> str | None:
    """The commit of this tree, with "-dirty" if it has changes; None outside a repository."""
    try:
        return run_checked(["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty"]).strip()
    except BenchError:
        return None


class Progress:
    """Prints progress to stderr, with the seconds since it was created."""

    def __init__(self) -> None:
        self.started = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def __call__(self, text: str) -> None:
        print(f"[{self.seconds:5.0f} s] {text}", file=sys.stderr, flush=True)


class Run:
    """The results so far of a measuring program, which are rewritten to OUT/NAME.json and OUT/NAME.md as they come.

    results: to begin with, beside the context of the run.
    """

    tables = ""  # another name of the second file

    def __init__(self, module: str, out: Path, name: str, packages: tuple[str, ...], **results: Any):
        self.out, self.name, self.say = out, name, Progress()
        self.results: dict[str, Any] = context(module, *packages) | results | {"errors": {}}

    def markdown(self) -> str:
        raise NotImplementedError

    def write(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        write_figures(self.out / f"{self.name}.json", self.results)
        (self.out / (self.tables or f"{self.name}.md")).write_text(self.markdown(), encoding="utf-8")

    def parts(self, names: Iterable[str], into: dict[str, Any]) -> None:
        """Call the method of each name for its figures; one that fails leaves its reason in the results."""
        for name in names:
            self.say(f"{name} …")
            started = self.say.seconds
            try:
                into[name] = getattr(self, name)() | {"load_average": os.getloadavg()[0]}
                into[name]["elapsed_seconds"] = self.say.seconds - started
            except Exception as error:
                traceback.print_exc()
                self.results["errors"][name] = f"{type(error).__name__}: {error}"
            self.write()

    def main(self, measure: Callable[[], object]) -> int:
        """Measure and print the tables; returns the exit status."""
        prepare_process()
        if (load := self.results["load_average"]) > BUSY_LOAD:
            self.say(f"WARNING: the machine is busy (load {load:.1f}): times will be too long")
        try:
            measure()
            stopped = False
        except KeyboardInterrupt:
            stopped = True
        self.write()
        print(self.markdown())
        self.say(f"{'stopped; ' if stopped else ''}figures: {self.out / self.name}.json, .md")
        return 130 if stopped else 1 if self.results["errors"] else 0


# Fresh processes


def run_checked(command: Sequence[object], **options: Any) -> str:
    """Run a program; returns its stdout.

    Raises:
        BenchError: it cannot be started, or ended with a status other than 0.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", **options)
    except OSError as error:
        raise BenchError(f"{words[0]} cannot be started: {error}") from None
    if done.returncode:
        end = (done.stdout + done.stderr)[-3000:]
        raise BenchError(f"{shlex.join(words)} ended with status {done.returncode}:\n{end}")
    return done.stdout


def in_child(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Call `function` in a fresh process, which ends with this call in any case.

    Raises:
        BenchError: it raised, or its process was killed.
    """
    with Remote(partial, function) as remote:
        return remote.call("__call__", *arguments)


class Remote:
    """An object in a fresh process of its own; its methods are called from here, one at a time.

    Systems that are compared live in one each, so that they share nothing, and are measured in turns.

    Raises:
        BenchError: a call, or the constructor, raised, or the process was killed.
    """

    def __init__(self, factory: Callable[..., Any], *arguments: Any, **options: Any):
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        self._process = self._result(_begin)
        try:
            self._result(_make, factory, arguments, options)
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._result(_call, method, arguments, options)

    def _result(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self._pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            raise BenchError("its process was killed") from None
        except Exception as error:
            raise BenchError(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it may be in the middle of a call
            os.kill(self._process, signal.SIGTERM)
        self._pool.shutdown()

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _begin() -> int:
    os.setpgid(0, 0)  # Ctrl-C reaches the parent only, which ends this process
    return os.getpid()


def _make(factory: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    global _made
    _made = factory(*arguments, **options)


def _call(method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return getattr(_made, method)(*arguments, **options)


_made: Any = None  # the object of a Remote, in its process
