"""The likelihood of texts, and the distribution of the next character."""

from __future__ import annotations

import math
from typing import NamedTuple

from service.model.params import SamplingParams
from service.text.encoding import Encoder, begun
from service.text.errors import invalid
from service.text.limits import Limits
from service.text.model import TextModel
from service.text.requests import NextRequest, ScoreRequest
from service.text.work import Work
from service.wire import Logprobs, Submit, floats

MAX_SUMMED = 1 << 14  # nats added up at a time: about 1 ms


class ScorePlan(NamedTuple):
    """The sequences that score texts. Texts of similar length run together."""

    before: list[int]  # ids before each text
    lengths: list[int]  # of each text with what is before it, in ids
    unknown: list[int]  # characters of each text that the model does not know
    order: list[int]  # the text of each sequence
    submits: list[Submit]
    num_prompt_characters: int


class TextScore(NamedTuple):
    """Nats are negative log-likelihoods."""

    num_characters: int  # scored ones
    nats: float

    @property
    def nats_per_character(self) -> float | None:
        return self.nats / self.num_characters if self.num_characters else None

    @property
    def bits_per_character(self) -> float | None:
        return None if self.nats_per_character is None else self.nats_per_character / math.log(2)

    @property
    def perplexity(self) -> float | None:
        return None if self.nats_per_character is None else math.exp(self.nats_per_character)


def plan_scores(model: TextModel, request: ScoreRequest, limits: Limits, encoder: Encoder) -> Work[ScorePlan]:
    """Return what a request runs. It keeps none of the request's texts.

    Raises InvalidRequestError: there are too few or too many texts; otherwise as `encode` and `begun`.
    """
    end, is_ranking = model.record_end, request.texts is None
    param, texts = _texts(request)
    if not 1 <= len(texts) <= limits.max_score_texts:
        raise invalid(param, f"the number of texts must be in [1, {limits.max_score_texts}], got {len(texts)}")
    is_list = not isinstance(request.texts, str)
    if is_ranking:
        before = begun(model, (yield from encoder.encode(request.prefix, "prefix")), "prefix")
    else:
        before = [] if end is None else [end]
    prompts, unknown = [], []
    for i, text in enumerate(texts):
        ids, num_unknown = yield from encoder.encode_counting(text, param, i if is_list else None)
        unknown.append(num_unknown)
        yield None
        if is_ranking:
            ids = before + ids
        elif end is not None:  # score each from its first character to its end
            first, last = ids[:1], ids[-1:]
            ids = ids if first == before else before + ids
            ids = ids if last == before else ids + before
        prompts.append(ids)
    first_scored = max(1, len(before))
    scored = (i for i, prompt in enumerate(prompts) if len(prompt) > first_scored)
    order, sampling, submits = sorted(scored, key=lambda i: len(prompts[i])), SamplingParams(), []
    for i in order:
        submits.append(Submit(0, prompts[i], 0, sampling, logprobs=0, score_from=first_scored, priority=1))
        yield None
    num_before = 0 if before == [end] else len(before)  # counted once
    lengths = list(map(len, prompts))
    return ScorePlan(before, lengths, unknown, order, submits, num_before + sum(lengths) - len(before) * len(lengths))


def num_score_ids(request: ScoreRequest) -> int:
    """Return the number of ids of a request's texts, each with what is before it and after it."""
    _, texts = _texts(request)
    return len(request.prefix) + sum([len(request.prefix) + len(text) + 2 for text in texts])


def _texts(request: ScoreRequest) -> tuple[str, list[str]]:
    if request.texts is None:
        return "continuations", request.continuations or []
    return "texts", [request.texts] if isinstance(request.texts, str) else request.texts


def scores_of(texts: list[Logprobs]) -> Work[list[TextScore]]:
    """Return the score of each text, from the log-probabilities of its characters."""
    scores = []
    for logprobs in texts:
        scores.append((yield from _score(logprobs)))
        yield None
    return scores


def _score(logprobs: Logprobs) -> Work[TextScore]:
    """Return the sum of a text, equal to math.fsum of all its nats."""
    partials: list[float] = []  # their exact sum is that of all values so far
    for start in range(0, len(logprobs), MAX_SUMMED):
        values = floats(logprobs.values[8 * start : 8 * (start + MAX_SUMMED)])
        while partial := math.fsum(values):
            partials.append(partial)
            values.append(-partial)
        yield None
    return TextScore(len(logprobs), 0.0 - math.fsum(partials))


def plan_next(
    model: TextModel, request: NextRequest, limits: Limits, encoder: Encoder
) -> Work[tuple[list[Submit], int]]:
    """Return the sequences that give distributions, and the number of characters of the prompts.

    Raises InvalidRequestError.
    """
    prompts = request.prompts
    if not 1 <= len(prompts) <= limits.max_prompts:
        raise invalid("prompt", f"the number of prompts must be in [1, {limits.max_prompts}], got {len(prompts)}")
    ids = yield from encoder.encode_prompts([*prompts], isinstance(request.prompt, list))
    sampling = SamplingParams(temperature=0.0)
    submits = [Submit(0, begun(model, prompt, "prompt"), 1, sampling, logprobs=model.vocab_size) for prompt in ids]
    return submits, sum(map(len, ids))


def ranks(nats: list[float]) -> list[int]:
    """Return the rank of each text; 1 has the fewest nats, and of equal ones the first."""
    order = sorted(range(len(nats)), key=lambda i: (nats[i], i))
    found = [0] * len(nats)
    for rank, i in enumerate(order, 1):
        found[i] = rank
    return found


def entropy_of(top: list[tuple[int, float]]) -> float:
    """Return the entropy in nats of a distribution: (id, log-probability) of each character."""
    return -math.fsum(math.exp(value) * value for _, value in top)


def distribution_of(logprobs: Logprobs) -> list[tuple[int, float]]:
    """Return (id, log-probability) of each character that may come next, the likeliest first."""
    ((_, top),) = logprobs.part(0, 1).rows()
    return top
