"""The two benchmarked models and the requests sent to them."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from pathlib import Path
from typing import Any

from service.model.config import GPTConfig
from service.model.params import SamplingParams
from service.model.tokenizer import CharTokenizer
from service.settings import BUNDLED
from tests.helpers import random_model
from training.run.saving import save_checkpoint

# The characters of tiny Shakespeare.
VOCABULARY = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
# A checkpoint folder, or a config that gets random weights.
SHAPES: dict[str, Path | GPTConfig] = {
    "S": BUNDLED,
    "M": GPTConfig(len(VOCABULARY), block_size=256, n_layer=6, n_head=6, n_kv_head=2, n_embd=384),
}
# For tests of the benchmarks.
TINY = GPTConfig(len(VOCABULARY), block_size=16, n_layer=2, n_head=4, n_kv_head=2, n_embd=16)
PROMPT = 16  # characters
ANSWER = 128  # characters

# What prompts are cut from: text of the kind that S was trained on.
TEXT = Path(__file__).with_name("prompts.txt").read_text(encoding="utf-8")
# Each request of a process takes the next number, and with it a prompt and a seed: the engine guesses from texts it has
# written, so the rounds of a measurement must not repeat them.
NUMBERS = itertools.count()
STRIDE = 7919  # prime: prompts of consecutive seeds begin far apart, and no two at the same character

# Sampling parameters of users. transformers supports one set per batch and gets the first.
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95}, {"temperature": 1.0, "top_k": 0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 20, "top_p": 1.0}, {"temperature": 1.2, "top_k": 10, "top_p": 0.8},
)  # fmt: skip


def checkpoint_of(shape: Path | GPTConfig, path: Path) -> Path:
    """The checkpoint folder of a shape, saved at `path` if it has random weights."""
    if isinstance(shape, Path):
        return shape
    model = random_model(**asdict(shape))
    model.head.weight.mul_(1.3)  # logits spread over about 2 nats, as in a trained model: several likely characters
    save_checkpoint(path, model, CharTokenizer(VOCABULARY), {"losses": {}})
    return path


def sampling(row: int, seed: int) -> SamplingParams:
    return SamplingParams(**SAMPLING[row % len(SAMPLING)], seed=seed)


def prompt_text(length: int, seed: int) -> str:
    """`length` characters of TEXT; as many different prompts as TEXT has places for them."""
    start = seed * STRIDE % (len(TEXT) - length)
    return TEXT[start : start + length]


def prompt(length: int, seed: int) -> list[int]:
    """The ids of `prompt_text`, which are the same in both shapes."""
    return [VOCABULARY.index(character) for character in prompt_text(length, seed)]
