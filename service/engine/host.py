"""The models of one inference process: an engine for each checkpoint in the listing, which share its slots and time.

Each model has a cache of its own with a slot for every sequence that the process may run, so that none waits for the
memory of another. Slots go to the models that want them in equal parts (max-min fairness); what one does not want is
the others'.
Turns go to the model that has used the least time (start-time fair queueing, as in fair_queue.py). Checkpoints that
come later are loaded beside the running engines. Ids and numbers only: no text, no HTTP, no LitServe.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from service.catalog import Listing, Version
from service.engine.engine import Engine
from service.engine.scheduler import BusyError
from service.model.checkpoint import CheckpointError
from service.model.params import SamplingParams
from service.observe.metrics import Metrics
from service.shared import SharedState
from service.wire import Submit

logger = logging.getLogger(__name__)

WARM_UP_CHARACTERS = 8


class Hosted:
    """A model and its engine."""

    def __init__(self, version: Version, engine: Engine, metrics: Metrics):
        self.version, self.engine, self.metrics = version, engine, metrics.of(version.name)
        self.drain = DrainRate()
        self.used_seconds = 0.0  # virtual: of a model that had no work, as much as of those that had

    @property
    def demand(self) -> int:
        """Sequences that have a slot or want one."""
        return self.engine.scheduler.num_running + self.engine.scheduler.num_waiting

    def submit(self, request: Submit, max_queue_seconds: float) -> None:
        """
        Raises:
            BusyError: it would wait for longer than it may; or as Engine.submit.
        """
        wait = self.expected_wait(request)
        limit = min(request.timeout_seconds, max_queue_seconds)
        if wait > limit and not request.must_run:
            raise BusyError(f"expected wait for a slot is {wait:.1f} s (limit {limit:g} s)")
        self.engine.submit(request)

    def expected_wait(self, request: Submit) -> float:
        """Seconds."""
        return self.engine.scheduler.expected_wait(request, self.drain.rate(self.engine.clock()))


class Host:
    """
    open_engine: loads a version; it may run in another thread, beside engines that run, unless `loads_alone`: then no
    engine runs meanwhile.
    max_running: sequences of all models together.
    """

    def __init__(
        self,
        folder: Path,
        state: SharedState,
        process: str,
        metrics: Metrics,
        open_engine: Callable[[Version], Engine],
        *,
        max_running: int,
        loads_alone: bool = False,
    ):
        self._folder, self._state, self._process = folder, state, process
        self._metrics, self._open_engine = metrics, open_engine
        self._max_running, self._loads_alone = max_running, loads_alone
        self._virtual_time = 0.0
        self._loading: threading.Thread | None = None
        self._loaded: dict[int, Hosted] | Exception = {}
        while True:
            self._listing = self._next_listing = Listing.read(folder)
            try:
                self.models: dict[int, Hosted] = {version.id: self._open(version) for version in self._listing.load}
                break
            except CheckpointError:
                if not self.is_behind:  # otherwise one was dropped meanwhile
                    raise

    def show(self) -> None:
        """Tell the other processes which listing this one follows."""
        self._state.follow(self._process, self._listing.generation)

    @property
    def is_behind(self) -> bool:
        """A model may be on its way."""
        return self._loading is not None or self._state.generation.value != self._listing.generation

    @property
    def has_work(self) -> bool:
        return any(hosted.engine.has_work for hosted in self.models.values())

    def follow(self, seconds: float) -> bool:
        """Load and drop what the newest listing says; whether no engine may run now.

        seconds: how long to wait then for the loading to go on.
        """
        if self._loading is None and self._state.generation.value != self._listing.generation:
            self._next_listing = Listing.read(self._folder)
            new = [version for version in self._next_listing.load if version.id not in self.models]
            self._loading = threading.Thread(target=self._load, args=[new], daemon=True)
            self._loading.start()
        if self._loading is not None:
            if self._loads_alone:
                self._loading.join(seconds)
            if self._loading.is_alive():
                return self._loads_alone
            self._loading = None
            self._take_loaded()
        if len(self.models) > len(self._listing.load):
            self._drop()
        return False

    def next(self) -> Hosted | None:
        """The model whose turn it is; None: there is nothing to do."""
        busy = [hosted for hosted in self.models.values() if hosted.engine.has_work]
        if len(self.models) > 1:
            self._share(busy)
        if len(busy) <= 1:
            return busy[0] if busy else None
        return min(busy, key=lambda hosted: max(hosted.used_seconds, self._virtual_time))

    def ran(self, hosted: Hosted, seconds: float) -> None:
        """Count a turn."""
        self._virtual_time = max(self._virtual_time, hosted.used_seconds)
        hosted.used_seconds = self._virtual_time + seconds

    def _share(self, busy: list[Hosted]) -> None:
        """Set how many sequences each model may run: equal parts, and to others what one does not want."""
        left, parts = self._max_running, {}
        for i, hosted in enumerate(sorted(busy, key=lambda hosted: hosted.demand)):
            parts[hosted] = min(hosted.demand, max(1, left // (len(busy) - i)))
            left = max(0, left - parts[hosted])
        for hosted in self.models.values():  # with room for what may come before the next turn
            if hosted not in parts:
                limit = max(left, self._max_running // (len(busy) + 1))
            else:
                limit = parts[hosted] + (left if parts[hosted] == hosted.demand else 0)
            hosted.engine.scheduler.limit(max(1, limit))

    def _open(self, version: Version) -> Hosted:
        """Load a version, and generate a few characters with it, so that the first request is fast.

        Raises:
            RuntimeError: the model gives nothing; or as `open_engine`.
        """
        engine = self._open_engine(version)
        (ids,) = engine.generate([Submit(0, [0], WARM_UP_CHARACTERS, SamplingParams())])
        if len(ids) < WARM_UP_CHARACTERS:
            raise RuntimeError("the model does not run: its logits are not finite")
        return Hosted(version, engine, self._metrics)

    def _load(self, versions: Iterable[Version]) -> None:
        """In a thread of its own."""
        loaded: dict[int, Hosted] = {}
        try:
            for version in versions:
                loaded[version.id] = self._open(version)
        except Exception as error:  # whatever the model, the library or the device finds wrong with it
            for hosted in loaded.values():
                hosted.engine.runner.close()
            self._loaded = error
        else:
            self._loaded = loaded

    def _take_loaded(self) -> None:
        loaded, self._loaded, self._listing = self._loaded, {}, self._next_listing
        if isinstance(loaded, Exception):
            logger.error("a checkpoint cannot be loaded: %s", loaded, exc_info=loaded)
            self._state.follow(self._process, self._listing.generation, has_failed=True)
            return
        self.models |= loaded
        for hosted in loaded.values():
            logger.info("loaded checkpoint %s: %s", hosted.version.name, hosted.version.source)
        self.show()

    def _drop(self) -> None:
        """What is not listed any more, once nothing uses it."""
        listed = {version.id for version in self._listing.load}
        for id, hosted in list(self.models.items()):
            if id not in listed and not hosted.engine.has_work and not self._state.is_used(id):
                del self.models[id]
                hosted.engine.runner.close()
                logger.info("dropped checkpoint %s: %s", hosted.version.name, hosted.version.digest[:12])
        if len(self.models) == 1:
            (hosted,) = self.models.values()
            hosted.engine.scheduler.limit(self._max_running)


class DrainRate:
    """How fast sequences end while further ones would wait: at other times it is only as fast as they come.

    What was seen is forgotten after FORGET_SECONDS without such a time: what comes next may be of another kind.
    """

    FORGET_SECONDS = 60.0

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=256)  # when the latest ended, in seconds of such time
        self._seconds = 0.0
        self._observed_at = 0.0
        self._is_paused = True

    def observe(self, began: float, num_ended: int, now: float) -> None:
        """Add a step, and the turns of other models since the last one."""
        self._seconds += now - (began if self._is_paused else self._observed_at)
        self._observed_at, self._is_paused = now, False
        self._ends.extend([self._seconds] * num_ended)

    def pause(self) -> None:
        """A step in which nothing would wait."""
        self._is_paused = True

    def rate(self, now: float) -> float | None:
        """Sequences per second; None before two have ended."""
        if now - self._observed_at > self.FORGET_SECONDS:
            self._ends.clear()
        if len(self._ends) < 2:
            return None
        return len(self._ends) / max(self._seconds - self._ends[0], 1e-3)
