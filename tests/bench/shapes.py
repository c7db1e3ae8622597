"""The two benchmarked model shapes with random weights, and the requests sent to them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from service.model.checkpoint import save_checkpoint
from service.model.config import GPTConfig
from service.model.gpt import GPT
from service.model.params import SamplingParams
from service.model.tokenizer import CharTokenizer

# The characters of tiny Shakespeare.
VOCABULARY = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
SHAPES = {
    "S": GPTConfig(len(VOCABULARY), block_size=128, n_layer=6, n_head=4, n_kv_head=2, n_embd=128),
    "M": GPTConfig(len(VOCABULARY), block_size=256, n_layer=6, n_head=6, n_kv_head=2, n_embd=384),
}
PROMPT = 16  # characters

# Sampling parameters of users. transformers supports one set per batch and gets the first.
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 20, "top_p": 1.0},
    {"temperature": 1.2, "top_k": 10, "top_p": 0.8},
)


def random_model(config: GPTConfig, seed: int = 0) -> GPT:
    """A model whose weights are large enough that every part matters and texts do not soon repeat."""
    model = GPT(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 1.5 * parameter.size(1) ** -0.5 * noise)
        # A logit spread of about 2 nats, as in a trained model: most rows have several likely characters.
        model.head.weight.mul_(1.3)
    return model.eval().requires_grad_(False)


def save_random(config: GPTConfig, path: Path) -> Path:
    """Save a random checkpoint of a shape; returns its folder."""
    save_checkpoint(path, random_model(config), CharTokenizer(VOCABULARY), {"losses": {}})
    return path


def sampling(row: int) -> SamplingParams:
    return SamplingParams(**SAMPLING[row % len(SAMPLING)], seed=row)


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(len(VOCABULARY)), k=length)


@dataclass(frozen=True)
class Work:
    """One request."""

    prompt: str
    max_tokens: int
    at: float  # time of arrival, in seconds from the start


def mixed_work(count: int, *, longest: int, arriving: float, seed: int = 0) -> list[Work]:
    """Requests of mixed lengths: prompts of 4 to 64 characters, completions log-uniform in longest/16 to `longest`.

    They arrive at random times within the first `arriving` seconds.
    """
    chance = random.Random(seed)
    moments = sorted(chance.uniform(0, arriving) for _ in range(count))
    letters = VOCABULARY[13:]
    return [
        Work("".join(chance.choices(letters, k=chance.randint(4, 64))), round(longest * 16 ** -chance.random()), at)
        for at in moments
    ]
