"""A check that a backend computes the model, made before a worker is ready.

Without it, a miscompiled library, a CPU that lacks expected instructions or a faulty driver could give wrong text
without an error. The check compares the backend's log-probabilities with those of `service.model.attention`, which runs
NumPy in float64 and shares no code with any backend. First it compares this reference with the checkpoint's probe: the
log-probabilities that the model gave when it was saved. The check finds gross errors; the tests check rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from service.engine.runner import NONE, Piece, Report, Runner
from service.model.attention import logits_of, weight_shapes
from service.model.checkpoint import Checkpoint, Forward
from service.model.config import GPTConfig
from service.model.counts import Counts, mixed_logits
from service.model.params import SamplingParams
from service.wire import floats

TOLERANCES = {"float64": 1e-6, "float32": 1e-2, "bfloat16": 0.3}  # relative to the largest logit, at least 1
SHORT, DECODED = 64, 8  # characters of the short text, and of the end of any text, which is decoded step by step
MAX_LENGTH, MAX_WORK = 1100, 1e9  # limits of the long text: characters, and characters times parameters


class SelfCheckError(RuntimeError):
    """A backend does not compute the model; the message names the backend and the difference."""


def other_weight(config: GPTConfig, weights: Mapping[str, Any]) -> str | None:
    """Return a weight of a changed gpt.py that the hand-written models do not have so, or None if they have all."""
    found, expected = {name: tuple(value.shape) for name, value in weights.items()}, weight_shapes(config)
    for name in sorted({*found, *expected}):
        if found.get(name) != expected.get(name):
            return f"{name} has shape {found.get(name, 'none')} instead of {expected.get(name, 'none')}"
    return None


def refuse_other_weights(backend: str, config: GPTConfig, weights: Mapping[str, Any]) -> None:
    """Raise SelfCheckError if a backend cannot compute a model with these weights."""
    if wrong := other_weight(config, weights):
        raise SelfCheckError(f"backend {backend} does not compute the model: {wrong}; use --backend torch")


def check(runner: Runner, checkpoint: Checkpoint, is_short: bool = False) -> None:
    """Run a fixed prompt through slot 0 and decode some characters; the text exceeds the window if that is cheap.

    If the checkpoint mixes counts, the prompt ends with a longest context of them.

    is_short: whether a text of SHORT characters is enough. It takes a fifth of the time.

    The check ignores the model if the reference's logits overflow, and positions at which the backend's logits do,
    because such a text ends with its own error.

    Raises:
        SelfCheckError: the log-probabilities differ from the model's.
    """
    config, weights, counts = runner.config, checkpoint.load_weights(), checkpoint.load_counts()
    reference: Forward = functools.partial(logits_of, weights, config)
    if not checkpoint.is_computed_by(reference):
        reference = _forward_of_gpt(runner, checkpoint)
    length = config.block_size + 32
    if is_short or length > MAX_LENGTH or length * sum(value.size for value in weights.values()) > MAX_WORK:
        length = SHORT
    prompt = np.arange(length - DECODED, dtype=np.int32) ** 2 % config.vocab_size
    if counts is not None and counts.is_mixed:
        context = _last_context(counts)
        prompt[len(prompt) - len(context) :] = context
        reference = functools.partial(_mixed, reference, counts)
    ids, found = _run(runner, prompt)
    with np.errstate(all="ignore"):
        expected = reference([max(0, id) for id in ids])
    if not np.isfinite(expected).all():
        return
    with np.errstate(all="ignore"):  # centred, because log-probabilities equal logits up to a constant
        errors = np.abs(_centred(found) - _centred(expected)).max(axis=1)  # (T,)
    judged = np.isfinite(found).all(axis=1) & (np.minimum.accumulate(ids) >= 0)
    tolerance = TOLERANCES[runner.dtype] * max(1.0, np.abs(expected).max())
    wrong = judged & (errors > tolerance) if judged.any() else ~judged
    if wrong.any() or len(found) != length:
        remedy = "use --backend torch" if runner.backend != "torch" else "torch itself is wrong here"
        raise SelfCheckError(
            f"backend {runner.backend} does not compute the model: of a text of {length} characters, the "
            f"log-probabilities at {int(wrong.sum())} positions, first at {int(wrong.argmax())}, differ from the "
            f"reference's by up to {float(errors.max()):.3g}; {remedy}"
        )


def _run(runner: Runner, prompt: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Run a prompt and DECODED steps. Return the ids (T,), and the log-probabilities after each (T, V)."""
    V = runner.config.vocab_size
    runner.start(0, SamplingParams(seed=0), prompt.tolist())
    report, targets = Report(ids=tuple(range(V))), np.append(prompt[1:], np.int32(NONE))
    first = runner.prefill([Piece(0, prompt, True, None, report, targets)])()
    rest = runner.decode(np.array([0]), np.array([DECODED]), {}, {0: report})()
    columns = (floats(outcome.reports[0].top_values) for outcome in (first, rest))
    found = np.concatenate([np.reshape(column, (-1, V)) for column in columns])
    ids = [*prompt.tolist(), *first.ids[0].tolist(), *rest.ids[0].tolist()]
    return ids[: len(found)], found


def _mixed(forward: Forward, counts: Counts, ids: list[int]) -> np.ndarray:
    """Return the logits of the mixture after each id, (T, V)."""
    experts = [counts.next(ids[: i + 1]) for i in range(len(ids))]
    return mixed_logits(forward(ids), *map(np.array, zip(*experts, strict=True)))


def _forward_of_gpt(runner: Runner, checkpoint: Checkpoint) -> Forward:
    """Return the reference for a model that was trained with a changed gpt.py: GPT.forward in float64."""
    if runner.backend != "torch":
        raise SelfCheckError(
            f"backend {runner.backend} does not compute the model: it was trained with a changed gpt.py; use "
            "--backend torch"
        )
    import torch

    model = checkpoint.load_model(dtype=torch.float64)

    def forward(ids: list[int]) -> np.ndarray:
        logits: np.ndarray = model(torch.tensor([ids]))[0].numpy()
        return logits

    return forward


def _last_context(counts: Counts) -> list[int]:
    """Return the last context of the tree, which is one of the longest."""
    context, number = [], len(counts.older) - 1
    while number:
        context.append(int(counts.older[number]))
        number = int(np.searchsorted(counts.first_child, number, "right")) - 1
    return context  # the walk up begins with the oldest character


def _centred(numbers: np.ndarray) -> np.ndarray:
    centred: np.ndarray = numbers - numbers.mean(axis=1, keepdims=True)
    return centred
