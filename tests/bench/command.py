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
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from service.settings import cpus_per_worker
from tests.toolbox.figures import dumps
from training.model.device import machine

BUSY_LOAD = 0.5  # load average above which figures are unreliable


class BenchError(RuntimeError):
    """A measurement failed; the message says why."""


def build_parser(module: str, doc: str | None, out: str) -> argparse.ArgumentParser:
    """A parser with `doc` as its help and the option --out."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path(out), metavar="DIR", help="(default: %(default)s)")
    return parser


def add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads", type=int, default=cpus_per_worker({}), metavar="N",
        help="CPU threads per engine (default: %(default)s, as the service)",
    )  # fmt: skip


def add_only(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    allowed = list(names)
    parser.add_argument("--only", nargs="+", choices=allowed, metavar="NAME", help=f"of {', '.join(allowed)}")


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


Markdown = Callable[[dict[str, Any]], str]  # the tables of results


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

    packages: whose versions count. results: to begin with, beside the context of the run.
    """

    tables = ""  # another name of the second file

    def __init__(self, module: str, out: Path, name: str, markdown: Markdown, packages: Iterable[str], **results: Any):
        self.out, self.name, self.markdown, self.say = out, name, markdown, Progress()
        self.results: dict[str, Any] = context(module, *packages) | results | {"errors": {}}

    def write(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / f"{self.name}.json").write_text(dumps(self.results) + "\n", encoding="utf-8")
        (self.out / (self.tables or f"{self.name}.md")).write_text(self.markdown(self.results), encoding="utf-8")

    @contextlib.contextmanager
    def noted(self, name: str) -> Iterator[None]:
        """For what gives figures: if it fails, its reason is in the results."""
        self.say(f"{name} …")
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.results["errors"][name] = f"{type(error).__name__}: {error}"
        self.write()

    def parts(self, names: Iterable[str], into: dict[str, Any]) -> None:
        """Call the method of each name for its figures."""
        for name in names:
            started = self.say.seconds
            with self.noted(name):
                into[name] = getattr(self, name)() | {"load_average": os.getloadavg()[0]}
                into[name]["elapsed_seconds"] = self.say.seconds - started

    def main(self, measure: Callable[[], object]) -> int:
        """Measure and print the tables; returns the exit status."""
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # as python -m service and python -m training do
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C
        if (load := self.results["load_average"]) > BUSY_LOAD:
            self.say(f"WARNING: the machine is busy (load {load:.1f}): times will be too long")
        try:
            measure()
            stopped = False
        except KeyboardInterrupt:
            stopped = True
        self.write()
        print(self.markdown(self.results))
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


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function` in a fresh process, which ends with this call in any case.

    Raises:
        BenchError: it raised, or its process was killed.
    """
    with Remote(partial, function) as remote:
        return remote.call("__call__", *arguments)


class Remote(contextlib.AbstractContextManager):
    """An object in a fresh process of its own; its methods are called from here, one at a time.

    Systems that are compared live in one each, so that they share nothing, and are measured in turns.

    Raises:
        BenchError: a call, or the constructor, raised, or the process was killed.
    """

    def __init__(self, factory: Callable[..., Any], *arguments: Any, **options: Any):
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs,))
        self._process.start()
        theirs.close()
        try:
            self.call(factory, *arguments, **options)
        except BaseException:
            self.close()
            raise

    def call(self, what: Callable[..., Any] | str, *arguments: Any, **options: Any) -> Any:
        """The result of a method; of the constructor at first."""
        try:
            self._pipe.send((what, arguments, options))
            failure, result = self._pipe.recv()
        except (EOFError, OSError):
            raise BenchError("its process was killed") from None
        if failure:
            raise BenchError(failure)
        return result

    def close(self) -> None:
        self._process.terminate()  # it may be in the middle of a call
        self._process.join()

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(pipe: Any) -> None:
    """Make an object by the first call, and answer the others with its methods."""
    os.setpgid(0, 0)  # Ctrl-C reaches the parent only, which ends this process
    made = None
    while True:
        what, arguments, options = pipe.recv()
        try:
            result = (what if made is None else getattr(made, what))(*arguments, **options)
            made, result = (result, None) if made is None else (made, result)
            pipe.send(("", result))
        except Exception as error:
            traceback.print_exc()
            pipe.send((f"{type(error).__name__}: {error}", None))
