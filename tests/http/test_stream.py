"""A large answer is written in parts, until its client is gone."""

import asyncio

from service.http.stream import send_json


def test_an_answer_ends_when_its_client_is_gone():
    encoded, written = [], []

    class Leaving:
        """What of a Request writes an answer."""

        is_whole = is_finished = False

        @property
        def is_gone(self):
            return len(encoded) > 50

        def begin(self, headers):
            assert not written

        async def write(self, data):
            written.append(data)

    def parts():
        for i in range(1000):
            encoded.append(i)
            yield b"x" * 10_000

    asyncio.run(send_json(Leaving(), parts()))
    assert written and len(encoded) < 70
