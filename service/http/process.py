"""The background tasks of an HTTP process: connection to the workers, heartbeats, and periodic work."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from service.catalog import Listing
from service.http.app import App
from service.http.connection.limits import ConnectionLimits
from service.http.routes.service import Service
from service.http.workers.client import EngineClient
from service.model.checkpoint import CheckpointError
from service.observe.logs import AccessLog
from service.observe.metrics import Metrics, current_folder

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.25  # between two heartbeats
COLLECT_SECONDS = 10.0  # between two searches for garbage while there is no request
TICK_SECONDS = 0.05  # between two runs of the periodic work, and two writes of metrics


@asynccontextmanager
async def running(app: App, process_id: int, connections: ConnectionLimits) -> AsyncIterator[None]:
    service, loop = app.service, asyncio.get_running_loop()
    process = app.process = f"http-{process_id}"
    service.random.seed()  # with the kernel's entropy: this process was forked
    metrics = Metrics(service.settings.model_name, CollectorRegistry(), process)
    client = EngineClient(
        current_folder(), process_id, metrics, service.state,
        hang_seconds=service.settings.hang_seconds,
        capacity=service.slots + service.settings.max_queued_requests,
        patience=min(service.settings.max_queue_seconds, service.settings.request_timeout_seconds),
    )  # fmt: skip

    service.connect(client, metrics)
    metrics.http_requests_in_progress.source = lambda: app.num_requests
    metrics.http_connections.source = lambda: connections.num_open
    metrics.http_max_connections.set(connections.limit)
    metrics.held_bytes.source = lambda: service.ledger.held
    metrics.max_held_bytes.set(service.ledger.max_bytes)
    service.state.follow(process, service.listing.generation)
    app.access_log = AccessLog()
    loop.add_signal_handler(signal.SIGHUP, app.reload)
    # Blocked while this process was forked. uvicorn has handlers for the other signals by now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
    if service.settings.otlp_traces_endpoint is not None:
        from service.http.tracing import Tracer  # loads OpenTelemetry

        app.tracer = Tracer(service.settings.otlp_traces_endpoint, service.settings.model_name, process)

    # Requests leave no cycles (tests/http/test_counted.py), so a search finds only objects in use: 10,000 young ones in
    # a millisecond, those of 64 requests that score 10,000 texts each in 0.2 s. Every request waits for it.
    gc.set_threshold(10_000, 1_000_000)

    async def tick() -> None:
        collect_at = 0.0
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            if not app.num_requests and now >= collect_at:
                gc.collect()
                collect_at = now + COLLECT_SECONDS
            try:
                client.sweep(now)
            except Exception:  # the next run follows
                logger.exception("periodic work failed")
            metrics.flush()

    tasks = [asyncio.create_task(beat(service, process)), asyncio.create_task(tick())]
    async with client.connected(service.listing):
        if service.state.generation.value != service.listing.generation:  # the listing is that of the parent process
            await follow(service, process)
        show(service, process)  # at once, because the next heartbeat may be BEAT_SECONDS away
        yield
    for task in tasks:
        task.cancel()
    metrics.flush()
    if app.tracer is not None:
        await asyncio.to_thread(app.tracer.shutdown)


def show(service: Service, process: str) -> None:
    """Send the main process a heartbeat, and report whether this process is connected to a worker."""
    service.state.beat(process)
    if service.is_ready:
        service.state.answering[process] = True


async def beat(service: Service, process: str) -> None:
    async with asyncio.TaskGroup() as tasks:
        following: asyncio.Task[None] | None = None  # runs longer for large checkpoints
        while True:
            show(service, process)
            is_old = service.state.generation.value != service.listing.generation
            if is_old and (following is None or following.done()):
                following = tasks.create_task(follow(service, process))
            await asyncio.sleep(BEAT_SECONDS)


async def follow(service: Service, process: str) -> None:
    """Serve the models of the main process's current listing, once this process is connected to their workers."""
    folder = current_folder()
    known = {model.id for model in service.models.values()}
    try:
        listing = Listing.read(folder)
        new = [version for version in listing.serve if version.id not in known]
        checkpoints = {version.id: await asyncio.to_thread(version.read, folder) for version in new}
    except (OSError, CheckpointError) as error:  # tried again at the next heartbeat
        logger.error("the new list of checkpoints cannot be followed: %s", error)
        return
    service.client.connect(listing)
    if not await service.client.have_workers(checkpoints):  # tried again too: one may just be replaced
        return
    service.serve(listing, checkpoints)
    service.state.follow(process, listing.generation)
