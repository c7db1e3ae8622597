"""POST /v1/score and POST /v1/next: the model's opinion of texts, without sampling."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from service.http.connection.turns import Pause
from service.http.models.model import Model
from service.http.routes.json_parts import MAX_NUMBERS, json_parts, list_parts, sliced
from service.http.routes.request import Request
from service.http.routes.service import Service
from service.http.routes.stream import receipt_headers, send_json
from service.http.schema.answers import Next, NextAnswer, NextCharacter, Score, ScoreAnswer, usage
from service.http.schema.requests import NextRequest, ScoreRequest
from service.http.workers.sequences import Generation
from service.text.encoding import Encoder
from service.text.scores import (
    ScorePlan,
    TextScore,
    distribution_of,
    entropy_of,
    num_score_ids,
    plan_next,
    plan_scores,
    ranks,
    scores_of,
)
from service.wire import Logprobs, floats

TEXT_BYTES = 400  # a text in an answer, and its list of ids


async def score(service: Service, request: Request) -> None:
    """Score texts, or rank continuations of a prefix."""
    body, model = await service.read(ScoreRequest, request)
    encoder, is_ranking = Encoder(service.text_limits, model, body), body.texts is None
    service.hold(request, body, num_score_ids(body))
    planned = await service.run(request, plan_scores(model, body, service.text_limits, encoder))
    shows_characters = body.characters
    del body  # its texts need not be kept
    request.num_prompt_tokens = planned.num_prompt_characters
    # A quarter of the slots, so that scoring does not starve generations.
    window, pause = max(1, service.slots // 4), Pause(request.client)
    service.admit(request, planned.submits, window=window, beside=TEXT_BYTES * len(planned.lengths))
    await pause.if_due()
    generation = service.start(request, planned.submits, window=window) if planned.submits else None
    model.count_unknown(encoder)

    logprobs = await _logprobs(generation, planned, pause)
    scores = list(map(_score, itertools.count(), await service.run(request, scores_of(logprobs))))
    if encoder.policy != "refuse" or model.tokenizer.unknown_id is not None:
        for item in scores:
            item["unknown_characters"] = planned.unknown[item["index"]]
    if is_ranking:
        for item, rank in zip(scores, ranks([item["nats"] for item in scores]), strict=True):
            item["rank"] = rank
    data: Any = list_parts([it] for it in (_with_nats(scores, planned, logprobs) if shows_characters else scores))
    answer: ScoreAnswer = {
        "id": request.id,
        "model": model.name,
        "object": "list",
        "data": data,
        "usage": usage(request.num_prompt_tokens),
    }
    headers = {}
    if generation is not None:
        answer["chargpt"] = service.receipt(model, encoder, generation.timing)
        headers = receipt_headers(answer["chargpt"])
    await send_json(request, json_parts(answer), headers)


async def _logprobs(generation: Generation | None, planned: ScorePlan, pause: Pause) -> list[Logprobs]:
    """Return those of each text, none for a text without scored characters."""
    logprobs = [Logprobs()] * len(planned.lengths)
    if generation is not None:
        await generation.whole()
        for number, i in enumerate(planned.order):
            logprobs[i] = generation.prompt_logprobs(number)
            await pause.if_due()
    return logprobs


def _with_nats(scores: list[Score], planned: ScorePlan, logprobs: list[Logprobs]) -> Iterator[Score]:
    """Add the nats of each character to one score after the other, when it is written."""
    for item in scores:
        has_first = bool(not planned.before and planned.lengths[item["index"]])  # nothing precedes it
        nats: Any = list_parts(_character_nats(logprobs[item["index"]], has_first))
        item["character_nats"] = nats
        yield item


def _score(index: int, found: TextScore) -> Score:
    return {
        "index": index,
        "characters": found.num_characters,
        "nats": found.nats,
        "nats_per_character": found.nats_per_character,
        "bits_per_character": found.bits_per_character,
        "perplexity": found.perplexity,
    }


def _character_nats(logprobs: Logprobs, has_first: bool) -> Iterator[list[float | None]]:
    """Yield the nats of each character in slices; None: the first character of a document."""
    if has_first:
        yield [None]
    for start in range(0, len(logprobs), MAX_NUMBERS):
        values = floats(logprobs.values[8 * start : 8 * (start + MAX_NUMBERS)])
        yield [round(-value, 7) for value in values]


async def next_character(service: Service, request: Request) -> None:
    """Give the distribution of the next character."""
    body, model = await service.read(NextRequest, request)
    encoder = Encoder(service.text_limits, model, body)
    service.hold(request, body, sum([len(prompt) + 1 for prompt in body.prompts]))
    planned = plan_next(model, body, service.text_limits, encoder)
    del body  # its texts need not be kept
    submits, num_characters = await service.run(request, planned)
    del planned
    request.num_prompt_tokens = num_characters
    service.admit(request, submits)
    generation = service.start(request, submits)
    model.count_unknown(encoder)

    pieces = await generation.whole()
    # No row for a sequence that ended because the client left.
    data: Any = list_parts([_next(model, it.number, it.logprobs)] for it in pieces if it.logprobs)
    answer: NextAnswer = {
        "id": request.id,
        "model": model.name,
        "object": "list",
        "data": data,
        "usage": usage(num_characters),
        "chargpt": service.receipt(model, encoder, generation.timing),
    }
    await send_json(request, json_parts(answer), receipt_headers(answer["chargpt"]))


def _next(model: Model, index: int, logprobs: Logprobs) -> Next:
    """Return the distribution in the first row."""
    top = distribution_of(logprobs)
    entropy = entropy_of(top)
    characters = model.tokenizer.characters

    def character(id: int, value: float) -> NextCharacter:
        return {"character": characters[id], "id": id, "probability": math.exp(value), "logprob": value}

    distribution: Any = list_parts([character(*it) for it in some] for some in sliced(top))
    return {
        "index": index,
        "entropy_nats": entropy,
        "entropy_bits": entropy / math.log(2),
        "distribution": distribution,
    }
