"""Process setup: parent-death signal and garbage collector."""

from __future__ import annotations

import gc
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask the kernel (Linux only) to send a signal when the parent dies, so that no process outlives the service."""
    if os.uname().sysname == "Linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def relax_garbage_collector() -> None:
    """Exempt start-up's objects from collection and collect rarely: requests create next to no cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
