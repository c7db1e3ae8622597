"""Sampling parameters are stated once: the HTTP schema and the frame follow from service/model/params.py."""

import itertools
import json

import msgspec
import pytest

from service.http.schema.reading import read
from service.http.schema.requests import CompletionRequest, GenerateRequest
from service.model.params import SAMPLING_META, SamplingParams
from service.text.errors import InvalidRequestError
from service.text.foreign import FOREIGN_FIELDS, MAX_UNKNOWN_FIELDS, OTHER_NAMES, REFUSED_FIELDS
from service.wire import Submit


@pytest.mark.parametrize("name", SAMPLING_META)
def test_request_field_reaches_the_worker(name):
    value = SAMPLING_META[name].examples[0]
    body = read(GenerateRequest, msgspec.json.encode({"prompt": "a", name: value}))
    sampling = body.sampling(((3, 1.5),))
    assert sampling == SamplingParams(**{name: value}, logit_bias=((3, 1.5),))
    submit = Submit(1, [0], 1, sampling)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(submit), type=Submit) == submit


def test_fields_of_other_apis_are_ignored_or_their_name_here_is_given():
    assert not (FOREIGN_FIELDS | OTHER_NAMES.keys()) & CompletionRequest.model_fields.keys()
    fields = sorted(FOREIGN_FIELDS)
    for start in range(0, len(fields), MAX_UNKNOWN_FIELDS):
        some = fields[start : start + MAX_UNKNOWN_FIELDS]
        body = read(CompletionRequest, msgspec.json.encode({"prompt": "a"} | dict.fromkeys(some, 1)))
        assert body.ignored_fields == some
    for name, meant in OTHER_NAMES.items():
        with pytest.raises(InvalidRequestError, match=f"{name}: unknown field; did you mean {meant}\\?"):
            read(CompletionRequest, msgspec.json.encode({name: 1}))
    both = read(CompletionRequest, b'{"max_tokens": 5, "max_completion_tokens": 5}')
    assert (both.max_tokens, both.ignored_fields) == (5, ["max_completion_tokens"])


def test_a_field_that_would_change_the_answer_is_refused_by_name():
    for kind, name in itertools.product((GenerateRequest, CompletionRequest), sorted(REFUSED_FIELDS)):
        value = False if name in ("do_sample", "detokenize") else {} if "json" in name else {"type": "json_object"}
        for body in ({"prompt": "a", name: value}, {"prompt": "a" * 70_000, name: value}):
            with pytest.raises(InvalidRequestError) as error:
                read(kind, json.dumps(body).encode())
            assert (error.value.param, error.value.code) == (name, "unsupported_field")
            assert error.value.message.endswith(REFUSED_FIELDS[name])


@pytest.mark.parametrize(
    "fields",
    [{"do_sample": True}, {"detokenize": True}, {"response_format": {"type": "text"}}, {"length_penalty": 1.0},
     {"use_beam_search": False}, {"truncation_side": "left"},
      {"messages": []}, {"guided_json": None}, {"no_repeat_ngram_size": 0}],
)  # fmt: skip
def test_values_that_change_nothing_are_ignored_by_name(fields):
    assert read(GenerateRequest, json.dumps({"prompt": "a"} | fields).encode()).ignored_fields == list(fields)


def test_structured_outputs_are_regex_and_choice():
    for given in ({"regex": "[0-9]+"}, {"choice": ["a", "b"], "json": None}):
        request = read(CompletionRequest, json.dumps({"prompt": "a", "structured_outputs": given}).encode())
        assert {name: getattr(request, name) for name, value in given.items() if value}.items() <= given.items()
        assert request.ignored_fields == []
    for given in ({"json": {}}, {"json": {"type": "object"}}, {"regex": "a", "choice": ["a"]}, {}, "x"):
        with pytest.raises(InvalidRequestError) as error:
            read(CompletionRequest, json.dumps({"prompt": "a", "structured_outputs": given}).encode())
        assert error.value.param == "structured_outputs"
    with pytest.raises(InvalidRequestError):
        read(GenerateRequest, b'{"prompt": "a", "regex": "b", "structured_outputs": {"regex": "a"}}')
