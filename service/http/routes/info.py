"""Routes that do not run the model: encoding, decoding, information, probes and metrics."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from service import release
from service.http.connection.turns import Pause
from service.http.models.model import MAX_REGEX_CHARACTERS, Model
from service.http.routes.attention import max_characters
from service.http.routes.json_parts import json_parts, list_parts, sliced, text_parts
from service.http.routes.request import JSON, NO_STORE, Request
from service.http.routes.service import Service
from service.http.routes.stream import send_json
from service.http.schema import answers as s
from service.http.schema.requests import DetokenizeRequest, TokenizeRequest
from service.model.checkpoint import CONFIG_NAMES
from service.model.tokenizer import UNKNOWN
from service.text.encoding import Encoder, check_ids


def published(training: dict[str, Any]) -> dict[str, Any]:
    """Return the public part of training.json: names and hashes of files, without their paths on the trainer's disk."""

    def without_paths(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: without_paths(part) for name, part in value.items() if name not in ("command", "path")}
        return [without_paths(part) for part in value] if isinstance(value, list) else value

    published: dict[str, Any] = without_paths(training)
    if isinstance(recipe := published.get("recipe"), dict):
        for name in ("data", "init_from", "teachers"):
            recipe.pop(name, None)
    return published


async def _respond(request: Request, content: Mapping[str, object], status: int = 200) -> None:
    await request.respond(msgspec.json.encode(content), JSON | NO_STORE, status)


async def tokenize(service: Service, request: Request) -> None:
    """Encode a text."""
    body, model = await service.read(TokenizeRequest, request)
    encoder, text = Encoder(service.text_limits, model, body), body.prompt
    count = await service.run(request, encoder.count(text, "prompt"))
    # Encode again while writing, because the ids of a text take up to eight times its memory.
    tokens: Any = list_parts(filter(None, map(encoder.encode_part, sliced(text))))
    answer: s.TokenizeAnswer = {
        "count": count,
        "max_model_len": service.settings.max_prompt_characters,
        "tokens": tokens,
        "replaced_characters": encoder.replaced,
        "dropped_characters": encoder.dropped,
    }
    await send_json(request, json_parts(answer))


async def detokenize(service: Service, request: Request) -> None:
    """Decode ids."""
    body, model = await service.read(DetokenizeRequest, request)
    pause = Pause(request.client)
    for some in sliced(body.tokens):
        check_ids(model, some, "tokens")
        await pause.if_due()
    if model.vocab_size <= 257:  # Python shares these ids
        request.lease.hold(sys.getsizeof(body.tokens))
    prompt: Any = text_parts(map(model.tokenizer.decode, sliced(body.tokens)))  # decoded while it is written
    answer: s.DetokenizeAnswer = {"prompt": prompt}
    await send_json(request, json_parts(answer))


async def tokenizer_info(service: Service, request: Request) -> None:
    """Describe the tokenizer, as vLLM does."""
    model = service.find(request.query_model)
    tokenizer = model.tokenizer
    end = model.record_end_character
    beginning = end or ("\n" if "\n" in tokenizer else None)
    unknown = None if tokenizer.unknown_id is None else UNKNOWN
    answer: s.TokenizerInfo = {
        "tokenizer_class": "CharTokenizer",
        "vocab_size": tokenizer.vocab_size,
        "bos_token": beginning,
        "eos_token": end,
        "unk_token": unknown,
        "pad_token": None,
    }
    await _respond(request, answer)


def _model_card(service: Service, model: Model) -> s.ModelCard:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_at,
        "owned_by": "chargpt",
        "max_model_len": service.settings.max_prompt_characters,
    }


async def models(service: Service, request: Request) -> None:
    """List the served models, as OpenAI does; the default one comes first."""
    models = sorted(service.models.values(), key=lambda model: model is not service.default_model)
    answer: s.ModelList = {"object": "list", "data": [_model_card(service, model) for model in models]}
    await _respond(request, answer)


async def model(service: Service, request: Request) -> None:
    """Describe the served model, as OpenAI does."""
    await _respond(request, _model_card(service, service.find(request.parameter)))


async def info(service: Service, request: Request) -> None:
    """Describe what is served: the checkpoint, its losses, limits, backend, devices and versions."""
    settings, model = service.settings, service.find(request.query_model)
    own = {
        "max_regex_characters": MAX_REGEX_CHARACTERS,
        "max_running_requests": service.slots,
        "max_attention_characters": max_characters(model),
    }
    own |= dataclasses.asdict(service.text_limits)
    limits: Any = {name: own[name] if name in own else getattr(settings, name) for name in s.Limits.__annotations__}
    answer: s.Info = {
        "model": {
            "name": model.name,
            "checkpoint_sha256": model.digest,
            "config": {name: getattr(model.checkpoint.config, name) for name in CONFIG_NAMES},
            "vocabulary": "".join(model.tokenizer.characters),
            "records": model.record_end is not None,
            "example_prompt": model.checkpoint.example_prompt,
            "training": published(model.checkpoint.training),
        },
        "models": list(service.models),
        "limits": limits,
        "unknown_characters": settings.unknown_characters,
        "backend": service.backend,
        "dtype": service.dtype,
        "devices": service.devices,
        "versions": {name: release(name) for name in ("chargpt", "torch", "litserve")},
    }
    await _respond(request, answer)


async def livez(service: Service, request: Request) -> None:
    """Check that this HTTP process answers and the main process is responsive."""
    if not service.state.is_responsive("main", 2 * service.settings.hang_seconds):
        return await _respond(request, {"status": "main process hangs"}, 503)
    await _respond(request, {"status": "alive"})


async def readyz(service: Service, request: Request) -> None:
    """Check that requests are accepted: not at the start, if a model has no worker, or during a shutdown."""
    if service.state.is_in("leaving"):
        is_draining = service.state.is_in("draining")
        return await _respond(request, {"status": "draining" if is_draining else "shutting down"}, 503)
    if not service.is_ready:
        return await _respond(request, {"status": "no worker"}, 503)
    await _respond(request, {"status": "ready"})


async def prometheus(service: Service, request: Request) -> None:
    """Metrics of all processes, in Prometheus' text format, or in OpenMetrics if Accept asks for it."""
    if service.metrics is not None:
        service.metrics.flush()
    accept = (request.fields.get(b"accept") or b"").decode("latin-1")
    text, content_type = await service.exposition.page(accept)
    await request.respond(text, {"content-type": content_type, **NO_STORE})
