"""OpenTelemetry's exporter of spans, as its own variables configure it: OTEL_TRACES_SAMPLER, OTEL_BSP_… and others.

Functions import OpenTelemetry, because it reads some variables on import, and may not be installed.
"""

from __future__ import annotations

import logging
import os
from logging.handlers import BufferingHandler
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider


def open_provider(endpoint: str, instance: str) -> tuple[TracerProvider, OTLPSpanExporter]:
    """Return a provider of spans, and the exporter to which a thread passes them.

    Raises ValueError or another exception: OpenTelemetry cannot use a variable.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.instance.id": instance})
    if str(resource.attributes["service.name"]).startswith("unknown_service"):  # not set by a variable
        resource = resource.merge(Resource({"service.name": "chargpt"}))
    exporter = OTLPSpanExporter(endpoint)
    # Not the global provider: other libraries would create spans with URL queries.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider, exporter


def check_variables(endpoint: str | None) -> None:
    """Open a provider and shut it down, which sends nothing. Without an endpoint, check the variable of FastAPI alone.

    Raises:
        ModuleNotFoundError: OpenTelemetry is not installed.
        ValueError: it cannot use a variable, or would ignore one with a warning. The message has no values of headers.
    """
    logger, warnings = logging.getLogger("opentelemetry"), BufferingHandler(100)
    warnings.setLevel(logging.WARNING)
    logger.addHandler(warnings)
    logger.propagate = False
    try:
        import opentelemetry.propagate  # noqa: F401  # FastAPI imports it too; it reads OTEL_PROPAGATORS

        if endpoint is not None:
            open_provider(endpoint, "check")[0].shutdown()
        reason = warnings.buffer[0].getMessage() if warnings.buffer else None
    except ModuleNotFoundError:
        raise
    except Exception as error:
        reason = str(error)
    finally:
        logger.propagate = True
        logger.removeHandler(warnings)
    if reason is None:
        return
    given = []
    for name, value in sorted(os.environ.items()):
        if name.startswith("OTEL_") and "HEADERS" in name:
            given.append(name)
            for header in filter(None, value.split(",")):
                reason = reason.replace(header, "…")
        elif name.startswith("OTEL_"):
            given.append(f"{name}={value}")
    raise ValueError(f"OpenTelemetry does not accept {', '.join(given) or 'its variables'}: {reason}")
