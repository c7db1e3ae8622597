"""The requests of a load test: a sequence fixed by its seed, independent of who sends it and when.

Depends on the routes and their parameters and on the model's vocabulary; contains no networking.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

SPREAD = 1.0  # standard deviation of the logarithm of a length: one in 20 exceeds 5 times the median
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "top_k": 40},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.0},
)
STOP = "\n"
STOPPING = 0.1  # share of completions with a stop string, a line break


@dataclass(frozen=True)
class Ask:
    """One request."""

    number: int
    path: str
    body: dict[str, Any]
    prompt_characters: int
    leave_after: int | None = None  # characters after which the client disconnects in mid-stream

    @property
    def shape(self) -> str:
        if self.path in ("/v1/score", "/v1/next"):
            return "opinion"
        return "stream" if self.body["stream"] else "whole"

    @property
    def name(self) -> str:
        """Name of this kind of request in reports."""
        if self.leave_after is not None:
            return f"{self.path} left"
        return self.path if self.shape == "opinion" else f"{self.path} {self.shape}"


@dataclass(frozen=True)
class Mix:
    """Requests of mixed kinds and lengths, over the characters of `vocabulary`.

    Lengths in characters are log-normal around their medians, at most `longest`. Shares are of all requests; the rest
    are streams. Completions go to /generate and /v1/completions in equal parts.

    Raises:
        ValueError: a length or a share is out of bounds.
    """

    vocabulary: str
    seed: int = 0
    median_prompt: int = 32
    median_completion: int = 64
    longest: int = 512
    whole: float = 0.2  # share of responses not streamed
    leaving: float = 0.05  # share of clients that disconnect in mid-stream, from completions of `longest` characters
    opinions: float = 0.05  # share of /v1/score and /v1/next

    def __post_init__(self) -> None:
        for name in ("median_prompt", "median_completion"):
            if not 1 <= getattr(self, name) <= self.longest:
                raise ValueError(f"{name} must be in [1, {self.longest}], got {getattr(self, name)}")
        shares = {name: getattr(self, name) for name in ("whole", "leaving", "opinions")}
        if min(shares.values()) < 0 or sum(shares.values()) > 1:
            raise ValueError(f"shares must be at least 0 and sum to at most 1, got {shares}")

    def ask(self, number: int) -> Ask:
        """The request with this number."""
        chance = random.Random(f"{self.seed} {number}")
        prompt = "".join(chance.choices(self.vocabulary, k=self._length(chance, self.median_prompt)))
        kind = chance.random()
        if kind < self.opinions:
            if chance.random() < 0.5:
                return Ask(number, "/v1/next", {"prompt": prompt}, len(prompt))
            text = (prompt * 2)[: max(2, len(prompt))]  # a single character cannot be scored
            return Ask(number, "/v1/score", {"texts": text}, len(text))
        is_leaving = kind < self.opinions + self.leaving
        stream = is_leaving or kind >= self.opinions + self.leaving + self.whole
        body: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": self.longest if is_leaving else self._length(chance, self.median_completion),
            "seed": chance.getrandbits(53),
            "stream": stream,
            **chance.choice(SAMPLING),
        }
        if not is_leaving and STOP in self.vocabulary and chance.random() < STOPPING:
            body["stop"] = STOP
        path = chance.choice(("/generate", "/v1/completions"))
        if stream and path == "/v1/completions":
            body["stream_options"] = {"include_usage": True}
        leave_after = chance.randint(1, max(1, self.longest // 8)) if is_leaving else None
        return Ask(number, path, body, len(prompt), leave_after)

    def _length(self, chance: random.Random, median: int) -> int:
        return min(self.longest, max(1, round(median * math.exp(chance.gauss(0, SPREAD)))))
