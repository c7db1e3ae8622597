"""The messages between HTTP processes and workers."""

from array import array

import msgspec
import pytest

from service.model.params import SamplingParams
from service.wire import Delta, Logprobs, Step, Submit, Submits, Tried, consumer_of, sequence_id


def test_the_id_of_a_sequence_is_unique_and_names_its_process():
    ids = {sequence_id(consumer, number): consumer for consumer in (0, 1, 5) for number in (0, 1, 6, 2**40)}
    assert len(ids) == 12
    assert all(consumer_of(id) == consumer for id, consumer in ids.items())


def test_sequences_of_a_request_are_sent_and_kept_once():
    """But for id, seed and prompt."""
    prompts, options = [[1, 2], [3]], {"stop": ((1, 2),), "constraint": b"automaton", "seen": (7,)}
    biases = ((3, 1.0),)
    submits = [
        Submit(id, prompts[id // 2], 5, SamplingParams(seed=10 + id, logit_bias=biases), **options) for id in range(4)
    ]
    message = Submits.of(submits)
    sent = msgspec.msgpack.encode(message)
    assert sent.count(b"automaton") == 1 and [it for *_, it in message.others] == [None, [3], None]
    arrived = [*msgspec.msgpack.decode(sent, type=Submits).each()]
    assert arrived == submits
    first, second, third, fourth = arrived
    assert first.prompt is second.prompt and third.prompt is fourth.prompt
    assert first.constraint is fourth.constraint and first.sampling.logit_bias is fourth.sampling.logit_bias


def test_what_differs_in_more_is_not_sent_together():
    one = Submit(1, [1], 5, SamplingParams(seed=1), constraint=b"automaton")
    assert one.shared == msgspec.structs.replace(one, id=2, prompt=[2], sampling=SamplingParams(seed=2)).shared
    for change in {"score_from": 1}, {"minimum": b"length"}, {"constraint": None}, {"masks": False}, {"max_tokens": 4}:
        assert one.shared != msgspec.structs.replace(one, **change).shared


@pytest.mark.parametrize("k", [0, 1, 3])
def test_log_probabilities_are_taken_in_parts(k):
    def of(ids):
        values = bytearray(array("d", [-id for id in ids]).tobytes())
        tops = [10 * id + i for id in ids for i in range(k)]
        return Logprobs(values, bytearray(array("I", tops).tobytes()), bytearray(array("d", tops).tobytes()))

    whole, rows = of(range(5)), list(of(range(5)).rows())
    assert (len(whole), whole.num_alternatives) == (5, k)
    assert rows[4] == (-4.0, [(40 + i, 40.0 + i) for i in range(k)])
    assert list(whole.part(2, 4).rows()) == rows[2:4]
    assert list(whole.take(2).rows()) == rows[:2] and list(whole.rows()) == rows[2:]
    whole.extend(of([7]))
    assert list(whole.rows()) == [*rows[2:], *of([7]).rows()]


@pytest.mark.parametrize(
    "more",
    [
        {"finish_reason": "stop"}, {"prefilled_at": 0.0}, {"logprobs": Logprobs()}, {"prompt_logprobs": Logprobs()},
        {"finish_reason": "stop", "tried": Tried(True, 1, 1, None)},
    ],
)  # fmt: skip
def test_a_step_has_ids_in_columns_and_what_is_more_than_ids(more):
    step = Step.of([Delta(5, [1, 2]), Delta(6, [3], **more), Delta(7, [], **more)])
    assert (step.sequences, step.counts, step.ids) == ([5, 6], [2, 1], array("I", [1, 2, 3]).tobytes())
    assert step.deltas == [Delta(6, [], **more), Delta(7, [], **more)]
