"""Log-probabilities travel and wait in columns of bytes."""

import random

import msgspec

from service.wire import Delta, Logprobs, Step
from tests.helpers import logprobs_of


def random_logprobs(r, count, k):
    numbers = [-r.expovariate(1) for _ in range(count * (k + 1))]
    return logprobs_of(numbers[:count], r.choices(range(2**32), k=count * k), numbers[count:])


def test_logprobs_are_taken_in_order_and_parts_are_copies():
    r = random.Random(0)
    for k in (0, 1, 5):
        all_rows, logprobs = [], Logprobs()
        for _ in range(20):
            more = random_logprobs(r, r.randrange(5), k)
            all_rows += more.rows()
            logprobs.extend(more)
        assert (len(logprobs), logprobs.num_alternatives) == (len(all_rows), k)
        assert list(logprobs.rows()) == all_rows
        assert list(logprobs.part(3, 9).rows()) == all_rows[3:9]
        taken = []
        while len(logprobs):
            part = logprobs.take(r.randrange(1, 9))
            taken += part.rows()
        assert taken == all_rows
    assert Logprobs().values is not Logprobs().values


def test_an_alternative_takes_12_bytes_on_the_way():
    logprobs = random_logprobs(random.Random(0), 1000, 65)
    frame = msgspec.msgpack.encode(Step.of([Delta(1, [0] * 1000, logprobs=logprobs)]))
    assert len(frame) < 1000 * (65 * 12 + 8 + 4) + 100
    received = msgspec.msgpack.decode(frame, type=Step).deltas[0].logprobs
    assert received == logprobs
    received.extend(logprobs)  # what arrives is added to
    assert len(received) == 2000
