"""Process setup: name and parent-death signal, memory, garbage collector, and the service's temporary folder."""

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

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # linux/prctl.h
_M_MMAP_THRESHOLD = -3  # malloc.h
LARGE_BLOCK_BYTES = 1 << 16

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


def trim_memory() -> None:
    """Give the free pages of glibc's heap back to the system: 10 ms for 250 MB, in which Python goes on."""
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(AttributeError):  # musl has no malloc_trim
            ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def blocked(*signals: signal.Signals) -> Iterator[None]:
    """Signals that arrive meanwhile are handled afterwards. Processes started meanwhile have them blocked too."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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


def return_large_blocks() -> None:
    """Have glibc return each block of LARGE_BLOCK_BYTES or more to the system as soon as it is freed.

    By default it keeps ever larger ones, up to 32 MB, once such a block has been freed: buffers of connections would
    then lie between them, and none of that memory could be returned.
    """
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(AttributeError):  # musl has no mallopt
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


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
