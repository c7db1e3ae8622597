"""The OpenAPI document of a server, and the page that shows it: /openapi.json and /docs.

The document is built from the table of routes (app.py) and the schemas of requests (requests.py) and answers
(answers.py). It adds the bounds of this server's settings and checkpoint, and examples in its vocabulary. A test
compares the document with the application, and schemathesis compares a running server with the document.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from base64 import b64encode
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from fastapi.openapi.docs import get_swagger_ui_html
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from service import release
from service.http.connection.errors import Error
from service.http.routes.files import MEDIA_TYPES, File
from service.http.routes.request import Request
from service.http.routes.service import Service
from service.http.schema import requests as b
from service.http.schema.answers import AttentionAnswer
from service.http.schema.foreign import MAX_UNKNOWN_FIELDS
from service.model.tokenizer import CharTokenizer
from service.settings import Settings

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
    answer: type[msgspec.Struct] | None = None
    request: type[BaseModel] | None = None  # schema of the body; None: the method is GET
    events: tuple[type[msgspec.Struct], ...] = ()  # of a stream
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
        return self.runs_model and self.request is not None and self.answer is not AttentionAnswer

    @property
    def methods(self) -> list[str]:
        return ["POST"] if self.request else ["GET", "HEAD"]


def build_document(
    settings: Settings,
    tokenizer: CharTokenizer,
    operations: Iterable[Operation],
    model: str | None = None,
    vocab_size: int = 0,
    attention: Mapping[str, int] | None = None,
    example: str = "",
) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of a server with these settings, with examples for a model.

    tokenizer: the model's; example: a prompt for it; vocab_size: that of the largest vocabulary served; attention:
    bounds of fields of /v1/attention, for the largest model.
    """
    operations, model = list(operations), model or settings.model_name
    vocab_size = max(vocab_size, tokenizer.vocab_size)
    requests = [it.request for it in operations if it.request is not None]
    events = [event for it in operations for event in it.events]
    answers = [*events, *(it.answer for it in operations if it.answer is not None), Error]
    validated: list[tuple[type[BaseModel], Any]] = [(request, "validation") for request in requests]
    schemas = models_json_schema(validated, ref_template=_ref("schemas", "{model}")["$ref"])[1]["$defs"]
    schemas |= msgspec.json.schema_components(answers, ref_template=_ref("schemas", "{name}")["$ref"])[1]
    _add_limits(schemas, requests, settings, tokenizer, model, vocab_size, attention or {}, example)
    _add_formats(schemas)
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
        "components": {
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
        },
    }


def _ref(kind: str, name: str) -> dict[str, str]:
    return {"$ref": f"#/components/{kind}/{name}"}


def _operation(operation: Operation, schemas: dict[str, Any], settings: Settings, model: str) -> dict[str, Any]:
    is_public = operation.is_public(settings)
    security: list[dict[str, Any]] = [{"key": []}] if settings.api_keys else [{}, {"key": []}]
    content: dict[str, Any] = {} if operation.answer is None else _json(operation.answer.__name__)
    if operation.events:
        content["text/event-stream"] = _event_stream(operation.events)
    headers: tuple[str, ...] = ("X-Ignored-Fields",) if operation.request is not None else ()
    if operation.runs_model:
        headers = tuple(name for name in HEADERS if name not in ("X-Request-Id", "Retry-After", "X-Should-Retry"))
    content = content or {"text/plain": {"schema": {"type": "string"}}}
    responses: dict[str, dict[str, Any]] = {"200": _response("The answer.", content, *headers)}
    is_limited = settings.client_limits is not None and not operation.is_quiet
    failures = {500, *operation.failures, *(BODY if operation.request else ()), *(RUN if operation.runs_model else ())}
    failures |= (set() if is_public else {401}) | ({429} if is_limited else set())
    responses |= {str(status): _ref("responses", f"Status{status}") for status in failures}
    summary, _, description = inspect.cleandoc(operation.handler.__doc__ or "").partition("\n\n")
    described: dict[str, Any] = {
        "tags": [operation.tag],
        "operationId": operation.name,
        "summary": summary.replace("\n", " ").removesuffix("."),
        "parameters": [_ref("parameters", "X-Request-Id")],
        "responses": responses,
        "security": [] if is_public else security,
    }
    if description:
        described["description"] = description
    if operation.request is not None:
        body = _json(operation.request.__name__, examples=_request_examples(operation.request, schemas))
        described["requestBody"] = {"required": True, "content": body}
    if "{model}" in operation.path:
        schema = {"type": "string", "examples": [model]}
        described["parameters"].append(
            {"name": "model", "in": "path", "required": True, "description": "name of the model", "schema": schema}
        )
    if operation.is_probe and operation.path != "/livez":
        responses["503"] = _response("Requests are not accepted.", content)
    described["responses"] = dict(sorted(responses.items()))
    return described


def _event_stream(events: tuple[type[msgspec.Struct], ...]) -> dict[str, Any]:
    """Describe a stream. OpenAPI 3.1 cannot describe events, so this uses the schema of 3.2 with the prefix x-."""
    named: list[type[msgspec.Struct]] = [*events, Error]
    references = [_ref("schemas", event.__name__) for event in named]
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


# -- examples and bounds of this server --


def _request_examples(request: type[BaseModel], schemas: dict[str, Any]) -> dict[str, Any]:
    """Return bodies made of the examples of their fields."""
    examples = {name: field["examples"][0] for name, field in schemas[request.__name__]["properties"].items()}
    (main,) = [name for name in ("prompt", "texts", "text", "tokens") if name in examples]
    body = {main: examples[main]}
    bodies = {main.replace("prompt", "a text"): body}
    if issubclass(request, b.GenerationRequest):
        prompt, end = body["prompt"], body["prompt"][-1]
        body |= {"max_tokens": examples["max_tokens"]}
        if request is b.CompletionRequest:
            body |= {"model": examples["model"]}
        bodies |= {
            "a stream": body | {"seed": 1, "stream": True},
            "answers to several prompts": body | {"prompt": [prompt, end], "n": 2, "temperature": 0.8},
            "up to a stop": body | {"stop": [end], "logprobs": 1},
            "one of two texts": body | {"choice": [prompt[0], end]},
            "between prompt and suffix": body | {"suffix": prompt, "best_of": 4},
        }
    elif request is b.ScoreRequest:
        bodies["continuations"] = {name: examples[name] for name in ("prefix", "continuations", "characters")}
    elif request is b.AttentionRequest:
        bodies["one head"] = {name: examples[name] for name in ("text", "layer", "head", "scores")}
    return {name.replace(" ", "_"): {"summary": name, "value": value} for name, value in bodies.items()}


def _in_vocabulary(value: Any, tokenizer: CharTokenizer) -> Any:
    """Return an example with unknown characters and ids replaced."""
    match value:
        case str():
            return tokenizer.adapted(value)
        case int():
            return min(value, tokenizer.vocab_size - 1)
        case list():
            return [_in_vocabulary(part, tokenizer) for part in value]
        case dict():
            return {_in_vocabulary(key, tokenizer): part for key, part in value.items()}
    return value


TEXTS = {
    "prompt", "suffix", "choice", "allowed_characters", "allowed_token_ids", "stop_token_ids", "bad_words",
    "logit_bias", "texts", "prefix", "continuations", "tokens", "text",
}  # fmt: skip
Bounds = dict[str, dict[str, int]]  # by type: string, integer, object, ids (a list of ids), array


def _add_limits(
    schemas: dict[str, Any],
    requests: list[type[BaseModel]],
    settings: Settings,
    tokenizer: CharTokenizer,
    model: str,
    vocab_size: int,
    attention: Mapping[str, int],
    example: str,
) -> None:
    """Add the bounds that the routes check against settings and vocabulary, and make the examples valid."""
    V, longest, most, texts = vocab_size, settings.max_prompt_characters, settings.max_prompts, settings.max_score_texts
    id, tokens, count = {"maximum": V - 1}, {"maximum": settings.max_tokens}, {"maximum": most}
    pattern = {"maxLength": settings.max_regex_characters}
    bounds: dict[str, Bounds] = {
        "prompt": {
            "integer": id, "string": {"maxLength": longest}, "ids": {"maxItems": longest}, "array": {"maxItems": most},
        },
        "tokens": {"integer": id}, "stop_token_ids": {"integer": id}, "allowed_token_ids": {"integer": id},
        "logit_bias": {"integer": id, "object": {"maxProperties": V}, "pairs": {"maxItems": V}},
        "max_tokens": {"integer": tokens}, "min_tokens": {"integer": tokens},
        "n": {"integer": count}, "best_of": {"integer": count}, "seed": {"ids": {"maxItems": most}},
        "logprobs": {"integer": {"maximum": V}}, "regex": {"string": pattern}, "stop_regex": {"string": pattern},
        **dict.fromkeys(("texts", "continuations"), {"array": {"maxItems": texts}}),
    }  # fmt: skip
    if attention:
        bounds |= {"text": {"string": {"maxLength": attention["text"]}}}
        bounds |= {name: {"integer": {"maximum": attention[name]}} for name in ("layer", "head")}
    for request in requests:
        schema = schemas[request.__name__]
        fields = schema["properties"] = dict(sorted(schema["properties"].items(), key=lambda item: item[0] != "prompt"))
        for name, field in fields.items():
            if field.get("default", ...) is None:  # the description says what the default is
                del field["default"]
            if request is not b.TokenizeRequest:
                _bound(field, bounds.get(name, {}))
            for branch in field.get("anyOf", ()) if name in ("prompt", "seed", "texts", "continuations") else ():
                if branch.get("type") == "array":
                    branch["minItems"] = 1
            examples = field["examples"]
            if name == "model":
                examples = [model]
            elif name == "prompt" and request is not b.NextRequest:
                # Records begin with an empty prompt. A letter shows more.
                examples = [example.strip() or next(filter(str.isalpha, tokenizer.characters), tokenizer.characters[0])]
            elif name in ("max_tokens", "min_tokens"):
                field["default"] = min(field["default"], settings.max_tokens)
                examples = [min(it, settings.max_tokens) for it in examples]
            elif name in attention:
                limit = attention[name]
                examples = [it[:limit] if isinstance(it, str) else min(it, limit) for it in examples]
            field["examples"] = _in_vocabulary(examples, tokenizer) if name in TEXTS else examples


def _bound(schema: dict[str, Any], bounds: Bounds) -> None:
    """Add bounds to each schema of their type within the schema of a field."""
    type, items = schema.get("type", ""), schema.get("items", {})
    if type == "array":
        type = "pairs" if "prefixItems" in items else "ids" if items.get("type") == "integer" else type
    schema.update(bounds.get(type, {}))
    for part in (*schema.get("anyOf", ()), *schema.get("prefixItems", ()), items):
        if part:
            _bound(part, bounds)


def _add_formats(node: Any) -> None:
    """State the size of numbers, because generators of clients take 32 bits where nothing is said."""
    if isinstance(node, dict):
        for type, format in (("integer", "int64"), ("number", "double")):
            if node.get("type") == type:
                node["format"] = format
        if len([branch for branch in node.get("anyOf", ()) if branch != {"type": "null"}]) > 1:
            node.pop("default", None)  # generators cannot say of which branch it is, and write invalid programs
    for part in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _add_formats(part)


# -- /openapi.json and /docs --


def documentation(settings: Settings, document: dict[str, Any]) -> dict[str, File]:
    """Return the document and its page by path. Swagger UI comes from its package, so the page works offline.

    The page's links are relative, so that any prefix works.
    """
    swagger = version("fastapi-swagger")
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=f"{settings.model_name}: API",
        swagger_js_url=f"docs/assets/swagger-ui-bundle.js?{swagger}",
        swagger_css_url=f"docs/assets/swagger-ui.css?{swagger}",
        swagger_favicon_url=f"docs/assets/favicon-32x32.png?{swagger}",
        swagger_ui_parameters={"validatorUrl": None, "tryItOutEnabled": True, "displayRequestDuration": True},
    )
    body = bytes(page.body)
    inline = re.findall(rb"<script>(.*?)</script>", body, re.S)
    scripts = " ".join(f"'sha256-{b64encode(sha256(script).digest()).decode()}'" for script in inline)
    policy = {
        "Content-Security-Policy": f"default-src 'none'; script-src 'self' {scripts}; "
        "style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
    }
    fresh = {"Cache-Control": "no-cache"}  # the next start may have other settings
    files = {
        "/openapi.json": File(msgspec.json.encode(document), ".json", fresh),
        "/docs": File(body, ".html", fresh | policy),
    }
    # The page requests them by version.
    lasting = {"Cache-Control": "max-age=31536000, immutable", "X-Content-Type-Options": "nosniff"}
    for asset in resources.files("fastapi_swagger").joinpath("resources").iterdir():
        suffix = Path(asset.name).suffix
        if suffix in MEDIA_TYPES:
            files[f"/docs/assets/{asset.name}"] = File(asset.read_bytes(), suffix, lasting, "/docs/assets")
    return files
