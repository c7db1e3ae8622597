from types import SimpleNamespace

import pytest

from service.engine.admission import Admission, DrainRate
from service.engine.backends import open_runner
from service.engine.engine import Engine
from service.engine.worker import EngineLoop
from service.model.params import SamplingParams
from service.wire import Submit, Submits
from tests.helpers import random_model


def test_the_drain_rate_is_that_of_saturated_time():
    drain = DrainRate()
    assert drain.rate(0.0) is None
    drain.observe(0.0, 1, now=0.5)
    assert drain.rate(0.5) is None
    for i in range(1, 1001):  # turns of 0.1 s, 0.4 s apart
        drain.observe(0.5 * i + 0.4, 1, now=0.5 * i + 0.5)
    now = 500.5
    assert drain.rate(now) == pytest.approx(2.0, rel=0.01)
    drain.pause()
    drain.observe(now + 20, 0, now=now + 20 + 256 / 2.0)  # nothing waited for 20 s
    now += 20 + 256 / 2.0
    assert drain.rate(now) == pytest.approx(1.0, rel=0.01)
    assert drain.rate(now + DrainRate.FORGET_SECONDS + 1) is None


def test_a_sequence_that_cannot_be_queued_ends_alone(caplog):
    """Whatever is wrong with it: the worker and what else runs in it go on."""
    engine, frames = Engine(open_runner(random_model(), slots=2)), []
    admission = Admission(engine, 60)
    sockets = SimpleNamespace(send=lambda frame, consumer: frames.append((frame, consumer)))
    loop = EngineLoop()
    loop._handle(
        admission, sockets, Submits(Submit(7, [1], 3, SamplingParams(), stop_pattern=b"not an automaton"), []), 1
    )
    [(frame, consumer)] = frames
    assert consumer == 1 and [(delta.id, delta.finish_reason) for delta in frame.deltas] == [(7, "error")]
    assert "a sequence could not be queued" in caplog.text
    loop._handle(admission, sockets, Submits(Submit(8, [1], 3, SamplingParams()), []), 1)
    ended = [delta.id for _ in range(5) for delta in engine.step() if delta.finish_reason is not None]
    assert ended == [8] and len(frames) == 1
