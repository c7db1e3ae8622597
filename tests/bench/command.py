"""Shared by the measuring programs: command-line options, the context of a run, functions in fresh processes."""

from __future__ import annotations

import argparse
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
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
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
        "--threads", type=integer(1, 1024), default=cpus_per_worker({}), metavar="N",
        help="CPU threads per engine (default: %(default)s, as the service)",
    )  # fmt: skip


def integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be comma-separated integers, got {text!r}") from None


def integer(low: int, high: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be in [{low}, {high}], got {value}")
        return value

    return number


def subset(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Comma-separated names, returned in the order of `names`."""
    allowed = list(names)

    def convert(text: str) -> list[str]:
        given = text.split(",")
        for name in given:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"unknown part {name!r}; allowed: {', '.join(allowed)}")
        return [name for name in allowed if name in given]

    return convert


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
        "machine": machine(torch.device(device())),
        "load_average": os.getloadavg()[0],  # before the first measurement; near 0 on a quiet machine
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
    }


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


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
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, factory, arguments, options))
        self._process.start()
        theirs.close()
        try:
            self._receive()
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        self._connection.send((method, arguments, options))
        return self._receive()

    def _receive(self) -> Any:
        try:
            result, error = self._connection.recv()
        except EOFError:
            self._process.join()
            raise BenchError(f"its process ended with status {self._process.exitcode}") from None
        if error:
            raise BenchError(error)
        return result

    def close(self) -> None:
        self._connection.close()  # its process ends by itself, unless it is in the middle of a call
        self._process.join(2)
        self._process.terminate()
        self._process.join(30)
        self._process.kill()

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(connection: Connection, factory: Callable[..., Any], arguments: Any, options: Any) -> None:
    os.setpgid(0, 0)  # Ctrl-C reaches the parent only, which ends this process
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # restores the terminal
    served: Any = None
    method = ""  # the constructor
    while True:
        try:
            if method:
                result = getattr(served, method)(*arguments, **options)
            else:
                served, result = factory(*arguments, **options), None
            connection.send((result, None))
        except Exception as error:
            traceback.print_exc()
            connection.send((None, f"{type(error).__name__}: {error}"))
        try:
            method, arguments, options = connection.recv()
        except (EOFError, OSError):  # closed
            return
