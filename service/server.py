"""The LitServe server that starts, supervises and ends the HTTP and inference processes.

Only this file uses LitServe's private names. tests/test_litserve.py lists each one with its purpose.
"""

from __future__ import annotations

import copy
import errno
import functools
import logging
import multiprocessing
import os
import signal
import socket
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import uvicorn
from litserve import LitServer
from litserve.loops.loops import inference_worker

from service.catalog import Catalog, Version
from service.engine.worker import EngineAPI, EngineLoop
from service.http.app import NAMES, App
from service.http.connection.guard import Connection
from service.http.connection.limits import ConnectionLimits
from service.http.process import running
from service.http.routes.service import Service
from service.observe.logs import adopt_litserve, configure_logging
from service.observe.metrics import allocate_files, forget_process
from service.placement import BackendError, check_devices, choose_accelerator, choose_backend, choose_slots
from service.process import become, blocked, return_large_blocks, spare_old_objects
from service.rollout import Rollout
from service.settings import ClientLimitsFile, Settings, refuse_password
from service.shared import SharedState, worker_name
from service.supervisor import START_SECONDS, Supervisor, TooManyDeathsError

logger = logging.getLogger(__name__)

ACCEPTED = 16  # connections accepted in an iteration of the event loop
BACKLOG = 4096  # connections waiting to be accepted: the default maximum of Linux (net.core.somaxconn)
UVICORN_GRACE_SECONDS = 2  # requests are drained before uvicorn stops
POLL_SECONDS = 0.1  # between two checks of all processes
START_POLL_SECONDS = 0.01  # the same until the service is ready
READING_SECONDS = 1.0  # wait of a worker that starts for the thread that reads checkpoints
SWITCH_SECONDS = 0.0005  # longest wait of the event loop for a computing thread: patterns, /metrics, attention
HTTP_START_SECONDS = 60.0  # limit for the first heartbeat of an HTTP process


class StartError(Exception):
    """Every inference process of a checkpoint failed before it was ready."""


class HttpServer(uvicorn.Server):
    """Ends when the main process says so. Only the main process handles a signal to the process group."""

    def __init__(self, config: uvicorn.Config, state: SharedState):
        super().__init__(config)
        self._state = state

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. uvloop accepts one connection of each socket in an iteration, so it gets copies of ours.

        With one socket, a new client waits behind hundreds that connect again after a refusal.
        """
        copies = [copy for it in sockets or () for copy in (it, *(it.dup() for _ in range(ACCEPTED - 1)))]
        await super().startup(copies)

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.should_exit = self.should_exit or self._state.is_in("stopping")


class Server(LitServer):
    """LitServe with its own routes, transport, supervision and shutdown. LitServe places the workers."""

    def __init__(self, settings: Settings, catalog: Catalog, middlewares: list[Any] | None = None):
        self.settings, self.catalog = settings, catalog
        self.connections = ConnectionLimits(settings, lambda: self.service.metrics)
        self.must_hurry = False  # True after a second signal: do not wait for running requests
        self._must_reload = False  # True after SIGHUP
        self._reading = threading.Thread()  # reads checkpoints after SIGHUP; a large one takes seconds
        # App.operations serves other paths. If this one did not stream, LitServe would compress answers.
        api = EngineAPI(loop=EngineLoop(), stream=True)
        accelerator = choose_accelerator(settings.accelerator)
        check_devices(settings.devices, accelerator)
        super().__init__(
            api,
            accelerator=accelerator,
            devices=settings.devices,
            workers_per_device=settings.workers_per_device,
            timeout=False,
            restart_workers=True,
            disable_openapi_url=True,  # /docs and /openapi.json are ours
            middlewares=middlewares,
        )
        self.api = api
        # LitServe's lists of one: [["cuda:0"], ["cuda:1"]]
        configured = self._inference_workers_config_for_api(api.api_path)
        devices = [device if isinstance(device, str) else device[0] for device in configured]
        backend, dtype = choose_backend(settings, devices[0])
        configs = [checkpoint.config for checkpoint in catalog.served.values()]
        slots = choose_slots(settings, configs, dtype, devices[0])
        self.state = SharedState(settings.http_processes, len(devices))
        self.supervisor = Supervisor(self.state, hang_seconds=settings.hang_seconds)
        self.rollout = Rollout(catalog, self.state, self.supervisor, self._launch)
        self._prepare(backend, dtype, slots)
        self.service = Service(
            settings, catalog.listing, catalog.checkpoints, self.state,
            backend=backend, dtype=dtype, slots=slots, devices=devices,
        )  # fmt: skip
        self.http = App(self.service, middlewares or ())
        self.http.add_files()

    def _prepare(self, backend: str, dtype: str, slots: int) -> None:
        """Prepare what the other processes need. Raises BackendError: the disk is full."""
        api, settings, catalog = self.api, self.settings, self.catalog
        api.folder, api.state = catalog.folder, self.state
        api.backend, api.dtype, api.slots = backend, dtype, slots
        api.settings = settings.model_copy()
        # A worker does not need these. The arguments of a new process must fit a pipe's buffer, or this one waits.
        api.settings._api_keys, api.settings._limits = {}, ClientLimitsFile()
        try:
            allocate_files(self.state.http_names, [settings.model_name, *catalog.served])
            self.rollout.allocate()
            catalog.publish_first(self.state)
        except OSError as error:
            raise BackendError(f"{catalog.folder}: {error.strerror}") from None

    def run(self, host: str | None = None, port: int | str | None = None, **others: Any) -> None:
        """Serve until SIGTERM or Ctrl-C. Running requests finish first.

        host, port: override the settings.

        Raises TypeError: another option of LitServe was given; BackendError: the address cannot be listened on;
        StartError: no inference process could start; TooManyDeathsError: too many starts of processes failed.
        """
        if others:
            raise TypeError(f"run() takes host and port, got {', '.join(others)}; Settings has every other option")
        if host is not None:
            self.settings.host = host
        if port is not None:
            self.settings.port = port  # type: ignore[assignment]  # validated, as all assignments to settings
        self._listener = bind(self.settings.host, self.settings.port)
        main = os.getpid()

        def stop(*_: Any) -> None:
            if os.getpid() != main:  # this is an HTTP process whose server has finished
                raise SystemExit(0)
            if self.state.is_in("leaving"):
                self.must_hurry = True
                return
            # Raise nothing. Python would swallow an exception in a hook of os.fork. An exception while a process is
            # spawned would cut off the data that the child reads.
            self.state.enter("leaving")
            if not self.settings.shutdown_delay_seconds:
                self.state.enter("draining")

        def hang_up(*_: Any) -> None:
            self._must_reload = True

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGHUP, hang_up)
        try:
            self._run_processes()
        except KeyboardInterrupt:
            logger.info("stopped while starting")
        finally:
            for process in multiprocessing.active_children():  # none after an orderly shutdown
                process.terminate()
                process.join(2)
                process.kill()

    def _run_processes(self) -> None:
        """Launch the workers, start the HTTP processes, keep all of them running, and stop.

        Raises as `run`; KeyboardInterrupt: SIGTERM or SIGINT while starting.
        """
        adopt_litserve()
        state, watch = self.state, self.supervisor.watch
        self.rollout.start()
        self._await_workers()
        spare_old_objects()  # HTTP processes inherit them
        try:
            config = self._listen()
            for id, name in enumerate(state.http_names):
                start, died = functools.partial(self._fork, config, id), functools.partial(self._http_process_died, id)
                watch(name, start, died, HTTP_START_SECONDS)
            is_announced = False
            while not state.is_in("leaving"):
                if self._must_reload and not (self._reading.is_alive() or self.rollout.is_busy):
                    self._must_reload = False
                    self._reload()
                self.supervisor.check()
                self._roll_out()
                if not is_announced and all(state.answering[name] for name in state.http_names):
                    is_announced = True
                    logger.info("ready: %s", url_of(self.settings))
                # Short enough for Python to run signal handlers.
                time.sleep(POLL_SECONDS if is_announced else START_POLL_SECONDS)
        finally:
            self.catalog.is_ending = True
            self._stop()
            if self._reading.is_alive():
                self._reading.join(5)  # it may still write to the folder that is removed next
            logger.info("all processes have ended")

    # -- starting --

    def _launch(self, version: Version, id: int) -> BaseProcess:
        """Start a worker. Signals of a terminal to all processes must not end it while it starts.

        The worker is a fork of this process, which has imported the modules already. If a fork is not safe, it is a new
        process, as LitServe starts it.
        """
        process: BaseProcess
        api, devices = copy.copy(self.api), self.service.devices
        api.version, device = version, devices[id % len(devices)]
        # Sockets in the folder are the transport, without a queue. The first heartbeat shows that a worker is ready.
        folder, callbacks, status = self.catalog.folder, self._callback_runner, dict[str, str]()
        arguments = (api, device, id, None, folder, status, callbacks, self.restart_workers)
        if self._can_fork(device):
            fork = multiprocessing.get_context("fork")
            process = fork.Process(target=self._work, args=arguments, name=worker_name(id))
            with blocked(signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # a fork must not run this process's handlers
                process.start()
            return process
        ensure_directory()
        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(target=inference_worker, args=arguments, name=worker_name(id))
        with blocked(signal.SIGHUP):
            resource_tracker.ensure_running()  # its start unblocks SIGINT, so start it before the worker
            with blocked(signal.SIGINT):
                process.start()
        return process

    def _can_fork(self, device: str) -> bool:
        """True if a fork is safe.

        It is not safe on a Mac because of its libraries, for CUDA, or if the user's program and the worker both use
        torch. It is not safe beside another thread either: a fork would keep that thread's locks forever. So it waits a
        moment for the thread that reads checkpoints after SIGHUP, because a new process starts more slowly.
        """
        used_torch = self.api.backend == "torch" and "torch" in sys.modules
        is_safe = sys.platform == "linux" and not device.startswith("cuda") and not used_torch
        if is_safe and self._reading.is_alive():
            self._reading.join(READING_SECONDS)
        return is_safe and threading.active_count() == 1

    def _work(self, *arguments: Any) -> None:
        """Run LitServe's worker function in a fork."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        ensure_directory()
        self._listener.close()
        inference_worker(*arguments)

    def _await_workers(self) -> None:
        """Return when a worker of each checkpoint is ready.

        Raises KeyboardInterrupt: SIGTERM or SIGINT has arrived, and may have ended workers too; StartError: all workers
        of a checkpoint failed, or took too long.
        """
        deadline, rollout = time.monotonic() + START_SECONDS, self.rollout
        for version in self.catalog.listing.serve:
            which = "no inference process" + (f" of {version.name}" if len(self.catalog.listing.serve) > 1 else "")
            while not rollout.is_ready(version):
                if self.state.is_in("leaving"):
                    raise KeyboardInterrupt
                if time.monotonic() > deadline:
                    raise StartError(f"{which} was ready within {START_SECONDS:g} s")
                if not rollout.is_alive(version):
                    raise StartError(f"{which} could start; the log says why, unless a signal ended it")
                time.sleep(START_POLL_SECONDS)

    def _listen(self) -> uvicorn.Config:
        """Listen, and return uvicorn's configuration. Raises BackendError: another process has taken the address."""
        settings = self.settings
        config = uvicorn.Config(
            self._answer,
            loop="uvloop",
            http=functools.partial(Connection, self.connections),  # type: ignore[arg-type]
            ws="none",
            lifespan="on",
            interface="asgi3",
            # uvicorn's own lines report that it runs before the port answers.
            log_level="error" if settings.log_level == "error" else "warning",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,  # uvicorn would believe X-Forwarded-For of any local peer; see --client-header
            backlog=BACKLOG,
            timeout_keep_alive=settings.idle_connection_seconds,
            timeout_graceful_shutdown=UVICORN_GRACE_SECONDS,
            ssl_certfile=settings.tls_certificate,
            ssl_keyfile=settings.tls_key,
        )
        config.load()  # here, so that a replaced process does not need the certificate file
        if config.ssl is not None and settings.tls_certificate is not None:
            load = functools.partial(self._load_certificate, config.ssl, settings.tls_certificate)
            self.http.files["certificate"] = settings.tls_certificate, load
            self.service.exposition.certificate_expires_at = certificate_expiry(settings.tls_certificate)
        for what in self.http.files:
            self.state.has_read("main", what)
        try:
            self._listener.listen(config.backlog)  # uvloop would not notice a failure
        except OSError as error:
            raise BackendError(_cannot_listen(settings.host, self._listener.getsockname(), error)) from None
        return config

    def _fork(self, config: uvicorn.Config, id: int) -> BaseProcess:
        """Start an HTTP process."""
        self._http_id = id
        self.state.inherit_reads(self.state.http_names[id])
        target, fork = HttpServer(config, self.state).run, multiprocessing.get_context("fork")
        process = fork.Process(target=target, args=([self._listener],), name=self.state.http_names[id])
        with blocked(signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # until http/process.py installs handlers
            process.start()
        return process

    async def _answer(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Any]) -> None:
        """The ASGI application of an HTTP process: its lifespan, and its requests."""
        if scope["type"] != "lifespan":
            await self.http(scope, receive, send)
            return
        await receive()  # lifespan.startup
        become(self.state.http_names[self._http_id], self.state.main_pid)
        async with running(self.http, self._http_id, self.connections):
            return_large_blocks()
            sys.setswitchinterval(SWITCH_SECONDS)
            await send({"type": "lifespan.startup.complete"})
            await receive()  # lifespan.shutdown
        await send({"type": "lifespan.shutdown.complete"})

    def _http_process_died(self, id: int) -> None:
        self.state.http_process_died(id)
        forget_process(self.state.http_names[id])

    # -- while serving --

    def _roll_out(self) -> None:
        if not self._reading.is_alive() and self.rollout.check():
            self.service.serve(self.catalog.listing, self.catalog.checkpoints)

    def _reload(self) -> None:
        """Read the checkpoints and the other files again, here and in each HTTP process, after SIGHUP."""
        names = ["checkpoints", *(NAMES[what] for what in self.http.files)]
        logger.info("SIGHUP: reading %s again", " and ".join(names))
        self._reading = threading.Thread(target=self.catalog.refresh, args=(self.state,), daemon=True)
        self._reading.start()
        if self.http.files:
            self.http.reload()
            for process in self.supervisor.processes(self.state.http_names):
                if process.is_alive():
                    os.kill(process.pid, signal.SIGHUP)  # type: ignore[arg-type]  # it was started

    def _load_certificate(self, used: ssl.SSLContext, certificate: Path) -> None:
        """Use the certificate of the file for new connections.

        Raises ValueError: the certificate or its key is invalid or cannot be read; nothing has changed.
        """
        try:
            with tempfile.NamedTemporaryFile() as copy:  # the files may change in between
                for path in filter(None, (certificate, self.settings.tls_key)):
                    copy.write(path.read_bytes() + b"\n")
                copy.flush()
                for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), used):  # the first only tries the files
                    context.load_cert_chain(copy.name, password=refuse_password)
                self.service.exposition.certificate_expires_at = certificate_expiry(Path(copy.name))
        except (OSError, ValueError) as error:  # ssl.SSLError included
            raise ValueError(f"{certificate}: {error}") from None

    def _stop(self) -> None:
        """Become unready, refuse new requests, finish running requests, then end the HTTP processes and the workers."""
        delay, drain = self.settings.shutdown_delay_seconds, self.settings.drain_seconds
        logger.info("shutting down, running requests: %d", self.state.num_busy)
        try:
            if delay and self.state.is_in("leaving"):  # False if processes keep dying
                logger.info("not ready any more; new requests are accepted for %g s", delay)
                self._keep_serving(delay, lambda: True)
            self.state.enter("draining")
            self._keep_serving(drain, lambda: self.state.num_busy > 0)
        except TooManyDeathsError as error:
            logger.error("not waiting for running requests: %s", error)
        if self.state.num_busy:
            when = "at the second signal" if self.must_hurry else f"within {drain:g} s"
            logger.warning("requests not finished %s: %d", when, self.state.num_busy)
        self.state.enter("stopping")
        end_all(self.supervisor.processes(self.state.http_names), 10)  # these abort the remaining requests
        end_all(self.supervisor.processes(self.state.worker_names), 5)

    def _keep_serving(self, seconds: float, is_needed: Callable[[], bool]) -> None:
        """Serve during a shutdown, until a second signal. Raises TooManyDeathsError: processes keep dying."""
        deadline = time.monotonic() + seconds
        while is_needed() and time.monotonic() < deadline and not self.must_hurry:
            self.supervisor.check()
            self._roll_out()  # finish a rollout that has begun
            time.sleep(0.02)


def ensure_directory() -> None:
    """Leave a deleted working directory, because torch and multiprocessing need an existing one."""
    try:
        os.getcwd()
    except FileNotFoundError:
        os.chdir("/")


def end_all(processes: list[BaseProcess], seconds: float) -> None:
    """Send SIGTERM to all at once, and SIGKILL to processes that do not end. LitServe would end them one by one."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            logger.warning("%s (process %d) did not end: killing it", process.name, process.pid)
            process.kill()
            process.join()


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address, or to a name's first IPv4 address, or else its first address.

    Raises BackendError: the name has no address, or the address cannot be bound.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # ValueError: no name at all
        reason = error.strerror if isinstance(error, OSError) else error
        raise BackendError(f"--host {host}: neither an IP address nor a name that has one: {reason}") from None
    family, kind, protocol, _, address = min(found, key=lambda it: it[0] != socket.AF_INET)
    try:
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        if host == "::":  # a kernel without IPv6
            return bind("0.0.0.0", port)
        raise BackendError(_cannot_listen(host, address, error)) from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        if host == "::":
            listener.setsockopt(
                socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0
            )  # net.ipv6.bindv6only may have another default
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise BackendError(_cannot_listen(host, address, error)) from None
    # Never blocking, because all processes share this flag: one that starts would stop another in accept().
    listener.setblocking(False)
    return listener


def certificate_expiry(path: Path) -> float:
    """Return the expiry of the first certificate in a PEM file, in Unix time. TLS presents the first one."""
    decoded = ssl._ssl._test_decode_cert(str(path))  # type: ignore[attr-defined]  # nothing public decodes a file
    return ssl.cert_time_to_seconds(decoded["notAfter"])


def _cannot_listen(host: str, address: tuple[Any, ...], error: OSError) -> str:
    shown = host if host == address[0] else f"{host} ({address[0]})"
    remedy = f"; choose another port: --port {address[1] ^ 1}" if error.errno == errno.EADDRINUSE else ""
    return f"cannot listen on {shown}, port {address[1]}: {error.strerror}{remedy}"


def url_of(settings: Settings) -> str:
    """Return the URL to show people. It names this machine if the service listens on every address."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    scheme = "http" if settings.tls_certificate is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.port}{settings.root_path}"


def build_server(settings: Settings, *, middlewares: list[Any] | None = None) -> Server:
    """Build the server for the settings' checkpoints. Middlewares, as LitServer takes them, run before the handlers.

    Raises CheckpointError: a folder is not a valid checkpoint, or these settings cannot serve it; BackendError: the
    backend, dtype or devices cannot run here, no slot fits, or the disk is full; OpenFilesError: this process may not
    open enough files; RuntimeError: PROMETHEUS_MULTIPROC_DIR is not set (`service.__main__.serve` sets it).
    """
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        raise RuntimeError(
            "PROMETHEUS_MULTIPROC_DIR must name an empty folder before service.server is imported; "
            "service.__main__.serve(settings, …) does that"
        )
    configure_logging(settings.log_level, settings.log_format)
    folder = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
    catalog = Catalog(settings.places, settings.model_name, folder, settings.unknown_characters == "replace")
    catalog.open()
    return Server(settings, catalog, middlewares)
