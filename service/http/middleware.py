"""What every request passes before its route, and every answer after it.

Request ids, clients with their API keys and limits, cross-origin rules, a proxy's path prefix, limits on bodies,
metrics and the access log, and the answers to errors. Knows routes by path only, and never logs a request's text.
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
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.http.admission import Admission
from service.http.clients import ClientLimits, address_of
from service.http.context import RequestContext
from service.http.schemas import ApiError
from service.observe.logs import request_id as current_request_id
from service.observe.metrics import Metrics
from service.settings import Settings

if TYPE_CHECKING:
    from service.observe.tracing import Tracer

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("service.access")

CLIENT_CLOSED_REQUEST = 499  # nginx's number for a client that left
PROBES = frozenset({"/livez", "/readyz", "/health"})  # never need an API key
QUIET = PROBES | {"/metrics"}  # logged at level debug
EXPOSED_HEADERS = (
    "X-Request-Id", "Retry-After", "X-Queue-Time", "X-Prefill-Time", "X-Inference-Time", "X-Time-Per-Token",
    "X-Total-Time", "X-Checkpoint", "X-Backend", "X-Dtype", "X-Seed", "X-Ignored-Fields",
)  # fmt: skip


class RequestMiddleware:
    """The outermost layer. `metrics` and `tracer` return None until the HTTP process has started.

    is_leaving: whether a shutdown has begun, so that connections end with their answers; ended: called with the context
    of each request that has ended.

    From outside in: request id, metrics and log; cross-origin rules; then `_guard`. So every answer has an id, is
    counted, and is readable by pages of allowed origins.
    """

    SAFE = frozenset(string.ascii_letters + string.digits + "-_.:")

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        metrics: Callable[[], Metrics | None],
        tracer: Callable[[], Tracer | None] = lambda: None,
        admission: Admission | None = None,
        limits: ClientLimits | None = None,
        is_leaving: Callable[[], bool] = lambda: False,
        ended: Callable[[RequestContext], None] = lambda context: None,
    ):
        self.limits = ClientLimits(settings) if limits is None else limits
        self.app = app
        self.admission = admission or Admission(settings)
        self.settings = settings
        self.metrics, self.tracer, self.is_leaving, self.ended = metrics, tracer, is_leaving, ended
        self._inner: ASGIApp = self._guard
        self._paths: set[str] = set()  # of the routes without a parameter
        if settings.cors_origins:
            self._inner = CORSMiddleware(
                self._guard,
                allow_origins=settings.cors_origins,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),  # the openai SDK sends many of its own
                expose_headers=EXPOSED_HEADERS,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if 0 < len(given) <= 128 and self.SAFE.issuperset(given) else os.urandom(16).hex()
        current_request_id.set(request_id)  # never reset: uvicorn runs each request in a context of its own
        self._add_root_path(scope)
        started_at = time.monotonic()
        address = address_of(scope, self.settings.client_header)
        hold = self.admission.hold(address)
        context = scope["chargpt"] = RequestContext(request_id, self._route(scope), started_at, hold, address)
        metrics = self.metrics()
        if metrics is not None:
            metrics.http_requests_in_progress.inc()

        async def identified_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
                if context.ignored_fields:
                    names = ", ".join(context.ignored_fields)
                    message["headers"].append((b"x-ignored-fields", names.encode()))
                if self.is_leaving():  # so that nobody sends another request on a connection that is about to end
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        try:
            with hold:
                await self._inner(scope, receive, identified_send)
        except ClientDisconnect:
            context.client_left = True
        except asyncio.CancelledError:  # as below, while the answer is written
            context.client_left = True
            scope["extensions"]["chargpt.abort"]()
        finally:
            self.ended(context)
            seconds = time.monotonic() - started_at
            if context.client_left:
                context.status = CLIENT_CLOSED_REQUEST
            if metrics is not None:
                metrics.http_requests_in_progress.dec()
                if context.status is not None:
                    metrics.http_request(context.route, scope["method"], context.status, seconds)
            level = logging.DEBUG if context.route in QUIET else logging.INFO
            if access_logger.isEnabledFor(level):
                _log_access(level, scope["method"], context, seconds)
            tracer = self.tracer()
            if tracer is not None:
                tracer.request(scope, context, started_at, started_at + seconds)

    def _route(self, scope: Scope) -> str:
        """The path of the matching route, or "other"."""
        path, routes = scope["path"], scope["app"].routes
        if not self._paths:
            self._paths = {route.path for route in routes if isinstance(route, Route) and "{" not in route.path}
        if path in self._paths:
            return str(path)
        matching = (route for route in routes if route.matches(scope)[0] is not Match.NONE)
        return getattr(next(matching, None), "path", None) or "other"

    def _add_root_path(self, scope: Scope) -> None:
        """Make the path start with the root path, as ASGI wants it, whether or not the proxy removed the prefix.

        uvicorn's own root_path setting would add the prefix to a path that still has it.
        """
        root, path = self.settings.root_path, scope["path"]
        if not root:
            return
        scope["root_path"] = root
        has_prefix = path == root or path.startswith(root + "/")
        # With a root such as /v1, a route's own path looks as if it had the prefix.
        if not has_prefix or any(path == getattr(route, "path", None) for route in scope["app"].routes):
            scope["path"] = root + path

    async def _guard(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = RequestContext.of(scope)
        limit, seconds = self.settings.max_body_bytes, self.settings.body_timeout_seconds
        deadline = asyncio.get_running_loop().time() + seconds
        received = 0
        is_read = False

        async def bounded_receive() -> Message:
            nonlocal received, is_read
            if is_read:  # only http.disconnect can follow
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, f"body not received within {seconds:g} s", code="body_timeout") from None
            received += len(message.get("body", b""))
            if received > limit:
                raise ApiError(413, f"body must have at most {limit} bytes", code="body_too_large")
            context.hold.grow(len(message.get("body", b"")))
            is_read = not message.get("more_body", False)
            if is_read:
                context.arrived_at = time.monotonic()
            return message

        try:
            refusal = self._refusal(scope, context)
            if refusal is not None:
                await error_response(refusal)(scope, receive, send)
            elif context.route in QUIET or self._is_public(context.route):
                await self.app(scope, bounded_receive, send)
            else:
                await self._limited(scope, bounded_receive, send)
        except ClientDisconnect:
            raise
        except asyncio.CancelledError:  # by uvicorn, when the time to drain is over
            if context.status is not None:
                raise
            error = ApiError(503, "server has shut down", code="shutting_down", headers={"Connection": "close"})
            await error_response(error)(scope, receive, send)
        except Exception as error:
            if context.status is not None or not isinstance(error, ApiError | HTTPException):
                logger.exception("request %s failed", context.request_id)
            if context.status is not None:
                raise
            await error_response(_as_api_error(error, scope))(scope, receive, send)

    async def _limited(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Within the client's limits."""
        context, limits = RequestContext.of(scope), self.limits
        try:
            limits.begin(context.client)
        except ApiError as error:
            metrics = self.metrics()
            if metrics is not None:
                metrics.request_rejected("rate_limit")
            await error_response(error)(scope, receive, send)
            return
        try:
            await self.app(scope, receive, send)
        finally:
            limits.end(context.client)
            if context.num_charged_characters:
                limits.give_back(context.client, context.num_charged_characters - context.num_run_characters)

    def _refusal(self, scope: Scope, context: RequestContext) -> ApiError | None:
        """What the headers alone rule out, before the body is read."""
        headers = dict(scope["headers"])
        num_authorizations = sum(name == b"authorization" for name, _ in scope["headers"])
        if num_authorizations > 1:  # a proxy may have checked another one
            message = f"a request must have at most one Authorization header, got {num_authorizations}"
            return ApiError(400, message, code="duplicate_header")
        if self.settings.api_keys and not self._is_public(context.route):
            authorization = headers.get(b"authorization")
            if authorization is None:
                message = "an API key is required: Authorization: Bearer KEY"
                return ApiError(401, message, code="invalid_api_key")
            name = self._name_of_key(authorization)
            if name is None:
                return ApiError(401, "the API key in Authorization is not valid", code="invalid_api_key")
            context.client = context.hold.client = name
        length = headers.get(b"content-length", b"0")
        limit = self.settings.max_body_bytes
        if length.isdigit() and int(length) > limit:
            message = f"body must have at most {limit} bytes, got {int(length)}"
            return ApiError(413, message, code="body_too_large")
        return None

    def _is_public(self, route: str) -> bool:
        if route == "/metrics":
            return self.settings.public_metrics
        if route in ("/", "/docs", "/openapi.json") or route.startswith(("/docs/", "/page/")):
            return self.settings.public_docs
        return route in PROBES

    def _name_of_key(self, authorization: bytes) -> str | None:
        """None: not a valid key. In constant time: compares digests, with those of all keys."""
        scheme, _, key = authorization.partition(b" ")
        digest = sha256(key.strip(b" ")).digest()
        names = [name for known, name in self.settings.api_keys.items() if hmac.compare_digest(digest, known)]
        return names[0] if names and scheme.lower() == b"bearer" else None


def _log_access(level: int, method: str, context: RequestContext, seconds: float) -> None:
    """One line per request: the path of the route, not the query, which may contain a prompt."""
    fields: dict[str, Any] = {"method": method, "handler": context.route, "status": context.status}
    fields["client"] = context.client
    fields["seconds"] = round(seconds, 6)
    if context.num_prompt_tokens is not None:
        fields["prompt_characters"] = context.num_prompt_tokens
        fields["completion_characters"] = context.num_completion_tokens
        fields["endings"] = context.endings
    access_logger.log(level, "%s %s %s", method, context.route, context.status, extra={"fields": fields})


def _as_api_error(error: Exception, scope: Scope) -> ApiError:
    match error:
        case ApiError():
            return error
        case HTTPException():  # the router's: unknown path or wrong method
            message = f"{scope['method']} {scope['path']}: {error.detail}"
            return ApiError(error.status_code, message, headers=error.headers)
    return ApiError(500, "internal error")


def error_response(error: ApiError) -> Response:
    headers = error.headers
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    elif error.status == 408:
        headers["Connection"] = "close"  # otherwise the server would wait for the rest of the body
    return Response(error.body, error.status, headers=headers, media_type="application/json")
