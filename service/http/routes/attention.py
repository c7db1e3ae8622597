"""POST /v1/attention: the attention weights of a short text, computed in a thread of this HTTP process.

The kernels of the engine keep no attention weights. The thread runs beside the engine, one text at a time, so it takes
at most one CPU. The process keeps the weights of the model that was requested last.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from service.http.connection.errors import ApiError
from service.http.models.model import Model
from service.http.routes.json_parts import json_parts, list_parts
from service.http.routes.request import Request
from service.http.routes.service import MAX_ATTENTION_TEXTS, Service
from service.http.routes.stream import send_json
from service.http.schema.answers import AttentionAnswer, HeadAttention
from service.http.schema.requests import AttentionRequest
from service.model.attention import LayerAttention, attention_layers, logits_of
from service.model.checkpoint import WEIGHTS
from service.model.config import GPTConfig
from service.text.encoding import Encoder, begun
from service.text.errors import invalid
from service.text.requests import MAX_ATTENTION_CHARACTERS

MAX_WEIGHT_BYTES = 128 << 20  # limit of a checkpoint's file, because this process keeps the weights of one model
NUMBER_BYTES = 8

Weights = dict[str, np.ndarray]
Found = list[tuple[int, int, LayerAttention]]  # layer, head, its scores and weights (T, T)


def max_characters(model: Model) -> int:
    """Return the maximum length of a text for this model; 0: its weights are too large."""
    if model.checkpoint.files[WEIGHTS].size > MAX_WEIGHT_BYTES:
        return 0
    return min(model.checkpoint.config.block_size, MAX_ATTENTION_CHARACTERS)


async def attention(service: Service, request: Request) -> None:
    """Give the attention weights of a short text, of each layer and head.

    Row t of a head's `weights` says how much of its output at character t comes from each of the characters 0 to t; it
    sums to 1. With `scores`, also what they are made of: the products of queries and keys for all pairs of characters.
    Multiplied by `scale` and, without those after t, through a softmax, row t of `scores` is row t of `weights`. With
    `values`, also what these mix: row t of `weights` times `values` is the head's output at character t.
    """
    body, model = await service.read(AttentionRequest, request)
    config, encoder = model.checkpoint.config, Encoder(service.text_limits, model, body)
    limit = _check(body, model)
    ids = await service.run(request, encoder.encode(body.text, "text"))
    if model.record_end is not None:
        ids = begun(model, ids, "text")
        if len(ids) > limit:
            raise invalid("text", f"at most {limit - 1} characters after the mark that begins a record, got {limit}")
    layers = range(config.n_layer) if body.layer is None else [body.layer]
    heads = range(config.n_head) if body.head is None else [body.head]
    # The matrices that are kept, and those of a layer during its computation.
    num_matrices = len(layers) * len(heads) * (2 if body.scores else 1) + 4 * config.n_head
    needed, allowed = NUMBER_BYTES * num_matrices * len(ids) ** 2, service.settings.max_request_bytes
    if needed > allowed:
        message = f"{len(layers)} layers of {len(heads)} heads need {needed} bytes of memory, {allowed} are allowed"
        raise invalid("layer", f"{message}: choose one, or shorten the text")
    request.lease.take(needed, len(ids))

    if service.attention_places.locked():
        model.metrics.request_rejected("queue_full")
        message = f"{MAX_ATTENTION_TEXTS} texts already wait for their attention weights: retry later"
        raise ApiError(429, message, code="queue_full", retry_after_seconds=1)
    model.count_unknown(encoder)
    request.num_prompt_tokens = len(ids)
    compute = functools.partial(_compute, config, ids, layers, heads, body.scores)
    found = await _in_turn(service, request, model, compute)
    if found is None:
        return
    data: Any = list_parts([_head(*of_head, body.scores, body.values)] for of_head in found)
    answer: AttentionAnswer = {
        "id": request.id,
        "model": model.name,
        "checkpoint_sha256": model.digest,
        "text": model.tokenizer.decode(ids),
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "scale": 1 / math.sqrt(config.head_dim),
        "data": data,
        "replaced_characters": encoder.replaced,
        "dropped_characters": encoder.dropped,
    }
    await send_json(request, json_parts(answer))


def _check(body: AttentionRequest, model: Model) -> int:
    """Return the limit of characters. Raises InvalidRequestError: no weights are given for this text and model."""
    config, limit = model.checkpoint.config, max_characters(model)
    if not limit:
        message = f"checkpoints must have at most {MAX_WEIGHT_BYTES} bytes of weights for this route"
        raise invalid("model", f"{message}, got {model.checkpoint.files[WEIGHTS].size}")
    if len(body.text) > limit:
        raise invalid("text", f"at most {limit} characters, got {len(body.text)}")
    for param, number, count in ("layer", body.layer, config.n_layer), ("head", body.head, config.n_head):
        if number is not None and number >= count:
            raise invalid(param, f"must be in [0, {count - 1}], got {number}")
    return limit


def _compute(
    config: GPTConfig, ids: list[int], layers: Sequence[int], heads: Sequence[int], with_scores: bool,
    weights: Weights, is_over: Callable[[], bool],
) -> Found:  # fmt: skip
    """Compute the heads of the layers, until `is_over`."""
    found: Found = []
    for layer, of_layer in enumerate(itertools.islice(attention_layers(weights, config, ids), max(layers) + 1)):
        if is_over():
            break
        for head in heads if layer in layers else ():  # copied, because a view would keep all heads
            scores = of_layer.scores[head].copy() if with_scores else np.empty(0)
            of_head = LayerAttention(scores, of_layer.weights[head].copy(), of_layer.values[head].copy())
            found.append((layer, head, of_head))
    return found


async def _in_turn(
    service: Service, request: Request, model: Model, compute: Callable[[Weights, Callable[[], bool]], Found]
) -> Found | None:
    """Run `compute` in a thread when it is this request's turn. There must be a place. None: the client has left.

    Raises ApiError: 504, the time is over.
    """
    seconds = service.timeout(request.timeout_seconds)
    deadline = request.arrived_at + seconds

    async def run() -> Found:
        async with service.attention_turn:
            request.lease.spend()
            weights = await _weights(service, model)
            return await asyncio.to_thread(compute, weights, lambda: request.is_gone or time.monotonic() >= deadline)

    async with service.attention_places:  # takes a place at once
        future = request.future = asyncio.create_task(run())
        await asyncio.wait([future], timeout=deadline - time.monotonic())
    if request.is_gone:
        return None
    if not future.done() or time.monotonic() >= deadline:
        future.cancel()
        message = f"the request took longer than {seconds:g} s, {service.timeout_name(request)}"
        raise ApiError(504, message, code="timeout")
    found: Found = future.result()
    return found


async def _weights(service: Service, model: Model) -> Weights:
    """Return the weights of a model. Called for one text at a time.

    Raises InvalidRequestError: the model was trained with a changed gpt.py.
    """

    def load() -> Weights | None:
        found = model.checkpoint.load_weights()
        forward = functools.partial(logits_of, found, model.checkpoint.config)
        return found if model.checkpoint.is_computed_by(forward) else None

    if model not in service.attention_weights:
        service.attention_weights.clear()  # before the next model is read
        service.attention_weights[model] = await asyncio.to_thread(load)
    weights = service.attention_weights[model]
    if weights is None:
        raise invalid("model", "was trained with a changed gpt.py, which service/model/attention.py does not follow")
    return weights


def _head(layer: int, head: int, found: LayerAttention, with_scores: bool, with_values: bool) -> HeadAttention:
    def rows(matrix: np.ndarray) -> Any:
        return list_parts([row.tolist()] for row in np.round(matrix, 5))

    weights: Any = list_parts([np.round(row[: t + 1], 7).tolist()] for t, row in enumerate(found.weights))
    of_head: HeadAttention = {"layer": layer, "head": head, "weights": weights}
    if with_scores:
        of_head["scores"] = rows(found.scores)
    if with_values:
        of_head["values"] = rows(found.values)
    return of_head
