"""Backend cuda without a card: what a launch costs the host, and how many operations a replay has.

The host's part runs as on a GPU: the scheduler, the plan, copies of results, the update of every sequence. Replays do
nothing, so that what is left is the time that a card would have to hide. Pinning memory and the driver's calls (a copy
each way and a launch: some 20 µs) are not included.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from service.engine.cuda import STEPS, CudaRunner
from service.engine.engine import Engine
from service.engine.runner import Piece
from service.model.gpt import GPT
from service.model.params import SamplingParams
from service.wire import Submit


class Recorder(TorchDispatchMode):
    """Every operation with the shapes of its tensors, views excluded; composite ones as what they consist of.

    RMSNorm is one operation, as it is one kernel on a GPU; a CPU has none for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name()
        is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
        if is_composite and name != "aten::rms_norm":
            with self:
                return function.decompose(*args, **(kwargs or {}))
        found = function(*args, **(kwargs or {}))
        if not function.is_view and name not in ("aten::_unsafe_view", "aten::_reshape_alias"):
            leaves = torch.utils._pytree.tree_leaves((args, kwargs, found))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            self.calls.append((name, tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)))
        return found


class Stubbed(CudaRunner):
    """Every replay does nothing; each choice is id 0."""

    def _capture(self, name: tuple[object, ...], function: object) -> None:
        self.is_async, self._graphs[name] = True, lambda: None


def host_seconds(model: GPT, rows: int, steps: int = max(STEPS), repeats: int = 100) -> float:
    """Median time of a turn of the engine over `rows` decoding sequences with `steps` each, replays excluded."""
    runner = Stubbed(model, rows, "float32", "cpu")
    runner.step_counts = (1, steps)
    engine = Engine(runner, step_seconds=1.0)
    for number in range(rows):
        engine.submit(Submit(number, [1], steps * (repeats + 20), SamplingParams(seed=number)))
    seconds: list[float] = []
    while engine.has_work:
        started = time.perf_counter()
        engine.step()
        if engine.stats.num_decode_tokens == steps * rows:
            seconds.append(time.perf_counter() - started)
    assert len(seconds) >= repeats
    return statistics.median(seconds)


def count_operations(model: GPT) -> dict[str, int]:
    """Kernels of a decode replay with neutral sampling parameters: "fixed" per replay, "step" per step.

    Counted on a CPU. Allocations count too, as some fill.
    """
    runner = CudaRunner(model, 2, "float32", "cpu")
    runner.start(0, SamplingParams(), [1])
    runner.prefill([Piece(0, np.array([1]), True)])

    def count(steps: int) -> int:
        with Recorder() as recorder:
            runner.decode(np.array([0]), np.array([steps]))
        return len(recorder.calls)

    one, four = count(1), count(4)
    step = (four - one) // 3
    return {"fixed": one - step, "step": step}
