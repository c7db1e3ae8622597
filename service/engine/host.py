"""The models of one inference process: an engine for each checkpoint in the listing. They share its slots and time.

Each model has its own cache, with a slot for every sequence that the process may run, so no model waits for the memory
of another. The models with sequences share the slots in equal parts; a part that a model does not need goes to the
others (max-min fairness). The next turn goes to the model that has used the least time (start-time fair queueing;
Goyal, Vin & Cheng 1996). New checkpoints are loaded while the engines run, unless `loads_alone`. The module handles ids
and numbers only, no text, HTTP or LitServe.
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
        self.used_seconds = 0.0  # virtual time used; a model that had no work is not behind the others

    @property
    def demand(self) -> int:
        """The number of running and waiting sequences."""
        return self.engine.scheduler.num_running + self.engine.scheduler.num_waiting

    def submit(self, request: Submit, max_queue_seconds: float) -> None:
        """Queue a request.

        Raises:
            BusyError: the expected wait is longer than the request's timeout or `max_queue_seconds`; or as
                Engine.submit.
        """
        wait = self.expected_wait(request)
        limit = min(request.timeout_seconds, max_queue_seconds)
        if wait > limit and not request.must_run:
            raise BusyError(f"expected wait for a slot is {wait:.1f} s (limit {limit:g} s)")
        self.engine.submit(request)

    def expected_wait(self, request: Submit) -> float:
        """Return the seconds that a new request is expected to wait for a slot."""
        return self.engine.scheduler.expected_wait(request, self.drain.rate(self.engine.clock()))


class Host:
    """Loads, runs and drops the models of this process, as the listing of checkpoints says.

    open_engine: loads a version; after the start, it is called in another thread.
    max_running: the number of sequences of all models together.
    loads_alone: whether no engine may run while a version loads.
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
                if not self.is_behind:  # if the listing has changed, a version was dropped meanwhile
                    raise

    def show(self) -> None:
        """Tell the other processes which listing this process follows."""
        self._state.follow(self._process, self._listing.generation)

    @property
    def is_behind(self) -> bool:
        """Whether this process has not loaded the newest listing yet, and so may lack a model."""
        return self._loading is not None or self._state.generation.value != self._listing.generation

    @property
    def has_work(self) -> bool:
        return any(hosted.engine.has_work for hosted in self.models.values())

    def follow(self, seconds: float) -> bool:
        """Load and drop models as the newest listing says. Return whether no engine may run now.

        seconds: how long to wait for the loading if no engine may run.
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
        """Return the model that runs the next turn, or None if no model has work."""
        busy = [hosted for hosted in self.models.values() if hosted.engine.has_work]
        if len(self.models) > 1:
            self._share(busy)
        if len(busy) <= 1:
            return busy[0] if busy else None
        return min(busy, key=lambda hosted: max(hosted.used_seconds, self._virtual_time))

    def ran(self, hosted: Hosted, seconds: float) -> None:
        """Charge a model for a turn of `seconds`."""
        self._virtual_time = max(self._virtual_time, hosted.used_seconds)
        hosted.used_seconds = self._virtual_time + seconds

    def _share(self, busy: list[Hosted]) -> None:
        """Set how many sequences each model may run: equal parts, with unneeded parts divided among the others."""
        left, parts = self._max_running, {}
        for i, hosted in enumerate(sorted(busy, key=lambda hosted: hosted.demand)):
            parts[hosted] = min(hosted.demand, max(1, left // (len(busy) - i)))
            left = max(0, left - parts[hosted])
        for hosted in self.models.values():  # leaves room for requests that may arrive before the next turn
            if hosted not in parts:
                limit = max(left, self._max_running // (len(busy) + 1))
            else:
                limit = parts[hosted] + (left if parts[hosted] == hosted.demand else 0)
            hosted.engine.scheduler.limit(max(1, limit))

    def _open(self, version: Version) -> Hosted:
        """Load a version, and generate a few characters with it, so that the first request is fast.

        Raises:
            RuntimeError: the model generates too few characters; or as `open_engine`.
        """
        engine = self._open_engine(version)
        (ids,) = engine.generate([Submit(0, [0], WARM_UP_CHARACTERS, SamplingParams())])
        if len(ids) < WARM_UP_CHARACTERS:
            raise RuntimeError("the model does not run: its logits are not finite")
        return Hosted(version, engine, self._metrics)

    def _load(self, versions: Iterable[Version]) -> None:
        """Load versions, in a thread of its own. Leave the models, or the first error, in `_loaded`."""
        loaded: dict[int, Hosted] = {}
        try:
            for version in versions:
                loaded[version.id] = self._open(version)
        except Exception as error:  # of any type: the checkpoint, the library or the device may fail
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
        """Drop the models that are no longer listed, as soon as nothing uses them."""
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
    """How many sequences end per second while new sequences would have to wait.

    At other times sequences end only as fast as they arrive, so these times do not count. The observations are
    forgotten after FORGET_SECONDS without waiting, because later requests may be of another kind.
    """

    FORGET_SECONDS = 60.0

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=256)  # ends of the latest sequences, in seconds of counted time
        self._seconds = 0.0
        self._observed_at = 0.0
        self._is_paused = True

    def observe(self, began: float, num_ended: int, now: float) -> None:
        """Count a step, and the turns of other models since the last step."""
        self._seconds += now - (began if self._is_paused else self._observed_at)
        self._observed_at, self._is_paused = now, False
        self._ends.extend([self._seconds] * num_ended)

    def pause(self) -> None:
        """Stop counting time, because new sequences would not wait."""
        self._is_paused = True

    def rate(self, now: float) -> float | None:
        """Return the sequences that end per second, or None if fewer than two were observed."""
        if now - self._observed_at > self.FORGET_SECONDS:
            self._ends.clear()
        if len(self._ends) < 2:
            return None
        return len(self._ends) / max(self._seconds - self._ends[0], 1e-3)
