"""Long work on the event loop, such as encoding a large answer, with turns for other requests in between."""

from __future__ import annotations

import asyncio
import time

BUSY_SECONDS = 0.004  # before a pause; another request may need several turns of the loop


class Pause:
    def __init__(self) -> None:
        self._since = time.monotonic()

    async def if_due(self) -> None:
        """Let the event loop run what waits, if the last pause was BUSY_SECONDS ago."""
        if time.monotonic() - self._since >= BUSY_SECONDS:
            await asyncio.sleep(0)
            self._since = time.monotonic()
