"""POST /v1/score and POST /v1/next: the model's opinion of texts, without sampling."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from service.http.connection.errors import invalid
from service.http.connection.turns import Pause
from service.http.routes.json_parts import MAX_NUMBERS, json_parts, list_parts, sliced
from service.http.routes.request import Request
from service.http.routes.service import Service
from service.http.routes.stream import receipt_headers, send_json
from service.http.schema.answers import Next, NextAnswer, NextCharacter, Score, ScoreAnswer, usage
from service.http.schema.requests import NextRequest, ScoreRequest
from service.http.text.encoding import Encoder, begun
from service.http.text.model import Model
from service.model.params import SamplingParams
from service.wire import Logprobs, Submit, floats

TEXT_BYTES = 400  # a text in an answer, and its list of ids
MAX_SUMMED = 1 << 14  # nats added up at a time: about 1 ms


async def score(service: Service, request: Request) -> None:
    """Score texts, or rank continuations of a prefix."""
    body, model = await service.read(ScoreRequest, request)
    encoder, is_ranking = Encoder(service.settings, model, body, request.client), body.texts is None
    before, prompts, unknown = await _encoded(service, request, encoder, body)
    first = max(1, len(before))  # index of the first character that is scored
    # Texts of similar length run together.
    order = sorted((i for i, prompt in enumerate(prompts) if len(prompt) > first), key=lambda i: len(prompts[i]))
    sampling = SamplingParams()
    submits, pause, seconds = [], Pause(request.client), service.timeout(body.timeout_seconds)
    for i in order:
        submits.append(
            Submit(0, prompts[i], 0, sampling, seconds, logprobs=0, score_from=first, priority=2 * body.priority + 1)
        )
        await pause.if_due()
    num_before = 0 if before == [model.record_end] else len(before)  # counted once
    request.num_prompt_tokens = num_before + sum([len(prompt) - len(before) for prompt in prompts])
    # A quarter of the slots, so that scoring does not starve generations.
    window = max(1, service.slots // 4)
    service.admit(request, submits, window=window, beside=TEXT_BYTES * len(prompts))
    await pause.if_due()
    generation = service.start(request, submits, window=window) if submits else None
    encoder.count_unknown()

    logprobs = [Logprobs()] * len(prompts)
    if generation is not None:
        await generation.whole()
        for number, i in enumerate(order):
            logprobs[i] = generation.prompt_logprobs(number)
            await pause.if_due()
    scores = [await _score(i, its_logprobs, pause) for i, its_logprobs in enumerate(logprobs)]
    if encoder.policy != "refuse" or model.tokenizer.unknown_id is not None:
        for item in scores:
            item["unknown_characters"] = unknown[item["index"]]
    if is_ranking:
        for rank, item in enumerate(sorted(scores, key=lambda item: (item["nats"], item["index"])), 1):
            item["rank"] = rank

    def complete(item: Score) -> list[Score]:
        if body.characters:
            has_first = bool(not before and prompts[item["index"]])  # nothing precedes it
            nats: Any = list_parts(_character_nats(logprobs[item["index"]], has_first))
            item["character_nats"] = nats
        return [item]

    data: Any = list_parts(map(complete, scores))
    answer: ScoreAnswer = {
        "id": request.id,
        "model": model.name,
        "object": "list",
        "data": data,
        "usage": usage(request.num_prompt_tokens),
    }
    headers = {}
    if generation is not None:
        answer["chargpt"] = service.receipt(encoder, generation.timing)
        headers = receipt_headers(answer["chargpt"])
    await send_json(request, json_parts(answer), headers)


async def _encoded(
    service: Service, request: Request, encoder: Encoder, body: ScoreRequest
) -> tuple[list[int], list[list[int]], list[int]]:
    """Return the ids before each text, the ids of each text after them, and how many of its characters are unknown.

    The body's texts are not kept.

    Raises ApiError: 400, there are too few or too many texts; otherwise as `encode`, `begun` and Service.hold.
    """
    model, end = encoder.model, encoder.model.record_end
    if body.texts is not None:
        param, texts, prefix = "texts", [body.texts] if isinstance(body.texts, str) else body.texts, ""
    else:
        param, texts, prefix = "continuations", body.continuations or [], body.prefix
    limit = service.settings.max_score_texts
    if not 1 <= len(texts) <= limit:
        raise invalid(param, f"the number of texts must be in [1, {limit}], got {len(texts)}")
    service.hold(request, body, len(prefix) + sum([len(prefix) + len(text) + 2 for text in texts]))
    if body.texts is None:
        before = begun(model, await encoder.encode(prefix, "prefix"), "prefix")
    else:
        before = [] if end is None else [end]
    prompts, unknown, is_list, pause = [], [], not isinstance(body.texts, str), Pause(request.client)
    for i, text in enumerate(texts):
        ids, num_unknown = await encoder.encode_counting(text, param, i if is_list else None)
        unknown.append(num_unknown)
        await pause.if_due()
        if body.texts is None:
            ids = before + ids
        elif end is not None:  # score each from its first character to its end
            first, last = ids[:1], ids[-1:]
            ids = ids if first == before else before + ids
            ids = ids if last == before else ids + before
        prompts.append(ids)
    body.texts, body.prefix, body.continuations = None, "", None
    return before, prompts, unknown


async def _score(index: int, logprobs: Logprobs, pause: Pause) -> Score:
    """Return the sums of a text, equal to math.fsum of all its nats."""
    partials: list[float] = []  # their exact sum is that of all values so far
    for start in range(0, len(logprobs), MAX_SUMMED):
        values = floats(logprobs.values[8 * start : 8 * (start + MAX_SUMMED)])
        while partial := math.fsum(values):
            partials.append(partial)
            values.append(-partial)
        await pause.if_due()
    total, count = 0.0 - math.fsum(partials), len(logprobs)
    mean = total / count if count else None
    return {
        "index": index,
        "characters": count,
        "nats": total,
        "nats_per_character": mean,
        "bits_per_character": None if mean is None else mean / math.log(2),
        "perplexity": None if mean is None else math.exp(mean),
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
    encoder = Encoder(service.settings, model, body, request.client)
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    count, limit = len(prompts), service.settings.max_prompts
    if not 1 <= count <= limit:
        raise invalid("prompt", f"the number of prompts must be in [1, {limit}], got {count}")
    service.hold(request, body, sum([len(prompt) + 1 for prompt in prompts]))
    ids = await encoder.encode_prompts([*prompts], isinstance(body.prompt, list))
    prompts = body.prompt = []  # do not keep both prompts and ids
    request.num_prompt_tokens = sum(map(len, ids))
    for i, prompt in enumerate(ids):
        ids[i] = begun(model, prompt, "prompt")
    submits = [
        Submit(
            0, prompt, 1, SamplingParams(temperature=0.0), service.timeout(body.timeout_seconds),
            logprobs=model.vocab_size, priority=2 * body.priority,
        )
        for prompt in ids
    ]  # fmt: skip
    service.admit(request, submits)
    generation = service.start(request, submits)
    encoder.count_unknown()

    pieces = await generation.whole()
    # No row for a sequence that ended because the client left.
    data: Any = list_parts([_next(model, it.number, it.logprobs)] for it in pieces if it.logprobs)
    answer: NextAnswer = {
        "id": request.id,
        "model": model.name,
        "object": "list",
        "data": data,
        "usage": usage(request.num_prompt_tokens),
        "chargpt": service.receipt(encoder, generation.timing),
    }
    await send_json(request, json_parts(answer), receipt_headers(answer["chargpt"]))


def _next(model: Model, index: int, logprobs: Logprobs) -> Next:
    """Return the distribution in the first row."""
    ((_, top),) = logprobs.part(0, 1).rows()
    entropy = -math.fsum(math.exp(value) * value for _, value in top)
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
