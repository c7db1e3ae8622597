"""The routes of the HTTP process: what each request means, from the parsed body to the answer.

A request is bounded, validated and encoded here, goes to a worker once (Run), and its pieces are written as they
come. LitServe calls this a spec: its place for an API of one's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import multiprocessing
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from litserve import LitServer
from litserve.specs.base import LitSpec
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from service.constrain.regex import RegexError, any_of, compile_choice, compile_regex
from service.http.answers import Answer, CompletionAnswer, Receipt
from service.http.client import EngineClient
from service.http.responses import GenerationResponse, JobResponse
from service.http.run import CharacterLogprob, Ranked, Run, Work
from service.http.schemas import (
    MAX_SEED,
    ApiError,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    GenerationRequest,
    ModelRequest,
    NextRequest,
    ScoreRequest,
    TokenizeRequest,
    parse,
)
from service.model.checkpoint import Checkpoint
from service.model.params import SamplingParams
from service.model.tokenizer import CharTokenizer, UnknownCharacterError
from service.observe.exposition import Exposition
from service.observe.metrics import Metrics
from service.settings import Settings
from service.sockets import SocketTransport
from service.wire import Submit

if TYPE_CHECKING:
    from service.observe.tracing import Tracer

MAX_STOP_STATES = 256  # of stop_regex, each of which may cost time at each character
SUFFIX_CANDIDATES = 8  # sampled for each prompt, where neither the request nor a limit says otherwise
EVENT_SOURCE_END = "done"  # the id of the last event, with which EventSource asks again
MAX_SHOWN = 20  # unknown characters that an error names


class HttpState:
    """What the main process and the HTTP processes share: plain memory, made before the fork."""

    def __init__(self, num_processes: int):
        self._draining = multiprocessing.RawValue("b", 0)
        self._restarts = multiprocessing.RawValue("l", 0)
        self._busy = multiprocessing.RawArray("l", num_processes)  # requests that run in each process

    @property
    def is_draining(self) -> bool:
        return bool(self._draining.value)

    def start_draining(self) -> None:
        self._draining.value = 1

    @property
    def num_worker_restarts(self) -> int:
        return int(self._restarts.value)

    def worker_restarted(self) -> None:
        self._restarts.value += 1

    @property
    def num_busy(self) -> int:
        return sum(self._busy)

    @contextlib.contextmanager
    def busy(self, process: int) -> Iterator[None]:
        self._busy[process] += 1
        try:
            yield
        finally:
            self._busy[process] -= 1


class Encoder:
    """The texts of one request to ids; counts the characters that the vocabulary lacks and what became of them."""

    def __init__(self, tokenizer: CharTokenizer, settings: Settings, body: ModelRequest):
        self.tokenizer = tokenizer
        self.policy = body.unknown_characters or settings.unknown_characters
        self.replacement = body.replacement_character or settings.replacement_character
        self.replaced = self.dropped = 0
        if self.policy == "replace" and self.replacement not in tokenizer:
            message = f"replacement_character: {self.replacement!r} is not in the vocabulary either"
            raise ApiError(400, message, param="replacement_character")

    def encode(self, text: str, param: str, place: int | None = None) -> list[int]:
        """The ids of a text, `param` of the request or, with `place`, one of several.

        Raises:
            ApiError: 400, it holds characters that the model does not know, and they are to be refused.
        """
        try:
            return self.tokenizer.encode(text)
        except UnknownCharacterError:
            unknown = [(i, c) for i, c in enumerate(text) if c not in self.tokenizer]
        if self.policy == "refuse":
            name = param if place is None else f"{param}.{place}"
            raise ApiError(400, f"{name}: {_named(unknown)}", param=param, code="unknown_character")
        if self.policy == "drop":
            self.dropped += len(unknown)
            return self.tokenizer.encode("".join([c for c in text if c in self.tokenizer]))
        self.replaced += len(unknown)
        return self.tokenizer.encode("".join([c if c in self.tokenizer else self.replacement for c in text]))


def _named(unknown: list[tuple[int, str]]) -> str:
    """Unknown characters with their code points and offsets."""
    shown = [f"{c!r} (U+{ord(c):04X}) at offset {i}" for i, c in unknown[:MAX_SHOWN]]
    if len(unknown) == 1:
        return f"character {shown[0]} is not in the vocabulary"
    more = f" and {len(unknown) - MAX_SHOWN} more" if len(unknown) > MAX_SHOWN else ""
    return f"characters {', '.join(shown)}{more} are not in the vocabulary"


def json_response(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


class Compiled(NamedTuple):
    """A pattern as the inference process takes it."""

    packed: bytes
    min_length: int
    matches_empty: bool


class Api(LitSpec):
    """All routes, and what they need."""

    def __init__(self, settings: Settings, checkpoint: Checkpoint, state: HttpState):
        super().__init__()
        self.api_path = "/generate"
        self.settings = settings
        self.checkpoint = checkpoint
        self.tokenizer = checkpoint.tokenizer
        self.state = state
        self.client: EngineClient | None = None  # these two from `running`, in an HTTP process
        self.metrics: Metrics | None = None
        self.tracer: Tracer | None = None  # likewise, if traces are wanted
        self.devices: list[str] = []  # from build_server
        self._created = int(time.time())
        self._exposition = Exposition(
            settings.model_name, checkpoint, vllm_names=settings.metrics_vllm_names,
            restarts=lambda: state.num_worker_restarts,
        )  # fmt: skip
        self._compile = functools.lru_cache(maxsize=256)(self._compile_anew)
        self.add_endpoint("/generate", self.generate, ["GET", "POST"])
        for path, endpoint in (
            ("/v1/completions", self.completions),
            ("/v1/score", self.score),
            ("/v1/next", self.next),
            ("/tokenize", self.tokenize),
            ("/detokenize", self.detokenize),
        ):
            self.add_endpoint(path, endpoint, ["POST"])
        for path, question in (
            ("/tokenizer_info", self.tokenizer_info),
            ("/v1/models", self.models),
            ("/v1/models/{model}", self.model),
            ("/info", self.info),
            ("/livez", self.livez),
            ("/readyz", self.readyz),
            ("/health", self.readyz),
            ("/metrics", self.prometheus),
        ):
            self.add_endpoint(path, question, ["GET", "HEAD"])

    @property
    def stream(self) -> bool:  # LitServe would compress the answers of an API that does not stream
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {"api_path": self.api_path}  # all that LitServe needs of it in the worker

    def setup(self, server: LitServer) -> None:
        """LitServe would hand over its own queues here; `running` takes the transport instead."""

    @asynccontextmanager
    async def running(self, transport: SocketTransport) -> AsyncIterator[None]:
        """The life of an HTTP process."""
        loop = asyncio.get_running_loop()
        process = f"http-{self.response_queue_id}"
        self.metrics = Metrics(self.settings.model_name, CollectorRegistry(), process, later=loop.call_later)
        self.client = EngineClient(transport, self.response_queue_id)
        if self.settings.otlp_traces_endpoint is not None:
            from service.observe.tracing import Tracer  # loads OpenTelemetry

            self.tracer = Tracer(self.settings.otlp_traces_endpoint, self.settings.model_name, process)
        async with self.client.connected():
            yield
        self.metrics.flush()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.shutdown)

    # -- generation --

    async def generate(self, request: Request) -> Response:
        """Continue a text. GET takes the fields from the query and streams, for a browser's EventSource."""
        if request.method == "POST":
            return await self._generate(request, parse(GenerateRequest, await request.body()), Answer)
        if request.headers.get("last-event-id") == EVENT_SOURCE_END:
            return Response(status_code=204)  # EventSource would ask again and again
        fields: dict[str, Any] = dict(request.query_params)
        if "stop" in fields:
            fields["stop"] = request.query_params.getlist("stop")
        body = parse(GenerateRequest, fields | {"stream": "true"})
        return await self._generate(request, body, Answer, for_event_source=True)

    async def completions(self, request: Request) -> Response:
        """Continue a text, as OpenAI's completions."""
        return await self._generate(request, parse(CompletionRequest, await request.body()), CompletionAnswer)

    async def _generate(
        self, request: Request, body: GenerationRequest, form: type[Answer], for_event_source: bool = False
    ) -> Response:
        arrived_at = request.scope["chargpt.arrived_at"]
        self._check_model(body)
        prompts, k = body.prompts, self._num_candidates(body)
        self._check_limits(body, k)
        encoder = Encoder(self.tokenizer, self.settings, body)
        ids = [
            self._prompt_ids(encoder, prompt, i if isinstance(body.prompt, list) else None)
            for i, prompt in enumerate(prompts)
        ]
        suffix = encoder.encode(body.suffix, "suffix") if body.suffix else []
        if body.suffix and not suffix:
            raise ApiError(400, "suffix: none of its characters is in the vocabulary", param="suffix")
        seeds = body.seed
        if not isinstance(seeds, list):
            seeds = [secrets.randbits(53) if seeds is None else seeds for _ in prompts]
        template, sampling = await self._template(body), self._sampling(body)
        if suffix:
            template.logprobs, template.logprob_ids = 0, (suffix[0],)
        elif k > body.n and template.logprobs is None:
            template.logprobs = 0  # to rank them by
        submits = [
            msgspec.structs.replace(
                template,
                prompt=prompt or self._beginning("prompt"),
                sampling=msgspec.structs.replace(sampling, seed=(seed + j) % (MAX_SEED + 1)),
                score_from=1 if body.echo and template.logprobs is not None and len(prompt) > 1 else None,
            )
            for prompt, seed in zip(ids, seeds, strict=True)
            for j in range(k)
        ]
        echo = [self.tokenizer.decode(prompt) for prompt in ids for _ in range(k)] if body.echo else None
        request.scope["chargpt.work"] = Work(sum(map(len, ids)))
        job: Run | Ranked
        if suffix or k > body.n:
            job = Ranked(
                lambda submits, echo: self._run(request, submits, echo=echo),
                submits,
                n=body.n,
                num_candidates=k,
                suffix=suffix,
                echo=echo,
                give_logprobs=body.logprobs is not None,
                receptive_field=self.checkpoint.receptive_field,
            )
        else:
            interval = (
                body.stream_interval if body.stream_interval is not None else self.settings.stream_interval_seconds
            )
            job = self._run(request, submits, echo=echo, interval=interval if body.stream else None)
        answer = form(
            request.scope["chargpt.request_id"],
            self.settings.model_name,
            self._receipt(encoder, seeds),
            lambda id: self.tokenizer.characters[id],
            include_usage=body.stream_options.include_usage,
            continuous_usage=body.stream_options.continuous_usage_stats,
        )
        return GenerationResponse(
            job,
            self._busy(),
            answer,
            arrived_at,
            num_prompt_tokens=sum(map(len, ids)),
            stream=body.stream,
            end=b"id: %b\n" % EVENT_SOURCE_END.encode() + Answer.DONE if for_event_source else Answer.DONE,
            keep_alive_seconds=self.settings.keep_alive_seconds,
        )

    def _busy(self) -> contextlib.AbstractContextManager[None]:
        return self.state.busy(self.response_queue_id)

    def _receipt(self, encoder: Encoder, seeds: Sequence[int] = ()) -> Receipt:
        if self.metrics is not None:
            self.metrics.unknown_characters("replace", encoder.replaced)
            self.metrics.unknown_characters("drop", encoder.dropped)
        return Receipt(self.checkpoint.digest, list(seeds), encoder.replaced, encoder.dropped)

    def _identity(self, request: Request) -> dict[str, Any]:
        return {"id": request.scope["chargpt.request_id"], "model": self.settings.model_name}

    def _num_candidates(self, body: GenerationRequest) -> int:
        """How many sequences are sampled for each prompt."""
        if body.best_of is not None:
            return body.best_of
        if not body.suffix:
            return body.n
        return max(body.n, min(SUFFIX_CANDIDATES, self.settings.max_prompts // max(1, len(body.prompts))))

    def _check_limits(self, body: GenerationRequest, num_candidates: int) -> None:
        """Hold a request to what this server and its model allow."""
        settings, count = self.settings, len(body.prompts)
        if not 1 <= count * num_candidates <= settings.max_prompts:
            param = "prompt" if num_candidates == 1 else "n" if body.best_of is None else "best_of"
            given = f"{count}" if num_candidates == 1 else f"{count} × {num_candidates}"
            message = f"1 to {settings.max_prompts} sequences (prompts × n or best_of) are allowed, got {given}"
            raise ApiError(400, f"{param}: {message}", param=param)
        if "max_tokens" not in body.model_fields_set:
            body.max_tokens = min(body.max_tokens, settings.max_tokens)
        for param in ("max_tokens", "min_tokens"):
            if getattr(body, param) > settings.max_tokens:
                message = f"{param}: at most {settings.max_tokens}, got {getattr(body, param)}"
                raise ApiError(400, message, param=param)
        vocab_size = self.tokenizer.vocab_size
        if body.logprobs is not None and body.logprobs > vocab_size:
            message = f"logprobs: at most the vocabulary's {vocab_size} characters, got {body.logprobs}"
            raise ApiError(400, message, param="logprobs")

    def _run(self, request: Request, submits: list[Submit], **options: Any) -> Run:
        assert self.client is not None and self.metrics is not None
        if self.state.is_draining:
            self.metrics.request_rejected("shutting_down", len(submits))
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after_seconds=1)
        request_id, arrived_at = request.scope["chargpt.request_id"], request.scope["chargpt.arrived_at"]
        for submit in submits:
            submit.request_id = request_id
        run = Run(self.client, self.metrics, self.tokenizer, submits, arrived_at, request_id=request_id, **options)
        request.scope["chargpt.work"].runs.append(run)
        return run

    def _check_model(self, body: ModelRequest) -> None:
        if body.model is not None:
            self._check_name(body.model)

    def _check_name(self, name: str) -> None:
        if name != self.settings.model_name:
            message = f"model {name!r} is not served here; {self.settings.model_name!r} is"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _prompt_ids(self, encoder: Encoder, prompt: str | list[int], place: int | None) -> list[int]:
        """The ids of a prompt, within all limits; `place` is its index where several were sent."""
        name = "prompt" if place is None else f"prompt.{place}"
        if len(prompt) > self.settings.max_prompt_characters:
            message = f"{name}: at most {self.settings.max_prompt_characters} characters, got {len(prompt)}"
            raise ApiError(400, message, param="prompt")
        if isinstance(prompt, list):
            self._check_ids(prompt, "prompt", name)
            return prompt
        return encoder.encode(prompt, "prompt", place)

    def _check_ids(self, ids: list[int], param: str, name: str | None = None) -> None:
        wrong = next((id for id in ids if id >= self.tokenizer.vocab_size), None)
        if wrong is not None:
            message = f"{name or param}: ids are 0 to {self.tokenizer.vocab_size - 1}, got {wrong}"
            raise ApiError(400, message, param=param)

    def _beginning(self, param: str) -> list[int]:
        """What an empty text stands for: the beginning of a text."""
        if "\n" not in self.tokenizer:
            raise ApiError(400, f"{param}: must not be empty, as this model knows no line break", param=param)
        return self.tokenizer.encode("\n")

    def _timeout(self, body: ModelRequest) -> float:
        longest = self.settings.request_timeout_seconds
        return longest if body.timeout_seconds is None else min(body.timeout_seconds, longest)

    def _sampling(self, body: GenerationRequest) -> SamplingParams:
        return SamplingParams(
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            min_p=body.min_p,
            typical_p=body.typical_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=self._logit_bias(body),
        )

    def _logit_bias(self, body: GenerationRequest) -> tuple[tuple[int, float], ...]:
        """Pairs of an id and its bias."""
        biases: dict[int, float] = {}
        given = body.logit_bias
        for key, bias in given.items() if isinstance(given, dict) else given:
            if isinstance(given, dict) and isinstance(key, str) and key.isascii() and key.isdigit():
                id = int(key) if len(key) <= 10 else self.tokenizer.vocab_size
            elif isinstance(key, str) and key in self.tokenizer:
                id = self.tokenizer.encode(key)[0]
            else:
                id = key if isinstance(key, int) else self.tokenizer.vocab_size
            if id >= self.tokenizer.vocab_size:
                message = (
                    "must name characters of the vocabulary or ids of "
                    f"0 to {self.tokenizer.vocab_size - 1}, with biases of -100 to 100, got {key!r}: {bias!r}"
                )
                raise ApiError(400, f"logit_bias: {message}", param="logit_bias")
            if id in biases:
                raise ApiError(400, f"logit_bias: names {key!r}, id {id}, twice", param="logit_bias")
            biases[id] = bias
        return tuple(biases.items())

    async def _template(self, body: GenerationRequest) -> Submit:
        """What the sequences of a request have in common."""
        submit = Submit(
            0,
            [],
            body.max_tokens,
            SamplingParams(),
            self._timeout(body),
            # A stop string with a character that the model does not have can never appear.
            stop=tuple(tuple(self.tokenizer.encode(s)) for s in body.stops if all(c in self.tokenizer for c in s)),
            include_stop=body.include_stop_str_in_output,
            min_tokens=body.min_tokens,
            logprobs=body.logprobs,
            priority=2 * body.priority,
        )
        allowed = None if body.allowed_characters is None else self._allowed_characters(body.allowed_characters)
        if body.stop_regex is not None:
            stop_pattern = await self._compiled("stop_regex", body.stop_regex, None)
            if stop_pattern.matches_empty:
                raise ApiError(400, "stop_regex: must not match the empty text", param="stop_regex")
            submit.stop_pattern = stop_pattern.packed
        if body.regex is not None or body.choice is not None:
            param = "regex" if body.choice is None else "choice"
            constraint = await self._compiled(param, body.regex or tuple(body.choice or ()), allowed)
            if constraint.min_length > body.max_tokens:
                raise ApiError(
                    400,
                    f"{param}: the shortest match has {constraint.min_length} characters, more than max_tokens, "
                    f"{body.max_tokens}",
                    param=param,
                )
            submit.constraint = constraint.packed
        elif allowed is not None:
            submit.constraint = any_of(allowed, self.tokenizer.characters).pack()
            submit.may_leave = False
        return submit

    def _allowed_characters(self, text: str) -> frozenset[str]:
        unknown = [(i, c) for i, c in enumerate(text) if c not in self.tokenizer]
        if unknown:
            message = f"allowed_characters: {_named(unknown)}"
            raise ApiError(400, message, param="allowed_characters", code="unknown_character")
        return frozenset(text)

    async def _compiled(self, param: str, pattern: str | tuple[str, ...], allowed: frozenset[str] | None) -> Compiled:
        compiled = await asyncio.to_thread(self._compile, param, pattern, allowed)
        if isinstance(compiled, RegexError):
            raise ApiError(400, f"{param}: {compiled}", param=param, code="invalid_pattern")
        return compiled

    def _compile_anew(
        self, param: str, pattern: str | tuple[str, ...], allowed: frozenset[str] | None
    ) -> Compiled | RegexError:
        characters = self.tokenizer.characters
        try:
            if isinstance(pattern, tuple):
                automaton = compile_choice(pattern, characters, allowed=allowed)
            else:
                limits: dict[str, int] = {"max_characters": self.settings.max_regex_characters}
                if param == "stop_regex":
                    limits["max_states"] = MAX_STOP_STATES
                automaton = compile_regex(pattern, characters, allowed=allowed, **limits)
        except RegexError as error:
            return error
        return Compiled(automaton.pack(), automaton.min_length, bool(automaton.accepting[0]))

    # -- the model's opinion --

    async def score(self, request: Request) -> Response:
        """The log-likelihood of texts, or of continuations of a prefix, character by character."""
        arrived_at = request.scope["chargpt.arrived_at"]
        body = parse(ScoreRequest, await request.body())
        self._check_model(body)
        encoder = Encoder(self.tokenizer, self.settings, body)
        if body.texts is not None:
            param, texts, before = "texts", [body.texts] if isinstance(body.texts, str) else body.texts, []
        else:
            param, texts = "continuations", body.continuations or []
            before = encoder.encode(body.prefix, "prefix") or self._beginning("prefix")
        if not 1 <= len(texts) <= self.settings.max_score_texts:
            message = f"{param}: 1 to {self.settings.max_score_texts} texts are allowed, got {len(texts)}"
            raise ApiError(400, message, param=param)
        places = [i if isinstance(body.texts, list) or not body.texts else None for i in range(len(texts))]
        ids = [encoder.encode(text, param, place) for text, place in zip(texts, places, strict=True)]
        first = max(1, len(before))  # the first place that is scored
        # Those of like length go together, and after what is to be continued.
        order = sorted((i for i in range(len(ids)) if len(before) + len(ids[i]) > first), key=lambda i: len(ids[i]))
        submits = [
            Submit(
                0, before + ids[i], 0, SamplingParams(), self._timeout(body),
                logprobs=0, score_from=first, priority=2 * body.priority + 1,
            )
            for i in order
        ]  # fmt: skip
        num_prompt_tokens = len(before) + sum(map(len, ids))
        request.scope["chargpt.work"] = Work(num_prompt_tokens)
        window = max(1, self.settings.max_running_requests // 4)
        run = self._run(request, submits, window=window) if submits else None

        async def answer() -> dict[str, Any]:
            if run is not None:
                async for _ in run:
                    pass
            nats: list[list[float]] = [[] for _ in ids]
            for place, i in enumerate(order):
                assert run is not None
                nats[i] = [-(c.logprob or 0.0) for c in run.prompt_logprobs(place)]
            sums = [math.fsum(values) for values in nats]
            ranks = {i: rank for rank, i in enumerate(sorted(range(len(sums)), key=lambda i: (sums[i], i)), 1)}
            data = []
            for i, values in enumerate(nats):
                mean = sums[i] / len(values) if values else None
                item: dict[str, Any] = {
                    "index": i,
                    "characters": len(values),
                    "nats": sums[i],
                    "nats_per_character": mean,
                    "bits_per_character": None if mean is None else mean / math.log(2),
                    "perplexity": None if mean is None else math.exp(mean),
                }
                if body.continuations is not None:
                    item["rank"] = ranks[i]
                if body.characters:
                    unscored: list[float | None] = [None] if not before and ids[i] else []
                    item["character_nats"] = unscored + [round(value, 7) for value in values]
                data.append(item)
            return self._identity(request) | {
                "object": "list",
                "data": data,
                "usage": self._prompt_usage(num_prompt_tokens),
            }

        return JobResponse(run, self._busy(), answer, self._receipt(encoder), arrived_at)

    async def next(self, request: Request) -> Response:
        """The distribution of the next character, and its entropy."""
        arrived_at = request.scope["chargpt.arrived_at"]
        body = parse(NextRequest, await request.body())
        self._check_model(body)
        encoder = Encoder(self.tokenizer, self.settings, body)
        prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if not 1 <= len(prompts) <= self.settings.max_prompts:
            message = f"prompt: 1 to {self.settings.max_prompts} prompts are allowed, got {len(prompts)}"
            raise ApiError(400, message, param="prompt")
        ids = [
            self._prompt_ids(encoder, prompt, i if isinstance(body.prompt, list) else None)
            for i, prompt in enumerate(prompts)
        ]
        submits = [
            Submit(
                0, prompt or self._beginning("prompt"), 1, SamplingParams(temperature=0.0), self._timeout(body),
                logprobs=self.tokenizer.vocab_size, priority=2 * body.priority,
            )
            for prompt in ids
        ]  # fmt: skip
        request.scope["chargpt.work"] = Work(sum(map(len, ids)))
        run = self._run(request, submits)

        async def answer() -> dict[str, Any]:
            data: list[dict[str, Any]] = [{} for _ in ids]
            async for pieces in run:
                for piece in pieces:
                    data[piece.number] = {"index": piece.number} | self._distribution((piece.logprobs or [])[0])
            return self._identity(request) | {
                "object": "list",
                "data": data,
                "usage": self._prompt_usage(sum(map(len, ids))),
            }

        return JobResponse(run, self._busy(), answer, self._receipt(encoder), arrived_at)

    def _distribution(self, row: CharacterLogprob) -> dict[str, Any]:
        entropy = -math.fsum(math.exp(value) * value for _, value in row.top)
        return {
            "entropy_nats": entropy,
            "entropy_bits": entropy / math.log(2),
            "distribution": [
                {
                    "character": self.tokenizer.characters[id],
                    "id": id,
                    "probability": math.exp(value),
                    "logprob": value,
                }
                for id, value in row.top
            ],
        }

    @staticmethod
    def _prompt_usage(num_prompt_tokens: int) -> dict[str, int]:
        return {"prompt_tokens": num_prompt_tokens, "completion_tokens": 0, "total_tokens": num_prompt_tokens}

    # -- information --

    async def tokenize(self, request: Request) -> Response:
        """The ids of a text, one for each character."""
        body = parse(TokenizeRequest, await request.body())
        self._check_model(body)
        encoder = Encoder(self.tokenizer, self.settings, body)
        tokens = encoder.encode(body.prompt, "prompt")
        return json_response(
            {
                "count": len(tokens),
                "max_model_len": self.settings.max_prompt_characters,
                "tokens": tokens,
                "replaced_characters": encoder.replaced,
                "dropped_characters": encoder.dropped,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        """The text of ids."""
        body = parse(DetokenizeRequest, await request.body())
        self._check_model(body)
        self._check_ids(body.tokens, "tokens")
        return json_response({"prompt": self.tokenizer.decode(body.tokens)})

    async def tokenizer_info(self, request: Request) -> Response:
        """What lm-evaluation-harness wants to know of a tokenizer that it reaches over HTTP, as vLLM tells it."""
        beginning = "\n" if "\n" in self.tokenizer else None
        return json_response(
            {
                "tokenizer_class": "CharTokenizer",
                "vocab_size": self.tokenizer.vocab_size,
                "bos_token": beginning,
                "eos_token": None,
                "pad_token": None,
            }
        )

    async def models(self, request: Request) -> Response:
        """The served model, as OpenAI lists models."""
        return JSONResponse({"object": "list", "data": [self._model_card]})

    async def model(self, request: Request) -> Response:
        """The served model."""
        self._check_name(request.path_params["model"])
        return JSONResponse(self._model_card)

    @property
    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self.settings.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "chargpt",
            "max_model_len": self.settings.max_prompt_characters,
        }

    async def info(self, request: Request) -> Response:
        """What is served: the checkpoint, its losses, the limits, versions and devices."""
        settings, checkpoint = self.settings, self.checkpoint
        return JSONResponse(
            {
                "model": {
                    "name": settings.model_name,
                    "checkpoint_sha256": checkpoint.digest,
                    "config": checkpoint.hyperparameters,
                    "vocabulary": "".join(checkpoint.tokenizer.characters),
                    "training": checkpoint.training,
                },
                "limits": {
                    name: getattr(settings, name)
                    for name in (
                        "max_prompts",
                        "max_prompt_characters",
                        "max_tokens",
                        "max_score_texts",
                        "max_regex_characters",
                        "max_body_bytes",
                        "max_running_requests",
                        "max_queued_requests",
                        "request_timeout_seconds",
                    )
                },
                "unknown_characters": settings.unknown_characters,
                "devices": self.devices,
                "versions": {name: version(name) for name in ("chargpt", "torch", "litserve")},
            }
        )

    # -- probes --

    async def livez(self, request: Request) -> Response:
        """200 while this process answers."""
        return JSONResponse({"status": "alive"})

    async def readyz(self, request: Request) -> Response:
        """200 while requests are accepted, 503 while starting, without a worker, or shutting down."""
        if self.state.is_draining:
            status = "draining"
        elif self.client is None or not self.client.is_ready:
            status = "no worker"
        else:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": status}, status_code=503)

    async def prometheus(self, request: Request) -> Response:
        """The metrics of all processes in Prometheus' text format, or in OpenMetrics where Accept asks for it."""
        if self.metrics is not None:
            self.metrics.flush()
        text, content_type = await asyncio.to_thread(self._exposition.page, request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})
