"""Connections and their limits, without a server."""

import asyncio

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from service.http.api.errors import RefusedRequest
from service.http.connection.limits import ConnectionLimits
from service.http.connection.protocol import MAX_UNPARSED_BYTES, Connection
from service.settings import Settings

pytestmark = pytest.mark.anyio
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


def test_an_address_has_as_many_connections_as_it_may():
    limits = ConnectionLimits(Settings(max_connections=20, max_connections_per_address=2))
    first, _ = limits.admit("10.0.0.1"), limits.admit("10.0.0.1")
    with pytest.raises(RefusedRequest):
        limits.admit("10.0.0.1")
    limits.admit("10.0.0.2")
    limits.leave(first)
    limits.admit("10.0.0.1")
    assert limits.num_open == 3


class Transport:
    def __init__(self):
        self.is_reading, self.written = True, b""

    def get_extra_info(self, name):
        return ("10.0.0.1", 1) if name == "peername" else None

    def is_closing(self):
        return False

    def pause_reading(self):
        self.is_reading = False

    def resume_reading(self):
        self.is_reading = True

    def write(self, data):
        self.written += data


class Application:
    """Answers when it is told."""

    def __init__(self):
        self.requests = []

    def begin(self, request):
        request.is_running = True
        self.requests.append(request)

    def receive(self, request):
        assert request is self.requests[-1]


async def turn():
    for _ in range(3):
        await asyncio.sleep(0)


async def test_reading_pauses_while_too_much_waits_behind_an_answer():
    app, transport = Application(), Transport()
    connection = Connection(ConnectionLimits(Settings()), app, Config(app=None), ServerState())
    connection.connection_made(transport)
    count = MAX_UNPARSED_BYTES // len(GET) + 10
    connection.data_received(GET * count)
    await turn()
    assert len(app.requests) == 1 and not transport.is_reading
    for number in range(1, 21):
        connection.respond(200, b"", b"")
        await turn()
        assert len(app.requests) == number + 1
    assert transport.is_reading and transport.written.count(b" 200 OK\r\n") == 20
    connection.connection_lost(None)
