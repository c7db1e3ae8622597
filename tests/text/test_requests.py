"""Requests in text, without HTTP."""

import copy

import pytest
from pydantic import ValidationError

from service import BUNDLED
from service.model.checkpoint import Checkpoint
from service.text.encoding import Encoder
from service.text.generation import plan
from service.text.limits import Limits
from service.text.model import TextModel
from service.text.requests import GenerationRequest
from service.text.work import run


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["To be", "or not"], "n": 2, "stop": ["."], "logit_bias": {"a": 1.0}, "bad_words": ["the"]},
        {"prompt": "To be", "suffix": "or not", "best_of": 4},
        {"prompt": [1, 2, 3], "regex": "[a-z]+", "exact": True, "seed": [7]},
    ],
    ids=str,
)
def test_a_plan_leaves_its_request_as_it_is(fields):
    model = TextModel.of(Checkpoint.read(BUNDLED))
    request = GenerationRequest(**copy.deepcopy(fields))
    before = request.model_copy(deep=True)
    plans = []
    for _ in range(2):
        limits = Limits()
        plans.append(run(plan(model, request, limits, Encoder(limits, model, request), lambda: 5)))
        assert request == before
    assert plans[0].submits == plans[1].submits
    with pytest.raises(ValidationError, match="frozen"):
        request.prompt = []
