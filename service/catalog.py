"""The list of served checkpoints, and the rollout of a new list without a lost request.

The main process owns the `Catalog`. It reads the folders at start and at SIGHUP, copies new checkpoints into the run's
own folder, and publishes a `Listing` there in three steps:

    load    Workers load the new checkpoints. Requests go to the old ones.
    serve   HTTP processes send new requests to the new checkpoints. Running requests stay where they are.
    drop    Workers drop an old checkpoint when no request uses it. The next rollout does not wait for this.

The generation of a listing in shared memory tells all processes that it is new. They report there which one they
follow. The old listing stays if a worker cannot load a checkpoint, if a worker dies meanwhile, or if the listing cannot
be written. This module knows nothing about engines and HTTP.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from service.model.checkpoint import (
    MANIFEST,
    Checkpoint,
    CheckpointError,
    checkpoint_in,
    is_checkpoint,
    previous_of,
)
from service.shared import MAX_NAMES, SharedState

logger = logging.getLogger(__name__)

FILE = "checkpoints.json"
LOAD_SECONDS = 600.0  # limit for all workers, which capture graphs on GPUs
SERVE_SECONDS = 60.0  # limit for all HTTP processes


class Version(msgspec.Struct, frozen=True):
    """A checkpoint as it was when it was read, and the name by which requests choose it."""

    id: int  # rises with each version
    name: str
    source: str  # the original folder, for messages
    digest: str
    created_at: int  # Unix time

    def folder(self, run: Path) -> Path:
        """The folder of its copy."""
        return run / f"checkpoint-{self.id}"

    def read(self, run: Path) -> Checkpoint:
        """Raises CheckpointError: the copy is gone or was altered."""
        return Checkpoint.read(self.folder(run), self.digest)


class Listing(msgspec.Struct):
    """The versions that all processes hold and serve."""

    generation: int = 0
    load: list[Version] = []  # workers hold these
    serve: list[Version] = []  # requests go to these; their names differ
    rows: dict[str, int] = {}  # row in shared memory of every name that was ever listed

    @classmethod
    def read(cls, folder: Path) -> Listing:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=cls)

    def publish(self, folder: Path, state: SharedState) -> None:
        temporary = folder / f"{FILE}.new"
        temporary.write_bytes(msgspec.json.encode(self))
        temporary.replace(folder / FILE)
        state.generation.value = self.generation


class Catalog:
    """Reads the checkpoints of the settings, and rolls out changed ones.

    places: names and folders, as in --checkpoint.
    model_name: name of a checkpoint given without one.
    folder: the run's own folder.
    replaces: whether unknown characters are replaced by default. Every vocabulary must then have its replacement.
    """

    def __init__(self, places: list[tuple[str | None, Path]], model_name: str, folder: Path, replaces: bool = False):
        self.places, self.model_name, self.folder, self.replaces = places, model_name, folder, replaces
        self.listing = Listing()
        self.checkpoints: dict[int, Checkpoint] = {}  # all versions that have a copy
        self.refused: list[str] = []  # names refused at start
        self._has_refused = False  # True: something that was read last is not served
        self._next_id = 1
        self._rows: dict[str, int] = {}  # rows of the listing and of the next one
        self._has_runs: dict[Path, bool] = {}  # True for a place without a name that is a folder of runs
        self.step: Literal["", "load", "serve"] = ""  # step of the rollout
        self._new: list[Version] = []  # rolled out
        self._before: list[Version] = []  # replaced
        self._deadline = 0.0
        self._pids: dict[str, int] = {}  # workers that were running when the step began
        self._retired: list[Version] = []  # loaded and not served; a request may still use them
        self._can_publish = True
        self.is_ending = False  # True: the service ends, so read nothing more

    @property
    def served(self) -> dict[str, Checkpoint]:
        return {version.name: self.checkpoints[version.id] for version in self.listing.serve}

    def open(self) -> None:
        """Read all checkpoints at start. A bad one in a folder of runs is logged and left out.

        Raises CheckpointError: a named checkpoint is bad, or there is none, or there are too many.
        """
        found = self._find()
        if len(found) > MAX_NAMES:
            raise CheckpointError(f"at most {MAX_NAMES} checkpoints can be served, got {len(found)}")
        versions, failures = self._read_all(found, {})
        for name, error in failures.items():
            if found[name][1]:
                raise error
            logger.error("checkpoint %s: refused: %s", name, error)
        if not versions:
            raise CheckpointError(f"no checkpoint in {self._folders()} can be served; the log says why")
        self.refused = [*failures]
        self._add_rows([*(version.name for version in versions), *self.refused])
        self.listing = Listing(0, versions, versions, self._rows)

    def publish(self, state: SharedState) -> None:
        """Publish the first listing, before any other process starts. Raises OSError: the disk is full."""
        self.listing.publish(self.folder, state)
        for name in self.refused:
            state.count_reload(self._rows[name], "refused")
        state.has_read("main", "checkpoints")
        if self.refused:
            state.has_read("main", "checkpoints", is_valid=False)

    def refresh(self, state: SharedState) -> None:
        """Read the folders again, and begin a rollout of the changes. No rollout may be in progress.

        It may run in a thread while `check` is not called.
        """
        old = {version.name: version for version in self.listing.serve}
        self._has_refused = False
        try:
            found = self._find(old)
        except CheckpointError as error:
            logger.error("checkpoints: %s: the old ones stay", error)
            state.has_read("main", "checkpoints", is_valid=False)
            return
        for name in [name for name in found if name not in self._rows][MAX_NAMES - len(self._rows) :]:
            logger.error("checkpoint %s: refused: there have been %d names since the start", name, MAX_NAMES)
            self._has_refused = True
            del found[name]
        versions, failures = self._read_all(found, old)
        for name, reason in failures.items():
            self._refuse(state, name, str(reason))
        self._add_rows(version.name for version in versions)
        if versions and versions != self.listing.serve:
            running = [name for name in state.worker_names if state.last_beat(name) is not None]
            self._pids = {name: state.pids[name] for name in running}
            self._new = versions
            if self._publish(state, [*self.listing.load, *versions], self.listing.serve):
                self.step, self._deadline = "load", time.monotonic() + LOAD_SECONDS
            else:
                self._revert(state, "the temporary folder is full")
            return
        if versions:
            logger.info("checkpoints: %s", "those served before stay" if failures else "nothing has changed")
        else:
            logger.error("no checkpoint is left in %s: the old ones stay", self._folders())
            self._has_refused = True
        state.has_read("main", "checkpoints", is_valid=not self._has_refused)
        if self._rows != self.listing.rows:  # a refused name is new
            self._publish(state, self.listing.load, self.listing.serve)

    def check(self, state: SharedState) -> bool:
        """Take the next step of a rollout if the other processes have done the last one.

        Returns True if the checkpoints that new requests use have changed.
        """
        if self.step == "load":
            return self._end_load(state)
        if self.step == "serve":
            self._end_serve(state)
        elif self._retired and self._is_followed(state):
            self._drop(state)
        return False

    def _end_load(self, state: SharedState) -> bool:
        """Serve the new versions once all workers have loaded them, or revert if one cannot."""
        generation = self.listing.generation
        if not self._pids or any(state.pids[name] != pid for name, pid in self._pids.items()):
            self._revert(state, "a worker died while it was loaded")
        elif any(state.has_failed(name, generation) for name in self._pids):
            self._revert(state, "a worker could not load it; the log says why")
        elif time.monotonic() > self._deadline:
            self._revert(state, f"workers have not loaded it within {LOAD_SECONDS:g} s")
        elif all(state.follows(name, generation) for name in self._pids):
            self._before = self.listing.serve
            if self._publish(state, self.listing.load, self._new):  # otherwise try again until the deadline
                self.step, self._deadline = "serve", time.monotonic() + SERVE_SECONDS
                return True
        return False

    def _end_serve(self, state: SharedState) -> None:
        """Retire the old versions once all HTTP processes use the new ones.

        A process that is late at the deadline hangs, and its replacement will use them, or it reads very slowly.
        """
        if self._is_followed(state) or time.monotonic() > self._deadline:
            served = {version.id for version in self._new}
            self._retired = [version for version in self.listing.load if version.id not in served]
            self.step = ""
            self._note_changes(state)
            state.has_read("main", "checkpoints", is_valid=not self._has_refused)

    def _is_followed(self, state: SharedState) -> bool:
        """True if every running HTTP process uses the current listing."""
        running = [name for name in state.http_names if state.last_beat(name) is not None]
        return all(state.follows(name, self.listing.generation) for name in running)

    def _note_changes(self, state: SharedState) -> None:
        ids, names = {version.id for version in self._before}, {version.name for version in self._new}
        changes = [(version, "loaded") for version in self._new if version.id not in ids]
        changes += [(version, "removed") for version in self._before if version.name not in names]
        for version, result in changes:
            logger.info("checkpoint %s: %s: %s of %s", version.name, result, version.digest[:12], version.source)
            state.count_reload(self._rows[version.name], result)

    def _revert(self, state: SharedState, reason: str) -> None:
        served = {version.id for version in self.listing.serve}
        for version in self._new:
            if version.id not in served:
                self._refuse(state, version.name, reason)
                self._retired.append(version)
        state.has_read("main", "checkpoints", is_valid=False)
        self.step = ""
        self._drop(state)

    def _drop(self, state: SharedState) -> None:
        """Drop the retired versions that no request uses."""
        unused = [version for version in self._retired if not state.is_used(version.id)]
        gone = {version.id for version in unused}
        kept = [version for version in self.listing.load if version.id not in gone]
        if unused and self._publish(state, kept, self.listing.serve):
            self._retired = [version for version in self._retired if version.id not in gone]
            for version in unused:
                del self.checkpoints[version.id]
                shutil.rmtree(version.folder(self.folder), ignore_errors=True)

    def _publish(self, state: SharedState, load: list[Version], serve: list[Version]) -> bool:
        """Publish a listing. Returns False if the disk is full; the old listing stays."""
        unique = list({version.id: version for version in load}.values())
        listing = Listing(self.listing.generation + 1, unique, serve, dict(self._rows))
        try:
            listing.publish(self.folder, state)
        except OSError as error:
            if self._can_publish:  # log once, because it is retried
                logger.error("checkpoints: the new list cannot be written to %s: %s", self.folder, error.strerror)
            self._can_publish = False
            return False
        self.listing, self._can_publish = listing, True
        return True

    def _refuse(self, state: SharedState, name: str, reason: str) -> None:
        logger.error("checkpoint %s: refused: %s", name, reason)
        self._has_refused = True
        self._add_rows([name])
        state.count_reload(self._rows[name], "refused")

    def _add_rows(self, names: Iterable[str]) -> None:
        """Give each new name a row. A name that comes back later keeps its row."""
        for name in names:
            self._rows.setdefault(name, len(self._rows))

    def _find(self, served: Iterable[str] = ()) -> dict[str, tuple[Path, bool]]:
        """Return the folder of each name, and whether the settings name it. A run in `served` may be damaged.

        Raises CheckpointError: two checkpoints have the same name, or a folder of runs has lost all its runs.
        """
        found: dict[str, tuple[Path, bool]] = {}
        for given, path in self.places:
            runs: list[Path] = []
            if given is None and self._has_runs.get(
                path, True
            ):  # a run that lost best/ does not become a folder of runs
                runs = list(_runs(path, served))
                if not runs and path in self._has_runs:  # for example, not mounted
                    raise CheckpointError(f"there is no run in {path} any more")
                self._has_runs[path] = bool(runs)
            if runs:
                items = [(run.name, checkpoint_in(run), False) for run in runs]
            else:
                items = [(given or self.model_name, checkpoint_in(path), True)]
            for name, folder, is_named in items:
                if name in found:
                    raise CheckpointError(f"two checkpoints have the name {name}: {found[name][0]} and {folder}")
                found[name] = (folder, is_named)
        return found

    def _read_all(
        self, found: dict[str, tuple[Path, bool]], old: dict[str, Version]
    ) -> tuple[list[Version], dict[str, CheckpointError]]:
        """Return the versions to serve, and the errors of unreadable ones. Their old versions stay."""
        versions, failures = [], {}
        for name, (path, _) in found.items():
            if self.is_ending:
                break
            try:
                versions.append(self._read(name, path, old.get(name)))
            except CheckpointError as error:
                failures[name] = error
                if name in old:
                    versions.append(old[name])
        return versions, failures

    def _read(self, name: str, path: Path, old: Version | None) -> Version:
        """Verify a checkpoint with its weights, and copy it. Returns `old` if nothing has changed.

        Raises CheckpointError: it is bad, it was changed meanwhile, these settings cannot serve it, or the disk is
        full.
        """
        is_seen = os.path.isdir(path) and os.access(path, os.R_OK | os.X_OK)
        if is_seen and not any(map(os.path.lexists, (path / MANIFEST, previous_of(path.absolute())))):
            looked = f"looked for {MANIFEST} in it, in best/, and in the folders of runs that it may hold"
            raise CheckpointError(f"no checkpoint at {path}: {looked}")
        checkpoint = Checkpoint.read(path)
        if old is not None and checkpoint.digest == old.digest:
            return old
        replacement = checkpoint.tokenizer.replacement
        if self.replaces and replacement not in checkpoint.tokenizer:
            raise CheckpointError(
                f"{path}: its vocabulary does not have the character {replacement!r}, which is to replace unknown "
                "ones: set --unknown-characters to drop or refuse"
            )
        checkpoint.load_weights()
        checkpoint.load_ngrams()
        version = Version(self._next_id, name, _shown(path), checkpoint.digest, int(time.time()))
        self._next_id += 1
        folder = version.folder(self.folder)
        try:
            folder.mkdir()
            for file in (MANIFEST, *checkpoint.files):
                shutil.copyfile(path / file, folder / file)
            self.checkpoints[version.id] = version.read(self.folder)
        except (OSError, CheckpointError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise CheckpointError(f"{path} cannot be copied to {folder}: {error.strerror}") from None
            raise CheckpointError(f"{path} was changed while it was read") from None
        return version

    def _folders(self) -> str:
        return ", ".join(str(path) for _, path in self.places)


def _runs(path: Path, served: Iterable[str]) -> Iterator[Path]:
    """Yield the runs of a folder: each folder in it that holds a checkpoint or has a served name."""
    if is_checkpoint(checkpoint_in(path)):
        return
    with contextlib.suppress(OSError):  # not a folder: reading it gives the reason
        for child in sorted(path.iterdir()):
            if child.name.startswith(".") or not os.path.isdir(child):
                continue
            if _shown(child.name) != child.name:
                logger.error("%s: left out, because its name is not UTF-8", _shown(child))
                continue
            if is_checkpoint(checkpoint_in(child)) or child.name in served:
                yield child


def _shown(path: Path | str) -> str:
    """Return a path as text. Bytes that are not UTF-8 are replaced."""
    return os.fsencode(path).decode("utf-8", "replace")
