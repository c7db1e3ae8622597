"""Fine-tuning: a run starts from the weights, shape and vocabulary of a checkpoint.

Every id keeps its character. The vocabulary retains the checkpoint's order and its characters that the new text lacks.
New characters are refused. On request they are appended, or become the unknown symbol if they are rare.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from service.model.checkpoint import WEIGHTS, Checkpoint
from service.model.tokenizer import UNKNOWN, CharTokenizer
from training.config import SHAPE, ConfigError, TrainConfig
from training.messages import plural
from training.text.corpus import TRAIN_SHARE, Corpus, rare_characters
from training.text.records import LINES, splitting_of

MAX_LISTED = 20  # characters named in an error message


@dataclass(frozen=True)
class Origin:
    """The starting point of a fine-tuning run."""

    tokenizer: CharTokenizer  # the run's tokenizer, new characters included
    weights: dict[str, Tensor]  # the run's initial weights, by name
    record_end: str | None  # the character that ends the checkpoint's records
    lineage: dict[str, Any]  # provenance of the weights, for training.json


def inherited(checkpoint: Checkpoint, column: str | None = None) -> dict[str, Any]:
    """Return the settings that a run takes over from its checkpoint: SHAPE and records.

    `window_stages` is 1, because the checkpoint has already been trained on whole windows. column: the setting.
    """
    shape = {name: getattr(checkpoint.config, name) for name in SHAPE}
    records = splitting_of(checkpoint).separator if column is None else LINES
    return shape | {"records": records, "window_stages": 1}


def _lacking(
    config: TrainConfig, vocabulary: CharTokenizer, characters: set[str], added: list[str], is_first: bool
) -> ConfigError:
    """Return the refusal of a text with `characters`, of which the vocabulary would have to get those `added`.

    is_first: whether the unknown symbol is among them.
    """
    listed = ", ".join(f"{c!r} (U+{ord(c):04X})" for c in added[:MAX_LISTED])
    more = f" and {len(added) - MAX_LISTED:,} more" if len(added) > MAX_LISTED else ""
    it = choices = "it" if len(added) == 1 else "them"
    unused = len(set(vocabulary.characters) - characters)
    lacks = f"lacks {len(added):,} of the text's {len(characters):,} characters"
    if is_first:
        lacks = f"has no unknown symbol, U+FFFD, and lacks {plural(len(added), 'character')} with it"
    elif vocabulary.unknown_id is not None:
        choices += ", or --min-count N to leave those that occur fewer than N times to its unknown symbol"
    return ConfigError(
        f"the vocabulary of {config.init_from} {lacks}: {listed}{more}. Remove {it} from the text, or pass "
        f"--extend-vocabulary to add {choices}. "
        f"(Characters of the vocabulary absent from the text, which are kept: {unused:,})"
    )


def _extend(weights: dict[str, Tensor], count: int, seed: int) -> None:
    """Add the rows of new characters to embedding and head.

    Each new head row is the mean row. Its logit is the mean logit, which takes little probability from existing
    characters. New embedding rows are sampled with the mean and variance of the existing ones, so that two new
    characters differ from the start (Hewitt 2021).
    """
    embed, head = weights["embed.weight"], weights["head.weight"]
    std, mean = torch.std_mean(embed, dim=0, correction=0)
    drawn = torch.randn(count, embed.size(1), generator=torch.Generator().manual_seed(seed))
    weights["embed.weight"] = torch.cat((embed, mean + std * drawn))
    weights["head.weight"] = torch.cat((head, head.mean(dim=0).expand(count, -1)))


def load_origin(checkpoint: Checkpoint, config: TrainConfig, corpus: Corpus) -> Origin:
    """Return the checkpoint of `config.init_from`, adapted to the text of `corpus`, which is in the text's vocabulary.

    A character that the checkpoint lacks is left to its unknown symbol if it occurs fewer than `config.min_count`
    times. Characters that the checkpoint has stay, however rare they are.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        ConfigError: the checkpoint's shape differs from the config's, or it lacks characters and extend_vocabulary is
            not set.
    """
    shape = config.model_config(checkpoint.tokenizer.vocab_size)
    differences = [
        f"{name} is {getattr(checkpoint.config, name)}, got {getattr(shape, name)}"
        for name in SHAPE
        if getattr(checkpoint.config, name) != getattr(shape, name)
    ]
    if differences:
        raise ConfigError(
            f"the shape of {config.init_from} cannot be changed: {'; '.join(differences)}. "
            "Omit these settings, or train without --init-from"
        )
    vocabulary = checkpoint.tokenizer
    characters = set(corpus.tokenizer.characters)
    rare = rare_characters(corpus, config.min_count) - set(vocabulary.characters)
    is_first = bool(rare) and UNKNOWN not in vocabulary
    added = sorted(characters - set(vocabulary.characters) - rare | ({UNKNOWN} if is_first else set()))
    if added and not config.extend_vocabulary:
        raise _lacking(config, vocabulary, characters, added, is_first)
    weights = checkpoint.load_model().state_dict()
    if added:
        _extend(weights, len(added), config.seed)
    about = checkpoint.training
    lineage = {
        "path": config.init_from,
        "manifest_sha256": checkpoint.digest,
        "weights_sha256": checkpoint.files[WEIGHTS].sha256,
        "step": about.get("step"),
        "data": about.get("data"),
        "added_characters": "".join(added),
        "init_from": about.get("init_from"),  # the checkpoint's own lineage
    }
    all_characters = vocabulary.characters + added
    has_unknown = vocabulary.unknown_id is not None or (config.min_count > 1 and UNKNOWN in all_characters)
    return Origin(CharTokenizer(all_characters, has_unknown), weights, checkpoint.record_end_character, lineage)


def refuse_short_text(config: TrainConfig, corpus: Corpus) -> None:
    """Raise ConfigError if the text has fewer than two windows of the checkpoint, which cannot be shortened."""
    length, needed = len(corpus.train), 2 * config.block_size
    if corpus.records is None and length < needed:
        more = math.ceil((needed - length) / TRAIN_SHARE)
        raise ConfigError(
            f"fine-tuning {config.init_from} needs {needed:,} characters to train on, two of its windows, got "
            f"{length:,}: add {plural(more, 'character')} of text (--data takes several files), or train a new model "
            "without --init-from, whose window the text decides"
        )


def describe_origin(config: TrainConfig, origin: Origin, corpus: Corpus) -> str:
    added = len(origin.lineage["added_characters"])
    alike = "as" if corpus.record_end == origin.record_end else "unlike"
    kind = "each line is a record" if corpus.record_end == "\n" else "records may have several lines"
    return (
        f"starting from {config.init_from}: {', '.join(f'{name} {getattr(config, name)}' for name in SHAPE[:5])}, "
        f"{origin.tokenizer.vocab_size - added:,} characters"
        + (f" plus {added:,} new" if added else "")
        + (f"; {kind}, {alike} there" if corpus.record_end is not None else "")
    )
