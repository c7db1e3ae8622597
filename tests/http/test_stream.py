"""Answers are encoded in parts; together these are the JSON of the answer encoded at once."""

import asyncio
import itertools
import math
import random
import time
from types import SimpleNamespace

import msgspec
import pytest

from service.http import stream
from service.http.generation import Piece
from service.http.request import Request
from service.http.schemas import Receipt, Timing
from service.http.stream import CompletionForm, NativeForm, pieces_of, send_json
from service.model.tokenizer import CharTokenizer
from tests.helpers import logprobs_of

RECEIPT = Receipt("hash", "native", "float32", [1], Timing(0.0, 0.0, 0.0, None), 0, 0)
CHARACTERS = list('ab"\\\n\0éж漢🙂')


def form(kind):
    request = Request("POST", "/generate", b"", [], "", 0.0)
    request.id = "id"
    model = SimpleNamespace(name="m", tokenizer=CharTokenizer(CHARACTERS))
    form = kind(request, model, None, [1], include_usage=True, continuous_usage=False)
    form.created = 0
    return form


def random_piece(r, number, length, k, is_echo):
    text = "".join(r.choices(CHARACTERS, k=length))
    if k is None:
        return Piece(number, 7, text, "length")
    num_unscored = int(is_echo and length > 0)
    count = length - num_unscored
    values = [-r.expovariate(1) for _ in range(count)]
    top_ids = [id for _ in range(count) for id in r.sample(range(len(CHARACTERS)), k)]
    logprobs = logprobs_of(values, top_ids, [-r.expovariate(1) for _ in range(count * k)])
    return Piece(number, 7, text, "stop", logprobs, num_unscored)


@pytest.mark.parametrize("kind", [NativeForm, CompletionForm])
def test_an_answer_in_parts_equals_the_answer_encoded_at_once(monkeypatch, kind):
    monkeypatch.setattr(kind, "timing", None)
    r = random.Random(0)
    for k, length, is_echo in itertools.product((None, 0, 1, 5), (0, 1, 2, 100), (False, True)):
        pieces = [random_piece(r, i, length, k, is_echo) for i in range(3)]
        monkeypatch.setattr(stream, "MAX_NUMBERS", 1 << 30)
        monkeypatch.setattr(stream, "MAX_CHARACTERS", 1 << 30)
        whole = form(kind).whole(pieces, RECEIPT)
        monkeypatch.setattr(stream, "MAX_NUMBERS", 7)
        monkeypatch.setattr(stream, "MAX_CHARACTERS", 3)
        parts = form(kind).whole(pieces, RECEIPT)
        parts = [parts] if isinstance(parts, bytes) else list(parts)
        assert b"".join(parts) == whole
        assert length < 100 or len(parts) > 50
        assert len(parts) == 1 or max(map(len, parts)) < 400
        msgspec.json.decode(whole)


def test_a_piece_is_cut_into_pieces_with_their_log_probabilities():
    r = random.Random(1)
    piece = random_piece(r, 0, 1500, 1, is_echo=True)
    parts = list(pieces_of(piece))
    assert [len(part.text) for part in parts] == [512, 512, 476]
    assert [part.finish_reason for part in parts] == [None, None, "stop"]
    assert [part.num_unscored for part in parts] == [1, 0, 0]
    rows = [row for part in parts for row in part.logprobs.rows()]
    assert rows == list(piece.logprobs.rows())
    assert len(rows) == 1499
    assert all(len(part.logprobs) == len(part.text) - part.num_unscored for part in parts)


class Sent:
    """What of a Request writes an answer."""

    is_gone = is_whole = is_finished = False

    def __init__(self):
        self.bodies = []

    def respond(self, body, headers):
        self.bodies.append(body)
        self.is_whole = self.is_finished = True

    def begin(self, headers):
        assert not self.bodies

    async def write(self, data):
        assert not self.is_finished
        self.bodies.append(data)

    def finish(self, data):
        self.bodies.append(data)
        self.is_finished = True


@pytest.mark.parametrize("size", [0, 100, 1 << 17, 1 << 20])
def test_small_answers_have_their_length_and_large_ones_go_out_in_chunks_with_pauses(size):
    async def main():
        sent, turns = Sent(), 0

        async def count():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())

        def parts():
            for i in range(math.ceil(size / 1000)):
                if i % 50 == 0:
                    time.sleep(0.005)
                yield b"x" * 1000

        await send_json(sent, parts())
        counting.cancel()
        bodies = sent.bodies
        assert sum(map(len, bodies)) == math.ceil(size / 1000) * 1000
        assert sent.is_finished
        is_chunked = size > 1 << 18
        assert sent.is_whole != is_chunked
        assert (len(bodies) > 1) == is_chunked
        assert max(map(len, bodies)) < 2 * (1 << 18)
        assert turns >= size // 50_000 - 1

    asyncio.run(main())


def test_an_answer_ends_when_its_client_is_gone():
    async def main():
        encoded = []

        def parts():
            for i in range(1000):
                encoded.append(i)
                yield b"x" * 10_000

        class Leaving(Sent):
            @property
            def is_gone(self):
                return len(encoded) > 50

        await send_json(Leaving(), parts())
        assert len(encoded) < 70

    asyncio.run(main())
