"""A run and its machine: how much of what the machine can do it uses, and what keeps it from using more."""

from __future__ import annotations

import contextlib
import ctypes
import time
from typing import Any

import torch
from torch import nn

# mallopt(3): the parameter's number and what to set it to, in bytes.
M_TRIM_THRESHOLD = (-1, 1 << 30)
M_TOP_PAD = (-2, 1 << 26)
M_MMAP_THRESHOLD = (-3, 1 << 30)


def flops_per_character(model: Any) -> int:
    """Floating-point operations of the matrix products of a forward and backward, per character.

    Counted as by Chowdhery et al. 2022 (PaLM), appendix B: all T² scores of attention, nothing of the optimizer.
    `model` is any whose `config` has n_layer, n_embd and block_size.
    """
    config = model.config
    linear: int = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    scores: int = config.n_layer * config.n_embd * config.block_size  # and as many to weigh the values
    return 3 * (2 * linear + 2 * 2 * scores)


def matmul_peak(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.1) -> float:
    """FLOP/s of the fastest product of square matrices found; takes `seconds` for each of three sizes, or more.

    On a CPU with as many threads as torch has been set to.
    """
    best = 0.0
    for n in (512, 1024, 2048) if device.type == "cpu" else (2048, 4096, 8192):
        a = torch.randn(n, n, device=device, dtype=dtype)
        b = torch.randn(n, n, device=device, dtype=dtype)
        repeats = 1
        deadline = time.perf_counter() + seconds
        while True:
            _wait_for(device)
            started = time.perf_counter()
            for _ in range(repeats):
                a @ b
            _wait_for(device)
            now = time.perf_counter()
            best = max(best, 2 * n**3 * repeats / (now - started))
            if now > deadline:
                break
            if now - started < 0.01:  # too short for the clock and, on a GPU, for the launches to hide
                repeats *= 2
    return best


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def keep_freed_memory() -> None:
    """Have the C library keep the memory of freed tensors for the next ones, where it can be told to (glibc).

    It gives large blocks back to the system at once, and each step of a run would ask for them again, page by page.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD:
            mallopt(parameter, value)
