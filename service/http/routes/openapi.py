"""/openapi.json, the OpenAPI document of a server.

The document is built from the table of routes (app.py) and the types of requests (requests.py) and answers
(answers.py), with examples in the model's vocabulary. /info has the limits of a server. A test compares the document
with the application, schemathesis compares a running server with the document, and generators make clients from it.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, JsonSchemaValue
from pydantic_core import core_schema

from service import release
from service.http.connection.errors import Error
from service.http.routes.examples import adapt_examples, request_examples
from service.http.routes.request import Request
from service.http.routes.service import Service
from service.http.schema.answers import AttentionAnswer
from service.model.tokenizer import CharTokenizer
from service.settings import Settings
from service.text.foreign import MAX_UNKNOWN_FIELDS

MAX_SHOWN_CHARACTERS = 200

DESCRIPTION = """
A token is a character everywhere. The same request with the same seed gives the same text, whole or streamed, alone \
or among others.

Up to {unknown} unknown fields are ignored and named in the header `X-Ignored-Fields`, or refused with `strict`; one \
that is likely to be a typo of a known field is always refused. null means a field's default. Strings of \
`format: vocabulary` contain the model's characters only, unless `unknown_characters` says what to do with others. \
{vocabulary}

A body is `application/json`. curl's default type and none at all mean the same, except in a request with `Origin`.

Every answer has an `X-Request-Id`. Every error has the body `{{"error": {{"message", "type", "param", "code"}}}}`; \
an unknown path gives 404, a wrong method 405.

An event of a stream is one line, `data: ` and JSON, followed by a blank line. A line that starts with a colon keeps \
the connection alive and has no meaning. What is sent first, a comment too, decides the status; a later failure is an \
event with an error body. The last event is `data: [DONE]`.
"""
TAGS = {
    "text": "Continue texts",
    "likelihood": "The model's opinion of texts",
    "characters": "Characters to ids and back",
    "information": "What is served",
    "operation": "Probes and metrics",
}
# status -> meaning; codes of the errors, if any
FAILURES = {
    400: "A field is missing, invalid or out of bounds, or a text has unknown characters. Codes: `invalid_json`, "
    "`unknown_character`, `invalid_pattern`, `unknown_field`, `unsupported_field`, "
    "`too_few_matches`, or null; `param` names the field.",
    401: "The API key is missing or invalid. Code: `invalid_api_key`.",
    404: "The model is not served here. Code: `model_not_found`.",
    408: "The body took too long to arrive. Code: `body_timeout`.",
    413: "The body is too large. Code: `body_too_large`.",
    415: "The body is declared as something other than JSON, or as compressed. Codes: `unsupported_content_type`, "
    "`unsupported_content_encoding`.",
    429: "The queue is full or the wait would be too long, code `queue_full`; requests in progress need too much "
    "memory, `overloaded`; or beyond a limit of this client, `rate_limit`. `Retry-After` estimates when to retry.",
    500: "The service failed; a retry may succeed. Codes: `engine_error`, `worker_lost`, or null.",
    503: "No inference process is ready, two were lost with this request, or the server is shutting down; "
    "`Retry-After` says when to retry. Codes: `not_ready`, `worker_lost`, `shutting_down`.",
    504: "The request took longer than its `timeout_seconds` or the server's limit. Code: `timeout`.",
}
_ERROR_HEADERS = {
    429: ["Retry-After"],
    500: ["X-Should-Retry"],
    503: ["Retry-After", "X-Should-Retry"],
    504: ["X-Should-Retry"],
}
BODY = (400, 404, 408, 413, 415, 429)  # statuses of routes with a body
RUN = (429, 503, 504)  # statuses of routes that run the model

HEADERS: dict[str, tuple[str, dict[str, Any]]] = {
    "X-Request-Id": ("The request's id: the client's own, or a new one", {"type": "string"}),
    "Retry-After": ("Seconds; an error during shutdown may lack it", {"type": "integer"}),
    "X-Should-Retry": (
        "false if the request took long and would probably fail again: openai's SDKs then do not repeat it",
        {"const": "false"},
    ),
    "X-Ignored-Fields": (
        "Unknown fields of the request, comma-separated; absent if there are none",
        {"type": "string"},
    ),
    "X-Checkpoint": ("SHA-256 of the checkpoint", {"type": "string"}),
    "X-Backend": ("Backend that ran the model", {"type": "string"}),
    "X-Dtype": ("Number format of the model", {"type": "string"}),
    "X-Seed": ("Seeds, one per prompt, of at most 128", {"type": "string", "pattern": "^[0-9]+(,[0-9]+)*$"}),
}

Handler = Callable[[Service, Request], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Operation:
    """A route with its handler and its description. The docstring of the handler is the summary."""

    path: str
    handler: Handler
    name: str  # operationId
    tag: str
    answer: type[Any] | None = None
    request: type[BaseModel] | None = None  # schema of the body; None: the method is GET
    events: tuple[type[Any], ...] = ()  # of a stream
    runs_model: bool = False
    failures: tuple[int, ...] = ()  # besides BODY and RUN
    is_probe: bool = False

    @property
    def is_quiet(self) -> bool:
        """True: logged at level debug, and not counted in limits of clients."""
        return self.is_probe or self.path == "/metrics"

    def is_public(self, settings: Settings) -> bool:
        """True: needs no API key."""
        return self.is_probe or (self.is_quiet and settings.public_metrics)

    @functools.cached_property
    def is_refused_early(self) -> bool:
        """True: refused before the body is read while the client's queue is full."""
        return self.runs_model and self.answer is not AttentionAnswer

    @property
    def methods(self) -> list[str]:
        return ["POST"] if self.request else ["GET", "HEAD"]


class _Schemas(GenerateJsonSchema):
    """States the size of numbers, because generators of clients take 32 bits where nothing is said."""

    def int_schema(self, schema: core_schema.IntSchema) -> JsonSchemaValue:
        return super().int_schema(schema) | {"format": "int64"}

    def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
        return super().float_schema(schema) | {"format": "double"}

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # it would repeat the name


def build_document(
    settings: Settings,
    tokenizer: CharTokenizer,
    operations: Iterable[Operation],
    model: str | None = None,
    example: str = "",
) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of a server, with examples for a model.

    tokenizer: the model's; example: a prompt for it.
    """
    operations, model = list(operations), model or settings.model_name
    requests = [it.request for it in operations if it.request is not None]
    schemas = _schemas_of(requests, [type for it in operations for type in (it.answer, *it.events) if type is not None])
    for request in requests:
        schema = schemas[request.__name__]
        schema["properties"] = dict(sorted(schema["properties"].items(), key=lambda item: item[0] != "prompt"))
        adapt_examples(schema["properties"], tokenizer, model, example)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        described = _operation(operation, schemas, settings, model)
        paths.setdefault(operation.path, {})[operation.methods[0].lower()] = described
    vocabulary = f"GET /info gives the {tokenizer.vocab_size} characters."
    if tokenizer.vocab_size <= MAX_SHOWN_CHARACTERS:
        shown = json.dumps("".join(tokenizer.characters), ensure_ascii=False)
        vocabulary = f"These are, as JSON:\n\n    {shown}"
    return {
        "openapi": "3.1.1",
        "info": {
            "title": settings.model_name,
            "summary": "A character-level GPT",
            "description": DESCRIPTION.format(vocabulary=vocabulary, unknown=MAX_UNKNOWN_FIELDS),
            "version": release(),
        },
        "servers": [{"url": settings.root_path or "/"}],
        "tags": [{"name": name, "description": description} for name, description in TAGS.items()],
        "paths": paths,
        "components": _components(schemas),
    }


def _schemas_of(requests: list[type[Any]], answers: list[type[Any]]) -> dict[str, Any]:
    """Return the JSON Schemas of bodies, answers and everything in them, by name."""
    modes: list[tuple[type[Any], JsonSchemaMode]] = [(request, "validation") for request in requests]
    modes += [(answer, "serialization") for answer in dict.fromkeys([*answers, Error])]
    schemas: dict[str, Any] = TypeAdapter.json_schemas(
        [(type.__name__, mode, TypeAdapter(type)) for type, mode in modes],
        ref_template=_ref("schemas", "{model}")["$ref"],
        schema_generator=_Schemas,
    )[1]["$defs"]
    return schemas


def _components(schemas: dict[str, Any]) -> dict[str, Any]:
    """Return what the operations refer to."""
    return {
        "schemas": dict(sorted(schemas.items())),
        "responses": {
            f"Status{status}": _response(meaning, _json("Error"), *_ERROR_HEADERS.get(status, ()))
            for status, meaning in FAILURES.items()
        },
        "headers": {
            name: {"description": description, "schema": schema, "required": name == "X-Request-Id"}
            for name, (description, schema) in HEADERS.items()
        },
        "parameters": {
            "X-Request-Id": {
                "name": "X-Request-Id",
                "in": "header",
                "description": "an id for the request, repeated in the answer: up to 128 letters, digits and "
                "-_.:; anything else is replaced by a new id",
                "schema": {"type": "string", "examples": ["my-id.1"]},
            }
        },
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "An API key, if required"}},
    }


def _ref(kind: str, name: str) -> dict[str, str]:
    return {"$ref": f"#/components/{kind}/{name}"}


def _operation(operation: Operation, schemas: dict[str, Any], settings: Settings, model: str) -> dict[str, Any]:
    is_public = operation.is_public(settings)
    security: list[dict[str, Any]] = [{"key": []}] if settings.api_keys else [{}, {"key": []}]
    summary, _, description = inspect.cleandoc(operation.handler.__doc__ or "").partition("\n\n")
    described: dict[str, Any] = {
        "tags": [operation.tag],
        "operationId": operation.name,
        "summary": summary.replace("\n", " ").removesuffix("."),
        "parameters": [_ref("parameters", "X-Request-Id")],
        "responses": _responses(operation, settings),
        "security": [] if is_public else security,
    }
    if description:
        described["description"] = description
    if operation.request is not None:
        body = _json(operation.request.__name__, examples=request_examples(operation.request, schemas))
        described["requestBody"] = {"required": True, "content": body}
    if "{model}" in operation.path:
        schema = {"type": "string", "examples": [model]}
        described["parameters"].append(
            {"name": "model", "in": "path", "required": True, "description": "name of the model", "schema": schema}
        )
    return described


def _responses(operation: Operation, settings: Settings) -> dict[str, dict[str, Any]]:
    """Return the answer and the failures of an operation, by status."""
    content: dict[str, Any] = {} if operation.answer is None else _json(operation.answer.__name__)
    if operation.events:
        content["text/event-stream"] = _event_stream(operation.events)
    content = content or {"text/plain": {"schema": {"type": "string"}}}
    headers: tuple[str, ...] = ("X-Ignored-Fields",) if operation.request is not None else ()
    if operation.runs_model:
        headers = tuple(name for name in HEADERS if name not in ("X-Request-Id", "Retry-After", "X-Should-Retry"))
    failures = {500, *operation.failures, *(BODY if operation.request else ()), *(RUN if operation.runs_model else ())}
    if not operation.is_public(settings):
        failures.add(401)
    if settings.client_limits is not None and not operation.is_quiet:
        failures.add(429)
    responses = {str(status): _ref("responses", f"Status{status}") for status in failures}
    responses["200"] = _response("The answer.", content, *headers)
    if operation.is_probe:
        meaning = "The main process hangs." if operation.path == "/livez" else "Requests are not accepted."
        responses["503"] = _response(meaning, content)
    return dict(sorted(responses.items()))


def _event_stream(events: tuple[type[Any], ...]) -> dict[str, Any]:
    """Describe a stream. OpenAPI 3.1 cannot describe events, so this uses the schema of 3.2 with the prefix x-."""
    references = [_ref("schemas", event.__name__) for event in (*events, Error)]
    data = {"contentMediaType": "application/json", "contentSchema": {"anyOf": references}}
    return {
        "schema": {"type": "string"},
        "x-itemSchema": {
            "type": "object",
            "properties": {
                "data": {"type": "string", "anyOf": [{"const": "[DONE]"}, data]},
            },
            "required": ["data"],
        },
    }


def _response(description: str, content: dict[str, Any] | None = None, *headers: str) -> dict[str, Any]:
    response: dict[str, Any] = {"description": description}
    response["headers"] = {name: _ref("headers", name) for name in ("X-Request-Id", *headers)}
    return response if content is None else response | {"content": content}


def _json(schema: str, **more: Any) -> dict[str, Any]:
    return {"application/json": {"schema": _ref("schemas", schema), **more}}
