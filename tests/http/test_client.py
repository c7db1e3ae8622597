"""The client of the engine, over real sockets, beside a worker that the test plays."""

import asyncio
import contextlib
import time
from array import array
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from service.catalog import Listing, Version
from service.constrain.regex import compile_regex
from service.http.connection.errors import ApiError
from service.http.models.model import Model
from service.http.models.patterns import PatternThread
from service.http.routes.request import Request
from service.http.workers.client import MAX_RUNS, EngineClient
from service.model.checkpoint import Checkpoint
from service.model.config import GPTConfig
from service.model.params import SamplingParams
from service.model.tokenizer import CharTokenizer
from service.observe.metrics import Metrics
from service.shared import REASONS, SharedState
from service.sockets import ConsumerLost, WorkerSide
from service.text.exact import Bounds, Exact, candidate_seed
from service.wire import Abort, Delta, Refused, Step, Submit, Submits, Tried
from tests.helpers import logprobs_of
from tests.toolbox.http import PATIENCE

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore::ResourceWarning")]
VERSION = Version(1, 0, "m", "", "", 0)
LISTING = Listing(0, [VERSION], [VERSION], {"m": 0})
CONFIG = GPTConfig(vocab_size=2, block_size=4, n_layer=2, n_head=1, n_kv_head=1, n_embd=8)


class Peer:
    """A worker that the test plays, and the client connected to it."""

    def __init__(self, worker):
        self.worker, self.received = worker, []  # sequences, also of a message of several, and aborts
        self.messages = []  # that have sequences
        self.registry = CollectorRegistry()
        self.state = SharedState()
        self.state.beat("worker-0")

    async def until(self, condition):
        async with asyncio.timeout(PATIENCE):
            while not condition():
                for _, message in self.worker.receive(block=False):
                    if isinstance(message, Submits):
                        self.messages.append(message)
                        self.received += message.each()
                    elif message != ConsumerLost():
                        self.received.append(message)
                await asyncio.sleep(0)

    async def lose_worker(self):
        """A new one answers at the same place."""
        with self.no_worker():
            await self.until(lambda: not self.client.is_ready)
        await self.until(lambda: self.client.is_ready)

    @contextlib.contextmanager
    def no_worker(self):
        """The worker is lost, and can be found again at the end."""
        path = Path(self.worker._listener.getsockname())
        hidden = path.rename(path.with_suffix(".hidden"))
        for connection in list(self.worker._connections.values()):
            self.worker._drop(connection)
        yield
        hidden.rename(path)

    def counts(self):
        columns = ("submitted", "refused", "begun", *REASONS)
        return {column: count for column in columns if (count := self.state.num_sequences(0, column))}

    def send(self, *deltas):
        self.worker.send(Step.of(deltas), 0)


@pytest.fixture
async def peer(sockets):
    peer = Peer(WorkerSide(sockets, 0, VERSION.id))
    metrics = Metrics("m", peer.registry, "http-0")
    peer.client = EngineClient(sockets, 0, metrics, peer.state)
    checkpoint = Checkpoint(Path(), CONFIG, CharTokenizer("ab"), {}, "")
    peer.model = Model(VERSION, checkpoint, 0, PatternThread())
    peer.model.metrics = metrics.of("m")
    peer.client.served = {VERSION.id}

    async def tick():
        while True:
            await asyncio.sleep(0.05)
            peer.client.sweep(time.monotonic())

    pumping, ticking = asyncio.create_task(peer.until(lambda: peer.client.is_ready)), asyncio.create_task(tick())
    async with peer.client.connected(LISTING):
        await pumping
        yield peer
        metrics.flush()
    ticking.cancel()
    vars(peer).clear()


def submit(prompt, max_tokens=9, sampling=None, **options):
    return Submit(0, prompt, max_tokens, sampling or SamplingParams(), 100.0, **options)


async def test_timeout_counts_from_the_request_arrival_in_every_stage(peer):
    """Infill scores what it sampled: the second stage gets what the first one left of the request's time limit."""
    for seconds_ago in (10, 40):
        arrived_at = time.monotonic() - seconds_ago
        generation = peer.client.start(peer.model, [submit([0])], arrived_at)
        await peer.until(lambda: peer.received)
        assert peer.received.pop().timeout_seconds <= 100 - seconds_ago
        assert (generation.timeout_seconds, generation.deadline) == (100, arrived_at + 100)
        generation.abort()
        await peer.until(lambda: peer.received)  # the abort
        peer.received.clear()


async def test_a_prompt_that_may_have_run_counts_where_its_client_leaves(peer):
    """Whoever left in time would otherwise be charged nothing for prompts that ran."""
    generation = peer.client.start(peer.model, [submit([0, 1, 1]), submit([0, 1])], time.monotonic())
    await peer.until(lambda: len(peer.received) == 2)
    peer.send(Delta(peer.received[1].id, [1], scheduled_at=1.0, prefilled_at=2.0))  # it has, and counts anyway
    await peer.until(lambda: generation.sequences[1].is_begun)
    generation.abort()
    assert [sequence.num_unseen for sequence in generation.sequences] == [3, 0]
    request = Request("id", {"method": "POST", "path": "/generate", "query_string": b""}, {})
    request.generations = [generation]
    assert request.num_run_characters == 3 + 2 + 1  # the second one's prompt, and its character


def exact_answers(prompts=1, answers=2, limits=(10, 50), **options):
    """Candidates of two characters."""
    model = SimpleNamespace(tokenizer=CharTokenizer("ab"), record_end_character=None)
    constraint = compile_regex("[ab]{2}", "ab").pack()
    submits = [submit([0], 2, SamplingParams(seed=i), constraint=constraint, **options) for i in range(prompts)]
    return Exact(model, submits, Bounds(answers, *limits))


def start_exact(peer, exact, **options):
    return peer.client.start(peer.model, exact.templates, time.monotonic(), exact=exact, window=4, **options)


BEGUN = {"scheduled_at": 1.0, "prefilled_at": 2.0}


def match(id, **options):
    return Delta(id, [0, 1], "stop", **BEGUN, ended_at=3.0, tried=Tried(True, 2, 2, 0), num_unseen=1, **options)


def mismatch(id):
    return Delta(id, [], "stop", **BEGUN, ended_at=3.0, tried=Tried(False, 1, 0, 2), num_unseen=2)


async def received(peer, count):
    """The ids of that many candidates, in order."""

    def ids():
        return [it.id for it in peer.received if isinstance(it, Submit)]

    await peer.until(lambda: len(ids()) >= count)
    assert len(ids()) == count
    return ids()


async def test_candidates_are_sent_until_there_are_all_answers(peer):
    exact = exact_answers()
    generation = start_exact(peer, exact)
    first, second = await received(peer, 2)
    assert [it.sampling.seed for it in peer.received] == [0, candidate_seed(0, 1)]
    assert not any(it.must_run or it.masks for it in peer.received)
    peer.send(mismatch(second), match(first))
    _, _, third, fourth = await received(peer, 4)  # in one message, as one of two matched
    assert len(peer.messages) == 2 and peer.received[2].must_run and peer.received[3].must_run
    peer.send(match(third))
    whole = asyncio.create_task(generation.whole())
    await peer.until(lambda: Abort(fourth) in peer.received)  # it is needless
    assert not whole.done()
    peer.send(Delta(fourth, [], "abort", num_unseen=7))
    await peer.until(whole.done)
    assert [(it.number, it.text, it.seed) for it in whole.result()] == [
        (0, "ab", 0), (1, "ab", candidate_seed(0, 2)),
    ]  # fmt: skip
    assert exact.cost == (3, 2, 5) and generation.num_run_characters == 3 + 2 + 3 + 7
    assert peer.counts() == {"submitted": 1, "begun": 1, "stop": 1}


@pytest.mark.parametrize("is_lost", [False, True])
async def test_candidates_that_are_aborted_count_what_their_worker_reports(peer, is_lost):
    generation = start_exact(peer, exact_answers(prompts=2, answers=1, limits=(1, 50)))
    first, second = await received(peer, 2)
    peer.send(mismatch(first))
    failing = asyncio.create_task(generation.whole())
    await peer.until(lambda: Abort(second) in peer.received)
    assert not failing.done()
    if is_lost:
        with peer.no_worker():
            await peer.until(failing.done)
    else:
        peer.send(Delta(second, [], "abort", num_unseen=5))
        await peer.until(failing.done)
    with pytest.raises(ApiError, match="prompt 0: 0 of 1 candidate matched"):
        failing.result()
    assert generation.num_run_characters == 2 + (0 if is_lost else 5)
    await peer.until(lambda: peer.counts() == {"submitted": 2, "begun": 2, "stop": 1, "abort": 1})


async def test_a_beginning_that_is_set_is_charged_once(peer):
    """It runs as a part of the prompt, and is a part of the answer."""
    model = SimpleNamespace(tokenizer=CharTokenizer("ab"), record_end_character=None)
    constraint = compile_regex("bbb[ab]{2}", "ab").pack()
    exact = Exact(model, [submit([0], 5, SamplingParams(), constraint=constraint)], Bounds(1, 10, 50))
    generation = start_exact(peer, exact)
    (id,) = await received(peer, 1)
    assert peer.received[0].prompt == [0, 1, 1, 1] and peer.received[0].max_tokens == 2
    peer.send(Delta(id, [0, 1], "stop", **BEGUN, ended_at=3.0, tried=Tried(True, 2, 2, 0), num_unseen=4))
    whole = asyncio.create_task(generation.whole())
    await peer.until(whole.done)
    assert [it.text for it in whole.result()] == ["bbbab"] and generation.num_run_characters == 1 + 5
    assert len(exact.templates[0].prompt) == 1


async def test_candidates_are_refused_together(peer):
    generation = start_exact(peer, exact_answers(prompts=2))
    ids = await received(peer, 4)
    peer.worker.send(Refused(ids[0], "full", 1), 0)
    with pytest.raises(ApiError, match="full"):
        failing = asyncio.create_task(generation.whole())
        await peer.until(failing.done)
        failing.result()
    assert peer.counts() == {"submitted": 2, "refused": 2} and not peer.client._running


@pytest.mark.parametrize("counts", [[4], [1], [4, 2, 1], [1, 1]])
async def test_the_time_per_character_is_that_after_the_first_ones(peer, counts):
    """Each sequence decodes for 6 s from its first character to its last."""
    generation = peer.client.start(peer.model, [submit([0]) for _ in counts], time.monotonic())
    await peer.until(lambda: len(peer.received) == len(counts))
    times = {"scheduled_at": time.monotonic(), "prefilled_at": 10.0, "ended_at": 16.0}
    peer.send(*(Delta(it.id, [1] * n, "length", **times) for it, n in zip(peer.received, counts, strict=True)))
    await generation.whole()
    later = sum(counts) - len(counts)
    assert generation.timing["decode_seconds"] == 6.0
    assert generation.timing["seconds_per_character"] == (pytest.approx(6.0 * len(counts) / later) if later else None)


async def test_idle_workers_take_turns_and_come_before_busy_ones(sockets):
    """One of them once got all requests that came one after the other."""
    workers, received = [WorkerSide(sockets, number, VERSION.id) for number in range(2)], [0, 0]
    state = SharedState(workers=2)
    for name in ("worker-0", "worker-1"):
        state.beat(name)
    metrics = Metrics("m", CollectorRegistry(), "http-0")
    client = EngineClient(sockets, 0, metrics, state)
    checkpoint = Checkpoint(Path(), CONFIG, CharTokenizer("ab"), {}, "")
    model = Model(VERSION, checkpoint, 0, PatternThread())
    model.metrics = metrics.of("m")

    async def until(condition):
        while not condition():
            for number, worker in enumerate(workers):
                received[number] += sum(isinstance(it, Submits) for _, it in worker.receive(block=False))
            await asyncio.sleep(0)

    async with client.connected(LISTING):
        await until(lambda: client._sockets.connected == {VERSION.id: [0, 1]})

        async def started():
            """A sequence, and the number of its worker."""
            before = received.copy()
            generation = client.start(model, [submit([0])], time.monotonic())
            await until(lambda: received != before)
            return generation, received[1] - before[1]

        numbers = []
        for _ in range(6):
            generation, number = await started()
            generation.abort()
            numbers.append(number)
        assert numbers in ([0, 1] * 3, [1, 0] * 3)
        _, busy = await started()
        for _ in range(3):
            generation, number = await started()
            assert number != busy
            generation.abort()
        metrics.flush()


async def test_sequences_go_to_workers_of_their_own_checkpoint(sockets):
    """One whose worker is lost does not go to the idle worker of another checkpoint: it waits for its replacement."""
    versions = [Version(number, number, "ab"[number], "", "", 0) for number in range(2)]
    listing = Listing(0, versions, versions, {"a": 0, "b": 1})
    workers, received = [WorkerSide(sockets, it.place, it.id) for it in versions], [[], []]
    state, metrics = SharedState(), Metrics("m", CollectorRegistry(), "http-0")
    client = EngineClient(sockets, 0, metrics, state)
    checkpoint = Checkpoint(Path(), CONFIG, CharTokenizer("ab"), {}, "")
    models = [Model(version, checkpoint, number, PatternThread()) for number, version in enumerate(versions)]
    for model in models:
        state.beat(f"worker-{model.place}")
        model.metrics = metrics.of(model.name)
    client.served = {model.id for model in models}

    async def until(condition):
        async with asyncio.timeout(PATIENCE):
            while not condition():
                for number, worker in enumerate(workers):
                    received[number] += [
                        it.first.id for _, it in worker.receive(block=False) if isinstance(it, Submits)
                    ]
                await asyncio.sleep(0)

    connecting = asyncio.create_task(until(lambda: client.is_ready))
    async with client.connected(listing):
        await connecting
        generations = [client.start(models[number % 2], [submit([0])], time.monotonic()) for number in range(6)]
        await until(lambda: [len(ids) for ids in received] == [3, 3])
        expected = [[next(iter(it.open)) for it in generations[number::2]] for number in range(2)]
        assert received == expected
        for connection in list(workers[1]._connections.values()):
            (sockets / "1.sock").unlink(missing_ok=True)
            workers[1]._drop(connection)
        await until(lambda: not client.is_ready)
        waiting = client.start(models[1], [submit([0])], time.monotonic())
        client.start(models[0], [submit([0])], time.monotonic()).abort()
        await until(lambda: len(received[0]) == 4)
        received[1].clear()
        workers[1] = WorkerSide(sockets, 1, versions[1].id)
        await until(lambda: client.is_ready and len(received[1]) == 4)
        assert received[1] == [*expected[1], next(iter(waiting.open))] and len(received[0]) == 4
        for generation in (*generations, waiting):
            generation.abort()


async def test_a_prompt_travels_without_what_no_logit_depends_on(peer):
    """A penalty is told what was in it; the request itself keeps the whole prompt."""
    prompt, field = [0, 1] * 20, CONFIG.receptive_field
    assert field == 7
    given = [
        submit(prompt), submit(prompt[:field]), submit(prompt, sampling=SamplingParams(repetition_penalty=1.1)),
        submit(prompt, 0, logprobs=0, score_from=1), submit(prompt, 0, logprobs=0, score_from=30),
    ]  # fmt: skip
    generation = peer.client.start(peer.model, given, time.monotonic())
    await peer.until(lambda: len(peer.received) == len(given))
    sent = [(len(it.prompt), it.score_from) for it in peer.received]
    assert sent == [(field, None), (field, None), (field, None), (40, 1), (17, 7)]
    assert [it.seen for it in peer.received] == [(), (), (0, 1), (), ()]
    assert peer.received[4].prompt == prompt[23:]
    assert [len(it.prompt) for it in given] == [40, field, 40, 40, 40]
    generation.abort()


async def test_a_sequence_that_lost_its_worker_goes_on_from_what_has_arrived(peer):
    """Another worker is asked for the rest only; before the first character, for all of it."""
    begun = {"scheduled_at": 1.0, "prefilled_at": 2.0}
    options = {"logprobs": 0, "score_from": 1, "reuse_group": "key salt"}
    streams = [
        peer.client.start(
            peer.model, [submit([0, seed], **options)], time.monotonic(), echo=["a" + "ab"[seed]], interval=0.0
        )
        for seed in (0, 1)
    ]
    await peer.until(lambda: len(peer.received) == 2)
    found = [[], []]

    async def read(generation, parts):
        async for pieces in generation.stream():
            parts.extend(pieces)

    tasks = [asyncio.create_task(read(*it)) for it in zip(streams, found, strict=True)]
    first, second = (it.id for it in peer.received)
    columns = logprobs_of([-0.5, -0.25, -0.125])
    peer.send(Delta(first, [0, 1, 1], **begun, logprobs=columns, prompt_logprobs=logprobs_of([-1.0])))
    peer.send(Delta(second, [], **begun, prompt_logprobs=logprobs_of([-2.0])))  # its first character is held back
    await peer.until(lambda: found[0])
    peer.received.clear()
    await peer.lose_worker()
    await peer.until(lambda: len(peer.received) == 2)
    assert [(it.id, it.written, it.must_run, it.score_from) for it in peer.received] == [
        (first, array("i", [0, 1, 1]).tobytes(), True, 1), (second, b"", True, 1),
    ]  # fmt: skip
    assert {it.reuse_group for it in peer.received} == {"key salt"}
    peer.send(Delta(first, [0], "length", ended_at=3.0, **begun, logprobs=logprobs_of([-9.0])))
    again = logprobs_of([-2.0])
    peer.send(Delta(second, [1], "length", ended_at=3.0, **begun, logprobs=logprobs_of([-8.0]), prompt_logprobs=again))
    await asyncio.gather(*tasks)
    assert ["".join(it.text for it in parts) for parts in found] == ["aa" + "abba", "ab" + "b"]
    values = [[value for it in parts for value, _ in it.logprobs.rows()] for parts in found]
    assert values == [[-1.0, -0.5, -0.25, -0.125, -9.0], [-2.0, -8.0]]
    assert peer.counts() == {"submitted": 2, "begun": 2, "length": 2}


async def test_a_sequence_that_lost_two_workers_ends_with_the_reason(peer):
    generation = peer.client.start(peer.model, [submit([0])], time.monotonic())
    await peer.until(lambda: peer.received)
    for _ in range(MAX_RUNS):
        await peer.lose_worker()
    with pytest.raises(ApiError, match="2 in a row") as lost:
        await generation.whole()
    assert (lost.value.status, lost.value.headers["Retry-After"]) == (503, "1")
    assert peer.counts() == {"submitted": 1, "begun": 1, "error": 1}


async def test_new_sequences_wait_for_a_worker_for_a_moment_and_are_then_refused(peer, monkeypatch):
    monkeypatch.setattr("service.http.workers.client.REPLACING_SECONDS", 60.0)
    client = peer.client
    with peer.no_worker():
        await peer.until(lambda: not client.is_ready)
        lucky = client.start(peer.model, [submit([0])], time.monotonic())
    await peer.until(lambda: peer.received)  # before its time was over
    [sent], peer.received = peer.received, []
    peer.send(Delta(sent.id, [1], "length", scheduled_at=1.0, prefilled_at=2.0, ended_at=3.0))
    assert [piece.text for piece in await lucky.whole()] == ["b"]
    with peer.no_worker():
        await peer.until(lambda: not client.is_ready)
        generation = client.start(peer.model, [submit([0])] * 3, time.monotonic(), window=2)
        client.sweep(time.monotonic() + 61)
        with pytest.raises(ApiError, match="no inference process is ready"):
            await generation.whole()
        monkeypatch.setattr("service.http.workers.client.REPLACING_SECONDS", 0.0)
        with pytest.raises(ApiError, match="no inference process is ready"):
            client.start(peer.model, [submit([0])], time.monotonic())
    assert peer.counts() == {"submitted": 4, "refused": 3, "begun": 1, "length": 1}


async def test_candidates_that_lost_their_worker_run_again(peer):
    generation = start_exact(peer, exact_answers(logprobs=0), interval=0.0)
    found = []

    async def read():
        async for pieces in generation.stream():
            found.extend(pieces)

    task = asyncio.create_task(read())
    first, second = await received(peer, 2)
    peer.send(match(first, logprobs=logprobs_of([-0.5, -1.5])))
    await peer.until(lambda: len(found) == 1)
    await peer.lose_worker()
    await received(peer, 3)
    assert peer.received[2] == replace(
        peer.received[1], must_run=True, timeout_seconds=peer.received[2].timeout_seconds
    )
    assert peer.received[2].id == second
    peer.send(match(second, logprobs=logprobs_of([-2.5, -3.5])))
    await peer.until(task.done)
    assert [(it.number, it.text, it.seed, it.finish_reason, it.is_exact) for it in found] == [
        (0, "ab", 0, "stop", True), (1, "ab", candidate_seed(0, 1), "stop", True),
    ]  # fmt: skip
    assert [[value for value, _ in it.logprobs.rows()] for it in found] == [[-0.5, -1.5], [-2.5, -3.5]]


async def test_a_sequence_that_loses_its_worker_again_keeps_its_deadline(peer, monkeypatch):
    """Not that of a new sequence, which it was when it waited for its first worker."""
    monkeypatch.setattr("service.http.workers.client.REPLACING_SECONDS", 60.0)
    with peer.no_worker():
        await peer.until(lambda: not peer.client.is_ready)
        generation = peer.client.start(peer.model, [submit([0])], time.monotonic())
    await peer.until(lambda: peer.received)
    task = asyncio.create_task(generation.whole())
    peer.received.clear()
    with peer.no_worker():
        await peer.until(lambda: not peer.client.is_ready)
        peer.client.sweep(time.monotonic() + 61)
    await peer.until(lambda: peer.received)
    [sent] = peer.received
    peer.send(Delta(sent.id, [1], "length", scheduled_at=1.0, prefilled_at=2.0, ended_at=3.0))
    await peer.until(task.done)
    assert [piece.text for piece in task.result()] == ["b"]


async def test_of_a_refused_request_nothing_more_is_submitted(peer):
    submits = [submit([0], client="a") for _ in range(100)]
    generation = peer.client.start(peer.model, submits, time.monotonic(), window=4)
    task = asyncio.create_task(generation.whole())
    await peer.until(lambda: len(peer.received) == 4)
    first, *others = peer.received
    peer.received.clear()
    peer.send(Delta(others[0].id, [1], scheduled_at=1.0, prefilled_at=2.0))
    await peer.until(lambda: peer.counts().get("begun"))
    peer.worker.send(Refused(first.id, "queue full", 7), 0)
    await peer.until(task.done)
    assert (task.exception().status, task.exception().headers["Retry-After"]) == (429, "7")
    await peer.until(lambda: len(peer.received) == 3)
    assert sorted(one.id for one in peer.received) == [one.id for one in others]
    assert peer.counts() == {"submitted": 100, "refused": 99, "begun": 1, "abort": 1}
    peer.client.metrics.flush()
    labels = {"model_name": "m", "reason": "queue_full"}
    assert peer.registry.get_sample_value("chargpt_admission_rejections_total", labels) == 99


async def test_a_refusal_before_the_worker_is_asked_is_that_of_the_same_client(peer, monkeypatch):
    monkeypatch.setattr("service.http.workers.client.REFUSING_SECONDS", 60.0)
    client = peer.client
    running = {name: client.start(peer.model, [submit([0], client=name)], time.monotonic()) for name in "ab"}
    refused = client.start(peer.model, [submit([0], client="b")], time.monotonic())
    await peer.until(lambda: len(peer.received) == 3)
    peer.worker.send(Refused(peer.received[2].id, "queue full", 30), 0)
    task = asyncio.create_task(refused.whole())
    await peer.until(task.done)
    assert task.exception().headers["Retry-After"] == "30"
    client.refuse_if_full("a")  # was never refused, and asks the worker
    with pytest.raises(ApiError, match="queue full") as again:
        client.refuse_if_full("b")
    assert again.value.headers["Retry-After"] == "30"
    running["a"].abort()
    with pytest.raises(ApiError):
        client.refuse_if_full("b")
    running["b"].abort()  # there may be a place now, for one
    client.refuse_if_full("b")
    with pytest.raises(ApiError):
        client.refuse_if_full("b")


async def test_a_refusal_before_the_worker_is_asked_is_for_a_moment_and_of_what_it_would_refuse_too(peer, monkeypatch):
    monkeypatch.setattr("service.http.workers.client.REFUSING_SECONDS", 60.0)
    for patience, count in ((1e9, 1), (0.0, 2), (0.0, 1)):
        peer.client._patience = patience
        submits = [submit([0], client="b") for _ in range(count)]
        generation = peer.client.start(peer.model, submits, time.monotonic())
        await peer.until(lambda count=count: len(peer.received) == count)
        peer.worker.send(Refused(peer.received[0].id, "no", 30), 0)
        with pytest.raises(ApiError, match="no"):
            await generation.whole()
        # One with more time, or without others, might have been accepted.
        assert set(peer.client._full) == (set() if patience or count > 1 else {"b"})
        await peer.until(lambda count=count: len(peer.received) == 2 * count - 1)  # the other is aborted
        peer.received.clear()
    peer.client.served.add(2)  # whose queue is another
    peer.client.refuse_if_full("b")
    peer.client.served.remove(2)
    peer.client.sweep(time.monotonic() + 60.0)
    peer.client.refuse_if_full("b")
