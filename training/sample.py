"""Bulk sampling: many continuations of one prompt, batched through the engine.

Text i has seed `params.seed + i`, so each can be reproduced alone. Knows nothing about characters, only ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import torch

from service.engine.engine import Engine
from service.engine.runner import open_runner
from service.model.gpt import GPT
from service.model.params import MAX_SEED, SamplingParams
from service.wire import Submit
from training.messages import plural

MAX_RUNNING = 128
# Consecutive texts that are skipped before giving up: per requested text, and at most.
SKIPPED_PER_TEXT, MAX_SKIPPED = 100, 10_000


class ExhaustedError(Exception):
    """Fewer distinct or novel texts were found than requested."""


def sample_texts(
    model: GPT,
    prompt: Sequence[int],
    count: int,
    max_tokens: int,
    params: SamplingParams,
    *,
    stop: tuple[tuple[int, ...], ...] = (),
    stop_pattern: bytes | None = None,
    constraint: bytes | None = None,
    unique: bool = False,
    is_novel: Callable[[list[int]], bool] | None = None,
    device: str = "cpu",
) -> Iterator[tuple[int, list[int]]]:
    """(seed, completion) of `count` texts, in seed order; skips repeated ones if `unique`, and those not `is_novel`.

    stop_pattern, constraint: packed automata, as in Submit. device: where a copy of the model runs; a training run
    leaves its own to the steps.

    Raises:
        ExhaustedError: more than SKIPPED_PER_TEXT · count or MAX_SKIPPED consecutive texts were skipped.
    """
    running = min(count, MAX_RUNNING)
    engine = Engine(
        open_runner(model, slots=running, threads=torch.get_num_threads(), device=device), max_waiting=running
    )
    shared = Submit(0, list(prompt), max_tokens, params, stop=stop, stop_pattern=stop_pattern, constraint=constraint)
    submitted = emitted = 0  # texts, skipped ones included
    skipped = 0  # since the last new text
    is_picky = unique or is_novel is not None
    completions: dict[int, list[int]] = {}
    finished: set[int] = set()
    seen: set[tuple[int, ...]] = set()
    remaining = count
    while remaining:
        while len(engine.scheduler) < 2 * running and (is_picky or submitted < count):
            seed = (params.seed + submitted) & MAX_SEED
            sampling = msgspec.structs.replace(params, seed=seed)
            engine.submit(msgspec.structs.replace(shared, id=submitted, prompt=list(prompt), sampling=sampling))
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
            if (unique and tuple(ids) in seen) or (is_novel is not None and not is_novel(ids)):
                skipped += 1
                if skipped > min(SKIPPED_PER_TEXT * count, MAX_SKIPPED):
                    kind = " ".join(["distinct"] * unique + ["novel"] * (is_novel is not None))
                    raise ExhaustedError(
                        f"found only {plural(count - remaining, f'{kind} text')} of {count:,} requested; raise the "
                        "temperature or request fewer"
                    )
                continue
            skipped = 0
            if unique:
                seen.add(tuple(ids))
            remaining -= 1
            yield seed, ids
