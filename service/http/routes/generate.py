"""POST /generate and POST /v1/completions: plan, admit, run, write."""

from __future__ import annotations

import functools

from service.http.routes.forms import CompletionForm, Form
from service.http.routes.request import Request
from service.http.routes.service import Service
from service.http.routes.stream import Pieces, write_stream, write_whole
from service.http.schema.requests import CompletionRequest, GenerateRequest, StreamedRequest
from service.text.encoding import Encoder
from service.text.exact import Exact
from service.text.generation import answers, plan


async def generate(service: Service, request: Request) -> None:
    """Continue a text."""
    await _answer(service, request, GenerateRequest, Form)


async def completions(service: Service, request: Request) -> None:
    """Continue a text, as OpenAI's completions."""
    await _answer(service, request, CompletionRequest, CompletionForm)


async def _answer(service: Service, request: Request, kind: type[StreamedRequest], form_class: type[Form]) -> None:
    body, model = await service.read(kind, request)
    limits, allowance = service.text_limits, service.limits.characters_per_minute(request.client)
    encoder, hold = Encoder(limits, model, body), functools.partial(service.hold, request, body)
    planned = await service.run(request, plan(model, body, limits, encoder, service.make_seed, hold, allowance))
    echo, is_stream, interval, options = body.echo, body.stream, body.stream_interval, body.stream_options
    del body, hold  # its texts need not be kept
    num_rankings = len(planned.submits) if planned.suffix else 0
    service.admit(request, planned.submits, planned.bounds, echo=echo, num_rankings=num_rankings)
    request.num_prompt_tokens = planned.num_prompt_characters
    model.count_unknown(encoder)

    exact = None if planned.bounds is None else Exact(model, planned.submits, planned.bounds)
    form = form_class(service, request, model, encoder, planned.seeds, options, exact)
    pieces: Pieces
    if planned.chooses:
        pieces = service.answer(request, answers(model, planned), None if planned.suffix else planned.echo)
    else:
        interval = service.settings.stream_interval_seconds if interval is None else interval
        pieces = service.start(
            request, planned.submits, echo=planned.echo, exact=exact, interval=interval if is_stream else None
        )
    if is_stream:
        await write_stream(request, pieces, form)
    else:
        await write_whole(request, pieces, form)
