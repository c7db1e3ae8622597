"""What all requests of an HTTP process share: the served models, the settings, limits, metrics, and the client."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import TYPE_CHECKING, Any

from service.catalog import Listing
from service.http.api.bodies import ModelRequest
from service.http.api.errors import ApiError, invalid
from service.http.api.reading import LARGE_BODY_BYTES, AnyRequest, BodyReader, parse, read
from service.http.engine.client import EngineClient
from service.http.engine.client_limits import ClientLimits
from service.http.engine.lease import PROMPT_BYTES, Ledger, estimate, size_of, too_much
from service.http.engine.model import Model
from service.http.engine.patterns import PatternThread
from service.http.engine.sequences import Generation
from service.http.request import Request
from service.model.checkpoint import Checkpoint
from service.observe.exposition import Exposition
from service.observe.metrics import Metrics
from service.settings import Settings
from service.shared import SharedState, SharedTable
from service.wire import Submit

if TYPE_CHECKING:
    from service.http.engine.attention_thread import AttentionThread
    from service.http.tracing import Tracer


SMALL_BODY_BYTES = 1 << 12  # of a body whose fields are not held, unless its request has to wait


class Service:
    """What the routes need: the served models, the settings, and in an HTTP process the connected client."""

    client: EngineClient  # these four from process.py, in an HTTP process
    metrics: Metrics | None = None
    tracer: Tracer | None = None
    attention: AttentionThread

    def __init__(
        self,
        settings: Settings,
        listing: Listing,
        checkpoints: Mapping[int, Checkpoint],
        state: SharedState,
        table: SharedTable,
        *,
        backend: str,
        dtype: str,
        slots: int,
        devices: list[str],
    ):
        self.settings = settings
        # What `auto` in the settings stands for here; slots per worker, and a device per worker.
        self.backend, self.dtype, self.slots, self.devices = backend, dtype, slots, devices
        self.state = state
        self.random = Random()  # of ids, and of seeds that no request gives
        self._patterns = PatternThread()
        self.models: dict[str, Model] = {}  # by name
        self.serve(listing, checkpoints)
        self.bodies = BodyReader(settings)
        self.limits = ClientLimits(settings, table)
        self.ledger = Ledger(settings, self.limits, state)
        self.exposition = Exposition(
            settings.model_name,
            lambda: {name: model.checkpoint for name, model in self.models.items()},
            lambda: self.listing.rows,
            engine={"backend": backend, "dtype": dtype}, vllm_names=settings.metrics_vllm_names,
            state=state, hang_seconds=settings.hang_seconds,
        )  # fmt: skip

    @property
    def is_ready(self) -> bool:
        return self.metrics is not None and self.client.is_ready

    def serve(self, listing: Listing, checkpoints: Mapping[int, Checkpoint]) -> None:
        """Requests from now on choose among the listing's models; `checkpoints` has those that were not served."""
        known = {model.id: model for model in self.models.values()}
        for version in listing.serve:
            if version.id not in known:
                row, limit = listing.rows[version.name], self.settings.max_regex_characters
                model = Model(version, checkpoints[version.id], row, limit, self._patterns)
                known[version.id] = model
        self.listing, self.models = listing, {version.name: known[version.id] for version in listing.serve}
        if self.metrics is not None:
            self.client.num_models = len(self.models)
            for model in self.models.values():
                model.metrics = self.metrics.of(model.name)

    def connect(self, client: EngineClient, metrics: Metrics) -> None:
        """The HTTP process has started."""
        self.client, self.metrics = client, metrics
        self.ledger.metrics, self.ledger.process_id = metrics, client.consumer_id
        self.serve(self.listing, {})

    @property
    def default_model(self) -> Model:
        """For documents: the one that a request without a name gets, or the first."""
        return self.models.get(self.settings.model_name) or next(iter(self.models.values()))

    def find(self, name: str | None) -> Model:
        """The model that a request names; without a name the only one, or the default.

        Raises ApiError: 404, it is not served; 400, none is named, several are served and none of them is the default.
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

    async def read(
        self, kind: type[AnyRequest], request: Request, query: dict[str, Any] | None = None
    ) -> tuple[AnyRequest, Model]:
        """The request in a JSON body, or in the fields of a query, and its model; its time limit counts from here.

        What its fields take is held in place of the body. Large bodies are parsed one after the other, so that only one
        takes what parsing needs beside: up to 20 times its size.

        Raises ApiError: 400, with the field, what was given and what is allowed, or an unknown field that is refused;
        otherwise as `hold` and `find`.
        """
        body: AnyRequest
        if query is not None:
            body = parse(kind, query, is_query=True)
        elif request.num_body_bytes <= LARGE_BODY_BYTES:
            body = read(kind, request.body)
        else:
            content, request.content = request.body, bytearray()  # one copy is kept while it waits
            body = await self.bodies.read(kind, content, request.client)
        request.content = bytearray()
        if request.num_body_bytes > SMALL_BODY_BYTES:
            self.hold(request, body)
        request.ignored_fields = body.ignored_fields
        if body.ignored_fields and (self.settings.strict_fields if body.strict is None else body.strict):
            name, known = body.ignored_fields[0], ", ".join(type(body).model_fields)
            reason = "the server's setting strict_fields" if body.strict is None else "strict"
            shown = "" if "." in name else f"; known fields are {known}"
            raise invalid(name, f"unknown field, refused because of {reason}{shown}", "unknown_field")
        if body.timeout_seconds is not None:
            request.timeout_seconds = body.timeout_seconds
            request.limit_time(self.timeout(body.timeout_seconds))
        model = self.find(body.model)
        request.lease.use(model)
        request.lease.cache_salt = body.cache_salt or ""
        return body, model

    def hold(self, request: Request, body: Any, num_ids: int = 0) -> None:
        """Hold what the fields of a body take, and so many ids of its texts, before those are encoded.

        Raises ApiError: 400, it is more than a request may need; otherwise as Lease.hold.
        """
        longest, limit = max(self.settings.max_prompts, self.settings.max_score_texts), self.settings.max_request_bytes
        fields = (
            tuple(vars(body).values()) if isinstance(body, ModelRequest) else (body.prompt, body.stop)
        )  # of a PlainRequest
        size = size_of(fields, request.num_body_bytes, longest) + PROMPT_BYTES * num_ids
        if size > limit:
            message = f"the texts and ids of the request need {size} bytes of memory, {limit} are allowed: shorten them"
            raise ApiError(400, message)
        request.lease.hold(size)

    def timeout(self, seconds: float | None) -> float:
        longest = self.settings.request_timeout_seconds
        return longest if seconds is None else min(seconds, longest)

    def timeout_name(self, request: Request) -> str:
        own = request.timeout_seconds
        is_own = own is not None and own <= self.settings.request_timeout_seconds
        return "its timeout_seconds" if is_own else "the server's --request-timeout-seconds"

    def admit(self, request: Request, submits: list[Submit], **options: Any) -> None:
        """Take all that a request of these sequences may need; options as those of `estimate`.

        Raises ApiError: 400, it needs more than allowed; otherwise as Lease.take.
        """
        lease = request.lease
        assert lease.model is not None
        needed = estimate(submits, lease.model.receptive_field, lease.model.vocab_size, **options)
        total, limit = sum(needed), self.settings.max_request_bytes
        if total > limit:
            raise too_much(needed, len(submits), limit)
        lease.take(total, _num_characters(submits) if self.limits.has_any else 0, len(submits))

    def start(self, request: Request, submits: list[Submit], *, is_charged: bool = False, **options: Any) -> Generation:
        """Run sequences for a request that was admitted; options as those of EngineClient.start.

        is_charged: they were admitted with those before them.

        Raises ApiError: 503, no worker is connected.
        """
        lease = request.lease
        model, client, is_accepted = lease.model, lease.client, bool(request.generations)
        assert model is not None
        weight = self.limits.of(client).weight
        # Without keys all callers may read the same, and an address is no person's. No client's name has a space.
        owner = "" if self.settings.api_keys_file is None else client
        group = f"{owner} {lease.cache_salt}"
        for submit in submits:
            submit.request_id, submit.client, submit.weight, submit.reuse_group = request.id, client, weight, group
        if is_accepted and not is_charged:  # what follows from a request that was accepted is too
            lease.charge(_num_characters(submits), len(submits), must_wait=False)
        generation = self.client.start(model, submits, request.arrived_at, is_accepted=is_accepted, **options)
        generation.timeout_name = self.timeout_name(request)
        request.generations.append(generation)
        if request.client_left:
            generation.abort()
        return generation


def _num_characters(submits: list[Submit]) -> int:
    """That count in a client's limit."""
    return sum([len(it.prompt) + (it.max_tokens if it.draw is None else it.draw.max_characters) for it in submits])
