"""OpenTelemetry traces: one span per model request, with a child span per phase, exported to a collector.

A span is created after its request ends, from timestamps that are recorded anyway, so tracing delays no request. A
thread exports the spans in batches, and drops spans that the collector does not accept in time. OpenTelemetry's own
variables configure sampling, batching and headers (OTEL_TRACES_SAMPLER, OTEL_BSP_…, OTEL_EXPORTER_OTLP_HEADERS,
OTEL_SERVICE_NAME). The main process has checked them (service/observe/exporter.py).

Needs the extra `tracing`, and is imported only if an endpoint is set. Spans contain no text of prompts or completions.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from service.observe.exporter import open_provider

if TYPE_CHECKING:
    from service.http.routes.request import Request

logger = logging.getLogger(__name__)

# gen_ai.operation.name by route. OpenTelemetry defines text_completion. The other names are our own.
OPERATIONS = {
    "/generate": "text_completion",
    "/v1/completions": "text_completion",
    "/v1/score": "score",
    "/v1/next": "next",
}
FAILURES = ("timeout", "error")  # an abort is the client's choice


class Tracer:
    """Creates and exports the spans of one HTTP process."""

    FLUSH_SECONDS = 3  # to export the last spans at shutdown

    def __init__(self, endpoint: str, service_name: str, process: str):
        self._service_name = service_name
        self._provider, self._exporter = open_provider(endpoint, f"{process}-{os.getpid()}")
        self._tracer = self._provider.get_tracer("chargpt")
        self._propagator = TraceContextTextMapPropagator()

    def request(self, request: Request, ended_at: float) -> None:
        """Create the span of a finished request, if OPERATIONS has its route. Times are from time.monotonic()."""
        route = request.route
        operation = OPERATIONS.get(route)
        if operation is None:
            return
        model_name = self._service_name if request.model is None else request.model.name
        offset = time.time_ns() - time.monotonic_ns()

        def unix(at: float) -> int:
            return int(at * 1e9) + offset

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.fields.items()}
        span = self._tracer.start_span(
            f"{operation} {model_name}",
            self._propagator.extract(headers),
            SpanKind.SERVER,
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "chargpt",
                "gen_ai.request.model": model_name,
                "gen_ai.request.id": request.id,
                "http.request.method": request.method,
                "http.route": route,
            },
            start_time=unix(request.started_at),
        )
        if span.is_recording():
            status = request.status
            if status is not None:
                span.set_attribute("http.response.status_code", status)
            failure = next((reason for reason in FAILURES if reason in request.endings), None)
            if failure is None and status is not None and status >= 500:
                failure = str(status)
            if failure is not None:
                span.set_attribute("error.type", failure)
                span.set_status(StatusCode.ERROR)
            if request.num_prompt_tokens is not None:
                span.set_attributes(_attributes(request, ended_at - request.started_at))
                parent = set_span_in_context(span)
                for generation in request.generations:
                    for name, began, ended in generation.phases:
                        phase = self._tracer.start_span(name, parent, start_time=unix(began))
                        phase.end(unix(min(ended, ended_at)))
        span.end(unix(ended_at))

    def shutdown(self) -> None:
        """Export remaining spans within FLUSH_SECONDS, so that an unreachable collector does not block shutdown."""
        sender = threading.Thread(target=self._provider.shutdown, daemon=True)
        sender.start()
        sender.join(self.FLUSH_SECONDS)
        if sender.is_alive():
            logger.warning("the last spans were not exported within %d s", self.FLUSH_SECONDS)
            self._exporter.shutdown()


def _attributes(request: Request, seconds: float) -> dict[str, Any]:
    """Return OpenTelemetry's gen_ai attributes, and vLLM's names for values without one."""
    attributes: dict[str, Any] = {
        "gen_ai.usage.input_tokens": request.num_prompt_tokens,
        "gen_ai.usage.output_tokens": request.num_completion_tokens,
        "gen_ai.response.finish_reasons": [reason for reason, count in request.endings.items() for _ in range(count)],
        "gen_ai.latency.e2e": seconds,
    }
    if not request.generations:
        return attributes
    generation = request.generations[0]
    timing, first = generation.timing, generation.sequences[0].submit
    attributes |= {
        "gen_ai.usage.num_sequences": len(generation.sequences),
        "gen_ai.request.max_tokens": first.max_tokens,
        "gen_ai.request.temperature": first.sampling.temperature,
        "gen_ai.request.top_p": first.sampling.top_p,
    }
    if generation.phases:
        attributes |= {
            "gen_ai.latency.time_in_queue": timing["queue_seconds"],
            "gen_ai.latency.time_in_model_prefill": timing["prefill_seconds"],
            "gen_ai.latency.time_in_model_decode": timing["decode_seconds"],
            "gen_ai.latency.time_in_model_inference": timing["prefill_seconds"] + timing["decode_seconds"],
        }
    if generation.time_to_first_token is not None:
        attributes["gen_ai.latency.time_to_first_token"] = generation.time_to_first_token
    return attributes
