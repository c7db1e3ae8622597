"""The LitServe server around the HTTP and inference processes: start, supervision, shutdown.

`build_server(settings)` is what `python -m service` runs.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from multiprocessing.managers import SyncManager
from typing import Any

from fastapi import FastAPI
from litserve import LitServer
from litserve.connector import check_cuda_with_nvidia_smi
from litserve.utils import WorkerSetupStatus
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from service.engine.worker import EngineAPI, EngineLoop
from service.http.app import Api, HttpState
from service.http.middleware import Edge
from service.http.openapi import documentation
from service.model.checkpoint import Checkpoint
from service.observe.logs import adopt_litserve, configure_logging
from service.observe.metrics import forget_process
from service.process import die_with_parent, ignore_terminal_signals, relax_garbage_collector
from service.settings import Settings
from service.sockets import SocketTransport

logger = logging.getLogger(__name__)


class WorkerStartError(Exception):
    """Every inference process failed before it was ready."""


class PolledEvent(threading.Event):
    """Looks up now and then while it waits: a signal that the kernel gives to another thread does not wake this one."""

    POLL_SECONDS = 0.25

    def wait(self, timeout: float | None = None) -> bool:
        while timeout is None and not super().wait(self.POLL_SECONDS):
            pass
        return super().wait(timeout)


class Endpoint:
    """An ASGI application of one route; starlette would wrap a function for exceptions, which Edge answers."""

    def __init__(self, answer: Callable[[Request], Awaitable[Response]]):
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self.answer(Request(scope, receive, send))
        await response(scope, receive, send)


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
            log_format=settings.log_format,
            spec=self.spec,
            loop=EngineLoop(),
        )
        super().__init__(
            api,
            accelerator=choose_accelerator(settings.accelerator),
            devices=settings.devices,
            workers_per_device=settings.workers_per_device,
            timeout=False,
            restart_workers=True,
            disable_openapi_url=True,  # FastAPI's document would say nothing, and its page load scripts from elsewhere
        )
        self.app.router.routes += documentation(settings, checkpoint)
        self.spec.devices = [str(device) for device in self._inference_workers_config_for_api(api.api_path)]
        self.uvicorn_graceful_timeout = 1  # we drain before uvicorn is told to stop

        # In place of FastAPI's own layers, which no route here needs.
        self.app.middleware_stack = Edge(self.app.router, settings, lambda: self.spec.metrics, lambda: self.spec.tracer)

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
                timeout_keep_alive=self.settings.idle_connection_seconds,
                # Both, even if None: otherwise LitServe looks for a certificate in variables of its own.
                ssl_certfile=self.settings.tls_certificate,
                ssl_keyfile=self.settings.tls_key,
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

    def _register_spec_endpoints(self, lit_api: Any) -> None:
        """As plain routes: FastAPI's resolve dependencies and answer models for each request, and there are none."""
        for path, endpoint, methods in self.spec.endpoints:
            route = Route(path, Endpoint(endpoint), methods=methods)
            route.methods = set(methods)  # HEAD comes with GET, and would run a whole generation
            self.app.router.routes.append(route)

    def _init_manager(self, num_api_servers: int) -> Any:
        """LitServe's manager process with what is left for it: the workers' setup status."""
        adopt_litserve()
        manager = SyncManager()
        manager.start(_ignore_signals)
        self.workers_setup_status = manager.dict()
        self._shutdown_event = PolledEvent()
        self.litapi_request_queues = {self.spec.api_path: None}
        self._transport = SocketTransport(len(self.spec.devices))
        return manager

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        die_with_parent()
        async with self.spec.running(self._transport):
            relax_garbage_collector()
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
        self.state.worker_restarted()
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
        self._shutdown_event.set()  # ends the monitor, which would start the workers again
        self.uvicorn_graceful_timeout = 10  # until the HTTP processes, which end what is left, are killed
        super()._perform_graceful_shutdown(manager, uvicorn_workers, shutdown_reason)
        logger.info("all processes have ended")


def choose_accelerator(asked: str) -> str:
    """What `auto` is here: cuda where there is a GPU and torch is built for it, else cpu; a Mac's is LitServe's to say.

    LitServe's own choice imports torch into this process, which does without it; or finds a GPU without that, and then
    takes the CPU, as torch is not imported.
    """
    if asked != "auto" or sys.platform == "darwin":
        return asked
    if not check_cuda_with_nvidia_smi():
        return "cpu"
    import torch

    if torch.version.cuda is None:
        logger.warning("there is a GPU, but torch %s is built without CUDA: serving on the CPU", torch.__version__)
        return "cpu"
    return "cuda"


def _ignore_signals() -> None:
    """For the manager process."""
    die_with_parent(signal.SIGKILL)
    ignore_terminal_signals()


def build_server(settings: Settings) -> Server:
    """The server for a checkpoint.

    Raises:
        CheckpointError: the folder is not a checkpoint that can be trusted.
    """
    configure_logging(settings.log_level, settings.log_format)
    return Server(settings, Checkpoint.read(settings.checkpoint))
