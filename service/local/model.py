"""The model in Python: each method makes a request in text of its arguments, and runs it on the engine's thread.

The arguments are the fields of the API, with its names, defaults and errors: API.md describes them. Limits of a server
do not apply.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import Any, Self

import msgspec
import numpy as np

from service import BUNDLED
from service.engine import native
from service.engine.backends import open_runner, resolve
from service.engine.engine import Engine
from service.engine.runner import Runner
from service.engine.selfcheck import SelfCheckError, check
from service.local.results import Acceptance, Answer, Answers, Character, Next, Results, Sample, Score
from service.local.thread import Call, EngineThread, Running
from service.model.checkpoint import Checkpoint, checkpoint_in
from service.model.params import MAX_SEED
from service.process import available_cpus
from service.text.encoding import Encoder
from service.text.errors import InvalidRequestError, invalid
from service.text.exact import Bounds, Ending, Exact
from service.text.generation import Plan, answers, plan
from service.text.limits import Limits
from service.text.model import TextModel
from service.text.pieces import Piece, Ran, piece_of
from service.text.reading import AnyRequest, parse
from service.text.requests import MAX_ID, MAX_TOKENS, GenerationRequest, NextRequest, ScoreRequest
from service.text.scores import distribution_of, entropy_of, plan_next, plan_scores, ranks, scores_of
from service.text.work import Job, Result, Work, run
from service.wire import Logprobs, Submit, floats

MAX_JOBS = 64  # compiled patterns that are kept
AHEAD = 4  # sequences that `sample` may have in progress or unread, per slot


class RequestError(ValueError):
    """A request cannot be answered as it is. param: its field; None: no single one. code: for programs."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param, self.code = param, code


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except InvalidRequestError as error:
        raise RequestError(error.message, error.param, error.code) from None


def load(
    folder: str | os.PathLike[str] | None = None,
    *,
    backend: str = "auto",
    dtype: str = "auto",
    device: str = "cpu",
    threads: int | None = None,
    slots: int = 64,
) -> Model:
    """Load a checkpoint folder, the best checkpoint of a run's folder, or without a folder the bundled checkpoint.

    backend: native, torch or cuda; auto takes cuda on a GPU, and native on a CPU if it runs there. Otherwise auto takes
    torch, and warns. dtype: float32, float64 or, except with native, bfloat16; auto takes float32, with torch float64.
    device: cpu, or cuda for a GPU. threads: of the CPU; by default, as many as this process may use. slots: sequences
    that run at once.

    Raises:
        CheckpointError: the folder has no checkpoint, or it was altered.
        ValueError: this machine cannot run the backend or dtype.
        SelfCheckError: the backend does not compute the model.
    """
    for name, value, most in ("threads", threads, 1024), ("slots", slots, 4096):
        if value is not None and not 1 <= value <= most:
            raise ValueError(f"{name} must be in [1, {most}], got {value}")
    checkpoint = Checkpoint.read(BUNDLED if folder is None else checkpoint_in(Path(folder)))
    threads = available_cpus() if threads is None else threads
    chosen, _ = resolve(backend, dtype, device)
    if backend == "auto" and chosen == "torch" and (reason := native.why_not()):
        warnings.warn(f"running on backend torch, because native is not available: {reason}", stacklevel=2)

    def opened(backend: str) -> Runner:
        runner = open_runner(checkpoint, backend, dtype, slots, threads, device)
        try:
            check(runner, checkpoint, is_short=True)  # a script may load often
        except SelfCheckError:
            runner.close()
            raise
        return runner

    try:
        runner = opened(chosen)
    except SelfCheckError as error:
        if backend != "auto" or chosen == "torch":
            raise
        warnings.warn(f"running on backend torch: {error}", stacklevel=2)
        runner = opened("torch")
    return Model(TextModel.of(checkpoint), Engine(runner, max_waiting=MAX_ID), checkpoint)


class Model:
    """A model, and an engine that runs it in a thread of this process. checkpoint: None for a model in training.

    Any thread may call the methods; the engine runs all calls together, and the same seed gives the same text. `close`,
    or `with`, frees the memory. A stream or a sample that is left behind ends what it runs.

    Raises:
        RequestError: from each method: an argument is invalid. It is a ValueError with the sentence of the API.
        ModelClosedError: from each method: the model is closed, or this process is a fork of the one that loaded it.
    """

    def __init__(self, text: TextModel, engine: Engine, checkpoint: Checkpoint | None = None):
        self.checkpoint = checkpoint
        self.backend, self.dtype, self.slots = engine.runner.backend, engine.runner.dtype, engine.runner.slots
        self._text, self._config = text, engine.config
        self._limits = Limits(max_prompts=MAX_ID)
        self._random = Random()
        self._jobs: dict[Any, Any] = {}
        self._jobs_lock = threading.Lock()
        self._thread = EngineThread(engine)
        self._finalizer = weakref.finalize(self, self._thread.close)

    def __repr__(self) -> str:
        kind, config = "texts" if self._text.record_end is None else "records", self._config
        path = "" if self.checkpoint is None else f" {self.checkpoint.path}"
        size = f"{config.num_parameters:,} parameters, {config.vocab_size} characters"
        end = "" if self._finalizer.alive else ", closed"
        return f"<model of {kind}{path}: {size}, backend {self.backend}, dtype {self.dtype}{end}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what runs, and free the engine."""
        self._finalizer()

    # -- generate --

    def generate(self, prompt: Any = "", **fields: Any) -> Answers:
        """Continue a text or a list of texts. The fields are those of POST /generate.

        Return a list of answers: `n` of the first prompt, then those of the next. If there is one, the list has its
        attributes too: model.generate("ROMEO:").text
        """
        with _refusing():
            request = self._request(fields | {"prompt": prompt})
            encoder, planned = self._plan(request)
            exact = None if planned.bounds is None else Exact(self._text, planned.submits, planned.bounds)
            pieces = self._pieces(planned) if exact is None else sorted(self._exact(exact), key=attrgetter("number"))
        found = Answers(self._answer(piece) for piece in pieces)
        found.replaced_characters, found.dropped_characters = encoder.replaced, encoder.dropped
        found.exact = None if exact is None else Acceptance(*exact.cost)
        return found

    def stream(self, prompt: Any = "", **fields: Any) -> Iterator[str]:
        """Continue a text, and yield its answer in parts as they are sampled. The fields are those of `generate`."""
        with _refusing():
            request = self._request(fields | {"prompt": prompt})
            if request.logprobs is not None:
                raise invalid("logprobs", "a stream yields text alone; use generate")
            _, planned = self._plan(request)
            if planned.chooses and not planned.suffix:
                message = f"cannot be streamed if greater than n ({planned.n}), got {planned.candidates}"
                raise invalid("best_of", message)
            for name, count in ("prompt", len(planned.seeds)), ("n", planned.n):
                if count != 1:
                    raise invalid(name, f"a stream has one answer, got {count}; use generate")
        return self._stream(planned)

    def sample(self, count: int, **fields: Any) -> Sample:
        """Yield `count` answers in order, those of generate(n=count, …), while the engine samples the next ones.

        A model of records writes one record for each. The fields are those of `generate`, with one prompt. The
        iterator's `exact` is the cost of exact answers so far.
        """
        with _refusing():
            for name in ("n", "best_of", "suffix"):
                if fields.get(name) is not None:
                    raise invalid(name, "a sample has none, as its count says how many answers there are")
            if not isinstance(count, int) or count < 0:
                raise invalid("count", f"must be an integer of at least 0, got {count!r}")
            if not count:
                return Sample(iter(()))
            _, planned = self._plan(self._request(fields))
            if len(planned.submits) != 1:
                raise invalid("prompt", f"a sample has one prompt, got {len(planned.submits)}; use generate")
        if planned.bounds is None:
            return Sample(self._sample(planned, count))
        exact = Exact(self._text, planned.submits, Bounds(*(count * bound for bound in planned.bounds)))
        return Sample(map(self._answer, self._exact(exact)), lambda: Acceptance(*exact.cost))

    def _request(self, fields: dict[str, Any]) -> GenerationRequest:
        if fields.get("max_tokens") is None:
            fields["max_tokens"] = MAX_TOKENS
        return self._parse(GenerationRequest, fields)

    def _plan(self, request: GenerationRequest) -> tuple[Encoder, Plan]:
        limits = self._limits
        for name in ("max_candidates", "max_candidate_characters"):  # a limit and a default, for servers
            given = getattr(request, name) or 0
            limits = dataclasses.replace(limits, **{name: max(given, getattr(limits, name))})
        encoder = Encoder(limits, self._text, request)
        work = plan(self._text, request, limits, encoder, lambda: self._random.getrandbits(52))
        return encoder, self._done(work)

    def _pieces(self, planned: Plan) -> list[Piece]:
        """Return the answers of a plan that are not exact."""
        if not planned.chooses:
            return self._texts(self._run(planned.submits), planned.echo)
        stages, result = answers(self._text, planned), None
        echo = None if planned.suffix else planned.echo
        try:
            while True:
                submits = stages.send(result)
                result = None
                if submits is not None:
                    sequences = self._run(submits)
                    result = Ran(self._texts(sequences, echo), [it.prompt_logprobs for it in sequences])
                    echo = None
        except StopIteration as end:
            return end.value

    def _stream(self, planned: Plan) -> Iterator[str]:
        if planned.bounds is not None:
            pieces: Iterable[Piece] = self._exact(Exact(self._text, planned.submits, planned.bounds))
        elif planned.chooses:
            pieces = self._pieces(planned)
        else:
            echo = planned.echo[0] if planned.echo else ""
            for part in self._parts(planned.submits, streams=True):
                _check(part)
                text, echo = echo + self._decode(part.ids), ""
                if text:
                    yield text
            return
        yield from (piece.text for piece in pieces)

    def _exact(self, exact: Exact) -> Iterator[Piece]:
        """Yield exact answers as they are found. Those of a prompt come in order."""
        call = Call(self._thread)

        def refill(num_open: int) -> int:
            started = exact.more(2 * self.slots - num_open)  # as many wait as run, so that no slot does
            if started:
                call.add(submit for *_, submit in started)
            return num_open + len(started)

        try:
            num_open = refill(0)
            for it in call.parts():
                num_open -= 1
                if exact.is_needed(it.number):
                    _check(it)
                    logprobs = None
                    if it.submit.logprobs is not None:
                        logprobs = it.prompt_logprobs
                        logprobs.extend(it.logprobs)
                    result = Ending(self._decode(it.ids), it.finish_reason, it.num_unseen, it.tried, logprobs)
                    yield from exact.ended(it.number, result)
                if needless := exact.take_needless():
                    call.drop(needless)
                if (failure := exact.failure) is not None:
                    with _refusing():
                        raise failure
                if call.results.empty():  # more candidates at a time
                    num_open = refill(num_open)
        finally:
            call.close()

    def _sample(self, planned: Plan, count: int) -> Iterator[Answer]:
        (first,), number, num_taken = planned.submits, 0, 0
        submits = (_with_seed(first, first.sampling.seed + i) for i in range(count))
        ended: dict[int, Running] = {}  # by number, not in order yet
        call = Call(self._thread)
        try:
            call.add(itertools.islice(submits, AHEAD * self.slots))
            for sequence in call.parts():
                _check(sequence)
                ended[sequence.number] = sequence
                ready = []
                while number in ended:
                    ready.append(ended.pop(number))
                    number += 1
                num_taken += len(ready)
                if num_taken >= self.slots:
                    call.add(itertools.islice(submits, num_taken))  # before the caller works on these
                    num_taken = 0
                for it in ready:
                    yield self._answer(self._piece(it, planned.echo[0] if planned.echo else ""))
        finally:
            call.close()

    # -- score --

    def score(
        self, texts: Any = None, *, prefix: Any = None, continuations: Any = None, **fields: Any
    ) -> Results[Score]:
        """Return the likelihood of texts, or of continuations of a prefix. The fields are those of POST /v1/score."""
        fields |= {"texts": texts, "prefix": prefix, "continuations": continuations}
        with _refusing():
            request = self._parse(ScoreRequest, fields)
            encoder, is_ranking = Encoder(self._limits, self._text, request), request.texts is None
            given = request.continuations if request.texts is None else request.texts
            shown = [given] if isinstance(given, str) else given or []
            planned = self._done(plan_scores(self._text, request, self._limits, encoder))
            logprobs = [Logprobs()] * len(shown)
            for i, sequence in zip(planned.order, self._run(planned.submits), strict=True):
                logprobs[i] = sequence.prompt_logprobs
        totals = run(scores_of(logprobs))
        places: Iterable[int | None] = ranks([it.nats for it in totals]) if is_ranking else itertools.repeat(None)
        counts_unknown = encoder.policy != "refuse" or self._text.tokenizer.unknown_id is not None
        found: Results[Score] = Results()
        found.replaced_characters, found.dropped_characters = encoder.replaced, encoder.dropped
        for i, (text, total, rank) in enumerate(zip(shown, totals, places, strict=False)):
            nats: list[float | None] | None = None
            if request.characters:  # nothing precedes the first character of a document
                nats = [None] * (not planned.before and planned.lengths[i] > 0)
                nats += [-value for value in floats(logprobs[i].values)]
            mean, bits, perplexity = total.nats_per_character, total.bits_per_character, total.perplexity
            unknown = planned.unknown[i] if counts_unknown else None
            found.append(Score(i, text, total.num_characters, total.nats, mean, bits, perplexity, rank, unknown, nats))
        return found

    def next(self, prompt: Any = "", *, top: int | None = None, **fields: Any) -> Results[Next]:
        """Return the distribution of the character after a text, or after each of a list of texts.

        top: the number of characters to return, the likeliest ones. Other fields are those of POST /v1/next.
        """
        with _refusing():
            if top is not None and (not isinstance(top, int) or top < 0):
                raise invalid("top", f"must be an integer of at least 0, got {top!r}")
            request = self._parse(NextRequest, fields | {"prompt": prompt})
            encoder = Encoder(self._limits, self._text, request)
            submits, _ = self._done(plan_next(self._text, request, self._limits, encoder))
            sequences = self._run(submits)
        characters, found = self._text.tokenizer.characters, Results[Next]()
        for sequence in sequences:
            every = distribution_of(sequence.logprobs)
            entropy = entropy_of(every)
            likeliest = [Character(characters[id], id, math.exp(value), value) for id, value in every[:top]]
            found.append(Next(sequence.number, entropy, entropy / math.log(2), likeliest))
        return found

    # -- what they share --

    def _parse(self, kind: type[AnyRequest], fields: dict[str, Any]) -> AnyRequest:
        """Return a request. Unknown fields are refused, as nobody would see that they are ignored."""
        request = parse(kind, {name: _plain(value) for name, value in fields.items()})
        if request.ignored_fields:
            known = ", ".join(kind.model_fields)
            raise invalid(request.ignored_fields[0], f"unknown field; known fields are {known}", "unknown_field")
        return request

    def _done(self, work: Work[Result]) -> Result:
        """Run work. Results of its jobs, such as compiled patterns, are kept."""
        return run(work, self._find)

    def _find(self, job: Job) -> Any:
        with self._jobs_lock:
            if job.key in self._jobs:
                return self._jobs[job.key]
        found = job.call()
        with self._jobs_lock:
            while len(self._jobs) >= MAX_JOBS:
                del self._jobs[next(iter(self._jobs))]  # the oldest
            self._jobs[job.key] = found
        return found

    def _parts(self, submits: Iterable[Submit], streams: bool = False) -> Iterator[Running]:
        call = Call(self._thread, streams)
        try:
            call.add(submits)
            yield from call.parts()
        finally:
            call.close()

    def _run(self, submits: list[Submit]) -> list[Running]:
        """Run sequences to their ends. Of several that fail, the first gives the error."""
        sequences = sorted(self._parts(submits), key=lambda sequence: sequence.number)
        for sequence in sequences:
            _check(sequence)
        return sequences

    def _decode(self, ids: list[int]) -> str:
        return self._text.tokenizer.decode_array(np.array(ids, np.uint32))

    def _texts(self, sequences: list[Running], echo: list[str] | None) -> list[Piece]:
        return [self._piece(it, echo[it.number] if echo else "") for it in sequences]

    def _piece(self, it: Running, echo: str) -> Piece:
        """Return the text of a sequence."""
        text = self._decode(it.ids)
        return piece_of(it.number, it.submit, text, it.finish_reason, it.logprobs, echo, it.prompt_logprobs)

    def _answer(self, piece: Piece) -> Answer:
        if piece.logprobs is None:
            return Answer(piece.number, piece.text, piece.finish_reason, piece.seed)
        names, unscored = self._text.tokenizer.characters, piece.num_unscored
        values: list[float | None] = [None] * unscored
        tops: list[dict[str, float] | None] = [None] * unscored
        for own, (value, top) in zip(piece.text[unscored:], piece.logprobs.rows(), strict=True):
            values.append(value)
            tops.append({names[id]: other for id, other in top} | {own: value})
        return Answer(piece.number, piece.text, piece.finish_reason, piece.seed, values, tops)


def _check(sequence: Running) -> None:
    if sequence.finish_reason == "error":
        raise RuntimeError("inference failed on this request: the log says why")


def _with_seed(submit: Submit, seed: int) -> Submit:
    sampling = msgspec.structs.replace(submit.sampling, seed=seed % (MAX_SEED + 1))
    return msgspec.structs.replace(submit, sampling=sampling)


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: a list for a tuple, an array of NumPy or a column of pandas."""
    if isinstance(value, tuple):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") else value
