"""The messages between HTTP processes and workers."""

from array import array

import msgspec
import pytest

from service.model.params import SamplingParams
from service.wire import Delta, Logprobs, Step, Submit, Tried, consumer_of, sequence_id, share


def test_the_id_of_a_sequence_is_unique_and_names_its_process():
    ids = {sequence_id(consumer, number): consumer for consumer in (0, 1, 5) for number in (0, 1, 6, 2**40)}
    assert len(ids) == 12
    assert all(consumer_of(id) == consumer for id, consumer in ids.items())


def test_only_equal_parts_of_two_sequences_are_shared():
    def arrived(number):
        sampling = SamplingParams(logit_bias=((3, float(number)),))
        sent = Submit(1, [1], 1, sampling, stop=((1, 2),), constraint=b"automaton", minimum=bytes([number]), seen=[7])
        return msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Submit)

    first, equal, other = arrived(1), arrived(1), arrived(2)
    for request in (equal, other):
        share(request, first)
        assert request.stop is first.stop and request.constraint is first.constraint and request.seen is first.seen
    assert equal == arrived(1) and other == arrived(2)
    assert equal.minimum is first.minimum and equal.sampling.logit_bias is first.sampling.logit_bias


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
