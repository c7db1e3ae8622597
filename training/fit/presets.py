"""Fit the settings that the user has left open to the text.

A small text determines the model's size, the batch and the number of steps. The longest record determines the window.
RECIPE.md has the experiments behind the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import replace
from typing import Any

from training.config import MIN_WINDOW, TrainConfig
from training.messages import flags, plural
from training.text.batches import RecordSampler
from training.text.corpus import Corpus, sampler_of

# A text is small if the preset would repeat it more often than this. The run then repeats it EPOCHS times, with fewer
# blocks, which memorize it later, with shorter windows, and in more and smaller steps. Their noise does more against
# memorizing than dropout or weight decay.
EPOCHS = 10.0
TAUGHT_EPOCHS = 20.0  # the limit with teachers, whose predictions were not memorized in 20 epochs
SHAPE = ("n_layer", "n_head", "n_kv_head", "n_embd")
SMALL_DEPTH, MIN_DEPTH = 2 / 3, 4  # share of the preset's blocks; blocks
SMALL_STEP, MIN_STEP = 1 / 2, 1024  # share of the preset's characters per step; characters
SMALL_WINDOW = 256  # characters
SMALL_DECAY = 0.2
# Dropout and weight decay rise by up to MORE_DROPOUT and MORE_DECAY for a text shorter than REGULARIZED characters.
# They rise with the logarithm of the length, down to a tenth of REGULARIZED. That number holds for 4 blocks of width
# 128; it is scaled by n_layer · n_embd² for other models.
REGULARIZED, REGULARIZED_SIZE = 200_000, 4 * 128**2
MORE_DROPOUT, MORE_DECAY = 0.3, 0.8
# At the learning rates of a new model, a run would unlearn a checkpoint's weights, which hold more than a small text
# could teach.
TUNED_RATES: dict[str, Any] = {"muon_lr": 0.01, "adamw_lr": 0.001}
TUNED_DROPOUT = 0.15
MIN_STEPS = 100
MIN_BLOCK = 4
PATIENCE = 3  # evaluations
MIN_EVALUATIONS = 4  # fewer would show little of a run's course
SHORT_EVALUATIONS = 8  # evaluations of a short run

SETTINGS = frozenset(SHAPE) | {"dropout", "weight_decay", "block_size", "batch_size", "muon_lr", "adamw_lr"}
SETTINGS |= {"steps", "warmup_steps", "eval_every", "eval_chars", "score_chars", "patience"}


def fitted(
    config: TrainConfig,
    corpus: Corpus,
    adaptable: Set[str],
    parts: int = 1,
    longest_window: int | None = None,
    preset: TrainConfig | None = None,
) -> tuple[TrainConfig, dict[str, Any]]:
    """Return the settings for this text, and the adaptable ones among them that differ from the preset.

    A setting that the user gives with the value that would be chosen changes nothing. The user can therefore pass the
    printed settings back, some or all of them, and get the same run.

    adaptable: the names in SETTINGS that the user has not set. parts: batch_size must be a multiple of it.
    longest_window: the smallest block_size of the run's teachers. preset: the config before the user's settings.
    """
    preset = preset or config
    free = SETTINGS - (frozenset((*SHAPE, "block_size")) if config.init_from else frozenset())
    start = replace(config, **{name: getattr(preset, name) for name in free})
    wanted = _fitted(start, corpus, free, parts, longest_window, preset)
    if any(getattr(config, name) != getattr(wanted, name) for name in free - adaptable - {"eval_chars"}):
        wanted = _fitted(config, corpus, adaptable, parts, longest_window, preset)
    before, after = preset.as_dict(), wanted.as_dict()
    return wanted, {name: after[name] for name in after if name in adaptable and after[name] != before[name]}


def with_open(config: TrainConfig, values: dict[str, Any], adaptable: Set[str]) -> TrainConfig:
    """Return the config with these values, except for settings that are not in `adaptable`."""
    return replace(config, **{name: value for name, value in values.items() if name in adaptable})


def _fitted(
    config: TrainConfig,
    corpus: Corpus,
    adaptable: Set[str],
    parts: int,
    longest_window: int | None,
    preset: TrainConfig,
) -> TrainConfig:
    """Apply the rules, one after the other."""
    trained = max(each.steps * each.tokens_per_step for each in (preset, config))
    is_small = trained > (TAUGHT_EPOCHS if config.teachers else EPOCHS) * len(corpus.train)
    wanted = with_open(config, TUNED_RATES, adaptable) if config.init_from else config
    if longest_window is not None:
        wanted = with_open(wanted, {"block_size": min(longest_window, wanted.block_size)}, adaptable)
    characters = preset.tokens_per_step
    if is_small:
        wanted = _small_model(wanted, len(corpus.train), adaptable)
        # Smaller steps; the schedule below takes more of them, so that the run does not train on less text.
        characters = min(characters, max(MIN_STEP, int(SMALL_STEP * characters)))
    wanted = _batch(config, wanted, corpus, adaptable, characters, parts)
    if is_small and (corpus.records is not None or 2 * wanted.block_size <= len(corpus.train)):
        wanted = with_open(wanted, _schedule(wanted, corpus, adaptable), adaptable)
    if wanted.steps < MIN_EVALUATIONS * wanted.eval_every:
        wanted = with_open(wanted, {"eval_every": max(1, wanted.steps // SHORT_EVALUATIONS)}, adaptable)
    return wanted


def _small_model(config: TrainConfig, length: int, adaptable: Set[str]) -> TrainConfig:
    """Fewer blocks, a shorter window and more regularization, for a text of `length` characters."""
    shape_is_open = adaptable >= set(SHAPE)
    wanted = config
    if shape_is_open:
        wanted = replace(config, n_layer=min(config.n_layer, max(MIN_DEPTH, int(SMALL_DEPTH * config.n_layer))))
    values = regularization(wanted, length if shape_is_open or config.init_from is not None else None)
    values["block_size"] = min(SMALL_WINDOW, wanted.block_size)
    return with_open(wanted, values, adaptable)


def _batch(
    given: TrainConfig, config: TrainConfig, corpus: Corpus, adaptable: Set[str], characters: int, parts: int
) -> TrainConfig:
    """The window that the text needs, and a batch of about `characters`.

    The given batch is kept if the user set it. It is also kept if it is a multiple of `parts`, and neither the window
    nor the characters have changed.
    """
    block_size, batch_size = window_for(config, corpus, adaptable), given.batch_size
    is_changed = (block_size, characters) != (given.block_size, given.tokens_per_step) or batch_size % parts
    if "batch_size" in adaptable and is_changed:
        batch_size = rows_of(characters, block_size, parts)
    return replace(config, block_size=block_size, batch_size=batch_size)


def _schedule(config: TrainConfig, corpus: Corpus, adaptable: Set[str]) -> dict[str, Any]:
    """EPOCHS passes over a small text, unless the user has set the steps."""
    steps = config.steps
    if "steps" in adaptable:
        sampler = sampler_of(corpus, config.block_size, config.seed)
        steps = max(MIN_STEPS, round(EPOCHS * sampler.per_epoch / sampler.rows(config.tokens_per_step)))
    evaluations = 10 if steps >= MIN_STEPS else SHORT_EVALUATIONS
    return {
        "steps": steps, "warmup_steps": min(config.warmup_steps, steps // 4),
        "eval_every": max(1, steps // evaluations), "patience": PATIENCE,
    }  # fmt: skip


def regularization(config: TrainConfig, length: int | None) -> dict[str, Any]:
    """Return dropout and weight decay for a text that is repeated often.

    length: the characters of the training split. None: a short text does not raise the two further.
    """
    missing = 0.0  # orders of magnitude
    if length is not None:
        enough = REGULARIZED * config.n_layer * config.n_embd**2 / REGULARIZED_SIZE
        missing = min(1.0, math.log10(max(1.0, enough / length)))
    more_dropout, more_decay = (TUNED_DROPOUT, 0.0) if config.init_from else (MORE_DROPOUT, MORE_DECAY)
    return {
        "dropout": max(config.dropout, round(more_dropout * missing, 2)),
        "weight_decay": round(max(SMALL_DECAY, config.weight_decay) + more_decay * missing, 2),
    }


def window_for(config: TrainConfig, corpus: Corpus, adaptable: Set[str]) -> int:
    """Return the block_size for the text, a power of two if it is smaller than the config's.

    It is the smallest above the longest record's length, at least MIN_WINDOW. A text of fewer than two windows gets the
    largest within a quarter of its length.
    """
    block_size, length = config.block_size, len(corpus.train)
    if corpus.records is not None and adaptable >= {"block_size", "batch_size"}:  # else steps would be smaller
        longest = int(RecordSampler(corpus.train, block_size, config.seed).pieces[1].max())
        return min(block_size, max(MIN_WINDOW, 1 << longest.bit_length()))
    if corpus.records is None and "block_size" in adaptable and 2 * block_size > length >= 4 * MIN_BLOCK:
        return 1 << (length // 4).bit_length() - 1
    return block_size


def rows_of(characters: int, block_size: int, parts: int) -> int:
    """Return the number of windows in a step of about `characters` characters, a multiple of `parts`."""
    return -(-max(1, characters // block_size) // parts) * parts


def explanation(corpus: Corpus, changes: dict[str, Any]) -> str:
    kind = "text" if corpus.records is None else "list"
    characters = plural(len(corpus.train), "character")
    return f"for a {kind} with {characters} to train on:{flags(changes)}; each can be set"
