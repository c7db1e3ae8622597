"""Texts by the thousand: many continuations of one prompt, batched through the engine.

Ids only; text number i is drawn with seed `params.seed + i`, so any of them can be had again alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from service.engine.engine import Engine
from service.model.gpt import GPT
from service.model.params import MAX_SEED, SamplingParams
from service.wire import Submit

MAX_RUNNING = 128
TRIES_PER_TEXT = 100  # of different texts, before there are taken to be no more


class ExhaustedError(Exception):
    """Fewer different texts turned up than were asked for."""


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
    """(seed, completion) of `count` texts, in the order of their seeds; with `unique`, of the first of each.

    Raises:
        ExhaustedError: `unique`, and the last TRIES_PER_TEXT · count texts were all known already.
    """
    running = min(count, MAX_RUNNING)
    engine = Engine(model, max_running=running, max_waiting=running)
    number = given = 0  # the next to submit, and to give
    barren = 0  # texts since the last new one
    completions: dict[int, list[int]] = {}
    finished: set[int] = set()
    seen: set[tuple[int, ...]] = set()
    wanted = count
    while wanted:
        while len(engine.scheduler) < 2 * running and (unique or number < count):
            seed = (params.seed + number) & MAX_SEED
            request = Submit(number, list(prompt), max_tokens, msgspec.structs.replace(params, seed=seed), stop=stop)
            engine.submit(request)
            completions[number] = []
            number += 1
        for delta in engine.step():
            completions[delta.id] += delta.ids
            if delta.finish_reason is not None:
                finished.add(delta.id)
        while given in finished and wanted:
            ids = completions.pop(given)
            finished.remove(given)
            given += 1
            if unique:
                key = tuple(ids)
                barren = barren + 1 if key in seen else 0
                if barren > TRIES_PER_TEXT * count:
                    raise ExhaustedError(
                        f"{len(seen)} different texts were found, {count} were asked for: raise the temperature, "
                        "or ask for fewer"
                    )
                if key in seen:
                    continue
                seen.add(key)
            wanted -= 1
            yield (params.seed + given - 1) & MAX_SEED, ids
