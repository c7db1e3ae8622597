"""The training baseline: nanoGPT's model and CPU recipe for tiny Shakespeare, reimplemented from published settings.

A GPT-2 without biases (learned positions, LayerNorm, GELU), AdamW, cosine schedule, windows drawn with replacement,
fp32. Independent of our model and trainer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Recipe:
    """The CPU command line of nanoGPT's README, with its config's defaults for the rest."""

    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    block_size: int = 64
    batch_size: int = 12
    steps: int = 2000
    lr: float = 1e-3  # peak after linear warm-up, then cosine decay to min_lr
    min_lr: float = 1e-4
    warmup_steps: int = 100
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.1  # of all matrices, embeddings included
    grad_clip: float = 1.0
    eval_every: int = 250

    def lr_at(self, step: int) -> float:
        """Learning rate at `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        done = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        return self.min_lr + (self.lr - self.min_lr) * (1 + math.cos(math.pi * done)) / 2


class Block(nn.Module):
    def __init__(self, recipe: Recipe):
        super().__init__()
        C = recipe.n_embd
        self.n_head = recipe.n_head
        self.norm1, self.norm2 = nn.LayerNorm(C, bias=False), nn.LayerNorm(C, bias=False)
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.proj = nn.Linear(C, C, bias=False)
        self.up = nn.Linear(C, 4 * C, bias=False)
        self.down = nn.Linear(4 * C, C, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.n_head, -1)).transpose(1, 2)  # (B, nh, T, hs)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class NanoGPT(nn.Module):
    """`config` and `head` are named as training.measure expects."""

    def __init__(self, recipe: Recipe, vocab_size: int):
        super().__init__()
        self.config = recipe
        self.embed = nn.Embedding(vocab_size, recipe.n_embd)
        self.positions = nn.Embedding(recipe.block_size, recipe.n_embd)
        self.blocks = nn.ModuleList(Block(recipe) for _ in range(recipe.n_layer))
        self.norm = nn.LayerNorm(recipe.n_embd, bias=False)
        self.head = nn.Linear(recipe.n_embd, vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * recipe.n_layer) if residual else 0.02)
        self.embed.weight = self.head.weight  # tied

    def forward(self, idx: Tensor) -> Tensor:
        """Ids (B, T), T ≤ block_size, to logits (B, T, V)."""
        x = self.embed(idx) + self.positions.weight[: idx.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def random_windows(recipe: Recipe, ids: np.ndarray, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets, each (batch_size, block_size), of random windows of `ids`, with replacement."""
    data, generator = torch.from_numpy(ids.astype(np.int64)), torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - recipe.block_size, (recipe.batch_size,), generator=generator)
        windows = data[starts[:, None] + torch.arange(recipe.block_size + 1)]
        yield windows[:, :-1], windows[:, 1:]


def train(
    recipe: Recipe, ids: np.ndarray, vocab_size: int, seed: int, evaluated: Callable[[NanoGPT, int, float, float], None]
) -> NanoGPT:
    """Train on `ids`; returns the model in evaluation mode.

    Calls `evaluated(model, steps taken, cpu_seconds, wall_seconds)` before the first step, every `eval_every` steps and
    after the last. Times cover steps only; CPU time is of all threads of the process.
    """
    torch.manual_seed(seed)
    model = NanoGPT(recipe, vocab_size)
    windows = random_windows(recipe, ids, seed)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": norms, "weight_decay": 0.0}],
        betas=(recipe.beta1, recipe.beta2),
    )
    cpu_seconds = wall_seconds = 0.0
    for step in range(recipe.steps):
        if step % recipe.eval_every == 0:
            evaluated(model.eval(), step, cpu_seconds, wall_seconds)
            model.train()
        cpu_started, wall_started = time.process_time(), time.perf_counter()
        idx, targets = next(windows)
        loss = F.cross_entropy(model(idx).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr_at(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        cpu_seconds += time.process_time() - cpu_started
        wall_seconds += time.perf_counter() - wall_started
    evaluated(model.eval(), recipe.steps, cpu_seconds, wall_seconds)
    return model
