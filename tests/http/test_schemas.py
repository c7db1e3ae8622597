"""Sampling parameters are stated once: the HTTP schema and the frame follow from service/model/params.py."""

import msgspec
import pytest

from service.http.schemas import CompletionRequest, GenerateRequest, parse
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
