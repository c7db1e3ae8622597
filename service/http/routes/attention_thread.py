"""The thread that computes attention weights beside the engine, with one model's weights at a time."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from service.http.connection.errors import ApiError, invalid
from service.http.text.model import Model
from service.model.attention import LayerAttention, logits_of

MAX_WAITING = 8  # texts that wait for the thread or run in it

Found = list[tuple[int, int, LayerAttention]]  # layer, head, its scores and weights (T, T)


class AttentionThread:
    """Computes one text after the other."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "attention")  # starts its thread with the first text
        # Weights of the last requested model by its id; None: attention.py cannot compute this model.
        self._weights: dict[int, dict[str, np.ndarray] | None] = {}
        self._places = threading.BoundedSemaphore(MAX_WAITING)

    def submit(self, call: Callable[[], Found]) -> asyncio.Future[Found]:
        """Queue a text. Cancelling the future removes it from the queue if it has not begun.

        Raises ApiError: 429, too many texts wait.
        """
        if not self._places.acquire(blocking=False):
            message = f"{MAX_WAITING} texts already wait for their attention weights: retry later"
            raise ApiError(429, message, code="queue_full", retry_after_seconds=1)
        future = self._pool.submit(call)
        future.add_done_callback(lambda _: self._places.release())
        return asyncio.wrap_future(future)

    def weights(self, model: Model) -> dict[str, np.ndarray]:
        """Return the weights of a model. Called in the thread.

        Raises ApiError: 400, the model was trained with a changed gpt.py.
        """
        if model.id not in self._weights:
            self._weights.clear()  # before the next model is read
            found = model.checkpoint.load_weights()
            forward = functools.partial(logits_of, found, model.checkpoint.config)
            self._weights[model.id] = found if model.checkpoint.is_computed_by(forward) else None
        weights = self._weights[model.id]
        if weights is None:
            raise invalid(
                "model", "was trained with a changed gpt.py, which service/model/attention.py does not follow"
            )
        return weights

    def keep(self, ids: Collection[int]) -> None:
        """Forget the weights of models that are no longer served."""
        if not self._weights.keys() <= set(ids):
            self._weights = {}
