"""The native engine against the model and the sampler in torch, and against itself: bits must not depend on the batch,
the threads, the pieces, the steps of a call or the instruction set."""

import ctypes
import functools
import itertools
import math
import os
import platform
import random
import subprocess
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from service.constrain.automaton import Automaton, Guide
from service.constrain.regex import compile_regex
from service.engine import native
from service.engine.backends import open_runner, resolve
from service.engine.native import NativeRunner
from service.engine.runner import FAILED, NONE, Piece, Report, report_of
from service.engine.selfcheck import SelfCheckError
from service.model.checkpoint import Checkpoint
from service.model.counts import Counts
from service.model.gpt import GPT
from service.model.params import MAX_SEED, SamplingParams
from service.model.sampling import uniforms
from service.settings import BUNDLED
from service.wire import Logprobs, floats
from setup import FLAGS, OWN_FLAGS, SOURCE, VARIANTS
from tests.helpers import VOCABULARY, random_model
from tests.model.test_sampling import random_params
from tests.sampler import History, sample
from tests.toolbox.needs import missing, program

IS_POSSIBLE = platform.machine() in ("aarch64", "arm64") or native._VARIANTS["v3"] <= native._cpu_flags()
pytestmark = [
    pytest.mark.skipif(not IS_POSSIBLE, reason="this CPU has no AVX2 and FMA"),
    pytest.mark.usefixtures("library"),
]

# Sizes that are no multiples of registers, one head, many query heads per key head, a prime window, more than a batch.
SHAPES = [
    {},
    {"n_layer": 1, "n_head": 1, "n_kv_head": 1, "n_embd": 2, "block_size": 1, "vocab_size": 1},
    {"n_layer": 3, "n_head": 5, "n_kv_head": 1, "n_embd": 30, "block_size": 37, "n_inner": 7},
    {"n_layer": 2, "n_head": 6, "n_kv_head": 2, "n_embd": 192, "block_size": 130, "vocab_size": 300},
    {"n_layer": 2, "n_head": 2, "n_kv_head": 2, "n_embd": 96, "block_size": 64},
]
LIBRARIES = [Path(native.__file__).with_name(f"_native_{name}.so") for name in VARIANTS[SOURCE]]


@pytest.fixture(scope="module")
def library() -> None:
    """Where a compiler is required, a library that is not there or cannot be loaded is a failure, not a skip."""
    if reason := native.why_not():
        missing("compiler", f"native engine: {reason}")


def weights(model: GPT) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in model.state_dict().items()}


def open_native(
    model: GPT, slots: int = 4, threads: int = 2, dtype: str = "float64", counts: Counts | None = None
) -> NativeRunner:
    return NativeRunner(model.config, weights(model), slots, threads, dtype, counts)


def text(V: int, length: int, seed: int = 0) -> np.ndarray:
    return np.array(random.Random(seed).choices(range(V), k=length), np.int32)


def everything(V: int) -> Report:
    """Of every id."""
    return Report(ids=tuple(range(V)))


def logprobs(report: Logprobs, V: int) -> np.ndarray:
    """(T, V) of a report of everything."""
    return np.reshape(floats(report.top_values), (-1, V))


def following(prompt: np.ndarray, start: int, end: int) -> np.ndarray:
    """The targets of a piece of a prompt: every next id."""
    return np.append(prompt, np.int32(NONE))[start + 1 : end + 1]


def decode(runner: NativeRunner, slots: list[int], steps: int | list[int], **options):
    return runner.decode(np.array(slots), np.broadcast_to(np.array(steps), len(slots)), **options)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-11), ("float32", 2e-3)])
def test_log_probabilities_of_prompts_and_decoded_characters_equal_the_model(shape, dtype, tolerance):
    """Past the window, with the prompt in pieces of random lengths, several sequences together."""
    assert resolve("auto", dtype, "cpu") == ("native", dtype)
    model = random_model(**shape)
    V, W = model.config.vocab_size, model.config.block_size
    runner, rng = open_native(model, dtype=dtype), random.Random(1)
    prompts = [text(V, length, seed) for seed, length in enumerate((1, W, 2 * W + 7, 5 * W + 60))]
    found: list[list[np.ndarray]] = [[] for _ in prompts]
    every = everything(V)
    for slot, prompt in enumerate(prompts):
        runner.start(slot, SamplingParams(seed=slot), prompt)
    rest = dict(enumerate(prompts))
    while rest:
        some = rng.sample(sorted(rest), rng.randint(1, len(rest)))
        pieces = []
        for slot in some:
            piece, rest[slot] = np.split(rest[slot], [rng.randint(1, len(rest[slot]))])
            end = len(prompts[slot]) - len(rest[slot])
            targets = following(prompts[slot], end - len(piece), end)
            pieces.append(Piece(slot, piece, not len(rest[slot]), None, every, targets))
            if not len(rest[slot]):
                del rest[slot]
        outcome = runner.prefill(pieces)
        for b, slot in enumerate(some):
            found[slot].append(logprobs(outcome.reports[b], V))
            if pieces[b].choose:
                prompts[slot] = np.append(prompts[slot], outcome.ids[b])
    outcome = decode(runner, [3, 0, 2, 1], W + 20, reports=dict.fromkeys(range(4), every))
    for b, slot in enumerate((3, 0, 2, 1)):
        ids = np.append(prompts[slot], outcome.ids[b])[:-1]
        expected = model.double()(torch.from_numpy(ids).long()[None])[0].log_softmax(1).numpy()
        actual = np.concatenate([*found[slot], logprobs(outcome.reports[b], V)])
        assert actual.shape == expected.shape
        assert np.abs(actual - expected).max() < tolerance * max(1, np.abs(expected).max())


@pytest.mark.parametrize(("large", "cache"), [(1, "float16"), (1e6, "float32")])
def test_values_beyond_float16_are_kept_in_float32(large, cache):
    """Values a million times larger, which the projection makes small again."""
    model = random_model()
    for block in model.blocks:
        block.attn.qkv.weight[-model.config.n_kv_head * model.config.head_dim :] *= large
        block.attn.proj.weight /= large
    runner, prompt = open_native(model, dtype="float32"), text(61, 50)
    assert runner.description.endswith(f"keys and values in {cache}")
    runner.start(0, SamplingParams(), prompt)
    piece = Piece(0, prompt, True, None, everything(61), following(prompt, 0, 50))
    found = logprobs(runner.prefill([piece]).reports[0], 61)
    expected = model.double()(torch.from_numpy(prompt).long()[None])[0].log_softmax(1).numpy()
    assert np.abs(found - expected).max() < 2e-3 * np.abs(expected).max()


@pytest.mark.parametrize("weight_dtype", [torch.float16, torch.float32])
def test_text_of_a_seed_is_that_of_generate(weight_dtype):
    """fp16 weights are stored as such, for arithmetic in fp32."""
    model = random_model().to(weight_dtype)
    stored = f"weights in {str(weight_dtype).removeprefix('torch.')}, keys and values in float16"
    assert stored in open_native(model, dtype="float32").description
    runner = open_native(model)
    assert "weights in float32, keys and values in float64" in runner.description
    rng = np.random.default_rng(0)
    for params in [SamplingParams(seed=MAX_SEED), *(random_params(rng, 61) for _ in range(5))]:
        prompt = text(61, 20, seed=3)
        runner.start(2, params, prompt)
        ids = runner.prefill([Piece(2, prompt, True)]).ids[0].tolist() + decode(runner, [2], 60).ids[0].tolist()
        assert ids == model.double().generate(prompt.tolist(), 61, params), params


def test_reports_are_the_likeliest_in_order_and_of_equals_the_lower_id_first():
    """The targets' first, then the chosen one's; as the reference has them."""
    logits = np.array([0.5, 2.0, 2.0, -1.0, 2.0, 0.5], np.float32)
    fixed, row = Fixed(logits), Fixed(logits).logits[None].numpy()
    fixed.runner.start(0, SamplingParams(seed=1), [0, 1, 3])
    for report in (Report(4), Report(20), Report(0), Report(ids=(5, 0))):
        piece = Piece(0, np.array([0, 1, 3], np.int32), True, None, report, np.array([1, NONE, NONE], np.int32))
        outcome = fixed.runner.prefill([piece])
        expected = report_of(np.repeat(row, 2, axis=0), [1, outcome.ids[0, 0]], report)
        assert outcome.reports[0].top_ids == expected.top_ids
        assert floats(outcome.reports[0].values) == pytest.approx(floats(expected.values), abs=1e-14)
        assert floats(outcome.reports[0].top_values) == pytest.approx(floats(expected.top_values), abs=1e-14)


class Fixed:
    """A model whose logits are the given ones after any text, up to a common factor."""

    def __init__(self, logits: np.ndarray):
        model = random_model(vocab_size=len(logits), n_layer=1)
        for parameter in model.parameters():
            parameter.zero_()
        model.embed.weight[:, 0] = 1.0
        model.norm.weight[0] = 1.0
        C, eps = model.config.n_embd, model.config.norm_eps
        model.head.weight[:, 0] = torch.from_numpy(logits / math.sqrt(C))
        self.logits = model.head.weight[:, 0].double() * (1.0 / math.sqrt(1.0 / C + eps))
        self.runner = open_native(model, slots=1, threads=1)


def one_of(allowed: np.ndarray) -> Guide:
    """A pattern of one character."""
    kinds, classes = np.unique(allowed, return_inverse=True)
    table = np.array([[1 if kind else -1 for kind in kinds], [-1 for _ in kinds]], np.int16)
    return Guide(Automaton(classes.astype(np.uint16), table, np.array([False, True]), np.array([1, 0], np.int32)), 1)


@pytest.mark.parametrize("seed", range(5))
def test_choices_equal_the_reference_sampler(seed):
    """Arbitrary parameters, logits (ties too), penalties' histories and masks."""
    rng = np.random.default_rng(seed)
    for V in (1, 2, 3, 65, int(rng.integers(4, 200)), 3000 if seed == 0 else 17):
        logits = rng.normal(size=V) * rng.choice([0.3, 2.0, 8.0])
        fixed = Fixed(np.float32(logits.round() if rng.random() < 0.3 else logits))
        runner = fixed.runner
        for _ in range(15):
            params = random_params(rng, V)
            prompt = rng.integers(V, size=rng.integers(1, 9)).astype(np.int32)
            allowed = rng.random(V) < rng.choice([0.1, 0.9])
            allowed[rng.integers(V)] = True
            runner.start(0, params, prompt)
            first = runner.prefill([Piece(0, prompt[-1:], True, one_of(allowed), everything(V))])
            then = decode(runner, [0], 6)
            actual = [*first.ids[0].tolist(), *then.ids[0].tolist()]
            rows, history = [params], History(V, prompt.tolist())
            assert logprobs(first.reports[0], V)[0] == pytest.approx(fixed.logits.log_softmax(0).numpy(), abs=1e-12)
            z, u = fixed.logits[None], torch.from_numpy(uniforms(params.seed, 0, 7))
            for i, id in enumerate(actual):
                mask = torch.from_numpy(allowed)[None] if i == 0 else None
                assert id == int(sample(z, rows, u[i : i + 1], histories=[history], allowed=mask)), (V, i, params)
                history.append(id)


def run_all(model: GPT, dtype: str, *, threads: int, together: bool, piece: int, steps: int) -> list:
    """Ids and log-probabilities of seven sequences of different lengths, however they are run."""
    runner = open_native(model, 7, threads, dtype)
    V = model.config.vocab_size
    prompts = [text(V, 1 + 29 * i, seed=i) for i in range(7)]
    groups = [list(range(7))] if together else [[i] for i in range(7)]
    ids: list[list[int]] = [[] for _ in prompts]
    reported: list[list[np.ndarray]] = [[] for _ in prompts]
    for group in groups:
        for slot in group:
            runner.start(slot, SamplingParams(0.9, top_p=0.95, seed=slot), prompts[slot])
        for start in range(0, max(len(prompts[slot]) for slot in group), piece):
            some, pieces = [slot for slot in group if start < len(prompts[slot])], []
            for slot in some:
                prompt, end = prompts[slot], min(start + piece, len(prompts[slot]))
                targets = following(prompt, start, end)
                pieces.append(Piece(slot, prompt[start:end], end == len(prompt), None, everything(V), targets))
            outcome = runner.prefill(pieces)
            for b, slot in enumerate(some):
                reported[slot].append(logprobs(outcome.reports[b], V))
                ids[slot] += outcome.ids[b][outcome.ids[b] != NONE].tolist()
        for counts in [[1 + 5 * slot for slot in group], *itertools.repeat([steps] * len(group), 48 // steps)]:
            outcome = decode(runner, group, counts, reports=dict.fromkeys(range(len(group)), everything(V)))
            for b, slot in enumerate(group):
                reported[slot].append(logprobs(outcome.reports[b], V))
                ids[slot] += outcome.ids[b][: counts[b]].tolist()
    return [ids, [np.concatenate(some).tobytes() for some in reported]]


WAYS = [
    {"threads": 1, "together": False, "piece": 1000, "steps": 1},
    {"threads": 1, "together": True, "piece": 1000, "steps": 16},
    {"threads": 2, "together": False, "piece": 1000, "steps": 48},  # two threads on each batch
    {"threads": 3, "together": True, "piece": 7, "steps": 3},
    {"threads": 2, "together": True, "piece": 50, "steps": 8},
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[3]])
def test_bits_do_not_depend_on_batch_threads_pieces_and_steps(shape, dtype):
    model = random_model(**shape)
    first, *others = [run_all(model, dtype, **way) for way in WAYS]
    for other in others:
        assert other == first


@pytest.mark.parametrize(
    ("least", "most", "shape", "ways"),
    [
        # With weights of more than 32 MB threads share every batch, with fewer those of at most two sequences.
        (32 << 20, 1 << 30, {"n_layer": 1, "n_embd": 1024, "n_head": 8, "n_kv_head": 4}, WAYS[4:]),
        (1 << 20, 16 << 20, {"n_layer": 3, "n_embd": 128, "n_head": 4, "n_kv_head": 2}, WAYS[3:]),
    ],
)
def test_bits_do_not_depend_on_threads_that_run_a_batch_together(least, most, shape, ways):
    model = random_model(block_size=16, **shape)
    assert least < sum(p.numel() for p in model.blocks.parameters()) * 4 < most
    first = run_all(model, "float32", **WAYS[0])
    for way in ways:
        assert run_all(model, "float32", **way) == first


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("has_counts", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_bits_of_one_or_two_rows_do_not_depend_on_the_number_of_threads(rows, has_counts, dtype):
    """Plain, with log-probabilities and with a pattern. Calls of few steps are not worth waking a second thread."""
    (model, counts), automaton = guessed(13), compile_regex("([b-y]{2}[^a]){200}", VOCABULARY)
    for temperature, has_reports, has_guides in itertools.product((0.0, 1.0), (False, True), (False, True)):
        runs = []
        for threads, steps in ((1, 7), (1, 90), (2, 90), (3, 40)):
            runner = open_native(model, rows, threads, dtype, counts if has_counts else None)
            guides = {b: Guide(automaton, 600) for b in range(rows) if has_guides}
            reports = dict.fromkeys(range(rows), everything(61)) if has_reports else {}
            prompts, length = [text(61, 5 + b, b) for b in range(rows)], 400
            for b, prompt in enumerate(prompts):
                runner.start(b, SamplingParams(temperature, seed=b), prompt)
            outcome = runner.prefill(
                [Piece(b, it, True, guides.get(b), reports.get(b)) for b, it in enumerate(prompts)]
            )
            ids, reported = outcome.ids, [[outcome.reports[b] for b in reports]]
            while new := min(steps, length - ids.shape[1]):
                for b, guide in guides.items():
                    assert all(map(guide.push, outcome.ids[b].tolist()))
                outcome = decode(runner, [*range(rows)], new, guides=guides, reports=reports)
                ids = np.concatenate([ids, outcome.ids], axis=1)
                reported.append([outcome.reports[b] for b in reports])
            values = [b"".join(bytes(of_call[b].top_values) for of_call in reported) for b in reports]
            runs.append((ids.tolist(), values))
        assert all(run == runs[0] for run in runs)


@pytest.mark.parametrize(("dtype", "weight_dtype"), [("float32", torch.float16), ("float64", torch.float32)])
@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[3]])
def test_bits_are_the_same_in_each_instruction_set(shape, dtype, weight_dtype, monkeypatch):
    flags = native._cpu_flags()
    runs = []
    for path in filter(Path.exists, LIBRARIES):
        variant = path.name.removeprefix("_native_").split(".")[0]
        if native._VARIANTS.get(variant, set()) <= flags:
            monkeypatch.setattr(native, "library", lambda path=path: native._load(path))
            runs.append(run_all(random_model(**shape).to(weight_dtype), dtype, **WAYS[1]))
    assert runs
    assert all(run == runs[0] for run in runs)


@pytest.mark.needs("compiler")
def test_logarithms_are_those_of_long_doubles(tmp_path):
    """Within a unit of the last place, near 1 too, and with the same bits in each instruction set."""
    rng = np.random.default_rng(0)
    exponents = np.concatenate([rng.uniform(-1022, 1024, 200_000), rng.uniform(-1e-3, 1e-3, 50_000)])
    tiny = np.finfo(np.float64).tiny
    x = np.concatenate([2.0**exponents, 1 + np.arange(-100, 101) * 2.0**-52, [tiny, 0.5, 1, 2, np.sqrt(0.5), 1 / tiny]])
    x = x[: len(x) // 8 * 8]
    expected = np.log(x.astype(np.longdouble))
    found, flags = [], native._cpu_flags()
    for variant, its in VARIANTS[SOURCE].items():
        if not native._VARIANTS.get(variant, set()) <= flags:
            continue
        path, source = tmp_path / f"{variant}.so", Path(__file__).with_name("lanes.cpp")
        command = [program("compiler"), "-I", Path(__file__).parents[2], *FLAGS, *OWN_FLAGS[SOURCE], *its]
        subprocess.run([*command, source, "-o", path], check=True)
        given = x.copy()
        ctypes.CDLL(str(path)).logarithms(given.ctypes.data_as(ctypes.c_void_p), len(given))
        assert (np.abs(given - expected) <= np.spacing(np.abs(expected.astype(np.float64)))).all()
        found.append(given)
    assert found
    assert all((it == found[0]).all() for it in found)


def test_a_copy_past_the_window_is_possible_only_at_the_sources_end():
    model = random_model(block_size=8)
    runner = open_native(model)
    prompt = text(61, 30)
    for slot in range(3):
        runner.start(slot, SamplingParams(seed=9), prompt)
    runner.prefill([Piece(0, prompt[:29], False)])
    for length in (1, 28, 30):
        with pytest.raises(RuntimeError, match="source"):
            runner.copy(0, 1, length)
    runner.copy(0, 1, 29)
    with pytest.raises(RuntimeError, match="lost"):
        runner.copy(1, 2, 28)
    runner.copy(1, 2, 29)
    runner.prefill([Piece(slot, prompt[29:], True) for slot in range(3)])
    texts = decode(runner, [0, 1, 2], 20).ids
    assert (texts == texts[0]).all()


def test_rows_stop_at_their_own_steps_and_logits_that_are_not_finite_end_theirs():
    model = random_model()
    model.embed.weight[7] = float("nan")
    runner = open_native(model)
    for slot in range(3):
        runner.start(slot, SamplingParams(logit_bias=((7, -100.0),), seed=slot), [1])
    prompts = text(7, 5), np.array([7], np.int32), text(7, 9)
    first = runner.prefill([Piece(slot, prompt, True) for slot, prompt in enumerate(prompts)])
    assert first.ids[1] == FAILED
    assert (first.ids[[0, 2]] >= 0).all()
    ids = decode(runner, [2, 0], [3, 6]).ids
    assert (ids[0] == NONE).tolist() == [False] * 3 + [True] * 3
    assert (ids[1] >= 0).all()


def test_border_refuses_what_would_read_or_write_elsewhere():
    runner = open_native(random_model())
    runner.start(0, SamplingParams(), [1])
    ids = np.array([1], np.int32)
    for refused, message in [
        (lambda: runner.start(4, SamplingParams(), [1]), "slot"),
        (lambda: runner.start(-1, SamplingParams(), [1]), "slot"),
        (lambda: runner.prefill([Piece(4, ids, True)]), "slot"),
        (lambda: runner.prefill([Piece(0, ids, True), Piece(0, ids, True)]), "twice"),
        (lambda: runner.prefill([Piece(0, np.array([61], np.int32), True)]), "id"),
        (lambda: runner.prefill([Piece(0, np.array([-1], np.int32), True)]), "id"),
        (lambda: runner.prefill([Piece(0, ids, True, Guide(one_of(np.ones(61, bool)).automaton, 0))]), "short"),
        (lambda: runner.prefill([Piece(0, ids, False, None, Report(), ids + 60)]), "id"),
        (lambda: decode(runner, [0], 1), "continue"),
        (lambda: decode(runner, [0], 0), "nothing"),
        (lambda: runner.copy(0, 1, 1), "hold"),
        (lambda: runner.copy(0, 9, 1), "slot"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            refused()
    for params, prompt, message in [
        (SamplingParams(logit_bias=((61, 1.0),)), [1], "logit_bias ids must be below 61, got 61"),
        (SamplingParams(), [1, 61, -3], r"ids must be in \[0, 60\], got -3 … 61"),
    ]:
        with pytest.raises(ValueError, match=message):
            runner.start(0, params, prompt)
    assert runner.prefill([Piece(0, ids, True)]).ids[0, 0] >= 0


def test_other_dtypes_and_shapes_of_weights_are_refused():
    given = weights(random_model()) | {"blocks.1.mlp.proj.weight": np.zeros((16, 4), np.float32)}
    with pytest.raises(SelfCheckError, match=r"blocks.1.mlp.proj.weight has shape \(16, 4\) instead of \(16, 48\)"):
        NativeRunner(random_model().config, given, 1, 1)
    for name, shape in ("blocks.0.scale", (16,)), ("pos.weight", (8, 16)):  # they once shifted all later pointers
        with pytest.raises(SelfCheckError, match=f"{name} has shape .* instead of none; use --backend torch"):
            NativeRunner(random_model().config, {name: np.ones(shape, np.float32), **weights(random_model())}, 1, 1)
    given = {name: value for name, value in weights(random_model()).items() if "q_norm" not in name}
    with pytest.raises(SelfCheckError, match=r"blocks.0.attn.q_norm.weight has shape none instead of \(\d+,\)"):
        NativeRunner(random_model().config, given, 1, 1)
    model = random_model().double()
    model.head.weight[0, 0] += 1e-12
    with pytest.raises(ValueError, match="head.weight has values that are not float32"):
        open_native(model)
    with pytest.raises(ValueError, match="computes in float32 or float64.*got float16"):
        open_native(random_model(), dtype="float16")


def test_bfloat16_is_refused_before_a_worker_starts():
    for backend in ("native", "auto"):
        assert resolve(backend, "float64", "cpu") == ("native", "float64")
        with pytest.raises(ValueError, match="dtype must be auto, float32 or float64 for backend native, got bfloat16"):
            resolve(backend, "bfloat16", "cpu")
    assert resolve("torch", "bfloat16", "cpu") == ("torch", "bfloat16")


@pytest.mark.parametrize("content", [b"", b"no library"])
def test_a_library_that_cannot_be_loaded_is_named(content, tmp_path, monkeypatch):
    for variant in ("base", *native._VARIANTS):
        (tmp_path / f"_native_{variant}.so").write_bytes(content)
    monkeypatch.delenv(native.LIBRARY_VARIABLE, raising=False)
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    try:
        for _ in ("where it belongs", "where the variable says"):
            native.library.cache_clear()
            with pytest.raises(ValueError, match=rf"{tmp_path}/_native_.* run make native"):
                resolve("native", "auto", "cpu")
            monkeypatch.setenv(native.LIBRARY_VARIABLE, str(tmp_path / "_native_base.so"))
    finally:
        native.library.cache_clear()


def test_a_forked_process_is_told_that_it_cannot_run():
    runner = open_native(random_model())
    runner.start(0, SamplingParams(), [1])
    child = os.fork()
    if child == 0:
        try:
            runner.prefill([Piece(0, text(61, 5), True)])
        except RuntimeError as error:
            os._exit(7 if "another process" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_positions_far_beyond_the_kept_rotations_are_computed():
    """4,096 rotations are kept; the text goes on past them."""
    model = random_model(block_size=4, n_layer=1)
    runner = open_native(model)
    prompt = text(61, 4200)
    runner.start(0, SamplingParams(), prompt)
    piece = Piece(0, prompt, True, None, everything(61), following(prompt, 0, 4200))
    found = logprobs(runner.prefill([piece]).reports[0], 61)
    expected = model.double()(torch.from_numpy(prompt).long()[None])[0].log_softmax(1).numpy()
    assert np.abs(found - expected).max() < 1e-10


def test_runners_with_their_threads_come_and_go():
    """A thread takes no large page for each of its arrays."""
    model, process = random_model(), psutil.Process()
    for threads in itertools.chain(range(1, 9), [40]):
        before = process.memory_info().rss
        runner = open_native(model, slots=threads, threads=threads)
        for slot in range(threads):
            runner.start(slot, SamplingParams(), [1])
        runner.prefill([Piece(slot, text(61, 40), True) for slot in range(threads)])
        assert process.memory_info().rss - before < (4 * threads + 30) * 1e6
        runner.close()


def written(
    runner: NativeRunner, prompt: np.ndarray, params: SamplingParams, length: int, steps: int, slot: int = 0
) -> list[int]:
    """A text of `length` ids after a prompt, alone, by calls of `steps`."""
    runner.start(slot, params, prompt)
    ids = runner.prefill([Piece(slot, prompt, True)]).ids[0].tolist()
    while len(ids) < length:
        ids += decode(runner, [slot], min(steps, length - len(ids))).ids[0].tolist()
    return ids


def counts_of(model: GPT) -> Counts:
    """Of texts of the model: many guesses are right, and many are wrong."""
    runner, V = open_native(model), model.config.vocab_size
    texts = [written(runner, text(V, 5, seed), SamplingParams(0.5, seed=100 + seed), 2000, 64) for seed in range(5)]
    return Counts.load(Counts.count(np.array(texts, np.uint16).ravel(), V).dump(), V)


@functools.cache
def guessed(window: int) -> tuple[GPT, Counts]:
    """A model and counts of its texts."""
    model = random_model(block_size=window)
    return model, counts_of(model)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("window", [1, 2, 13])
@pytest.mark.parametrize("has_counts", [False, True])
def test_guesses_do_not_change_a_text(dtype, window, has_counts):
    """Alone and with many steps per call, characters are guessed and run ahead; with one step they are not. In a small
    ring, wrong guesses overwrite keys that are still to be seen."""
    model, counts = guessed(window)
    counts = counts if has_counts else None
    guesses = np.zeros(2, int)
    for temperature in (0.0, 0.3, 1.0):
        texts = []
        for steps in (1, 100):
            runner = open_native(model, dtype=dtype, counts=counts)
            params = [SamplingParams(temperature, seed=seed) for seed in range(3)]
            texts.append([written(runner, text(61, 5, seed), each, 300, steps) for seed, each in enumerate(params)])
            guesses += runner.guesses
            if steps == 1 or window == 1:
                assert runner.guesses == (0, 0)
            elif has_counts:
                assert runner.guesses[1] > 0
        assert texts[0] == texts[1]
    assert window == 1 or guesses[0] > guesses[1]  # some are wrong


def test_guesses_do_not_change_a_text_with_any_parameters_and_pattern():
    (model, counts), rng = guessed(13), np.random.default_rng()
    automaton = compile_regex("(ab|[^a]{2,9}z)*[b-y]+", VOCABULARY)
    for _ in range(20):
        params, texts = random_params(rng, 61), []
        for steps in (1, 100):
            runner, guide, prompt = open_native(model, counts=counts), Guide(automaton, 100), text(61, 5)
            runner.start(0, params, prompt, [5])
            ids = runner.prefill([Piece(0, prompt, True, guide)]).ids[0].tolist()
            goes_on = guide.push(ids[-1])
            while goes_on and guide.remaining and not guide.must_end and ids[-1] != 5:
                new = decode(runner, [0], min(steps, guide.remaining), guides={0: guide}).ids[0]
                for id in new[new != NONE].tolist():
                    ids.append(id)
                    goes_on = goes_on and guide.push(id)
            texts.append(ids)
        assert texts[0] == texts[1], params


def test_a_guess_is_what_the_counts_give_at_the_draw():
    """As many guesses are made, and right, as those of a reference, which takes the same draws."""
    (model, counts), length = guessed(13), 1500
    for temperature in (0.5, 1.0):
        runner, prompt = open_native(model, counts=counts), text(61, 5, 7)
        ids = written(runner, prompt, SamplingParams(temperature, seed=3), length, length)
        draws, whole = uniforms(3, 0, length), [*prompt.tolist(), *ids]
        found = []  # of each character after the first: whether its guess is right, and how surely
        for i in range(1, length):
            p = counts.next(whole[: i + 5])[0] ** (1 / temperature)
            cdf = np.concatenate([[0.0], p.cumsum() / p.sum()])
            id = int((cdf[1:] <= draws[i]).sum())
            below = draws[i] - cdf[id] if cdf[id] > 1e-4 else 1
            above = cdf[id + 1] - draws[i] if cdf[id + 1] < 1 - 1e-4 else 1
            margin = min(below, above)
            found.append((id == ids[i], (margin + 0.012) / (margin + 0.054)))
        at = number = right = 0
        while at < len(found) - 1:  # nothing follows the last one
            accepted, all_right = 0, 1.0
            for is_right, certainty in found[at : min(at + 4, len(found) - 1)]:
                all_right *= certainty
                if all_right < 0.6:
                    break
                number += accepted == 0
                if not is_right:
                    break
                accepted += 1
            right += accepted > 0
            at += 1 + accepted
        assert runner.guesses == pytest.approx((number, right), rel=0.05)
        assert right > 0.15 * number > 0


def test_guesses_tell_nothing_of_other_sequences():
    """A text takes as many steps after an equal one, in its slot or another, as after none."""
    model, counts_of_it = guessed(13)
    for counts in (None, counts_of_it):
        for params in (SamplingParams(0.0), SamplingParams(0.3, seed=1)):
            numbers = set()
            for earlier in (None, 0, 1):
                runner = open_native(model, threads=1, counts=counts)
                if earlier is not None:
                    written(runner, text(61, 5), params, 300, 100, earlier)
                before = runner.guesses
                written(runner, text(61, 5), params, 300, 100)
                numbers.add(tuple(np.subtract(runner.guesses, before).tolist()))
            assert len(numbers) == 1


def test_what_a_wrong_guess_overwrote_can_be_copied():
    """The text ends after position 12, the last that fits the window, with an id that was not guessed: the rows of the
    guesses took the places of the first positions."""
    (model, counts), every, wrong = guessed(13), everything(61), 0
    for seed in range(40):
        runner, prompt, params = open_native(model, counts=counts), text(61, 5, seed), SamplingParams(seed=seed)
        *ids, last = written(runner, prompt, params, 9, 1)
        if last in ids:
            continue
        runner.start(0, params, prompt, [last])
        runner.prefill([Piece(0, prompt, True)])
        assert decode(runner, [0], 30).ids[0].tolist() == [*ids[1:], last, *[NONE] * 22]
        whole, found = np.array([*prompt, *ids], np.int32), []
        for slot, first in ((1, 12), (2, 0)):
            runner.start(slot, params, prompt)
            if first:
                runner.copy(0, slot, first)
            outcome = runner.prefill([Piece(slot, whole[first:], True, None, every)])
            found.append(logprobs(outcome.reports[0], 61))
        np.testing.assert_array_equal(*found)
        wrong += int(np.subtract(*runner.guesses))
    assert wrong > 10


@pytest.mark.parametrize(("temperature", "share"), [(0.8, 0.6), (1.0, 0.55)])
def test_the_bundled_checkpoint_guesses_a_new_text(temperature, share):
    checkpoint = Checkpoint.read(BUNDLED)
    runner = open_runner(checkpoint, "native", slots=1)
    for seed in range(3):
        prompt = np.array(checkpoint.tokenizer.encode("And "), np.int32)
        written(runner, prompt, SamplingParams(temperature, seed=100 + seed), 1000, 100)
    number, right = runner.guesses
    assert right > share * number > 500
