"""Training speed: FLOPs per character, the machine's matrix-product peak, and an allocator setting that saves time."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import torch
from torch import nn
from torch.utils.benchmark import Timer


def flops_per_character(model: Any, window: float | None = None) -> float:
    """Return the FLOPs per character of the matrix products in a forward and a backward pass.

    model: a module with a `config` that has n_layer, n_embd and block_size.
    window: the characters per window; None: block_size.

    The count follows PaLM (Chowdhery et al. 2022, appendix B): it includes all T² attention scores, and excludes the
    optimizer.
    """
    config = model.config
    linear: int = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    scores: float = config.n_layer * config.n_embd * (window or config.block_size)  # q·k; weights·v has as many
    return 3 * (2 * linear + 2 * 2 * scores)


def matmul_peak(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.1) -> float:
    """Measure square matrix products of several sizes with torch's number of threads; return the highest FLOP/s.

    Each size takes at least `seconds`.
    """
    best = 0.0
    for n in (512, 1024) if device.type == "cpu" else (2048, 4096, 8192):
        a, b = torch.randn(2, n, n, device=device, dtype=dtype)
        timer = Timer("a @ b", globals={"a": a, "b": b}, num_threads=torch.get_num_threads())
        best = max(best, 2 * n**3 / min(timer.blocked_autorange(min_run_time=seconds).times))
    return best


def keep_freed_memory() -> None:
    """Make the allocator of glibc keep freed memory for reuse. With another C library, do nothing.

    By default, the allocator returns large blocks to the kernel, and each step causes page faults to get them back.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in (-3, 1 << 30), (-1, 1 << 30), (-2, 1 << 26):  # mmap threshold, trim threshold, top pad
            mallopt(parameter, value)
