"""Listening sockets: uvloop's own, and one for TLS that counts connections before their handshake."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import uvloop

from service.http.api.errors import RefusedRequest
from service.http.connection.limits import LINGER_SECONDS

if TYPE_CHECKING:
    from service.http.connection.protocol import Connection

logger = logging.getLogger(__name__)

# uvloop and OpenSSL keep buffers as large as the data that arrived at once. This bounds them.
RECEIVE_BYTES = 1 << 15


class TlsServer:
    """Listens for TLS connections and admits each before its handshake, which must end within the time for headers.

    It has the methods of asyncio.Server that uvicorn uses.
    """

    PAUSE_SECONDS = 0.5  # pause when the process can open no more files

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        factory: Callable[[], Connection],
        listener: socket.socket,
        context: ssl.SSLContext,
    ):
        self._loop, self._factory, self._context = loop, factory, context
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)  # accepted sockets inherit it
        self._tasks = {loop.create_task(self._accept(listener))}  # this one and the handshakes

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        """Do nothing, because uvicorn waits for connections itself."""

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, address = await self._loop.sock_accept(listener)
            except OSError as error:
                logger.warning("no connection accepted for %g s: %s", self.PAUSE_SECONDS, error.strerror)
                await asyncio.sleep(self.PAUSE_SECONDS)
                continue
            protocol = self._factory()
            try:
                protocol.admit(address[0])
            except RefusedRequest as refused:  # no handshake only for an error
                protocol.limits.count_rejection(refused.reason)
                connection.close()
                continue
            task = self._loop.create_task(self._connect(connection, protocol))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, connection: socket.socket, protocol: Connection) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._context,
                ssl_handshake_timeout=protocol.limits.settings.header_timeout_seconds,
                ssl_shutdown_timeout=LINGER_SECONDS,
            )  # fmt: skip
        except OSError:  # ssl.SSLError and TimeoutError included
            protocol.leave()
            connection.close()


class Loop(uvloop.Loop):
    """uvloop with TlsServer instead of its own TLS servers, which would count a connection after its handshake."""

    async def create_server(  # type: ignore[override]
        self, factory: Callable[[], Any], *arguments: Any, sock: socket.socket, ssl: ssl.SSLContext | None, backlog: int
    ) -> Any:
        if ssl is None:
            return await super().create_server(factory, *arguments, sock=sock, backlog=backlog)
        sock.setblocking(False)
        sock.listen(backlog)
        return TlsServer(self, factory, sock, ssl)
