"""What the text decides of a run, where the user has not: a small one the model's size, the batch and the steps; the
length of its records the window. The experiments behind the numbers are in RECIPE.md.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import replace
from typing import Any

from training.config import MIN_WINDOW, TrainConfig
from training.data import Corpus, RecordSampler, sampler_of
from training.messages import flags, plural

# Of a text that the preset would repeat more often: so often, with fewer blocks, which memorize it later, shorter
# windows, and in more and smaller steps, whose noise does more against memorizing than dropout or weight decay.
EPOCHS = 10.0
TAUGHT_EPOCHS = 20.0  # what teachers say was not memorized in so many
SMALL_MODEL: dict[str, Any] = {"n_layer": 4, "n_head": 4, "n_kv_head": 2, "n_embd": 128}
SMALL_STEP, SMALL_WINDOW = 1024, 256  # characters
SMALL_DECAY = 0.2
# Below so many characters dropout and weight decay rise, with the logarithm, until a tenth of it.
REGULARIZED = 200_000
MORE_DROPOUT, MORE_DECAY = 0.3, 0.8
MIN_STEPS = 100
MIN_BLOCK = 4
PATIENCE = 3  # evaluations
MIN_EVALUATIONS = 4  # fewer would say little about a run's course
SHORT_EVALUATIONS = 8  # of a run that would have fewer

SETTINGS = frozenset(SMALL_MODEL) | {"dropout", "weight_decay", "block_size", "batch_size"}
SETTINGS |= {"steps", "warmup_steps", "eval_every", "patience"}


def fitted(
    config: TrainConfig, corpus: Corpus, adaptable: Set[str], parts: int = 1, longest_window: int | None = None
) -> tuple[TrainConfig, dict[str, Any]]:
    """The settings for this text, and those of them that it has changed.

    adaptable: the names among SETTINGS that the user has not set. parts: batch_size must be a multiple of it.
    longest_window: the most that the run's teachers have.
    """
    length, before = len(corpus.train), config.as_dict()
    wanted = config
    if longest_window is not None and "block_size" in adaptable:
        wanted = replace(config, block_size=min(longest_window, config.block_size))
    epochs = TAUGHT_EPOCHS if config.teachers else EPOCHS
    is_small = config.steps * config.tokens_per_step > epochs * length
    if is_small:
        model: dict[str, Any] = {}
        missing = 0.0  # orders of magnitude
        if adaptable >= SMALL_MODEL.keys():
            model = {name: min(most, getattr(config, name)) for name, most in SMALL_MODEL.items()}
            missing = min(1.0, math.log10(max(1.0, REGULARIZED / length)))
        others: dict[str, Any] = {
            "block_size": min(SMALL_WINDOW, wanted.block_size),
            "dropout": max(config.dropout, round(MORE_DROPOUT * missing, 2)),
            "weight_decay": round(max(SMALL_DECAY, config.weight_decay) + MORE_DECAY * missing, 2),
        }
        wanted = replace(wanted, **model, **{name: value for name, value in others.items() if name in adaptable})
    block_size, batch_size = wanted.block_size, config.batch_size
    if corpus.records is not None and adaptable >= {"block_size", "batch_size"}:  # else steps would be smaller
        longest = int(RecordSampler(corpus.train, block_size, config.seed).pieces[1].max())
        block_size = min(block_size, max(MIN_WINDOW, 1 << longest.bit_length()))
    elif corpus.records is None and "block_size" in adaptable and 2 * block_size > length >= 4 * MIN_BLOCK:
        block_size = 1 << (length // 4).bit_length() - 1
    if "batch_size" in adaptable:
        characters = config.tokens_per_step
        if is_small and "steps" in adaptable:  # which then has more, so that no less is trained on
            characters = min(SMALL_STEP, characters)
        if (block_size, characters) != (config.block_size, config.tokens_per_step) or config.batch_size % parts:
            batch_size = -(-max(1, characters // block_size) // parts) * parts
    wanted = replace(wanted, block_size=block_size, batch_size=batch_size)
    if is_small and "steps" in adaptable and (corpus.records is not None or 2 * wanted.block_size <= length):
        sampler = sampler_of(corpus, wanted.block_size, wanted.seed)
        steps = max(MIN_STEPS, round(EPOCHS * sampler.per_epoch / sampler.rows(wanted.tokens_per_step)))
        schedule: dict[str, Any] = {
            "steps": steps, "warmup_steps": min(config.warmup_steps, steps // 4), "eval_every": steps // 10,
            "patience": PATIENCE,
        }  # fmt: skip
        wanted = replace(wanted, **{name: value for name, value in schedule.items() if name in adaptable})
    if "eval_every" in adaptable and wanted.steps < MIN_EVALUATIONS * wanted.eval_every:
        wanted = replace(wanted, eval_every=max(1, wanted.steps // SHORT_EVALUATIONS))
    after = wanted.as_dict()
    return wanted, {name: after[name] for name in after if after[name] != before[name]}


def explanation(corpus: Corpus, changes: dict[str, Any]) -> str:
    kind = "text" if corpus.records is None else "list"
    characters = plural(len(corpus.train), "character")
    return f"for a {kind} with {characters} to train on:{flags(changes)}; each can be set"
