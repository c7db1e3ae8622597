"""The thread that computes attention weights, beside the engine, with the weights of one model at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from service.http.api.errors import ApiError
from service.http.engine.model import Model
from service.model.attention import LayerAttention

MAX_WAITING = 8  # texts that wait for the thread, or run in it

Found = list[tuple[int, int, LayerAttention]]  # layer, head, its scores and weights (T, T)


class AttentionThread:
    """Computes one text after the other."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "attention")  # starts its thread with the first text
        self._weights: dict[int, dict[str, np.ndarray]] = {}  # by model id: of the last model asked for
        self._places = threading.BoundedSemaphore(MAX_WAITING)

    def submit(self, call: Callable[[], Found]) -> asyncio.Future[Found]:
        """Cancelling the future takes a text that has not begun out of the queue.

        Raises ApiError: 429, too many wait.
        """
        if not self._places.acquire(blocking=False):
            message = f"{MAX_WAITING} texts already wait for their attention weights: retry later"
            raise ApiError(429, message, code="queue_full", retry_after_seconds=1)
        future = self._pool.submit(call)
        future.add_done_callback(lambda _: self._places.release())
        return asyncio.wrap_future(future)

    def weights(self, model: Model) -> dict[str, np.ndarray]:
        """Within the thread."""
        found = self._weights.get(model.id)
        if found is None:
            self._weights.clear()  # before the next is read
            found = self._weights[model.id] = model.checkpoint.load_weights()
        return found

    def keep(self, ids: Collection[int]) -> None:
        """Forget the weights of models that are no longer served."""
        if not self._weights.keys() <= set(ids):
            self._weights = {}
