"""Unknown fields of a body: ignored by name, refused by name, or likely to be a typo."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Collection
from typing import Any

from service.text.errors import InvalidRequestError, invalid
from service.words import shortened

MAX_UNKNOWN_FIELDS = 16
# Name of an unknown field: printable ASCII that fits in a header's list.
FIELD_NAME = re.compile(r"[!#-+\--\[\]-~]{1,64}")

# Fields of OpenAI's and vLLM's completions that change no text. They are never treated as typos.
FOREIGN_FIELDS = frozenset(
    (
        # OpenAI
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "parallel_tool_calls", "tools", "tool_choice", "top_logprobs", "modalities", "verbosity", "reasoning_effort",
        # vLLM
        "add_special_tokens", "kv_transfer_params", "request_id", "return_token_strs",
        "skip_special_tokens", "spaces_between_special_tokens", "vllm_xargs",
    )
)  # fmt: skip
# Fields of other APIs that would change the answer -> advice. They are refused unless the value changes nothing.
REFUSED_FIELDS: dict[str, str] = {
    name: remedy
    for names, remedy in {
        "guided_json guided_grammar grammar json_schema ebnf structural_tag response_format": "give the form of the "
        "answer as regex or choice",
        "use_beam_search num_beams num_beam_groups beam_width length_penalty early_stopping": "no beam search: use "
        "best_of",
        "mirostat mirostat_mode mirostat_tau mirostat_eta tfs_z top_a top_n_sigma xtc_probability xtc_threshold "
        "dynatemp_range dynatemp_exponent smoothing_factor epsilon_cutoff eta_cutoff samplers": "use top_p, min_p or "
        "typical_p",
        "no_repeat_ngram_size encoder_repetition_penalty repetition_detection penalty_alpha dry_multiplier dry_base "
        "dry_allowed_length dry_penalty_last_n dry_sequence_breakers": "use repetition_penalty, presence_penalty or "
        "frequency_penalty",
        "bad_words_ids suppress_tokens banned_tokens": "use bad_words or logit_bias",
        "sampling_params parameters options": "give its fields themselves",
        "truncation_side": "truncate_prompt_tokens keeps the last characters",
        "do_sample": "for the likeliest characters say temperature 0",
        "detokenize": "an answer is always text",
        "logits_processors": "no code of clients runs here",
        "messages": "there is no chat: give prompt",
        "prompt_embeds": "a prompt is text or ids",
        "prompt_logprobs": "use echo with logprobs, or /v1/score",
        "logprob_token_ids": "use logprobs, or /v1/next, which reports every character",
        "return_tokens_as_token_ids return_token_ids": "/tokenize gives the ids of a text",
        "cache_salt": "give each user an API key, as prompts are reused within a key alone",
        "infill": "with suffix, the likeliest answers are given",
        "mask_rest": "ask for the missing answers without exact",
    }.items()
    for name in names.split()
}
# The values with which these change nothing.
_NEUTRAL: dict[str, Any] = {
    "do_sample": True, "detokenize": True, "length_penalty": 1, "num_beams": 1, "num_beam_groups": 1,
    "response_format": {"type": "text"}, "truncation_side": "left", "encoder_repetition_penalty": 1,
    "infill": "best",
}  # fmt: skip
# Names of a field in other APIs. They are refused unless the field itself is given too.
OTHER_NAMES = {
    "max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens", "max_length": "max_tokens",
    "n_predict": "max_tokens", "num_predict": "max_tokens", "max_gen_toks": "max_tokens",
    "min_new_tokens": "min_tokens", "guided_regex": "regex", "guided_choice": "choice", "stop_sequences": "stop",
    "until": "stop", "num_return_sequences": "n", "repeat_penalty": "repetition_penalty", "inputs": "prompt",
    "input": "prompt", "input_ids": "prompt", "text": "prompt", "query": "prompt", "contents": "prompt",
    "max_output_tokens": "max_tokens", "stopping_strings": "stop", "logits_bias": "logit_bias",
}  # fmt: skip


def generation_fields(data: dict[str, Any]) -> dict[str, Any]:
    """A generation's fields, with vLLM's `structured_outputs` in the place of ours that mean exactly the same.

    Raises InvalidRequestError: one would change the answer, and has no counterpart.
    """
    given = data.get("structured_outputs")
    if given is not None:
        kinds = {name: value for name, value in given.items() if value} if isinstance(given, dict) else {}
        if len(kinds) != 1 or not kinds.keys() <= {"regex", "choice"} or kinds.keys() & data.keys():
            message = f"must be an object with either regex or choice, got {shortened(given)}"
            raise invalid("structured_outputs", message, "unsupported_field")
        data = {name: value for name, value in data.items() if name != "structured_outputs"} | kinds
    for name in [name for name in data if name in REFUSED_FIELDS]:
        value, neutral = data[name], _NEUTRAL.get(name)
        # Of a schema, {} is any JSON. prompt_logprobs 0 reports something too.
        is_given = bool(value) or (value == {} and "json" in name) or (value == 0 and name == "prompt_logprobs")
        if value is False if neutral is True else is_given and value != neutral:
            message = "not supported here, and not ignored, as it would change the answer; "
            raise invalid(name, message + REFUSED_FIELDS[name], "unsupported_field")
    return data


def check_unknown(path: str, unknown: list[str], known: tuple[str, ...], given: Collection[str]) -> None:
    """
    path: before the names, in errors; given: the names of all fields with a value.

    Raises InvalidRequestError: there are too many, one's name is invalid, or one is likely to mean a known field.
    """
    where = path or "body"
    for name in unknown[: MAX_UNKNOWN_FIELDS + 1]:
        if not FIELD_NAME.fullmatch(name):
            message = (
                f"{shortened(name)} is not the name of a field: 1 to 64 printable ASCII characters, without blanks"
            )
            raise InvalidRequestError(f"{where}: {message}", code="unknown_field")
        meant = _meant(known, name)
        if meant and not (name in OTHER_NAMES and meant[0] in given):
            raise invalid(path + name, f"unknown field; did you mean {' or '.join(meant)}?", "unknown_field")
    if len(unknown) > MAX_UNKNOWN_FIELDS:
        message = f"at most {MAX_UNKNOWN_FIELDS} unknown fields are ignored, got more"
        raise InvalidRequestError(f"{where}: {message}", code="unknown_field")


@functools.lru_cache(maxsize=1024)
def _meant(known: tuple[str, ...], name: str) -> list[str]:
    """Return the known fields that the user is likely to mean."""
    if name in FOREIGN_FIELDS or name in REFUSED_FIELDS or name == "structured_outputs":
        return []
    if OTHER_NAMES.get(name) in known:
        return [OTHER_NAMES[name]]
    usual = name.lower().replace("-", "_")
    return [usual] if usual in known else difflib.get_close_matches(usual, known, cutoff=0.8)
