"""Errors that requests are answered with, in OpenAI's body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from pydantic import Field
from typing_extensions import TypedDict  # pydantic needs this before Python 3.12

from service.text.errors import InvalidRequestError

ErrorType = Literal["invalid_request_error", "authentication_error", "rate_limit_error", "server_error"]


class ErrorDetails(TypedDict):
    message: Annotated[str, Field(description="the field, what was given and what is allowed, in words")]
    type: ErrorType
    param: Annotated[str | None, Field(description="the field of the request, dotted if it is nested")]
    code: Annotated[str | None, Field(description="what went wrong, for programs")]


class Error(TypedDict):
    """The body of every error, as in OpenAI's API."""

    error: ErrorDetails


class ApiError(Exception):
    """An error to answer with, in OpenAI's body: https://platform.openai.com/docs/guides/error-codes."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: int | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = {"Cache-Control": "no-store", **(headers or {})}
        if status == 504 or code == "worker_lost":  # openai's SDKs would repeat it twice, which costs as much each time
            self.headers["X-Should-Retry"] = "false"
        if retry_after_seconds is not None:
            self.headers["Retry-After"] = str(retry_after_seconds)

    @classmethod
    def of(cls, error: InvalidRequestError) -> ApiError:
        return cls(400, error.message, param=error.param, code=error.code)

    @property
    def type(self) -> ErrorType:
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    @property
    def body(self) -> bytes:
        error: Error = {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
        return msgspec.json.encode(error)


class RefusedRequest(Exception):
    """A refusal of the connection before any route, with the answer and the reason in metrics."""

    def __init__(self, error: ApiError, reason: str):
        self.error, self.reason = error, reason
