"""POST /generate and POST /v1/completions: parse, encode, submit, write."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from service.http.connection.errors import invalid, shortened
from service.http.routes.candidates import best_of, infill
from service.http.routes.forms import CompletionForm, Form
from service.http.routes.request import Request
from service.http.routes.service import Service
from service.http.routes.stream import Pieces, write_stream, write_whole
from service.http.schema.requests import CompletionRequest, GenerateRequest, GenerationRequest, Prompt
from service.http.text.conditions import Conditions
from service.http.text.encoding import Encoder, begun, check_ids
from service.http.text.model import Model
from service.model.params import MAX_SEED
from service.wire import Draw, Submit

SUFFIX_CANDIDATES = 8  # candidates per prompt, unless the request or a limit says otherwise


async def generate(service: Service, request: Request) -> None:
    """Continue a text."""
    await _answer(service, request, GenerateRequest, Form)


async def completions(service: Service, request: Request) -> None:
    """Continue a text, as OpenAI's completions."""
    await _answer(service, request, CompletionRequest, CompletionForm)


async def _answer(
    service: Service,
    request: Request,
    kind: type[GenerationRequest],
    form_class: type[Form],
) -> None:
    body, model = await service.read(kind, request)
    given = _truncated(service, body)
    candidates = _check_limits(service, model, body, len(given))
    encoder = Encoder(service.settings, model, body, request.client)
    prompts = encoder.short(given)
    if prompts is None:
        service.hold(request, body, sum(map(len, given)))
        prompts = await encoder.encode_prompts(given, given is body.prompt)
        given = body.prompt = []  # do not keep both prompt and ids
    num_given, seeds = sum(map(len, prompts)), body.seed
    suffix = await _suffix(service, request, encoder, body, num_given)
    if not isinstance(seeds, list):
        seeds = [service.random.getrandbits(52) if seeds is None else seeds for _ in prompts]

    shared = _shared(service, model, body, seeds[0], candidates)
    conditions = Conditions(request.client, model, body, bool(suffix))
    if conditions.are_given:
        service.hold(request, body, num_given + len(suffix))
        await conditions.constrain(shared)
    if body.exact:
        shared.draw, candidates = _draw(service, request.client, body, prompts), 1
    submits = _submits(model, body, shared, prompts, seeds, candidates)
    await conditions.begin_records(submits)
    rankings = candidates * len(prompts) if suffix else 0
    service.admit(request, submits, echo=body.echo, num_rankings=rankings)
    echo = None
    if body.echo:
        echo = [text for prompt in prompts for text in [await encoder.decode(prompt)] * candidates]
    request.num_prompt_tokens = num_given

    form = form_class(service, request, encoder, seeds, body)
    pieces = _pieces(service, request, body, submits, candidates, suffix, echo)
    encoder.count_unknown()
    if body.stream:
        await write_stream(request, pieces, form, service.settings.keep_alive_seconds)
    else:
        await write_whole(request, pieces, form)


def _truncated(service: Service, body: GenerationRequest) -> list[Prompt]:
    """Cut the prompts in the body to truncate_prompt_tokens, and return them."""
    given = body.prompts
    if (longest := body.truncate_prompt_tokens) is not None:
        is_list = given is body.prompt
        longest = service.settings.max_prompt_characters if longest < 0 else longest
        given = [prompt[max(0, len(prompt) - longest) :] for prompt in given]
        body.prompt = cast(Any, given if is_list else given[0])  # do not keep the rest
    return given


async def _suffix(
    service: Service, request: Request, encoder: Encoder, body: GenerationRequest, num_given: int
) -> list[int]:
    """Return the ids of the suffix, if there is one, as far as the model can see."""
    if not body.suffix:
        return []
    service.hold(request, body, num_given + len(body.suffix))
    suffix = await encoder.encode(body.suffix, "suffix")
    body.suffix = None
    if not suffix:
        raise invalid("suffix", "none of its characters is in the vocabulary")
    return suffix[: encoder.model.receptive_field]


def _pieces(
    service: Service,
    request: Request,
    body: GenerationRequest,
    submits: list[Submit],
    candidates: int,
    suffix: list[int],
    echo: list[str] | None,
) -> Pieces:
    """Start the sequences, and return the pieces of the answer."""
    if suffix:
        return infill(service, request, submits, body.n, candidates, suffix, echo)
    if candidates > body.n:
        return best_of(service, request, submits, body, candidates, echo)
    default = service.settings.stream_interval_seconds
    interval = default if body.stream_interval is None else body.stream_interval
    return service.start(request, submits, echo=echo, interval=interval if body.stream else None)


def _check_limits(service: Service, model: Model, body: GenerationRequest, count: int) -> int:
    """Check the limits of the server and the model, and return the number of sequences per prompt."""
    settings = service.settings
    candidates = body.n if body.best_of is None else body.best_of
    if body.best_of is None and body.suffix:
        candidates = max(body.n, min(SUFFIX_CANDIDATES, settings.max_prompts // max(1, count)))
    if not 1 <= count * candidates <= settings.max_prompts:
        param = "prompt" if candidates == 1 else "n" if body.best_of is None else "best_of"
        given = f"{count}" if candidates == 1 else f"{count} × {candidates}"
        message = f"sequences per request (prompts × n or best_of) must be in [1, {settings.max_prompts}], got {given}"
        raise invalid(param, message)
    if not body.has_max_tokens:
        body.max_tokens = min(body.max_tokens, settings.max_tokens)
    if max(body.max_tokens, body.min_tokens) > settings.max_tokens:
        param = "max_tokens" if body.max_tokens > settings.max_tokens else "min_tokens"
        raise invalid(param, f"at most {settings.max_tokens}, got {getattr(body, param)}")
    vocab_size = model.vocab_size
    if body.logprobs is not None and body.logprobs > vocab_size:
        raise invalid("logprobs", f"at most {vocab_size}, the size of the vocabulary, got {body.logprobs}")
    return candidates


def _draw(service: Service, client: str, body: GenerationRequest, prompts: list[list[int]]) -> Draw:
    """Return the limits of the exact answers of a prompt, at most the client's whole allowance."""
    settings, most = service.settings, service.limits.characters_per_minute(client)
    limits = []
    for name in ("max_candidates", "max_candidate_characters"):
        given, limit = getattr(body, name), getattr(settings, name)
        if given is not None and given > limit:
            raise invalid(name, f"at most {limit}, got {given}")
        limits.append(body.n * (limit if given is None else given))
    if most is not None:
        num_prompt = sum(len(prompt) + 1 for prompt in prompts)  # including what precedes a record
        limits[1] = max(body.max_tokens, min(limits[1], (most - num_prompt) // len(prompts)))
    return Draw(body.n, *limits)


def _shared(service: Service, model: Model, body: GenerationRequest, seed: int, candidates: int) -> Submit:
    """Return what all sequences of a request have in common, except patterns."""
    tokenizer = model.tokenizer
    # A stop string with an unknown character can never appear.
    stops = [tuple(tokenizer.encode(s)) for s in body.stops if all(c in tokenizer for c in s)]
    if body.stop_token_ids:
        check_ids(model, body.stop_token_ids, "stop_token_ids")
        stops += [(id,) for id in body.stop_token_ids]
    shared = Submit(
        0,
        [],
        body.max_tokens,
        body.sampling(_logit_bias(model, body) if body.logit_bias else tokenizer.sampling_bias, seed),
        service.timeout(body.timeout_seconds),
        stop=tuple(stops),
        include_stop=body.include_stop_str_in_output,
        min_tokens=body.min_tokens,
        logprobs=body.logprobs,
        priority=2 * body.priority,
    )
    if candidates > body.n and shared.logprobs is None:
        shared.logprobs = 0  # to rank the candidates
    return shared


def _submits(
    model: Model, body: GenerationRequest, shared: Submit, prompts: list[list[int]], seeds: list[int], candidates: int
) -> list[Submit]:
    """Return the sequences of a request: `candidates` for each prompt, with consecutive seeds."""
    if model.record_end is not None and not body.ignore_eos and shared.constraint is None:
        shared.stop = (*shared.stop, (model.record_end,))
    submits: list[Submit] = []
    for given, seed in zip(prompts, seeds, strict=True):
        prompt = begun(model, given, "prompt")
        for j in range(candidates):
            submit = msgspec.structs.replace(shared) if submits else shared
            submit.prompt = prompt
            if submits:
                submit.sampling = msgspec.structs.replace(shared.sampling, seed=(seed + j) % (MAX_SEED + 1))
            if body.echo and shared.logprobs is not None:
                submit.score_from = 1 if len(prompt) > 1 and given else None
            submits.append(submit)
    return submits


def _logit_bias(model: Model, body: GenerationRequest) -> tuple[tuple[int, float], ...]:
    """Return pairs of an id and its bias. The unknown symbol has its own bias unless one is given."""
    tokenizer, given = model.tokenizer, body.logit_bias
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
