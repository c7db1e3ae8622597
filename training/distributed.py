"""Processes that train one model together, each on its share of every batch, equal in all else at every step.

On a CPU two processes of one thread wait for each other once a step, two threads of one process at every operation: as
fast where the cores are quiet, faster where they are not (RECIPE.md). A run starts such processes itself (`launch`); on
several GPUs or machines torchrun does (`World.join`).

Knows nothing of models: it sums and exchanges tensors. gloo between CPUs, NCCL between GPUs.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# One process may evaluate or write while the others wait; one that died is noticed by its closed connection.
TIMEOUT = timedelta(days=1)


class LostProcessError(RuntimeError):
    """Another process of the run has ended, or cannot be reached."""


class World:
    """The processes of a run and this one's place among them."""

    joined = False  # whether this process has ever been one of several

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size = rank, size

    @classmethod
    @contextlib.contextmanager
    def join(cls) -> Iterator[World]:
        """The world that torchrun's (or `launch`'s) variables describe; without them, this process alone."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            yield cls()
            return
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        with _lost():
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=TIMEOUT)
        cls.joined = True
        try:
            yield cls(dist.get_rank(), size)
        finally:
            dist.destroy_process_group()

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    def share(self, n: int, unit: int = 1) -> tuple[int, int]:
        """First and end of this process's part of 0…n, in whole units but for the last."""
        units = -(-n // unit)
        first, end = (units * rank // self.size * unit for rank in (self.rank, self.rank + 1))
        return min(first, n), min(end, n)

    def sum_(self, tensor: Tensor) -> Tensor:
        """`tensor` summed over all processes, in place; the same bits in each."""
        if self.size > 1:
            with _lost():
                dist.all_reduce(tensor)
        return tensor

    def exchange(self, parts: Tensor) -> Tensor:
        """`parts` (size, …), of which this process has filled in parts[rank], filled in by all."""
        if self.size > 1:
            with _lost():
                dist.all_gather_single(parts.view(-1), parts[self.rank].flatten().clone())
        return parts

    def broadcast(self, value: Any) -> Any:
        """The main process's value, in all."""
        if self.size == 1:
            return value
        values = [value]
        with _lost():
            dist.broadcast_object_list(values)
        return values[0]

    def gather(self, value: Any) -> list[Any] | None:
        """Every process's value, by rank, in the main process; None in the others."""
        if self.size == 1:
            return [value]
        values = [None] * self.size if self.is_main else None
        with _lost():
            dist.gather_object(value, values)
        return values


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:  # torch's; a ValueError where one of torchrun's variables is missing
        raise LostProcessError(f"a process of this run has ended or cannot be reached: {error}") from None


@contextlib.contextmanager
def launch(processes: int, work: Callable[..., None], *args: Any) -> Iterator[None]:
    """Call work(*args) in `processes` - 1 new processes, while this one does the same as rank 0 of their world.

    They end with this one, however it ends.
    """
    if processes == 1:
        yield
        return
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store above serves, rank 0 need not make one
        "WORLD_SIZE": str(processes),
        "RANK": "0",
        "LOCAL_RANK": "0",
        **({"GLOO_SOCKET_IFNAME": "lo"} if os.path.exists("/sys/class/net/lo") else {}),
    }
    before = {name: os.environ.get(name) for name in variables}
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=_child, args=(rank, work, args), daemon=True) for rank in range(1, processes)]
    try:
        os.environ.update(variables)
        for child in children:
            child.start()
        yield
        for child in children:
            child.join()
    finally:
        for child in children:
            child.kill()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def leave(status: int) -> None:
    """End this process at once if it has been one of several; otherwise nothing.

    gloo can leave a thread behind for a moment, which aborts an interpreter that ends in the usual way meanwhile.
    """
    if World.joined:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _child(rank: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    with contextlib.suppress(LostProcessError):  # the main process says what happened, where it still can
        work(*args)
    leave(0)
