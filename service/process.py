"""Process setup: name and parent-death signal, memory, CPUs, garbage collector, and the service's temporary folder."""

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
    """Set the process name, and ask the kernel (Linux only) for SIGKILL when the parent dies.

    So no process outlives the service. The process ends at once if the parent has died already.

    name: shown in log lines, and by `top` and `ps -o comm`, which show 15 characters.
    parent: process id.
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
    """Return the free pages of glibc's heap to the system. This takes 10 ms for 250 MB, while Python continues."""
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(AttributeError):  # musl has no malloc_trim
            ctypes.CDLL(None).malloc_trim(0)


def available_cpus(root: Path = Path("/")) -> int:
    """Return the CPUs that this process may use: its affinity or its cgroup quota, whichever is lower, at least 1.

    A quota is rounded down. Quotas of all ancestors count. In a container, the group's path is often that of the host,
    and only the root of it is mounted. A group without a folder has no quota of its own.

    root: a file system with proc and sys.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():  # only Linux has it
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            mount = root / ("sys/fs/cgroup/cpu" if controllers else "sys/fs/cgroup")  # version 1 or 2
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
            group = Path(path.lstrip("/"))
            for folder in (group, *group.parents):
                with contextlib.suppress(OSError):  # not mounted, or the root group
                    quota, period = " ".join((mount / folder / name).read_text() for name in names).split()
                    if quota not in ("max", "-1"):
                        cpus = min(cpus, max(1, int(quota) // int(period)))
    return cpus


@contextlib.contextmanager
def blocked(*signals: signal.Signals) -> Iterator[None]:
    """Delay these signals until the end of the block. Processes started in it have them blocked too."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def spare_old_objects() -> None:
    """Exempt all existing objects from garbage collection.

    Nothing is collected first. Modules leave little garbage, and a search through all objects takes 0.1 s, during which
    every request waits, and copies memory that processes share.
    """
    gc.freeze()
    gc.enable()


def return_large_blocks() -> None:
    """Make glibc return each block of LARGE_BLOCK_BYTES or more to the system when it is freed.

    By default glibc keeps blocks of up to 32 MB after one was freed. Buffers of connections would then lie between
    them, and glibc could not return any of that memory.
    """
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(AttributeError):  # musl has no mallopt
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """Yield a temporary folder for this run's sockets and metrics, and remove it at the end.

    If no usual place is writable, TMPDIR becomes shared memory, so that libraries use it too. The folders of this
    user's killed runs, whose locks nobody holds, are removed too.

    Raises FolderError: no folder is writable, or its path is too long for a Unix socket.
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
            fcntl.flock(file, fcntl.LOCK_EX)  # until this process and its forks have ended
            if not (folder / "lock").exists():  # another start removed it between these two lines
                continue
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            return
