"""Catch the signals that end a run after a save, and outlive a closed terminal until then."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

# If several arrive, the first of these counts. A closed terminal sends SIGHUP.
STOPPING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


@contextlib.contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Append the number of a signal in STOPPING to the list that is yielded. A second signal kills the process.

    SIGHUP stays ignored if the process was started so, by nohup.
    """
    received: list[int] = []

    def record(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if number == signal.SIGHUP:
            leave_terminal()
        for each in previous:
            signal.signal(each, signal.SIG_DFL)

    caught = [number for number in STOPPING if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, record) for number in caught}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def leave_terminal() -> None:
    """Send what is printed to /dev/null if the terminal is closed, where each write would fail."""
    for descriptor in (1, 2):
        polled = select.poll()
        polled.register(descriptor, 0)
        if polled.poll(0):  # POLLHUP or POLLERR
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


class StandardError:
    """Standard error for a console. What is written after the terminal has closed is lost.

    The terminal fails before the signal arrives, so a line of progress could end the run without a save.
    """

    def write(self, text: str) -> int:
        with self._without_terminal():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._without_terminal():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def _stream(self) -> Any:
        return getattr(sys.stderr, "rich_proxied_file", sys.stderr)  # rich replaces sys.stderr while it shows a bar

    @contextlib.contextmanager
    def _without_terminal(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            leave_terminal()
