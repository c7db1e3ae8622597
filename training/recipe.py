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
SHAPE = ("n_layer", "n_head", "n_kv_head", "n_embd")
SMALL_DEPTH, MIN_DEPTH = 2 / 3, 4  # of the preset's blocks; blocks
SMALL_STEP, MIN_STEP = 1 / 2, 1024  # of the preset's characters per step; characters
SMALL_WINDOW = 256  # characters
SMALL_DECAY = 0.2
# Below so many characters dropout and weight decay rise, with the logarithm, until a tenth of it: for 4 blocks of width
# 128, in proportion to what the blocks hold for others.
REGULARIZED, REGULARIZED_SIZE = 200_000, 4 * 128**2
MORE_DROPOUT, MORE_DECAY = 0.3, 0.8
# A checkpoint's weights are unlearned at the rates of a new model, and know more than a small text could teach one.
TUNED_RATES: dict[str, Any] = {"muon_lr": 0.01, "adamw_lr": 0.001}
TUNED_DROPOUT = 0.15
MIN_STEPS = 100
MIN_BLOCK = 4
PATIENCE = 3  # evaluations
MIN_EVALUATIONS = 4  # fewer would say little about a run's course
SHORT_EVALUATIONS = 8  # of a run that would have fewer

SETTINGS = frozenset(SHAPE) | {"dropout", "weight_decay", "block_size", "batch_size", "muon_lr", "adamw_lr"}
SETTINGS |= {"steps", "warmup_steps", "eval_every", "patience"}


def fitted(
    config: TrainConfig,
    corpus: Corpus,
    adaptable: Set[str],
    parts: int = 1,
    longest_window: int | None = None,
    preset: TrainConfig | None = None,
) -> tuple[TrainConfig, dict[str, Any]]:
    """The settings for this text, and those of them that it has changed.

    A setting that the user gives with the value that would be chosen changes nothing: what is printed as chosen can be
    given back, in part or as a whole, and gives the same run.

    adaptable: the names among SETTINGS that the user has not set. parts: batch_size must be a multiple of it.
    longest_window: the most that the run's teachers have. preset: what it was before the user's settings.
    """
    preset = preset or config
    free = SETTINGS - (frozenset((*SHAPE, "block_size")) if config.init_from else frozenset())
    start = replace(config, **{name: getattr(preset, name) for name in free})
    wanted = _fitted(start, corpus, free, parts, longest_window, preset)
    if any(getattr(config, name) != getattr(wanted, name) for name in free - adaptable):
        wanted = _fitted(config, corpus, adaptable, parts, longest_window, preset)
    before, after = preset.as_dict(), wanted.as_dict()
    return wanted, {name: after[name] for name in after if name in adaptable and after[name] != before[name]}


def _fitted(
    config: TrainConfig,
    corpus: Corpus,
    adaptable: Set[str],
    parts: int,
    longest_window: int | None,
    preset: TrainConfig,
) -> TrainConfig:
    length, wanted = len(corpus.train), config
    if longest_window is not None and "block_size" in adaptable:
        wanted = replace(wanted, block_size=min(longest_window, wanted.block_size))
    if config.init_from:
        wanted = replace(wanted, **{name: rate for name, rate in TUNED_RATES.items() if name in adaptable})
    epochs = TAUGHT_EPOCHS if config.teachers else EPOCHS
    trained = max(each.steps * each.tokens_per_step for each in (preset, config))
    is_small = trained > epochs * length
    if is_small:
        if adaptable >= set(SHAPE):
            depth = min(config.n_layer, max(MIN_DEPTH, int(SMALL_DEPTH * config.n_layer)))
            wanted = replace(wanted, n_layer=depth)
        missing = 0.0  # orders of magnitude
        if adaptable >= set(SHAPE) or config.init_from:
            enough = REGULARIZED * wanted.n_layer * wanted.n_embd**2 / REGULARIZED_SIZE
            missing = min(1.0, math.log10(max(1.0, enough / length)))
        more_dropout, more_decay = (TUNED_DROPOUT, 0.0) if config.init_from else (MORE_DROPOUT, MORE_DECAY)
        others: dict[str, Any] = {
            "block_size": min(SMALL_WINDOW, wanted.block_size),
            "dropout": max(config.dropout, round(more_dropout * missing, 2)),
            "weight_decay": round(max(SMALL_DECAY, config.weight_decay) + more_decay * missing, 2),
        }
        wanted = replace(wanted, **{name: value for name, value in others.items() if name in adaptable})
    block_size, batch_size = wanted.block_size, config.batch_size
    if corpus.records is not None and adaptable >= {"block_size", "batch_size"}:  # else steps would be smaller
        longest = int(RecordSampler(corpus.train, block_size, config.seed).pieces[1].max())
        block_size = min(block_size, max(MIN_WINDOW, 1 << longest.bit_length()))
    elif corpus.records is None and "block_size" in adaptable and 2 * block_size > length >= 4 * MIN_BLOCK:
        block_size = 1 << (length // 4).bit_length() - 1
    if "batch_size" in adaptable:
        characters = preset.tokens_per_step
        if is_small:  # which has more steps, so that no less is trained on
            characters = min(characters, max(MIN_STEP, int(SMALL_STEP * characters)))
        if (block_size, characters) != (config.block_size, config.tokens_per_step) or config.batch_size % parts:
            batch_size = -(-max(1, characters // block_size) // parts) * parts
    wanted = replace(wanted, block_size=block_size, batch_size=batch_size)
    if is_small and (corpus.records is not None or 2 * wanted.block_size <= length):
        sampler = sampler_of(corpus, wanted.block_size, wanted.seed)
        steps = max(MIN_STEPS, round(EPOCHS * sampler.per_epoch / sampler.rows(wanted.tokens_per_step)))
        steps = steps if "steps" in adaptable else wanted.steps
        evaluations = 10 if steps >= MIN_STEPS else SHORT_EVALUATIONS
        schedule: dict[str, Any] = {
            "steps": steps, "warmup_steps": min(config.warmup_steps, steps // 4),
            "eval_every": max(1, steps // evaluations), "patience": PATIENCE,
        }  # fmt: skip
        wanted = replace(wanted, **{name: value for name, value in schedule.items() if name in adaptable})
    if "eval_every" in adaptable and wanted.steps < MIN_EVALUATIONS * wanted.eval_every:
        wanted = replace(wanted, eval_every=max(1, wanted.steps // SHORT_EVALUATIONS))
    return wanted


def explanation(corpus: Corpus, changes: dict[str, Any]) -> str:
    kind = "text" if corpus.records is None else "list"
    characters = plural(len(corpus.train), "character")
    return f"for a {kind} with {characters} to train on:{flags(changes)}; each can be set"
