"""POST /v1/score and POST /v1/next: the model's opinion of texts, without sampling."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from service.http.client import LogprobRow, gathered
from service.http.context import RequestContext, Service
from service.http.encoding import Encoder, document_start
from service.http.schemas import (
    ApiError,
    Next,
    NextAnswer,
    NextCharacter,
    NextRequest,
    Score,
    ScoreAnswer,
    ScoreRequest,
    Usage,
    parse,
)
from service.http.stream import RunningAnswer, receipt_headers, send_json
from service.model.params import SamplingParams
from service.wire import Submit


async def score(service: Service, request: Request) -> Response:
    """Score texts, or rank continuations of a prefix."""
    context = RequestContext.of(request.scope)
    body = parse(ScoreRequest, await request.body())
    service.check_model(body.model)
    encoder = Encoder(service, body)
    if body.texts is not None:
        param, texts, before = "texts", [body.texts] if isinstance(body.texts, str) else body.texts, []
    else:
        param, texts = "continuations", body.continuations or []
        before = encoder.encode(body.prefix, "prefix") or document_start(service, "prefix")
    limit = service.settings.max_score_texts
    if not 1 <= len(texts) <= limit:
        raise ApiError(400, f"{param}: the number of texts must be in [1, {limit}], got {len(texts)}", param=param)
    is_list = not isinstance(body.texts, str)
    ids = [encoder.encode(text, param, i if is_list else None) for i, text in enumerate(texts)]
    first = max(1, len(before))  # index of the first character that is scored
    # Texts of similar length run together.
    order = sorted((i for i in range(len(ids)) if len(before) + len(ids[i]) > first), key=lambda i: len(ids[i]))
    submits = [
        Submit(
            0, before + ids[i], 0, SamplingParams(), service.timeout(body.timeout_seconds),
            logprobs=0, score_from=first, priority=2 * body.priority + 1,
        )
        for i in order
    ]  # fmt: skip
    context.num_prompt_tokens = len(before) + sum(map(len, ids))
    # A quarter of the slots, so that scoring does not starve generations.
    window = max(1, service.slots // 4)
    generation = service.start(context, submits, window=window) if submits else None
    encoder.count_unknown()

    async def answer() -> ScoreAnswer:
        nats: list[list[float]] = [[] for _ in ids]
        if generation is not None:
            await gathered(generation)
            for number, i in enumerate(order):
                nats[i] = [-value for value in generation.prompt_logprobs(number)]
        unscored: list[list[float | None]] = [[None] if not before and text else [] for text in ids]
        scores = [_score(i, values) for i, values in enumerate(nats)]
        if body.characters:
            for item, values, none in zip(scores, nats, unscored, strict=True):
                item.character_nats = none + [round(value, 7) for value in values]
        if body.continuations is not None:
            for rank, item in enumerate(sorted(scores, key=lambda item: (item.nats, item.index)), 1):
                item.rank = rank
        usage = Usage.of(context.num_prompt_tokens or 0)
        receipt = encoder.receipt(generation.timing) if generation is not None else UNSET
        return ScoreAnswer(context.request_id, service.settings.model_name, "list", scores, usage, receipt)

    return _running(service, context, answer)


def _score(index: int, nats: list[float]) -> Score:
    total = math.fsum(nats)
    if not nats:
        return Score(index, 0, total, None, None, None)
    mean = total / len(nats)
    return Score(index, len(nats), total, mean, mean / math.log(2), math.exp(mean))


async def next_character(service: Service, request: Request) -> Response:
    """Give the distribution of the next character."""
    context = RequestContext.of(request.scope)
    body = parse(NextRequest, await request.body())
    service.check_model(body.model)
    encoder = Encoder(service, body)
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    limit = service.settings.max_prompts
    if not 1 <= len(prompts) <= limit:
        raise ApiError(
            400, f"prompt: the number of prompts must be in [1, {limit}], got {len(prompts)}", param="prompt"
        )
    ids = encoder.encode_prompts([*prompts], isinstance(body.prompt, list))
    submits = [
        Submit(
            0, prompt or document_start(service, "prompt"), 1, SamplingParams(temperature=0.0),
            service.timeout(body.timeout_seconds),
            logprobs=service.tokenizer.vocab_size, priority=2 * body.priority,
        )
        for prompt in ids
    ]  # fmt: skip
    context.num_prompt_tokens = sum(map(len, ids))
    generation = service.start(context, submits)
    encoder.count_unknown()

    async def answer() -> NextAnswer:
        # No row for a sequence that ended because the client left.
        data = [_next(service, it.number, it.logprobs[0]) for it in await gathered(generation) if it.logprobs]
        usage, receipt = Usage.of(context.num_prompt_tokens or 0), encoder.receipt(generation.timing)
        return NextAnswer(context.request_id, service.settings.model_name, "list", data, usage, receipt)

    return _running(service, context, answer)


def _next(service: Service, index: int, row: LogprobRow) -> Next:
    _, top = row
    entropy = -math.fsum(math.exp(value) * value for _, value in top)
    characters = service.tokenizer.characters
    distribution = [NextCharacter(characters[id], id, math.exp(value), value) for id, value in top]
    return Next(index, entropy, entropy / math.log(2), distribution)


def _running(
    service: Service, context: RequestContext, answer: Callable[[], Awaitable[ScoreAnswer | NextAnswer]]
) -> RunningAnswer:
    async def write(send: Send) -> None:
        content = await answer()
        headers: list[tuple[bytes, bytes]] = []
        if content.chargpt is not UNSET:
            headers = receipt_headers(content.chargpt, time.monotonic() - context.arrived_at)
        await send_json(send, msgspec.json.encode(content), headers)

    return RunningAnswer(context, service.busy(), write)
