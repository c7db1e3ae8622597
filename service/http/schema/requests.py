"""The bodies of requests: the fields of a request in text, and those that only a server has."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from service.text import requests as t
from service.text.errors import invalid
from service.text.requests import Body, GenerationRequest, TextRequest, field


class ServerRequest(TextRequest):
    """Fields that only a server has."""

    model: str | None = field(None, "chargpt", max_length=1000)
    """name of the served model, as /v1/models gives it"""
    priority: int = field(0, 10, ge=-1000, le=1000)
    """a client's requests in the queue start in order of priority, lowest number first, then of arrival"""
    timeout_seconds: float | None = field(None, 30, gt=0, le=86_400)
    """time limit for waiting and running together; the server's own limit applies if it is lower"""
    strict: bool | None = field(None, True)
    """refuse the request if it has unknown fields; otherwise they are ignored, and named in the header
    X-Ignored-Fields"""


class StreamOptions(Body):
    """Options for the usage in a stream."""

    path: ClassVar[str] = "stream_options."

    include_usage: bool = field(False, True)
    """end a stream of /v1/completions with a usage chunk; /generate always does"""
    continuous_usage_stats: bool = field(False, True)
    """report the usage so far in every event; of /v1/completions only with `include_usage`"""


_DEFAULT_STREAM_OPTIONS = StreamOptions.model_validate({})


class StreamedRequest(GenerationRequest, ServerRequest):
    """Fields of the two routes that continue a text."""

    stream: bool = field(False, True)
    """send the text as server-sent events while it is generated"""
    stream_options: StreamOptions = Field(
        default_factory=lambda: _DEFAULT_STREAM_OPTIONS, examples=[{"include_usage": True}]
    )
    """how a stream reports usage; only with `stream`"""
    stream_interval: float | None = field(None, 0.1, ge=0, le=60)
    """seconds for which characters gather between two events of a stream; the first is sent at once. Default: the
    server's setting"""

    @model_validator(mode="after")
    def _stream_agrees(self) -> StreamedRequest:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise invalid("stream_options", "needs stream")
        if self.best_of is not None and self.best_of > self.n and self.stream and not self.suffix:
            raise invalid("best_of", f"cannot be streamed if greater than n ({self.n}), got {self.best_of}")
        return self


class GenerateRequest(StreamedRequest):
    """Body of POST /generate."""

    max_tokens: int = field(t.MAX_TOKENS, 80, ge=0)
    """maximum number of characters to generate. The default is lowered to the server's limit"""


class CompletionRequest(StreamedRequest):
    """Body of POST /v1/completions: https://platform.openai.com/docs/api-reference/completions/create."""


class ScoreRequest(t.ScoreRequest, ServerRequest):
    """Body of POST /v1/score: `texts`, or `continuations` of a `prefix`."""


class NextRequest(t.NextRequest, ServerRequest):
    """Body of POST /v1/next."""


class AttentionRequest(t.AttentionRequest, ServerRequest):
    """Body of POST /v1/attention."""


class TokenizeRequest(t.TokenizeRequest, ServerRequest):
    """Body of POST /tokenize."""


class DetokenizeRequest(t.DetokenizeRequest, ServerRequest):
    """Body of POST /detokenize."""
