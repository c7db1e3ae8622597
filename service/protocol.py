"""What requests, answers and errors look like on the wire.

Knows nothing of models or processes. Requests are pydantic models, so that every bound is stated once and
shown in /docs; answers are small enough to be built by hand.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAX_TEMPERATURE = 100.0  # both as in service.model.sampling, which would load torch
MAX_SEED = 2**64 - 1

_json = msgspec.json.encode

StopString = Annotated[str, Field(min_length=1, max_length=1000)]


class ApiError(Exception):
    """An answer that is an error, in OpenAI's body.

    https://platform.openai.com/docs/guides/error-codes
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: int | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_seconds = retry_after_seconds

    @property
    def type(self) -> str:
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    @property
    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return _json({"error": error})

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_seconds is None else {"Retry-After": str(self.retry_after_seconds)}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool = Field(False, description="end the stream with a chunk that holds the usage")


class GenerationRequest(BaseModel):
    """What the two generation routes have in common. Unknown fields are ignored, wrong ones refused."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    prompt: str | list[str] | list[int] | list[list[int]] = Field(
        "",
        description="text to continue, or a list of texts; ids are accepted too. "
        "An empty text stands for the beginning of a text: a line break that is not part of the answer",
        examples=["ROMEO:"],
    )
    model: str | None = Field(None, max_length=1000, description="name of the served model, as /v1/models gives it")
    max_tokens: int = Field(16, ge=1, description="most characters to generate; the server has an upper bound")
    temperature: float = Field(1.0, ge=0, le=MAX_TEMPERATURE, description="0: always the most likely character")
    top_k: int = Field(0, ge=-1, le=2**31 - 1, description="sample from the k likeliest characters; 0 or -1: from all")
    top_p: float = Field(
        1.0, gt=0, le=1, description="sample from the smallest set of likeliest characters with this probability"
    )
    seed: int | None = Field(None, ge=0, le=MAX_SEED, description="same seed, same text; drawn when absent")
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = Field(
        None, description="the text ends before the first of these"
    )
    stream: bool = Field(False, description="send the text as server-sent events while it is made")
    stream_options: StreamOptions | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or a list of ids."""
        match self.prompt:
            case str() | [int(), *_]:
                return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]


class GenerateRequest(GenerationRequest):
    """Body of POST /generate."""

    max_tokens: int = Field(256, ge=1, description="most characters to generate; the server has an upper bound")


# Fields of OpenAI's completions that would change the answer, and the values at which they do not.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1, None),
    "best_of": (1, None),
    "echo": (False, None),
    "logprobs": (None,),
    "suffix": ("", None),
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "logit_bias": ({}, None),
}


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions: https://platform.openai.com/docs/api-reference/completions/create."""

    model_config = ConfigDict(extra="allow")

    def model_post_init(self, context: Any) -> None:
        for name, value in (self.model_extra or {}).items():
            if name in NEUTRAL and value not in NEUTRAL[name]:
                raise ApiError(400, f"{name} is not supported, got {value!r}", param=name, code="unsupported_field")


Request = TypeVar("Request", bound=GenerationRequest)


def parse(kind: type[Request], body: bytes) -> Request:
    """The request in a JSON body.

    Raises:
        ApiError: 400, with the field, what was given and what is allowed.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        place, message, given = problem["loc"], problem["msg"], problem["input"]
        if problem["type"] == "json_invalid":
            raise ApiError(400, f"the body is not JSON: {message}", code="invalid_json") from None
        if place[:1] == ("prompt",):  # a union; pydantic tells of each of its branches
            place, message = ("prompt",), "Input should be a text, a list of texts, or one or more lists of ids"
        elif place[:1] == ("stop",):
            place, message = ("stop",), "Input should be a text or a list of at most 16, of 1 to 1000 characters each"
        param = ".".join(map(str, place)) or None
        shown = "" if place in (("prompt",), ("stop",)) else f", got {_shortened(given)}"
        raise ApiError(400, f"{param or 'body'}: {message}{shown}", param=param) from None


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "…"


class Usage(NamedTuple):
    prompt_tokens: int
    completion_tokens: int

    def json(self) -> bytes:
        return b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % (*self, sum(self))


class Answer:
    """One request's answer, whole or as server-sent events, in the native form.

    An event: `{"index", "text", "finish_reason", "seed"}`; the last one: `{"id", "model", "usage"}`.
    """

    DONE = b"data: [DONE]\n\n"

    def __init__(self, request_id: str, model: str, seeds: list[int], include_usage: bool):
        self.identity = b'"id":%b,"model":%b' % (_json(request_id), _json(model))
        self.seeds = seeds
        self.include_usage = include_usage

    def choice(self, index: int, text: str, finish_reason: str | None) -> bytes:
        """The JSON of a part of sequence `index`, or of all of it."""
        return b'{"index":%d,"text":%b,"finish_reason":%b,"seed":%d}' % (
            index,
            _json(text),
            _json(finish_reason),
            self.seeds[index],
        )

    def event(self, index: int, text: str, finish_reason: str | None) -> bytes:
        return b"data: %b\n\n" % self.choice(index, text, finish_reason)

    def last_event(self, usage: Usage) -> bytes:
        return b'data: {%b,"usage":%b}\n\n' % (self.identity, usage.json())

    def whole(self, choices: list[bytes], usage: Usage) -> bytes:
        return b'{%b,"choices":[%b],"usage":%b}' % (self.identity, b",".join(choices), usage.json())


class CompletionAnswer(Answer):
    """The form of OpenAI's completions; each choice also carries its seed."""

    def __init__(self, request_id: str, model: str, seeds: list[int], include_usage: bool):
        super().__init__(request_id, model, seeds, include_usage)
        self.identity = b'"id":%b,"object":"text_completion","created":%d,"model":%b' % (
            _json(f"cmpl-{request_id}"),
            int(time.time()),
            _json(model),
        )
        self._after_choice = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def choice(self, index: int, text: str, finish_reason: str | None) -> bytes:
        return b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":%b,"seed":%d}' % (
            index,
            _json(text),
            _json(finish_reason),
            self.seeds[index],
        )

    def event(self, index: int, text: str, finish_reason: str | None) -> bytes:
        choice = self.choice(index, text, finish_reason)
        return b'data: {%b,"choices":[%b%b' % (self.identity, choice, self._after_choice)

    def last_event(self, usage: Usage) -> bytes:
        if not self.include_usage:
            return b""
        return b'data: {%b,"choices":[],"usage":%b}\n\n' % (self.identity, usage.json())
