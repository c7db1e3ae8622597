"""Work that may be long, as generators: who runs them decides when they pause, and where slow functions run."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from typing import Any, NamedTuple, TypeVar

Result = TypeVar("Result")


class Job(NamedTuple):
    """A slow function without side effects. Its result may be kept under the key."""

    key: Hashable
    key_bytes: int  # memory of the key
    call: Callable[[], Any]


# Yields None where it may pause, and a Job for whose result it waits. Returns its result.
Work = Generator[Job | None, Any, Result]


def run(work: Work[Result], find: Callable[[Job], Any] = lambda job: job.call()) -> Result:
    """Run work to its end here and now. find: gives the result of a job."""
    result = None
    try:
        while True:
            job = work.send(result)
            result = None if job is None else find(job)
    except StopIteration as end:
        return end.value
