"""The choice of a backend: resolve `auto` for a device, estimate the slots that fit, and open the runner.

Backends that need torch are imported only when they are opened.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from service.engine import native
from service.engine.runner import Runner
from service.engine.selfcheck import SelfCheckError
from service.model.checkpoint import Checkpoint
from service.model.config import GPTConfig
from service.model.counts import COUNTS, Counts

if TYPE_CHECKING:
    from service.model.gpt import GPT


def resolve(backend: str, dtype: str, device: str) -> tuple[str, str]:
    """Return the backend and dtype to use on a device ("cpu", "cuda:0", …), with `auto` resolved.

    Raises:
        ValueError: the backend or dtype cannot be used here.
    """
    kind = device.split(":")[0]
    if backend == "auto":
        backend = "cuda" if kind == "cuda" else "native" if kind == "cpu" and native.why_not() is None else "torch"
    elif backend == "cuda" and kind != "cuda":
        raise ValueError(
            f"backend cuda runs on an NVIDIA GPU, and none can be used here (device {device}); choose auto"
        )
    elif backend == "native":
        if kind != "cpu":
            raise ValueError(f"backend native runs on a cpu, got device {device}; choose auto, or the accelerator cpu")
        if reason := native.why_not():
            raise ValueError(f"backend native is not available: {reason}; choose torch or auto")
    if backend in ("cuda", "torch") and find_spec("torch") is None:
        reason = native.why_not()
        instead = f"backend native is not available: {reason}; " if reason else ""
        raise ValueError(f"{instead}backend {backend} needs torch, which is not installed: install the extra [torch]")
    if backend == "native" and dtype not in ("auto", *native.DTYPES):
        raise ValueError(
            f"dtype must be auto, {' or '.join(native.DTYPES)} for backend native, got {dtype}; choose backend torch"
        )
    if dtype == "auto":
        # torch's kernels round differently at each batch size. Only in float64 are texts practically unaffected.
        dtype = "float64" if backend == "torch" else "float32"
    return backend, dtype


def slots_that_fit(config: GPTConfig, dtype: str, free_bytes: float) -> int:
    """Return how many cache slots of backend cuda, 0 to 4096, fit into 90% of a GPU's free memory."""
    assert config.n_inner is not None
    size = {"float64": 8, "float32": 4, "bfloat16": 2}[dtype]
    C, heads, hs, V = config.n_embd, config.n_head + config.n_kv_head, config.head_dim, config.vocab_size
    weights = size * config.num_parameters
    cache = size * 2 * config.n_layer * config.n_kv_head * (config.block_size + 1) * hs
    rotation = size * 2 * config.n_layer * heads * hs
    activations = size * (8 * C + 4 * heads * hs + 5 * config.n_inner + 16 * config.block_size)  # masks of 16 steps
    sampling = 8 * V * 60  # logits of 16 steps, bias, counts and the sampler's temporary tensors
    spare = 1 << 30  # CUDA, the libraries' workspaces, pieces of prompts
    per_slot = cache + rotation + activations + sampling
    return max(0, min(4096, int((0.9 * free_bytes - weights - spare) / per_slot)))


def open_runner(
    source: Checkpoint | GPT,
    backend: str = "auto",
    dtype: str = "auto",
    slots: int = 32,
    threads: int = 1,
    device: str = "cpu",
    counts: Counts | None = None,
) -> Runner:
    """Open a runner for a checkpoint's model, or for a copy of a model.

    counts: for a model that is no checkpoint; a checkpoint has its own.

    Raises:
        ValueError: as `resolve`; or the checkpoint cannot be loaded.
        SelfCheckError: the backend does not compute the model.
    """
    backend, dtype = resolve(backend, dtype, device)
    if isinstance(source, Checkpoint):
        counts = source.load_counts()
    if backend == "cuda":
        _refuse_mixture(backend, counts)
    if backend == "native":
        if isinstance(source, Checkpoint):
            weights = source.load_weights()
        else:
            weights = {name: value.detach().cpu().numpy() for name, value in source.state_dict().items()}
        return native.NativeRunner(source.config, weights, slots, threads, dtype, counts)
    import torch

    torch.set_num_threads(threads)
    model = source.load_model() if isinstance(source, Checkpoint) else source
    if backend == "cuda":
        from service.engine.cuda import CudaRunner

        return CudaRunner(model, slots, dtype, device)
    from service.engine.eager import TorchRunner

    return TorchRunner(model, slots, dtype, device, counts)


def _refuse_mixture(backend: str, counts: Counts | None) -> None:
    """Raise SelfCheckError if a backend that cannot mix would have to."""
    if counts is not None and counts.is_mixed:
        raise SelfCheckError(
            f"backend {backend} does not mix the network with the counts of {COUNTS}: use --backend torch"
        )
