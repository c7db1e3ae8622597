"""The service with its metrics disabled, to measure their cost.

    python -m tests.bench.unmeasured --checkpoint DIR --port 8001

Metrics are declared and /metrics answers, but observations do nothing, in HTTP processes and workers.
"""

from __future__ import annotations

import sys
from typing import Any

from service.engine import worker


def disable_metrics() -> None:
    from service.observe import metrics

    def nothing(*_: Any, **__: Any) -> None:
        pass

    metrics.Histogram.observe = metrics.Counter.inc = nothing
    metrics.Gauge.set = metrics.Metrics.flush = nothing


class UnmeasuredAPI(worker.EngineAPI):
    """Disables metrics in the worker process too."""

    def setup(self, device: str) -> None:
        disable_metrics()
        super().setup(device)


if __name__ == "__main__":
    worker.EngineAPI = UnmeasuredAPI  # before the server imports it
    from service import server

    build_server = server.build_server

    def build_unmeasured(*arguments: Any) -> Any:  # PROMETHEUS_MULTIPROC_DIR is set by now
        disable_metrics()
        return build_server(*arguments)

    server.build_server = build_unmeasured
    from service.__main__ import main

    sys.exit(main())
