"""Bulk sampling: many continuations of one prompt, batched through the engine.

Text i has seed `params.seed + i`, so each can be reproduced alone. Knows nothing about characters, only ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import torch

from service.engine.engine import Engine
from service.engine.runner import open_runner
from service.model.gpt import GPT
from service.model.params import MAX_SEED, SamplingParams
from service.wire import Submit
from training.messages import plural

MAX_RUNNING = 128
REPEATS_PER_TEXT, MAX_REPEATS = 100, 10_000  # consecutive repeats before giving up: per requested text, and at most


class ExhaustedError(Exception):
    """`unique` found fewer distinct texts than requested."""


def sample_texts(
    model: GPT,
    prompt: Sequence[int],
    count: int,
    max_tokens: int,
    params: SamplingParams,
    *,
    stop: tuple[tuple[int, ...], ...] = (),
    unique: bool = False,
) -> Iterator[tuple[int, list[int]]]:
    """(seed, completion) of `count` texts, in seed order; with `unique`, repeated texts are skipped.

    Raises:
        ExhaustedError: with `unique`, after more than REPEATS_PER_TEXT · count or MAX_REPEATS consecutive repeats.
    """
    running = min(count, MAX_RUNNING)
    engine = Engine(open_runner(model, slots=running, threads=torch.get_num_threads()), max_waiting=running)
    submitted = emitted = 0  # texts, repeats included
    repeats = 0  # since the last new text
    completions: dict[int, list[int]] = {}
    finished: set[int] = set()
    seen: set[tuple[int, ...]] = set()
    remaining = count
    while remaining:
        while len(engine.scheduler) < 2 * running and (unique or submitted < count):
            seed = (params.seed + submitted) & MAX_SEED
            sampling = msgspec.structs.replace(params, seed=seed)
            engine.submit(Submit(submitted, list(prompt), max_tokens, sampling, stop=stop))
            completions[submitted] = []
            submitted += 1
        for delta in engine.step():
            completions[delta.id] += delta.ids
            if delta.finish_reason is not None:
                finished.add(delta.id)
        while emitted in finished and remaining:
            ids = completions.pop(emitted)
            finished.remove(emitted)
            seed = (params.seed + emitted) & MAX_SEED
            emitted += 1
            if unique:
                key = tuple(ids)
                repeats = repeats + 1 if key in seen else 0
                if repeats > min(REPEATS_PER_TEXT * count, MAX_REPEATS):
                    raise ExhaustedError(
                        f"found only {plural(len(seen), 'distinct text')} of {count:,} requested; raise the "
                        "temperature or request fewer"
                    )
                if key in seen:
                    continue
                seen.add(key)
            remaining -= 1
            yield seed, ids
