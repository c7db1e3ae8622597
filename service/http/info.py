"""Routes that do not run the model: characters to ids and back, what is served, probes and metrics."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from service.http.admission import PROMPT_BYTES
from service.http.attention import max_characters
from service.http.context import RequestContext, Service
from service.http.encoding import Encoder, check_ids
from service.http.models import Model
from service.http.schemas import (
    DetokenizeAnswer,
    DetokenizeRequest,
    Info,
    Limits,
    ModelCard,
    ModelList,
    ServedModel,
    Status,
    TokenizeAnswer,
    TokenizeRequest,
    TokenizerInfo,
)
from service.http.stream import HOLE, PartedAnswer, filled, list_parts, sliced, text_parts


def published(training: dict[str, Any]) -> dict[str, Any]:
    """What training.json tells strangers: not where files were on the trainer's disk; names and hashes stay."""

    def without_paths(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: without_paths(part) for name, part in value.items() if name not in ("command", "path")}
        return [without_paths(part) for part in value] if isinstance(value, list) else value

    published: dict[str, Any] = without_paths(training)
    if isinstance(recipe := published.get("recipe"), dict):
        for name in ("data", "init_from", "teachers"):
            recipe.pop(name, None)
    return published


def _json(content: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def tokenize(service: Service, request: Request) -> Response:
    """Encode a text."""
    body = await service.read(TokenizeRequest, request)
    context = RequestContext.of(request.scope)
    encoder = Encoder(service, service.choose(context, body.model), body)
    tokens = await encoder.encode(body.prompt, "prompt")
    context.hold.grow(PROMPT_BYTES * len(tokens))
    longest = service.settings.max_prompt_characters
    answer = TokenizeAnswer(len(tokens), longest, HOLE, encoder.replaced, encoder.dropped)
    return PartedAnswer(filled(answer, list_parts(sliced(tokens))))


async def detokenize(service: Service, request: Request) -> Response:
    """Decode ids."""
    body = await service.read(DetokenizeRequest, request)
    context = RequestContext.of(request.scope)
    model = service.choose(context, body.model)
    check_ids(model, body.tokens, "tokens")
    context.hold.grow(PROMPT_BYTES * len(body.tokens))
    text = await Encoder(service, model, body).decode(body.tokens)
    return PartedAnswer(filled(DetokenizeAnswer(HOLE), text_parts(text)))


async def tokenizer_info(service: Service, request: Request) -> Response:
    """Describe the tokenizer, as vLLM does."""
    tokenizer = service.find(request.query_params.get("model")).tokenizer
    beginning = "\n" if "\n" in tokenizer else None
    return _json(TokenizerInfo("CharTokenizer", tokenizer.vocab_size, beginning, None, None))


def _model_card(service: Service, model: Model) -> ModelCard:
    return ModelCard(model.name, "model", model.created_at, "chargpt", service.settings.max_prompt_characters)


async def models(service: Service, request: Request) -> Response:
    """List the served models, as OpenAI does."""
    return _json(ModelList("list", [_model_card(service, model) for model in service.models.values()]))


async def model(service: Service, request: Request) -> Response:
    """Describe the served model, as OpenAI does."""
    return _json(_model_card(service, service.find(request.path_params["model"])))


async def info(service: Service, request: Request) -> Response:
    """Describe what is served: the checkpoint, its losses, limits, backend, devices and versions."""
    settings, model = service.settings, service.find(request.query_params.get("model"))
    return _json(
        Info(
            ServedModel(
                model.name,
                model.digest,
                model.checkpoint.hyperparameters,
                "".join(model.tokenizer.characters),
                published(model.checkpoint.training),
            ),
            list(service.models),
            Limits(
                **{name: getattr(settings, name) for name in Limits.__struct_fields__ if hasattr(settings, name)}
                | {"max_running_requests": service.slots}
                | {"max_attention_characters": max_characters(model) if settings.attention else 0}
            ),
            settings.unknown_characters,
            service.backend,
            service.dtype,
            service.devices,
            {name: version(name) for name in ("chargpt", "torch", "litserve")},
        )
    )


async def livez(service: Service, request: Request) -> Response:
    """Whether this HTTP process answers, and the main process still looks after all of them."""
    if not service.state.is_responsive("main", 2 * service.settings.hang_seconds):
        return _json(Status("main process hangs"), 503)
    return _json(Status("alive"))


async def readyz(service: Service, request: Request) -> Response:
    """Whether requests are accepted: not while starting, without a worker, or shutting down."""
    if service.state.is_leaving:
        return _json(Status("draining" if service.state.is_draining else "shutting down"), 503)
    if not service.is_ready:
        return _json(Status("no worker"), 503)
    return _json(Status("ready"))


async def prometheus(service: Service, request: Request) -> Response:
    """Metrics of all processes, in Prometheus' text format, or in OpenMetrics if Accept asks for it."""
    if service.metrics is not None:
        service.metrics.flush()
    text, content_type = await asyncio.to_thread(service.exposition.page, request.headers.get("accept", ""))
    return Response(text, headers={"Content-Type": content_type})
