"""Reads the body of a request: pydantic parses the JSON and checks the fields.

It takes up to 40 ms for a body at its limits, in which nothing else runs. So a body has at most MAX_VALUES values.
"""

from __future__ import annotations

import numpy as np
from pydantic_core import from_json

from service.text.errors import InvalidRequestError
from service.text.reading import AnyRequest, parse

MAX_VALUES = 1 << 17  # numbers, texts, lists, objects and their names


def read(kind: type[AnyRequest], body: bytes) -> AnyRequest:
    """Return the request in a JSON body.

    Raises InvalidRequestError: it is not valid JSON or has too many values; otherwise as `parse`.
    """
    if len(body) > MAX_VALUES:
        _check_count(body)
    try:
        fields = from_json(body, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise InvalidRequestError(f"body is not valid JSON: {error}", code="invalid_json") from None
    return parse(kind, fields)


def _check_count(body: bytes) -> None:
    """Refuse a body of more than MAX_VALUES values before they are made. Raises InvalidRequestError."""
    signs = b",:[{"
    if sum(map(body.count, (signs[i : i + 1] for i in range(len(signs))))) < MAX_VALUES:
        return
    characters = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    is_outside = np.cumsum(characters == ord('"'), dtype=np.uint8) % 2 == 0  # of strings
    count = sum(int(np.count_nonzero(is_outside & (characters == sign))) for sign in signs)
    if count >= MAX_VALUES:
        message = f"body: at most {MAX_VALUES} values are allowed, names of objects included, got {count + 1} or more"
        raise InvalidRequestError(message)
