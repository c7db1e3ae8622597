"""The client of the engine, over real sockets, beside a worker that the test plays."""

import asyncio
import time

from helpers import run_with_sockets
from prometheus_client import CollectorRegistry

from service.http.client import EngineClient
from service.model.params import SamplingParams
from service.model.tokenizer import CharTokenizer
from service.observe.metrics import Metrics
from service.sockets import SocketTransport
from service.wire import Submit


def test_timeout_counts_from_the_request_arrival_in_every_stage():
    """Infill scores what it sampled: the second stage gets what the first one left of the request's time limit."""
    transport = SocketTransport(1)

    async def main():
        worker, received = transport.listen(0), []

        async def until(condition):
            async with asyncio.timeout(30):
                while not condition():
                    received.extend(message for _, message in worker.receive(block=False))
                    await asyncio.sleep(0)

        client = EngineClient(transport, 0, Metrics("m", CollectorRegistry(), "http-0"), CharTokenizer("ab"))
        pumping = asyncio.create_task(until(lambda: client.is_ready))
        async with client.connected():
            await pumping
            for seconds_ago in (10, 40):
                arrived_at = time.monotonic() - seconds_ago
                generation = client.start([Submit(0, [0], 1, SamplingParams(), 100.0)], arrived_at)
                await until(lambda: received)
                assert received.pop().timeout_seconds <= 100 - seconds_ago
                assert (generation.timeout_seconds, generation.deadline) == (100, arrived_at + 100)
                generation.abort()
                await until(lambda: received)  # the abort
                received.clear()

    run_with_sockets(main)
    transport.remove()
