"""Validates responses, independent of transport.

Every function raises Wrong if a response does not match its request.
"""

from __future__ import annotations

import json
import math
from typing import Any

from tests.toolbox.http import DONE, event_data

from .mix import Ask

EVENT_END = b"\n\n"
SHOWN = 200  # characters of a response quoted in a message


class Wrong(Exception):
    """A response does not match its request; the message says how."""


def check_status(status: int, body: bytes) -> None:
    if status != 200:
        try:
            code = json.loads(body)["error"]["code"]
        except (ValueError, KeyError, TypeError):
            code = body[:SHOWN].decode(errors="replace")
        raise Wrong(f"status {status}: {code}")


def parsed(data: bytes) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except ValueError:
        raise Wrong(f"not JSON: {data[:SHOWN]!r}") from None
    if not isinstance(content, dict):
        raise Wrong(f"not an object: {data[:SHOWN]!r}")
    return content


class Stream:
    """Validates the events of one stream incrementally."""

    def __init__(self, ask: Ask, vocabulary: str):
        self.ask, self.vocabulary = ask, vocabulary
        self.text = ""
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] | None = None
        self.is_done = False

    def take(self, event: bytes) -> int:
        """Process an event; returns its number of characters."""
        try:
            data = event_data(event)
        except ValueError:
            raise Wrong(f"not an event: {event[:SHOWN]!r}") from None
        if data is None:  # a keep-alive comment
            return 0
        if self.is_done:
            raise Wrong(f"an event after [DONE]: {event[:SHOWN]!r}")
        if data == DONE.encode():
            self.is_done = True
            return 0
        content = parsed(data)
        if "error" in content:
            raise Wrong(f"an error in the stream: {content['error'].get('code')}")
        if content.get("usage") is not None:
            self.usage = content["usage"]
        choices = content.get("choices", [content] if "text" in content else [])
        for choice in choices:
            if self.finish_reason is not None:
                raise Wrong(f"an event after the finish reason: {event[:SHOWN]!r}")
            self.text += choice["text"]
            self.finish_reason = choice["finish_reason"]
        return sum(len(choice["text"]) for choice in choices)

    def end(self) -> None:
        """Check the complete stream."""
        if not self.is_done:
            raise Wrong("the stream ended without [DONE]")
        check_text(self.ask, self.text, self.finish_reason, self.usage, self.vocabulary)


def check_text(ask: Ask, text: str, finish_reason: str | None, usage: dict[str, Any] | None, vocabulary: str) -> None:
    most, stop = ask.body["max_tokens"], ask.body.get("stop")
    if finish_reason == "length":
        if len(text) != most:
            raise Wrong(f"{len(text)} characters with finish_reason length, max_tokens is {most}")
    elif finish_reason == "stop" and stop is not None:
        if len(text) >= most:
            raise Wrong(f"{len(text)} characters before a stop, max_tokens is {most}")
    else:
        raise Wrong(f"finish_reason {finish_reason}, with stop {stop!r}")
    if stop is not None and stop in text:
        raise Wrong(f"the stop {stop!r} is in the text")
    if unknown := set(text) - set(vocabulary):
        raise Wrong(f"characters absent from the vocabulary: {sorted(unknown)}")
    expected = {
        "prompt_tokens": ask.prompt_characters,
        "completion_tokens": len(text),
        "total_tokens": ask.prompt_characters + len(text),
    }
    if usage != expected:
        raise Wrong(f"usage {usage}, not {expected}")


def check_whole(ask: Ask, body: bytes, vocabulary: str) -> tuple[int, str]:
    """(characters, finish reason) of a response that is not streamed."""
    content = parsed(body)
    match content:
        case {"choices": [{"text": str(text), "finish_reason": finish_reason, "seed": seed}]}:
            check_text(ask, text, finish_reason, content.get("usage"), vocabulary)
        case _:
            raise Wrong(f"not one choice: {body[:SHOWN]!r}")
    if seed != ask.body["seed"]:
        raise Wrong(f"seed {seed}, not {ask.body['seed']}")
    return len(text), finish_reason


def check_opinion(ask: Ask, body: bytes, vocabulary: str) -> int:
    """Characters generated for a response of /v1/score (none) or /v1/next (one)."""
    match ask.path, parsed(body).get("data"):
        case "/v1/score", [{"characters": int(count), "nats": float(nats)}]:
            if count != ask.prompt_characters - 1 or not 0 <= nats < math.inf:
                raise Wrong(f"{count} characters of {nats} nats, asked for {ask.prompt_characters - 1}")
            return 0
        case "/v1/next", [{"distribution": [*entries]}]:
            total = math.fsum(entry["probability"] for entry in entries)
            if len(entries) != len(vocabulary) or abs(total - 1) > 1e-3:
                raise Wrong(f"{len(entries)} characters of probability {total}, there are {len(vocabulary)}")
            return 1
    raise Wrong(f"not a response of {ask.path}: {body[:SHOWN]!r}")
