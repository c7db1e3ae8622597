"""One account per client: who may run in a step, so that clients share a worker by weight.

The lag of a client is what it is behind its part, in seconds. In each step it grows by the client's part of the step's
time, which is its weight over the weights of all clients with work. It falls by what the step's work for the client
would have taken alone. If some clients are behind by more than a step and have something to run, only they run. So each
client gets at least its part of the speed that it would have alone, whatever the others send. What is left goes to
whoever has something to run.

A lag is bounded, so that nobody who could not run for long holds up the others for long later.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

MAX_LAG_STEPS = 5  # a lag is at most so many times `step_seconds`, in both directions


class Account:
    """The account of a client that has waiting or running sequences."""

    def __init__(self, name: str, weight: float):
        self.name, self.weight = name, weight
        self.lag = 0.0  # seconds
        self.used = 0.0  # seconds that the work of this step would have taken alone


AnyAccount = TypeVar("AnyAccount", bound=Account)


def behind(accounts: Collection[AnyAccount], step_seconds: float) -> set[AnyAccount]:
    """Return the clients that are behind by more than a step."""
    return {account for account in accounts if account.lag > step_seconds}


def settle(accounts: Collection[Account], seconds: float, step_seconds: float) -> None:
    """Book a step that took `seconds`, and the work that was charged to the clients since the last one."""
    weights, limit = sum(account.weight for account in accounts), MAX_LAG_STEPS * step_seconds
    for account in accounts:
        account.lag += seconds * account.weight / weights - account.used
        account.used = 0.0
    least = max(0.0, min((account.lag / account.weight for account in accounts), default=0.0))
    for account in accounts:
        account.lag = min(limit, max(-limit, account.lag - least * account.weight))
