"""Data-parallel training in the processes that torchrun starts, on several GPUs or machines: every process holds the
whole model and takes a share of each batch.

Knows nothing about models; it sums tensors over gloo between CPUs and NCCL between GPUs.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

# The others wait at most so long while the main process encodes a text, scores a checkpoint, samples or saves. Gloo
# notices a lost process by its closed connection; NCCL by this timeout alone.
TIMEOUT = timedelta(hours=1)

T = TypeVar("T")


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
        local_rank, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local_rank < num_gpus:
            torch.cuda.set_device(local_rank)
        with _lost_process():
            dist.init_process_group("cpu:gloo,cuda:nccl" if num_gpus else "gloo", timeout=TIMEOUT)
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

    def from_main(self, decide: Callable[[], T]) -> T | None:
        """What `decide` returns in the main process, in every process; None in the others if it raises there."""
        values: list[T | None] = [None]
        try:
            if self.is_main:
                values = [decide()]
        finally:
            if self.size > 1:
                with _lost_process():
                    dist.broadcast_object_list(values)
        return values[0]


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
