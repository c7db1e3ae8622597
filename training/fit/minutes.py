"""Plan a run of `--minutes`: choose the model's size, the number of steps and the regularization.

The plan measures how many characters/s the sizes of LADDER train on this machine. It takes the largest size that trains
on ENOUGH characters in the time and that the text is long enough for. RECIPE.md has the runs behind the numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Set
from typing import Any, NamedTuple

from training.config import MIN_SCORED, SCORED_SHARE, TrainConfig
from training.fit.presets import (
    EPOCHS,
    MIN_STEPS,
    PATIENCE,
    SHAPE,
    TUNED_RATES,
    regularization,
    rows_of,
    window_for,
    with_open,
)
from training.messages import duration, flags, plural
from training.text.corpus import Corpus

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
    """Characters/s."""

    trained: float
    evaluated: float


class Plan:
    """The settings for a time, a text and a machine. Settings that are not in `adaptable` keep their values.

    parts: batch_size must be a multiple of it. speed: measures the speed of a config.
    """

    def __init__(
        self,
        config: TrainConfig,
        corpus: Corpus,
        adaptable: Set[str],
        parts: int,
        speed: Callable[[TrainConfig], Speed],
    ):
        self.corpus, self.adaptable, self.parts, self.speed = corpus, adaptable, parts, speed
        self.deadline = time.monotonic() + 60 * config.minutes * TRAINED_SHARE
        self.length = len(corpus.train)
        start = with_open(config, TUNED_RATES, self.adaptable) if config.init_from else config
        chooses_size = adaptable >= set(SHAPE) and not config.init_from
        self.rate = Speed(math.inf, math.inf)  # of the largest size chosen so far; a larger size is no faster
        for number, size in enumerate(LADDER if chooses_size else ({},)):
            wanted = self.sized(start, size)
            if number and self.parameters(wanted) > MOST_PARAMETERS * self.length:
                break
            needed = self.parameters(wanted) * (0.0, ENOUGH_FOR_DEPTH, ENOUGH)[min(number, 2)]
            if needed > self.rate.trained * self.seconds_left:
                break
            if needed > (rate := speed(wanted)).trained * self.seconds_left:
                break
            self.config, self.rate = wanted, rate
        if self.characters < SHORT * self.config.tokens_per_step:
            half = rows_of(self.config.tokens_per_step // 2, self.config.block_size, parts)
            self.remeasured({"batch_size": half})
        dropout = self.config.dropout
        self.config = with_open(self.config, self.regularized(), self.adaptable)
        if self.config.dropout > dropout:
            self.remeasured({})
        self.time_is_left = self.characters == EPOCHS * self.length
        self.config = with_open(self.config, self.schedule(), self.adaptable)

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    @property
    def characters(self) -> float:
        """The characters that the run chosen so far trains on in the time left, at most EPOCHS times the text."""
        return min(EPOCHS * self.length, self.rate.trained * self.seconds_left)

    @property
    def planned_characters(self) -> int:
        return self.config.steps * self.config.tokens_per_step

    def parameters(self, config: TrainConfig) -> int:
        """Return the number of parameters without embedding and head."""
        vocab_size = self.corpus.tokenizer.vocab_size
        return config.model_config(vocab_size).num_parameters - 2 * vocab_size * config.n_embd

    def sized(self, config: TrainConfig, size: dict[str, Any]) -> TrainConfig:
        config = with_open(config, size, self.adaptable)
        config = with_open(config, {"block_size": window_for(config, self.corpus, self.adaptable)}, self.adaptable)
        batch_size = rows_of(STEP * config.n_embd, config.block_size, self.parts)
        return with_open(config, {"batch_size": batch_size}, self.adaptable)

    def remeasured(self, values: dict[str, Any]) -> None:
        self.config = with_open(self.config, values, self.adaptable)
        self.rate = self.speed(self.config)

    def regularized(self) -> dict[str, Any]:
        epochs = self.characters / self.length
        strain = min(1.0, epochs * self.parameters(self.config) / self.length / STRAIN)
        dropout = round(STRAINED_DROPOUT * strain, 2)
        small = regularization(self.config, self.length)
        if epochs >= EPOCHS and small["dropout"] > dropout:
            return small
        return {
            "dropout": dropout if dropout >= MIN_DROPOUT else 0.0,
            "weight_decay": round(DECAY + (STRAINED_DECAY - DECAY) * strain, 2),
        }

    def schedule(self) -> dict[str, Any]:
        steps = max(MIN_STEPS, int(self.characters) // self.config.tokens_per_step)
        trained = steps * self.config.tokens_per_step
        training = trained / self.rate.trained  # seconds
        others = max(60 * self.config.minutes - training, training * (1 / TRAINED_SHARE - 1))
        most = others * self.rate.evaluated  # characters in this time
        evaluations, evaluated = EVALUATIONS, max(MIN_EVALUATED, int(EVALUATED_SHARE * trained))
        if (evaluations + 1) * evaluated > TIME_TO_EVALUATE * most:  # one more, for a remainder of steps
            evaluations = FEW_EVALUATIONS
            evaluated = min(evaluated, max(1, int(TIME_TO_EVALUATE * most / (evaluations + 1))))
        scored = max(1, int(TIME_TO_SCORE * most / 2))  # in windows and streamed
        return {
            "steps": steps,
            "warmup_steps": min(self.config.warmup_steps, steps // 4),
            "eval_every": max(1, steps // evaluations),
            "eval_chars": evaluated,
            "score_chars": str(scored) if scored < max(MIN_SCORED, SCORED_SHARE * trained / 2) else "auto",
            "patience": PATIENCE if self.time_is_left else 0,
        }

    def explanation(self) -> Iterator[str]:
        chosen = {name: value for name, value in self.config.as_dict().items() if name in self.adaptable}
        minutes = f"{self.config.minutes:g} minute{'' if self.config.minutes == 1 else 's'}"
        yield f"for {minutes} at {self.rate.trained:,.0f} characters/s, measured here:{flags(chosen)}; each can be set"
        needed = duration(self.planned_characters / self.rate.trained / TRAINED_SHARE)
        if self.planned_characters > self.rate.trained * 60 * self.config.minutes:
            yield f"the run takes about {needed}, as fewer than {plural(MIN_STEPS, 'step')} would teach nothing"
        elif self.time_is_left:
            yield (
                f"the run ends after about {needed}, when it has seen the text {EPOCHS:g} times: it would memorize the "
                "text in more; a longer text would use the time"
            )
