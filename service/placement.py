"""The choice of accelerator, backend, dtype and number of slots.

The main process decides before it starts any other process, without torch.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import runpy
import subprocess
import sys
from pathlib import Path

from litserve.connector import check_cuda_with_nvidia_smi

from service.engine import native
from service.engine.backends import resolve, slots_that_fit
from service.model.config import GPTConfig
from service.settings import Settings
from service.words import plural

logger = logging.getLogger(__name__)

SLOTS = 72  # cache slots without a GPU; more add no speed


class BackendError(ValueError):
    """A setting cannot work here: address, backend, dtype, devices, memory or disk."""


def choose_accelerator(asked: str) -> str:
    """Resolve `auto`: cuda with a GPU and a torch built for it, otherwise cpu.

    LitServe's own choice would import torch into this process, which does not need it, or take the CPU despite a GPU
    because torch is not imported.

    Raises BackendError: cuda was asked for, but torch is built without it.
    """
    if asked == "cpu":
        return asked
    version, cuda = torch_build()
    lacking = f"torch {version} is built without CUDA" if version else "torch is not installed"
    if asked == "cuda":
        if cuda is None:
            raise BackendError(f"--accelerator cuda: {lacking}")
        return asked
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip():
        return "cpu"
    by_name = any(part.strip().startswith(("GPU-", "MIG-")) for part in (visible or "").split(","))
    if not by_name and not count_gpus():  # count_gpus compares only numbers
        if visible:
            logger.warning("CUDA_VISIBLE_DEVICES=%s names no GPU that nvidia-smi lists: serving on the CPU", visible)
        return "cpu"
    if cuda is None:
        logger.warning("%s: serving on the CPU although there is a GPU", lacking)
        return "cpu"
    return "cuda"


def count_gpus() -> int:
    """Return the GPUs that nvidia-smi and CUDA_VISIBLE_DEVICES give; 0 if nvidia-smi cannot run."""
    try:
        return check_cuda_with_nvidia_smi()
    except OSError:  # a folder of PATH without permission, such as root's under sudo
        return 0


def check_devices(devices: int, accelerator: str) -> None:
    """Check the number of devices. LitServe would ignore extra CPUs, and start workers without end on GPUs.

    Raises BackendError: there are too few devices.
    """
    if accelerator == "cpu" and devices > 1:
        raise BackendError(
            f"--devices {devices}: a CPU is one device; --workers-per-device starts several inference processes on it"
        )
    gpus = count_gpus() if accelerator == "cuda" else 0
    if 0 < gpus < devices:  # 0: count_gpus does not count GPUs named by UUID
        found = plural(gpus, "GPU")
        raise BackendError(f"--devices {devices}: nvidia-smi and CUDA_VISIBLE_DEVICES give {found}")


def torch_build() -> tuple[str, str | None]:
    """Return the versions of torch ("" without it) and of its CUDA, from torch's own file, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "", None
    build = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return build["__version__"], build["cuda"]


def choose_slots(settings: Settings, configs: list[GPTConfig], dtype: str, device: str) -> int:
    """Return the number of cache slots per worker.

    A GPU has `workers_per_device` workers for each checkpoint, which get equal parts of its free memory.

    Raises BackendError: for `auto`, no slot fits or the free memory is unknown.
    """
    if settings.max_running_requests != "auto":
        return settings.max_running_requests
    if not device.startswith("cuda"):
        return SLOTS
    free = free_gpu_bytes(settings.devices) / settings.workers_per_device
    slots = min(slots_that_fit(config, dtype, free / len(configs)) for config in configs)
    if not slots:
        raise BackendError(f"--max-running-requests auto: not one sequence fits into {free / 1e9:.1f} GB of GPU memory")
    what = plural(slots, "sequence")
    logger.info("--max-running-requests auto: %.1f GB of free GPU memory hold %s", free / 1e9, what)
    return slots


def free_gpu_bytes(devices: int) -> float:
    """Return the smallest free memory of the first `devices` GPUs. Another process asks torch, which this one lacks.

    Raises BackendError: torch does not give it.
    """
    code = f"import torch; print(min(torch.cuda.mem_get_info(i)[0] for i in range({devices})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise BackendError(
            f"--max-running-requests auto: the free memory of {plural(devices, 'GPU')} is unknown ({reason}); pass a "
            "number"
        )
    return float(done.stdout)


def choose_backend(settings: Settings, device: str) -> tuple[str, str]:
    """Return backend and dtype of every worker. Raises BackendError: the device cannot run them."""
    try:
        backend, dtype = resolve(settings.backend, settings.dtype, device)
    except ValueError as error:
        raise BackendError(f"--backend {settings.backend} --dtype {settings.dtype}: {error}") from None
    if settings.backend == "auto" and backend == "torch" and device == "cpu":
        logger.warning("serving on backend torch, because native is not available: %s", native.why_not())
    return backend, dtype
