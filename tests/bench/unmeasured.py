"""The service without its metrics: what it would be if nothing were observed.

    python -m tests.bench.unmeasured --checkpoint DIR --port 8001

Declarations and /metrics stay; every observation is nothing, in the HTTP processes and in the workers.
"""

from __future__ import annotations

import sys
from typing import Any

from service.engine import worker


def observe_nothing() -> None:
    from service.observe import metrics

    def nothing(*_: Any, **__: Any) -> None:
        pass

    metrics.Histogram.observe = metrics.Counter.inc = nothing
    metrics.Gauge.set = metrics.Metrics.flush = nothing


class UnmeasuredAPI(worker.EngineAPI):
    """A worker is a new process, which begins here."""

    def setup(self, device: str) -> None:
        observe_nothing()
        super().setup(device)


if __name__ == "__main__":
    worker.EngineAPI = UnmeasuredAPI  # before the server takes it from there
    from service import server

    build_server = server.build_server

    def build_unmeasured(*arguments: Any) -> Any:  # PROMETHEUS_MULTIPROC_DIR is set by now
        observe_nothing()
        return build_server(*arguments)

    server.build_server = build_unmeasured
    from service.__main__ import main

    sys.exit(main())
