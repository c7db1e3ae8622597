"""Backend "native": the fused C++ engine of native.cpp, called through ctypes. CPU only; imports no torch.

Installing the package builds the library once per instruction set (setup.py). Without a compiler the library is
missing, and `why_not` returns the reason; the service then runs on backend "torch".
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import struct
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from service.constrain.automaton import Automaton, Guide, MinimumLength
from service.engine.runner import HISTORY, NONE, Outcome, Piece, Report, Runner
from service.engine.selfcheck import refuse_other_weights
from service.model.config import GPTConfig
from service.model.counts import REST_CODES, REST_LIMITS, SHARE_CODES, Counts
from service.model.params import SamplingParams
from service.wire import Logprobs

DTYPES = ("float32", "float64")  # in which the library computes; the index of each is its number in ChargptConfig
FULL = 2  # ChargptConfig.dtype: weights, keys and values are float32 too
LIBRARY_VARIABLE = "CHARGPT_NATIVE_LIBRARY"  # environment variable: the path of another build, for its tests

# The instruction sets for which setup.py compiles, best first, with the flags of /proc/cpuinfo that each needs.
_V3 = {"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VARIANTS = {"v4bf16": _V4 | {"avx512_bf16"}, "v4": _V4, "v3": _V3}

# The weights of a block in the order of `Net::pack` in native/net.h.
_BLOCK = ("attn_norm", "attn.qkv", "attn.q_norm", "attn.k_norm", "attn.proj", "mlp_norm", "mlp.gate_up", "mlp.proj")
_PARAMS = struct.Struct("=7dQ6q5Q")  # ChargptParams
_ITEM = np.dtype(
    [(name, "i4") for name in ("slot", "count", "steps", "alternatives")]
    + [
        (name, "u8")
        for name in ("ids", "before", "targets", "guide", "chosen", "values", "top_ids", "top_values", "which")
    ]
)  # ChargptItem
_GUIDE = struct.Struct("=5Q8i")  # ChargptGuide


class _Config(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_kv_head", "n_embd")),
        *((name, c_int32) for name in ("n_inner", "slots", "threads", "dtype", "is_half")),
        ("norm_eps", c_double),
        ("frequencies", POINTER(c_double)),
        *((name, c_int64) for name in ("counts_order", "num_contexts")),
        *((name, c_void_p) for name in ("mixture_weights", "base", "rest_codes", "share_codes", "first_child")),
        *((name, c_void_p) for name in ("first_follower", "older", "rests", "follower_ids", "shares")),
    ]


def _cpu_flags() -> set[str]:
    info = Path("/proc/cpuinfo")  # exists on Linux only
    lines = info.read_text().splitlines() if info.exists() else []
    return set(next((line for line in lines if line.startswith("flags")), "").split())


@functools.cache
def library() -> ctypes.CDLL:
    """Load the library for this CPU.

    Raises:
        RuntimeError: no library can be used; the message says why.
    """
    if given := os.environ.get(LIBRARY_VARIABLE):
        return _load(Path(given))
    return _load(built(Path(__file__).with_name("_native"), ("v4", "v3")))


def built(stem: Path, variants: Sequence[str] = tuple(_VARIANTS)) -> Path:
    """Return the file for the best instruction set of this CPU, such as STEM_v4.so, of a library built by setup.py.

    variants: those for which setup.py compiles it on x86-64, best first.

    Raises:
        RuntimeError: no file can be used; the message says why.
    """
    flags, machine = _cpu_flags(), platform.machine()
    possible = ["base"] if machine in ("aarch64", "arm64") else [name for name in variants if _VARIANTS[name] <= flags]
    if not possible:
        raise RuntimeError(f"this CPU ({machine}) has no AVX2 and FMA")
    for variant in possible:
        path = stem.with_name(f"{stem.name}_{variant}.so")
        if path.exists():
            return path
    raise RuntimeError("its library was not built: install a C++ compiler, then the package again")


def why_not() -> str | None:
    """Return the reason why this backend cannot run here, or None if it can."""
    try:
        library()
    except RuntimeError as error:
        return str(error)
    return None


def opened(path: Path, name: str, revision: int) -> ctypes.CDLL:
    """Load a library whose function `name` returns its revision.

    Raises:
        RuntimeError: the file is not such a library, or has another revision.
    """
    try:
        library = ctypes.CDLL(str(path))
        if not hasattr(library, name) or getattr(library, name)() != revision:
            raise OSError(f"{path}: built from another revision")
    except OSError as error:
        raise RuntimeError(f"{error}: run make native, or install the package again") from None
    return library


def _load(path: Path) -> ctypes.CDLL:
    """Load a library and declare its functions. Raise RuntimeError like `opened`."""
    layout = 10 << 24 | ctypes.sizeof(_Config) << 16 | _ITEM.itemsize << 8 | _PARAMS.size
    library = opened(path, "chargpt_layout", layout)
    for name, arguments in {
        "chargpt_open": [POINTER(_Config), POINTER(POINTER(c_float)), POINTER(c_void_p)],
        "chargpt_start": [c_void_p, c_int32, c_char_p],
        "chargpt_copy": [c_void_p, c_int32, c_int32, c_int64],
        "chargpt_run": [c_void_p, c_void_p, c_int32],
    }.items():
        function = getattr(library, name)
        function.argtypes, function.restype, function.errcheck = arguments, c_char_p, _check
    library.chargpt_close.argtypes, library.chargpt_close.restype = [c_void_p], None
    library.chargpt_cache_bits.argtypes = [c_void_p]
    library.chargpt_guesses.argtypes, library.chargpt_guesses.restype = [c_void_p, *2 * [POINTER(c_int64)]], None
    return library


def _check(message: bytes | None, *_: Any) -> None:
    if message is not None:
        raise RuntimeError(f"the native engine: {message.decode()}")


class NativeRunner(Runner):
    """Runs a model in the native library.

    threads: the number of threads, with the calling one. Either each thread runs whole sequences, or threads share
        each batch, whichever is faster.
    dtype: one of DTYPES. With "float32", keys and values are stored as float16, unless a text could make them overflow.
    half_cache: if False, "float32" stores keys, values and weights as float32.
    weights: under GPT's parameter names, as float16 or float32, or as float64 with float32 values. "float32" stores
        them as float16 if that is exact and keys and values are float16 too. "float64" stores them as float32.
    counts: those of a file. They are mixed if they have weights above 0, and serve to guess characters. Without them,
        guesses use a sequence's own text only.

    Raises:
        ValueError: a weight is not a float32, or dtype is none of DTYPES.
        SelfCheckError: the model has other weights than native.cpp.
        RuntimeError: the library cannot be used, or lacks the memory or threads to start.
    """

    backend = "native"
    follows_guides = True

    def __init__(
        self,
        config: GPTConfig,
        weights: Mapping[str, np.ndarray],
        slots: int,
        threads: int,
        dtype: str = "float32",
        counts: Counts | None = None,
        half_cache: bool = True,
    ):
        if dtype not in DTYPES:
            raise ValueError(f"the native backend computes in {' or '.join(DTYPES)}, got {dtype}")
        refuse_other_weights(self.backend, config, weights)  # the library is given pointers
        self.config, self.slots, self.dtype = config, slots, dtype
        self._library, self._engine, self._process = library(), c_void_p(), os.getpid()
        blocks = [f"blocks.{layer}.{name}" for layer in range(config.n_layer) for name in _BLOCK]
        names = [f"{name}.weight" for name in ("embed", *blocks, "norm", "head")]
        singles = [_single(name, weights[name]) for name in names]
        may_halve = half_cache and dtype == "float32"
        is_half = may_halve and all(map(_fits_half, singles))
        half = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
        frequencies = config.rope_theta**-half
        assert config.n_inner is not None
        fields, _kept = _tree(counts)
        self._library.chargpt_open(
            _Config(
                *(config.vocab_size, config.block_size, config.n_layer, config.n_head, config.n_kv_head),
                *(config.n_embd, config.n_inner, slots, threads),
                *(FULL if dtype == "float32" and not half_cache else DTYPES.index(dtype), is_half, config.norm_eps),
                frequencies.ctypes.data_as(POINTER(c_double)),
                *fields,
            ),
            (POINTER(c_float) * len(singles))(*(it.ctypes.data_as(POINTER(c_float)) for it in singles)),
            self._engine,
        )
        self.cache_dtype = f"float{self._library.chargpt_cache_bits(self._engine)}"
        self.weight_dtype = "float16" if is_half and self.cache_dtype == "float16" else "float32"
        stored = f"weights in {self.weight_dtype}, keys and values in {self.cache_dtype}"
        self.description = f"{self._library.chargpt_register_bits()}-bit registers, {stored}"

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        if getattr(self, "_engine", None) and self._process == os.getpid():
            self._library.chargpt_close(self._engine)
            self._engine = c_void_p()

    def start(
        self,
        slot: int,
        params: SamplingParams,
        prompt: Sequence[int],
        ends: Sequence[int] = (),
        written: Sequence[int] = (),
        position: int = 0,
    ) -> None:
        ids, V = np.asarray([*prompt, *written], np.int32), self.config.vocab_size
        if len(ids) and not 0 <= ids.min() <= ids.max() < V:
            raise ValueError(f"ids must be in [0, {V - 1}], got {ids.min()} … {ids.max()}")
        biased = np.array([id for id, _ in params.logit_bias], np.int32)
        if len(biased) and biased.max() >= V:
            raise ValueError(f"logit_bias ids must be below {V}, got {biased.max()}")
        bias = np.array([value for _, value in params.logit_bias], np.float64)
        seen, chosen = ids[: len(prompt)], ids[len(prompt) :]
        if not params.needs_history:
            seen = seen[:0]
        last = np.asarray(ends, np.int32)
        packed = _PARAMS.pack(
            *(*params.factors, params.seed, params.top_k, position),
            *(len(biased), len(seen), len(chosen), len(last)),
            *(biased.ctypes.data, bias.ctypes.data, seen.ctypes.data, chosen.ctypes.data, last.ctypes.data),
        )
        self._library.chargpt_start(self._engine, slot, packed)

    @property
    def guesses(self) -> tuple[int, int]:
        """The number of decode steps for which a character was guessed, and the number of correct guesses."""
        guessed, right = c_int64(), c_int64()
        self._library.chargpt_guesses(self._engine, guessed, right)
        return guessed.value, right.value

    def copy(self, source: int, target: int, length: int) -> None:
        self._library.chargpt_copy(self._engine, source, target, length)

    def prefill(self, pieces: list[Piece]) -> Outcome:
        items = np.zeros(len(pieces), _ITEM)
        ids = np.concatenate([piece.ids for piece in pieces]).astype(np.int32, copy=False)
        counts = np.array([len(piece.ids) for piece in pieces])
        items["slot"] = [piece.slot for piece in pieces]
        items["count"] = counts
        items["ids"] = ids.ctypes.data + 4 * (counts.cumsum() - counts)
        before = np.full((len(pieces), HISTORY), NONE, np.int32)
        for row, piece in zip(before, pieces, strict=True):
            row[HISTORY - len(piece.before) :] = piece.before
        items["before"] = before.ctypes.data + before.strides[0] * np.arange(len(pieces))
        items["steps"] = [piece.choose for piece in pieces]
        guides = {b: piece.guide for b, piece in enumerate(pieces) if piece.guide is not None}
        reports = {b: piece.report for b, piece in enumerate(pieces) if piece.report is not None}
        for b in reports:
            targets = pieces[b].targets
            items["targets"][b] = 0 if targets is None else targets.ctypes.data
        return self._run(items, 1, guides, reports, [pieces[b].num_reported for b in reports])

    def decode(
        self,
        slots: np.ndarray,
        steps: np.ndarray,
        guides: Mapping[int, Guide] = {},
        reports: Mapping[int, Report] = {},
    ) -> Outcome:
        items = np.zeros(len(slots), _ITEM)
        items["slot"], items["steps"] = slots, steps
        return self._run(items, int(steps.max()), guides, reports, [steps[b] for b in reports])

    def _run(
        self, items: np.ndarray, K: int, guides: Mapping[int, Guide], reports: Mapping[int, Report], sizes: list[int]
    ) -> Outcome:
        """Run items of at most K steps. Guides and reports are by item; `sizes` are the numbers of reported ids."""
        if self._process != os.getpid():
            raise RuntimeError("the native engine was opened in another process, and its threads are there")
        shared = [_addresses(guide.automaton, guide.minimum) for guide in guides.values()]  # keeps the arrays alive
        packed = b"".join(
            _GUIDE.pack(*its, guide.state, guide.remaining, guide.missing, guide.may_leave | guide.masks << 1)
            for (its, _), guide in zip(shared, guides.values(), strict=True)
        )
        if guides:
            first = np.frombuffer(packed, np.uint8).ctypes.data
            items["guide"][list(guides)] = first + _GUIDE.size * np.arange(len(guides))
        chosen = np.full((len(items), K), NONE, np.int32)
        items["chosen"] = chosen.ctypes.data + 4 * K * np.arange(len(items))
        if not reports:
            self._library.chargpt_run(self._engine, items.ctypes.data, len(items))
            return Outcome(chosen, {})
        count = np.array(sizes, np.int64)
        k = np.array([report.num_alternatives(self.config.vocab_size) for report in reports.values()], np.int64)
        starts, top_starts = count.cumsum() - count, (count * k).cumsum() - count * k
        values, top_values = np.full(count.sum(), np.nan), np.full((count * k).sum(), np.nan)
        top_ids = np.zeros(len(top_values), np.uint32)
        which = [np.array(report.ids, np.uint32) for report in reports.values()]
        rows = list(reports)
        items["alternatives"][rows] = k
        items["values"][rows] = values.ctypes.data + 8 * starts
        items["top_ids"][rows] = top_ids.ctypes.data + 4 * top_starts
        items["top_values"][rows] = top_values.ctypes.data + 8 * top_starts
        items["which"][rows] = [ids.ctypes.data if len(ids) else 0 for ids in which]
        self._library.chargpt_run(self._engine, items.ctypes.data, len(items))
        places = (starts, starts + count, top_starts, top_starts + count * k)
        found = {
            b: Logprobs(bytearray(values[i:j]), bytearray(top_ids[m:n]), bytearray(top_values[m:n]))
            for b, i, j, m, n in zip(rows, *(place.tolist() for place in places), strict=True)
        }
        return Outcome(chosen, found)


@functools.lru_cache(maxsize=128)
def _addresses(automaton: Automaton, minimum: MinimumLength | None) -> tuple[tuple[int, ...], list[np.ndarray]]:
    """Return the part of ChargptGuide that all sequences of a pattern share, and the arrays to which it points."""
    layers = np.zeros((0, 0), np.uint8) if minimum is None else minimum.layers
    types = (np.uint16, np.int16, np.uint8, np.int32, np.uint8)
    found = (automaton.classes, automaton.table, automaton.accepting, automaton.distance, layers)
    arrays = [np.ascontiguousarray(array, kind) for array, kind in zip(found, types, strict=True)]
    pointers = [array.ctypes.data if array.size else 0 for array in arrays]
    return (*pointers, automaton.table.shape[1], layers.shape[1], len(layers), minimum.repeat if minimum else 0), arrays


def _tree(counts: Counts | None) -> tuple[tuple[int | None, ...], list[np.ndarray]]:
    """Return the fields of _Config that describe counts, and the arrays to which they point."""
    if counts is None:
        return (0, 0, *[None] * 10), []
    sizes = np.digitize(REST_CODES, REST_LIMITS)
    weights = counts.weights[:, sizes]
    weights[0, 0] = counts.next([])[1]  # of the root, which has no rest
    tables = [np.ascontiguousarray(table, np.float64) for table in (weights, counts.base, REST_CODES, SHARE_CODES)]
    rests, shares = counts.codes
    links = [counts.first_child, counts.first_follower, counts.older.astype(np.int32)]
    arrays = [*tables, *links, rests, counts.ids.astype(np.int32), shares]
    return (counts.order, len(counts.older), *(array.ctypes.data for array in arrays)), arrays


def _single(name: str, weight: np.ndarray) -> np.ndarray:
    single = np.ascontiguousarray(weight, np.float32)
    if not np.array_equal(single, weight, equal_nan=True):
        raise ValueError(f"{name} has values that are not float32 numbers")
    return single


def _fits_half(weight: np.ndarray) -> bool:
    with np.errstate(over="ignore"):
        return weight.ndim == 1 or np.array_equal(weight.astype(np.float16), weight, equal_nan=True)
