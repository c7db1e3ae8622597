"""The LitServe server around the HTTP and inference processes: placement, supervision, shutdown.

The one file that uses LitServe's private names; tests/test_litserve.py lists them and what each is for.
"""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from litserve import Callback, LitServer, Logger
from litserve.callbacks.base import EventTypes
from litserve.connector import check_cuda_with_nvidia_smi
from litserve.specs.base import LitSpec
from litserve.utils import WorkerSetupStatus

from service.engine import native
from service.engine.runner import resolve, slots_that_fit
from service.engine.scheduler import reserved_slots
from service.engine.worker import EngineAPI, EngineLoop, EngineOptions
from service.http.app import App
from service.http.context import Service, SharedState
from service.model.checkpoint import Checkpoint
from service.model.config import GPTConfig
from service.observe.logs import adopt_litserve, configure_logging
from service.observe.metrics import forget_process
from service.process import die_with_parent, relax_garbage_collector
from service.settings import Settings
from service.sockets import SocketTransport

logger = logging.getLogger(__name__)


class WorkerStartError(Exception):
    """Every inference process failed before it was ready."""


class BackendError(ValueError):
    """The backend or dtype asked for cannot run here."""


class PolledEvent(threading.Event):
    """Polls, so that Python can run signal handlers: a signal delivered to another thread does not end a wait.

    `check` is called at each poll and may raise.
    """

    POLL_SECONDS = 0.1

    def __init__(self, check: Callable[[], None]):
        super().__init__()
        self._check = check

    def wait(self, timeout: float | None = None) -> bool:
        while timeout is None and not super().wait(self.POLL_SECONDS):
            self._check()
        return super().wait(timeout)


class Spec(LitSpec):
    """LitServe's extension point for a custom API. Registers nothing: the routes are App.routes."""

    def __init__(self) -> None:
        super().__init__()
        self.api_path = "/generate"

    @property
    def stream(self) -> bool:
        return True  # otherwise LitServe would compress answers

    def setup(self, server: LitServer) -> None:
        """LitServe hands over its queues here; `Server.lifespan` connects the transport instead."""


class Server(LitServer):
    """LitServe with other routes, transport and shutdown; placement and worker supervision are LitServe's."""

    def __init__(self, settings: Settings, checkpoint: Checkpoint, **lit_options: Any):
        self.settings = settings
        self.state = SharedState(settings.http_processes)
        self.spec = Spec()
        self.must_hurry = False  # after a second signal: do not wait for running requests
        api = EngineAPI(spec=self.spec, loop=EngineLoop())
        super().__init__(
            api,
            accelerator=choose_accelerator(settings.accelerator),
            devices=settings.devices,
            workers_per_device=settings.workers_per_device,
            timeout=False,
            restart_workers=True,
            disable_openapi_url=True,  # /docs and /openapi.json are ours
            **lit_options,
        )
        # LitServe's lists of one: [["cuda:0"], ["cuda:1"]]
        configured = self._inference_workers_config_for_api(api.api_path)
        devices = [device if isinstance(device, str) else device[0] for device in configured]
        backend, dtype = choose_backend(settings, devices[0])
        slots = choose_slots(settings, GPTConfig(**checkpoint.hyperparameters), dtype, devices[0])
        api.options = EngineOptions(
            checkpoint.path,
            settings.model_name,
            backend,
            dtype,
            settings.threads,
            slots,
            settings.max_queued_requests,
            settings.max_queue_seconds,
            settings.fair_queueing,
            settings.step_seconds,
            settings.log_level,
            settings.log_format,
        )
        self.service = Service(
            settings, checkpoint, self.state, backend=backend, dtype=dtype, slots=slots, devices=devices
        )
        self.http = App(self.service)
        if lit_options.get("callbacks"):
            trigger = self._callback_runner.trigger_event
            self.http.hooks = (
                lambda: trigger(EventTypes.ON_REQUEST.value, active_requests=self.state.num_busy, litserver=self),
                lambda: trigger(EventTypes.ON_RESPONSE.value, litserver=self),
            )
        self.app.router.routes += self.http.routes()
        self.uvicorn_graceful_timeout = 1  # requests are drained before uvicorn stops

        # Replaces FastAPI's own layers, which no route here needs.
        self.app.middleware_stack = self.http.middleware(self.app.router)
        for middleware in self.middlewares:
            kind, options = middleware if isinstance(middleware, tuple) else (middleware, {})
            self.app.middleware_stack = kind(self.app.middleware_stack, **options)

    def serve(self) -> None:
        """Serve until SIGTERM or Ctrl-C; running requests finish first.

        Raises:
            WorkerStartError: no inference process could start.
        """
        main = os.getpid()

        def stop(*_: Any) -> None:
            if os.getpid() != main:  # an HTTP process whose server has finished
                raise SystemExit(0)
            if self.state.is_draining:
                self.must_hurry = True
                return
            # `_check_signal` raises, not this handler: Python would swallow an exception in a hook of os.fork, and one
            # while a process is spawned would cut off what the child reads.
            self.state.start_draining()

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
                proxy_headers=False,  # uvicorn would believe X-Forwarded-For of any local peer; see --client-header
                timeout_keep_alive=self.settings.idle_connection_seconds,
                # Both, even if None: otherwise LitServe reads environment variables of its own.
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
        """LitServe's /, /health and /info: not served."""

    def _register_spec_endpoints(self, lit_api: Any) -> None:
        """LitServe's FastAPI routes: App.routes has plain ones."""

    def _register_middleware(self) -> None:
        """LitServe's way through FastAPI: __init__ wraps the application instead."""

    def _init_manager(self, num_api_servers: int) -> Any:
        """LitServe's manager process, for the workers' setup status and the queue of loggers alone."""
        adopt_litserve()
        manager = SyncManager()
        manager.start(_ignore_signals)
        self.workers_setup_status = manager.dict()
        self._shutdown_event = PolledEvent(self._check_signal)
        self.litapi_request_queues = {self.spec.api_path: None}
        if self._logger_connector._loggers:
            self.logger_queue = manager.Queue()
        self._transport = SocketTransport(len(self.service.devices))
        return manager

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        die_with_parent()
        async with self.http.running(self._transport, self.spec.response_queue_id):
            relax_garbage_collector()
            yield
        self._callback_runner.trigger_event(EventTypes.ON_SERVER_END.value, litserver=self)

    def verify_worker_status(self) -> None:
        """Wait for a first worker; LitServe would wait for ever if it were killed while loading.

        Raises:
            WorkerStartError: none can start.
        """
        while WorkerSetupStatus.READY not in self.workers_setup_status.values():
            if WorkerSetupStatus.ERROR in self.workers_setup_status.values() or not any(
                worker.is_alive() for worker in self.inference_workers
            ):
                raise WorkerStartError("no inference process could start; its log says why")
            self._check_signal()
            time.sleep(0.05)

    def _check_signal(self) -> None:
        """Called in every polling loop.

        Raises:
            KeyboardInterrupt: SIGTERM or SIGINT has arrived.
        """
        if self.state.is_draining:
            raise KeyboardInterrupt

    def launch_single_inference_worker(self, lit_api: Any, worker_id: int) -> Any:
        dead = self.inference_workers[worker_id].pid
        logger.error("worker %d (process %d) died: restarting", worker_id, dead)
        forget_process(dead)
        self.state.worker_restarted()
        return super().launch_single_inference_worker(lit_api, worker_id)

    def _perform_graceful_shutdown(self, manager: Any, uvicorn_workers: Any, shutdown_reason: str = "normal") -> None:
        """Refuse new requests, wait for running ones, then end the HTTP processes, then the workers."""
        self.state.start_draining()
        deadline = time.monotonic() + self.settings.drain_seconds
        logger.info("shutting down, running requests: %d", self.state.num_busy)
        while self.state.num_busy and time.monotonic() < deadline and not self.must_hurry:
            time.sleep(0.02)
        if self.state.num_busy:
            logger.warning("requests not finished within %g s: %d", self.settings.drain_seconds, self.state.num_busy)
        self._shutdown_event.set()  # ends the monitor, which would restart the workers
        self.uvicorn_graceful_timeout = 10  # seconds until HTTP processes, which abort remaining requests, are killed
        super()._perform_graceful_shutdown(manager, uvicorn_workers, shutdown_reason)
        logger.info("all processes have ended")


def choose_accelerator(asked: str) -> str:
    """Resolve `auto`: cuda with a GPU and a torch built for it, otherwise cpu; on a Mac LitServe decides.

    LitServe's own choice either imports torch into this process, which does not need it, or takes the CPU beside a
    GPU because torch is not imported.

    Raises:
        BackendError: cuda, and torch is built without it.
    """
    if sys.platform == "darwin" or asked not in ("auto", "cuda"):
        return asked
    version, cuda = torch_build()
    if asked == "cuda":
        if cuda is None:
            raise BackendError(f"--accelerator cuda: torch {version} is built without CUDA")
        return asked
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip():
        return "cpu"
    by_name = any(part.strip().startswith(("GPU-", "MIG-")) for part in (visible or "").split(","))
    if not by_name and not check_cuda_with_nvidia_smi():  # which compares numbers alone
        if visible:
            logger.warning("CUDA_VISIBLE_DEVICES=%s names no GPU that nvidia-smi lists: serving on the CPU", visible)
        return "cpu"
    if cuda is None:
        logger.warning("torch %s is built without CUDA: serving on the CPU although there is a GPU", version)
        return "cpu"
    return "cuda"


def torch_build() -> tuple[str, str | None]:
    """Versions of torch and of the CUDA it was built with, read from its own file without importing torch."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    build = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return build["__version__"], build["cuda"]


def choose_slots(settings: Settings, config: GPTConfig, dtype: str, device: str) -> int:
    """Cache slots per worker that one client can use; with fair queueing there are `reserved_slots` more.

    Raises:
        BackendError: `auto`, and not one fits, or that cannot be known.
    """
    if settings.max_running_requests != "auto":
        return settings.max_running_requests
    if not device.startswith("cuda"):
        return 64
    free = free_gpu_bytes(settings.devices) / settings.workers_per_device
    fitting = slots = slots_that_fit(config, dtype, free)
    if settings.fair_queueing:
        slots = next((n for n in range(fitting - 1, 0, -1) if n + reserved_slots(n) <= fitting), 0)
    if not slots:
        raise BackendError(f"--max-running-requests auto: not one sequence fits into {free / 1e9:.1f} GB of GPU memory")
    logger.info("--max-running-requests auto: %d sequences fit into %.1f GB of free GPU memory", fitting, free / 1e9)
    return slots


def free_gpu_bytes(devices: int) -> float:
    """Least free memory of the first `devices` GPUs. Asked in another process, as this one does without torch.

    Raises:
        BackendError: torch cannot tell.
    """
    code = f"import torch; print(min(torch.cuda.mem_get_info(i)[0] for i in range({devices})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise BackendError(
            f"--max-running-requests auto: the free memory of {devices} GPUs is unknown ({reason}); pass a number"
        )
    return float(done.stdout)


def choose_backend(settings: Settings, device: str) -> tuple[str, str]:
    """Backend and dtype of every worker.

    Raises:
        BackendError: those asked for cannot run on the device.
    """
    try:
        backend, dtype = resolve(settings.backend, settings.dtype, device)
    except ValueError as error:
        raise BackendError(f"--backend {settings.backend} --dtype {settings.dtype}: {error}") from None
    if settings.backend == "auto" and backend == "torch" and device == "cpu":
        logger.warning("serving on backend torch, as native is not available: %s", native.why_not())
    return backend, dtype


def _ignore_signals() -> None:
    """For the manager process: signals to the process group are the main process's to handle."""
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def build_server(
    settings: Settings,
    *,
    callbacks: list[Callback] | Callback | None = None,
    loggers: list[Logger] | Logger | None = None,
    middlewares: list[Any] | None = None,
) -> Server:
    """The server for a checkpoint; the options are LitServer's, and cost nothing if absent.

    Callbacks fire for setup in each worker, for the server's end in each HTTP process, and for requests and responses
    of routes that run the model; their arguments are LitServe's. Middlewares see every request before this service's.

    Raises:
        CheckpointError: the folder is not a checkpoint that can be trusted.
        BackendError: the settings' backend or dtype cannot run here, or no slot fits.
        RuntimeError: PROMETHEUS_MULTIPROC_DIR is not set; `service.__main__.serve` sets it.
    """
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        raise RuntimeError(
            "PROMETHEUS_MULTIPROC_DIR must name an empty folder before service.server is imported; "
            "service.__main__.serve(settings, …) does that"
        )
    configure_logging(settings.log_level, settings.log_format)
    checkpoint = Checkpoint.read(settings.checkpoint)
    return Server(settings, checkpoint, callbacks=callbacks, loggers=loggers, middlewares=middlewares)
