"""The inference processes of each checkpoint, and the roll-out of a new list of checkpoints without a lost request.

A version of a checkpoint has inference processes of its own, one for each device and worker; an inference process never
changes its checkpoint. The main process replaces versions in three steps:

    start   The processes of the new versions start and check themselves. Requests go to the old versions.
    serve   When all are ready, HTTP processes send new requests to the new versions. Running requests stay.
    end     The processes of an old version end when no request uses it. The next roll-out does not wait for this.

If a new process ends before it is ready, or the list cannot be written, everything stays as it was. This module knows
nothing about engines, HTTP or LitServe.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess
from typing import Literal

from service.catalog import Catalog, Version
from service.observe.metrics import allocate_worker_files, forget_process
from service.shared import SharedState, worker_name
from service.supervisor import START_SECONDS, Supervisor

SERVE_SECONDS = 60.0  # limit for all HTTP processes to follow, before the next roll-out may begin


class Rollout:
    """Starts, keeps and ends the inference processes that the catalog's listing needs.

    launch: starts the process of a version that has this number.
    """

    def __init__(
        self,
        catalog: Catalog,
        state: SharedState,
        supervisor: Supervisor,
        launch: Callable[[Version, int], BaseProcess],
    ):
        self._catalog, self._state, self._supervisor, self._launch = catalog, state, supervisor, launch
        self.step: Literal["", "start", "serve"] = ""
        self._next: list[Version] = []  # the list to serve
        self._added: list[Version] = []  # those of it that have no processes yet
        self._before: list[Version] = []  # the list that was served before
        self._deadline = 0.0
        self._ending: list[Version] = []  # their processes were told to end

    @property
    def is_busy(self) -> bool:
        """True if no other roll-out may begin."""
        return bool(self.step) or self._catalog.found is not None

    def allocate(self) -> None:
        """Reserve disk space for the metrics of the first listing's processes. Raises OSError: the disk is full."""
        for version in self._catalog.listing.serve:
            self._allocate(version)

    def start(self) -> None:
        """Start the processes of the first listing."""
        for version in self._catalog.listing.serve:
            self._start(version)

    def is_ready(self, version: Version) -> bool:
        """True if a process of this version has been ready."""
        return any(self._state.last_beat(name) is not None for name in self._names([version]))

    def is_alive(self, version: Version) -> bool:
        """True if a process of this version runs."""
        return any(process.is_alive() for process in self._supervisor.processes(self._names([version])))

    def check(self) -> bool:
        """Take the next step if the processes have done the last one. The catalog must not be reading meanwhile.

        Returns True if the checkpoints that new requests use have changed.
        """
        found, self._catalog.found = self._catalog.found, None
        if found is not None:
            self._begin(found)
        has_changed = self.step == "start" and self._end_start()
        if self.step == "serve":
            self._end_serve()
        self._end_unused()
        return has_changed

    def _begin(self, found: list[Version]) -> None:
        """Start the processes of the versions in a new list that have none yet."""
        self.step, self._next = "start", found
        self._added = [version for version in found if version not in self._catalog.listing.running]
        try:
            for version in self._added:
                self._allocate(version)
                self._start(version, is_on_trial=True)
        except OSError as error:
            self._revert(f"no inference process can be started for it: {error.strerror}")

    def _end_start(self) -> bool:
        """Serve the new versions once all their processes are ready, or revert if one has ended."""
        names, catalog = self._names(self._added), self._catalog
        endings = filter(None, map(self._supervisor.ending, names))
        if ending := next(endings, None):
            self._revert(f"{ending}; see the log")
            return False
        if any(self._state.last_beat(name) is None for name in names):
            return False
        self._before = catalog.listing.serve
        if not catalog.publish(self._state, [*catalog.listing.running, *self._added], self._next):
            self._revert("the temporary folder is full")
            return False
        for name in names:
            self._supervisor.keep(name)
        self.step, self._deadline = "serve", time.monotonic() + SERVE_SECONDS
        return True

    def _end_serve(self) -> None:
        """End the roll-out once all HTTP processes use the new versions.

        A process that is late at the deadline hangs, and its replacement will use them, or it reads very slowly. Its
        old versions keep their processes.
        """
        if self._state.is_followed or time.monotonic() > self._deadline:
            self.step = ""
            self._catalog.note_changes(self._state, self._before)

    def _revert(self, reason: str) -> None:
        for version in self._added:
            self._catalog.refuse(self._state, version.name, reason)
        self._catalog.end_reading(self._state, is_served=False)
        self._release(self._added)
        self.step = ""

    def _end_unused(self) -> None:
        """End the processes of the versions that are not served, once no request uses them.

        HTTP processes disconnect from them when they follow the listing without them. Then the processes end.
        """
        catalog, state, listing = self._catalog, self._state, self._catalog.listing
        old = [version for version in listing.running if version not in listing.serve]
        if old and state.is_followed:
            unused = [version for version in old if not state.is_used(version.place)]
            running = [version for version in listing.running if version not in unused]
            if unused and catalog.publish(state, running, listing.serve):
                self._release(unused)
        for version in self._ending.copy():
            if not any(map(self._supervisor.is_watched, self._names([version]))):
                self._ending.remove(version)
                catalog.forget(version)

    def _release(self, versions: Iterable[Version]) -> None:
        for name in filter(self._supervisor.is_watched, self._names(versions)):
            self._supervisor.release(name)
        self._ending += versions

    def _allocate(self, version: Version) -> None:
        for name in self._names([version]):
            allocate_worker_files(name, version.name)

    def _start(self, version: Version, is_on_trial: bool = False) -> None:
        for id in self._state.workers_of(version.place):
            name, start = worker_name(id), functools.partial(self._launch, version, id)
            self._supervisor.watch(name, start, functools.partial(forget_process, name), START_SECONDS, is_on_trial)

    def _names(self, versions: Iterable[Version]) -> list[str]:
        """Return the names of the processes of these versions."""
        return [worker_name(id) for version in versions for id in self._state.workers_of(version.place)]
