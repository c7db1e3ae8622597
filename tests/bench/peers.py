"""The servers that are compared over HTTP: how each is started, asked and read.

A family is a product; a system is a family with the flags of one of its variants. For each number of clients the
fastest variant of a family stands for it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.toolbox.http import DONE, events, text_of

from . import llama, load
from .servers import Server, module

TEMPERATURE = 0.8

# Family: title in tables.
FAMILIES = {
    "ours": "this service",
    "llama": "llama.cpp's server",
    "transformers": "`transformers serve`",
    "stock": "stock LitServe",
    "vllm": "vLLM",
}


@dataclass(frozen=True)
class System:
    """One variant of a family."""

    family: str
    name: str  # of the variant
    command: tuple[str, ...]  # without the port
    ready: str  # path that answers 200
    streams: tuple[bool, ...] = (False, True)  # what it can do: whole answers, streams

    def start(self, log: Path) -> Server:
        return Server(self.command, log, self.ready)

    def request(self, prompt: str, length: int, streamed: bool, seed: int) -> bytes:
        return REQUESTS[self.family](self, prompt, length, streamed, seed)

    def text(self, reply: load.Reply, streamed: bool) -> str:
        """The text of an answer."""
        parts = load.dechunked(reply.parts) if reply.is_chunked else reply.parts
        body = b"".join(data for _, data in parts).decode()
        return TEXTS[self.family](body, streamed)

    @property
    def marker(self) -> bytes:
        """Occurs once per event that holds text."""
        return {"llama": b'"content":', "stock": b'{"text'}.get(self.family, load.EVENT)


# Requests: `length` characters of the model's whole distribution at one temperature, no stop, nothing cached.


def ask_ours(_: System, prompt: str, length: int, streamed: bool, seed: int) -> bytes:
    body = {"prompt": prompt, "max_tokens": length, "temperature": TEMPERATURE, "stream": streamed, "seed": seed}
    return load.post("/generate", body)


def ask_llama(_: System, prompt: str, length: int, streamed: bool, seed: int) -> bytes:
    body = {"prompt": prompt, "n_predict": length, "temperature": TEMPERATURE, "stream": streamed, "seed": seed}
    return load.post("/completion", body | {"samplers": ["temperature"], "ignore_eos": True, "cache_prompt": False})


def ask_transformers(system: System, prompt: str, length: int, streamed: bool, seed: int) -> bytes:
    # It samples only if a generation config says so; greedy, its default, costs it less.
    body = {"model": system.command[-1], "prompt": prompt, "max_tokens": length, "stream": streamed, "seed": seed}
    return load.post("/v1/completions", body)


def ask_vllm(system: System, prompt: str, length: int, streamed: bool, seed: int) -> bytes:
    body = {"model": system.command[2], "prompt": prompt, "max_tokens": length, "stream": streamed, "seed": seed}
    return load.post("/v1/completions", body | {"temperature": TEMPERATURE, "ignore_eos": True})


def ask_stock(_: System, prompt: str, length: int, streamed: bool, seed: int) -> bytes:
    return load.post("/generate", {"prompt": prompt, "max_tokens": length})


REQUESTS: Mapping[str, Callable[[System, str, int, bool, int], bytes]] = {
    "ours": ask_ours,
    "llama": ask_llama,
    "transformers": ask_transformers,
    "stock": ask_stock,
    "vllm": ask_vllm,
}


# Answers


def sent_objects(body: str) -> Iterable[dict[str, Any]]:
    return (json.loads(data) for data in events(body.split("\n")) if data != DONE)


def text_of_ours(body: str, streamed: bool) -> str:
    return text_of(sent_objects(body)) if streamed else str(json.loads(body)["choices"][0]["text"])


def text_of_llama(body: str, streamed: bool) -> str:
    return "".join(each["content"] for each in (sent_objects(body) if streamed else [json.loads(body)]))


def text_of_transformers(body: str, streamed: bool) -> str:
    objects = sent_objects(body) if streamed else [json.loads(body)]
    return "".join(choice["text"] for each in objects for choice in each["choices"])


def text_of_stock(body: str, streamed: bool) -> str:
    return "".join(json.loads(line)["text"] for line in body.splitlines())


TEXTS: Mapping[str, Callable[[str, bool], str]] = {
    "ours": text_of_ours,
    "llama": text_of_llama,
    "transformers": text_of_transformers,
    "stock": text_of_stock,
    "vllm": text_of_transformers,
}


# Variants


def ours(checkpoint: Path, options: Mapping[str, object] | None = None) -> list[System]:
    """The service as it comes, with a slot for each client."""
    flags = {"checkpoint": checkpoint, "log_level": "warning", **(options or {})}
    return [System("ours", "default", module("service", **flags), "/readyz")]


def llama_cpp(
    programs: Mapping[str, Path], variants: Iterable[llama.Variant], threads: int, slots: int
) -> list[System]:
    return [
        System("llama", variant.name, tuple(llama.server_command(programs, variant, threads, slots)), "/health")
        for variant in variants
    ]


def transformers_serve(checkpoint: Path, device: str = "cpu") -> list[System]:
    """In each dtype, one request after another and with continuous batching."""
    found = []
    for dtype in ("float32", "bfloat16"):
        for name, flags in ((dtype, []), (f"{dtype}, continuous batching", ["--continuous-batching"])):
            command = [str(Path(sys.executable).with_name("transformers")), "serve"]
            command += [
                f"--device={device}",
                f"--dtype={dtype}",
                *flags,
                "--host=127.0.0.1",
                "--log-level=error",
                str(checkpoint.resolve()),
            ]
            found.append(System("transformers", name, tuple(command), "/health"))
    return found


def stock_litserve(checkpoint: Path, threads: int) -> list[System]:
    """In each dtype with each of its loops; LitServe's continuous batching can only stream."""
    return [
        System(
            "stock",
            f"{dtype}, {loop}",
            module("tests.bench.stock", checkpoint=checkpoint, threads=threads, dtype=dtype, loop=loop),
            "/health",
            (loop != "whole",),
        )
        for dtype in ("float32", "bfloat16")
        for loop in ("whole", "stream", "continuous")
    ]
