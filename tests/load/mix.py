"""The mixed requests of `make load` and of the chaos soak, and what their answers must hold.

A seed and its number determine a request, whoever sends it and when. Contains no networking.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from typing import Any

from tests.toolbox.http import pieces

LONGEST = 512  # characters of a prompt or a completion
MEDIAN_PROMPT, MEDIAN_COMPLETION = 32, 64
SPREAD = 1.0  # standard deviation of the logarithm of a length: one in 20 exceeds 5 times the median
OPINIONS, LEAVING, WHOLE = 0.05, 0.05, 0.2  # shares: /v1/score and /v1/next; clients that leave; not streamed
STOPPING = 0.1  # share of completions with a stop string, a line break
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "top_k": 40},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.0},
)


@dataclass(frozen=True)
class Ask:
    path: str
    body: dict[str, Any]
    leave_after: int | None = None  # characters after which the client disconnects in mid-stream

    @property
    def kind(self) -> str:
        if self.leave_after is not None:
            return "left"
        if "stream" not in self.body:
            return "opinion"
        return "stream" if self.body["stream"] else "whole"


def mixed(number: int, vocabulary: str, seed: int = 0) -> Ask:
    """Request `number` over the characters of `vocabulary`; completions go to both routes in equal parts."""
    chance = random.Random(f"{seed} {number}")

    def length(median: int) -> int:
        return min(LONGEST, max(1, round(median * math.exp(chance.gauss(0, SPREAD)))))

    prompt = "".join(chance.choices(vocabulary, k=length(MEDIAN_PROMPT)))
    share = chance.random()
    if share < OPINIONS:
        if chance.random() < 0.5:
            return Ask("/v1/next", {"prompt": prompt})
        return Ask("/v1/score", {"texts": (prompt * 2)[: max(2, len(prompt))]})  # one character cannot be scored
    leaves = share < OPINIONS + LEAVING
    body: dict[str, Any] = {
        "prompt": prompt, "max_tokens": LONGEST if leaves else length(MEDIAN_COMPLETION),
        "seed": chance.getrandbits(53), "stream": leaves or share >= OPINIONS + LEAVING + WHOLE,
        **chance.choice(SAMPLING),
    }  # fmt: skip
    if not leaves and "\n" in vocabulary and chance.random() < STOPPING:
        body["stop"] = "\n"
    path = chance.choice(("/generate", "/v1/completions"))
    if body["stream"] and path == "/v1/completions":
        body["stream_options"] = {"include_usage": True}
    return Ask(path, body, chance.randint(1, LONGEST // 8) if leaves else None)


def problem(ask: Ask, status: int, body: bytes, vocabulary: str) -> str:
    """What is wrong with a whole answer; "" if nothing is."""
    try:
        if status != 200:
            return f"status {status}: {json.loads(body)['error']['code']}"
        if ask.kind == "opinion":
            return problem_of_opinion(ask, json.loads(body)["data"], vocabulary)
        objects = pieces(body.decode().split("\n")) if ask.body["stream"] else [json.loads(body)]
        for each in objects:
            if "error" in each:
                return f"an error in the stream: {each['error']['code']}"
        choices = [choice for each in objects for choice in each.get("choices", [each] if "text" in each else [])]
        *reasons, reason = (choice["finish_reason"] for choice in choices)
        if any(reasons):
            return "an event after the finish reason"
        usage = next(each["usage"] for each in reversed(objects) if each.get("usage"))
        return problem_of_text(ask.body, "".join(choice["text"] for choice in choices), reason, usage, vocabulary)
    except (AssertionError, KeyError, StopIteration, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}: {body[:200]!r}"


def problem_of_text(asked: dict[str, Any], text: str, reason: str, usage: dict[str, int], vocabulary: str) -> str:
    most, stop = asked["max_tokens"], asked.get("stop")
    is_right = len(text) == most if reason == "length" else reason == "stop" and stop is not None and len(text) < most
    if not is_right:
        return f"{len(text)} characters with finish_reason {reason}, max_tokens {most}, stop {stop!r}"
    if stop is not None and stop in text:
        return f"the stop {stop!r} is in the text"
    if unknown := set(text) - set(vocabulary):
        return f"characters absent from the vocabulary: {sorted(unknown)}"
    counts = [usage[f"{name}_tokens"] for name in ("prompt", "completion", "total")]
    expected = [len(asked["prompt"]), len(text), len(asked["prompt"]) + len(text)]
    return "" if counts == expected else f"usage {counts}, not {expected}"


def problem_of_opinion(ask: Ask, data: list[dict[str, Any]], vocabulary: str) -> str:
    [found] = data
    if ask.path == "/v1/score":
        is_right = found["characters"] == len(ask.body["texts"]) - 1 and 0 <= found["nats"] < math.inf
        return "" if is_right else f"{found['characters']} characters of {found['nats']} nats"
    total = math.fsum(entry["probability"] for entry in found["distribution"])
    is_right = len(found["distribution"]) == len(vocabulary) and abs(total - 1) < 1e-3
    return "" if is_right else f"{len(found['distribution'])} characters of probability {total}"
