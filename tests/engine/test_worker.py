import pytest

from service.engine.host import DrainRate


def test_the_drain_rate_is_that_of_saturated_time():
    drain = DrainRate()
    assert drain.rate(0.0) is None
    drain.observe(0.0, 1, now=0.5)
    assert drain.rate(0.5) is None
    for i in range(1, 1001):  # turns of 0.1 s; other models have the time in between
        drain.observe(0.5 * i + 0.4, 1, now=0.5 * i + 0.5)
    now = 500.5
    assert drain.rate(now) == pytest.approx(2.0, rel=0.01)
    drain.pause()
    drain.observe(now + 20, 0, now=now + 20 + 256 / 2.0)  # nothing waited for 20 s
    now += 20 + 256 / 2.0
    assert drain.rate(now) == pytest.approx(1.0, rel=0.01)
    assert drain.rate(now + DrainRate.FORGET_SECONDS + 1) is None
