"""The rules by which a plan fits the settings that are open to a text, whether steps or minutes limit the run.

A small text determines the model's size, the batch and the number of steps. The longest record determines the window.
RECIPE.md has the experiments behind the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import replace
from typing import Any

from training.config import MIN_WINDOW, TrainConfig
from training.text.batches import RecordSampler
from training.text.corpus import Corpus

# A text is small if the preset would repeat it more often than this. The run then repeats it EPOCHS times, with fewer
# blocks, which memorize it later, with shorter windows, and in more and smaller steps. Their noise does more against
# memorizing than dropout or weight decay.
EPOCHS = 10.0
TAUGHT_EPOCHS = 20.0  # the limit with teachers, whose predictions were not memorized in 20 epochs
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
MOST_TAUGHT = 1000  # symbols; counts teach no larger vocabulary, as their table would hold too short contexts


def fill_open(config: TrainConfig, values: dict[str, Any], adaptable: Set[str]) -> TrainConfig:
    """Return the config with these values, except for settings that are not in `adaptable`."""
    return replace(config, **{name: value for name, value in values.items() if name in adaptable})


def may_be_taught(config: TrainConfig, corpus: Corpus) -> bool:
    """Return whether counts of the text may teach the model. Checkpoints know more than the counts predict."""
    return not (config.init_from or config.teachers) and corpus.tokenizer.vocab_size <= MOST_TAUGHT


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
