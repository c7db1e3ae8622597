"""Replace the folder of a checkpoint or of an encoded text atomically. This module does not import torch."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from service.model.checkpoint import previous_of


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that atomically replaces `path` when the block succeeds.

    On Linux and macOS one call exchanges the two folders. If the system or file system lacks that call, the old folder
    is first moved to `.<name>.previous`. If the process is then killed too early, `restore_folder` moves it back.
    Concurrent processes all succeed, and the folder of the last one remains.

    Raises:
        OSError: the folder cannot be written.
    """
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name}.saving-"
    for leftover in path.parent.glob(f"{glob.escape(prefix)}*"):
        if not _is_other_process(leftover.name.removeprefix(prefix)):
            shutil.rmtree(leftover, ignore_errors=True)
    new = path.parent / f"{prefix}{os.getpid()}"
    new.mkdir()
    try:
        yield new
        for written in (*new.iterdir(), new):
            _fsync(written)
        try:
            new.rename(path)  # the first save
        except OSError:
            if not path.exists():
                raise
            if not _exchange(new, path):
                _move(path, previous_of(path))
                new.rename(path)
        if previous_of(path).is_dir() and not new.exists():
            previous_of(path).rename(new)  # the new folder is in place; the old one is removed below
        try:
            _fsync(path.parent)
        except OSError as error:
            reason = f"it is saved, but a power failure could lose it: {error.strerror}"
            raise OSError(error.errno, reason, str(path)) from error
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        shutil.rmtree(new, ignore_errors=True)


def restore_folder(path: Path) -> None:
    """Put the old folder back if `replacing_folder` was killed before it was done."""
    if previous_of(path).is_dir():
        shutil.rmtree(path, ignore_errors=True)
        previous_of(path).rename(path)


def _is_other_process(pid: str) -> bool:
    """Return whether another process with this PID is alive.

    In a container, this process may have the PID of one that was killed while saving.
    """
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        pass  # it belongs to another user
    return int(pid) != os.getpid()


def _exchange(a: Path, b: Path) -> bool:
    """Atomically exchange two paths (renameat2 on Linux, renamex_np on macOS). Return False if unsupported."""
    library, exchange = ctypes.CDLL(None, use_errno=True), 2  # RENAME_EXCHANGE, RENAME_SWAP
    if hasattr(library, "renameat2"):
        at_cwd = -100
        failed = library.renameat2(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange)
    elif hasattr(library, "renamex_np"):
        failed = library.renamex_np(os.fsencode(a), os.fsencode(b), exchange)
    else:
        return False
    code = ctypes.get_errno()
    # EXDEV: the folder is in a lower layer of overlayfs, for example in a container image.
    if failed and code not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EXDEV):
        raise OSError(code, os.strerror(code), str(b))
    return not failed


def _move(folder: Path, to: Path) -> None:
    """Rename a folder. Copy it if it is in a lower layer of overlayfs, which cannot rename it. `to` is always whole."""
    shutil.rmtree(to, ignore_errors=True)
    try:
        folder.rename(to)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        part = to.with_name(f"{to.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(folder, part)
        part.rename(to)
        shutil.rmtree(folder)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
