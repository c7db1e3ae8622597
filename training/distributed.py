"""Data-parallel training in the processes that torchrun starts, on several GPUs or machines: every process holds the
whole model and takes a share of each batch.

Knows nothing about models; it reduces and gathers tensors, over gloo between CPUs and NCCL between GPUs.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# The others wait at most so long while the main process encodes a text, scores the last weights or saves. Gloo notices
# a lost process by its closed connection; NCCL by this timeout alone.
TIMEOUT = timedelta(hours=1)


class LostProcessError(RuntimeError):
    """Another process of the run has died or is unreachable."""


class World:
    """The processes of a run; a world of size 1 communicates with nobody."""

    joined = False  # whether this process has ever been in a world of several

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size = rank, size

    @classmethod
    @contextlib.contextmanager
    def join(cls) -> Iterator[World]:
        """The world described by torchrun's environment variables; without them, of size 1.

        Raises:
            LostProcessError: a variable is missing, or another process is unreachable.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            yield cls()
            return
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        with _lost_process():
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=TIMEOUT)
        cls.joined = True
        try:
            yield cls(dist.get_rank(), size)
        finally:
            dist.destroy_process_group()

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def shard(self, n: int) -> slice:
        """This process's part of range(n)."""
        return slice(n * self.rank // self.size, n * (self.rank + 1) // self.size)

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all processes, in place and to the same bits in each."""
        if self.size > 1:
            with _lost_process():
                dist.all_reduce(tensor)
        return tensor

    def all_gather_(self, parts: Tensor) -> Tensor:
        """Fill `parts` (size, …) in place with row r of process r; this process has set its own row."""
        if self.size > 1:
            with _lost_process():
                dist.all_gather_single(parts.view(-1), parts[self.rank].flatten().clone())
        return parts

    def broadcast(self, value: Any) -> Any:
        """The main process's value, in every process."""
        if self.size == 1:
            return value
        values = [value]
        with _lost_process():
            dist.broadcast_object_list(values)
        return values[0]

    def gather(self, value: Any) -> list[Any] | None:
        """The values of all processes, by rank, in the main process; None in the others."""
        if self.size == 1:
            return [value]
        values = [None] * self.size if self.is_main else None
        with _lost_process():
            dist.gather_object(value, values)
        return values


@contextlib.contextmanager
def _lost_process() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:  # torch raises ValueError if one of torchrun's variables is missing
        raise LostProcessError(
            f"a process of this run has died, is unreachable or did not answer for {TIMEOUT}: {error}"
        ) from None


def exit_if_distributed(status: int) -> None:
    """End this process without interpreter shutdown if it has been in a world of several.

    A gloo thread can outlive its process group for a moment and would abort an interpreter that shuts down then.
    """
    if World.joined:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
