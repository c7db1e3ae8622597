"""Measurements of the engine in process, without sockets or text.

An engine lives in a fresh process of its own (`command.Remote`) and does one run when asked: `rows` sequences of a
prompt and an answer, all from the beginning. serve.py and gpu.py ask them in turns.
"""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path
from typing import Any

import torch

from service.engine.backends import open_runner
from service.engine.engine import Engine
from service.model.checkpoint import Checkpoint
from service.wire import Submit
from tests.toolbox.figures import percentiles

from .shapes import ANSWER, NUMBERS, PROMPT, TEXT, prompt, sampling

TEMPLATES, TEMPLATE, REQUESTS = 50, 200, 600  # texts that prompts begin with, their characters; requests of a run


def sequences(rows: int, length: int, characters: int = PROMPT) -> list[Submit]:
    """Sequences of equal lengths without stops; each row has sampling parameters of its own, each sequence a prompt and
    a seed.
    """
    numbers = itertools.islice(NUMBERS, rows)
    return [Submit(row, prompt(characters, n), length, sampling(row, n)) for row, n in enumerate(numbers)]


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
        about = {"backend": runner.backend, "dtype": runner.dtype, "slots": runner.slots}
        if runner.backend == "native":
            about["stored"] = {"weights": runner.weight_dtype, "cache": runner.cache_dtype}
        return about

    def new_engine(self, waiting: int = 0) -> Engine:
        return Engine(self.runner, max_waiting=max(self.runner.slots, waiting))

    def run(self, rows: int, seconds: float, length: int = ANSWER) -> dict[str, Any]:
        """Rates over rounds that take `seconds` together, each from the first prompt to the last character; and of
        decode alone. A short round before them is not counted, as another system had the processor.
        """
        engine = self.new_engine(rows)  # one, as in a service: it has learned what a step costs
        self.round(engine, rows, 16)
        spent = [0.0] * 4
        while not spent[1] or spent[1] < seconds:
            spent = [a + b for a, b in zip(spent, self.round(engine, rows, length), strict=True)]
        return {
            "characters_per_second": spent[0] / spent[1],
            "decode_characters_per_second": spent[2] / spent[3],
            "seconds": spent[1],
        }

    def round(self, engine: Engine, rows: int, length: int) -> tuple[float, float, float, float]:
        """(characters, seconds, characters after the last prompt, seconds after it)"""
        for sequence in sequences(rows, length):
            engine.submit(sequence)
        given = after_prefill = 0
        started = prefilled = time.perf_counter()
        while engine.has_work:
            given += sum(len(delta.ids) for delta in engine.step())
            if engine.stats.num_prefill_tokens:
                prefilled, after_prefill = time.perf_counter(), given
        ended = time.perf_counter()
        if given != rows * length:
            raise RuntimeError(f"the engine emitted {given} characters, not {rows} × {length}")
        return given, ended - started, given - after_prefill, ended - prefilled

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

    def templates(self, at_once: int, with_reuse: bool, seed: int) -> dict[str, float]:
        """Requests that begin with one of TEMPLATES texts and go on with PROMPT characters of their own, so many at a
        time. Of those after the first 100: the share of their prompts that was copied, and the time to the first
        character.
        """
        chance, engine = random.Random(seed), self.new_engine()
        submitted: dict[int, float] = {}
        seconds, number, running, copied, run = [], 0, 0, 0, 0
        while number < REQUESTS or running:
            while running < at_once and number < REQUESTS:
                own = prompt(PROMPT, TEMPLATES + REQUESTS * seed + number)
                ids = prompt(TEMPLATE, chance.randrange(TEMPLATES)) + own
                group = "" if with_reuse else str(number)
                submitted[number] = time.perf_counter()
                engine.submit(Submit(number, ids, 32, sampling(number, REQUESTS * seed + number), reuse_group=group))
                number, running = number + 1, running + 1
            for delta in engine.step():
                if delta.ids and delta.id in submitted:
                    since = time.perf_counter() - submitted.pop(delta.id)
                    seconds += [since] if delta.id >= 100 else []
                running -= delta.finish_reason is not None
            if number > 100:
                copied, run = copied + engine.stats.num_copied_tokens, run + engine.stats.num_prefill_tokens
        return {"copied": copied / (copied + run), **percentiles(seconds)}

    def texts(self, count: int, longest: int, at_once: int = 0) -> list[list[int]]:
        """Of random prompts, lengths and parameters: so many at a time; 0: in random order, idle to a full queue."""
        chance, requests = random.Random(0), []
        for number in range(count):
            length = min(300, round(2 ** chance.uniform(0, 8.3)))
            ids = prompt(length, chance.randrange(len(TEXT)))
            requests.append(Submit(number, ids, chance.randint(1, longest), sampling(number, number)))
        engine, texts, left = self.new_engine(count), [[] for _ in requests], requests[:]
        if at_once:
            return [it for i in range(0, count, at_once) for it in engine.generate(requests[i : i + at_once])]
        chance.shuffle(left)
        while left or engine.has_work:
            if left and (not engine.has_work or chance.random() < 0.2):
                slots = self.runner.slots
                for _ in range(min(len(left), chance.choice((1, 1, 1, 2, 4, slots // 2, 2 * slots)))):
                    engine.submit(left.pop())
            for delta in engine.step():
                texts[delta.id] += delta.ids
        return texts
