"""The outermost layer of the application: what every request passes and every answer carries.

Request ids, API keys, requests from web pages of other origins, the path that a proxy puts in front, the bounds on
bodies, the count of answers, last errors. Knows nothing of texts and models, and of the routes only their paths.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import string
import time
from collections.abc import Callable
from hashlib import sha256
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.http.run import Work
from service.http.schemas import ApiError
from service.observe.logs import log_fields
from service.observe.logs import request_id as current_request_id
from service.observe.metrics import Metrics
from service.settings import Settings

if TYPE_CHECKING:
    from service.observe.tracing import Tracer

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("service.access")

PROBES = frozenset({"/livez", "/readyz", "/health"})  # whoever asks these can hold no key
QUIET = PROBES | {"/metrics"}  # asked all the time
EXPOSED_HEADERS = (
    "X-Request-Id",
    "Retry-After",
    "X-Queue-Time",
    "X-Prefill-Time",
    "X-Inference-Time",
    "X-Time-Per-Token",
    "X-Total-Time",
    "X-Checkpoint",
    "X-Seed",
)


class Edge:
    """Answers what must not come further itself. `metrics` and `tracer` give theirs once the HTTP process has them.

    From outside in: the request's id and the count, cross-origin requests, then `_guard`. So an answer of any of
    them has an id, is counted, and can be read by the web pages that may ask.
    """

    SAFE = frozenset(string.ascii_letters + string.digits + "-_.:")

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        metrics: Callable[[], Metrics | None],
        tracer: Callable[[], Tracer | None] = lambda: None,
    ):
        self.app = app
        self.settings = settings
        self.metrics, self.tracer = metrics, tracer
        self._inner: ASGIApp = self._guard
        self._paths: set[str] = set()  # of the routes without a parameter
        if settings.cors_origins:
            self._inner = CORSMiddleware(
                self._guard,
                allow_origins=settings.cors_origins,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),  # the openai SDK has many of its own
                expose_headers=EXPOSED_HEADERS,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if 0 < len(given) <= 128 and self.SAFE.issuperset(given) else os.urandom(16).hex()
        scope["chargpt.request_id"] = request_id
        current_request_id.set(request_id)  # for good: the server runs each request in a context of its own
        self._place_below_root(scope)
        handler = scope["chargpt.handler"] = self._handler(scope)
        status: int | None = None
        started_at = scope["chargpt.arrived_at"] = time.monotonic()
        metrics = self.metrics()
        if metrics is not None:
            metrics.http_requests_in_progress.inc()

        async def identified_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._inner(scope, receive, identified_send)
        except ClientDisconnect:
            status = 499  # nginx' number for a client that left
        finally:
            seconds = time.monotonic() - started_at
            if scope.get("chargpt.client_left"):
                status = 499
            if metrics is not None:
                metrics.http_requests_in_progress.dec()
                if status is not None:
                    metrics.http_request(handler, scope["method"], status, seconds)
            level = logging.DEBUG if handler in QUIET else logging.INFO
            if access_logger.isEnabledFor(level):
                _log_access(level, scope, status, seconds)
            tracer = self.tracer()
            if tracer is not None:
                tracer.request(scope, status, started_at, started_at + seconds)

    def _handler(self, scope: Scope) -> str:
        """The path of the route that the request is for, as metrics name it."""
        path, routes = scope["path"], scope["app"].routes
        if not self._paths:
            self._paths = {route.path for route in routes if isinstance(route, Route) and "{" not in route.path}
        if path in self._paths:
            return str(path)
        matching = (route for route in routes if route.matches(scope)[0] is not Match.NONE)
        return getattr(next(matching, None), "path", None) or "other"

    def _place_below_root(self, scope: Scope) -> None:
        """Give the path as the client sent it, whether or not the proxy took the prefix away, as ASGI wants it.

        uvicorn's own root_path would put the prefix before a path that still has it.
        """
        root, path = self.settings.root_path, scope["path"]
        if not root:
            return
        scope["root_path"] = root
        is_kept = path == root or path.startswith(root + "/")
        # Below a root such as /v1 a route's own path looks as if it had the prefix.
        if not is_kept or any(path == getattr(route, "path", None) for route in scope["app"].routes):
            scope["path"] = root + path

    async def _guard(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit, seconds = self.settings.max_body_bytes, self.settings.body_timeout_seconds
        deadline = asyncio.get_running_loop().time() + seconds
        received = 0
        is_read = is_started = False

        async def bounded_receive() -> Message:
            nonlocal received, is_read
            if is_read:  # what is left to wait for is that the client leaves
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise ApiError(
                    408, f"the body may take at most {seconds:g} seconds to arrive", code="body_timeout"
                ) from None
            received += len(message.get("body", b""))
            if received > limit:
                raise ApiError(413, f"the body may have at most {limit} bytes", code="body_too_large")
            is_read = not message.get("more_body", False)
            if is_read:
                scope["chargpt.arrived_at"] = time.monotonic()
            return message

        async def noticed_send(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            refusal = self._refusal(scope)
            if refusal is not None:
                await error_response(refusal)(scope, receive, noticed_send)
            else:
                await self.app(scope, bounded_receive, noticed_send)
        except ClientDisconnect:
            raise
        except Exception as error:
            if is_started or not isinstance(error, ApiError | HTTPException):
                logger.exception("request %s failed", scope["chargpt.request_id"])
            if is_started:
                raise
            await error_response(_as_api_error(error, scope))(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        """What can be said from the headers alone, before the body is read."""
        headers = dict(scope["headers"])
        if self.settings.api_key_digests and not self._is_public(scope["chargpt.handler"]):
            authorization = headers.get(b"authorization")
            if authorization is None:
                message = "an API key is needed, as Authorization: Bearer KEY"
                return ApiError(401, message, code="invalid_api_key")
            if not self._has_key(authorization):
                return ApiError(401, "the API key in Authorization is not one of ours", code="invalid_api_key")
        length = headers.get(b"content-length", b"0")
        limit = self.settings.max_body_bytes
        if length.isdigit() and int(length) > limit:
            message = f"the body may have at most {limit} bytes, got {int(length)}"
            return ApiError(413, message, code="body_too_large")
        return None

    def _is_public(self, handler: str) -> bool:
        if handler == "/metrics":
            return self.settings.public_metrics
        if handler in ("/docs", "/openapi.json") or handler.startswith("/docs/"):
            return self.settings.public_docs
        return handler in PROBES

    def _has_key(self, authorization: bytes) -> bool:
        """In a time that tells nothing of the keys: digests are compared, with all of them."""
        scheme, _, key = authorization.partition(b" ")
        digest = sha256(key.strip(b" ")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self.settings.api_key_digests]
        return any(matches) and scheme.lower() == b"bearer"


def _log_access(level: int, scope: Scope, status: int | None, seconds: float) -> None:
    """One line for a request: the route's path, but no query, which may hold a prompt."""
    method, handler = scope["method"], scope["chargpt.handler"]
    fields = {"method": method, "handler": handler, "status": status, "seconds": round(seconds, 6)}
    work: Work | None = scope.get("chargpt.work")
    if work is not None:
        fields["prompt_characters"] = work.num_prompt_tokens
        fields["completion_characters"] = work.num_completion_tokens
        fields["endings"] = work.endings
    log_fields(access_logger, level, f"{method} {handler} {status}", fields)


def _as_api_error(error: Exception, scope: Scope) -> ApiError:
    match error:
        case ApiError():
            return error
        case HTTPException():  # the router's, of a wrong path or method
            message = f"{scope['method']} {scope['path']}: {error.detail}"
            return ApiError(error.status_code, message, headers=error.headers)
    return ApiError(500, "internal error")


def error_response(error: ApiError) -> Response:
    headers = error.headers
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    elif error.status == 408:
        headers["Connection"] = "close"  # otherwise the rest of the body would be waited for
    return Response(error.body, error.status, headers=headers, media_type="application/json")
