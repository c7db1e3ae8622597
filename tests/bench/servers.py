"""What the service is compared with, one of three servers:

    python -m tests.bench.servers stock --port 8000 --checkpoint DIR --loop whole     a batch runs to its end
    python -m tests.bench.servers stock --port 8000 --checkpoint DIR --loop stream    the same, streamed
    python -m tests.bench.servers stock --port 8000                                   without a model
    python -m tests.bench.servers plain --port 8000 --answers FILE [--log-level warning]
    python -m tests.bench.servers stub --port 8000 --checkpoint DIR                   flags as of python -m service

stock: what a user would build, LitServe with transformers as their documentation has it. POST /generate takes
{"prompt", "max_tokens"} and returns {"text": …}: one JSON object, or with --loop stream one per character. A batch
takes what waits and runs until its longest completion is done. Without a model, POST /whole returns one character.

plain: FastAPI and uvicorn in one process, which return the service's bytes without an engine. It validates the body
and answers with JSON or a stream of events, on uvloop and httptools. It logs each request, as uvicorn does, unless the
level is warning. FILE is JSON: `whole`, a response of one character; `event`, an event with TEXT in place of its text;
`last`, the end of a stream.

stub: the service with an engine that has every character ready. Entry point, processes and the worker's loop are the
real ones. CHARGPT_STUB_STEP_SECONDS is the minimum time between the starts of two steps (default 0).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import litserve
import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from service.engine import worker
from service.engine.scheduler import BusyError
from service.wire import Delta, Submit

# Stock LitServe

MAX_BATCH = 64
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 0}


class Whole(litserve.LitAPI):
    """One character, without a model."""

    def setup(self, device: str) -> None:
        pass

    def decode_request(self, request):  # an annotation would become the schema of the body
        return request["prompt"], request["max_tokens"]

    def batch(self, inputs: list[tuple[str, int]]) -> list[tuple[str, int]]:
        return inputs

    def predict(self, inputs: Any) -> Any:
        return "a"

    def encode_response(self, output: str) -> dict[str, str]:
        return {"text": output}


class Stream(Whole):
    """Characters, without a model."""

    def predict(self, inputs: Any) -> Any:
        for number in range(max(length for _, length in inputs)):
            yield ["a" if number < length else "" for _, length in inputs]

    def encode_response(self, outputs: Iterator[list[str]]) -> Iterator[list[dict[str, str]]]:
        for texts in outputs:
            yield [{"text": text} for text in texts]


class ModelWhole(Whole):
    def __init__(self, checkpoint: Path, dtype: str, threads: int, **options: Any):
        super().__init__(**options)
        self.checkpoint, self.dtype, self.threads = checkpoint, dtype, threads

    def setup(self, device: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if self.threads:
            torch.set_num_threads(self.threads)
        dtype = getattr(torch, self.dtype)
        self.tokenizer = AutoTokenizer.from_pretrained(self.checkpoint, padding_side="left", pad_token="\n")
        self.model = AutoModelForCausalLM.from_pretrained(self.checkpoint, dtype=dtype).to(device).eval()

    def generate(self, prompts: tuple[str, ...], max_tokens: int, **options: Any) -> Any:
        """The ids of left-padded prompts and answers."""
        inputs = self.tokenizer(list(prompts), return_tensors="pt", padding=True).to(self.model.device)
        return self.model.generate(**inputs, max_new_tokens=max_tokens, **SAMPLING, **options)

    def predict(self, inputs: list[tuple[str, int]]) -> list[str]:
        prompts, lengths = zip(*inputs, strict=True)
        ids = self.generate(prompts, max(lengths))[:, -max(lengths) :]
        return ["".join(self.tokenizer.decode(row[:n])) for row, n in zip(ids, lengths, strict=True)]


class ModelStream(ModelWhole):
    encode_response = Stream.encode_response

    def predict(self, inputs: list[tuple[str, int]]) -> Iterator[list[str]]:
        prompts, lengths = zip(*inputs, strict=True)
        steps = Steps()

        def generate() -> None:
            try:
                self.generate(prompts, max(lengths), streamer=steps)
            finally:
                steps.end()

        threading.Thread(target=generate).start()
        next(steps, None)  # the prompts
        for number, ids in enumerate(steps):
            characters = [self.tokenizer.decode(id) for id in ids]
            yield [c if number < length else "" for c, length in zip(characters, lengths, strict=True)]


class Steps:
    """Yields the ids of each step of a batch; transformers' own streamers support one text only."""

    def __init__(self) -> None:
        self._steps: queue.Queue[list[Any] | None] = queue.Queue()
        self._left = iter(self._steps.get, None)

    def put(self, ids: Any) -> None:
        self._steps.put(ids.tolist())

    def end(self) -> None:
        self._steps.put(None)

    def __iter__(self) -> Iterator[list[Any]]:
        return self

    def __next__(self) -> list[Any]:
        return next(self._left)


def stock(args: argparse.Namespace) -> None:
    import torch

    batches = {"api_path": "/generate", "max_batch_size": MAX_BATCH, "stream": args.loop == "stream"}
    if args.checkpoint is None:
        apis: list[Whole] = [Stream(**batches), Whole(api_path="/whole")]
    else:
        api = ModelStream if args.loop == "stream" else ModelWhole
        apis = [api(args.checkpoint, args.dtype, args.threads, **batches)]
    accelerator = "cuda" if torch.cuda.is_available() else "cpu"  # "auto" takes the CPU unless torch is imported
    litserve.LitServer(apis, accelerator=accelerator, timeout=False).run(
        host="127.0.0.1", port=args.port, generate_client_file=False,
        log_level="warning" if args.checkpoint else "info",
    )  # fmt: skip


# Plain FastAPI


class Request(BaseModel):
    prompt: str
    max_tokens: int
    stream: bool = False


def plain(args: argparse.Namespace) -> None:
    answers = json.loads(args.answers.read_text(encoding="utf-8"))
    whole, event, last = (answers[name] for name in ("whole", "event", "last"))
    app = FastAPI()

    @app.post("/generate")
    async def generate(request: Request) -> Response:
        if not request.stream:
            return Response(whole, media_type="application/json")

        async def events() -> AsyncIterator[str]:
            for _ in range(request.max_tokens):
                yield event.replace("TEXT", "a")
                await asyncio.sleep(0)  # yield to other streams, as when waiting for the next character
            yield last

        return StreamingResponse(events(), media_type="text/event-stream")

    @app.get("/readyz")
    async def readyz() -> Response:
        return Response()

    uvicorn.run(
        app, port=args.port, loop="uvloop", http="httptools", log_level=args.log_level,
        access_log=args.log_level == "info",
    )  # fmt: skip


# The service around a stub


class StubEngine:
    """Has the interface of Engine and of its scheduler; runs all sequences at once, regardless of slots."""

    clock = staticmethod(time.monotonic)

    num_moved = 0  # sequences that have lost their slots

    def __init__(self, runner: Any, *, max_waiting: int = 1024):
        from service.engine.engine import StepStats

        self._new_stats = StepStats
        self.stats = StepStats()
        self.runner, self.config = runner, runner.config
        self.limit = runner.slots + max_waiting
        self.scheduler = self  # stands in for it
        self.num_waiting = 0
        self.is_saturated = False
        self.step_seconds = float(os.environ.get("CHARGPT_STUB_STEP_SECONDS", "0"))
        self._next_step = 0.0
        self._left: dict[int, tuple[Submit, int]] = {}  # sequence id -> (request, remaining characters)
        self._new: set[int] = set()  # ids of sequences that have emitted nothing yet
        self._ended: list[Delta] = []

    def generate(self, submits: list[Submit]) -> list[list[int]]:
        return [[1] * submit.max_tokens for submit in submits]

    def __len__(self) -> int:
        return len(self._left)

    @property
    def num_running(self) -> int:
        return len(self._left)

    @property
    def has_work(self) -> bool:
        return bool(self._left or self._ended)

    def __iter__(self) -> Iterator[Submit]:
        return iter([request for request, _ in self._left.values()])

    def expected_wait(self, request: Submit, rate: float | None) -> float:
        return 0.0

    def submit(self, request: Submit) -> None:
        if len(self._left) >= self.limit:
            raise BusyError(f"queue full (limit {self.limit})")
        self._left[request.id] = (request, request.max_tokens)
        self._new.add(request.id)

    def abort(self, id: int, reason: Any = "abort") -> None:
        if self._left.pop(id, None) is not None:
            self._ended.append(Delta(id, [], reason))

    def step(self) -> list[Delta]:
        now = self.clock()
        if self.step_seconds:
            time.sleep(max(0.0, self._next_step - now))
            now = self.clock()
            self._next_step = now + self.step_seconds
        self.stats = self._new_stats(self.clock)
        deltas, self._ended = self._ended, []
        for id, (request, left) in list(self._left.items()):
            left -= 1
            delta = Delta(id, [1])
            if id in self._new:
                self._new.remove(id)
                delta.scheduled_at = delta.prefilled_at = now
            if left:
                self._left[id] = (request, left)
            else:
                del self._left[id]
                delta.finish_reason, delta.ended_at = "length", now
            deltas.append(delta)
        self.stats.num_decode_rows = len(deltas)
        self.stats.num_decode_tokens = sum(len(delta.ids) for delta in deltas)
        self.stats.lap("decode")
        return deltas


class StubAPI(worker.EngineAPI):
    def setup(self, device: str) -> None:
        import service.engine.engine

        service.engine.engine.Engine = StubEngine
        super().setup(device)


def stub() -> int:
    worker.EngineAPI = StubAPI  # before the server imports it
    from service.__main__ import main

    return main()


def main() -> int:
    if sys.argv[1:2] == ["stub"]:
        del sys.argv[1]
        return stub()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", choices=("stock", "plain"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--loop", choices=("whole", "stream"), default="stream", help="(default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's default")
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--log-level", default="info")
    args = parser.parse_args()
    {"stock": stock, "plain": plain}[args.server](args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
