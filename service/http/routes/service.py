"""State that all requests of an HTTP process share: models, settings, limits, metrics, and the engine client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from random import Random
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from service.catalog import Listing
from service.http.connection.errors import ApiError
from service.http.connection.turns import Pause, wait_for_turn
from service.http.limits.clients import ClientLimits
from service.http.limits.memory import PROMPT_BYTES, Ledger, estimate, size_of, too_much
from service.http.models.model import Model
from service.http.models.patterns import PatternThread
from service.http.routes.request import Request
from service.http.schema.answers import Receipt, Timing
from service.http.schema.reading import read
from service.http.schema.requests import ServerRequest
from service.http.workers.client import EngineClient
from service.http.workers.sequences import Generation
from service.model.checkpoint import Checkpoint
from service.observe.exposition import Exposition
from service.observe.metrics import Metrics
from service.settings import Settings
from service.shared import SharedState
from service.text.encoding import Encoder
from service.text.errors import invalid
from service.text.exact import Bounds
from service.text.limits import Limits
from service.text.pieces import Piece, Ran, Stages
from service.text.work import Result, Work
from service.wire import Submit

AnyServerRequest = TypeVar("AnyServerRequest", bound=ServerRequest)

MAX_PROMPTS = 128  # sequences of a request: prompts × n or best_of
MAX_SCORE_TEXTS = 10_000  # of a request of /v1/score
SMALL_BODY_BYTES = 1 << 12  # fields of a smaller body are not reserved unless the request waits
MAX_ATTENTION_TEXTS = 8  # that wait for /v1/attention or run in it


class Service:
    """Served models and settings for the routes. In an HTTP process it also has the connected client."""

    client: EngineClient  # process.py sets these two in an HTTP process
    metrics: Metrics | None = None

    def __init__(
        self,
        settings: Settings,
        listing: Listing,
        checkpoints: Mapping[int, Checkpoint],
        state: SharedState,
        *,
        backend: str,
        dtype: str,
        slots: int,
        devices: list[str],
    ):
        self.settings = settings
        # The resolved `auto` settings, the slots per worker, and the device of each worker of a model.
        self.backend, self.dtype, self.slots, self.devices = backend, dtype, slots, devices
        self.state = state
        self.random = Random()  # source of ids, and of seeds for requests without one
        self._patterns = PatternThread()
        self.models: dict[str, Model] = {}  # by name
        # Of attention.py: the weights of one model. None: attention.py cannot compute it.
        self.attention_places, self.attention_turn = asyncio.Semaphore(MAX_ATTENTION_TEXTS), asyncio.Lock()
        self.attention_weights: WeakKeyDictionary[Model, dict[str, np.ndarray] | None] = WeakKeyDictionary()
        self.serve(listing, checkpoints)
        self.limits = ClientLimits(settings)
        self.text_limits = Limits(
            max_prompts=MAX_PROMPTS,
            max_score_texts=MAX_SCORE_TEXTS,
            max_prompt_characters=settings.max_prompt_characters,
            max_tokens=settings.max_tokens,
            unknown_characters=settings.unknown_characters,
        )
        self.ledger = Ledger(settings, self.limits, state)
        self.exposition = Exposition(
            settings.model_name,
            lambda: {name: model.checkpoint for name, model in self.models.items()},
            lambda: self.listing.rows,
            lambda: self.listing.workers(state),
            engine={"backend": backend, "dtype": dtype}, state=state, hang_seconds=settings.hang_seconds,
        )  # fmt: skip

    @property
    def exact_window(self) -> int:
        """Candidates of a request that workers of its model have at once: half of them wait, so that no slot does."""
        return 2 * self.slots * len(self.devices)

    @property
    def is_ready(self) -> bool:
        return self.metrics is not None and self.client.is_ready

    def serve(self, listing: Listing, checkpoints: Mapping[int, Checkpoint]) -> None:
        """Serve the listing's models to new requests. `checkpoints` has the models that were not served before."""
        known = {model.id: model for model in self.models.values()}
        for version in listing.serve:
            if version.id not in known:
                row = listing.rows[version.name]
                known[version.id] = Model(version, checkpoints[version.id], row, self._patterns)
        self.listing, self.models = listing, {version.name: known[version.id] for version in listing.serve}
        if self.metrics is not None:
            self.client.served = {model.id for model in self.models.values()}
            for model in self.models.values():
                model.metrics = self.metrics.of(model.name)

    def connect(self, client: EngineClient, metrics: Metrics) -> None:
        """The HTTP process has started."""
        self.client, self.metrics = client, metrics
        self.ledger.metrics, self.ledger.process_id = metrics, client.consumer_id
        self.serve(self.listing, {})

    @property
    def default_model(self) -> Model:
        """The model for documents: the default of requests without a name, or else the first."""
        return self.models.get(self.settings.model_name) or next(iter(self.models.values()))

    def find(self, name: str | None) -> Model:
        """Return the named model. Without a name, return the only model, or the default.

        Raises ApiError: 404, the model is not served. Raises InvalidRequestError: the name is missing, and there are
        several models but no default.
        """
        models = self.models
        if name is None:
            model = next(iter(models.values())) if len(models) == 1 else models.get(self.settings.model_name)
            if model is None:
                raise invalid("model", f"must be one of {', '.join(models)}")
            return model
        if name not in models:
            served = ", ".join(map(repr, models))
            verb = "model is" if len(models) == 1 else "models are"
            message = f"model {name!r} is not served here; the served {verb} {served}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return models[name]

    async def read(self, kind: type[AnyServerRequest], request: Request) -> tuple[AnyServerRequest, Model]:
        """Parse a JSON body, and return it with the model.

        The memory reserved for the body is replaced by that of its fields.

        Raises InvalidRequestError: a field is invalid, or unknown and refused; otherwise as `hold` and `find`.
        """
        if request.num_body_bytes > SMALL_BODY_BYTES:
            await wait_for_turn(request.client)
        body = read(kind, request.body)
        request.content = bytearray()
        if request.num_body_bytes > SMALL_BODY_BYTES:
            self.hold(request, body)
        request.ignored_fields = body.ignored_fields
        if body.ignored_fields and body.strict:
            name, known = body.ignored_fields[0], ", ".join(type(body).model_fields)
            shown = "" if "." in name else f"; known fields are {known}"
            raise invalid(name, f"unknown field, refused because of strict{shown}", "unknown_field")
        if body.timeout_seconds is not None:
            request.timeout_seconds = body.timeout_seconds
            request.limit_time(self.timeout(body.timeout_seconds))
        request.priority = body.priority
        model = self.find(body.model)
        request.lease.use(model)
        return body, model

    def hold(self, request: Request, body: ServerRequest, num_ids: int = 0) -> None:
        """Reserve the memory of a body's fields, and of `num_ids` ids, before its texts are encoded.

        Raises ApiError: 400, it exceeds the limit of a request; otherwise as Lease.hold.
        """
        longest, limit = max(MAX_PROMPTS, MAX_SCORE_TEXTS), self.settings.max_request_bytes
        size = size_of(vars(body).values(), request.num_body_bytes, longest) + PROMPT_BYTES * num_ids
        if size > limit:
            message = f"the texts and ids of the request need {size} bytes of memory, {limit} are allowed: shorten them"
            raise ApiError(400, message)
        request.lease.hold(size)

    def receipt(self, model: Model, encoder: Encoder, timing: Timing, seeds: Iterable[int] = ()) -> Receipt:
        """Describe how an answer was made."""
        return {
            "checkpoint_sha256": model.digest,
            "backend": self.backend,
            "dtype": self.dtype,
            "seeds": list(seeds),
            "timing": timing,
            "replaced_characters": encoder.replaced,
            "dropped_characters": encoder.dropped,
        }

    async def run(self, request: Request, work: Work[Result]) -> Result:
        """Run work of a request with pauses, and its jobs in the thread of patterns."""
        pause, result = None, None
        try:
            while True:
                job = work.send(result)
                result = None
                if job is not None:
                    assert request.model is not None
                    result = await request.model.cache.find(request.client, job)
                elif pause is None:
                    pause = Pause(request.client)
                else:
                    await pause.if_due()
        except StopIteration as end:
            return end.value

    async def answer(self, request: Request, stages: Stages[list[Piece]], echo: list[str] | None) -> list[Piece]:
        """Run the sequences of an admitted request in stages. echo: for the first."""
        pause, result = Pause(request.client), None
        try:
            while True:
                submits = stages.send(result)
                result = None
                if submits is None:
                    await pause.if_due()
                    continue
                generation = self.start(request, submits, echo=echo)
                pieces = await generation.whole()
                if request.client_left:
                    return []
                result = Ran(pieces, [generation.prompt_logprobs(i) for i in range(len(submits))])
                echo = None
        except StopIteration as end:
            return end.value

    def make_seed(self) -> int:
        """Return the seed of a prompt without one."""
        return self.random.getrandbits(52)

    def timeout(self, seconds: float | None) -> float:
        longest = self.settings.request_timeout_seconds
        return longest if seconds is None else min(seconds, longest)

    def timeout_name(self, request: Request) -> str:
        own = request.timeout_seconds
        is_own = own is not None and own <= self.settings.request_timeout_seconds
        return "its timeout_seconds" if is_own else "the server's --request-timeout-seconds"

    def admit(self, request: Request, submits: list[Submit], bounds: Bounds | None = None, **options: Any) -> None:
        """Reserve everything that a request of these sequences may need. `options` are those of `estimate`.

        bounds: of exact answers.

        Raises ApiError: 400, it exceeds the limit of a request; otherwise as Lease.take.
        """
        lease = request.lease
        assert lease.model is not None
        if bounds is not None:
            options |= {"answers": bounds.answers, "window": self.exact_window}
        needed = estimate(submits, lease.model.receptive_field, lease.model.vocab_size, **options)
        total, limit = sum(needed), self.settings.max_request_bytes
        if total > limit:
            raise too_much(needed, len(submits), limit)
        lease.take(total, _num_characters(submits, bounds) if self.limits.has_any else 0, len(submits))

    def start(self, request: Request, submits: list[Submit], **options: Any) -> Generation:
        """Run sequences of an admitted request. `options` are those of EngineClient.start.

        Raises ApiError: 503, no worker of the model is connected.
        """
        lease = request.lease
        model, client, is_accepted = lease.model, lease.client, bool(request.generations)
        assert model is not None
        weight, seconds = self.limits.of(client).weight, self.timeout(request.timeout_seconds)
        # Without keys all callers are trusted alike, and an address is no identity. A client's name has no space.
        group = "" if self.settings.api_keys_file is None else client
        if options.get("exact") is not None:
            options["window"] = self.exact_window
        for submit in submits:
            submit.request_id, submit.client, submit.weight, submit.reuse_group = request.id, client, weight, group
            submit.priority, submit.timeout_seconds = submit.priority + 2 * request.priority, seconds
        if is_accepted:  # follow-up sequences of an accepted request are accepted too
            lease.charge(_num_characters(submits), len(submits), must_wait=False)
        generation = self.client.start(model, submits, request.arrived_at, is_accepted=is_accepted, **options)
        generation.timeout_name = self.timeout_name(request)
        request.generations.append(generation)
        if request.client_left:
            generation.abort()
        return generation


def _num_characters(submits: list[Submit], bounds: Bounds | None = None) -> int:
    """Return the characters that count in the client's limit."""
    return sum([len(it.prompt) + (it.max_tokens if bounds is None else bounds.max_characters) for it in submits])
