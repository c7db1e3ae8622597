"""Makes a request of its fields, or says which one is wrong."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from service.model.params import MAX_SEED
from service.text import requests as r
from service.text.errors import InvalidRequestError, invalid
from service.words import shortened

AnyRequest = TypeVar("AnyRequest", bound=r.TextRequest)

# The expected value of a union or a list, instead of one pydantic message for each branch.
EXPECTED = {
    "prompt": "a text, a list of texts, or one or more lists of ids",
    "stop": f"a text or a list of at most {r.MAX_STOPS}, of 1 to 1000 characters each",
    "seed": f"an integer from 0 to {MAX_SEED}, or a list with one per prompt",
    "logit_bias": "an object of biases (-100 to 100) by character or id, or a list of [character or id, bias] pairs",
    "texts": "a text or a list of texts",
    "stop_token_ids": f"a list of at most {r.MAX_STOPS} ids",
    "allowed_token_ids": f"a list of 1 to {r.MAX_BIASES} ids",
    "bad_words": f"a list of at most {r.MAX_BAD_WORDS} texts of 1 to 100 characters each",
}


def parse(kind: type[AnyRequest], fields: Any) -> AnyRequest:
    """Return the request that has these fields.

    Raises InvalidRequestError, with the field, the value given and the values allowed.
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
        raise InvalidRequestError(f"{param or 'body'}: {message}, got {shortened(given)}", param) from None
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
