"""The error of a pattern that cannot be compiled."""

from __future__ import annotations


class RegexError(ValueError):
    """A pattern or a list of choices cannot be compiled."""

    def __init__(self, message: str, offset: int | None = None):
        super().__init__(message if offset is None else f"offset {offset}: {message}")
        self.offset = offset  # position of the fault in the pattern, in characters
