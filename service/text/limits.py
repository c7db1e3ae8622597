"""The limits of requests. A server sets them; in Python, there are none but those of memory."""

from __future__ import annotations

from dataclasses import dataclass

from service.text.requests import MAX_ID, MAX_SEQUENCES, UnknownCharacters


@dataclass(frozen=True)
class Limits:
    """The names are those of a server's settings (settings.py), which describes them."""

    max_prompts: int = MAX_SEQUENCES
    max_prompt_characters: int = MAX_ID
    max_tokens: int = MAX_ID
    max_score_texts: int = MAX_ID
    max_candidates: int = 10_000
    max_candidate_characters: int = 1_000_000
    unknown_characters: UnknownCharacters = "refuse"
    replacement_character: str | None = None
