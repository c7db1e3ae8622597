"""Two clients on one engine whose calls take a time by a formula: how much of its speed alone each keeps."""

import itertools

import numpy as np

from service.constrain.regex import compile_regex
from service.engine.engine import Engine
from service.engine.runner import NONE, Outcome, Runner
from service.model.config import GPTConfig
from service.model.params import SamplingParams
from service.wire import Submit

CHARACTERS = "ab\n"
SLOTS = 72


class Timed(Runner):
    """Chooses characters at random; its calls move the clock by what they take of a small model on a CPU."""

    backend, dtype, follows_guides = "timed", "float64", True

    def __init__(self, slots):
        self.config = GPTConfig(vocab_size=3, block_size=64, n_layer=1, n_head=1, n_kv_head=1, n_embd=8)
        self.slots, self.now = slots, 0.0
        self._chance = np.random.default_rng(0)

    def clock(self):
        return self.now

    def start(self, slot, params, prompt, ends=(), written=(), position=0):
        self.now += 60e-6

    def copy(self, source, target, length):
        self.now += 10e-6

    def prefill(self, pieces):
        self.now += 50e-6 + 80e-6 * len(pieces)
        ids = self._chance.integers(0, 3, (len(pieces), 1)).astype(np.int32)
        ids[[not piece.choose for piece in pieces]] = NONE
        return Outcome(ids, {})

    def decode(self, slots, steps, guides=(), reports=()):
        self.now += 60e-6 * float(steps.max()) + 25e-6 * float(steps.sum())
        ids = self._chance.integers(0, 3, (len(slots), steps.max())).astype(np.int32)
        ids[np.arange(steps.max()) >= steps[:, None]] = NONE
        return Outcome(ids, {})


class Streams:
    """A client with endless streams. options: of Submit."""

    def __init__(self, name, number, weight=1.0, **options):
        self.name, self.number, self.weight, self.options = name, number, weight, options
        self.characters, self.open, self.longest = 0, {}, 0.0

    def submit(self, engine, ids):
        for _ in range(self.number - len(self.open)):
            id = next(ids)
            self.open[id] = None  # no character yet
            request = Submit(id, [0, 1], 10**6, SamplingParams(seed=id), client=self.name, **self.options)
            request.weight = self.weight
            engine.submit(request)

    def took(self, delta, now):
        self.characters += len(delta.ids)
        if delta.ids:
            last = self.open[delta.id]
            self.longest = max(self.longest, 0.0 if last is None else now - last)
            self.open[delta.id] = now


class Texts:
    """A client that keeps 100 requests of some characters in the queue."""

    longest = 0.0

    def __init__(self, name, length, weight=1.0, prompt=2, number=100):
        self.name, self.length, self.weight, self.prompt, self.number = name, length, weight, prompt, number
        self.characters, self.open = 0, set()

    def submit(self, engine, ids):
        while len(self.open) < self.number:
            id = next(ids)
            self.open.add(id)
            request = Submit(id, [id % 3] * self.prompt, self.length, SamplingParams(seed=id), client=self.name)
            request.weight, request.must_run = self.weight, True
            engine.submit(request)

    def took(self, delta, now):
        self.characters += len(delta.ids)
        if delta.finish_reason:
            self.open.remove(delta.id)


class Candidates(Texts):
    """A client that draws exact answers; a match is as rare as the pattern says."""

    def __init__(self, name, pattern, weight=1.0, characters=CHARACTERS):
        super().__init__(name, 40, weight, number=2 * SLOTS)
        self.constraint = compile_regex(pattern, characters).pack()

    def submit(self, engine, ids):
        while len(self.open) < self.number:
            id = next(ids)
            self.open.add(id)
            options = {"constraint": self.constraint, "masks": False, "must_run": True}
            sampling = SamplingParams(seed=id)
            engine.submit(Submit(id, [0, 1], 40, sampling, client=self.name, weight=self.weight, **options))

    def took(self, delta, now):
        if delta.finish_reason:
            self.characters += len(delta.ids) + delta.num_unseen - 2
            self.open.remove(delta.id)


def speeds(*clients, seconds=0.6, warm_up=0.12, engine=None, ids=None):
    """Characters per second of each client, without the first `warm_up` seconds. ids: of the sequences, which are also
    their seeds."""
    if engine is None:
        runner = Timed(SLOTS)
        engine = Engine(runner, clock=runner.clock, max_waiting=10**6)
    clock, ids, counts = engine.clock, ids or itertools.count(), None
    began = clock()
    until, counts_from = began + seconds, began + warm_up
    while clock() < until:
        for client in clients:
            client.submit(engine, ids)
        for delta in engine.step():
            next(client for client in clients if delta.id in client.open).took(delta, clock())
        if counts is None and clock() > counts_from:
            counts, began = [client.characters for client in clients], clock()
            for client in clients:
                client.longest = 0.0
    seconds = clock() - began
    for id in engine.ids:
        engine.abort(id)
    engine.step()
    return [(client.characters - count) / seconds for client, count in zip(clients, counts, strict=True)]
