"""What a call of the runner takes, as a function of its size."""

from __future__ import annotations


class Cost:
    """The seconds of a call as a function of its size: fixed + each · size, fitted to recent calls.

    The fit is by weighted least squares; a call weighs half as much 16 calls later. If one call takes more than twice
    as long as expected, it counts as twice the expectation, because the machine probably did something else. If the
    sizes vary too little for the noise of the times, `fixed` is 0.
    """

    DECAY = 2 ** (-1 / 16)
    CLEAR = 0.05  # the slope is used if its standard error is at most this fraction of seconds ÷ size

    def __init__(self, each: float):
        self.fixed, self.each = 0.0, each  # a first guess
        self._sums = [0.0] * 6  # of weights w, and of w·n, w·n², w·t, w·n·t, w·t² over sizes n and seconds t
        self._last_ratio = 1.0

    def seconds(self, size: float) -> float:
        return self.fixed + self.each * size

    def size_for(self, seconds: float) -> int:
        """Return the size that takes `seconds`, but at least the size whose variable part takes as long as `fixed`."""
        return int(max(seconds - self.fixed, self.fixed) / self.each)

    def observe(self, size: float, seconds: float) -> None:
        ratio = seconds / self.seconds(size)
        if self._sums[0]:  # the first call has no expectation
            seconds *= min(1.0, max(2.0, self._last_ratio) / ratio) if ratio > 2.0 else 1.0
        self._last_ratio = ratio
        new = (1.0, size, size * size, seconds, size * seconds, seconds * seconds)
        w, n, nn, t, nt, tt = self._sums = [self.DECAY * a + b for a, b in zip(self._sums, new, strict=True)]
        n, nn, t, nt, tt = n / w, nn / w, t / w, nt / w, tt / w
        variance, each = nn - n * n, t / n
        if variance > 1e-3 * n * n:
            slope = (nt - n * t) / variance
            noise = tt - t * t - slope * (nt - n * t)
            if noise <= (self.CLEAR * each) ** 2 * variance * w:
                each = slope
        self.each = max(1e-9, 0.1 * t / n, min(each, t / n))  # a slope fitted to noise would mislead at other sizes
        self.fixed = max(0.0, t - self.each * n)
