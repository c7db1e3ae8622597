"""The HTTP process: the table of routes, and the process's life.

A request passes middleware.py, then its handler: generate.py and score.py run the model through client.py and write
their answers with stream.py; attention.py runs it in a thread, info.py answers at once; page.py has the page at /.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from service.catalog import Listing
from service.http import attention, generate, info, score
from service.http import schemas as s
from service.http.client import EngineClient
from service.http.context import RequestContext, Service
from service.http.middleware import RequestMiddleware
from service.http.openapi import BODY, RUN, Handler, Operation, build_document, documentation
from service.http.page import page
from service.model.checkpoint import CheckpointError
from service.observe.metrics import Metrics
from service.sockets import SocketTransport

ATTENTION = "/v1/attention"
OPERATIONS = (
    Operation(
        "/generate", generate.generate, "generate", "text", s.GenerateAnswer, s.GenerateRequest,
        (s.GenerateEvent, s.GenerateEnd), (*BODY, *RUN),
    ),
    Operation(
        "/generate", generate.generate_events, "generate_events", "text",
        events=(s.GenerateEvent, s.GenerateEnd), failures=(400, 404, 414, *RUN),
    ),
    Operation(
        "/v1/completions", generate.completions, "create_completion", "text", s.Completion, s.CompletionRequest,
        (s.CompletionChunk,), (*BODY, *RUN),
    ),
    Operation(
        "/v1/score", score.score, "score", "likelihood", s.ScoreAnswer, s.ScoreRequest, failures=(*BODY, *RUN)
    ),
    Operation(
        "/v1/next", score.next_character, "next_character", "likelihood", s.NextAnswer, s.NextRequest,
        failures=(*BODY, *RUN),
    ),
    Operation(
        ATTENTION, attention.attention, "attention", "likelihood", s.AttentionAnswer, s.AttentionRequest,
        failures=(*BODY, *RUN),
    ),
    Operation(
        "/tokenize", info.tokenize, "tokenize", "characters", s.TokenizeAnswer, s.TokenizeRequest, failures=BODY
    ),
    Operation(
        "/detokenize", info.detokenize, "detokenize", "characters", s.DetokenizeAnswer, s.DetokenizeRequest,
        failures=BODY,
    ),
    Operation("/tokenizer_info", info.tokenizer_info, "get_tokenizer_info", "characters", s.TokenizerInfo),
    Operation("/v1/models", info.models, "list_models", "information", s.ModelList),
    Operation("/v1/models/{model}", info.model, "get_model", "information", s.ModelCard, failures=(404,)),
    Operation("/info", info.info, "get_info", "information", s.Info),
    Operation("/livez", info.livez, "livez", "operation", s.Status),
    Operation("/readyz", info.readyz, "readyz", "operation", s.Status),
    Operation("/health", info.readyz, "health", "operation", s.Status),
    Operation("/metrics", info.prometheus, "metrics", "operation"),
)  # fmt: skip


class Endpoint:
    """An ASGI application of one route, without starlette's wrapper for exceptions: the middleware answers those.

    A request's time limit covers writing too: the connection of a client that does not read is dropped.
    """

    def __init__(self, service: Service, handlers: dict[str, Handler]):
        self.service, self.handlers = service, handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self.handlers[scope["method"]]
        response = await handler(self.service, Request(scope, receive, send))
        context = RequestContext.of(scope)
        limit = self.service.timeout(context.timeout_seconds) + UNREAD_SECONDS
        try:
            async with asyncio.timeout(context.arrived_at + limit - time.monotonic()):
                await response(scope, receive, send)
        except TimeoutError:
            logger.info("the client did not read its answer in time: dropping its connection")
            context.client_left = True
            scope["extensions"]["chargpt.abort"]()


Hook = Callable[[], None]

BEAT_SECONDS = 0.25  # between two heartbeats of an HTTP process
UNREAD_SECONDS = 6.0  # for what is left to write at the deadline; 5 of them may pass until a worker is given up

logger = logging.getLogger(__name__)


class App:
    """All routes, and what they share."""

    def __init__(self, service: Service):
        self.service = service
        self.hooks: tuple[Hook, Hook] | None = None  # called before and after each request that runs the model

    def routes(self) -> list[BaseRoute]:
        """Plain starlette routes: FastAPI's would resolve dependencies and answer models for each request."""
        handlers: dict[str, dict[str, Handler]] = {}
        settings = self.service.settings
        operations = [it for it in OPERATIONS if settings.attention or it.path != ATTENTION]
        for operation in operations:
            handler = self._hooked(operation, *self.hooks) if self.hooks else operation.handler
            handlers.setdefault(operation.path, {}).update(dict.fromkeys(operation.methods, handler))
        routes: list[BaseRoute] = []
        for path, by_method in handlers.items():
            route = Route(path, Endpoint(self.service, by_method), methods=list(by_method))
            route.methods = set(by_method)  # starlette adds HEAD to GET, which would run a whole generation
            routes.append(route)
        model, models = self.service.default_model, self.service.models.values()
        vocab_size = max(it.tokenizer.vocab_size for it in models)
        shapes = [it.checkpoint.hyperparameters for it in models]
        bounds = {"text": max(map(attention.max_characters, models))}
        bounds |= {name: max(shape["n_" + name] for shape in shapes) - 1 for name in ("layer", "head")}
        document = build_document(settings, model.tokenizer, operations, model.name, vocab_size, bounds)
        return routes + documentation(settings, document) + page()

    def _hooked(self, operation: Operation, on_request: Hook, on_response: Hook) -> Handler:
        """The handler with the hooks around it, if its route runs the model."""
        if not set(RUN) <= set(operation.failures):
            return operation.handler

        async def hooked(service: Service, request: Request) -> Response:
            on_request()
            response = await operation.handler(service, request)
            response.background = BackgroundTask(on_response)
            return response

        return hooked

    def middleware(self, app: ASGIApp) -> ASGIApp:
        service = self.service
        return RequestMiddleware(
            app, service.settings, lambda: service.metrics, lambda: service.tracer, service.admission, service.limits,
            lambda: service.state.is_leaving, service.ended,
        )  # fmt: skip

    async def _beat(self, process: str) -> None:
        while True:
            self.service.state.beat(process)
            if self.service.is_ready:
                self.service.state.answer(process)
            if self.service.state.generation != self.service.listing.generation:
                await self._follow(process)
            await asyncio.sleep(BEAT_SECONDS)

    async def _follow(self, process: str) -> None:
        """Serve what the main process lists now."""
        service, folder = self.service, Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
        known = {model.id for model in service.models.values()}
        try:
            listing = Listing.read(folder)
            new = [version for version in listing.serve if version.id not in known]
            checkpoints = {version.id: await asyncio.to_thread(version.read, folder) for version in new}
        except (OSError, CheckpointError) as error:  # tried again at the next heartbeat
            logger.error("the new list of checkpoints cannot be followed: %s", error)
            return
        service.serve(listing, checkpoints)
        service.attention.keep([version.id for version in listing.serve])
        service.state.follow(process, listing.generation)

    @asynccontextmanager
    async def running(self, transport: SocketTransport, process_id: int) -> AsyncIterator[None]:
        """The life of an HTTP process; SIGHUP reads the client limits again."""
        service, loop = self.service, asyncio.get_running_loop()
        service.process_id, process = process_id, f"http-{process_id}"
        metrics = Metrics(service.settings.model_name, CollectorRegistry(), process, later=loop.call_later)
        client = EngineClient(
            transport, process_id, metrics, service.state,
            hang_seconds=service.settings.hang_seconds,
            capacity=service.slots + service.settings.max_queued_requests,
        )  # fmt: skip
        service.attention = attention.AttentionThread()
        service.connect(client, metrics)
        service.state.follow(process, service.listing.generation)
        metrics.held_bytes.set(0)
        loop.add_signal_handler(signal.SIGHUP, service.limits.reload)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])  # blocked while this process was forked
        if service.settings.otlp_traces_endpoint is not None:
            from service.observe.tracing import Tracer  # loads OpenTelemetry

            service.tracer = Tracer(service.settings.otlp_traces_endpoint, service.settings.model_name, process)
        heart = asyncio.create_task(self._beat(process))
        async with client.connected():
            yield
        heart.cancel()
        metrics.flush()
        if service.tracer is not None:
            await asyncio.to_thread(service.tracer.shutdown)
