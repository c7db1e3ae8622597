"""What a run runs on: device, dtype and threads; the forward and the autocast that suit them."""

from __future__ import annotations

import contextlib
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
from training.fused import FusedForward
from training.messages import plural

BF16_WIDTHS = {"auto": 128, "false": 256}  # by `fused`: n_embd from which on bfloat16 is faster on a CPU that has it


def resolve_auto(config: TrainConfig, world_size: int) -> dict[str, Any]:
    """Device, dtype and threads of a run on this machine. Saved with the run, whose bits depend on them.

    Raises:
        ConfigError: the device is not available, or the batch is not divisible among the `world_size` processes.
    """
    device = pick_device(config.device)
    if config.compile and device == "cpu":
        raise ConfigError("compile works on cuda and mps only; on a cpu the training step is hand-written")
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
    """The dtype of "auto": of the machine's features and the settings alone, so that a command repeats its bytes.

    On a CPU products of narrow matrices gain less from bfloat16 than its conversions cost.
    """
    if config.device == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    multiplies_bf16 = config.device == "cpu" and "avx512_bf16" in cpu_flags
    return "bfloat16" if multiplies_bf16 and config.n_embd >= BF16_WIDTHS[config.fused] else "float32"


def training_forward(model: GPT, config: TrainConfig) -> Callable[..., Tensor]:
    """The fastest idx (B, T) -> logits (B, T, V) for training on the config's device; `selfcheck` compares it."""
    if config.device == "cpu" and config.fused == "auto":
        return FusedForward(model, torch.bfloat16 if config.dtype == "bfloat16" else torch.float32)
    compiled: Callable[..., Tensor] = torch.compile(model) if config.compile else model
    return compiled


def in_halves(config: TrainConfig, rows: int) -> bool:
    """Whether the halves of a step's `rows` are learned from at the same time, in two threads of Python's.

    These wait for each other twice a step, torch's own hundreds of times. A run stays deterministic, as torch adds to a
    gradient under a lock, and the sum of two has no order. With dropout it would not: both draw from one generator.
    """
    is_even = config.threads % 2 == 0  # of torch's threads each has half
    return config.device == "cpu" and is_even and rows > 1 and not config.dropout and config.accumulate == 1


def halves(config: TrainConfig, rows: int) -> ThreadPoolExecutor | None:
    """The two threads, if a step is done `in_halves`."""
    if not in_halves(config, rows):
        return None
    return ThreadPoolExecutor(2, "half", torch.set_num_threads, (config.threads // 2,))


def autocast(config: TrainConfig) -> torch.autocast:
    """Matrix products in the config's dtype."""
    return torch.autocast(config.device, torch.bfloat16, enabled=config.dtype == "bfloat16")


def pick_device(device: str) -> Literal["cpu", "cuda", "mps"]:
    """
    Raises:
        ConfigError: it is not available, or there are fewer GPUs than processes on this machine.
    """
    if device in ("auto", "cuda") and (num_gpus := torch.cuda.device_count()):
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's
        if processes > num_gpus:
            raise ConfigError(
                f"device cuda needs a GPU for each of {plural(processes, 'process')} on this machine, which has "
                f"{num_gpus}"
            )
        return "cuda"
    if device in ("auto", "mps") and torch.backends.mps.is_available():
        return "mps"
    if device in ("auto", "cpu"):
        return "cpu"
    raise ConfigError(f"device {device!r} is not available on this machine")


def machine(device: torch.device) -> dict[str, Any]:
    """System, CPU, cores and GPU, recorded beside measured figures."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    return {"system": platform.system(), "cpu": name, "cores": os.cpu_count(), **gpu}
