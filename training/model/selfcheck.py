"""Check before the first step that gpt.py still agrees with the fast forward, the checkpoints and the service.

fused.py implements the model a second time and service/model/attention.py a third time. Neither follows a change of
gpt.py.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from service.engine.backends import open_runner
from service.engine.runner import NONE, Piece, Report, Runner
from service.engine.selfcheck import TOLERANCES, SelfCheckError, other_weight
from service.model.attention import logits_of
from service.model.checkpoint import layout
from service.model.counts import Counts, mixed_logits
from service.model.gpt import GPT, Block
from service.model.params import SamplingParams
from service.wire import floats
from training.messages import Refusal
from training.model.fused import FusedForward

# Largest error of a tensor, as a share of its norm. The comparison in float32 finds every other formula. The comparison
# in bfloat16, which rounds, finds errors of the kernels for that type.
STEP_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.3}
OF_FORMULAS, OF_KERNELS = (1, 512), (3, 64)  # windows that compare them, and the most characters of each
SERVED = 8  # characters compared with the service's reference
IS_SAME = 1e-3  # largest error of a logit of the same formula, as a share of the largest logit or of 1

Named = dict[str, Tensor]

NOT_SERVABLE = (
    "gpt.py has changed: of the service's backends, only torch will compute this model; serve it with --backend torch "
    "(training/README.md, Changing the model)"
)


def first_difference(model: GPT, dtype: torch.dtype) -> str | None:
    """Return a message if the fast forward in `dtype` differs from GPT.forward, else None.

    Compares the residual stream, the logits, the loss and the gradients. Takes random weights, because the projections
    of a new model are zero and hide the operations before them.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, config = _randomized(model), model.config
        if wrong := other_weight(config, model.state_dict()):
            return f"the fast step of fused.py has other weights, so this run goes through autograd: {wrong}"
        for each, (windows, length) in ((torch.float32, OF_FORMULAS), (dtype, OF_KERNELS)):
            idx = torch.randint(config.vocab_size, (windows, min(config.block_size, length) + 1))
            model.train(each == torch.float32)  # dropout draws the same masks in both only in float32
            expected = _through_autograd(model, idx)
            try:
                where = _first(_through_fused(model, each, idx), expected, STEP_TOLERANCES[each])
            except Exception as error:  # a model with other parts may raise anything
                return f"the fast step fails ({type(error).__name__}: {error}), so this run goes through autograd"
            if where:
                return f"the fast step of fused.py differs first in {where}, so this run goes through autograd"
    return None


def _randomized(model: GPT) -> GPT:
    """Return a copy on the CPU with random weights."""
    model = copy.deepcopy(model).cpu()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=1.0 if name == "embed.weight" else parameter.size(1) ** -0.5)
    return model


def _through_fused(model: GPT, dtype: torch.dtype, idx: Tensor) -> Named:
    stream: list[Tensor] = []
    forward = FusedForward(model, dtype)
    found = _computed(model, lambda inputs: forward(inputs, stream=stream), idx)
    names = ("embed", *(f"blocks.{i}.{half}" for i in range(len(model.blocks)) for half in ("attn", "mlp")))
    return {f"the output of {name}": x.detach() for name, x in zip(names, stream, strict=True)} | found


def _through_autograd(model: GPT, idx: Tensor) -> Named:
    """Return the computed tensors, with the residual stream as far as the model has and calls its usual modules."""
    stream: Named = {}

    def add(name: str, x: Any) -> None:
        if isinstance(x, Tensor):
            stream[f"the output of {name}"] = x.detach()

    hooks = []
    for name, module in model.named_modules():
        if name.endswith(".mlp_norm"):
            half = name.removesuffix("mlp_norm") + "attn"
            hooks.append(module.register_forward_pre_hook(lambda _, inputs, half=half: add(half, *inputs[:1])))
        elif isinstance(module, Block):
            hooks.append(module.register_forward_hook(lambda _, inputs, x, half=f"{name}.mlp": add(half, x)))
    try:
        return stream | _computed(model, model, idx)
    finally:
        for hook in hooks:
            hook.remove()


def _computed(model: GPT, forward: Callable[[Tensor], Tensor], idx: Tensor) -> Named:
    """Return the logits, the loss and the gradients of a forward and backward, in the order of computation.

    The gradients go from the last block to the first.
    """
    torch.manual_seed(1)  # for dropout
    model.zero_grad()
    logits = forward(idx[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), idx[:, 1:].flatten())
    loss.backward()
    found = {"the output of head": logits.detach(), "the loss": loss.detach()}
    for name, parameter in reversed([*model.named_parameters()]):
        gradient = parameter.grad
        found[f"the gradient of {name}"] = torch.zeros_like(parameter) if gradient is None else gradient.clone()
    return found


def _first(found: Named, expected: Named, tolerance: float) -> str | None:
    least = 1e-3 * max(float(exact.norm()) for exact in expected.values())  # a zero tensor differs by rounding alone
    for name, value in found.items():
        if (exact := expected.get(name)) is None:
            continue
        if value.shape != exact.shape:
            return f"{name}, of shape {tuple(value.shape)} instead of {tuple(exact.shape)},"
        error = float((value.float() - exact).norm() / exact.norm().clamp(min=least))
        if not error <= tolerance:
            return f"{name} (by {error:.0%})"
    return None


def refuse_other_weights(model: GPT) -> None:
    """Raise Refusal if a checkpoint cannot hold the model's weights, by their names and shapes."""
    found = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    files = layout(model.config)
    for name in {**found, **files}:
        if found.get(name) == () or () in files.get(name, {}).values():
            raise Refusal(f"checkpoints hold no scalars: give the weight {name} the shape (1,) in gpt.py and layout()")
    held = {
        name: (sum(shape[0] for shape in parts.values()), *next(iter(parts.values()))[1:])
        for name, parts in files.items()
    }
    if found != held:
        wrong = sorted({*found, *held}, key=lambda name: (found.get(name) == held.get(name), name))[0]
        raise Refusal(
            f"checkpoints do not hold this model: the weight {wrong} has shape {found.get(wrong, 'none')} in gpt.py, "
            f"{held.get(wrong, 'none')} in layout() of service/model/checkpoint.py; describe it there too"
        )


def checked_runner(model: GPT, counts: Counts | None = None, **options: Any) -> Runner:
    """Open a runner that computes GPT.forward: on backend torch if the default backend computes another model.

    counts: as for `open_runner`, as are options.
    """
    with contextlib.suppress(SelfCheckError):
        runner = open_runner(model, counts=counts, **options)
        if computes(runner, model, counts):
            return runner
        runner.close()
    return open_runner(model, "torch", counts=counts, **options)


@torch.no_grad()
def computes(runner: Runner, model: GPT, counts: Counts | None = None) -> bool:
    """Return whether a backend's logits after SERVED characters are finite and equal those of GPT.forward.

    counts: those with which the runner mixes.
    """
    V, ids = model.config.vocab_size, np.arange(SERVED, dtype=np.int32) ** 2 % model.config.vocab_size
    runner.start(0, SamplingParams(seed=0), ids.tolist())
    targets = np.append(ids[1:], np.int32(NONE))
    outcome = runner.prefill([Piece(0, ids, True, None, Report(ids=tuple(range(V))), targets)])()
    found = np.reshape(floats(outcome.reports[0].top_values), (-1, V))[:SERVED]  # log-probabilities
    exact = model(torch.from_numpy(ids[None]).long().to(model.head.weight.device))[0].double().cpu().numpy()
    if counts is not None and counts.is_mixed:
        experts = [counts.next(ids[: i + 1].tolist()) for i in range(SERVED)]
        exact = mixed_logits(exact, *map(np.array, zip(*experts, strict=True)))
    difference = found - exact  # a constant in each row if both agree
    error = np.abs(difference - difference.mean(axis=1, keepdims=True)).max()
    return bool(error <= TOLERANCES[runner.dtype] * max(1.0, np.abs(exact).max()))


@torch.no_grad()
def is_qwen3(model: GPT) -> bool:
    """Return whether GPT.forward with these weights gives the logits of Qwen3, which fused.py computes too.

    model: on the CPU, in evaluation mode.
    """
    if other_weight(model.config, model.state_dict()):
        return False
    exact, length = copy.deepcopy(model).double(), min(SERVED, model.config.block_size)
    idx = torch.arange(length)[None] ** 2 % model.config.vocab_size
    logits = exact(idx)
    error = (FusedForward(exact, torch.float64)(idx) - logits).abs().max()
    return bool(error <= IS_SAME * logits.abs().max().clamp(min=1.0))


def is_servable(model: GPT) -> bool:
    """Return whether the service's reference computes GPT.forward. Each backend checks itself by that reference."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model, config = _randomized(model).eval(), model.config
        ids = torch.arange(SERVED) ** 2 % config.vocab_size
        weights = {name: value.numpy() for name, value in model.state_dict().items()}
        if other_weight(config, weights):
            return False
        exact = logits_of(weights, config, ids.tolist())
        error = np.abs(model(ids[None])[0].double().numpy() - exact).max()
    return bool(error <= TOLERANCES["float32"] * max(1.0, np.abs(exact).max()))
