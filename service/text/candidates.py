"""best_of and suffix: sample candidates, answer with some of them."""

from __future__ import annotations

import math

import msgspec

from service.constrain.automaton import Automaton
from service.text.model import TextModel
from service.text.pieces import Piece, Ran, Stages
from service.wire import Submit, floats

MAX_CUTS = 3  # places at which a candidate is cut before a suffix

Echo = list[str] | None  # the prompt of each sequence, if the answer begins with it
Ranked = list[tuple[float, Piece]]  # candidates, each with its score; the highest is best


def best_of(submits: list[Submit], n: int, candidates: int, echo: Echo, reports_logprobs: bool) -> Stages[list[Piece]]:
    """The `n` texts of each prompt with the highest mean log-probability; empty ones, which have none, come last."""
    ran: Ran = yield submits
    ranked = []
    for piece in ran.pieces:
        start = len(echo[piece.number]) - piece.num_unscored if echo else 0
        values = floats(piece.logprobs.values[8 * start :]) if piece.logprobs is not None else []
        if not reports_logprobs:
            piece = msgspec.structs.replace(piece, logprobs=None)
        yield None
        ranked.append((sum(values) / len(values) if values else -math.inf, piece))
    return _best(ranked, n, candidates)


def infill(
    model: TextModel, submits: list[Submit], n: int, candidates: int, suffix: list[int], echo: Echo
) -> Stages[list[Piece]]:
    """The `n` texts of each prompt after which the suffix is likeliest.

    Each candidate is also cut where the suffix's first character is likeliest to come next, if the text before it
    matches the request's pattern. The likelihood is p(suffix | prompt, middle).
    """
    first, pattern = submits[0], None
    if first.constraint is not None and first.may_leave and not first.constrains_first:  # of a regex or choice
        pattern = Automaton.unpack(first.constraint)
    for submit in submits:
        submit.logprobs, submit.logprob_ids, submit.score_from = 0, (suffix[0],), None
    sampled: Ran = yield submits
    middles = []
    for piece in sampled.pieces:
        ends = None if pattern is None else pattern.match_lengths(model.tokenizer.encode(piece.text))
        middles += _cut(piece, submits[piece.number].min_tokens, ends)
        yield None
    scoring: dict[tuple[int, str], Submit] = {}  # (prompt, text): equal texts are scored once, and alike
    for middle in middles:
        submit = submits[middle.number]
        before = submit.prompt + model.tokenizer.encode(middle.text)
        scoring[middle.number // candidates, middle.text] = Submit(
            0, before + suffix, 0, submit.sampling, logprobs=0, score_from=len(before)
        )
    scored: Ran = yield list(scoring.values())
    scores = {key: sum(floats(scored.prompt_logprobs[i].values)) for i, key in enumerate(scoring)}
    ranked = [(scores[middle.number // candidates, middle.text], middle) for middle in middles]
    chosen = _best(ranked, n, candidates)
    if echo:  # each prompt's text, `candidates` times
        chosen = [
            msgspec.structs.replace(piece, text=echo[piece.number // n * candidates] + piece.text) for piece in chosen
        ]
    return chosen


def _cut(piece: Piece, min_tokens: int, ends: set[int] | None) -> list[Piece]:
    """A candidate as it is, and cut where the suffix is likely to begin. ends: lengths that match; None: all."""
    # Of the suffix's first character at each position.
    chances = floats(piece.logprobs.top_values) if piece.logprobs is not None else []
    possible = [i for i in range(min_tokens, len(chances)) if ends is None or i in ends]
    cuts = sorted(possible, key=lambda i: -round(chances[i], 4))[:MAX_CUTS]
    whole = msgspec.structs.replace(piece, logprobs=None)
    return [whole, *(msgspec.structs.replace(whole, text=piece.text[:i], finish_reason="stop") for i in sorted(cuts))]


def _best(ranked: Ranked, n: int, num_candidates: int) -> list[Piece]:
    """The n candidates of each prompt with the highest score, renumbered; repetitions of a text come last."""
    by_prompt: dict[int, Ranked] = {}
    for score, piece in ranked:
        by_prompt.setdefault(piece.number // num_candidates, []).append((score, piece))
    best: list[Piece] = []
    for prompt, candidates in sorted(by_prompt.items()):
        texts: set[str] = set()
        ordered = []
        for i, (score, piece) in enumerate(candidates):
            ordered.append((piece.text in texts, -round(score, 4), i, piece))
            texts.add(piece.text)
        best += [
            msgspec.structs.replace(piece, number=prompt * n + place)
            for place, (*_, piece) in enumerate(sorted(ordered)[:n])
        ]
    return best
