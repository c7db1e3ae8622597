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
SETTINGS |= {"steps", "warmup_steps", "eval_every", "eval_chars", "patience"}


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
    if any(getattr(config, name) != getattr(wanted, name) for name in free - adaptable - {"eval_chars"}):
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
    length = len(corpus.train)

    def with_open(wanted: TrainConfig, values: dict[str, Any]) -> TrainConfig:
        """Change the settings that the user has left open."""
        return replace(wanted, **{name: value for name, value in values.items() if name in adaptable})

    wanted = with_open(config, TUNED_RATES) if config.init_from else config
    if longest_window is not None:
        wanted = with_open(wanted, {"block_size": min(longest_window, wanted.block_size)})
    trained = max(each.steps * each.tokens_per_step for each in (preset, config))
    is_small = trained > (TAUGHT_EPOCHS if config.teachers else EPOCHS) * length
    characters = preset.tokens_per_step
    if is_small:
        if adaptable >= set(SHAPE):
            wanted = replace(wanted, n_layer=min(config.n_layer, max(MIN_DEPTH, int(SMALL_DEPTH * config.n_layer))))
        sizes_are_open = adaptable >= set(SHAPE) or config.init_from is not None
        window = {"block_size": min(SMALL_WINDOW, wanted.block_size)}
        wanted = with_open(wanted, regularization(wanted, length if sizes_are_open else None) | window)
        # More steps, so that no less is trained on.
        characters = min(characters, max(MIN_STEP, int(SMALL_STEP * characters)))
    block_size, batch_size = window_for(wanted, corpus, adaptable), config.batch_size
    if "batch_size" in adaptable:
        if (block_size, characters) != (config.block_size, config.tokens_per_step) or config.batch_size % parts:
            batch_size = rows_of(characters, block_size, parts)
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
        wanted = with_open(wanted, schedule)
    if wanted.steps < MIN_EVALUATIONS * wanted.eval_every:
        wanted = with_open(wanted, {"eval_every": max(1, wanted.steps // SHORT_EVALUATIONS)})
    return wanted


def regularization(config: TrainConfig, length: int | None) -> dict[str, Any]:
    """Dropout and weight decay for a text that is repeated often; `length` is its characters if they raise them."""
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
    """block_size: the longest record's, or a quarter of a text that has fewer than two windows."""
    block_size, length = config.block_size, len(corpus.train)
    if corpus.records is not None and adaptable >= {"block_size", "batch_size"}:  # else steps would be smaller
        longest = int(RecordSampler(corpus.train, block_size, config.seed).pieces[1].max())
        return min(block_size, max(MIN_WINDOW, 1 << longest.bit_length()))
    if corpus.records is None and "block_size" in adaptable and 2 * block_size > length >= 4 * MIN_BLOCK:
        return 1 << (length // 4).bit_length() - 1
    return block_size


def rows_of(characters: int, block_size: int, parts: int) -> int:
    """Windows of a step of about so many characters: a multiple of `parts`."""
    return -(-max(1, characters // block_size) // parts) * parts


def explanation(corpus: Corpus, changes: dict[str, Any]) -> str:
    kind = "text" if corpus.records is None else "list"
    characters = plural(len(corpus.train), "character")
    return f"for a {kind} with {characters} to train on:{flags(changes)}; each can be set"
