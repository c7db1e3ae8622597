"""The LitServe server around the HTTP and inference processes: start, supervision, shutdown.

`build_server(settings)` is what `python -m service` runs.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import string
import threading
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.managers import SyncManager
from typing import Any

from fastapi import FastAPI, Request
from litserve import LitServer
from litserve.utils import WorkerSetupStatus
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api import Api, HttpState
from service.metrics import forget_process
from service.model.checkpoint import Checkpoint
from service.openapi import documentation
from service.protocol import ApiError
from service.settings import Settings
from service.transport import SocketTransport, die_with_parent
from service.worker import EngineAPI, EngineLoop, configure_logging

logger = logging.getLogger(__name__)


class WorkerStartError(Exception):
    """Every inference process failed before it was ready."""


class Edge:
    """The outermost layer of the application: request ids, the bound on bodies, the count of answers, last errors."""

    SAFE = frozenset(string.ascii_letters + string.digits + "-_.:")

    def __init__(self, app: ASGIApp, spec: Api):
        self.app = app
        self.spec = spec

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if 0 < len(given) <= 128 and self.SAFE.issuperset(given) else uuid.uuid4().hex
        scope["chargpt.request_id"] = request_id
        limit = self.spec.settings.max_body_bytes
        status: int | None = None
        received = 0

        async def counted_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise ApiError(413, f"the body may have at most {limit} bytes", code="body_too_large")
            return message

        async def identified_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            length = headers.get(b"content-length", b"0")
            if length.isdigit() and int(length) > limit:
                message = f"the body may have at most {limit} bytes, got {int(length)}"
                error = ApiError(413, message, code="body_too_large")
                await error_response(error)(scope, receive, identified_send)
            else:
                await self.app(scope, counted_receive, identified_send)
        except ClientDisconnect:
            status = 499  # nginx' number for a client that left
        except Exception:
            logger.exception("request %s failed", request_id)
            if status is not None:
                raise
            await error_response(ApiError(500, "internal error"))(scope, receive, identified_send)
        finally:
            route = scope.get("route")
            handler = route.path if route is not None else "other"
            if self.spec.metrics is not None and status is not None:
                self.spec.metrics.http_request(handler, scope["method"], status)


def error_response(error: ApiError) -> Response:
    return Response(error.body, error.status, headers=error.headers, media_type="application/json")


class Server(LitServer):
    """LitServe with its own routes, queues and shutdown replaced by ours; supervision and placement stay its own."""

    def __init__(self, settings: Settings, checkpoint: Checkpoint):
        self.settings = settings
        self.state = HttpState(settings.http_processes)
        self.spec = Api(settings, checkpoint, self.state)
        self.must_hurry = False  # a second signal: do not wait for running requests
        api = EngineAPI(
            checkpoint.path,
            model_name=settings.model_name,
            threads=settings.threads,
            max_running=settings.max_running_requests,
            max_waiting=settings.max_queued_requests,
            prefill_budget=settings.prefill_budget,
            log_level=settings.log_level,
            spec=self.spec,
            loop=EngineLoop(),
        )
        super().__init__(
            api,
            accelerator=settings.accelerator,
            devices=settings.devices,
            workers_per_device=settings.workers_per_device,
            timeout=False,
            restart_workers=True,
            middlewares=[(Edge, {"spec": self.spec})],
            disable_openapi_url=True,  # FastAPI's document would say nothing, and its page load scripts from elsewhere
        )
        self.app.router.routes += documentation(settings, checkpoint)
        self.spec.devices = [str(device) for device in self._inference_workers_config_for_api(api.api_path)]
        self.uvicorn_graceful_timeout = 1  # we drain before uvicorn is told to stop

        async def on_api_error(request: Request, error: Any) -> Response:
            return error_response(error)

        async def on_http_error(request: Request, error: Any) -> Response:
            response = error_response(
                ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
            )
            if error.status_code == 405:  # of the first route of this path alone, Starlette would say
                matching = [route for route in self.app.routes if route.matches(request.scope)[0] is Match.PARTIAL]
                methods = {method for route in matching for method in getattr(route, "methods", None) or ()}
                response.headers["Allow"] = ", ".join(sorted(methods))
            return response

        self.app.add_exception_handler(ApiError, on_api_error)
        self.app.add_exception_handler(HTTPException, on_http_error)

    def serve(self) -> None:
        """Serve until SIGTERM or Ctrl-C; running requests finish first.

        Raises:
            WorkerStartError: no inference process could start.
        """
        main = os.getpid()

        def stop(*_: Any) -> None:
            if os.getpid() != main:  # an HTTP process, whose server has finished
                raise SystemExit(0)
            if self.state.is_draining:
                self.must_hurry = True
                return
            self.state.start_draining()
            raise KeyboardInterrupt

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        try:
            self.run(
                host=self.settings.host,
                port=self.settings.port,
                num_api_servers=self.settings.http_processes,
                log_level=self.settings.log_level,
                generate_client_file=False,
                loop="uvloop",
                http="httptools",
                ws="none",
                access_log=False,
                log_config=None,
                server_header=False,
            )
        except KeyboardInterrupt:
            logger.info("stopped while starting")
        finally:
            for process in multiprocessing.active_children():  # none after an orderly shutdown
                process.terminate()
                process.join(2)
                process.kill()
            if hasattr(self, "_transport"):
                self._transport.remove()

    # -- LitServe's extension points --

    def _register_internal_endpoints(self) -> None:
        """LitServe's own /, /health and /info; the spec has ours."""

    def setup_auth(self, lit_api: Any = None) -> Any:
        return lambda: None

    def _init_manager(self, num_api_servers: int) -> Any:
        """LitServe's manager process with what is left for it: the workers' setup status and the shutdown event."""
        manager = SyncManager()
        manager.start(ignore_signals)
        self.workers_setup_status = manager.dict()
        self._shutdown_event = manager.Event()
        self.litapi_request_queues = {self.spec.api_path: None}
        self._transport = SocketTransport(len(self.spec.devices))
        return manager

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        die_with_parent()
        async with self.spec.running(self._transport):
            yield

    def verify_worker_status(self) -> None:
        """Wait for a first worker; LitServe's own would wait for ever for one that was killed while it loads."""
        while WorkerSetupStatus.READY not in self.workers_setup_status.values():
            if WorkerSetupStatus.ERROR in self.workers_setup_status.values() or not any(
                worker.is_alive() for worker in self.inference_workers
            ):
                raise WorkerStartError("no inference process could start; its log says why")
            time.sleep(0.05)

    def launch_single_inference_worker(self, lit_api: Any, worker_id: int) -> Any:
        dead = self.inference_workers[worker_id].pid
        logger.error("worker %d (process %d) died and is started again", worker_id, dead)
        forget_process(dead)
        return super().launch_single_inference_worker(lit_api, worker_id)

    def _perform_graceful_shutdown(self, manager: Any, uvicorn_workers: Any, shutdown_reason: str = "normal") -> None:
        """Refuse new requests, let the running ones finish, then end the HTTP processes, then the workers."""
        self.state.start_draining()
        deadline = time.monotonic() + self.settings.drain_seconds
        logger.info("shutting down: %d requests are running", self.state.num_busy)
        while self.state.num_busy and time.monotonic() < deadline and not self.must_hurry:
            time.sleep(0.02)
        if self.state.num_busy:
            logger.warning("%d requests did not finish in time", self.state.num_busy)
        # End the monitor, which would start the workers again. From a thread of its own: the signal came while
        # this one waited for the event, and its connection to the manager still does.
        setter = threading.Thread(target=self._shutdown_event.set)
        setter.start()
        setter.join()
        self.uvicorn_graceful_timeout = 10  # until the HTTP processes, which end what is left, are killed
        super()._perform_graceful_shutdown(manager, uvicorn_workers, shutdown_reason)
        logger.info("all processes have ended")


def ignore_signals() -> None:
    """For the manager process: signals to the whole group are the main process' to handle."""
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def build_server(settings: Settings) -> Server:
    """The server for a checkpoint.

    Raises:
        CheckpointError: the folder is not a checkpoint that can be trusted.
    """
    configure_logging(settings.log_level)
    return Server(settings, Checkpoint.read(settings.checkpoint))
