"""A request to continue texts: its checks, and the sequences that it runs.

`plan` says what to run. `answers` gives the rest of the way for best_of and infill, which choose among candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from service.model.params import MAX_SEED
from service.text.candidates import best_of, infill
from service.text.conditions import Conditions
from service.text.encoding import MAX_SHORT, Encoder, begun, check_ids
from service.text.errors import invalid
from service.text.exact import Bounds
from service.text.limits import Limits
from service.text.model import TextModel
from service.text.pieces import Piece, Stages
from service.text.requests import GenerationRequest, Prompt
from service.text.work import Work
from service.wire import Submit
from service.words import shortened

SUFFIX_CANDIDATES = 8  # candidates per prompt, unless the request or a limit says otherwise


class Plan(NamedTuple):
    """The sequences of a request, without the request's texts."""

    n: int
    seeds: list[int]  # one per prompt
    submits: list[Submit]
    candidates: int  # sequences per prompt
    suffix: list[int]  # as far as the model can see
    echo: list[str] | None  # the prompt of each sequence, if the answer begins with it
    num_prompt_characters: int
    reports_logprobs: bool
    bounds: Bounds | None  # of exact answers; the sequences are then those of `Exact`

    @property
    def chooses(self) -> bool:
        """True if the answers are chosen among candidates, so that none is known before all have ended."""
        return bool(self.suffix) or self.candidates > self.n


def plan(
    model: TextModel,
    request: GenerationRequest,
    limits: Limits,
    encoder: Encoder,
    make_seed: Callable[[], int],
    hold: Callable[[int], None] = lambda num_ids: None,
    allowance: int | None = None,
) -> Work[Plan]:
    """Return what a request runs. It keeps none of the request's texts.

    make_seed: gives a seed for a request without one. hold: called with the number of ids, before a text that is not
    short is encoded. allowance: most characters that may run for exact answers, or None.

    Raises InvalidRequestError: a field is beyond the limits or the model, or no text meets the conditions.
    """
    is_list, prompts = request.prompts is request.prompt, _truncated(request, limits)
    count = len(prompts)
    candidates = _count_candidates(request, limits, count)
    max_tokens = _check_lengths(request, limits, model)
    num_given = sum(map(len, prompts)) + len(request.suffix or "")
    conditions = Conditions(model, request, max_tokens, bool(request.suffix))
    if count > 1 or num_given > MAX_SHORT or conditions.are_given:  # it takes memory, or waits for a pattern
        hold(num_given)
    ids = yield from encoder.encode_prompts(prompts, is_list)
    suffix: list[int] = []
    if request.suffix:
        suffix = (yield from encoder.encode(request.suffix, "suffix"))[: model.receptive_field]
        if not suffix:
            raise invalid("suffix", "none of its characters is in the vocabulary")
    seeds = request.seed
    if not isinstance(seeds, list):
        seeds = [make_seed() if seeds is None else seeds for _ in ids]

    shared = _shared(model, request, max_tokens, seeds[0], candidates)
    if conditions.are_given:
        yield from conditions.constrain(shared)
    num_prompt_characters = sum(map(len, ids))
    bounds = None
    if request.exact:
        bounds, candidates = _bounds(request, limits, max_tokens, ids, allowance), 1
    submits = _submits(model, request, shared, ids, seeds, candidates)
    yield from conditions.begin_records(submits)
    echo = None
    if request.echo:
        echo = []
        for prompt in ids:
            echo += [(yield from encoder.decode(prompt))] * candidates
    return Plan(
        request.n, seeds, submits, candidates, suffix, echo, num_prompt_characters, request.logprobs is not None, bounds
    )


def answers(model: TextModel, plan: Plan) -> Stages[list[Piece]]:
    """Run the sequences of a plan that chooses among candidates, and return the answers."""
    if plan.suffix:
        return infill(model, plan.submits, plan.n, plan.candidates, plan.suffix, plan.echo)
    return best_of(plan.submits, plan.n, plan.candidates, plan.echo, plan.reports_logprobs)


def _truncated(request: GenerationRequest, limits: Limits) -> list[Prompt]:
    """Return the prompts, cut to truncate_prompt_tokens."""
    if (longest := request.truncate_prompt_tokens) is None:
        return request.prompts
    longest = limits.max_prompt_characters if longest < 0 else longest
    return [prompt[max(0, len(prompt) - longest) :] for prompt in request.prompts]


def _count_candidates(request: GenerationRequest, limits: Limits, count: int) -> int:
    """Return the number of sequences per prompt, of `count` prompts."""
    candidates = request.n if request.best_of is None else request.best_of
    if request.best_of is None and request.suffix:
        candidates = max(request.n, min(SUFFIX_CANDIDATES, limits.max_prompts // max(1, count)))
    if not 1 <= count * candidates <= limits.max_prompts:
        param = "prompt" if candidates == 1 else "n" if request.best_of is None else "best_of"
        given = f"{count}" if candidates == 1 else f"{count} × {candidates}"
        message = f"sequences per request (prompts × n or best_of) must be in [1, {limits.max_prompts}], got {given}"
        raise invalid(param, message)
    return candidates


def _check_lengths(request: GenerationRequest, limits: Limits, model: TextModel) -> int:
    """Return the maximum number of characters of an answer."""
    max_tokens = request.max_tokens if request.has_max_tokens else min(request.max_tokens, limits.max_tokens)
    for param, value in ("max_tokens", max_tokens), ("min_tokens", request.min_tokens):
        if value > limits.max_tokens:
            raise invalid(param, f"at most {limits.max_tokens}, got {value}")
    if request.logprobs is not None and request.logprobs > model.vocab_size:
        raise invalid("logprobs", f"at most {model.vocab_size}, the size of the vocabulary, got {request.logprobs}")
    return max_tokens


def _bounds(
    request: GenerationRequest, limits: Limits, max_tokens: int, prompts: list[list[int]], allowance: int | None
) -> Bounds:
    """Return the limits of the exact answers of a prompt."""
    bounds = []
    for name in ("max_candidates", "max_candidate_characters"):
        given, limit = getattr(request, name), getattr(limits, name)
        if given is not None and given > limit:
            raise invalid(name, f"at most {limit}, got {given}")
        bounds.append(request.n * (limit if given is None else given))
    if allowance is not None:
        num_prompt = sum(len(prompt) + 1 for prompt in prompts)  # including what precedes a record
        bounds[1] = max(max_tokens, min(bounds[1], (allowance - num_prompt) // len(prompts)))
    return Bounds(request.n, *bounds)


def _shared(model: TextModel, request: GenerationRequest, max_tokens: int, seed: int, candidates: int) -> Submit:
    """Return what all sequences of a request have in common, except patterns."""
    tokenizer = model.tokenizer
    # A stop string with an unknown character can never appear.
    stops = [tuple(tokenizer.encode(s)) for s in request.stops if all(c in tokenizer for c in s)]
    if request.stop_token_ids:
        check_ids(model, request.stop_token_ids, "stop_token_ids")
        stops += [(id,) for id in request.stop_token_ids]
    shared = Submit(
        0,
        [],
        max_tokens,
        request.sampling(_logit_bias(model, request) if request.logit_bias else tokenizer.sampling_bias, seed),
        stop=tuple(stops),
        include_stop=request.include_stop_str_in_output,
        min_tokens=request.min_tokens,
        logprobs=request.logprobs,
    )
    if candidates > request.n and shared.logprobs is None:
        shared.logprobs = 0  # to rank the candidates
    return shared


def _submits(
    model: TextModel,
    request: GenerationRequest,
    shared: Submit,
    prompts: list[list[int]],
    seeds: list[int],
    candidates: int,
) -> list[Submit]:
    """Return the sequences of a request: `candidates` for each prompt, with consecutive seeds."""
    if model.record_end is not None and not request.ignore_eos and shared.constraint is None:
        shared.stop = (*shared.stop, (model.record_end,))
    submits: list[Submit] = []
    for given, seed in zip(prompts, seeds, strict=True):
        prompt = begun(model, given, "prompt")
        for j in range(candidates):
            submit = msgspec.structs.replace(shared) if submits else shared
            submit.prompt = prompt
            if submits:
                submit.sampling = msgspec.structs.replace(shared.sampling, seed=(seed + j) % (MAX_SEED + 1))
            if request.echo and shared.logprobs is not None:
                submit.score_from = 1 if len(prompt) > 1 and given else None
            submits.append(submit)
    return submits


def _logit_bias(model: TextModel, request: GenerationRequest) -> tuple[tuple[int, float], ...]:
    """Return pairs of an id and its bias. The unknown symbol has its own bias unless one is given."""
    tokenizer, given = model.tokenizer, request.logit_bias
    biases: dict[int, float] = {}
    for key, bias in given.items() if isinstance(given, dict) else given:
        if isinstance(given, dict) and isinstance(key, str) and key.isascii() and key.isdigit():
            id = int(key) if len(key) <= 10 else tokenizer.vocab_size
        elif isinstance(key, str) and key in tokenizer:
            id = tokenizer.encode(key)[0]
        else:
            id = key if isinstance(key, int) else tokenizer.vocab_size
        if id >= tokenizer.vocab_size:
            message = (
                f"keys must be characters of the vocabulary or ids in [0, {tokenizer.vocab_size - 1}], "
                f"biases in [-100, 100], got {shortened(key)}: {bias!r}{_about_digits(given, key, bias)}"
            )
            raise invalid("logit_bias", message)
        if id in biases:
            if isinstance(given, dict) and str(id) in given:
                key, bias = str(id), given[str(id)]
            raise invalid("logit_bias", f"{key!r}, id {id}, appears twice{_about_digits(given, key, bias)}")
        biases[id] = bias
    return tuple((dict(tokenizer.sampling_bias) | biases).items())


def _about_digits(given: object, key: str | int, bias: float) -> str:
    """Return a hint for errors: the meaning of a digit here, and how to write the other meaning."""
    if not isinstance(key, str) or not (key.isascii() and key.isdigit() and len(key) == 1):
        return ""
    if isinstance(given, dict):
        return f'; in an object "{key}" is the id, and the character is written as a pair: [["{key}", {bias!r}]]'
    return f'; in a pair "{key}" is the character, and the id is written as a number: [[{key}, {bias!r}]]'
