"""Optimizers: Muon for the hidden matrices, AdamW for embedding, head and norms; and the schedule they share.

Muon (Jordan et al. 2024) replaces each matrix's momentum by the nearest orthogonal matrix, so that all
directions learn at one pace. The model keeps several matrices in one parameter (query, key and value rows;
gate and up rows): each is orthogonalised by itself, and all of one shape in one batch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from service.model.gpt import GPT, CausalSelfAttention, SwiGLU
from training.config import TrainConfig

# Quintic x <- a·x + b·x³ + c·x⁵, applied to all singular values; one triple per iteration, each the best for
# the interval that the one before leaves (Amsel et al. 2025, "The Polar Express").
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
# A value that rounding pushes past the interval's end would grow without bound: leave that much room.
MARGIN = 1.02


def orthogonalize(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """About U·Vᵀ of each of `matrices` (n, rows, cols) = U·S·Vᵀ, by five Newton-Schulz iterations in `dtype`.

    Singular values of a thousandth of the matrix's norm or more come out near 1, smaller ones between 0 and 1.
    """
    tall = matrices.size(1) > matrices.size(2)
    x = matrices.mT if tall else matrices  # the smaller side makes the smaller Gram matrix
    x = (x / (x.norm(dim=(1, 2), keepdim=True) * MARGIN + 1e-7)).to(dtype)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b / MARGIN**3, alpha=c / MARGIN**5)
        x = torch.baddbmm(x, polynomial, x, beta=a / MARGIN)
    return (x.mT if tall else x).to(matrices.dtype)


def hidden_matrices(model: GPT) -> list[tuple[Tensor, list[int]]]:
    """Each hidden parameter of the blocks, and the rows of the matrices that it holds one after the other."""
    found: list[tuple[Tensor, list[int]]] = []
    for module in model.modules():
        if isinstance(module, CausalSelfAttention):
            found += [(module.qkv.weight, module.sizes), (module.proj.weight, [module.proj.out_features])]
        elif isinstance(module, SwiGLU):
            half = module.gate_up.out_features // 2
            found += [(module.gate_up.weight, [half, half]), (module.proj.weight, [module.proj.out_features])]
    return found


@dataclass
class _Shape:
    """All matrices of one shape."""

    parts: list[tuple[Tensor, slice]] = field(default_factory=list)  # rows of a parameter, each a matrix
    momentum: Tensor = field(default_factory=lambda: torch.empty(0))  # (n, rows, cols)


class Muon:
    """Nesterov momentum, orthogonalised, with decoupled weight decay.

    U·Vᵀ is scaled by √max(1, rows / cols), so that an update changes the output of a matrix by as much
    whatever its shape.
    """

    def __init__(
        self,
        matrices: Iterable[tuple[Tensor, list[int]]],
        momentum: float,
        weight_decay: float,
        dtype: torch.dtype = torch.float32,
    ):
        self.momentum, self.weight_decay, self.dtype = momentum, weight_decay, dtype
        self._shapes: dict[tuple[int, int], _Shape] = {}
        for parameter, sizes in matrices:
            start = 0
            for rows in sizes:
                shape = self._shapes.setdefault((rows, parameter.size(1)), _Shape())
                shape.parts.append((parameter, slice(start, start + rows)))
                start += rows
        for (rows, cols), shape in self._shapes.items():
            shape.momentum = shape.parts[0][0].new_zeros(len(shape.parts), rows, cols)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for (rows, cols), shape in self._shapes.items():
            gradient = torch.stack([_gradient(parameter)[part] for parameter, part in shape.parts])
            shape.momentum.lerp_(gradient, 1.0 - self.momentum)
            update = orthogonalize(gradient.lerp(shape.momentum, self.momentum), self.dtype)
            weights = [parameter[part] for parameter, part in shape.parts]
            torch._foreach_mul_(weights, 1.0 - lr * self.weight_decay)
            torch._foreach_add_(weights, list(update.unbind()), alpha=-lr * max(1.0, rows / cols) ** 0.5)

    def tensors(self) -> dict[str, Tensor]:
        """All its state, by name; writing into these tensors restores it."""
        return {f"muon.{rows}x{cols}.momentum": shape.momentum for (rows, cols), shape in self._shapes.items()}


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "step() follows backward()"
    return parameter.grad


class Optimizers:
    """Muon and AdamW over all parameters of a model, on one schedule."""

    def __init__(self, model: GPT, config: TrainConfig):
        self.config = config
        matrices = hidden_matrices(model)
        hidden = {id(parameter) for parameter, _ in matrices}
        self._others = {name: p for name, p in model.named_parameters() if id(p) not in hidden}
        dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        self.muon = Muon(matrices, config.muon_momentum, config.weight_decay, dtype)
        self.adamw = torch.optim.AdamW(
            self._others.values(),
            lr=0.0,
            betas=(config.adamw_beta1, config.adamw_beta2),
            weight_decay=0.0,
            fused=True,
        )
        # Made now rather than at the first step, so that there is always something to restore into.
        for parameter in self._others.values():
            self.adamw.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def step(self, step: int) -> None:
        """Update from the gradients, at the learning rate of step number `step` (the first is 0)."""
        scale = lr_scale(step, self.config)
        for group in self.adamw.param_groups:
            group["lr"] = self.config.adamw_lr * scale
        self.adamw.step()
        self.muon.step(self.config.muon_lr * scale)

    def tensors(self) -> dict[str, Tensor]:
        """All their state, by name; writing into these tensors restores it."""
        state = self.muon.tensors()
        for name, parameter in self._others.items():
            for key, value in self.adamw.state[parameter].items():
                state[f"adamw.{name}.{key}"] = value
        return state


def lr_scale(step: int, config: TrainConfig) -> float:
    """Share of the peak learning rate: linear from 0 over the warm-up, then linear to 0 after the last step."""
    warmup = min(config.warmup_steps, config.steps)
    if step < warmup:
        return (step + 1) / warmup
    return (config.steps - step) / (config.steps - warmup)


class WeightAverage:
    """An exponential average of a model's weights, in a model of its own (Polyak & Juditsky 1992)."""

    def __init__(self, model: GPT, decay: float):
        self.decay = decay
        self.source: list[Tensor] = list(model.parameters())
        self.model = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after step number `step`; early on, the average is over few steps."""
        decay = min(self.decay, (1 + step) / (10 + step))
        target: list[Tensor] = list(self.model.parameters())
        torch._foreach_lerp_(target, self.source, 1.0 - decay)

    def tensors(self) -> dict[str, Tensor]:
        """All its state, by name; writing into these tensors restores it."""
        return {f"average.{name}": parameter for name, parameter in self.model.named_parameters()}
