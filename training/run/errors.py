"""Why a run ends early.

Refusal (messages.py)
├── ResumeError      it cannot be resumed, or must not be overwritten
└── DivergedError    the loss, the gradient or a weight is not finite
StorageError         its folder cannot be written
InterruptedRun       a signal ended it after a save
"""

from __future__ import annotations

import signal

from training.messages import Refusal


class ResumeError(Refusal):
    """A run cannot be resumed or must not be overwritten. The message gives the reason and what to do."""


class DivergedError(Refusal):
    """The loss, the gradient or a weight is not finite."""


class StorageError(OSError):
    """The run's folder cannot be written; the message says what was saved and how to resume."""


class InterruptedRun(Exception):
    """A signal ended the run after a save."""

    def __init__(self, number: signal.Signals, message: str):
        super().__init__(f"{number.name}: {message}")
        self.number = number
