"""The HTTP process: routes, streaming, probes; and the LitServe server around it.

A request is read, bounded, validated and encoded here, goes to a worker once, and comes back once as deltas.
`build_server(settings)` is what `python -m service` runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import secrets
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.managers import SyncManager
from typing import Any

from fastapi import FastAPI, Request
from litserve import LitServer
from litserve.specs.base import LitSpec
from litserve.utils import WorkerSetupStatus
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from service.client import EngineClient
from service.edge import Edge, error_response
from service.metrics import Metrics, exposition, forget_process
from service.model.checkpoint import Checkpoint
from service.model.tokenizer import UnknownCharacterError
from service.protocol import (
    Answer,
    ApiError,
    CompletionAnswer,
    CompletionRequest,
    GenerateRequest,
    GenerationRequest,
    Usage,
    parse,
)
from service.settings import Settings
from service.transport import Refused, SocketTransport, Submit, die_with_parent
from service.worker import EngineAPI, EngineLoop, configure_logging

logger = logging.getLogger(__name__)


class WorkerStartError(Exception):
    """Every inference process failed before it was ready."""


class HttpState:
    """What the main process and the HTTP processes share: plain memory, made before the fork."""

    def __init__(self, num_processes: int):
        self._draining = multiprocessing.RawValue("b", 0)
        self._busy = multiprocessing.RawArray("l", num_processes)  # generation requests in each process

    @property
    def is_draining(self) -> bool:
        return bool(self._draining.value)

    def start_draining(self) -> None:
        self._draining.value = 1

    @property
    def num_busy(self) -> int:
        return sum(self._busy)

    @contextlib.contextmanager
    def busy(self, process: int) -> Iterator[None]:
        self._busy[process] += 1
        try:
            yield
        finally:
            self._busy[process] -= 1


@dataclass
class SequenceRecord:
    """What the HTTP process knows of one sequence of a request."""

    num_prompt_tokens: int
    num_completion_tokens: int = 0
    last_at: float | None = None  # when the latest character was written


class Run:
    """The sequences of one request, from the first frame to the last, with their metrics.

    Iterating gives what has gathered: a list of (sequence number, text, finish reason or None).

    Raises while iterating:
        ApiError: a sequence was refused, timed out or failed; the others are aborted.
    """

    def __init__(self, spec: CompletionSpec, submits: list[Submit], num_prompt_tokens: list[int], arrived_at: float):
        assert spec.client is not None and spec.metrics is not None
        self._decode = spec.checkpoint.tokenizer.decode
        self._client, self._metrics = spec.client, spec.metrics
        self._arrived_at = arrived_at
        self._records = [SequenceRecord(n) for n in num_prompt_tokens]
        generation = self._client.submit(submits)
        if generation is None:
            raise ApiError(503, "no inference process is ready", code="not_ready", retry_after_seconds=1)
        self._generation = generation

    def abort(self) -> None:
        """End whatever still runs; the client has left."""
        self._client.abort(self._generation)

    @property
    def usage(self) -> Usage:
        return Usage(
            sum(record.num_prompt_tokens for record in self._records),
            sum(record.num_completion_tokens for record in self._records),
        )

    async def __aiter__(self) -> AsyncIterator[list[tuple[int, str, str | None]]]:
        failure: ApiError | None = None
        while not self._generation.is_finished:
            ids: dict[int, list[int]] = {}
            ends: dict[int, str] = {}
            try:
                arrived = await self._generation.take()
            except asyncio.CancelledError:  # uvicorn's, when the time to drain is over
                failure = ApiError(503, "the server has shut down", code="shutting_down")
                break
            for number, delta in arrived:
                record = self._records[number]
                if isinstance(delta, Refused):
                    failure = failure or ApiError(
                        429, delta.message, code="queue_full", retry_after_seconds=delta.retry_after_seconds
                    )
                    self._metrics.request_rejected("queue_full")
                    continue
                if delta.queue_seconds is not None and delta.prefill_seconds is not None:
                    self._metrics.request_queue_time.observe(delta.queue_seconds)
                    self._metrics.request_prefill_time.observe(delta.prefill_seconds)
                    self._metrics.prompt_tokens.inc(record.num_prompt_tokens)
                    self._metrics.request_prompt_tokens.observe(record.num_prompt_tokens)
                ids.setdefault(number, []).extend(delta.ids)
                if delta.finish_reason is not None:
                    ends[number] = delta.finish_reason
                    failure = failure or _failure(delta.finish_reason)
            pieces = [(number, self._decode(new), ends.get(number)) for number, new in ids.items()]
            if failure is None:
                yield pieces
            else:
                self._client.abort(self._generation)
            self._observe(pieces)
        if failure is not None:
            raise failure

    def _observe(self, pieces: list[tuple[int, str, str | None]]) -> None:
        """Called when the pieces have been written."""
        now = time.monotonic()
        for number, text, finish_reason in pieces:
            record = self._records[number]
            count = len(text)
            if count:
                record.num_completion_tokens += count
                self._metrics.generation_tokens.inc(count)
                # Characters that came together share the time since the ones before.
                if record.last_at is None:
                    self._metrics.time_to_first_token.observe(now - self._arrived_at)
                    record.last_at = now
                    count -= 1
                for _ in range(count):
                    self._metrics.inter_token_latency.observe((now - record.last_at) / count)
                record.last_at = now
            if finish_reason is not None:
                self._metrics.e2e_request_latency.observe(now - self._arrived_at)
                self._metrics.request_generation_tokens.observe(record.num_completion_tokens)
                self._metrics.request_ended(finish_reason)


def _failure(finish_reason: str) -> ApiError | None:
    match finish_reason:
        case "timeout":
            return ApiError(504, "the request took longer than it may", code="timeout")
        case "error":
            return ApiError(500, "the inference process failed on this request", code="engine_error")
    return None


class GenerationResponse(Response):
    """Runs a request while it is answered; a client that leaves ends it."""

    def __init__(self, run: Run, answer: Answer, stream: bool, busy: contextlib.AbstractContextManager[None]):
        self.run, self.answer, self.stream, self.busy = run, answer, stream, busy
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.run.abort()

        watcher = asyncio.create_task(watch())
        try:
            with self.busy:
                await (self._stream(send) if self.stream else self._whole(scope, receive, send))
        finally:
            watcher.cancel()
            self.run.abort()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        texts: dict[int, list[str]] = {}
        ends: dict[int, str | None] = {}
        async for pieces in self.run:
            for number, text, finish_reason in pieces:
                texts.setdefault(number, []).append(text)
                ends[number] = finish_reason
        choices = [self.answer.choice(number, "".join(texts[number]), ends[number]) for number in sorted(texts)]
        body = self.answer.whole(choices, self.run.usage)
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        started = False

        async def write(data: bytes, more_body: bool = True) -> None:
            nonlocal started
            if not started:  # the first delta decides the status
                started = True
                headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": data, "more_body": more_body})

        try:
            async for pieces in self.run:
                data = b"".join([self.answer.event(*piece) for piece in pieces if piece[1] or piece[2]])
                if data:
                    await write(data)
        except ApiError as error:
            if not started:
                raise
            await write(b"data: %b\n\n" % error.body + Answer.DONE, more_body=False)
        else:
            await write(self.answer.last_event(self.run.usage) + Answer.DONE, more_body=False)


class CompletionSpec(LitSpec):
    """LitServe's place for an API of one's own: the routes, and what they need."""

    def __init__(self, settings: Settings, checkpoint: Checkpoint, state: HttpState):
        super().__init__()
        self.api_path = "/generate"
        self.settings = settings
        self.checkpoint = checkpoint
        self.state = state
        self.client: EngineClient | None = None  # these two from `running`, in an HTTP process
        self.metrics: Metrics | None = None
        self.devices: list[str] = []  # from build_server
        self._created = int(time.time())
        for path, endpoint, method in (
            ("/generate", self.generate, "POST"),
            ("/v1/completions", self.completions, "POST"),
            ("/v1/models", self.models, "GET"),
            ("/info", self.info, "GET"),
            ("/livez", self.livez, "GET"),
            ("/readyz", self.readyz, "GET"),
            ("/health", self.readyz, "GET"),
            ("/metrics", self.prometheus, "GET"),
        ):
            self.add_endpoint(path, endpoint, [method])

    @property
    def stream(self) -> bool:  # LitServe would compress the answers of an API that does not stream
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {"api_path": self.api_path}  # all that LitServe needs of it in the worker

    def setup(self, server: LitServer) -> None:
        """LitServe would hand over its own queues here; `running` takes the transport instead."""

    @asynccontextmanager
    async def running(self, transport: SocketTransport) -> AsyncIterator[None]:
        """The life of an HTTP process."""
        self.metrics = Metrics(self.settings.model_name, CollectorRegistry())
        self.client = EngineClient(transport, self.response_queue_id)
        task = asyncio.create_task(self.client.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def generate(self, request: Request) -> Response:
        """Continue a text: the native route."""
        return await self._run(request, GenerateRequest, Answer)

    async def completions(self, request: Request) -> Response:
        """Continue a text: OpenAI's completions."""
        return await self._run(request, CompletionRequest, CompletionAnswer)

    async def _run(self, request: Request, kind: type[GenerationRequest], form: type[Answer]) -> Response:
        arrived_at = time.monotonic()
        body = parse(kind, await request.body())
        if body.model not in (None, self.settings.model_name):
            raise ApiError(
                404,
                f"model {body.model!r} is not served here; {self.settings.model_name!r} is",
                param="model",
                code="model_not_found",
            )
        prompts = body.prompts
        if not 1 <= len(prompts) <= self.settings.max_prompts:
            raise ApiError(
                400, f"prompt: 1 to {self.settings.max_prompts} prompts are allowed, got {len(prompts)}", param="prompt"
            )
        if body.max_tokens > self.settings.max_tokens:
            raise ApiError(
                400, f"max_tokens: at most {self.settings.max_tokens}, got {body.max_tokens}", param="max_tokens"
            )
        # A stop string with a character that the model does not have can never appear.
        tokenizer = self.checkpoint.tokenizer
        stop = [tokenizer.encode(s) for s in body.stops if all(c in tokenizer for c in s)]
        seeds = [body.seed if body.seed is not None else secrets.randbits(53) for _ in prompts]
        submits = [
            Submit(
                0,
                self._encode(prompt, i if isinstance(body.prompt, list) else None),
                body.max_tokens,
                body.temperature,
                max(0, body.top_k),
                body.top_p,
                seed,
                stop,
                self.settings.request_timeout_seconds,
            )
            for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        ]
        if self.state.is_draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after_seconds=1)
        run = Run(self, submits, [len(prompt) for prompt in prompts], arrived_at)
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        answer = form(request.scope["chargpt.request_id"], self.settings.model_name, seeds, include_usage)
        return GenerationResponse(run, answer, body.stream, self.state.busy(self.response_queue_id))

    def _encode(self, prompt: str | list[int], place: int | None) -> list[int]:
        """The ids of a prompt, within all limits; `place` is its index where several were sent."""
        param = "prompt" if place is None else f"prompt.{place}"
        tokenizer = self.checkpoint.tokenizer
        if len(prompt) > self.settings.max_prompt_characters:
            raise ApiError(
                400,
                f"{param}: at most {self.settings.max_prompt_characters} characters, got {len(prompt)}",
                param="prompt",
            )
        if not prompt:
            prompt = "\n"  # the beginning of a text
            if prompt not in tokenizer:
                raise ApiError(400, f"{param}: must not be empty, as this model knows no line break", param="prompt")
        if isinstance(prompt, list):
            wrong = next((id for id in prompt if not 0 <= id < tokenizer.vocab_size), None)
            if wrong is not None:
                raise ApiError(
                    400, f"{param}: ids are 0 to {tokenizer.vocab_size - 1}, got {wrong}", param="prompt"
                )  # fmt: skip
            return prompt
        try:
            return tokenizer.encode(prompt)
        except UnknownCharacterError as error:
            raise ApiError(400, f"{param}: {error}", param="prompt", code="unknown_character") from None

    async def models(self) -> Response:
        """The served model, as OpenAI lists models."""
        entry = {"id": self.settings.model_name, "object": "model", "created": self._created, "owned_by": "chargpt"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def info(self) -> Response:
        """What is served: the checkpoint, its losses, the limits, versions and devices."""
        settings, checkpoint = self.settings, self.checkpoint
        return JSONResponse(
            {
                "model": {
                    "name": settings.model_name,
                    "checkpoint_sha256": checkpoint.digest,
                    "config": checkpoint.hyperparameters,
                    "vocabulary": "".join(checkpoint.tokenizer.characters),
                    "training": checkpoint.training,
                },
                "limits": {
                    name: getattr(settings, name)
                    for name in (
                        "max_prompts",
                        "max_prompt_characters",
                        "max_tokens",
                        "max_body_bytes",
                        "max_running_requests",
                        "max_queued_requests",
                        "request_timeout_seconds",
                    )
                },
                "devices": self.devices,
                "versions": {name: version(name) for name in ("chargpt", "torch", "litserve")},
            }
        )

    async def livez(self) -> Response:
        """200 while this process answers."""
        return JSONResponse({"status": "alive"})

    async def readyz(self) -> Response:
        """200 while requests are accepted, 503 while starting, without a worker, or shutting down."""
        if self.state.is_draining:
            status = "draining"
        elif self.client is None or not self.client.is_ready:
            status = "no worker"
        else:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": status}, status_code=503)

    async def prometheus(self) -> Response:
        """The metrics of all processes in Prometheus' text format."""
        text = await asyncio.to_thread(exposition)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


class Server(LitServer):
    """LitServe with its own routes, queues and shutdown replaced by ours; supervision and placement stay its own."""

    def __init__(self, settings: Settings, checkpoint: Checkpoint):
        self.settings = settings
        self.state = HttpState(settings.http_processes)
        self.spec = CompletionSpec(settings, checkpoint, self.state)
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
            middlewares=[(Edge, {"settings": settings, "metrics": lambda: self.spec.metrics})],
        )
        self.spec.devices = [str(device) for device in self._inference_workers_config_for_api(api.api_path)]
        self.uvicorn_graceful_timeout = 1  # we drain before uvicorn is told to stop
        self.app.title = "chargpt"
        self.app.version = version("chargpt")

        async def on_api_error(request: Request, error: Any) -> Response:
            return error_response(error)

        async def on_http_error(request: Request, error: Any) -> Response:
            return error_response(ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))

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
