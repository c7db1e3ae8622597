"""Measurements of the engine in process: speed, step phases, memory and growth, without sockets or text.

Compared with transformers' `generate` on the same checkpoint, and with the roofline: the minimum time in which this
machine can read the bytes of a step, or compute its products.

Run each `measure_…` in a fresh process. Repeats alternate between the engine and transformers.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

import service.engine.runner
from service.engine.engine import Engine
from service.model.checkpoint import Checkpoint
from service.model.config import GPTConfig
from service.model.gpt import GPT
from service.wire import Submit

from .shapes import PROMPT, SAMPLING, Work, prompt, sampling

SHORT_SECONDS = 3e-4  # minimum duration of a timed run; well below a scheduler time slice


def measure_shape(
    folder: Path, all_rows: list[int], *, length: int, threads: int, repeats: int, device: str
) -> dict[str, Any]:
    """Figures of a shape, and `at_rows` for each number of rows."""
    torch.set_num_threads(threads)
    model = Checkpoint.read(folder).load_model(device)
    measured = []
    for rows in all_rows:
        measured.append(at_rows(model, folder, rows, length=length, repeats=repeats, device=device))
        ours, peer = (statistics.median(measured[-1][name]) for name in ("characters_per_second", "peer"))
        print(f"{folder.name}, {rows} rows: {ours:,.0f} characters/s, transformers {peer:,.0f}", file=sys.stderr)
    dtype = str(model.head.weight.dtype).removeprefix("torch.")
    return {"parameters": model.num_parameters, "dtype": dtype, "length": length, "rows": measured}


def at_rows(model: GPT, folder: Path, rows: int, *, length: int, repeats: int, device: str) -> dict[str, Any]:
    """Figures of `rows` sequences of PROMPT + `length` characters, of the engine and of transformers."""
    ours: list[dict[str, float]] = []
    theirs: list[float] = []
    options = best_generate(folder, rows, device)
    generate = Generate(folder, device, **options)
    generate.seconds(rows, 4)
    for _ in range(repeats):
        ours.append(run_engine(model, rows, length))
        theirs.append(rows * length / generate.seconds(rows, length))
    rates = [run["characters_per_second"] for run in ours]
    steps = [run["step_seconds"] for run in ours]
    roof = roofline(model, rows, min(PROMPT + length, model.config.block_size), device)
    return {
        "rows": rows,
        "characters_per_second": rates,
        "step_seconds": steps,
        "roofline": roof,
        "roofline_share": [roof["seconds"] / step for step in steps],
        "phases": phases(model, rows, length, device),
        "peer": theirs,
        "peer_options": options,
        "ratio": [rate / peer for rate, peer in zip(rates, theirs, strict=True)],
    }


def sequences(rows: int, length: int) -> list[Submit]:
    """Sequences of equal lengths without stops; each row has its own sampling parameters and seed."""
    return [Submit(row, prompt(PROMPT, row), length, sampling(row)) for row in range(rows)]


def run_engine(model: GPT, rows: int, length: int) -> dict[str, float]:
    """One run from prefill to the last character; step_seconds is the median of the steps past block_size."""
    engine = Engine(model, max_running=rows, max_waiting=rows, prefill_budget=max(512, PROMPT * rows))
    engine.generate(sequences(rows, 4))  # warm-up
    for sequence in sequences(rows, length):
        engine.submit(sequence)
    given, steps = 0, []
    started = last = time.perf_counter()
    while engine.has_work:
        given += sum(len(delta.ids) for delta in engine.step())
        now = time.perf_counter()
        steps.append((now - last, engine.stats.num_decode_rows))
        last = now
    if given != rows * length:
        raise RuntimeError(f"the engine emitted {given} characters, not {rows} × {length}")
    full = [seconds for seconds, decoded in steps if decoded == rows]
    past = full[max(0, model.config.block_size - PROMPT) :] or full
    return {"characters_per_second": given / (last - started), "step_seconds": statistics.median(past)}


# Step phases


class Phases:
    """Exclusive time in wrapped functions, in seconds."""

    def __init__(self, synchronize: Callable[[], None]):
        self.seconds: dict[str, float] = {}
        self._inside: list[float] = []  # per open call: seconds in nested wrapped calls
        self._synchronize = synchronize

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return function(*args, **kwargs)

        return call

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._inside.append(0.0)
        started = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            seconds = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds - self._inside.pop()
            if self._inside:
                self._inside[-1] += seconds


def phases(model: GPT, rows: int, length: int, device: str) -> dict[str, float]:
    """Seconds per phase of the work of `run_engine`, and their sum as `all`.

    Wraps Engine.scheduler.schedule, Runner.model (a forward over one character per row is decode, any other prefill),
    Runner.decide (the part of fp64 decisions on the engine's thread; most run on another) and
    service.engine.runner.sample. `rest` is the Python code around them.
    """
    engine = Engine(model, max_running=rows, max_waiting=rows, prefill_budget=max(512, PROMPT * rows))
    engine.generate(sequences(rows, 4))
    timer = Phases(torch.accelerator.synchronize if device != "cpu" else lambda: None)
    forward = engine.runner.model.forward

    def named_forward(idx: Any, *args: Any) -> Any:
        with timer.phase("decode" if idx.size(1) == 1 else "prefill"):
            return forward(idx, *args)

    sample = service.engine.runner.sample
    engine.scheduler.schedule = timer.timed("schedule", engine.scheduler.schedule)
    engine.runner.decide = timer.timed("exact", engine.runner.decide)
    engine.runner.model.forward = named_forward
    service.engine.runner.sample = timer.timed("sampling", sample)
    try:
        with timer.phase("rest"):
            engine.generate(sequences(rows, length))
    finally:
        service.engine.runner.sample = sample
        del engine.runner.model.forward
    return timer.seconds | {"all": sum(timer.seconds.values())}


# The roofline


def roofline(model: GPT, rows: int, length: int, device: str, seconds: float = 0.2) -> dict[str, float]:
    """Minimum time of a decode step over `rows` texts with `length` cached characters, from rates measured here.

    Memory: weights once, plus keys and values in use, at the rate of repeatedly reading as many bytes. Arithmetic: all
    products, at the rate of multiplying the model's own matrices by `rows` columns.
    """
    config = model.config
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    weight = model.head.weight
    size = weight.element_size()
    norms = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    weights = (sum(m.weight.numel() for m in linears) + norms + rows * config.n_embd) * size
    cached = 2 * config.n_layer * config.n_kv_head * config.head_dim * length * rows * size
    linear = 2 * rows * sum(m.weight.numel() for m in linears)
    attention = 4 * rows * config.n_layer * config.n_embd * length
    read = read_rate(weights + cached, weight.dtype, device, seconds)
    products = linear / sum(product_seconds(m, rows, seconds / len(linears)) for m in linears)
    memory_seconds, product_time = (weights + cached) / read, (linear + attention) / products
    return {
        "weight_bytes": weights,
        "cache_bytes": cached,
        "operations": linear + attention,
        "bytes_per_second": read,
        "operations_per_second": products,
        "memory_seconds": memory_seconds,
        "product_seconds": product_time,
        "seconds": max(memory_seconds, product_time),
    }


def fastest(call: Callable[[], Any], seconds: float, device: str) -> float:
    """Minimum time of `call`, with all of torch's threads or with one.

    Takes the minimum of many short runs, as other load on the machine only adds time, most to several threads.
    """
    synchronize = torch.accelerator.synchronize if device != "cpu" else lambda: None
    threads = torch.get_num_threads()
    best = float("inf")
    for count in {1, threads} if device == "cpu" else {threads}:
        torch.set_num_threads(count)
        repeats, deadline = 1, time.perf_counter() + seconds
        while True:
            synchronize()
            started = time.perf_counter()
            for _ in range(repeats):
                call()
            synchronize()
            now = time.perf_counter()
            if now - started < SHORT_SECONDS:  # too short for the clock
                repeats *= 2
                continue
            best = min(best, (now - started) / repeats)
            if now > deadline:
                break
    torch.set_num_threads(threads)
    return best


@torch.inference_mode()
def read_rate(num_bytes: int, dtype: torch.dtype, device: str, seconds: float) -> float:
    """Bytes per second when `num_bytes` are read repeatedly, from whichever cache they fit."""
    data = torch.ones(max(1, num_bytes // dtype.itemsize), dtype=dtype, device=device)
    return data.nbytes / fastest(data.sum, seconds, device)


@torch.inference_mode()
def product_seconds(linear: nn.Linear, rows: int, seconds: float) -> float:
    x = torch.randn(rows, linear.in_features, device=linear.weight.device, dtype=linear.weight.dtype)
    out = torch.empty(rows, linear.out_features, device=x.device, dtype=x.dtype)
    weight = linear.weight.t()
    return fastest(lambda: torch.mm(x, weight, out=out), seconds, x.device.type)


# transformers


class Generate:
    """transformers' `generate` over a batch of prompts of equal length."""

    def __init__(self, folder: Path, device: str, dtype: str, cache: str | None):
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()
        self.options = {} if cache is None else {"cache_implementation": cache}
        self.device = device

    @torch.inference_mode()
    def seconds(self, rows: int, length: int) -> float:
        """Time to generate `length` characters for each of `rows` prompts."""
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
        return seconds


def best_generate(folder: Path, rows: int, device: str, length: int = 12) -> dict[str, Any]:
    """The fastest combination of dtype and cache of transformers on this machine."""
    times: dict[tuple[str, str | None], float] = {}
    for dtype, cache in itertools.product(("float32", "bfloat16"), (None, "static")):
        generate = Generate(folder, device, dtype, cache)
        generate.seconds(rows, 4)
        times[dtype, cache] = min(generate.seconds(rows, length) for _ in range(2))
    dtype, cache = min(times, key=times.__getitem__)
    return {"dtype": dtype, "cache": cache}


# Memory


def measure_memory(folder: Path, slots: int, *, threads: int, device: str) -> dict[str, float]:
    """Bytes of the cache, by measurement and by formula, of the weights, and of the process."""
    torch.set_num_threads(threads)
    before = psutil.Process().memory_info().rss
    model = Checkpoint.read(folder).load_model(device)
    engine = Engine(model, max_running=slots, prefill_budget=max(512, PROMPT * slots))
    engine.generate(sequences(slots, model.config.block_size))
    cache = engine.runner.cache
    return {
        "slots": slots,
        "cache_bytes": cache.keys.nbytes + cache.values.nbytes,
        "formula_bytes": cache_formula(model.config, slots, cache.keys.element_size()),
        "bytes_per_slot": cache_formula(model.config, 1, cache.keys.element_size()) / 2,
        "weight_bytes": sum(p.nbytes for p in model.parameters()),
        "exact_weight_bytes": sum(p.nbytes for p in engine.runner.exact_model.parameters()),
        "process_bytes": psutil.Process().memory_info().rss - before,  # growth since torch was imported
    }


def cache_formula(config: GPTConfig, slots: int, element_size: int) -> int:
    return 2 * config.n_layer * (slots + 1) * config.n_kv_head * config.block_size * config.head_dim * element_size


# Growth


def measure_lengths(
    folder: Path, rows: int, lengths: list[int], *, threads: int, device: str
) -> dict[str, list[float]]:
    """Step time in texts of `lengths` characters: medians of block_size steps each, alternating."""
    torch.set_num_threads(threads)
    model = Checkpoint.read(folder).load_model(device)
    engines = []
    for length in lengths:
        engine = Engine(model, max_running=rows)
        for sequence in sequences(rows, length + 2 * model.config.block_size):
            engine.submit(sequence)
        for _ in range(length - PROMPT):
            engine.step()
        engines.append(engine)
    steps: list[list[float]] = [[] for _ in lengths]
    for _, (engine, seconds) in itertools.product(
        range(model.config.block_size), list(zip(engines, steps, strict=True))
    ):
        engine.step()
        seconds.append(engine.stats.seconds)
    return {"lengths": [float(n) for n in lengths], "step_seconds": [statistics.median(seconds) for seconds in steps]}


def measure_queue(
    folder: Path, rows: int, queued: list[int], *, steps: int, repeats: int, threads: int, device: str
) -> dict[str, list[Any]]:
    """Step time over `rows` sequences while `queued` others wait; repeats alternate between the numbers."""
    torch.set_num_threads(threads)
    model = Checkpoint.read(folder).load_model(device)
    seconds: dict[int, list[float]] = {count: [] for count in queued}
    for _, count in itertools.product(range(repeats), queued):
        engine = Engine(model, max_running=rows, max_waiting=count)
        for sequence in sequences(rows + count, 10 * steps):
            engine.submit(sequence)
        taken = []
        for _ in range(steps + 4):
            engine.step()
            taken.append(engine.stats.seconds)
        seconds[count].append(statistics.median(taken[4:]))
    return {"queued": queued, "step_seconds": list(seconds.values())}


# The work of the whole service, without HTTP


def measure_work(folder: Path, work: list[Work], slots: int, *, threads: int, device: str) -> dict[str, float]:
    """Characters per second of the engine alone when `work` arrives as over HTTP."""
    torch.set_num_threads(threads)
    checkpoint = Checkpoint.read(folder)
    engine = Engine(checkpoint.load_model(device), max_running=slots, max_waiting=len(work))
    engine.generate(sequences(slots, 4))
    encode = checkpoint.tokenizer.encode
    waiting = [(item.at, Submit(i, encode(item.prompt), item.max_tokens, sampling(i))) for i, item in enumerate(work)][
        ::-1
    ]
    given, started = 0, time.perf_counter()
    while waiting or engine.has_work:
        while waiting and waiting[-1][0] <= time.perf_counter() - started:
            engine.submit(waiting.pop()[1])
        if engine.has_work:
            given += sum(len(delta.ids) for delta in engine.step())
    return {"characters_per_second": given / (time.perf_counter() - started)}
