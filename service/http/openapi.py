"""The OpenAPI document of the service, and the page that shows it: /openapi.json and /docs.

Requests are described by the models that check them, with the bounds that this server's settings and checkpoint add.
The models of answers here only describe: answers.py writes them by hand. A test holds the document against the
application, and schemathesis holds a running server against the document.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any, Literal, NamedTuple

import msgspec
from fastapi.openapi.docs import get_swagger_ui_html
from pydantic import BaseModel, Field
from pydantic.config import JsonDict
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from service.http.answers import Answer, CompletionAnswer, Receipt, Usage
from service.http.app import EVENT_SOURCE_END
from service.http.middleware import PROBES
from service.http.run import CharacterLogprob, Piece, Timing
from service.http.schemas import (
    ApiError,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    NextRequest,
    ScoreRequest,
    TokenizeRequest,
)
from service.model.checkpoint import Checkpoint
from service.model.tokenizer import CharTokenizer
from service.settings import Settings

MAX_SHOWN_CHARACTERS = 200


# -- what answers look like --


def _maybe(description: str) -> Any:
    """A field that an answer may lack; null is not among its values."""

    def without_default(schema: JsonDict) -> None:
        del schema["default"]

    return Field(None, description=description, json_schema_extra=without_default)


FinishReason = Literal["stop", "length"]
FINISH_REASON = Field(
    description="stop: a stop was found, or the pattern ended; length: max_tokens, or no longer match is possible"
)
INDEX = Field(description="prompt number × n + answer number")
SEED = Field(description="with it as `seed`, and this prompt alone, the same text comes again")


class ErrorDetails(BaseModel):
    """What is wrong."""

    message: str = Field(description="the field, what was given and what is allowed, in words")
    type: Literal["invalid_request_error", "authentication_error", "rate_limit_error", "server_error"]
    param: str | None = Field(description="the field of the request, with dots where it is within another")
    code: str | None = Field(description="what went wrong, for programs")


class Error(BaseModel):
    """Every error's body, as OpenAI has it."""

    error: ErrorDetails


class UsageCounts(BaseModel):
    """Characters; a token is a character everywhere."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ReceiptTiming(BaseModel):
    """What it took; of several sequences the longest."""

    queue_seconds: float = Field(description="from the request's arrival until a cache slot was free")
    prefill_seconds: float = Field(description="from there until the prompt had run")
    decode_seconds: float = Field(description="from there to the last character")
    seconds_per_character: float | None = Field(description="decode over the characters after the first; null: none")


class ReceiptFields(BaseModel):
    """What gives the same answer again, from the same body with these seeds, and what it took."""

    checkpoint_sha256: str = Field(description="of the checkpoint's manifest; /info has it too")
    seeds: list[int] = Field(description="one for each prompt; empty where nothing is drawn")
    timing: ReceiptTiming
    replaced_characters: int = Field(description="unknown characters of the request that were replaced")
    dropped_characters: int = Field(description="unknown characters of the request that were dropped")


class Logprobs(BaseModel):
    """Log-probabilities by the model alone, in nats, as OpenAI has them."""

    tokens: list[str] = Field(description="the characters")
    token_logprobs: list[float | None] = Field(description="null: nothing precedes it")
    top_logprobs: list[dict[str, float] | None] = Field(description="the likeliest characters, and the given one")
    text_offset: list[int] = Field(description="of each character in the choice's text")


class GenerateChoice(BaseModel):
    """One text."""

    index: int = INDEX
    text: str
    finish_reason: FinishReason = FINISH_REASON
    seed: int = SEED
    logprobs: Logprobs = _maybe("where the request asks for them")


class GenerateAnswer(BaseModel):
    """Whole answer of POST /generate."""

    id: str = Field(description="the request's id")
    model: str
    choices: list[GenerateChoice]
    usage: UsageCounts
    chargpt: ReceiptFields


class GenerateEvent(BaseModel):
    """Event of a stream of /generate: the characters of one choice that have newly come."""

    index: int = INDEX
    text: str
    finish_reason: FinishReason | None = Field(description="null: more is to come")
    seed: int = SEED
    logprobs: Logprobs = _maybe("of these characters, where the request asks for them")
    usage: UsageCounts = _maybe("so far, with stream_options.continuous_usage_stats")


class GenerateEnd(BaseModel):
    """Last event of a stream of /generate but `[DONE]`."""

    id: str = Field(description="the request's id")
    model: str
    usage: UsageCounts
    chargpt: ReceiptFields


class CompletionChoice(BaseModel):
    """One text, as OpenAI has it; `seed` is ours."""

    index: int = INDEX
    text: str
    logprobs: Logprobs | None
    finish_reason: FinishReason = FINISH_REASON
    seed: int = SEED


class Completion(BaseModel):
    """Whole answer of POST /v1/completions, as OpenAI has it; `chargpt` is ours."""

    id: str
    object: Literal["text_completion"]
    created: int = Field(description="seconds since 1970")
    model: str
    choices: list[CompletionChoice]
    usage: UsageCounts
    chargpt: ReceiptFields


class ChunkChoice(BaseModel):
    """The characters of one choice that have newly come."""

    index: int = INDEX
    text: str
    logprobs: Logprobs | None
    finish_reason: FinishReason | None = Field(description="null: more is to come")
    seed: int = SEED


class CompletionChunk(BaseModel):
    """Event of a stream of /v1/completions, as OpenAI has it."""

    id: str
    object: Literal["text_completion"]
    created: int = Field(description="seconds since 1970")
    model: str
    choices: list[ChunkChoice] = Field(description="one, or none where the usage comes at the end")
    usage: UsageCounts | None = _maybe("null until the end, with stream_options.include_usage")
    chargpt: ReceiptFields = _maybe("with the last choice that ends")


class Score(BaseModel):
    """What the model thinks of one text. Nats are negative log-likelihoods: less is likelier."""

    index: int
    characters: int = Field(description="that were scored")
    nats: float
    nats_per_character: float | None = Field(description="null, as the next two, where nothing was scored")
    bits_per_character: float | None
    perplexity: float | None = Field(description="of a character: e to the nats per character")
    rank: int = _maybe("of continuations: 1 is the likeliest")
    character_nats: list[float | None] = _maybe("of each character; null: the first of a text, which nothing precedes")


class ScoreAnswer(BaseModel):
    """Answer of POST /v1/score."""

    id: str = Field(description="the request's id")
    model: str
    object: Literal["list"]
    data: list[Score]
    usage: UsageCounts
    chargpt: ReceiptFields = _maybe("absent where there was nothing to score")


class NextCharacter(BaseModel):
    """What may come next, and how likely it is."""

    character: str
    id: int
    probability: float
    logprob: float


class Next(BaseModel):
    """The distribution of the character after one prompt."""

    index: int
    entropy_nats: float
    entropy_bits: float
    distribution: list[NextCharacter] = Field(description="every character of the vocabulary, likeliest first")


class NextAnswer(BaseModel):
    """Answer of POST /v1/next."""

    id: str = Field(description="the request's id")
    model: str
    object: Literal["list"]
    data: list[Next]
    usage: UsageCounts
    chargpt: ReceiptFields


class TokenizeAnswer(BaseModel):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: int = Field(description="longest prompt of a generation")
    tokens: list[int]
    replaced_characters: int
    dropped_characters: int


class DetokenizeAnswer(BaseModel):
    """Answer of POST /detokenize."""

    prompt: str


class TokenizerInfo(BaseModel):
    """Answer of GET /tokenizer_info."""

    tokenizer_class: Literal["CharTokenizer"]
    vocab_size: int
    bos_token: str | None = Field(description="what an empty prompt stands for: a line break, if the model knows it")
    eos_token: None
    pad_token: None


class ModelCard(BaseModel):
    """The served model, as OpenAI describes models."""

    id: str
    object: Literal["model"]
    created: int = Field(description="when the service started, seconds since 1970")
    owned_by: str
    max_model_len: int = Field(description="longest prompt")


class ModelList(BaseModel):
    """Answer of GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class ServedModel(BaseModel):
    """The checkpoint."""

    name: str
    checkpoint_sha256: str
    config: dict[str, Any] = Field(description="hyperparameters of the network")
    vocabulary: str = Field(description="every character; its place is its id")
    training: dict[str, Any] = Field(description="recipe, data and losses, as the training wrote them")


class Limits(BaseModel):
    """Settings that bound requests."""

    max_prompts: int
    max_prompt_characters: int
    max_tokens: int
    max_score_texts: int
    max_regex_characters: int
    max_body_bytes: int
    max_running_requests: int
    max_queued_requests: int
    request_timeout_seconds: float


class Info(BaseModel):
    """Answer of GET /info."""

    model: ServedModel
    limits: Limits
    unknown_characters: Literal["refuse", "replace", "drop"]
    devices: list[str]
    versions: dict[str, str]


class Status(BaseModel):
    """Answer of a probe."""

    status: Literal["alive", "ready", "draining", "no worker"]


REQUESTS: tuple[type[BaseModel], ...] = (
    GenerateRequest, CompletionRequest, ScoreRequest, NextRequest, TokenizeRequest, DetokenizeRequest,
)  # fmt: skip
ANSWERS: tuple[type[BaseModel], ...] = (
    GenerateAnswer, GenerateEvent, GenerateEnd, Completion, CompletionChunk, ScoreAnswer, NextAnswer, TokenizeAnswer,
    DetokenizeAnswer, TokenizerInfo, ModelList, ModelCard, Info, Status, Error,
)  # fmt: skip

# -- errors and headers --


class Failure(NamedTuple):
    """An error that several routes have in common."""

    meaning: str
    examples: list[ApiError]


FAILURES = {
    "BadRequest": Failure(
        "A field is missing, wrong or out of bounds, or a text holds a character that the model does not know.",
        [
            ApiError(400, "temperature: Input should be less than or equal to 100, got 101", param="temperature"),
            ApiError(
                400,
                "prompt: character 'é' (U+00E9) at offset 3 is not in the vocabulary",
                param="prompt",
                code="unknown_character",
            ),
            ApiError(400, "stop_regex: must not match the empty text", param="stop_regex"),
            ApiError(400, "the body is not JSON: EOF while parsing an object at line 1 column 1", code="invalid_json"),
        ],
    ),
    "Unauthorized": Failure(
        "The service asks for API keys, and the request has none or a wrong one.",
        [ApiError(401, "an API key is needed, as Authorization: Bearer KEY", code="invalid_api_key")],
    ),
    "NotFound": Failure(
        "The model is not served here.",
        [ApiError(404, "model 'gpt' is not served here; 'chargpt' is", param="model", code="model_not_found")],
    ),
    "BodyTimeout": Failure(
        "The body took too long to arrive.",
        [ApiError(408, "the body may take at most 30 seconds to arrive", code="body_timeout")],
    ),
    "BodyTooLarge": Failure(
        "The body is too large.",
        [ApiError(413, "the body may have at most 4194304 bytes, got 5000000", code="body_too_large")],
    ),
    "QueueFull": Failure(
        "Too many sequences wait already. `Retry-After` says when there may be room.",
        [
            ApiError(
                429, "1024 sequences are waiting already, the most that may", code="queue_full", retry_after_seconds=2
            )
        ],
    ),
    "Failed": Failure(
        "The service failed; asking again may help.",
        [ApiError(500, "the inference process failed on this request", code="engine_error")],
    ),
    "Unavailable": Failure(
        "No inference process is ready, or the service shuts down. `Retry-After` says when to ask again.",
        [
            ApiError(503, "no inference process is ready", code="not_ready", retry_after_seconds=1),
            ApiError(503, "the server is shutting down", code="shutting_down", retry_after_seconds=1),
        ],
    ),
    "TimedOut": Failure(
        "The request took longer than its `timeout_seconds` or the server's own bound.",
        [ApiError(504, "the request took longer than it may", code="timeout")],
    ),
}
BODY = ("BadRequest", "NotFound", "BodyTimeout", "BodyTooLarge")  # of whatever takes a body
RUN = ("QueueFull", "Unavailable", "TimedOut")  # of whatever runs the model

HEADERS: dict[str, tuple[str, dict[str, Any]]] = {
    "X-Request-Id": ("The request's id: the client's own, or a new one", {"type": "string"}),
    "Retry-After": ("Seconds after which to ask again; an error while shutting down may lack it", {"type": "integer"}),
    "X-Checkpoint": ("SHA-256 of the checkpoint", {"type": "string"}),
    "X-Seed": ("Seed of each prompt, with commas between", {"type": "string", "pattern": "^[0-9]+(,[0-9]+)*$"}),
    "X-Queue-Time": ("Milliseconds until a cache slot was free", {"type": "number", "minimum": 0}),
    "X-Prefill-Time": ("Milliseconds from there to the first character chosen", {"type": "number", "minimum": 0}),
    "X-Inference-Time": ("Milliseconds of prefill and decode; not of a stream", {"type": "number", "minimum": 0}),
    "X-Time-Per-Token": (
        "Milliseconds per character after the first, where there is one; not of a stream",
        {"type": "number", "minimum": 0},
    ),
    "X-Total-Time": (
        "Milliseconds from the request's arrival to its answer; not of a stream",
        {"type": "number", "minimum": 0},
    ),
}
EARLY = ("X-Checkpoint", "X-Queue-Time", "X-Prefill-Time")  # before the first character
LATE = ("X-Inference-Time", "X-Time-Per-Token", "X-Total-Time")

# -- the routes --

DESCRIPTION = """
A token is a character everywhere. The same request with the same seed gives the same text, whole or streamed, alone \
or among others.

Unknown fields are ignored, and null stands for a field's default. Strings of `format: vocabulary` hold the model's \
characters alone, unless `unknown_characters` says what to do with others. {vocabulary}

Every answer has an `X-Request-Id`. Every error has the body `{{"error": {{"message", "type", "param", "code"}}}}`; \
a path that is not here gives 404, a method that a path does not have 405.
"""

EVENTS = """

A stream consists of events of one line, `data: ` and JSON, with a blank line after each. A line that begins with a \
colon keeps the connection alive and says nothing. The first character decides the status; what fails later is an \
event with an error's body. The last event is `data: [DONE]`.
"""

TAGS = {
    "text": "Continue texts",
    "likelihood": "What the model thinks of texts",
    "characters": "Characters to ids and back",
    "information": "What is served",
    "operation": "Probes and metrics",
}

LAST_EVENT_ID = {
    "name": "Last-Event-ID",
    "in": "header",
    "description": "id of the last event that came, as EventSource sends it when it asks again; done: 204",
    "schema": {"type": "string"},
}


class Operation(NamedTuple):
    """One route."""

    method: str
    path: str
    name: str
    tag: str
    summary: str
    responses: dict[str, Any]  # those that are no error of FAILURES
    failures: tuple[str, ...] = ()
    description: str = ""
    request: type[BaseModel] | None = None
    examples: dict[str, Any] | None = None  # of the request
    parameters: Sequence[dict[str, Any]] = ()

    def object(self, settings: Settings) -> dict[str, Any]:
        """As it stands in the document."""
        is_public = self.path in PROBES or (self.path == "/metrics" and settings.public_metrics)
        security: list[dict[str, Any]] = [{"key": []}] if settings.api_key_digests else [{}, {"key": []}]
        failures = (*self.failures, "Failed") if is_public else (*self.failures, "Unauthorized", "Failed")
        responses = self.responses | {
            str(FAILURES[name].examples[0].status): _ref("responses", name) for name in failures
        }
        operation: dict[str, Any] = {
            "tags": [self.tag],
            "operationId": self.name,
            "summary": self.summary,
            "parameters": [*self.parameters, _ref("parameters", "X-Request-Id")],
            "responses": dict(sorted(responses.items())),
            "security": [] if is_public else security,
        }
        if self.description:
            operation["description"] = self.description
        if self.request is not None:
            assert self.examples is not None
            operation["requestBody"] = {"required": True, "content": _json(self.request, **self.examples)}
        return operation


def _ref(kind: str, name: str) -> dict[str, str]:
    return {"$ref": f"#/components/{kind}/{name}"}


def _schema(model: type[BaseModel]) -> dict[str, str]:
    return _ref("schemas", model.__name__)


def _json(model: type[BaseModel], **examples: Any) -> dict[str, Any]:
    named = {name: {"summary": name.replace("_", " "), "value": value} for name, value in examples.items()}
    return {"application/json": {"schema": _schema(model), "examples": named}}


def _stream(example: bytes, *events: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI 3.1 has no word for events: their schema is given as 3.2 would have it, but with x- before."""
    content = {
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [*map(_schema, events), _schema(Error)]},
    }
    return {
        "text/event-stream": {
            "schema": {"type": "string"},
            "x-itemSchema": {
                "type": "object",
                "properties": {
                    "data": {"type": "string", "anyOf": [{"const": "[DONE]"}, content]},
                    "id": {"const": EVENT_SOURCE_END},
                },
                "required": ["data"],
            },
            "examples": {"stream": {"value": example.decode()}},
        }
    }


def _response(description: str, content: dict[str, Any] | None = None, *headers: str) -> dict[str, Any]:
    response: dict[str, Any] = {"description": description}
    response["headers"] = {name: _ref("headers", name) for name in ("X-Request-Id", *headers)}
    return response if content is None else response | {"content": content}


def _operations(settings: Settings, checkpoint: Checkpoint, query: list[dict[str, Any]]) -> Iterator[Operation]:
    """Every route, with examples of characters that the model knows; `query`: the parameters of GET /generate."""
    tokenizer, model = checkpoint.tokenizer, settings.model_name
    prompt, max_tokens = _known("ROMEO:", tokenizer), min(80, settings.max_tokens)
    generations: dict[str, dict[str, Any]] = {
        "a_text": {"seed": 1},
        "a_stream": {"seed": 1, "stream": True},
        "answers_to_several_prompts": {"prompt": [prompt, prompt[0]], "n": 2, "temperature": 0.8},
        "up_to_a_stop": {"stop": [prompt[-1]], "logprobs": 1},
        "one_of_two_texts": {"choice": [prompt[0], prompt[-1]]},
        "between_prompt_and_suffix": {"suffix": prompt, "best_of": 4},
    }
    generations = {name: {"prompt": prompt, "max_tokens": max_tokens} | body for name, body in generations.items()}

    id = "398168a2d538466b85c3cb3c67d1add2"
    timing, usage = Timing(0.0004, 0.0051, 0.0124, 0.0031), Usage(6, 5)
    receipt = Receipt(checkpoint.digest, [1])
    whole = Piece(0, 1, "\nWe w", "length")
    pieces = [Piece(0, 1, "\n"), Piece(0, 1, "We "), Piece(0, 1, "w", "length")]
    with_logprobs = Piece(0, 1, "W", "stop", [CharacterLogprob("W", -1.25, [(0, -0.5)])])

    def answers(kind: type[Answer]) -> tuple[dict[str, Any], bytes]:
        """Whole ones and a stream."""
        form = kind(id, model, receipt, lambda _: "T", include_usage=True)
        wholes = {
            "a_text": msgspec.json.decode(form.whole([whole], usage, timing)),
            "a_text_with_log-probabilities": msgspec.json.decode(form.whole([with_logprobs], Usage(6, 1), timing)),
        }
        events = [form.event(piece, usage, timing if piece.finish_reason else None) for piece in pieces]
        return wholes, b"".join([*events, form.last_event(usage, timing), Answer.DONE])

    wholes, stream = answers(Answer)
    yield Operation(
        "post", "/generate", "generate", "text", "Continue a text",
        {"200": _response(
            "The texts, or a stream of them." + EVENTS,
            _json(GenerateAnswer, **wholes) | _stream(stream, GenerateEvent, GenerateEnd), "X-Seed", *EARLY, *LATE
        )},
        (*BODY, *RUN),
        "Gives `n` texts for each prompt, whole or, with `stream`, as server-sent events.",
        GenerateRequest, generations,
    )  # fmt: skip
    stream = stream.replace(Answer.DONE, b"id: done\n" + Answer.DONE)
    yield Operation(
        "get", "/generate", "generate_events", "text", "Continue a text, for a browser's EventSource",
        {
            "200": _response(
                "A stream of the texts." + EVENTS.rstrip() + " It has the id `done`.\n",
                _stream(stream, GenerateEvent, GenerateEnd), "X-Seed", *EARLY,
            ),
            "204": _response("That stream has ended; EventSource asks no more."),
        },
        ("BadRequest", "NotFound", *RUN),
        "The same as POST /generate, always as a stream, with what a query can hold of the fields.",
        parameters=[*query, LAST_EVENT_ID],
    )  # fmt: skip
    wholes, stream = answers(CompletionAnswer)
    yield Operation(
        "post", "/v1/completions", "create_completion", "text", "Continue a text, as OpenAI's completions",
        {"200": _response(
            "The texts, or a stream of them." + EVENTS,
            _json(Completion, **wholes) | _stream(stream, CompletionChunk), "X-Seed", *EARLY, *LATE,
        )},
        (*BODY, *RUN),
        "The same as POST /generate, in the form that OpenAI's SDKs speak.",
        CompletionRequest, {name: {"model": model} | body for name, body in generations.items()},
    )  # fmt: skip

    opinion = {"id": id, "model": model, "object": "list"}
    counts = {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}
    seedless = msgspec.json.decode(Receipt(checkpoint.digest, []).json(timing))
    score = {
        "index": 0, "characters": 2, "nats": 3.0, "nats_per_character": 1.5, "bits_per_character": 2.1640425613334453,
        "perplexity": 4.4816890703380645,
    }  # fmt: skip
    of_text, of_continuation = score | {"character_nats": [None, 1.0, 2.0]}, score | {"rank": 1}
    yield Operation(
        "post", "/v1/score", "score", "likelihood", "Say how likely texts are",
        {"200": _response(
            "A score for each text, in their order.",
            _json(
                ScoreAnswer,
                texts=opinion | {"data": [of_text], "usage": counts, "chargpt": seedless},
                continuations=opinion | {"data": [of_continuation], "usage": counts, "chargpt": seedless},
            ),
            *EARLY, *LATE,
        )},
        (*BODY, *RUN),
        "Scores `texts`, each character but the first given all before it, or ranks `continuations` of a `prefix`. "
        "Runs when generations leave room.",
        ScoreRequest,
        {
            "texts": {"texts": [_known("To be, or not to be", tokenizer)]},
            "continuations": {"prefix": prompt, "continuations": [prompt[0], prompt[-1]], "characters": False},
        },
    )  # fmt: skip
    likeliest = {"character": "T", "id": 0, "probability": 1.0, "logprob": 0.0}
    distribution = {"index": 0, "entropy_nats": 0.0, "entropy_bits": 0.0, "distribution": [likeliest]}
    yield Operation(
        "post", "/v1/next", "next_character", "likelihood", "Say what character comes next",
        {"200": _response(
            "The distribution after each prompt, in their order.",
            _json(NextAnswer, a_text=opinion | {"data": [distribution], "usage": counts, "chargpt": seedless}),
            *EARLY, *LATE,
        )},
        (*BODY, *RUN),
        "Gives the probability of every character of the vocabulary, and the entropy.",
        NextRequest, {"a_text": {"prompt": prompt}, "several_texts": {"prompt": [prompt, prompt[0]]}},
    )  # fmt: skip

    tokens = tokenizer.encode(prompt)
    encoded = {"count": len(tokens), "max_model_len": settings.max_prompt_characters, "tokens": tokens}
    encoded |= {"replaced_characters": 0, "dropped_characters": 0}
    yield Operation(
        "post", "/tokenize", "tokenize", "characters", "Encode a text",
        {"200": _response("An id for each character.", _json(TokenizeAnswer, a_text=encoded))},
        BODY, request=TokenizeRequest, examples={"a_text": {"prompt": prompt}},
    )  # fmt: skip
    yield Operation(
        "post", "/detokenize", "detokenize", "characters", "Decode ids",
        {"200": _response("A character for each id.", _json(DetokenizeAnswer, ids={"prompt": prompt}))},
        BODY, request=DetokenizeRequest, examples={"ids": {"tokens": tokens}},
    )  # fmt: skip

    special: dict[str, Any] = {"tokenizer_class": "CharTokenizer", "vocab_size": tokenizer.vocab_size}
    special |= {"bos_token": "\n" if "\n" in tokenizer else None, "eos_token": None, "pad_token": None}
    yield Operation(
        "get", "/tokenizer_info", "get_tokenizer_info", "characters", "Describe the tokenizer, as vLLM does",
        {"200": _response("For lm-evaluation-harness.", _json(TokenizerInfo, the_tokenizer=special))},
    )  # fmt: skip

    card = {"id": model, "object": "model", "created": 1795201052, "owned_by": "chargpt"}
    card |= {"max_model_len": settings.max_prompt_characters}
    yield Operation(
        "get", "/v1/models", "list_models", "information", "List the served model, as OpenAI does",
        {"200": _response("The one model.", _json(ModelList, the_model={"object": "list", "data": [card]}))},
    )  # fmt: skip
    yield Operation(
        "get", "/v1/models/{model}", "get_model", "information", "Describe the served model, as OpenAI does",
        {"200": _response("The model.", _json(ModelCard, the_model=card))}, ("NotFound",),
        parameters=[{
            "name": "model", "in": "path", "required": True, "schema": {"type": "string", "examples": [model]},
            "description": "name of the served model",
        }],
    )  # fmt: skip
    yield Operation(
        "get", "/info", "get_info", "information", "Describe what is served",
        {"200": _response("The checkpoint, its losses, the limits, versions and devices.", _json(Info))},
    )  # fmt: skip
    yield Operation(
        "get", "/livez", "livez", "operation", "Say whether the HTTP process answers",
        {"200": _response("It does.", _json(Status, alive={"status": "alive"}))},
    )  # fmt: skip
    for path, summary in ("/readyz", "Say whether requests are accepted"), ("/health", "The same as /readyz"):
        yield Operation(
            "get", path, path[1:], "operation", summary,
            {
                "200": _response("They are.", _json(Status, ready={"status": "ready"})),
                "503": _response(
                    "The service is starting, has no inference process, or shuts down.",
                    _json(Status, no_worker={"status": "no worker"}, draining={"status": "draining"}),
                ),
            },
        )  # fmt: skip
    text = {"text/plain": {"schema": {"type": "string"}}}
    yield Operation(
        "get", "/metrics", "metrics", "operation", "Metrics of all processes",
        {"200": _response("Prometheus' text format.", text)},
    )  # fmt: skip


# -- the document --


TEXTS = ("prompt", "suffix", "choice", "allowed_characters", "logit_bias", "texts", "prefix", "continuations", "tokens")


class _Schemas(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # it would repeat the name


def _known(value: Any, tokenizer: CharTokenizer) -> Any:
    """An example with other characters and ids for those that the model does not know."""
    match value:
        case str():
            return "".join(
                [c if c in tokenizer else tokenizer.characters[i % tokenizer.vocab_size] for i, c in enumerate(value)]
            )
        case int():
            return min(value, tokenizer.vocab_size - 1)
        case list():
            return [_known(part, tokenizer) for part in value]
        case dict():
            return {_known(key, tokenizer): part for key, part in value.items()}
    return value


def _bound(schema: dict[str, Any], type: str, **bounds: object) -> None:
    """Put bounds on each schema of a type within a field's."""
    if schema.get("type") == type:
        schema.update(bounds)
    for part in (*schema.get("anyOf", ()), *schema.get("prefixItems", ()), schema.get("items", {})):
        if part:
            _bound(part, type, **bounds)


def _bound_lists(field: dict[str, Any], max_items: int) -> None:
    """Put bounds on the lists that a field may be, but for a list of ids, which is one text."""
    for branch in field["anyOf"]:
        if branch["type"] == "array":
            branch["minItems"] = 1
            branch.setdefault("maxItems", max_items)


def _bound_ids(field: dict[str, Any], max_items: int) -> None:
    """Put a bound on lists of ids."""
    for branch in field["anyOf"]:
        if branch["type"] == "array" and branch["items"]["type"] == "array":
            branch = branch["items"]
        if branch["type"] == "array" and branch["items"]["type"] == "integer":
            branch["maxItems"] = max_items


def _serve(schemas: dict[str, Any], settings: Settings, tokenizer: CharTokenizer) -> None:
    """State what api.py checks against the settings and the vocabulary, and give examples that this server takes."""
    for request in REQUESTS:
        fields = schemas[request.__name__]["properties"]
        for name, field in fields.items():
            if field.get("default", ...) is None:  # that is what "Default: …" in its description says
                del field["default"]
            match name:
                case "model":
                    field["examples"] = [settings.model_name]
                case "prompt":
                    if request is not TokenizeRequest:
                        _bound(field, "string", maxLength=settings.max_prompt_characters)
                        _bound_ids(field, settings.max_prompt_characters)
                        _bound_lists(field, settings.max_prompts)
                    _bound(field, "integer", maximum=tokenizer.vocab_size - 1)
                case "tokens":
                    _bound(field, "integer", maximum=tokenizer.vocab_size - 1)
                case "logit_bias":
                    _bound(field, "integer", maximum=tokenizer.vocab_size - 1)
                    for branch in field["anyOf"]:
                        for key in {"maxProperties", "maxItems"} & branch.keys():
                            branch[key] = tokenizer.vocab_size
                case "texts" | "continuations":
                    _bound_lists(field, settings.max_score_texts)
                case "max_tokens" | "min_tokens":
                    _bound(field, "integer", maximum=settings.max_tokens)
                    field["default"] = min(field["default"], settings.max_tokens)
                    field["examples"] = [min(example, settings.max_tokens) for example in field["examples"]]
                case "n" | "best_of":
                    _bound(field, "integer", maximum=settings.max_prompts)
                case "seed":
                    _bound(field, "array", minItems=1, maxItems=settings.max_prompts)
                case "logprobs":
                    _bound(field, "integer", maximum=tokenizer.vocab_size)
                case "regex" | "stop_regex":
                    _bound(field, "string", maxLength=settings.max_regex_characters)
            if name in TEXTS:
                field["examples"] = _known(field["examples"], tokenizer)


def _query(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The parameters of GET /generate: the fields of POST /generate that a query can hold."""
    for name, field in fields.items():
        # The first kind of each field is the plain one, but a query has several stops.
        schema = field["anyOf"][1 if name == "stop" else 0]
        if name == "stream" or (schema.get("type", "object") in ("array", "object") and name != "stop"):
            continue
        schema = schema | {key: field[key] for key in ("default", "examples") if key in field}
        yield {"name": name, "in": "query", "description": field["description"], "schema": schema}


def build_document(settings: Settings, checkpoint: Checkpoint) -> dict[str, Any]:
    """OpenAPI 3.1 of a server with these settings."""
    models: list[tuple[type[BaseModel], JsonSchemaMode]] = [(model, "validation") for model in (*REQUESTS, *ANSWERS)]
    reference = _ref("schemas", "{model}")["$ref"]
    schemas = models_json_schema(models, ref_template=reference, schema_generator=_Schemas)[1]["$defs"]
    _serve(schemas, settings, checkpoint.tokenizer)
    characters = checkpoint.tokenizer.characters
    vocabulary = f"GET /info gives the {len(characters)} characters."
    if len(characters) <= MAX_SHOWN_CHARACTERS:
        shown = json.dumps("".join(characters), ensure_ascii=False)
        vocabulary = f"These are, as JSON:\n\n    {shown}"
    paths: dict[str, dict[str, Any]] = {}
    for operation in _operations(settings, checkpoint, list(_query(schemas["GenerateRequest"]["properties"]))):
        paths.setdefault(operation.path, {})[operation.method] = operation.object(settings)
    failures = {
        name: _response(
            failure.meaning,
            _json(Error, **{error.code or f"bad_{error.param}": json.loads(error.body) for error in failure.examples}),
            *(["Retry-After"] if "Retry-After" in failure.examples[0].headers else []),
        )
        for name, failure in FAILURES.items()
    }
    return {
        "openapi": "3.1.1",
        "info": {
            "title": settings.model_name,
            "summary": "A character-level GPT",
            "description": DESCRIPTION.format(vocabulary=vocabulary),
            "version": version("chargpt"),
        },
        "servers": [{"url": settings.root_path or "/"}],
        "tags": [{"name": name, "description": description} for name, description in TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "responses": failures,
            "headers": {
                name: {"description": description, "schema": schema}
                | ({"required": True} if name == "X-Request-Id" else {})
                for name, (description, schema) in HEADERS.items()
            },
            "parameters": {
                "X-Request-Id": {
                    "name": "X-Request-Id",
                    "in": "header",
                    "description": "an id for the request, which the answer repeats: up to 128 letters, digits and "
                    "-_.:; others give way to a new one",
                    "schema": {"type": "string", "examples": ["my-id.1"]},
                }
            },
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "An API key, where the service asks for one"}
            },
        },
    }


# -- /openapi.json and /docs --


class _Assets(StaticFiles):
    """Swagger UI, from its package: the page must work where there is no internet."""

    def file_response(self, *arguments: Any, **options: Any) -> Response:
        response = super().file_response(*arguments, **options)
        response.headers["Cache-Control"] = "max-age=31536000, immutable"  # the page asks for them by their version
        return response


def documentation(settings: Settings, checkpoint: Checkpoint) -> list[BaseRoute]:
    """The routes of the document and its page, which refers to the others by relative paths: any prefix will do."""
    body = msgspec.json.encode(build_document(settings, checkpoint))
    release = version("fastapi-swagger")
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=f"{settings.model_name}: API",
        swagger_js_url=f"docs/assets/swagger-ui-bundle.js?{release}",
        swagger_css_url=f"docs/assets/swagger-ui.css?{release}",
        swagger_favicon_url=f"docs/assets/favicon-32x32.png?{release}",
        swagger_ui_parameters={"validatorUrl": None, "tryItOutEnabled": True, "displayRequestDuration": True},
    )
    fresh = {"Cache-Control": "no-cache"}  # another start may come with other settings

    async def document(request: Request) -> Response:
        return Response(body, headers=fresh, media_type="application/json")

    async def docs(request: Request) -> Response:
        return Response(page.body, headers=fresh, media_type="text/html")

    return [
        Route("/openapi.json", document),
        Route("/docs", docs),
        Mount("/docs/assets", _Assets(packages=[("fastapi_swagger", "resources")])),
    ]
