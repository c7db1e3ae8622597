"""Process setup: name and parent-death signal, garbage collector, and the service's temporary folder."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # linux/prctl.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
LARGE_BLOCK_BYTES = 1 << 17
MAX_FREE_BYTES = 1 << 22  # at the end of the heap

MAX_FOLDER_BYTES = 75  # a socket's path has at most 103 bytes (macOS) or 107
SHARED_MEMORY = "/dev/shm"  # writable even in a container whose root is read-only


class FolderError(OSError):
    """There is no usable temporary folder."""


def become(name: str, parent: int) -> None:
    """Take a name, and ask the kernel (Linux only) for SIGKILL when the parent dies: no process outlives the service.

    name: in log lines, and for `top` and `ps -o comm`, which show 15 characters; parent: its process id; the process
    ends at once if the parent has died before.
    """
    multiprocessing.current_process().name = name
    if sys.platform == "linux":
        import ctypes

        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_NAME, name.encode())
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@contextlib.contextmanager
def blocked(*signals: signal.Signals) -> Iterator[None]:
    """Signals that arrive meanwhile are handled afterwards. Processes started meanwhile have them blocked too."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def map_large_blocks() -> None:
    """Have glibc make each large block a mapping of its own, which the system has back as soon as it is freed.

    Otherwise glibc puts them into its heap once it has freed a few, where small blocks behind them keep them.
    """
    mallopt = _function_of_libc("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, MAX_FREE_BYTES)


def trim_memory() -> None:
    """Give free pages of glibc's heap back to the system: 10 ms for 250 MB, in which Python can go on."""
    malloc_trim = _function_of_libc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _function_of_libc(name: str) -> Any:
    """None: this system's libc has no such function."""
    import ctypes

    return getattr(ctypes.CDLL(None), name, None)


def relax_garbage_collector() -> None:
    """Exempt the objects that are there from collection, and collect little at a time.

    Nothing is collected first: modules leave little, and to look through all objects takes 0.1 s and copies the memory
    that processes share.

    Requests leave no cycles (tests/http/test_garbage.py), so that a collection finds only what is in use: 10,000
    objects take about a millisecond, in which everybody waits. What is older is looked at every 20, or 1,000, times.
    """
    gc.freeze()
    gc.enable()
    gc.set_threshold(10_000, 20, 50)


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """A temporary folder for this run of the service: its sockets and metrics. Removed at the end.

    Sets TMPDIR to shared memory where none of the usual places is writable, so that libraries use it too.

    This user's folders of earlier runs that were killed are removed too: nobody holds their locks.

    Raises FolderError: there is no folder to write to, or its path is too long for a Unix socket's.
    """
    try:
        temporary = Path(tempfile.gettempdir())
    except OSError as error:
        if not os.access(SHARED_MEMORY, os.W_OK):
            raise FolderError(f"TMPDIR: {error.strerror}, nor is {SHARED_MEMORY} writable") from None
        tempfile.tempdir = os.environ["TMPDIR"] = SHARED_MEMORY
        temporary = Path(SHARED_MEMORY)
    if len(os.fsencode(temporary)) > MAX_FOLDER_BYTES:
        raise FolderError(f"TMPDIR: {temporary} is too long for Unix sockets: at most {MAX_FOLDER_BYTES} bytes")
    for old in temporary.glob("chargpt-*"):
        with contextlib.suppress(OSError):
            if old.lstat().st_uid == os.getuid() and (old / "lock").is_file():
                with open(old / "lock", "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(old)
    while True:
        folder = Path(tempfile.mkdtemp(prefix="chargpt-"))  # mode 0700
        with open(folder / "lock", "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until this process and all that it forked have ended
            if not (folder / "lock").exists():  # removed by another start, between these two lines
                continue
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            return
