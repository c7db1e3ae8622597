"""A baseline for the path: FastAPI and uvicorn in one process, returning the service's bytes without an engine.

    python -m tests.bench.plain --port 8000 --answers FILE [--log-level warning]

Validates the body and answers with JSON or a stream of events, on uvloop and httptools. Logs each request, as uvicorn
does, unless the level is warning. FILE is JSON: `whole`, a response of one character; `event`, an event with TEXT in
place of its text; `last`, the end of a stream.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel


class Request(BaseModel):
    prompt: str
    max_tokens: int
    stream: bool = False


def build_app(answers: dict[str, str]) -> FastAPI:
    app = FastAPI()
    whole, event, last = (answers[name] for name in ("whole", "event", "last"))

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

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--log-level", default="info")
    args = parser.parse_args()
    app = build_app(json.loads(args.answers.read_text(encoding="utf-8")))
    uvicorn.run(
        app, port=args.port, loop="uvloop", http="httptools", log_level=args.log_level,
        access_log=args.log_level == "info",
    )  # fmt: skip
