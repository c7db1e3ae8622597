"""The limits of requests. A server has its own; in Python, there are none but those of memory."""

from __future__ import annotations

from dataclasses import dataclass

from service.text.requests import MAX_ID, MAX_SEQUENCES, UnknownCharacters


@dataclass(frozen=True)
class Limits:
    """max_candidates and max_candidate_characters: of an exact answer."""

    max_prompts: int = MAX_SEQUENCES  # sequences of a request: prompts × n or best_of
    max_prompt_characters: int = MAX_ID
    max_tokens: int = MAX_ID
    max_score_texts: int = MAX_ID
    max_candidates: int = 10_000
    max_candidate_characters: int = 1_000_000
    unknown_characters: UnknownCharacters = "refuse"
