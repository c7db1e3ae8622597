"""The shortest possible time of a decode step on this machine's CPU.

Products are taken at the peak rate of fused multiply-adds, keys and values at the rate at which as many bytes can be
read repeatedly, from whichever cache holds them: both measured by peak.cpp with all threads at once.
"""

from __future__ import annotations

import ctypes
import functools
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from service.model.config import GPTConfig

from .command import run_checked

SOURCE = Path(__file__).with_name("peak.cpp")
COMPILE = ("g++", "-O3", "-march=native", "-std=c++17", "-shared", "-fPIC")
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CALL_SECONDS = 2e-3  # of one timed call: several scheduler ticks fit between two hiccups


@functools.cache
def probe() -> ctypes.CDLL:
    """peak.cpp, compiled for this machine.

    Raises:
        BenchError: there is no compiler, or it failed.
    """
    with tempfile.TemporaryDirectory(prefix="chargpt-peak-") as folder:
        library = Path(folder) / "peak.so"
        run_checked([*COMPILE, SOURCE, "-o", library])
        built = ctypes.CDLL(str(library))
    built.operations.restype = ctypes.c_int64
    built.run.argtypes, built.run.restype = [ctypes.c_int64], ctypes.c_double
    built.read_bytes.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    built.read_bytes.restype = ctypes.c_uint64
    return built


def peak(calls: list[Callable[[int], Any]], work: float, seconds: float) -> float:
    """The best rate of all calls together, one thread each; call(n) does n times `work`.

    The best of many short measurements, as other load on the machine only lowers the rate.
    """
    started = time.perf_counter()
    calls[0](1000)
    repeats = max(1, round(1000 * CALL_SECONDS / (time.perf_counter() - started)))
    deadline = time.perf_counter() + seconds
    rates: list[float] = [0.0] * len(calls)
    gate = threading.Barrier(len(calls))

    def measure(number: int) -> None:
        gate.wait()
        while time.perf_counter() < deadline:  # ctypes releases the interpreter's lock
            begun = time.perf_counter()
            calls[number](repeats)
            rates[number] = max(rates[number], repeats * work / (time.perf_counter() - begun))

    threads = [threading.Thread(target=measure, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(rates)


def product_rate(threads: int, seconds: float = 0.3) -> float:
    """Floating-point operations per second of `threads` threads, in float32."""
    library = probe()
    return peak([library.run] * threads, library.operations(), seconds)


def read_rate(num_bytes: int, threads: int, seconds: float = 0.3) -> float:
    """Bytes per second when each of `threads` threads repeatedly reads its share of `num_bytes`."""
    library = probe()
    share = max(4096, num_bytes // threads // 512 * 512)
    data = [np.ones(share + 64, dtype=np.uint8) for _ in range(threads)]
    starts = [each.ctypes.data + -each.ctypes.data % 64 for each in data]
    calls = [functools.partial(library.read_bytes, start, share) for start in starts]
    return peak(calls, share, seconds)


def count(
    config: GPTConfig, rows: int, length: float, dtype: str, *, weights: str | None = None, cache: str | None = None
) -> dict[str, float]:
    """Operations and bytes of a decode step over `rows` texts of `length` cached characters each, on average.

    weights, cache: the dtypes in which weights, and keys and values, lie in memory; default: dtype, the arithmetic's.
    """
    assert config.n_inner is not None
    heads = config.n_head + 2 * config.n_kv_head
    layer = config.n_embd * config.head_dim * (heads + config.n_head) + 3 * config.n_embd * config.n_inner
    matrices = config.n_layer * layer + config.n_embd * config.vocab_size
    norms = config.n_layer * (2 * config.n_embd + 2 * config.head_dim) + config.n_embd
    weight_size, cache_size = ITEM_BYTES[weights or dtype], ITEM_BYTES[cache or dtype]
    return {
        "product_operations": 2 * rows * matrices,
        "attention_operations": 4 * rows * config.n_layer * config.n_head * config.head_dim * length,
        "weight_bytes": (matrices + norms + rows * config.n_embd) * weight_size,
        "cache_bytes": 2 * config.n_layer * config.n_kv_head * config.head_dim * length * rows * cache_size,
    }


def roofline(
    config: GPTConfig, rows: int, length: float, threads: int, *, weights: str, cache: str
) -> dict[str, float]:
    """Counts, rates in float32, and the minimum time of a step, `sequential_seconds`: the products of the weights and
    the attention follow one another, as they do in a layer, each at its own limit.
    """
    figures = count(config, rows, length, "float32", weights=weights, cache=cache)
    products = product_rate(threads)
    read = read_rate(int(figures["weight_bytes"] + figures["cache_bytes"]), threads)
    linear, attention = figures["product_operations"] / products, figures["attention_operations"] / products
    weight_seconds, cache_seconds = figures["weight_bytes"] / read, figures["cache_bytes"] / read
    return figures | {
        "operations_per_second": products,
        "bytes_per_second": read,
        "sequential_seconds": max(linear, weight_seconds) + max(attention, cache_seconds),
    }
