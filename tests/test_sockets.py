"""The connection between HTTP processes and workers, over real sockets."""

import asyncio
import multiprocessing
import socket

from service.sockets import SocketTransport, WorkerLost


def work(transport):
    transport.listen(0)
    while True:
        transport.receive(block=True)


async def wait_for(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_worker_is_there_once_it_answers_and_until_it_goes():
    """One that is being killed takes connections as long as its socket is open; nothing may be sent to it."""
    transport, received = SocketTransport(1), []
    worker = multiprocessing.get_context("spawn").Process(target=work, args=(transport,))

    async def connect():
        with socket.socket(socket.AF_UNIX) as dying:
            dying.bind(str(transport.folder / "0.sock"))
            dying.listen()
            transport.connect(7, lambda number, frame: received.append((number, frame)))
            await asyncio.sleep(0.3)
            assert transport.connected_workers == []
        worker.start()
        await wait_for(lambda: transport.connected_workers == [0])
        assert received == []
        worker.kill()
        await wait_for(lambda: transport.connected_workers == [])
        assert received == [(0, WorkerLost())]
        await transport.disconnect()

    asyncio.run(connect())
    worker.join()
    transport.remove()
