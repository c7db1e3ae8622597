"""Optimizers: Muon for the hidden matrices, AdamW for embedding, head and norms; and the schedule they share.

Muon (Jordan et al. 2024) replaces each matrix's momentum by the nearest orthogonal matrix, so that all
directions learn at one pace. The model keeps several matrices in one parameter (query, key and value rows;
gate and up rows): each is orthogonalised by itself, and all of one shape in one batch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from service.model.gpt import GPT, CausalSelfAttention, SwiGLU
from training.config import TrainConfig
from training.distributed import World

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
    """About U·Vᵀ of each of `matrices` (n, rows, cols) = U·S·Vᵀ, in `dtype`, by five Newton-Schulz iterations in it.

    Singular values of a thousandth of the matrix's norm or more come out near 1, smaller ones between 0 and 1.
    """
    tall = matrices.size(1) > matrices.size(2)
    x = matrices.mT if tall else matrices  # the smaller side makes the smaller Gram matrix
    x = (x / (x.norm(dim=(1, 2), keepdim=True) * MARGIN + 1e-7)).to(dtype)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b / MARGIN**3, alpha=c / MARGIN**5)
        x = torch.baddbmm(x, polynomial, x, beta=a / MARGIN)
    return x.mT if tall else x


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


class _Shape:
    """All matrices of one shape, in equal parts to each process; the last ones have fewer."""

    def __init__(self, parts: list[tuple[Tensor, slice]], rows: int, cols: int, world: World):
        self.parts = parts  # rows of a parameter, each a matrix
        self.scale = max(1.0, rows / cols) ** 0.5
        each = -(-len(parts) // world.size)
        self.mine = parts[world.rank * each : (world.rank + 1) * each]
        # Of other processes' matrices as of the last `collect`.
        self.momentum = parts[0][0].new_zeros(world.size, each, rows, cols)
        self.strength = parts[0][0].new_zeros(world.size, each, rows, 1)  # mean square of each row's updates


class Muon:
    """Nesterov momentum, orthogonalised, each row to an even strength, with decoupled weight decay.

    Rows of U·Vᵀ, the weights of one neuron each, differ in strength; they are divided by the root of a running mean
    of their squares, and the whole is given its norm back (NorMuon, Li et al. 2025). It is then scaled by
    √max(1, rows / cols), so that an update changes the output of a matrix by as much whatever its shape. Each
    process of a world does its part of the matrices, and all exchange the updates.
    """

    def __init__(
        self,
        matrices: Iterable[tuple[Tensor, list[int]]],
        momentum: float,
        weight_decay: float,
        row_decay: float,
        dtype: torch.dtype = torch.float32,
        world: World | None = None,
    ):
        self.momentum, self.weight_decay, self.row_decay = momentum, weight_decay, row_decay
        self.dtype, self.world = dtype, world or World()
        parts: dict[tuple[int, int], list[tuple[Tensor, slice]]] = {}
        for parameter, sizes in matrices:
            start = 0
            for rows in sizes:
                parts.setdefault((rows, parameter.size(1)), []).append((parameter, slice(start, start + rows)))
                start += rows
        self._shapes = {shape: _Shape(some, *shape, self.world) for shape, some in parts.items()}
        lengths = [shape.momentum[0].numel() for shape in self._shapes.values()]
        device = next(iter(parts.values()))[0][0].device
        self._updates = torch.zeros(self.world.size, sum(lengths), dtype=dtype, device=device)
        self._updates_of = self._updates.split(lengths, dim=1)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        rank = self.world.rank
        for shape, updates in zip(self._shapes.values(), self._updates_of, strict=True):
            if shape.mine:
                gradient = torch.stack([_gradient(parameter)[rows] for parameter, rows in shape.mine])
                average = shape.momentum[rank, : len(shape.mine)]
                average.lerp_(gradient, 1.0 - self.momentum)
                update = orthogonalize(gradient.lerp_(average, self.momentum), self.dtype)
                update = self.even_rows(update, shape.strength[rank, : len(shape.mine)])
                updates[rank, : update.numel()] = update.flatten()
        self.world.exchange(self._updates)
        for shape, updates in zip(self._shapes.values(), self._updates_of, strict=True):
            each = updates.reshape(-1, *shape.momentum.shape[2:])
            for (parameter, rows), update in zip(shape.parts, each, strict=False):
                if self.weight_decay:
                    parameter[rows].mul_(1.0 - lr * self.weight_decay)
                parameter[rows].add_(update, alpha=-lr * shape.scale)

    def even_rows(self, update: Tensor, strength: Tensor) -> Tensor:
        """update (n, rows, cols) with rows of even strength, of the same norm; `strength` (n, rows, 1) is updated."""
        row_norms = torch.linalg.vector_norm(update, dim=-1, keepdim=True, dtype=strength.dtype)
        strength.lerp_(row_norms.square() / update.size(-1), 1.0 - self.row_decay)
        factors = (strength + 1e-12).rsqrt()
        norm, changed = (torch.linalg.vector_norm(x, dim=1, keepdim=True) for x in (row_norms, row_norms * factors))
        return update * (factors * norm / (changed + 1e-12)).to(update.dtype)

    def collect(self) -> None:
        """Bring every process's part of the state to all, for `tensors`."""
        for state in self.tensors().values():
            self.world.exchange(state.flatten(1))

    def tensors(self) -> dict[str, Tensor]:
        """All its state, by name; writing into these tensors restores it."""
        shapes = {f"muon.{rows}x{cols}": shape for (rows, cols), shape in self._shapes.items()}
        momentum = {f"{name}.momentum": shape.momentum for name, shape in shapes.items()}
        return momentum | {f"{name}.strength": shape.strength for name, shape in shapes.items()}


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "step() follows backward()"
    return parameter.grad


class FlatGradients:
    """All gradients of a model in one tensor, of which each parameter's `grad` is a view.

    `extra` numbers more lie behind them, for what is to be summed over processes along with them.
    """

    def __init__(self, model: GPT, extra: int):
        sizes = [parameter.numel() for parameter in model.parameters()]
        self.all = next(model.parameters()).new_zeros(sum(sizes) + extra)
        *parts, self.extra = self.all.split([*sizes, extra])
        for parameter, part in zip(model.parameters(), parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def zero_(self) -> None:
        self.all.zero_()

    def clip_(self, max_norm: float) -> Tensor:
        """Scale the gradients down to a norm of `max_norm`, if that is not 0; the norm before."""
        gradients = self.all[: len(self.all) - len(self.extra)]
        norm = gradients.norm()
        if max_norm:
            gradients.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm


class Optimizers:
    """Muon and AdamW over all parameters of a model, on one schedule."""

    def __init__(self, model: GPT, config: TrainConfig, world: World | None = None):
        self.config = config
        matrices = hidden_matrices(model)
        hidden = {id(parameter) for parameter, _ in matrices}
        self._others = {name: p for name, p in model.named_parameters() if id(p) not in hidden}
        dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        self.muon = Muon(matrices, config.muon_momentum, config.weight_decay, config.muon_beta2, dtype, world)
        self._adamw = {
            name: {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            for name, parameter in self._others.items()
        }

    @torch.no_grad()
    def step(self, step: int) -> None:
        """Update from the gradients, at the learning rate of step number `step` (the first is 0)."""
        scale = lr_scale(step, self.config)
        parameters: list[Tensor] = list(self._others.values())
        states = self._adamw.values()
        # The function under torch.optim.AdamW: the class imports torch's compiler, which takes over a second.
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
        self.muon.step(self.config.muon_lr * scale)

    def tensors(self) -> dict[str, Tensor]:
        """All their state, by name; writing into these tensors restores it."""
        state = self.muon.tensors()
        for name, tensors in self._adamw.items():
            state |= {f"adamw.{name}.{key}": tensor for key, tensor in tensors.items()}
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
