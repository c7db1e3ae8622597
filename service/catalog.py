"""The list of served checkpoints: reads the folders at start and at SIGHUP, and copies new checkpoints.

The main process owns the `Catalog`. It publishes a `Listing` in the run's own folder. The generation of a listing in
shared memory tells HTTP processes that it is new, and they report there which one they follow. rollout.py decides what
is listed. This module knows nothing about processes, engines and HTTP.
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

from service.model.checkpoint import (
    MANIFEST,
    Checkpoint,
    CheckpointError,
    checkpoint_in,
    is_checkpoint,
    previous_of,
)
from service.shared import MAX_NAMES, MAX_VERSIONS, SharedState

logger = logging.getLogger(__name__)

FILE = "checkpoints.json"


class Version(msgspec.Struct, frozen=True):
    """A checkpoint as it was when it was read, and the name by which requests choose it."""

    id: int  # rises with each version
    place: int  # among the MAX_VERSIONS of SharedState, which gives the numbers of its workers
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
    """The versions that have workers, and those that are served."""

    generation: int = 0
    running: list[Version] = []  # HTTP processes are connected to the workers of these
    serve: list[Version] = []  # requests go to these; their names differ
    rows: dict[str, int] = {}  # row in shared memory of every name that was ever listed

    def workers(self, state: SharedState) -> set[int]:
        """Return the numbers of the workers of all its versions."""
        return {id for version in self.running for id in state.workers_of(version.place)}

    @classmethod
    def read(cls, folder: Path) -> Listing:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=cls)

    def publish(self, folder: Path, state: SharedState) -> None:
        temporary = folder / f"{FILE}.new"
        temporary.write_bytes(msgspec.json.encode(self))
        temporary.replace(folder / FILE)
        state.generation.value = self.generation


class Catalog:
    """Reads the checkpoints of the settings, and holds a copy of each version until it is forgotten.

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
        self.found: list[Version] | None = None  # a new list, which rollout.py takes
        self._places: set[int] = set()  # taken
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

    def publish_first(self, state: SharedState) -> None:
        """Publish the first listing, before any other process starts. Raises OSError: the disk is full."""
        self.listing.publish(self.folder, state)
        for name in self.refused:
            state.count_reload(self._rows[name], "refused")
        state.has_read("main", "checkpoints")
        if self.refused:
            state.has_read("main", "checkpoints", is_valid=False)

    def refresh(self, state: SharedState) -> None:
        """Read the folders again. `found` is the new list if it differs. No roll-out may be in progress.

        It may run in a thread while no other method is called.
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
            self.refuse(state, name, str(reason))
        self._add_rows(version.name for version in versions)
        if self.is_ending:  # it may have read a part of them
            return
        if versions and versions != self.listing.serve:
            self.found = versions
            return
        if versions:
            logger.info("checkpoints: %s", "those served before stay" if failures else "nothing has changed")
        else:
            logger.error("no checkpoint is left in %s: the old ones stay", self._folders())
            self._has_refused = True
        self.end_reading(state)

    def publish(self, state: SharedState, running: list[Version], serve: list[Version]) -> bool:
        """Publish a listing. Returns False if the disk is full; the old listing stays."""
        listing = Listing(self.listing.generation + 1, running, serve, dict(self._rows))
        try:
            listing.publish(self.folder, state)
        except OSError as error:
            if self._can_publish:  # log once, because it is retried
                logger.error("checkpoints: the new list cannot be written to %s: %s", self.folder, error.strerror)
            self._can_publish = False
            return False
        self.listing, self._can_publish = listing, True
        return True

    def note_changes(self, state: SharedState, before: list[Version]) -> None:
        """Log and count how the served list differs from the one before."""
        serve = self.listing.serve
        ids, names = {version.id for version in before}, {version.name for version in serve}
        changes = [(version, "loaded") for version in serve if version.id not in ids]
        changes += [(version, "removed") for version in before if version.name not in names]
        for version, result in changes:
            logger.info("checkpoint %s: %s: %s of %s", version.name, result, version.digest[:12], version.source)
            state.count_reload(self._rows[version.name], result)
        self.end_reading(state)

    def end_reading(self, state: SharedState, is_served: bool = True) -> None:
        """Record whether everything that was read last is served."""
        state.has_read("main", "checkpoints", is_valid=is_served and not self._has_refused)
        if self._rows != self.listing.rows:  # a refused name is new
            self.publish(state, self.listing.running, self.listing.serve)

    def forget(self, version: Version) -> None:
        """Remove the copy of a version, and free its place. None of its workers may run."""
        del self.checkpoints[version.id]
        self._places.remove(version.place)
        shutil.rmtree(version.folder(self.folder), ignore_errors=True)
        logger.info("dropped checkpoint %s: %s", version.name, version.digest[:12])

    def refuse(self, state: SharedState, name: str, reason: str) -> None:
        """Log and count that a checkpoint is not served."""
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

        Raises CheckpointError: it is bad, it was changed meanwhile, these settings cannot serve it, the disk is full,
        or no place is free.
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
        checkpoint.load_counts()
        place = next((it for it in range(MAX_VERSIONS) if it not in self._places), None)
        if place is None:
            raise CheckpointError(
                f"{MAX_VERSIONS} versions of checkpoints have workers, which is the maximum: send SIGHUP again when "
                "requests no longer use replaced ones"
            )
        version = Version(self._next_id, place, name, _shown(path), checkpoint.digest, int(time.time()))
        self._next_id += 1
        folder = version.folder(self.folder)
        try:
            folder.mkdir()
            for file in (MANIFEST, *checkpoint.files):
                shutil.copyfile(path / file, folder / file)
            self.checkpoints[version.id] = version.read(self.folder)
            self._places.add(place)
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
