"""Measurements of engines in process: ours with each backend and dtype, and transformers, without sockets or text.

An engine lives in a fresh process of its own (`command.Remote`) and does one run when asked: `rows` sequences of a
prompt and an answer, all from the beginning. serve.py asks them in turns.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from service.engine.engine import Engine
from service.engine.runner import available_backends, open_runner
from service.model.checkpoint import Checkpoint
from service.wire import Submit

from .shapes import ANSWER, PROMPT, SAMPLING, VOCABULARY, Work, prompt, sampling

DTYPES = ("float32", "float64", "bfloat16")


def candidates() -> list[tuple[str, str]]:
    """Every (backend, dtype) to try; the constructor refuses those that this machine lacks."""
    return list(itertools.product(available_backends(), DTYPES))


def sequences(rows: int, length: int, characters: int = PROMPT) -> list[Submit]:
    """Sequences of equal lengths without stops; each row has its own prompt, sampling parameters and seed."""
    return [Submit(row, prompt(characters, row), length, sampling(row)) for row in range(rows)]


class Ours:
    """Our engine.

    backend, dtype: as `--backend` and `--dtype`.

    Raises:
        ValueError: they are not possible on this machine.
    """

    def __init__(self, folder: Path, backend: str, dtype: str, *, slots: int, threads: int, device: str):
        torch.set_num_threads(threads)
        self.checkpoint = Checkpoint.read(folder)
        self.runner = open_runner(self.checkpoint, backend, dtype, slots, threads, device)

    def about(self) -> dict[str, Any]:
        runner = self.runner
        stored = getattr(runner, "weight_dtype", runner.dtype)
        return {"backend": runner.backend, "dtype": runner.dtype, "weights": stored, "slots": runner.slots}

    def new_engine(self, waiting: int = 0) -> Engine:
        return Engine(self.runner, max_waiting=max(self.runner.slots, waiting))

    def run(self, rows: int, length: int = ANSWER, characters: int = PROMPT) -> dict[str, Any]:
        """Rates from the first prompt to the last character, and of decode alone; seconds and calls by phase."""
        engine = self.new_engine(rows)
        for sequence in sequences(rows, length, characters):
            engine.submit(sequence)
        phases: dict[str, float] = {}
        given = after_prefill = steps = 0
        started = prefilled = time.perf_counter()
        while engine.has_work:
            deltas = engine.step()
            given += sum(len(delta.ids) for delta in deltas)
            steps += 1
            for name, seconds in engine.stats.phases.items():
                phases[name] = phases.get(name, 0.0) + seconds
            if engine.stats.num_prefill_tokens:
                prefilled, after_prefill = time.perf_counter(), given
        ended = time.perf_counter()
        if given != rows * length:
            raise RuntimeError(f"the engine emitted {given} characters, not {rows} × {length}")
        phases["rest"] = max(0.0, ended - started - sum(phases.values()))
        return {
            "characters_per_second": given / (ended - started),
            "decode_characters_per_second": (given - after_prefill) / (ended - prefilled),
            "steps": steps,
            "phases": phases,
        }

    def full(self, rows: int) -> float:
        """Characters per second of turns that decode all `rows`, each with a full window."""
        W = self.runner.config.block_size
        engine = self.new_engine(rows)
        for sequence in sequences(rows, 4 * ANSWER, W):
            engine.submit(sequence)
        engine.step_seconds, given, taken = 1.0, 0, 0.0  # prompts run in few turns, beside which texts hardly grow
        is_full = False
        while engine.has_work and given < rows * 2 * ANSWER:
            started, was_full = time.perf_counter(), is_full
            engine.step()
            stats = engine.stats
            is_full = stats.num_decode_rows == rows and not stats.num_prefill_tokens
            if is_full and was_full:  # a turn waits for what the one before has launched
                given, taken = given + stats.num_decode_tokens, taken + time.perf_counter() - started
        if not taken:
            raise RuntimeError(f"no turn decoded all {rows} rows")
        return given / taken

    def profile(self, rows: int) -> list[dict[str, Any]]:
        """The kernels of a run over full windows with most of the device's time: name, calls, share."""
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            self.run(rows, 32, self.runner.config.block_size)
        kernels = [it for it in profiler.key_averages() if it.device_type == DeviceType.CUDA]
        kernels.sort(key=lambda it: it.self_device_time_total, reverse=True)
        whole = sum(it.self_device_time_total for it in kernels) or 1
        return [
            {"name": it.key[:120], "calls": it.count, "share": it.self_device_time_total / whole} for it in kernels[:20]
        ]

    def prefill(self, rows: int, characters: int) -> float:
        """Characters per second of the prompts of `rows` sequences that end with their first character."""
        engine = self.new_engine(rows)
        started = time.perf_counter()
        engine.generate(sequences(rows, 1, characters))
        return rows * characters / (time.perf_counter() - started)

    def work(self, work: list[Work]) -> float:
        """Characters per second when `work` arrives as over HTTP."""
        engine = self.new_engine(len(work))
        encode = self.checkpoint.tokenizer.encode
        waiting = [
            (item.at, Submit(i, encode(item.prompt), item.max_tokens, sampling(i))) for i, item in enumerate(work)
        ][::-1]
        given, started = 0, time.perf_counter()
        while waiting or engine.has_work:
            while waiting and waiting[-1][0] <= time.perf_counter() - started:
                engine.submit(waiting.pop()[1])
            if engine.has_work:
                given += sum(len(delta.ids) for delta in engine.step())
        return given / (time.perf_counter() - started)

    def texts(self, count: int, longest: int, *, alone: bool) -> list[str]:
        """A digest of each of `count` generations: one at a time, or in a random order under random load."""
        requests = random_requests(count, longest)
        engine, ids = self.new_engine(count), {request.id: [] for request in requests}
        steps: Iterable[None] = (
            one_by_one(engine, requests) if alone else at_random(engine, requests, self.runner.slots)
        )
        for _ in steps:
            for delta in engine.step():
                ids[delta.id] += delta.ids
        for request in requests:
            if len(ids[request.id]) != request.max_tokens:
                raise RuntimeError(f"expected {request.max_tokens} characters, got {len(ids[request.id])}")
        return [hashlib.sha256(bytes(ids[number])).hexdigest() for number in range(count)]


# Texts under load


def random_requests(count: int, longest: int) -> list[Submit]:
    """Requests 0 to count − 1 with random prompts, lengths and sampling parameters."""
    chance = random.Random(0)
    found = []
    for number in range(count):
        ids = [VOCABULARY.index(character) for character in prompt_of(chance)]
        found.append(Submit(number, ids, chance.randint(1, longest), sampling(number)))
    return found


def prompt_of(chance: random.Random) -> str:
    from .shapes import TEXT

    length = min(300, round(2 ** chance.uniform(0, 8.3)))
    start = chance.randrange(len(TEXT) - length)
    return TEXT[start : start + length]


def one_by_one(engine: Engine, requests: list[Submit]) -> Iterator[None]:
    """Submits each request when the one before has ended; each item is a step to run."""
    for request in requests:
        engine.submit(request)
        while engine.has_work:
            yield


def at_random(engine: Engine, requests: list[Submit], slots: int) -> Iterator[None]:
    """Submits bursts and trickles, in a random order, from an idle engine to a full queue; each item is a step."""
    chance = random.Random(1)
    left = requests[:]
    chance.shuffle(left)
    while left or engine.has_work:
        if left and (not engine.has_work or chance.random() < 0.2):
            for _ in range(min(len(left), chance.choice((1, 1, 1, 2, 4, slots // 2, 2 * slots)))):
                engine.submit(left.pop())
        if engine.has_work:
            yield


# transformers


class Generate:
    """transformers' `generate` over a batch of prompts of equal length."""

    def __init__(self, folder: Path, dtype: str, cache: str | None, *, threads: int, device: str):
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        torch.set_num_threads(threads)
        logging.disable_progress_bar()
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()
        self.options = {} if cache is None else {"cache_implementation": cache}
        self.device = device

    @torch.inference_mode()
    def run(self, rows: int, length: int = ANSWER) -> dict[str, Any]:
        idx = torch.tensor([prompt(PROMPT, row) for row in range(rows)], device=self.device)
        started = time.perf_counter()
        ids = self.model.generate(
            idx,
            attention_mask=torch.ones_like(idx),
            do_sample=True,
            max_new_tokens=length,
            min_new_tokens=length,
            pad_token_id=0,
            **SAMPLING[0],
            **self.options,
        ).cpu()
        seconds = time.perf_counter() - started
        if ids.shape != (rows, PROMPT + length):
            raise RuntimeError(f"generate returned shape {tuple(ids.shape)}, not {(rows, PROMPT + length)}")
        return {"characters_per_second": rows * length / seconds}


class Forward:
    """torch's forward over whole prompts: the GPT of service.model in one dtype."""

    def __init__(self, folder: Path, dtype: str, *, threads: int, device: str):
        torch.set_num_threads(threads)
        self.model = Checkpoint.read(folder).load_model(device).to(getattr(torch, dtype))

    @torch.inference_mode()
    def prefill(self, rows: int, characters: int) -> float:
        idx = torch.tensor([prompt(characters, row) for row in range(rows)], device=self.model.head.weight.device)
        started = time.perf_counter()
        self.model(idx).argmax(-1).cpu()
        return rows * characters / (time.perf_counter() - started)
