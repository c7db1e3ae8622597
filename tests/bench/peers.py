"""The servers that are compared over HTTP: how each is started, asked and read.

A family is a product; a system is a family with the flags of one of its variants. For each number of clients the
fastest variant of a family stands for it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.toolbox import load
from tests.toolbox.http import DONE, event_data
from tests.toolbox.launch import Server, module

from . import llama

TEMPERATURE = 0.8
FAMILIES = {  # titles in tables
    "ours": "this service",
    "llama": "llama.cpp",
    "transformers": "transformers",
    "stock": "stock LitServe",
    "vllm": "vLLM",
}


@dataclass(frozen=True)
class System:
    family: str
    name: str  # of the variant
    command: tuple[str, ...] = ()  # without the port
    ready: str = "/health"  # path that answers 200
    streams: tuple[bool, ...] = (False, True)  # what it can do: whole answers, streams
    model: str = ""  # as its API calls it

    def start(self, log: Path) -> Server:
        return Server(self.command, log, self.ready)

    def request(self, prompt: str | list[str], length: int, streamed: bool, seed: int) -> bytes:
        """For `length` characters of the model's whole distribution at one temperature, no stop, nothing cached."""
        body: dict[str, Any] = {"prompt": prompt, "stream": streamed, "seed": seed, "temperature": TEMPERATURE}
        if self.family == "ours":
            return load.post("/generate", body | {"max_tokens": length})
        if self.family == "llama":
            body |= {"n_predict": length, "samplers": ["temperature"], "ignore_eos": True, "cache_prompt": False}
            return load.post("/completion", body)
        if self.family == "stock":
            return load.post("/generate", {"prompt": prompt, "max_tokens": length})
        body |= {"model": self.model, "max_tokens": length}
        if self.family == "vllm":
            body["ignore_eos"] = True
        else:  # it samples only if a generation config says so; greedy, its default, costs it less
            del body["temperature"]
        return load.post("/v1/completions", body)

    @property
    def marker(self) -> bytes:
        """Occurs once per event that holds text."""
        return {"llama": b'"content":', "stock": b'{"text'}.get(self.family, load.EVENT)

    def text(self, body: bytes, streamed: bool) -> str:
        """The text of an answer, or of the whole events of a stream that was cut."""
        if not streamed:
            return self.text_in(json.loads(body))
        return "".join(map(self.text_of_event, body.split(self.separator)))

    @property
    def separator(self) -> bytes:
        """Ends an event of a stream."""
        return b"\n" if self.family == "stock" else b"\n\n"

    def text_of_event(self, event: bytes) -> str:
        data = event if self.family == "stock" else event_data(event)
        return self.text_in(json.loads(data)) if data and data != DONE.encode() else ""

    def text_in(self, content: dict[str, Any]) -> str:
        if self.family == "llama":
            return str(content.get("content", ""))
        choices = content.get("choices", [content] if "text" in content else [])
        return "".join(choice["text"] for choice in choices)


# Variants


def ours(checkpoint: Path, options: Mapping[str, object] | None = None) -> System:
    """The service as it comes, but for `options`."""
    flags = {"checkpoint": checkpoint, "log_level": "warning", **(options or {})}
    return System("ours", "default", module("service", **flags), "/readyz")


def llama_cpp(
    programs: Mapping[str, Path], variants: Iterable[llama.Variant], threads: int, slots: int
) -> list[System]:
    return [
        System("llama", variant.name, tuple(llama.server_command(programs, variant, threads, slots)))
        for variant in variants
    ]


def transformers_serve(checkpoint: Path, device: str = "cpu") -> list[System]:
    """In each dtype, one request after another and with continuous batching."""
    program, model = str(Path(sys.executable).with_name("transformers")), str(checkpoint.resolve())
    common = ("--host=127.0.0.1", "--log-level=error", model)
    found = []
    for dtype in ("float32", "bfloat16"):
        for name, flags in ((dtype, ()), (f"{dtype}, continuous batching", ("--continuous-batching",))):
            command = (program, "serve", f"--device={device}", f"--dtype={dtype}", *flags, *common)
            found.append(System("transformers", name, command, model=model))
    return found


def stock_litserve(checkpoint: Path, threads: int) -> list[System]:
    """In each dtype, for whole answers and for streams."""
    return [
        System(
            "stock",
            f"{dtype}, {loop}",
            module("tests.bench.servers", "stock", checkpoint=checkpoint, threads=threads, dtype=dtype, loop=loop),
            streams=(loop == "stream",),
        )
        for dtype in ("float32", "bfloat16")
        for loop in ("whole", "stream")
    ]
