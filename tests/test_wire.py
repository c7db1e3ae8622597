"""The messages between HTTP processes and workers."""

from array import array

import pytest

from service.wire import Answer, Delta, Logprobs, Step


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
        {"answers": [Answer(1, 0, "stop")]},
    ],
)  # fmt: skip
def test_a_step_has_ids_in_columns_and_what_is_more_than_ids(more):
    step = Step.of([Delta(5, [1, 2]), Delta(6, [3], **more), Delta(7, [], **more)])
    assert (step.sequences, step.counts, step.ids) == ([5, 6], [2, 1], array("I", [1, 2, 3]).tobytes())
    assert step.deltas == [Delta(6, [], **more), Delta(7, [], **more)]
