"""Data-parallel training in the processes that torchrun starts, on several GPUs or machines.

Every process holds the whole model and takes a share of each batch. This module knows nothing about models. It sums
tensors with gloo between CPUs and with NCCL between GPUs.
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

# The other processes wait at most this long while the main process encodes a text, scores a checkpoint, samples or
# saves. Gloo detects a lost process by its closed connection, NCCL only by this timeout.
TIMEOUT = timedelta(hours=1)

T = TypeVar("T")


class LostProcessError(RuntimeError):
    """Another process of the run has died, is unreachable or did not answer within TIMEOUT."""


class World:
    """The processes of a run. A world of size 1 does not communicate."""

    joined = False  # whether this process has ever been in a world of several

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size = rank, size

    @classmethod
    @contextlib.contextmanager
    def join(cls) -> Iterator[World]:
        """Join the world that torchrun's environment variables describe, or one of size 1 without them.

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
        """Return this process's part of range(n)."""
        return slice(n * self.rank // self.size, n * (self.rank + 1) // self.size)

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all processes, in place and to the same bits in each."""
        if self.size > 1:
            with _lost_process():
                dist.all_reduce(tensor)
        return tensor

    def from_main(self, decide: Callable[[], T]) -> T | None:
        """Call `decide` in the main process and return its result in every process.

        If it raises in the main process, return None in the others.
        """
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
    """End this process without interpreter shutdown if it has been in a world of several processes.

    A gloo thread can outlive its process group for a moment and would abort an interpreter that shuts down meanwhile.
    """
    if World.joined:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
