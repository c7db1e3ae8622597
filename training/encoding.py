"""Texts that a command is given, as ids: what becomes of characters outside the vocabulary, and patterns.

The words and the rules are those of the service (service/http/encoding.py, service/http/patterns.py).
"""

from __future__ import annotations

import numpy as np

from service.constrain.automaton import Automaton
from service.constrain.regex import RegexError, compile_regex
from service.model.tokenizer import CharTokenizer, UnknownCharacterError
from training.config import ConfigError

UNKNOWN = ("refuse", "replace", "drop")
MAX_STOP_STATES = 256  # as of the service: each may cost time at each character


class Encoder:
    """Encodes texts, and counts the unknown characters that it replaced or dropped."""

    def __init__(self, tokenizer: CharTokenizer, policy: str = "refuse", replacement: str = " "):
        if len(replacement) != 1:
            raise ConfigError(f"--replacement-character must be a single character, got {replacement!r}")
        self.tokenizer, self.policy, self.replacement = tokenizer, policy, replacement
        self.num_unknown = 0  # replaced or dropped

    def encode_array(self, text: str) -> np.ndarray:
        """As `encode`, (T,)."""
        try:
            return self.tokenizer.encode_array(text)
        except UnknownCharacterError:
            return np.array(self.encode(text), np.int64)

    def encode(self, text: str) -> list[int]:
        """
        Raises:
            UnknownCharacterError: unknown characters are refused.
            ConfigError: they are to be replaced by a character that is unknown too.
        """
        try:
            return self.tokenizer.encode(text)
        except UnknownCharacterError:
            if self.policy == "refuse":
                raise
        if self.policy == "replace" and self.replacement not in self.tokenizer:
            raise ConfigError(f"--replacement-character {self.replacement!r} is not in the vocabulary")
        other = self.replacement if self.policy == "replace" else ""
        self.num_unknown += sum(c not in self.tokenizer for c in text)
        return self.tokenizer.encode("".join([c if c in self.tokenizer else other for c in text]))


def compile_pattern(flag: str, pattern: str, tokenizer: CharTokenizer) -> Automaton:
    """
    Raises:
        ConfigError: the pattern is invalid, too large, or nothing can match it.
    """
    try:
        if flag == "--stop-regex":
            automaton = compile_regex(pattern, tokenizer.characters, max_states=MAX_STOP_STATES)
        else:
            automaton = compile_regex(pattern, tokenizer.characters)
    except RegexError as error:
        raise ConfigError(f"{flag}: {error}") from None
    if flag == "--stop-regex" and automaton.accepting[0]:
        raise ConfigError(f"{flag}: must not match the empty text, got {pattern!r}")
    return automaton
