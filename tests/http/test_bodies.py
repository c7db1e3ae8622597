"""Bodies mean what pydantic's own parser says; large ones, decoded in another way, what small ones do."""

import asyncio
import itertools
import json
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from service.http.connection.errors import ApiError
from service.http.schema import reading
from service.http.schema.reading import LARGE_BODY_BYTES, LARGE_FIELD_BYTES, BodyReader, decode, read, read_large
from service.http.schema.requests import (
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    NextRequest,
    ScoreRequest,
    TokenizeRequest,
)
from service.model.params import SAMPLING_META
from service.settings import Settings
from tests.helpers import web

SETTINGS = Settings(max_prompts=10_000, max_prompt_characters=1_000_000)
LOOP = asyncio.new_event_loop()


def large(kind, body, settings=SETTINGS):
    return LOOP.run_until_complete(read_large(kind, body, settings))


def outcome(parser, kind, body):
    try:
        request = parser(kind, body)
    except ApiError as error:
        return re.sub("(, not [0-9]+)?(, got .*)?$", "", error.message, flags=re.DOTALL), error.param, error.code
    return request.model_dump(), request.model_fields_set, request.ignored_fields


KINDS = (GenerateRequest, CompletionRequest, NextRequest, TokenizeRequest, DetokenizeRequest, ScoreRequest)
IDS, TEXTS = [3] * 2100, ["abc"] * 700  # a little more than LARGE_FIELD_BYTES
ODD = (-1, True, 1.0, 2**31, 10**400, "a", None, {}, [1], 5)
LARGE = [  # each for each field of each request
    IDS, TEXTS, [IDS, IDS[:5], []], *([*some, odd] for some in (IDS, TEXTS, [IDS]) for odd in ODD), [[[]] * 1500],
    {str(i): i for i in range(700)}, {str(i): 1 for i in range(10_001)}, {"include_usage": True, "a": IDS},
    [[i, -1.5] for i in range(500)], [["ab", 1]] * 500, "5" * 5000, "漢\n" * 1500, ["a" * 1000] * 16,
    ["a" * 1000] * 17, ["a" * 1001] * 16, [""] * 1500, [2**64] * 300, [*TEXTS, "a" * 1001],
]  # fmt: skip
BODIES = [
    (GenerateRequest, {"prompt": TEXTS, "seed": list(range(700))}),
    (GenerateRequest, {"prompt": TEXTS, "seed": list(range(699))}),
    (GenerateRequest, {"prompt": [IDS, IDS], "seed": [1, 2], "stop": ["a" * 1000] * 16}),
    (GenerateRequest, {"prompt": list(range(200_000))}),
    (GenerateRequest, {"prompt": [*range(100_000), "1,2"]}),
    (DetokenizeRequest, {"tokens": [*range(100_000), [1, 2]]}),
    (GenerateRequest, {"logit_bias": {str(i): 1 for i in range(50_000)}}),
    (GenerateRequest, {"choice": ["ab" * 400] * 1000}),
    (CompletionRequest, {"prompt": IDS, "min_tokens": 17}),
    (ScoreRequest, {"texts": TEXTS, "continuations": TEXTS}),
    (ScoreRequest, {"prefix": "a" * 9000, "continuations": TEXTS, "characters": False}),
    (GenerateRequest, {"user": "a", "prompt": IDS, "é": 1}),
    (GenerateRequest, {"prompt": IDS, "a`\n`": 1}),
    (GenerateRequest, {"prompt": IDS, "x" * 65: 1}),
    (GenerateRequest, {"z": 1, "prompt": IDS, "x" * 64: 1, "user": {"prompt": 1}, "y-$.": None}),
    (GenerateRequest, {"prompt": IDS, "max_token": 5}),
    (GenerateRequest, {"prompt": IDS, "max_new_tokens": 5, "max_tokens": 5}),
    (GenerateRequest, {"prompt": IDS} | {f"u{i}": i for i in range(17)}),
    (GenerateRequest, {"stream_options": {"x": "a" * 9000, "include_usages": True}, "user": 1}),
]
RAW = [
    b'{ "prompt" : [\n[1 ,' + b" " * 9000 + b"2\n] , [ 3 ] ] }",
    b'{"prompt": [' + b" " * 9000 + b'"a"]}',
    b'{"prompt": "a", "prompt": [' + b"1," * 5000 + b"2]}",
    b'{"prompt": [' + b"1," * 5000 + b'2], "prompt": "a"}',
    b'{"user": {"a": {"b": 1, "b": 1}}, "prompt": [' + b"1," * 5000 + b"2]}",
    b'{"prompt": "\\ud83d\\ude42' + b"\\u00e9" * 3000 + b'"}',
]


INVALID = [  # refused alike, in other words
    b'{"prompt": ' + b"[" * 100_000,
    b'{"prompt": [' + b"1," * 5000 + b"]}",
    b'{"unknown": "' + b"\xff" * 5000 + b'"}',
    b'{"prompt": "' + b"a" * 5000,
    b"[" + b"1," * 5000 + b"1]",
    b'{"n": 1' + b"0" * 100_000 + b"}",
]


@pytest.mark.parametrize(
    ("kind", "body"), [*BODIES, *((GenerateRequest, it) for it in RAW + INVALID)], ids=lambda it: str(it)[:60]
)
def test_a_large_body_means_what_a_small_one_does(kind, body):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    assert len(content) > LARGE_FIELD_BYTES
    found, expected = outcome(large, kind, content), outcome(read, kind, content)
    if body in INVALID:
        assert found[1:] == expected[1:] and len(found[0]) < 200
    else:
        assert found == expected


def test_every_large_value_of_every_field_means_what_it_does_in_a_small_body():
    """A field that several kinds share is given to the first of them."""
    encoded, seen = [json.dumps(value) for value in LARGE], set()
    assert all(len(it) > LARGE_FIELD_BYTES for it in encoded)
    fields = [(kind, *it) for kind in KINDS for it in (*kind.model_fields.items(), ("unknown", None))]
    for kind, name, field in fields:
        if (name, repr(field)) in seen:
            continue
        seen.add((name, repr(field)))
        for value in encoded:
            content = f'{{"{name}": {value}}}'.encode()
            found, expected = outcome(large, kind, content), outcome(read, kind, content)
            if isinstance(expected[0], str):  # of several errors either is the first one
                (_, param, code), (_, its_param, its_code) = found, expected
                found, expected = ((param or "").split(".")[0], code), ((its_param or "").split(".")[0], its_code)
            assert found == expected, (kind, name, value[:60])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([0] * 200_000, "prompt: at most 100000 characters, got 200000"),
        ([[0], [0] * 200_000], "prompt.1: at most 100000 characters, got 200000"),
        (["a"] * 5000, "prompt: sequences per request (prompts × n or best_of) must be in [1, 128], got 5000"),
        ([[0]] * 5000, "prompt: sequences per request (prompts × n or best_of) must be in [1, 128], got 5000"),
    ],
)
def test_prompts_are_counted_before_they_are_decoded(server, prompt, message):
    body = {"prompt": prompt, "suffix": "a" * LARGE_BODY_BYTES}
    read = large(GenerateRequest, json.dumps({"prompt": prompt}).encode(), Settings()).prompts
    assert len(read) == (1 if isinstance(prompt[0], int) else len(prompt))
    assert not any(isinstance(it, list) and any(it) for it in read)  # zeros, for the handler to refuse
    error = web.post(f"{server.url}/generate", json=body).json()["error"]
    assert (error["message"], error["param"]) == (message, "prompt")


@pytest.mark.anyio
async def test_of_each_client_one_large_body_waits_for_its_turn():
    reader, done = BodyReader(Settings()), []

    async def read(client):
        await reader.read(GenerateRequest, json.dumps({"prompt": "a" * 100_000}).encode(), client)
        done.append(client)

    await asyncio.gather(*map(read, "aaaaab"))
    assert done.index("b") <= 1
    assert len(done) == 6 and not reader._lock._locks


# -- what a body means, by parsers written elsewhere --

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from([2**31, 2**63, 2**64 - 1, 2**64, 0.0, 0.5, 1e300]),
    st.floats(-101, 101), st.text(max_size=3), st.lists(st.text(max_size=2) | st.integers(0, 9), max_size=2),
    st.dictionaries(st.text(max_size=1), st.integers(-101, 101), max_size=2),
    st.lists(st.tuples(st.sampled_from(["a", "é", "", 5]), st.floats(-101, 101)), min_size=1, max_size=2),
    st.dictionaries(st.sampled_from(["include_usage", "continuous_usage_stats"]), st.booleans()),
)  # fmt: skip


def by_pydantic(kind, body):
    """As pydantic reads JSON, with its own parser."""
    ignored = []
    try:
        request = kind.model_validate_json(body, context=ignored)
    except ValidationError as error:
        return str(error.errors()[0]["loc"][0])
    except ApiError as error:
        return (error.param or "").split(".")[0]
    return request.model_dump(), request.model_fields_set, ignored


@settings(max_examples=250)
@given(kind=st.sampled_from(KINDS), data=st.data())
def test_a_body_means_what_pydantic_says(kind, data):
    names = st.sampled_from([*kind.model_fields, "user"])
    fields = data.draw(st.dictionaries(names, VALUES, max_size=6))
    if data.draw(st.booleans()):
        fields.pop("stream_options", None)
    found = outcome(read, kind, content := json.dumps(fields, ensure_ascii=data.draw(st.booleans())).encode())
    expected = by_pydantic(kind, content)
    assert ((found[1] or "").split(".")[0] if isinstance(found[0], str) else found) == expected


def test_numbers_at_the_edge_of_their_types_are_as_pydantic_reads_them():
    for name in ("seed", "n", "temperature", "priority", "logit_bias", "user", "stop_token_ids"):
        for number in (*map(str, (2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63) - 1, 10**400)), "1e400", "-0", "1.0"):
            for value in (number, f"[{number}]", f'{{"a": {number}}}'):
                content = f'{{"{name}": {value}}}'.encode()
                found = outcome(read, GenerateRequest, content)
                expected = by_pydantic(GenerateRequest, content)
                assert ((found[1] or "").split(".")[0] if isinstance(found[0], str) else found) == expected, content


# -- what JSON leaves open --

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


def has_repeated_name(text):
    """By Python's own parser."""
    found = []

    def look(pairs):
        found.append(len({name for name, _ in pairs}) < len(pairs))
        return {}

    json.loads(text, object_pairs_hook=look)
    return any(found)


def code(parser, *arguments):
    try:
        parser(*arguments)
    except ApiError as error:
        return error.code
    return None


FOREIGN = ["user", "metadata", "store", "vllm_xargs", "tools"]  # ignored, whatever their value


@given(spelled(NAMES))
def test_a_repeated_name_is_refused_at_any_depth(text):
    assert (code(decode, text.encode()) == "duplicate_field") == has_repeated_name(text)


@given(spelled_object(FOREIGN, spelled(NAMES)))
def test_a_repeated_name_is_refused_in_small_and_large_bodies(text):
    expected = "duplicate_field" if has_repeated_name(text) else None
    assert code(read, GenerateRequest, text.encode()) == code(large, GenerateRequest, text.encode()) == expected


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"prompt": "a", "max_tokens": 1, "max_tokens": 9}', "max_tokens"),
        (b'{"prompt": "a", "prompt": "a"}', "prompt"),
        (b'{"prompt": "a", "\\u0070rompt": "b"}', "prompt"),
        (b'{"stream": true, "stream_options": {"include_usage": true, "include_usage": false}}', "include_usage"),
        (b'{"logit_bias": {"a": 1, "b": 1, "a": 1}}', "a"),
        (b'{"user": [{"x": [{"y": 1, "y": 2}]}]}', "y"),
    ],
)
def test_a_repeated_name_is_named(body, name):
    for parser in (read, large):
        with pytest.raises(ApiError) as error:
            parser(GenerateRequest, body)
        assert (error.value.status, error.value.param, error.value.code) == (400, name, "duplicate_field")
        assert error.value.message == f"{name}: given twice in one object, may be given once"
    long = b'{"%b": 1, "%b": 1}' % (b"\\n" * 1000, b"\\n" * 1000)
    for parser in (read, large):
        with pytest.raises(ApiError) as error:
            parser(GenerateRequest, long)
        assert error.value.code in ("duplicate_field", "unknown_field") and len(error.value.message) < 250


def test_what_is_no_number_of_json_is_refused():
    for number, value, name in itertools.product(
        ("NaN", "Infinity", "-Infinity"), ("{}", "[{}]", '{{"a": {}}}'), ("user", "temperature", "logit_bias", "prompt")
    ):
        content = f'{{"{name}": {value.format(number)}}}'.encode()
        shown = number.removeprefix("-")
        for parser in (read, large):
            with pytest.raises(ApiError) as error:
                parser(GenerateRequest, content)
            assert error.value.code == "invalid_json", content
            place = f"{shown} at byte {content.index(shown.encode())}"
            assert error.value.message == f"body is not valid JSON: {place} is not a number of JSON"


def test_nesting_of_any_depth_is_refused_or_ignored():
    names = itertools.cycle(["user", "n", "prompt", "stop", "stream_options", "structured_outputs", "messages"])
    for depth in (*[10, 100, 199, 300, 100_000] * 7, *range(800, 1000)):
        name = next(names)
        for start, end in (b"[", b"]"), (b'{"a":', b"}"):
            content = b'{"%b": %b1%b}' % (name.encode(), start * depth, end * depth)
            for parser in (read, large):
                outcome(parser, GenerateRequest, content)  # raises nothing but ApiError


@pytest.mark.parametrize("size", [10, 70_000])
def test_the_place_of_an_error_is_that_in_the_body(size):
    before = b'{"user": "%b", "prompt": "a\xc3\xa9' % (b"x" * size)
    parser = large if size > LARGE_BODY_BYTES else read
    for bad, reason in (b"\\ud800", "is a lone surrogate"), (b"\xff", "can't decode byte 0xff"), (b"\x01", "invalid"):
        with pytest.raises(ApiError) as error:
            parser(GenerateRequest, before + bad + b'"}')
        assert reason in error.value.message and error.value.code == "invalid_json"
        (place,) = map(int, re.findall("(?:at byte|position|[(]byte) ([0-9]+)", error.value.message))
        assert place - len(before) in (0, 1)


# -- plain requests --

PLAIN_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from([2**31, 2**63, 2**64 - 1, 2**64, 0.0, 0.5]),
    st.floats(-101, 101), st.text(max_size=3), st.lists(st.text(max_size=2), max_size=2),
)  # fmt: skip


@pytest.mark.parametrize("kind", [GenerateRequest, CompletionRequest])
@given(fields=st.dictionaries(st.sampled_from(sorted(reading._PLAIN)), PLAIN_VALUES, max_size=6), unknown=st.booleans())
def test_a_plain_request_means_what_pydantic_says(kind, fields, unknown):
    check_plain(kind, {"max_tokens": 3} | fields | ({"user": "x"} if unknown else {}))


def test_a_plain_request_has_no_more_min_tokens_than_max_tokens():
    for fields in ({"max_tokens": 3}, {"min_tokens": 4, "max_tokens": 4}):
        assert reading._plain(GenerateRequest, {"prompt": "a"} | fields) is not None
    assert reading._plain(GenerateRequest, {"prompt": "a", "min_tokens": 4, "max_tokens": 3}) is None


def check_plain(kind, fields):
    fields = decode(json.dumps(fields).encode())
    plain = reading._plain(kind, fields)
    if plain is None:
        return
    request = reading.parse(kind, fields)
    for name in (*kind.model_fields, "stops", "prompts", "ignored_fields", "has_max_tokens"):
        assert getattr(plain, name) == getattr(request, name), name
    assert plain.sampling((), 5) == request.sampling((), 5)


@pytest.mark.parametrize("kind", [GenerateRequest, CompletionRequest])
def test_a_plain_request_has_the_bounds_of_pydantic(kind):
    for name, meta in SAMPLING_META.items():
        for bound in (it for it in (meta.ge, meta.gt, meta.le) if it is not None):
            for value in (bound, bound - 1, bound + 1, math.nextafter(bound, -math.inf), math.nextafter(bound, 1e9)):
                check_plain(kind, {"prompt": "a", name: value})


@pytest.mark.parametrize("kind", [GenerateRequest, CompletionRequest])
def test_ordinary_requests_are_plain(kind):
    def is_plain(fields):
        return reading._plain(kind, {"prompt": "a", "max_tokens": 5} | fields) is not None

    plain = {}, {"temperature": 0.8, "top_k": 20, "seed": 1}, {"stream": True, "stop": "\n", "n": 2, "top_p": 1}
    others = {"regex": "a"}, {"n": 0}, {"stop": ["a"]}, {"min_tokens": 6}, {"temperature": None}, {"max_token": 5}
    assert all(map(is_plain, plain)) and not any(map(is_plain, others))
