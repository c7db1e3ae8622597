"""The two benchmarked models and the requests sent to them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from service.model.checkpoint import Checkpoint, save_checkpoint
from service.model.config import GPTConfig
from service.model.gpt import GPT
from service.model.params import SamplingParams
from service.model.tokenizer import CharTokenizer
from service.settings import BUNDLED

# The characters of tiny Shakespeare.
VOCABULARY = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
# A checkpoint folder, or a config that gets random weights.
SHAPES: dict[str, Path | GPTConfig] = {
    "S": BUNDLED,
    "M": GPTConfig(len(VOCABULARY), block_size=256, n_layer=6, n_head=6, n_kv_head=2, n_embd=384),
}
PROMPT = 16  # characters
ANSWER = 128  # characters

# What prompts are cut from: text of the kind that S was trained on.
TEXT = """
FIRST GARDENER:
Come, neighbour, set thy basket by the wall;
The frost has left us little worth the picking,
And what it left the sparrows took at dawn.

SECOND GARDENER:
Then let the sparrows pay our master's rent!
I have dug this bed since I was seven years old,
And never saw so lean a month of March.

FIRST GARDENER:
Patience: the pear tree on the southern side
Has buds upon it, small as barley grains.
A week of sun, and thou shalt eat thy words.

STEWARD:
What, idle still? The duke rides home tonight
With forty horse behind him, and a bride
Who loves, they say, no flower but the rose.
Where are my roses?

SECOND GARDENER:
Sleeping, sir, like honest folk in winter.
Shall I go knock, and tell them who is come?

STEWARD:
I'll knock on thee, thou thistle! Find me roses,
Or find another gate to lean upon.

FIRST GARDENER:
My lord, an hour: the widow by the mill
Keeps one old bush behind her kitchen fire,
And what she will not sell she gives for news.

STEWARD:
Then run, and tell her all the news there is;
And if there be too little, make some more.

SECOND GARDENER:
So honest men are sent to market lies,
And all to please a lady's nose. Good night!
The moon is up; I hear the river talk
Of every boat that ever drowned in it.
"""
STRIDE = 7919  # prime: prompts of consecutive seeds begin far apart, and no two at the same character

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


def checkpoint_of(shape: Path | GPTConfig, path: Path) -> Path:
    """The checkpoint folder of a shape, saved at `path` if it has random weights."""
    return shape if isinstance(shape, Path) else save_random(shape, path)


def config_of(shape: Path | GPTConfig) -> GPTConfig:
    return GPTConfig(**Checkpoint.read(shape).hyperparameters) if isinstance(shape, Path) else shape


def save_random(config: GPTConfig, path: Path) -> Path:
    """Save a random checkpoint of a shape; returns its folder."""
    save_checkpoint(path, random_model(config), CharTokenizer(VOCABULARY), {"losses": {}})
    return path


def sampling(row: int) -> SamplingParams:
    return SamplingParams(**SAMPLING[row % len(SAMPLING)], seed=row)


def prompt_text(length: int, seed: int) -> str:
    """`length` characters of TEXT; as many different prompts as TEXT has places for them."""
    start = seed * STRIDE % (len(TEXT) - length)
    return TEXT[start : start + length]


def prompt(length: int, seed: int) -> list[int]:
    """The ids of `prompt_text`, which are the same in both shapes."""
    return [VOCABULARY.index(character) for character in prompt_text(length, seed)]


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
