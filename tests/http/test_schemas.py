"""Sampling parameters are stated once: the HTTP schema and the frame follow from service/model/params.py."""

import msgspec
import pytest

from service.http.schemas import (
    FOREIGN_FIELDS,
    MAX_UNKNOWN_FIELDS,
    OTHER_NAMES,
    ApiError,
    CompletionRequest,
    GenerateRequest,
    parse,
)
from service.model.params import SAMPLING_META, SamplingParams
from service.wire import Submit

OWN_FORM = {"seed", "logit_bias"}  # a request has lists of seeds, and biases by character


def test_every_sampling_parameter_has_its_metadata():
    assert set(SamplingParams.__struct_fields__) - OWN_FORM == SAMPLING_META.keys()


@pytest.mark.parametrize("request_class", [GenerateRequest, CompletionRequest])
@pytest.mark.parametrize("name", SAMPLING_META)
def test_request_field_has_the_bounds_default_and_description_of_its_parameter(request_class, name):
    meta, default = SAMPLING_META[name], getattr(SamplingParams(), name)
    schema = request_class.model_json_schema()["properties"][name]
    field = schema["anyOf"][0]
    assert (schema["default"], schema["description"]) == (default, meta.description)
    assert field.get("minimum", field.get("exclusiveMinimum")) == (meta.gt if meta.ge is None else meta.ge)
    assert field["maximum"] == meta.le


@pytest.mark.parametrize("name", SAMPLING_META)
def test_request_field_reaches_the_worker(name):
    value = SAMPLING_META[name].examples[0]
    body = parse(GenerateRequest, msgspec.json.encode({"prompt": "a", name: value}))
    sampling = body.sampling(((3, 1.5),))
    assert sampling == SamplingParams(**{name: value}, logit_bias=((3, 1.5),))
    submit = Submit(1, [0], 1, sampling)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(submit), type=Submit) == submit


def test_fields_of_other_apis_are_ignored_or_their_name_here_is_given():
    assert not (FOREIGN_FIELDS | OTHER_NAMES.keys()) & CompletionRequest.model_fields.keys()
    fields = sorted(FOREIGN_FIELDS)
    for start in range(0, len(fields), MAX_UNKNOWN_FIELDS):
        some = fields[start : start + MAX_UNKNOWN_FIELDS]
        body = parse(CompletionRequest, msgspec.json.encode({"prompt": "a"} | dict.fromkeys(some, 1)))
        assert body.ignored_fields == some
    for name, meant in OTHER_NAMES.items():
        with pytest.raises(ApiError, match=f"{name}: unknown field; did you mean {meant}\\?"):
            parse(CompletionRequest, msgspec.json.encode({name: 1}))
    both = parse(CompletionRequest, b'{"max_tokens": 5, "max_completion_tokens": 5}')
    assert (both.max_tokens, both.ignored_fields) == (5, ["max_completion_tokens"])
