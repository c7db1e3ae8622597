"""Reads the body of a request: pydantic parses the JSON and checks the fields.

It takes up to 40 ms for a body at its limits, in which nothing else runs. So a body has at most MAX_VALUES values.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json

from service.http.connection.errors import ApiError, invalid, shortened
from service.http.schema import requests as b
from service.model.params import MAX_SEED

AnyRequest = TypeVar("AnyRequest", bound=b.ModelRequest)

MAX_VALUES = 1 << 17  # numbers, texts, lists, objects and their names

# The expected value of a union or a list, instead of one pydantic message for each branch.
EXPECTED = {
    "prompt": "a text, a list of texts, or one or more lists of ids",
    "stop": f"a text or a list of at most {b.MAX_STOPS}, of 1 to 1000 characters each",
    "seed": f"an integer from 0 to {MAX_SEED}, or a list with one per prompt",
    "logit_bias": "an object of biases (-100 to 100) by character or id, or a list of [character or id, bias] pairs",
    "texts": "a text or a list of texts",
    "stop_token_ids": f"a list of at most {b.MAX_STOPS} ids",
    "allowed_token_ids": f"a list of 1 to {b.MAX_BIASES} ids",
    "bad_words": f"a list of at most {b.MAX_BAD_WORDS} texts of 1 to 100 characters each",
}


def read(kind: type[AnyRequest], body: bytes) -> AnyRequest:
    """Return the request in a JSON body.

    Raises ApiError: 400, it is not valid JSON or has too many values; otherwise as `parse`.
    """
    if len(body) > MAX_VALUES:
        _check_count(body)
    try:
        fields = from_json(body, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise ApiError(400, f"body is not valid JSON: {error}", code="invalid_json") from None
    return parse(kind, fields)


def _check_count(body: bytes) -> None:
    """Refuse a body of more than MAX_VALUES values before they are made. Raises ApiError: 400."""
    signs = b",:[{"
    if sum(map(body.count, (signs[i : i + 1] for i in range(len(signs))))) < MAX_VALUES:
        return
    characters = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    is_outside = np.cumsum(characters == ord('"'), dtype=np.uint8) % 2 == 0  # of strings
    count = sum(int(np.count_nonzero(is_outside & (characters == sign))) for sign in signs)
    if count >= MAX_VALUES:
        message = f"body: at most {MAX_VALUES} values are allowed, names of objects included, got {count + 1} or more"
        raise ApiError(400, message)


def parse(kind: type[AnyRequest], fields: Any) -> AnyRequest:
    """Return the request that has these fields.

    Raises ApiError: 400, with the field, the value given and the values allowed.
    """
    ignored: list[str] = []
    try:
        request = kind.model_validate(fields, context=ignored)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        if any(map(_is_whole, problems)):
            return parse(kind, _with_integers(fields))
        place, message, given = problems[0]["loc"], problems[0]["msg"], problems[0]["input"]
        if place and place[0] in EXPECTED:
            name = str(place[0])
            raise invalid(name, f"Input should be {EXPECTED[name]}") from None
        param = ".".join(map(str, place)) or None
        raise ApiError(400, f"{param or 'body'}: {message}, got {shortened(given)}", param=param) from None
    request._ignored = ignored
    return request


def _is_whole(problem: ErrorDetails) -> bool:
    """True if an integer was written as 5.0 or 1e3, which is one in JSON Schema too."""
    given = problem["input"]
    return problem["type"] == "int_type" and isinstance(given, float) and given.is_integer()


def _with_integers(value: Any) -> Any:
    """Return a value with an integer in place of each float without a fraction."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    if isinstance(value, dict):
        return {name: _with_integers(item) for name, item in value.items()}
    return value
