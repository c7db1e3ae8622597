"""The table of routes, and the steps of every request.

A request passes four steps: `begin` (head: id, client, key, limits), `receive` (body, up to a limit), its handler
(decode, encode, submit, wait, write) and `end` (metrics, log, release). generate.py and score.py run the model through
client.py and write their answers with stream.py. attention.py runs it in a thread. info.py and files.py answer at once.
"""

from __future__ import annotations

import asyncio
import logging
import string
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers as StarletteHeaders
from starlette.middleware.cors import CORSMiddleware

from service.http.access import check_content, check_site, name_of_key
from service.http.api import answers as s
from service.http.api import bodies as b
from service.http.api.errors import ApiError
from service.http.api.openapi import HEADERS, Operation, build_document, documentation
from service.http.connection.asgi import Middlewares
from service.http.engine.client_limits import address_of, network_of
from service.http.engine.lease import Lease
from service.http.handlers import attention, generate, info, score
from service.http.handlers.files import page
from service.http.request import CLOSE, Request, header_lines
from service.http.service import Service
from service.observe.logs import AccessLog
from service.observe.logs import request_id as current_request_id
from service.settings import read_api_keys

ATTENTION = "/v1/attention"
_EVENTS = (s.GenerateEvent, s.GenerateEnd)
OPERATIONS = (
    Operation(
        "/generate", generate.generate, "generate", "text", s.GenerateAnswer, b.GenerateRequest, _EVENTS,
        runs_model=True,
    ),
    Operation(
        "/generate", generate.generate_events, "generate_events", "text", events=_EVENTS, runs_model=True,
        failures=(400, 403, 404, 414),
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
        ATTENTION, attention.attention, "attention", "likelihood", s.AttentionAnswer, b.AttentionRequest,
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
MODELS, PARAMETER = "/v1/models/", "{model}"  # a name, which may have slashes

CLIENT_CLOSED_REQUEST = 499  # nginx's number for a client that left
EXPOSED_HEADERS = tuple(HEADERS)
SMALL_BODY_BYTES = 1 << 14  # a smaller body that arrives at once is not reserved by itself
SAFE = frozenset((string.ascii_letters + string.digits + "-_.:").encode())  # in a request id
MAX_ID_BYTES = 128

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Endpoint:
    """The operations of a path. Metrics and the log use the path as its name."""

    path: str
    operations: dict[str, Operation]  # by method
    is_public: bool  # needs no API key
    is_quiet: bool  # logged at level debug, and not counted in limits of clients


class App:
    """All routes and the steps of every request, for one HTTP process."""

    def __init__(self, service: Service):
        self.service, self.settings = service, service.settings
        self.load_certificate: Callable[[], None] = lambda: None  # from the server
        self.access_log: AccessLog | None = None  # in an HTTP process
        self.middlewares: Middlewares | None = None  # between the body and the handler
        self.tasks: set[Any] = set()  # running handlers: uvicorn waits for them, then cancels them
        self._running: set[Request] = set()  # requests with a running handler
        self.num_requests = 0  # in progress
        self._keys = self.settings.api_keys
        self.cors: CORSMiddleware | None = None
        if self.settings.cors_origins:
            self.cors = CORSMiddleware(
                self,  # type: ignore[arg-type]  # only its rules are used
                allow_origins=self.settings.cors_origins,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),  # the openai SDK sends many of its own
                expose_headers=EXPOSED_HEADERS,
            )
        self.endpoints: dict[str, Endpoint] = {}
        self._nothing = Endpoint("other", {}, is_public=False, is_quiet=False)
        for operation in self.operations:
            new = Endpoint(operation.path, {}, operation.is_public(self.settings), operation.is_quiet)
            endpoint = self.endpoints.setdefault(operation.path, new)
            endpoint.operations |= dict.fromkeys(operation.methods, operation)

    def reload(self) -> None:
        """Read API keys, limits of clients and certificate again, after SIGHUP. An invalid file changes nothing."""
        self.service.limits.reload()
        path = self.settings.api_keys_file
        if path is not None:
            try:
                self._keys = read_api_keys(path)
            except ValueError as error:
                logger.error("API keys not changed: %s", error)
            else:
                logger.info("API keys read again from %s", path)
        self.load_certificate()

    @property
    def operations(self) -> list[Operation]:
        return [it for it in OPERATIONS if self.settings.attention or it.path != ATTENTION]

    @property
    def is_leaving(self) -> bool:
        return self.service.state.is_in("leaving")

    def add_files(self) -> None:
        """Add the page, and the OpenAPI document for the models that are served now."""
        service = self.service
        model, models = service.default_model, service.models.values()
        vocab_size = max(it.tokenizer.vocab_size for it in models)
        shapes = [it.checkpoint.config for it in models]
        bounds = {"text": max(map(attention.max_characters, models))}
        bounds |= {name: max(getattr(shape, "n_" + name) for shape in shapes) - 1 for name in ("layer", "head")}
        example = model.checkpoint.example_prompt
        document = build_document(
            self.settings, model.tokenizer, self.operations, model.name, vocab_size, bounds, example
        )
        for path, file in (documentation(self.settings, document) | page()).items():
            operation = Operation(path, file.handler, path, "information")
            methods = dict.fromkeys(operation.methods, operation)
            self.endpoints[path] = Endpoint(file.label or path, methods, self.settings.public_docs, is_quiet=False)

    # -- the head --

    def begin(self, request: Request) -> None:
        """Begin a request whose head has arrived. Earlier requests on its connection are answered."""
        request.owner = self
        given = request.fields.get(b"x-request-id")
        if given is not None and 0 < len(given) <= MAX_ID_BYTES and SAFE.issuperset(given):
            request.id = given.decode()
        else:
            request.id = f"{self.service.random.getrandbits(128):032x}"
        header = self.settings.client_header
        address = network_of(request.peer) if header is None else address_of(request.peer, request.fields, header)
        request.lease = Lease(self.service.ledger, address or "unknown")
        request.endpoint, request.parameter = self.find(request.path)
        self.num_requests += 1
        try:
            self._check_head(request)
        except Exception as error:
            self._failed(request, error)

    def find(self, path: str) -> tuple[Endpoint, str]:
        """Return the endpoint and the parameter of a path, with or without the prefix of a proxy."""
        root, endpoints = self.settings.root_path, self.endpoints
        paths = [path]
        if root and (path == root or path.startswith(root + "/")):
            # With a root such as /v1, the path of a route itself begins like the prefix.
            paths.append(path[len(root) :] or "/")
        for each in paths:
            if (endpoint := endpoints.get(each)) is not None and PARAMETER not in each:
                return endpoint, ""
        for each in paths:
            if each.startswith(MODELS):
                return endpoints[MODELS + PARAMETER], each.removeprefix(MODELS)
        return self._nothing, ""

    def _check_head(self, request: Request) -> None:
        """Check the head before the body is read. Raises ApiError: the head is refused."""
        settings, endpoint, cors = self.settings, request.endpoint, self.cors
        headers = request.fields
        if cors is not None and request.method == "OPTIONS" and b"origin" in headers:
            if b"access-control-request-method" in headers:
                preflight = cors.preflight_response(StarletteHeaders(raw=request.headers))
                del preflight.headers["content-length"]
                request.respond(bytes(preflight.body), header_lines(preflight.headers), preflight.status_code)
                self.end(request)
                return
        if len(headers) < len(request.headers):  # a proxy may have checked the other one
            count = sum([name == b"authorization" for name, _ in request.headers])
            if count > 1:
                message = f"a request must have at most one Authorization header, got {count}"
                raise ApiError(400, message, code="duplicate_header")
        if self._keys and not endpoint.is_public:
            request.lease.client = name_of_key(headers, self._keys)
        if self.service.ledger.limits.has_any and not (endpoint.is_quiet or endpoint.is_public):
            request.lease.begin()
        length, limit = headers.get(b"content-length", b"0"), settings.max_body_bytes
        if len(length) > 4 and int(length) > limit:
            raise ApiError(413, f"body must have at most {limit} bytes, got {int(length)}", code="body_too_large")
        if self.middlewares is not None and request.method not in endpoint.operations:
            return  # a middleware may answer it; otherwise `run` refuses it
        operation = operation_of(request)
        if operation.is_refused_early:
            self.service.client.refuse_if_full(request.lease.client)
        if operation.request is not None:
            check_content(headers)
        else:
            request.keeps_body, request.content = False, bytearray()
            if operation.runs_model:
                check_site(headers, None if cors is None else cors.is_allowed_origin)

    def add_headers(self, request: Request, headers: bytes) -> bytes:
        """Return the headers of an answer with the headers that every answer has."""
        headers = b"%bx-request-id: %b\r\n" % (headers, request.id.encode())
        if request.ignored_fields:
            headers += b"x-ignored-fields: %b\r\n" % ", ".join(request.ignored_fields).encode()
        if self.is_leaving and CLOSE not in headers:  # or the client may send another request on it
            headers += CLOSE
        if self.cors is not None:
            headers += self._cors_headers(request, self.cors, headers)
        return headers

    def _cors_headers(self, request: Request, cors: CORSMiddleware, headers: bytes) -> bytes:
        """Return the headers that CORSMiddleware.send adds to requests without credentials."""
        origin = request.fields.get(b"origin")
        if b"vary: " in headers:  # a preflight's answer
            return b""
        added = b"vary: Origin\r\n"
        if origin is not None:
            added += header_lines(cors.simple_headers)
            if not cors.allow_all_origins and cors.is_allowed_origin(origin.decode("latin-1")):
                added += b"access-control-allow-origin: %b\r\n" % origin
        return added

    # -- the body --

    def receive(self, request: Request) -> None:
        """Handle a part of the current request's body, or its end."""
        size, limit = request.num_body_bytes, self.settings.max_body_bytes
        try:
            if size > limit:
                raise ApiError(413, f"body must have at most {limit} bytes", code="body_too_large")
            if request.keeps_body and size > request.lease.bytes:
                if not (request.is_complete and size <= SMALL_BODY_BYTES):
                    request.lease.hold(size)
        except ApiError as error:
            self._failed(request, error)
            return
        if request.is_complete:
            self._start(request)

    def too_slow(self) -> ApiError:
        message = f"body not received within {self.settings.body_timeout_seconds:g} s"
        return ApiError(408, message, code="body_timeout")

    def expire(self, request: Request) -> None:
        """End a request whose deadline has passed."""
        if not request.is_running:
            request.fail(self.too_slow())
            self.end(request)
        else:
            logger.info("the client did not read its answer in time: closing its connection")
            request.drop()

    # -- the handler --

    def _start(self, request: Request) -> None:
        request.is_running = True
        request.arrived_at = time.monotonic()
        request.limit_time(self.settings.request_timeout_seconds)
        if self.middlewares is None:
            self.run(request)
        else:
            self.middlewares.run(request)

    def run(self, request: Request) -> None:
        """Call the handler of a complete request."""
        if self.middlewares is not None:  # a middleware may have changed the path
            request.endpoint, request.parameter = self.find(request.path)
        try:
            operation = operation_of(request)
            answering = operation.handler(self.service, request)
        except Exception as error:
            self._failed(request, error)
            return
        if answering is None:
            self.end(request)
            return
        task = asyncio.get_running_loop().create_task(self._answer(request, answering))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _answer(self, request: Request, answering: Coroutine[Any, Any, None]) -> None:
        current_request_id.set(request.id)  # in the context of this task
        self._running.add(request)
        try:
            await answering
        except asyncio.CancelledError:  # when the time to drain is over
            if request.status is None:
                request.fail(ApiError(503, "server has shut down", code="shutting_down"))
            else:
                request.drop()
        except Exception as error:
            self._failed(request, error)
        self._running.discard(request)
        self.end(request)

    def _failed(self, request: Request, error: BaseException) -> None:
        """End a request with an ApiError, or with status 500 after any other exception."""
        if isinstance(error, ApiError) and request.status is None:
            request.fail(error)
        else:
            logger.error("request %s failed", request.id, exc_info=error)
            if request.status is None:
                request.fail(ApiError(500, "internal error"))
            elif request.responder is not None:
                request.responder.abort()
        self.end(request)

    def keep_alive(self, now: float) -> None:
        """Write to silent streams, so that proxies do not close their connections."""
        before = now - self.settings.keep_alive_seconds
        for request in self._running:
            if request.keep_alive is not None and (request.written_at or request.arrived_at) <= before:
                if not request.is_full:
                    request.keep_alive()

    # -- the end --

    def end(self, request: Request) -> None:
        """Release everything that a request holds, count it and log it. Every request is ended once."""
        if request.is_ended:
            return
        request.is_ended = True
        service = self.service
        for generation in request.generations:
            generation.abort()
        request.lease.end(request.num_run_characters if request.lease.is_charged else 0)
        request.content = bytearray()
        if request.client_left:
            request.status = CLIENT_CLOSED_REQUEST
        ended_at = time.monotonic()
        route, seconds = request.endpoint.path, ended_at - request.started_at
        self.num_requests -= 1
        if service.metrics is not None and request.status is not None:
            service.metrics.http_request(route, request.method, request.status, seconds)
        if (log := self.access_log) is not None:
            ran, client = request.num_prompt_tokens is not None, request.lease.client
            others = (request.num_prompt_tokens, request.num_completion_tokens, request.endings) if ran else ()
            level = logging.DEBUG if request.endpoint.is_quiet else logging.INFO
            log.add(level, request.method, route, request.status, client, round(seconds, 6), request.id, *others)
        if service.tracer is not None:
            service.tracer.request(request, ended_at)


def operation_of(request: Request) -> Operation:
    """Return the operation of a request. Raises ApiError: 404, unknown path; 405, unknown method of the path."""
    operations: dict[str, Operation] = request.endpoint.operations
    if (operation := operations.get(request.method)) is not None:
        return operation
    shown = f"{request.method} {request.path}"
    if operations:
        raise ApiError(405, f"{shown}: Method Not Allowed", headers={"Allow": ", ".join(operations)})
    if request.path.endswith(("/v1/chat/completions", "/v1/responses")):
        raise ApiError(404, f"{shown}: there is no chat; use /v1/completions, which continues a text")
    raise ApiError(404, f"{shown}: Not Found")
