import pytest

from service.engine.host import DrainRate


def test_the_drain_rate_is_that_of_saturated_time():
    drain = DrainRate()
    assert drain.rate(0.0) is None
    drain.observe(0.5, 1, now=0.0)
    assert drain.rate(0.0) is None
    for _ in range(1000):
        drain.observe(0.5, 1, now=0.0)
    assert drain.rate(0.0) == pytest.approx(2.0, rel=0.01)
    drain.observe(256 / 2.0, 0, now=0.0)
    assert drain.rate(0.0) == pytest.approx(1.0, rel=0.01)
    assert drain.rate(DrainRate.FORGET_SECONDS + 1) is None
