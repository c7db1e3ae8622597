"""The results of sequences, in text."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple, TypeVar

import msgspec

from service.wire import Logprobs, Submit


class Piece(msgspec.Struct, frozen=True, gc=False):
    """New text of one sequence, or all of it."""

    number: int
    seed: int
    text: str
    finish_reason: Any = None  # a FinishReason or None
    logprobs: Logprobs | None = None  # of the text's characters after the first `num_unscored`, if requested
    num_unscored: int = 0  # characters without a predecessor: the first of an echoed prompt
    is_exact: bool = False


def piece_of(
    number: int,
    submit: Submit,
    text: str,
    finish_reason: Any,
    logprobs: Logprobs | None = None,
    echo: str = "",
    prompt_logprobs: Logprobs | None = None,
) -> Piece:
    """Return new text of a sequence. echo: the text of the prompt, which precedes the first character."""
    num_unscored = 0
    logprobs = None if submit.logprobs is None else logprobs or Logprobs()
    if echo and finish_reason != "abort":  # an aborted prompt may lack rows
        text = echo + text
        if logprobs is not None:
            of_prompt = prompt_logprobs or Logprobs()
            of_prompt.extend(logprobs)
            # The first character, unless a hidden one precedes it.
            logprobs, num_unscored = of_prompt, len(echo) - len(submit.prompt) + 1
    return Piece(number, submit.sampling.seed, text, finish_reason, logprobs, num_unscored)


class Ran(NamedTuple):
    """The results of sequences that have ended."""

    pieces: list[Piece]  # by number; one that was aborted before it began may lack
    prompt_logprobs: list[Logprobs]  # of each sequence's prompt, from `score_from` on


Answer = TypeVar("Answer")

# Yields sequences to run to their end, and gets their results. Yields None where it may pause. Returns the answer.
Stages = Generator[list[Submit] | None, Any, Answer]
