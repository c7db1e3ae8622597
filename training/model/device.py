"""Choose the device, dtype and threads of a run, and the forward and autocast that suit them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Callable, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from service.engine.native import _cpu_flags
from service.model.gpt import GPT
from training.config import ConfigError, TrainConfig
from training.messages import plural
from training.model.fused import FusedForward

BF16_WIDTHS = {"auto": 128, "false": 256}  # by `fused`: least n_embd at which bfloat16 is faster, if the CPU has it


def resolve_auto(config: TrainConfig, world_size: int) -> dict[str, Any]:
    """Return the device, dtype and threads of a run on this machine. The run saves them, because its bits depend on
    them.

    Raises:
        ConfigError: the device is not available or cannot `compile`, or batch_size is not a multiple of
            world_size · accumulate.
    """
    device = pick_device(config.device)
    if config.compile and device == "cpu":
        raise ConfigError("compile works on cuda only; on a cpu the training step is hand-written")
    if config.batch_size % (world_size * config.accumulate):
        raise ConfigError(
            f"batch_size must be a multiple of processes × accumulate = {world_size} × {config.accumulate}, got "
            f"{config.batch_size}"
        )
    threads = config.threads or torch.get_num_threads()
    resolved: dict[str, Any] = {"device": device, "dtype": config.dtype, "threads": threads}
    if config.dtype == "auto":
        resolved["dtype"] = suitable_dtype(replace(config, **resolved), _cpu_flags())
    return resolved


def suitable_dtype(config: TrainConfig, cpu_flags: Set[str]) -> Literal["float32", "bfloat16"]:
    """Return the dtype that "auto" stands for.

    It depends only on the machine's features and the settings, so that a command repeats its bytes. On a CPU, products
    of narrow matrices gain less from bfloat16 than its conversions cost.
    """
    if config.device == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    multiplies_bf16 = config.device == "cpu" and "avx512_bf16" in cpu_flags
    return "bfloat16" if multiplies_bf16 and config.n_embd >= BF16_WIDTHS[config.fused] else "float32"


def training_forward(model: GPT, config: TrainConfig) -> Callable[..., Tensor]:
    """Return the fastest forward, idx (B, T) -> logits (B, T, V), for training with the config on its device.

    `selfcheck` compares a FusedForward with GPT.forward.
    """
    if config.device == "cpu" and config.fused == "auto":
        return FusedForward(model, torch.bfloat16 if config.dtype == "bfloat16" else torch.float32)
    compiled: Callable[..., Tensor] = torch.compile(model) if config.compile else model
    return compiled


def draws(model: GPT) -> bool:
    """Return whether the model on the CPU, in training mode, draws random numbers, as dropout does."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.get_rng_state()
        model(torch.zeros(1, 2, dtype=torch.long))
        return not torch.equal(before, torch.get_rng_state())


def halves(model: GPT, config: TrainConfig, rows: int) -> ThreadPoolExecutor | None:
    """Return two Python threads to compute the gradients of the two halves of a step's `rows` at once, or None.

    The two threads wait for each other twice a step, torch's own threads hundreds of times. A run stays deterministic,
    because torch adds to a gradient under a lock and the order of two summands does not matter. With dropout it would
    not be deterministic, because both threads draw from one generator.
    """
    is_even = config.threads % 2 == 0  # each half has half of torch's threads
    if not (config.device == "cpu" and is_even and rows > 1 and config.accumulate == 1) or draws(model):
        return None
    return ThreadPoolExecutor(2, "half", torch.set_num_threads, (config.threads // 2,))


def autocast(config: TrainConfig) -> torch.autocast:
    """Return the context in which matrix products have the config's dtype."""
    return torch.autocast(config.device, torch.bfloat16, enabled=config.dtype == "bfloat16")


def pick_device(device: str) -> Literal["cpu", "cuda"]:
    """Return the device to use. "auto" stands for cuda if a GPU is available, else for cpu.

    Raises:
        ConfigError: the device is not available, or this machine has fewer GPUs than processes.
    """
    if device in ("auto", "cuda") and (num_gpus := torch.cuda.device_count()):
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's
        if processes > num_gpus:
            raise ConfigError(
                f"device cuda needs a GPU for each of {plural(processes, 'process')} on this machine, which has "
                f"{num_gpus}"
            )
        return "cuda"
    if device in ("auto", "cpu"):
        return "cpu"
    raise ConfigError(f"device {device!r} is not available on this machine")


def keep_freed_memory() -> None:
    """Make the allocator of glibc keep freed memory for reuse. With another C library, do nothing.

    By default, the allocator returns large blocks to the kernel, and each step causes page faults to get them back.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in (-3, 1 << 30), (-1, 1 << 30), (-2, 1 << 26):  # mmap threshold, trim threshold, top pad
            mallopt(parameter, value)


def machine(device: torch.device) -> dict[str, Any]:
    """Return the system, CPU, number of cores and GPU, which are recorded with measured figures."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    return {"system": platform.system(), "cpu": name, "cores": os.cpu_count(), **gpu}
