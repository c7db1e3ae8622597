"""Muon for the hidden matrices, AdamW for embedding, head and norms, and their schedules.

Muon (Jordan et al. 2024) replaces each matrix's momentum by the nearest semi-orthogonal matrix. Query, key and value
are packed in one parameter and orthogonalized separately. Gate and up are orthogonalized as one matrix. All matrices of
one shape form a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from service.model.gpt import GPT, CausalSelfAttention, SwiGLU
from training.config import TrainConfig

# Coefficients (a, b, c) of x <- a·x + b·x³ + c·x⁵, applied to all singular values, one triple per iteration. Each is
# optimal for the interval that the previous iteration leaves (Amsel et al. 2025, "The Polar Express").
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
# Safety factor: a singular value that rounding pushes past the interval's end would diverge.
MARGIN = 1.02


def orthogonalize(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Approximate U·Vᵀ of each of `matrices` (n, rows, cols) = U·S·Vᵀ by five Newton-Schulz iterations in `dtype`.

    Singular values of at least a thousandth of the matrix's norm come out near 1, smaller ones between 0 and 1. The
    iterations work on the Gram matrix of the smaller side alone if the other side is at least twice as long and `dtype`
    is float32. Their product is then multiplied by the matrix once. This saves a sixth of the work if the side is twice
    as long, and half if it is five times as long.
    """
    tall = matrices.size(1) > matrices.size(2)
    x = matrices.mT if tall else matrices  # the Gram matrix of the smaller side is cheaper
    x = (x / (x.norm(dim=(1, 2), keepdim=True) * MARGIN + 1e-7)).to(dtype)
    is_wide = x.size(2) >= 2 * x.size(1) and dtype == torch.float32  # rounding errors of bfloat16 would add up
    gram, product = x @ x.mT, None
    for number, (a, b, c) in enumerate(POLAR_EXPRESS, 1):
        polynomial = torch.baddbmm(gram, gram, gram, beta=b / MARGIN**3, alpha=c / MARGIN**5)
        if is_wide:
            polynomial.diagonal(dim1=1, dim2=2).add_(a / MARGIN)
            product = polynomial if product is None else polynomial @ product
            gram = polynomial @ (gram @ polynomial) if number < len(POLAR_EXPRESS) else gram
        else:
            x = torch.baddbmm(x, polynomial, x, beta=a / MARGIN)
            gram = x @ x.mT if number < len(POLAR_EXPRESS) else gram
    x = x if product is None else product @ x
    return x.mT if tall else x


def hidden_matrices(model: GPT) -> list[tuple[Tensor, list[int]]]:
    """Return the weight matrices of the blocks, each with the row counts of the matrices packed in it."""
    found: list[tuple[Tensor, list[int]]] = []
    for module in model.modules():
        if isinstance(module, CausalSelfAttention):
            found += [(module.qkv.weight, module.sizes), (module.proj.weight, [module.proj.out_features])]
        elif isinstance(module, SwiGLU):
            found += [
                (module.gate_up.weight, [module.gate_up.out_features]),
                (module.proj.weight, [module.proj.out_features]),
            ]
    return found


class Muon:
    """Orthogonalized Nesterov momentum and decoupled weight decay.

    Updates are scaled by √max(1, rows / cols), so that they change the outputs of matrices of all shapes equally.
    """

    def __init__(self, matrices: Iterable[tuple[Tensor, list[int]]], dtype: torch.dtype = torch.float32):
        self.dtype = dtype
        self._parts: dict[tuple[int, int], list[tuple[Tensor, slice]]] = {}  # by shape: a parameter and its rows
        for parameter, sizes in matrices:
            start = 0
            for rows in sizes:
                same = self._parts.setdefault((rows, parameter.size(1)), [])
                same.append((parameter, slice(start, start + rows)))
                start += rows
        self._momentum = {shape: parts[0][0].new_zeros(len(parts), *shape) for shape, parts in self._parts.items()}

    def step(self, lr: float, momentum: float, weight_decay: float, each: Callable[..., Iterable[None]] = map) -> None:
        """Update all matrices. each: calls a function for every shape, possibly for several at once."""

        @torch.no_grad()
        def update(shape: tuple[int, int]) -> None:
            parts, average, (rows, cols) = self._parts[shape], self._momentum[shape], shape
            gradient = torch.stack([_gradient(parameter)[its_rows] for parameter, its_rows in parts])
            average.lerp_(gradient, 1.0 - momentum)
            updates = orthogonalize(gradient.lerp_(average, momentum), self.dtype)
            scale = max(1.0, rows / cols) ** 0.5
            for (parameter, its_rows), change in zip(parts, updates, strict=True):
                parameter[its_rows].mul_(1.0 - lr * weight_decay).add_(change, alpha=-lr * scale)

        for _ in each(update, sorted(self._parts, key=math.prod, reverse=True)):  # the largest first
            pass

    def tensors(self) -> dict[str, Tensor]:
        """Return the state by name. Copying into these tensors restores it."""
        return {f"muon.{rows}x{cols}.momentum": momentum for (rows, cols), momentum in self._momentum.items()}


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "step() follows backward()"
    return parameter.grad


class FlatGradients:
    """All gradients of a model in one tensor; each parameter's `grad` is a view of it.

    `extra` more numbers follow the gradients. The same call reduces both over the processes.
    """

    def __init__(self, model: GPT, extra: int):
        sizes = [parameter.numel() for parameter in model.parameters()]
        self.all = next(model.parameters()).new_zeros(sum(sizes) + extra)
        *parts, self.extra = self.all.split([*sizes, extra])
        for parameter, part in zip(model.parameters(), parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def clip_(self, max_norm: float) -> Tensor:
        """Clip the gradients to the norm `max_norm`; 0: no clipping. Return the norm before clipping."""
        gradients = self.all[: len(self.all) - len(self.extra)]
        norm = gradients.norm()
        if max_norm:
            gradients.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm


class Optimizers:
    """Muon and AdamW for all parameters of a model, with learning rates on one schedule.

    each: the argument of Muon.step.
    """

    def __init__(self, model: GPT, config: TrainConfig, each: Callable[..., Iterable[None]] = map):
        self.config, self.each = config, each
        matrices = hidden_matrices(model)
        hidden = {id(parameter) for parameter, _ in matrices}
        self._others = {name: p for name, p in model.named_parameters() if id(p) not in hidden}
        dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        self.muon = Muon(matrices, dtype)
        self._adamw = {
            name: {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            for name, parameter in self._others.items()
        }

    @torch.no_grad()
    def step(self, step: int, epochs: float) -> None:
        """Update the parameters in step number `step`, counted from 0, after `epochs` of the training split."""
        scale = lr_scale(step, self.config)
        parameters: list[Tensor] = list(self._others.values())
        states = self._adamw.values()
        # Functional, because torch.optim.AdamW imports torch's compiler, which takes over a second.
        adamw(
            parameters,
            [_gradient(parameter) for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=self.config.adamw_beta1,
            beta2=self.config.adamw_beta2,
            lr=self.config.adamw_lr * scale,
            weight_decay=0.0,
            eps=1e-8,
            maximize=False,
        )
        momentum, weight_decay = momentum_at(step, self.config), weight_decay_at(epochs, self.config)
        self.muon.step(self.config.muon_lr * scale, momentum, weight_decay, self.each)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state by name. Copying into these tensors restores it."""
        state = self.muon.tensors()
        for name, tensors in self._adamw.items():
            state |= {f"adamw.{name}.{key}": tensor for key, tensor in tensors.items()}
        return state


def lr_scale(step: int, config: TrainConfig) -> float:
    """Return the learning rate as a fraction of its peak.

    It warms up linearly, then decays linearly and reaches 0 after the last step.
    """
    warmup = min(config.warmup_steps, config.steps)
    if step < warmup:
        return (step + 1) / warmup
    return (config.steps - step) / (config.steps - warmup)


def momentum_at(step: int, config: TrainConfig) -> float:
    """Return Muon's momentum, which rises from 0.85, because short runs need less momentum than long ones."""
    low, high = min(0.85, config.muon_momentum), config.muon_momentum
    return low + (high - low) * min(1.0, (step + 1) / max(1, config.momentum_steps))


def weight_decay_at(epochs: float, config: TrainConfig) -> float:
    """Return the weight decay, which rises linearly and reaches its full value after three epochs.

    A model can memorize only text that repeats.
    """
    return config.weight_decay * min(1.0, epochs / 3)
