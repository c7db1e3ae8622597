"""The checkpoints that are served, by name, and how one list of them replaces another without a lost request.

The main process owns the `Catalog`. It reads the folders at start and at SIGHUP, copies what is new into the run's own
folder, which nobody replaces, and publishes a `Listing` there, step by step:

    load    workers load what is new; requests go where they went
    serve   HTTP processes send new requests to it; running ones stay where they are
    drop    workers drop what is old, once no request uses it

All processes see a new listing by its generation in shared memory, and show there which one they follow. If a worker
cannot load a checkpoint, or dies of it, the old list stays. Knows nothing of engines and HTTP.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from service.model.checkpoint import MANIFEST, Checkpoint, CheckpointError
from service.shared import MAX_NAMES, SharedState

logger = logging.getLogger(__name__)

FILE = "checkpoints.json"
LOAD_SECONDS = 600.0  # for all workers; GPUs capture graphs meanwhile
SERVE_SECONDS = 60.0  # for all HTTP processes


class Version(msgspec.Struct, frozen=True):
    """A checkpoint as it was when it was read, under the name by which requests choose it."""

    id: int  # later ones have higher ones
    name: str
    source: str  # the folder that it was read from
    folder: str  # its copy, in the run's folder
    digest: str

    def read(self) -> Checkpoint:
        """Raises CheckpointError: the copy is gone or was altered."""
        return Checkpoint.read(self.folder, self.digest)


class Listing(msgspec.Struct):
    """What all processes are to hold and to serve."""

    generation: int = 0
    load: list[Version] = []  # workers hold these
    serve: list[Version] = []  # requests go to these; their names differ
    rows: dict[str, int] = {}  # in shared memory, of every name that was ever listed

    @classmethod
    def read(cls, folder: Path) -> Listing:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=cls)

    def publish(self, folder: Path, state: SharedState) -> None:
        temporary = folder / f"{FILE}.new"
        temporary.write_bytes(msgspec.json.encode(self))
        temporary.replace(folder / FILE)
        state.generation = self.generation


class Catalog:
    """Which checkpoints the settings name, and the steps from one list of them to the next.

    places: names and folders, as --checkpoint has them; model_name: of a checkpoint without a name; folder: the run's;
    replacement: the character that replaces unknown ones by default, which every vocabulary must have; None: none does.
    """

    def __init__(
        self, places: list[tuple[str | None, Path]], model_name: str, folder: Path, replacement: str | None = None
    ):
        self.places, self.model_name, self.folder, self.replacement = places, model_name, folder, replacement
        self.listing = Listing()
        self.checkpoints: dict[int, Checkpoint] = {}  # of the versions in the listing, and of those to come
        self.refused: list[str] = []  # names, at start
        self._next_id = 1
        self._new: list[Version] | None = None  # being rolled out
        self._step = ""
        self._deadline = 0.0
        self._before: dict[int, Version] = {}  # served when the roll-out began
        self._pids: dict[str, int] = {}  # of the workers that were running when the step began

    @property
    def is_rolling_out(self) -> bool:
        return self._new is not None

    @property
    def served(self) -> dict[str, Checkpoint]:
        return {version.name: self.checkpoints[version.id] for version in self.listing.serve}

    def open(self) -> None:
        """Read all checkpoints, at start. One in a folder of runs is left out if it is bad, and logged.

        Raises:
            CheckpointError: one that is named is bad, or there is none.
        """
        versions = []
        for name, (path, is_named) in self._find().items():
            try:
                versions.append(self._read(name, path))
            except CheckpointError as error:
                if is_named:
                    raise
                logger.error("checkpoint %s: refused: %s", name, error)
                self.refused.append(name)
        if not versions:
            raise CheckpointError(f"no checkpoint in {self._folders()} can be served; the log says why")
        rows = self._rows([*(version.name for version in versions), *self.refused])
        self.listing = Listing(0, versions, versions, rows)

    def publish(self, state: SharedState) -> None:
        """The first listing; before any other process starts."""
        self.listing.publish(self.folder, state)
        for name in self.refused:
            state.count_reload(self.listing.rows[name], "refused")

    def refresh(self, state: SharedState) -> None:
        """Read the folders again, and begin to roll out what has changed. Nothing may be rolling out."""
        old = {version.name: version for version in self.listing.serve}
        versions, rows = [], self.listing.rows
        try:
            found = self._find(old)
        except CheckpointError as error:
            logger.error("checkpoints: %s: the old ones stay", error)
            return
        for name, (path, _) in found.items():
            try:
                versions.append(self._read(name, path, old.get(name)))
            except CheckpointError as error:
                self._refuse(state, name, str(error))
                if name in old:
                    versions.append(old[name])
        if not versions:
            logger.error("no checkpoint is left in %s: the old ones stay", self._folders())
        elif versions == self.listing.serve:
            logger.info("checkpoints: nothing has changed")
            if rows != self.listing.rows:  # those that were refused
                self._publish(state, "drop", 0.0, self.listing.load, self.listing.serve)
        else:
            self._new = versions
            # A name that comes back later finds its row again.
            self.listing.rows = self._rows(version.name for version in versions)
            self._publish(state, "load", LOAD_SECONDS, [*self.listing.load, *versions], self.listing.serve)

    def check(self, state: SharedState) -> bool:
        """Go on with what is rolling out, as far as the other processes have come; whether `serve` has changed."""
        if self._new is None:
            return False
        if self._step == "load":
            running = {name: pid for name, pid in state.pids.items() if name in self._pids}
            if running != self._pids or any(map(state.has_failed, self._pids)):
                self._revert(state, "a worker could not load it; its log says why")
            elif all(state.follows(name, self.listing.generation) for name in self._pids):
                self._publish(state, "serve", SERVE_SECONDS, self.listing.load, self._new)
                return True
            elif time.monotonic() > self._deadline:
                self._revert(state, f"workers have not loaded it within {LOAD_SECONDS:g} s")
            return False
        running_http = [name for name in state.http_names if state.last_beat(name) is not None]
        if all(state.follows(name, self.listing.generation) for name in running_http):
            self._finish(state)
        elif time.monotonic() > self._deadline:
            logger.error("HTTP processes have not read the new checkpoints within %g s", SERVE_SECONDS)
            self._finish(state)  # those that hang are replaced, by ones that have
        return False

    def _finish(self, state: SharedState) -> None:
        assert self._new is not None
        self._publish(state, "drop", 0.0, self._new, self._new)
        before, self._new = self._before, None
        kept = {version.id for version in self.listing.load}
        for version in self.listing.serve:
            if version.id not in before:
                logger.info("checkpoint %s: now %s of %s", version.name, version.digest[:12], version.source)
                state.count_reload(self.listing.rows[version.name], "loaded")
        names = {version.name for version in self.listing.serve}
        for version in before.values():
            if version.name not in names:
                logger.info("checkpoint %s: removed; %s is gone", version.name, version.source)
                state.count_reload(self.listing.rows[version.name], "removed")
            if version.id not in kept:
                self._discard(version)

    def _revert(self, state: SharedState, reason: str) -> None:
        assert self._new is not None
        new = [version for version in self._new if version.id not in self._before]
        self._new = None
        for version in new:
            self._refuse(state, version.name, reason)
            self._discard(version)
        self._publish(state, "drop", 0.0, self.listing.serve, self.listing.serve)

    def _publish(
        self, state: SharedState, step: str, seconds: float, load: list[Version], serve: list[Version]
    ) -> None:
        if step == "load":
            self._before = {version.id: version for version in self.listing.serve}
            self._pids = {
                name: pid
                for name, pid in state.pids.items()
                if name in state.worker_names and state.last_beat(name) is not None
            }
        unique = list({version.id: version for version in load}.values())
        self._step, self._deadline = step, time.monotonic() + seconds
        self.listing = Listing(self.listing.generation + 1, unique, serve, self.listing.rows)
        self.listing.publish(self.folder, state)

    def _refuse(self, state: SharedState, name: str, reason: str) -> None:
        logger.error("checkpoint %s: refused: %s", name, reason)
        self.listing.rows = self._rows([name])
        state.count_reload(self.listing.rows[name], "refused")

    def _rows(self, names: Iterable[str]) -> dict[str, int]:
        rows = dict(self.listing.rows)
        for name in names:
            rows.setdefault(name, min(len(rows), MAX_NAMES - 1))
        return rows

    def _find(self, served: Iterable[str] = ()) -> dict[str, tuple[Path, bool]]:
        """The folder of each name, and whether the settings name it; those of `served` may be damaged.

        Raises:
            CheckpointError: two have one name, or there are too many.
        """
        found: dict[str, tuple[Path, bool]] = {}
        for given, path in self.places:
            if given is None and (runs := list(_runs(path, served))):
                items = [(run.name, _checkpoint_in(run), False) for run in runs]
            else:
                items = [(given or self.model_name, _checkpoint_in(path), True)]
            for name, folder, is_named in items:
                if name in found:
                    raise CheckpointError(f"two checkpoints have the name {name}: {found[name][0]} and {folder}")
                found[name] = (folder, is_named)
        if len(self.listing.rows.keys() | found.keys()) > MAX_NAMES:
            raise CheckpointError(f"checkpoints of more than {MAX_NAMES} names since the start")
        return found

    def _read(self, name: str, path: Path, old: Version | None = None) -> Version:
        """Verify a checkpoint, weights included, and copy it; `old` if it is the same.

        Raises:
            CheckpointError: it is bad, or was changed meanwhile, or cannot be served with these settings, or the disk
                is full.
        """
        if old is not None and _digest(path) == old.digest:
            return old
        checkpoint = Checkpoint.read(path)
        if self.replacement is not None and self.replacement not in checkpoint.tokenizer:
            raise CheckpointError(
                f"{path}: its vocabulary does not have the character {self.replacement!r}, which is to replace unknown "
                "ones: set --replacement-character to one that it has, or --unknown-characters to drop or refuse"
            )
        checkpoint.load_weights()
        id, self._next_id = self._next_id, self._next_id + 1
        folder = self.folder / f"checkpoint-{id}"
        try:
            folder.mkdir()
            for file in (MANIFEST, *checkpoint.files):
                shutil.copyfile(path / file, folder / file)
            version = Version(id, name, str(path), str(folder), checkpoint.digest)
            self.checkpoints[id] = version.read()
        except (OSError, CheckpointError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            reason = f"{path} cannot be copied to {folder}: {error.strerror}" if isinstance(error, OSError) else error
            raise CheckpointError(str(reason)) from None
        return version

    def _folders(self) -> str:
        return ", ".join(str(path) for _, path in self.places)

    def _discard(self, version: Version) -> None:
        del self.checkpoints[version.id]
        shutil.rmtree(version.folder, ignore_errors=True)


def _checkpoint_in(path: Path) -> Path:
    """The checkpoint of a training run's folder is in best/."""
    return path / "best" if not _is_checkpoint(path) and _is_checkpoint(path / "best") else path


def _is_checkpoint(path: Path) -> bool:
    """False too where that may not be seen; who reads it then says why."""
    return os.path.isfile(path / MANIFEST)


def _runs(path: Path, served: Iterable[str]) -> Iterator[Path]:
    """The folders of a folder of runs that hold a checkpoint, or whose name is served; none if it is no such folder."""
    if _is_checkpoint(_checkpoint_in(path)):
        return
    with contextlib.suppress(OSError):  # not a folder: there is no checkpoint, which is said when it is read
        for child in sorted(path.iterdir()):
            if child.name.startswith(".") or not os.path.isdir(child):
                continue
            if _is_checkpoint(_checkpoint_in(child)) or child.name in served:
                yield child


def _digest(path: Path) -> str | None:
    """SHA-256 of a checkpoint whose files are all as the manifest says; None: it must be read to know."""
    try:
        return Checkpoint.read(path).digest if _is_checkpoint(path) else None
    except CheckpointError:
        return None
