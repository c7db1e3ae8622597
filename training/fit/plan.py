"""Plan a run: choose the settings that are open by the text, and by the steps of a preset or the time of `--minutes`.

A plan is a function of the settings, the text and, for a time, of speeds that the caller measures. It trains nothing
and reads no clock. RECIPE.md has the runs behind the numbers.

For a time, the plan takes the largest size of LADDER that trains on ENOUGH characters in it and that the text is long
enough for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from training.config import MIN_SCORED, MODEL_SIZES, SCORED_SHARE, TrainConfig
from training.fit.rules import (
    EPOCHS,
    MIN_STEPS,
    PATIENCE,
    TAUGHT_EPOCHS,
    TUNED_RATES,
    fill_open,
    may_be_taught,
    regularization,
    rows_of,
    window_for,
)
from training.fit.settings import ADAPTABLE, Settings
from training.messages import duration, flags, plural
from training.text.corpus import Corpus, sampler_of

# For steps: shares of the preset's blocks and characters per step for a small text, and the least of each; its window.
SMALL_DEPTH, MIN_DEPTH = 2 / 3, 4
SMALL_STEP, MIN_STEP = 1 / 2, 1024
SMALL_WINDOW = 256
MIN_EVALUATIONS = 4  # fewer would show little of a run's course
SHORT_EVALUATIONS = 8  # evaluations of a short run

# For a time, all from here on.
LADDER: tuple[dict[str, Any], ...] = (
    {"n_layer": 4, "n_head": 4, "n_kv_head": 2, "n_embd": 128},
    {"n_layer": 6, "n_head": 4, "n_kv_head": 2, "n_embd": 128},
    {"n_layer": 6, "n_head": 6, "n_kv_head": 3, "n_embd": 192},
    {"n_layer": 8, "n_head": 8, "n_kv_head": 4, "n_embd": 256},
    {"n_layer": 8, "n_head": 12, "n_kv_head": 6, "n_embd": 384},
    {"n_layer": 12, "n_head": 16, "n_kv_head": 8, "n_embd": 512},
)
# Characters trained on per parameter. 6 layers of width 128 were better than 4 from the first number on, and each
# larger size was better than the next smaller one from the second on.
ENOUGH_FOR_DEPTH, ENOUGH = 0.5, 3.0
MOST_PARAMETERS = 7  # parameters per character of the training split; a model with more memorizes it
STEP = 16  # characters of a step, as a multiple of n_embd
SHORT = 1000  # steps; if the run would have fewer, a step has half the characters
TRAINED_SHARE = 0.85  # share of the time for training; evaluations and the final scores take the rest
# Number of evaluations, characters of each as a share of those trained on, and the least number of characters.
EVALUATIONS, EVALUATED_SHARE, MIN_EVALUATED = 8, 1 / 100, 30_000
# Shares of the time that training leaves: for evaluations and for the final scores. Samples take the rest. If the
# evaluations would take more, there are FEW_EVALUATIONS, of fewer characters.
TIME_TO_EVALUATE, TIME_TO_SCORE, FEW_EVALUATIONS = 1 / 2, 1 / 3, 4
# A model with 5.8 parameters per character of its text, trained for 10 epochs, did best with these.
STRAIN, STRAINED_DROPOUT, DECAY, STRAINED_DECAY, MIN_DROPOUT = 58, 0.12, 0.1, 0.25, 0.03


class Speed(NamedTuple):
    """A measured speed of a run."""

    trained: float  # characters/s
    evaluated: float  # characters/s
    seconds: float = 0.0  # time taken to measure


@dataclass(frozen=True)
class Plan:
    """The values of the open settings, and the lines that tell the user."""

    fitted: dict[str, Any]
    lines: list[str] = field(default_factory=list)
    speed: Speed | None = None  # of the planned run, if its time is limited
    seconds: float = math.inf  # time to train in


def plan(
    settings: Settings,
    corpus: Corpus,
    parts: int = 1,
    longest_window: int | None = None,
    measure: Callable[[TrainConfig], Speed] | None = None,
    spent: float = 0.0,
) -> Plan:
    """Return the plan of a run on a text.

    parts: batch_size must be a multiple of it. longest_window: the smallest block_size of the run's teachers.
    measure: needed for --minutes. spent: seconds of the time that have passed.
    """
    if settings.requested.minutes:
        assert measure is not None
        return _for_minutes(settings, corpus, parts, measure, spent)
    return _for_steps(settings, corpus, parts, longest_window)


# For steps


def _for_steps(settings: Settings, corpus: Corpus, parts: int, longest_window: int | None) -> Plan:
    """Plan by the preset's steps.

    A setting that the user gives with the value that would be chosen changes nothing. The user can therefore pass the
    printed settings back, some or all of them, and get the same run.
    """
    preset, config, adaptable = TrainConfig.from_preset(settings.preset), settings.requested, settings.open
    given = {name: value for name, value in settings.given.items() if name not in ADAPTABLE}
    unset = replace(settings, given=given)
    wanted = _fitted(unset.requested, preset, corpus, unset.open, parts, longest_window)
    if any(getattr(config, name) != getattr(wanted, name) for name in unset.open - adaptable - {"eval_chars"}):
        wanted = _fitted(config, preset, corpus, adaptable, parts, longest_window)
    chosen = {name: value for name, value in wanted.as_dict().items() if name in adaptable}
    changes = {name: value for name, value in chosen.items() if value != getattr(preset, name)}
    changes.pop("counted", None)  # follows from the vocabulary and from checkpoints, not from the text's length
    return Plan(chosen, [_chosen_for_text(corpus, changes)] if changes else [])


def _chosen_for_text(corpus: Corpus, changes: dict[str, Any]) -> str:
    kind = "text" if corpus.records is None else "list"
    characters = plural(len(corpus.train), "character")
    return f"for a {kind} with {characters} to train on:{flags(changes)}; each can be set"


def _fitted(
    config: TrainConfig,
    preset: TrainConfig,
    corpus: Corpus,
    adaptable: Set[str],
    parts: int,
    longest_window: int | None,
) -> TrainConfig:
    """Apply the rules, one after the other."""
    trained = max(each.steps * each.tokens_per_step for each in (preset, config))
    is_small = trained > (TAUGHT_EPOCHS if config.teachers else EPOCHS) * len(corpus.train)
    wanted = fill_open(config, TUNED_RATES, adaptable) if config.init_from else config
    if not may_be_taught(config, corpus):
        wanted = fill_open(wanted, {"counted": 0.0}, adaptable)
    if longest_window is not None:
        wanted = fill_open(wanted, {"block_size": min(longest_window, wanted.block_size)}, adaptable)
    characters = preset.tokens_per_step
    if is_small:
        wanted = _small_model(wanted, len(corpus.train), adaptable)
        # Smaller steps; the schedule below takes more of them, so that the run does not train on less text.
        characters = min(characters, max(MIN_STEP, int(SMALL_STEP * characters)))
    wanted = _batch(config, wanted, corpus, adaptable, characters, parts)
    if is_small and (corpus.records is not None or 2 * wanted.block_size <= len(corpus.train)):
        wanted = fill_open(wanted, _schedule(wanted, corpus, adaptable), adaptable)
    if wanted.steps < MIN_EVALUATIONS * wanted.eval_every:
        wanted = fill_open(wanted, {"eval_every": max(1, wanted.steps // SHORT_EVALUATIONS)}, adaptable)
    return wanted


def _small_model(config: TrainConfig, length: int, adaptable: Set[str]) -> TrainConfig:
    """Fewer blocks, a shorter window and more regularization, for a text of `length` characters."""
    size_is_open = adaptable >= set(MODEL_SIZES)
    wanted = config
    if size_is_open:
        wanted = replace(config, n_layer=min(config.n_layer, max(MIN_DEPTH, int(SMALL_DEPTH * config.n_layer))))
    values = regularization(wanted, length if size_is_open or config.init_from is not None else None)
    values["block_size"] = min(SMALL_WINDOW, wanted.block_size)
    return fill_open(wanted, values, adaptable)


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


# For a time


def _for_minutes(
    settings: Settings, corpus: Corpus, parts: int, measure: Callable[[TrainConfig], Speed], spent: float
) -> Plan:
    """Plan by the time. What the plan measures takes from it."""
    config, adaptable, length = settings.requested, settings.open, len(corpus.train)
    seconds = max(0.0, 60 * config.minutes * TRAINED_SHARE - spent)
    config = fill_open(config, TUNED_RATES, adaptable) if config.init_from else config
    chooses_size = adaptable >= set(MODEL_SIZES) and not config.init_from
    chosen, speed = config, Speed(math.inf, math.inf)  # a larger size is no faster than the last one measured
    for number, size in enumerate(LADDER if chooses_size else ({},)):
        wanted = _sized(config, size, corpus, adaptable, parts)
        if number and _parameters(wanted, corpus) > MOST_PARAMETERS * length:
            break
        needed = _parameters(wanted, corpus) * (0.0, ENOUGH_FOR_DEPTH, ENOUGH)[min(number, 2)]
        if needed > speed.trained * seconds:
            break
        measured = measure(wanted)
        seconds = max(0.0, seconds - measured.seconds)
        if needed > measured.trained * seconds:
            break
        chosen, speed = wanted, measured
    if min(EPOCHS * length, speed.trained * seconds) < SHORT * chosen.tokens_per_step:
        half = rows_of(chosen.tokens_per_step // 2, chosen.block_size, parts)
        chosen = fill_open(chosen, {"batch_size": half}, adaptable)
        speed = measure(chosen)
        seconds = max(0.0, seconds - speed.seconds)
    dropout, trained = chosen.dropout, min(EPOCHS * length, speed.trained * seconds)
    chosen = fill_open(chosen, _regularized(chosen, corpus, trained), adaptable)
    if chosen.dropout > dropout:
        speed = measure(chosen)
        seconds = max(0.0, seconds - speed.seconds)
        trained = min(EPOCHS * length, speed.trained * seconds)
    time_is_left = trained == EPOCHS * length
    chosen = fill_open(chosen, _timed_schedule(chosen, trained, speed, time_is_left), adaptable)
    if chosen.steps < SHORT and may_be_taught(chosen, corpus):
        chosen = fill_open(chosen, {"counted": 1.0}, adaptable)
    fitted = {name: value for name, value in chosen.as_dict().items() if name in adaptable}
    return Plan(fitted, [*_chosen_for_time(chosen, fitted, speed, time_is_left)], speed, seconds)


def _parameters(config: TrainConfig, corpus: Corpus) -> int:
    """Return the number of parameters without embedding and head."""
    vocab_size = corpus.tokenizer.vocab_size
    return config.model_config(vocab_size).num_parameters - 2 * vocab_size * config.n_embd


def _sized(config: TrainConfig, size: dict[str, Any], corpus: Corpus, adaptable: Set[str], parts: int) -> TrainConfig:
    config = fill_open(config, size, adaptable)
    config = fill_open(config, {"block_size": window_for(config, corpus, adaptable)}, adaptable)
    return fill_open(config, {"batch_size": rows_of(STEP * config.n_embd, config.block_size, parts)}, adaptable)


def _regularized(config: TrainConfig, corpus: Corpus, trained: float) -> dict[str, Any]:
    """Return dropout and weight decay of a run on `trained` characters."""
    length = len(corpus.train)
    epochs = trained / length
    strain = min(1.0, epochs * _parameters(config, corpus) / length / STRAIN)
    dropout = round(STRAINED_DROPOUT * strain, 2)
    small = regularization(config, length)
    if epochs >= EPOCHS and small["dropout"] > dropout:
        return small
    return {
        "dropout": dropout if dropout >= MIN_DROPOUT else 0.0,
        "weight_decay": round(DECAY + (STRAINED_DECAY - DECAY) * strain, 2),
    }


def _timed_schedule(config: TrainConfig, characters: float, speed: Speed, time_is_left: bool) -> dict[str, Any]:
    """Return as many steps as train on `characters`, and evaluations and scores that fit the rest of the time."""
    steps = max(MIN_STEPS, int(characters) // config.tokens_per_step)
    trained = steps * config.tokens_per_step
    training = trained / speed.trained  # seconds
    others = max(60 * config.minutes - training, training * (1 / TRAINED_SHARE - 1))
    most = others * speed.evaluated  # characters in this time
    evaluations, evaluated = EVALUATIONS, max(MIN_EVALUATED, int(EVALUATED_SHARE * trained))
    if evaluations * evaluated > TIME_TO_EVALUATE * most:
        evaluations = FEW_EVALUATIONS
        evaluated = min(evaluated, max(1, int(TIME_TO_EVALUATE * most / evaluations)))
    scored = max(1, int(TIME_TO_SCORE * most / 2))  # in windows and streamed
    return {
        "steps": steps,
        "warmup_steps": min(config.warmup_steps, steps // 4),
        "eval_every": -(-steps // evaluations),  # the last evaluation is at the end, whatever the remainder
        "eval_chars": evaluated,
        "score_chars": str(scored) if scored < max(MIN_SCORED, SCORED_SHARE * trained / 2) else "auto",
        "patience": PATIENCE if time_is_left else 0,
    }


def _chosen_for_time(config: TrainConfig, fitted: dict[str, Any], speed: Speed, time_is_left: bool) -> Iterator[str]:
    minutes = f"{config.minutes:g} minute{'' if config.minutes == 1 else 's'}"
    yield f"for {minutes} at {speed.trained:,.0f} characters/s, measured here:{flags(fitted)}; each can be set"
    trained = config.steps * config.tokens_per_step
    needed = duration(trained / speed.trained / TRAINED_SHARE)
    if trained > speed.trained * 60 * config.minutes:
        yield f"the run takes about {needed}, as fewer than {plural(MIN_STEPS, 'step')} would teach nothing"
    elif time_is_left:
        yield (
            f"the run ends after about {needed}, when it has seen the text {EPOCHS:g} times: it would memorize the "
            "text in more; a longer text would use the time"
        )
