"""Training speed: FLOPs per character, the machine's matrix-product peak, and the allocator setting that raises it."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import torch
from torch import nn
from torch.utils.benchmark import Timer


def flops_per_character(model: Any, window: float | None = None) -> float:
    """FLOPs per character of the matrix products of a forward and backward, in windows of block_size or `window`.

    Counted as in PaLM (Chowdhery et al. 2022), appendix B: all T² attention scores, without the optimizer.
    `model` is any module whose `config` has n_layer, n_embd and block_size.
    """
    config = model.config
    linear: int = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    scores: float = config.n_layer * config.n_embd * (window or config.block_size)  # q·k; weights·v takes as many
    return 3 * (2 * linear + 2 * 2 * scores)


def matmul_peak(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.1) -> float:
    """The highest measured FLOP/s of square matrix products, at torch's number of threads.

    Takes at least `seconds` for each size.
    """
    best = 0.0
    for n in (512, 1024) if device.type == "cpu" else (2048, 4096, 8192):
        a, b = torch.randn(2, n, n, device=device, dtype=dtype)
        timer = Timer("a @ b", globals={"a": a, "b": b}, num_threads=torch.get_num_threads())
        best = max(best, 2 * n**3 / min(timer.blocked_autorange(min_run_time=seconds).times))
    return best


def keep_freed_memory() -> None:
    """Make glibc's allocator keep freed memory for reuse; does nothing with other C libraries.

    By default it returns large blocks to the kernel, and each step would fault them in again.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in (-3, 1 << 30), (-1, 1 << 30), (-2, 1 << 26):  # of mmap, trim threshold, top pad
            mallopt(parameter, value)
