"""OpenTelemetry traces: a span for each request that asks the model, with its phases, sent to a collector.

A span is made once its request is over, from times that were noted anyway, so a request waits for nothing; a thread
sends them in batches, and drops what a collector does not take in time. Sampling, batching and headers are set by
OpenTelemetry's own variables (OTEL_TRACES_SAMPLER, OTEL_BSP_…, OTEL_EXPORTER_OTLP_HEADERS, OTEL_SERVICE_NAME).

Needs the extra `tracing`; nothing imports this module unless an endpoint is set. No text of a request is in a span.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Scope

if TYPE_CHECKING:
    from service.http.context import RequestContext

logger = logging.getLogger(__name__)

# What the routes do, in the words of OpenTelemetry's conventions for generative AI where it has them.
OPERATIONS = {
    "/generate": "text_completion",
    "/v1/completions": "text_completion",
    "/v1/score": "score",
    "/v1/next": "next",
}
FAILURES = ("timeout", "error")  # an abort is the client's will


class Tracer:
    """Makes the spans of one HTTP process."""

    FLUSH_SECONDS = 3  # for the last spans, at the end of the process

    def __init__(self, endpoint: str, model_name: str, process: str):
        self._model_name = model_name
        resource = Resource.create({"service.instance.id": f"{process}-{os.getpid()}"})
        if str(resource.attributes["service.name"]).startswith("unknown_service"):  # no variable says otherwise
            resource = resource.merge(Resource({"service.name": "chargpt"}))
        self._exporter = OTLPSpanExporter(endpoint)
        # Not the global provider: other libraries would begin to make spans, with queries in them.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("chargpt")
        self._propagator = TraceContextTextMapPropagator()

    def request(
        self, scope: Scope, context: RequestContext, status: int | None, started_at: float, ended_at: float
    ) -> None:
        """Make the span of a request that is over, if it asked the model; times by time.monotonic()."""
        operation = OPERATIONS.get(context.route)
        if operation is None:
            return
        offset = time.time_ns() - time.monotonic_ns()

        def unix(at: float) -> int:
            return int(at * 1e9) + offset

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        span = self._tracer.start_span(
            f"{operation} {self._model_name}",
            self._propagator.extract(headers),
            SpanKind.SERVER,
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "chargpt",
                "gen_ai.request.model": self._model_name,
                "gen_ai.request.id": context.request_id,
                "http.request.method": scope["method"],
                "http.route": context.route,
            },
            start_time=unix(started_at),
        )
        if span.is_recording():
            if status is not None:
                span.set_attribute("http.response.status_code", status)
            failure = next((reason for reason in FAILURES if reason in context.endings), None)
            if failure is None and status is not None and status >= 500:
                failure = str(status)
            if failure is not None:
                span.set_attribute("error.type", failure)
                span.set_status(StatusCode.ERROR)
            if context.num_prompt_tokens is not None:
                span.set_attributes(_attributes(context, ended_at - started_at))
                parent = set_span_in_context(span)
                for generation in context.generations:
                    for name, began, ended in generation.phases:
                        phase = self._tracer.start_span(name, parent, start_time=unix(began))
                        phase.end(unix(min(ended, ended_at)))
        span.end(unix(ended_at))

    def shutdown(self) -> None:
        """Send what is left, for as long as that may take; a collector that is away must not hold up the end."""
        sender = threading.Thread(target=self._provider.shutdown, daemon=True)
        sender.start()
        sender.join(self.FLUSH_SECONDS)
        if sender.is_alive():
            logger.warning("the last spans were not sent within %d s", self.FLUSH_SECONDS)
            self._exporter.shutdown()


def _attributes(context: RequestContext, seconds: float) -> dict[str, Any]:
    """What a request asked and got: OpenTelemetry's names, and vLLM's for what those lack."""
    attributes: dict[str, Any] = {
        "gen_ai.usage.input_tokens": context.num_prompt_tokens,
        "gen_ai.usage.output_tokens": context.num_completion_tokens,
        "gen_ai.response.finish_reasons": [reason for reason, count in context.endings.items() for _ in range(count)],
        "gen_ai.latency.e2e": seconds,
    }
    if not context.generations:
        return attributes
    generation = context.generations[0]
    timing, first = generation.timing, generation.sequences[0].submit
    attributes |= {
        "gen_ai.usage.num_sequences": len(generation.sequences),
        "gen_ai.request.max_tokens": first.max_tokens,
        "gen_ai.request.temperature": first.sampling.temperature,
        "gen_ai.request.top_p": first.sampling.top_p,
    }
    if generation.phases:
        attributes |= {
            "gen_ai.latency.time_in_queue": timing.queue_seconds,
            "gen_ai.latency.time_in_model_prefill": timing.prefill_seconds,
            "gen_ai.latency.time_in_model_decode": timing.decode_seconds,
            "gen_ai.latency.time_in_model_inference": timing.prefill_seconds + timing.decode_seconds,
        }
    if generation.time_to_first_token is not None:
        attributes["gen_ai.latency.time_to_first_token"] = generation.time_to_first_token
    return attributes
