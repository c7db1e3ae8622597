"""Bodies are JSON as Python's own parser reads it, with fields as the document describes them."""

import itertools
import json

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic.json_schema import models_json_schema

from service.http.schema.reading import MAX_VALUES, read
from service.http.schema.requests import (
    AttentionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    NextRequest,
    ScoreRequest,
    TokenizeRequest,
)
from service.text.errors import InvalidRequestError

KINDS = (
    GenerateRequest, CompletionRequest, NextRequest, TokenizeRequest, DetokenizeRequest, ScoreRequest, AttentionRequest,
)  # fmt: skip


def code(kind, body):
    """The code of the error; "invalid": it has none; "": there is no error."""
    try:
        read(kind, body)
    except InvalidRequestError as error:
        assert len(error.message) < 3000
        return error.code or "invalid"
    return ""


# -- fields, by a validator of JSON Schema --

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from([2**31, 2**63, 2**64 - 1, 2**64, 0.0, 0.5, 1e300]),
    st.floats(-101, 101).filter(lambda number: not number.is_integer()), st.text(max_size=3),
    st.lists(st.text(max_size=2) | st.integers(0, 9), max_size=2), st.sampled_from([5.0, [5.0], [[1.0, 2.0]], 1e3]),
    st.dictionaries(st.text(max_size=1), st.integers(-101, 101), max_size=2),
    st.lists(st.tuples(st.sampled_from(["a", "é", "", 5]), st.floats(-101, 101)), min_size=1, max_size=2),
    st.dictionaries(st.sampled_from(["include_usage", "continuous_usage_stats"]), st.booleans()),
)  # fmt: skip


def validators():
    schemas = models_json_schema([(kind, "validation") for kind in KINDS])[1]
    return {
        kind: jsonschema.Draft202012Validator({"$ref": f"#/$defs/{kind.__name__}", "$defs": schemas["$defs"]})
        for kind in KINDS
    }


VALIDATORS = validators()


@settings(max_examples=300)
@given(kind=st.sampled_from(KINDS), data=st.data())
def test_a_field_is_accepted_as_its_schema_says(kind, data):
    """One field and what is required, so that no rule about several fields matters."""
    name = data.draw(st.sampled_from([*kind.model_fields]))
    needed = {"text": "a"} if kind is AttentionRequest else {"tokens": [1]} if kind is DetokenizeRequest else {}
    needed |= {"prompt": "a"} if kind is TokenizeRequest else {"texts": "a"} if kind is ScoreRequest else {}
    if name == "continuations":
        needed = {}
    fields = needed | {name: data.draw(VALUES)}
    body = json.dumps(fields, ensure_ascii=data.draw(st.booleans())).encode()
    is_valid = VALIDATORS[kind].is_valid(json.loads(body))
    found = code(kind, body)
    if not found:
        assert is_valid, fields
    elif is_valid:  # refused for what a schema cannot say: it needs another field, or excludes one
        with pytest.raises(
            InvalidRequestError, match="needs|either|cannot|must be at|list must have|name of a field|unknown field"
        ):
            read(kind, body)


def test_whole_numbers_may_be_written_as_floats():
    """They are integers in JSON Schema too."""
    fields = {
        "prompt": [[1, 2], [3]],
        "max_tokens": 1000,
        "seed": [5, 6],
        "n": 2,
        "temperature": 1,
        "stop_token_ids": [7],
    }
    as_floats = json.dumps(fields | {"max_tokens": 1.0}).replace("1.0", "1e3")
    for name in ("seed", "n", "prompt", "stop_token_ids"):
        as_floats = as_floats.replace(json.dumps(fields[name]), json.dumps(fields[name]).replace("5", "5.0"))
    as_floats = as_floats.replace("[[1, 2], [3]]", "[[1.0, 2], [3e0]]").replace('"n": 2', '"n": 2.0')
    request, expected = read(GenerateRequest, as_floats.encode()), read(GenerateRequest, json.dumps(fields).encode())
    assert request == expected
    assert {type(id) for prompt in request.prompt for id in prompt} == {int} == {type(request.n)}
    assert code(GenerateRequest, b'{"seed": 5.5}') == code(GenerateRequest, b'{"n": 1e300}') == "invalid"
    assert code(GenerateRequest, b'{"n": "5"}') == code(GenerateRequest, b'{"n": true}') == "invalid"


# -- JSON, by Python's own parser --

SPACE = st.sampled_from(["", "", " ", "\n\t "])
NAMES = ["a", "b", 'q"', "\\", "é", "🙂", ""]


@st.composite
def spelled(draw, names, depth=3):
    """JSON with names that may repeat, in any spelling."""
    if depth == 0 or draw(st.integers(0, 2)) == 0:
        return draw(
            st.sampled_from(
                ["1", "-0.5e3", "true", "null", '"a"', '"{"', '"a\\"b"', '"\\\\"', '"a\\": 1"', '"é"', "{}"]
            )
        )
    inner, gap = spelled(NAMES, depth - 1), draw(SPACE)
    if draw(st.booleans()):
        return f"[{gap}" + f"{gap},".join(draw(st.lists(inner, max_size=3))) + f"{gap}]"
    return draw(spelled_object(names, inner))


@st.composite
def spelled_object(draw, names, values):
    gap, parts = draw(SPACE), []
    for name in draw(st.lists(st.sampled_from(names), max_size=4)):
        shown = "".join(
            f"\\u{ord(c):04x}" if c < "\uffff" and draw(st.integers(0, 4)) == 0 else json.dumps(c)[1:-1] for c in name
        )
        parts.append(f'"{shown}"{gap}:{gap}{draw(values)}')
    return f"{{{gap}" + f"{gap},".join(parts) + f"{gap}}}"


@settings(max_examples=300)
@given(text=spelled_object(["user", "n", "echo"], spelled(NAMES)), data=st.data())
def test_a_body_is_json_if_python_reads_it(text, data):
    """Also with a character left out or changed. Of a repeated name, the last one counts."""
    if data.draw(st.booleans()):
        i = data.draw(st.integers(0, len(text) - 1))
        text = text[:i] + data.draw(st.sampled_from(["", "\0", "}", '"', ",", "\\", "1", "é"])) + text[i + 1 :]
    try:
        fields = json.loads(text)
    except ValueError:
        assert code(GenerateRequest, text.encode()) == "invalid_json"
        return
    without_pairs = text.replace("\\\\", "").replace(r"\ud83d\ude42", "")
    if r"\ud" in without_pairs:  # half of a surrogate pair, a character for Python
        return
    found, expected = code(GenerateRequest, text.encode()), code(GenerateRequest, json.dumps(fields).encode())
    assert found == expected != "invalid_json"
    if not found:
        assert read(GenerateRequest, text.encode()) == read(GenerateRequest, json.dumps(fields).encode())


@pytest.mark.parametrize("size", [10, 200_000])
def test_what_is_not_json_is_refused_with_its_place(size):
    before = b'{"user": "%b", "prompt": "a\xc3\xa9' % (b"x" * size)
    for bad in b"\\ud800", b"\xff", b"\x01", b"\\x", b'", "seed": NaN, "x": "', b'", "user": Infinity, "x": "':
        with pytest.raises(InvalidRequestError, match="^body is not valid JSON: .* at line 1 column [0-9]+$") as error:
            read(GenerateRequest, before + bad + b'"}')
        assert error.value.code == "invalid_json"
        place = int(error.value.message.rpartition("column ")[2])
        assert 0 <= place - len(before) <= 16


def test_nesting_of_any_depth_is_refused_or_ignored():
    names = itertools.cycle(["user", "n", "prompt", "stop", "stream_options", "structured_outputs", "messages"])
    for depth in (*[10, 100, 199, 300, 100_000] * 7, *range(190, 210)):
        name = next(names)
        for start, end in (b"[", b"]"), (b'{"a":', b"}"):
            code(GenerateRequest, b'{"%b": %b1%b}' % (name.encode(), start * depth, end * depth))


# -- the number of values --


def test_a_body_has_a_limited_number_of_values():
    """Signs within texts do not count, with whatever escapes."""
    most = MAX_VALUES - 10
    for value, count in ("5", 1), ("[]", 2), ("{}", 2), ('""', 1), ('"[,:{"', 1), (r'"\"\\,"', 1), (r'"\\"', 1):
        allowed = f'{{"user": [{",".join([value] * (most // count))}]}}'.encode()
        beyond = f'{{"user": [{",".join([value] * (MAX_VALUES // count + 1))}]}}'.encode()
        assert code(GenerateRequest, allowed) == ""
        with pytest.raises(
            InvalidRequestError, match=f"^body: at most {MAX_VALUES} values are allowed, names of objects included"
        ):
            read(GenerateRequest, beyond)
    deep = f'{{"user": [{",".join(["[" * 100 + "]" * 100] * (MAX_VALUES // 100))}]}}'.encode()
    assert code(GenerateRequest, deep) == "invalid"
    text = json.dumps({"prompt": '{"a": [1, 2]}\\"' * 300_000}).encode()
    assert len(read(GenerateRequest, text).prompt) == 4_500_000
