"""Errors of requests: what was given, where, and what is allowed."""

from __future__ import annotations


class InvalidRequestError(Exception):
    """The request cannot be answered as it is. Not a ValueError, because pydantic would catch that.

    param: its field, dotted if it is nested; None: no single one. code: for programs.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message, self.param, self.code = message, param, code


def invalid(param: str, message: str, code: str | None = None) -> InvalidRequestError:
    """Return the error for an invalid field of the request."""
    return InvalidRequestError(f"{param}: {message}", param, code)
