"""The application: the table of routes, and the steps of every request.

A request passes the steps in `App.__call__` and `Endpoint`: begin (id, client), head (key, limits, type of the body),
body (up to a limit), its handler (decode, encode, submit, wait, write) and end (metrics, log, release). Starlette
matches the route and answers CORS. generate.py and score.py run the model through client.py and write their answers
with stream.py. attention.py runs it in a thread. info.py and files.py answer at once.
"""

from __future__ import annotations

import asyncio
import logging
import string
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Mount, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.http.connection.access import check_content, name_of_key
from service.http.connection.addresses import address_of
from service.http.connection.errors import ApiError
from service.http.limits.memory import Lease
from service.http.routes import attention, generate, info, score
from service.http.routes.files import documentation, page
from service.http.routes.openapi import HEADERS, Operation, build_document
from service.http.routes.request import ClientLeftError, Request
from service.http.routes.service import Service
from service.http.schema import answers as s
from service.http.schema import requests as b
from service.observe.logs import AccessLog
from service.observe.logs import request_id as current_request_id
from service.settings import read_api_keys
from service.text.errors import InvalidRequestError

if TYPE_CHECKING:
    from service.http.tracing import Tracer

_EVENTS = (s.GenerateEvent, s.GenerateEnd)
OPERATIONS = (
    Operation(
        "/generate", generate.generate, "generate", "text", s.GenerateAnswer, b.GenerateRequest, _EVENTS,
        runs_model=True,
    ),
    Operation(
        "/v1/completions", generate.completions, "create_completion", "text", s.Completion, b.CompletionRequest,
        (s.CompletionChunk,), runs_model=True,
    ),
    Operation("/v1/score", score.score, "score", "likelihood", s.ScoreAnswer, b.ScoreRequest, runs_model=True),
    Operation(
        "/v1/next", score.next_character, "next_character", "likelihood", s.NextAnswer, b.NextRequest, runs_model=True
    ),
    Operation(
        "/v1/attention", attention.attention, "attention", "likelihood", s.AttentionAnswer, b.AttentionRequest,
        runs_model=True,
    ),
    Operation("/tokenize", info.tokenize, "tokenize", "characters", s.TokenizeAnswer, b.TokenizeRequest),
    Operation("/detokenize", info.detokenize, "detokenize", "characters", s.DetokenizeAnswer, b.DetokenizeRequest),
    Operation("/tokenizer_info", info.tokenizer_info, "get_tokenizer_info", "characters", s.TokenizerInfo),
    Operation("/v1/models", info.models, "list_models", "information", s.ModelList),
    Operation("/v1/models/{model}", info.model, "get_model", "information", s.ModelCard, failures=(404,)),
    Operation("/info", info.info, "get_info", "information", s.Info),
    Operation("/livez", info.livez, "livez", "operation", s.Status, is_probe=True),
    Operation("/readyz", info.readyz, "readyz", "operation", s.Status, is_probe=True),
    Operation("/health", info.readyz, "health", "operation", s.Status, is_probe=True),
    Operation("/metrics", info.prometheus, "metrics", "operation"),
)  # fmt: skip

NAMES = {"api_keys": "API keys", "client_limits": "client limits", "certificate": "certificate"}  # in messages
CLIENT_CLOSED_REQUEST = 499  # nginx's number for a client that left
EXPOSED_HEADERS = tuple(HEADERS)
BODY_TIMEOUT_SECONDS = 30.0
UNRESERVED_BYTES = 1 << 14  # a smaller body that arrives at once is not reserved by itself
SAFE = frozenset((string.ascii_letters + string.digits + "-_.:").encode())  # in a request id
MAX_ID_BYTES = 128

logger = logging.getLogger(__name__)


class App:
    """The ASGI application of one HTTP process.

    middlewares: ASGI middlewares around the routes, as LitServe takes them. They see every request.
    """

    def __init__(self, service: Service, middlewares: Iterable[Any] = ()):
        self.service, self.settings = service, service.settings
        self.access_log: AccessLog | None = None  # in an HTTP process
        self.tracer: Tracer | None = None
        self.num_requests = 0  # in progress
        self.keys = self.settings.api_keys
        self.process = "main"  # name as in SharedState
        # The configured files to read again, and what does so. It raises OSError or ValueError: the file is invalid.
        self.files: dict[str, tuple[Path, Callable[[], None]]] = {}  # the server adds the certificate
        if self.settings.api_keys_file is not None:
            self.files["api_keys"] = self.settings.api_keys_file, self._read_keys
        if self.settings.client_limits is not None:
            self.files["client_limits"] = self.settings.client_limits, service.limits.reload
        self.router = Router(default=Endpoint(self, "other", {}), redirect_slashes=False)
        by_path: dict[str, list[Operation]] = {}
        for operation in OPERATIONS:
            by_path.setdefault(operation.path, []).append(operation)
        for path, operations in by_path.items():
            self._add(path, operations)
        wrapped: ASGIApp = self.router
        if self.settings.cors_origins:
            wrapped = CORSMiddleware(
                wrapped,
                allow_origins=self.settings.cors_origins,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),  # the openai SDK sends many of its own
                expose_headers=EXPOSED_HEADERS,
            )
        for middleware in middlewares:  # as in LitServe: a class, or a class and its options; the last is outermost
            kind, options = middleware if isinstance(middleware, tuple) else (middleware, {})
            wrapped = kind(wrapped, **options)
        self._wrapped = wrapped

    def _add(self, path: str, operations: list[Operation], label: str = "", is_public: bool = False) -> None:
        by_method = {method: operation for operation in operations for method in operation.methods}
        is_public = is_public or operations[0].is_public(self.settings)
        endpoint = Endpoint(self, label or path, by_method, is_public, operations[0].is_quiet)
        self.router.routes.append(Route(path.replace("{model}", "{model:path}"), endpoint))

    def reload(self) -> None:
        """Read API keys, limits of clients and certificate again, after SIGHUP. An invalid file changes nothing."""
        for what, (path, read) in self.files.items():
            try:
                read()
            except (OSError, ValueError) as error:
                logger.error("%s not changed: %s", NAMES[what], error)
                self.service.state.has_read(self.process, what, is_valid=False)
            else:
                logger.info("%s read again from %s", NAMES[what], path)
                self.service.state.has_read(self.process, what)

    def _read_keys(self) -> None:
        assert self.settings.api_keys_file is not None
        self.keys = read_api_keys(self.settings.api_keys_file)

    def add_files(self) -> None:
        """Add the page, and the OpenAPI document for the models that are served now."""
        service = self.service
        model = service.default_model
        example = model.checkpoint.example_prompt
        document = build_document(self.settings, model.tokenizer, OPERATIONS, model.name, example)
        files = documentation(document) | page()
        if (root := self.settings.root_path) != "":  # the path of a proxy's prefix alone
            files[root] = files["/"]
        for path, file in files.items():
            operation = Operation(path, file.handler, path, "information")
            self._add(path, [operation], file.label, self.settings.public_docs)
        if root:  # a proxy may remove its prefix or not
            self.router.routes.append(Mount(root, Router([*self.router.routes], default=self.router.default)))

    # -- every request --

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, send = self._begin(scope, receive, send)
        try:
            await self._wrapped(scope, receive, send)
        except ClientLeftError:
            pass
        except asyncio.CancelledError:  # when the time to drain is over
            if request.status is None:
                await request.fail(ApiError(503, "server has shut down", code="shutting_down"))
        except Exception as error:
            logger.error("request %s failed", request.id, exc_info=error)
            if request.status is None:
                request.use(receive, send)
                await request.fail(ApiError(500, "internal error"))
        finally:
            self._end(request)

    def _begin(self, scope: Scope, receive: Receive, send: Send) -> tuple[Request, Send]:
        """Return a request whose head has arrived, and the `send` that adds the headers of every answer."""
        fields = dict(scope["headers"])  # names in lower case; the last of several with one name
        given = fields.get(b"x-request-id", b"")
        if 0 < len(given) <= MAX_ID_BYTES and SAFE.issuperset(given):
            id = given.decode()
        else:
            id = f"{self.service.random.getrandbits(128):032x}"
        current_request_id.set(id)  # in the context of this task
        request, peer, header = Request(id, scope, fields), scope["client"], self.settings.client_header
        address = "unknown" if peer is None else address_of(peer[0], fields, header)
        request.lease = Lease(self.service.ledger, address)
        self.num_requests += 1

        async def send_started(message: Message) -> None:
            is_start = message["type"] == "http.response.start"
            if is_start:
                headers = message["headers"] = [*message.get("headers", ()), (b"x-request-id", id.encode())]
                if request.ignored_fields:
                    headers.append((b"x-ignored-fields", ", ".join(request.ignored_fields).encode()))
                if self.service.state.is_in("leaving"):  # or the client may send another request on it
                    headers.append((b"connection", b"close"))
            await send(message)
            if is_start:
                request.status = message["status"]

        request.use(receive, send_started)
        scope["state"]["request"] = request
        return request, send_started

    def _end(self, request: Request) -> None:
        """Release everything that a request holds, count it and log it."""
        service = self.service
        request.end()
        request.lease.end(request.num_run_characters if request.lease.is_charged else 0)
        if request.client_left:
            request.status = CLIENT_CLOSED_REQUEST
        ended_at = time.monotonic()
        seconds = ended_at - request.started_at
        self.num_requests -= 1
        if service.metrics is not None and request.status is not None:
            service.metrics.http_request(request.route, request.method, request.status, seconds)
        if (log := self.access_log) is not None:
            ran, client = request.num_prompt_tokens is not None, request.lease.client
            others = (request.num_prompt_tokens, request.num_completion_tokens, request.endings) if ran else ()
            level = logging.DEBUG if request.is_quiet else logging.INFO
            log.write(
                level, request.method, request.route, request.status, client, round(seconds, 6), request.id, *others
            )
        if self.tracer is not None:
            self.tracer.request(request, ended_at)


class Endpoint:
    """The ASGI application of a path. Metrics and the log use `route` as its name.

    is_public: it needs no API key.
    is_quiet: it is logged at level debug, and not counted in limits of clients.
    """

    def __init__(
        self, app: App, route: str, operations: dict[str, Operation], is_public: bool = False, is_quiet: bool = False
    ):
        self.app, self.route, self.operations = app, route, operations
        self.is_public, self.is_quiet = is_public, is_quiet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request: Request = scope["state"]["request"]
        request.use(receive, send)
        request.route, request.is_quiet = self.route, self.is_quiet
        # A middleware may have changed them.
        request.method, request.path, request.query = scope["method"], scope["path"], scope["query_string"]
        request.parameter = scope.get("path_params", {}).get("model", "")
        try:
            operation = self._check_head(request, scope["headers"])
            if operation.request is not None:
                await self._read_body(request)
            request.arrived_at = time.monotonic()
            if operation.runs_model:
                request.watch()
            try:
                async with asyncio.timeout(None) as request.limit:
                    request.limit_time(self.app.settings.request_timeout_seconds)
                    await operation.handler(self.app.service, request)
            except TimeoutError:
                logger.info("the client did not read its answer in time: closing its connection")
                request.left()
        except (ApiError, InvalidRequestError) as error:
            if request.status is not None:
                raise
            await request.fail(error if isinstance(error, ApiError) else ApiError.of(error))

    def _check_head(self, request: Request, headers: list[tuple[bytes, bytes]]) -> Operation:
        """Check the head before the body is read, and return the operation. Raises ApiError: the head is refused."""
        app, fields, service = self.app, request.fields, self.app.service
        if len(fields) < len(headers):  # a proxy may have checked the other one
            count = sum([name == b"authorization" for name, _ in headers])
            if count > 1:
                message = f"a request must have at most one Authorization header, got {count}"
                raise ApiError(400, message, code="duplicate_header")
        if app.keys and not self.is_public:
            request.lease.client = name_of_key(fields, app.keys)
        if service.ledger.limits.has_any and not (self.is_quiet or self.is_public):
            request.lease.begin()
        # int() takes at most 4300 digits.
        length, limit = int(b"0" + fields.get(b"content-length", b"").lstrip(b"0")), app.settings.max_body_bytes
        if length > limit:
            raise ApiError(413, f"body must have at most {limit} bytes, got {length}", code="body_too_large")
        operation = self._find(request)
        if operation.is_refused_early:
            service.client.refuse_if_full(request.lease.client)
        if operation.request is not None:
            check_content(fields)
        return operation

    def _find(self, request: Request) -> Operation:
        """Return the operation. Raises ApiError: 404, unknown path; 405, unknown method of the path."""
        if (operation := self.operations.get(request.method)) is not None:
            return operation
        shown = f"{request.method} {request.path}"
        if self.operations:
            raise ApiError(405, f"{shown}: Method Not Allowed", headers={"Allow": ", ".join(self.operations)})
        if request.path.endswith(("/v1/chat/completions", "/v1/responses")):
            raise ApiError(404, f"{shown}: there is no chat; use /v1/completions, which continues a text")
        raise ApiError(404, f"{shown}: Not Found")

    async def _read_body(self, request: Request) -> None:
        """Read the body, and reserve its memory as it arrives. Raises ApiError: it is too large, or took too long."""
        limit, content = self.app.settings.max_body_bytes, request.content
        try:
            async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
                has_more = True
                while has_more:
                    part, has_more = await request.receive()
                    content += part
                    size = request.num_body_bytes = len(content)
                    if size > limit:
                        raise ApiError(413, f"body must have at most {limit} bytes", code="body_too_large")
                    if size > request.lease.bytes and (has_more or size > UNRESERVED_BYTES):
                        request.lease.hold(size)
        except TimeoutError:
            raise ApiError(408, f"body not received within {BODY_TIMEOUT_SECONDS:g} s", code="body_timeout") from None
