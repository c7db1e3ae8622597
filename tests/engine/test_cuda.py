"""Backend cuda: its graphs on a GPU (`-m cuda`); elsewhere the same operations, eagerly, outcomes collected as late."""

import collections
import itertools
import random

import httpx
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from service.engine.backends import open_runner, slots_that_fit
from service.engine.cuda import CudaRunner
from service.engine.engine import Engine
from service.engine.runner import NONE, Piece, Report
from service.model.params import SamplingParams
from service.settings import BUNDLED
from service.wire import Submit, floats
from tests.bench import engine as bench_engine
from tests.helpers import PATIENCE, RunningServer, random_model, save_random, wait_until
from tests.model.test_sampling import random_params
from tests.toolbox.launch import ServerError

OPERATIONS_PER_LAYER = 14
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def runner_of(model, slots, dtype="float64", device="cpu"):
    """On a CPU without graphs; outcomes are read after the next launch there too."""
    runner = CudaRunner(model, slots, dtype, device)
    runner.is_async = True
    return runner


def requests(count, seed=0, longest=40):
    """Random prompts, lengths and parameters; every third has a stop."""
    r, rng = random.Random(seed), np.random.default_rng(seed)
    made = []
    for number in range(count):
        prompt = [r.randrange(61) for _ in range(r.choice([1, 3, 17, 40, 64, 65, 130, 300]))]
        stop = ((r.randrange(61),),) * (number % 3 == 1)
        made.append(Submit(number, prompt, r.randint(1, longest), random_params(rng, 61), stop=stop))
    return made


def run_at_random(engine, submits, seed=0):
    """Texts by id, submitted in a random order while others run."""
    r = random.Random(seed)
    todo, texts = submits[:], {submit.id: [] for submit in submits}
    r.shuffle(todo)
    while todo or engine.has_work:
        while todo and r.random() < 0.4:
            engine.submit(todo.pop())
        for delta in engine.step():
            assert delta.finish_reason in (None, "stop", "length")
            texts[delta.id] += delta.ids
    return texts


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_texts_do_not_depend_on_load_and_are_those_of_other_backends_in_float64(dtype, device):
    model = random_model(torch.float64 if dtype == "float64" else torch.float32, block_size=70)
    runner, count = runner_of(model, 6, dtype, device), 40 if device == "cuda" else 16
    submits = requests(count, longest=60)
    if dtype == "float64":
        alone = Engine(open_runner(model, "auto", dtype, 8)).generate(submits)
    else:
        alone = [Engine(runner).generate([submit])[0] for submit in submits]
    for seed, clock in ((0, None), (1, itertools.count().__next__), (2, lambda: 0.0)):
        texts = run_at_random(Engine(runner, **({"clock": clock} if clock else {})), requests(count, longest=60), seed)
        assert [texts[number] for number in range(count)] == alone


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [{"block_size": 70}, {"block_size": 256, "n_embd": 128}])
def test_log_probabilities_are_near_the_reference_in_every_dtype(shape, device):
    """Of a prompt, and of the characters after it; head_dim 4 and 32 take different kernels."""
    model = random_model(torch.float64, **shape)
    prompt = np.random.default_rng(0).integers(0, 61, 300)
    for dtype, tolerance in (("float64", 1e-11), ("float32", 1e-4), ("bfloat16", 0.1)):
        runner = CudaRunner(model, 3, dtype, device)
        runner.start(1, SamplingParams(seed=1), prompt)
        report = Report(ids=tuple(range(61)))
        first = runner.prefill([Piece(1, prompt, True, None, report, np.append(prompt[1:], NONE))])()
        rest = runner.decode(np.array([1]), np.array([16]), reports={0: report})()
        columns = [floats(outcome.reports[0].top_values) for outcome in (first, rest)]
        logprobs = np.concatenate([np.reshape(column, (-1, 61)) for column in columns])
        text = np.concatenate((prompt, first.ids[0], rest.ids[0][:-1]))
        expected = model(torch.from_numpy(text)[None])[0].log_softmax(1).numpy()
        assert np.abs(logprobs - expected).max() < tolerance * np.abs(expected).max()


def test_prompts_that_share_a_beginning_share_whole_pieces_of_prompts_alone():
    """What was generated has other bits than as part of a prompt, and a piece that begins elsewhere than alone too."""
    runner = runner_of(random_model(block_size=256), 4, "float32")
    engine = Engine(runner)
    beginning = list(np.random.default_rng(0).integers(0, 61, 150))
    prompts = [beginning + [number] * 5 for number in range(3)]
    [first] = engine.generate([Submit(0, prompts[0], 30, SamplingParams())])
    assert engine.stats.num_copied_tokens == 0
    copied = []
    for number, prompt in enumerate([*prompts, prompts[0] + first + [1]]):
        engine.submit(Submit(number, prompt, 3, SamplingParams()))
        while engine.has_work:
            engine.step()
            copied.append(engine.stats.num_copied_tokens)
    assert [count for count in copied if count] == [128, 128, 128, 128]


def test_an_error_of_the_device_itself_ends_the_process(monkeypatch):
    """After others the engine goes on; after this one no call could succeed."""
    engine = Engine(runner_of(random_model(), 2))

    def fail(*_):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    engine.submit(Submit(0, [1], 5, SamplingParams()))
    monkeypatch.setattr(engine.runner, "prefill", fail)
    with pytest.raises(torch.AcceleratorError):
        engine.step()


def test_the_next_launch_goes_out_before_the_last_one_is_read():
    """So the device never waits for the host; a stop is noticed one launch late, and what ran beyond it is counted."""
    runner = runner_of(random_model(torch.float64), 2)
    events, launch = [], runner._launch

    def spied(*arguments):
        number, wait = sum(kind == "launched" for kind, _ in events), launch(*arguments)
        events.append(("launched", number))
        return lambda: events.append(("read", number)) or wait()

    runner._launch = spied
    engine = Engine(runner, step_seconds=1e-9)  # one step per launch
    engine.submit(Submit(0, [1], 6, SamplingParams()))
    dropped = 0
    while engine.has_work:
        engine.step()
    assert events[:6] == [("launched", 0), ("launched", 1), ("read", 0), ("launched", 2), ("read", 1), ("launched", 3)]
    assert [number for kind, number in events if kind == "read"] == list(range(6))
    [text] = engine.generate([Submit(1, [1], 6, SamplingParams())])
    engine.submit(Submit(2, [1], 6, SamplingParams(), stop=((text[2],),)))
    while engine.has_work:
        engine.step()
        dropped += engine.stats.num_dropped_tokens
    assert dropped == 1  # of the launch after the one that chose the stop


class Recorder(TorchDispatchMode):
    """Every operation with the shapes of its tensors, views excluded; composite ones as what they consist of.

    RMSNorm is one operation, as it is one kernel on a GPU; a CPU has none for it.
    """

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
        if is_composite and name != "aten::rms_norm":
            with self:
                return function.decompose(*args, **(kwargs or {}))
        found = function(*args, **(kwargs or {}))
        if not function.is_view and name not in ("aten::_unsafe_view", "aten::_reshape_alias"):
            leaves = torch.utils._pytree.tree_leaves((args, kwargs, found))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            self.calls.append((name, tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)))
        return found


def recorded(function):
    with Recorder() as recorder:
        function()
    return recorder.calls


def filled(model, slots, dtype="float32"):
    """A runner whose slots 0 … have run prompts, with random parameters."""
    runner = runner_of(model, slots, dtype)
    for slot, submit in enumerate(requests(slots - 1)):
        runner.start(slot, submit.sampling, submit.prompt)
        runner.prefill([Piece(slot, np.array(submit.prompt), True)])
    return runner


def test_a_launch_is_the_same_operations_whatever_the_load():
    runner = filled(random_model(block_size=80), 6)
    everything = SamplingParams(top_k=3)
    runner.start(5, everything, [1])
    runner.prefill([Piece(5, np.array([1]), True)])
    one = recorded(lambda: runner.decode(np.array([5]), np.array([1])))
    for slots, steps in (([0, 1, 2, 3, 4, 5], [1] * 6), ([5, 2], [1, 1])):
        assert recorded(lambda: runner.decode(np.array(slots), np.array(steps))) == one  # noqa: B023
    many = recorded(lambda: runner.decode(np.array([5, 0, 1]), np.array([16, 2, 9])))
    assert recorded(lambda: runner.decode(np.array([5]), np.array([9]))) == many

    def prompt(lengths):
        for slot in range(len(lengths)):
            runner.start(slot, everything, [1])
        return recorded(lambda: runner.prefill([Piece(s, np.ones(n, int), True) for s, n in enumerate(lengths)]))

    assert prompt([1]) == prompt([64, 3, 7, 20]) == prompt([64] * 6)
    assert prompt([65, 65]) == prompt([128, 70, 100])


def test_a_launch_reads_no_scalar_and_copies_once_to_the_host():
    runner = filled(random_model(block_size=80), 6)
    calls = recorded(lambda: runner.decode(np.arange(5), np.full(5, 16)))
    names = collections.Counter(name for name, _ in calls)
    assert not [name for name in names if "local_scalar" in name or "nonzero" in name or "unique" in name]
    # Besides what each step stores (its logits, choices and last ids): in goes the plan, as 64-bit words, out the ids.
    words = runner._plan._device_side.numel()
    copies = collections.Counter(shapes[0] for name, shapes in calls if name == "aten::copy_")
    assert copies == {
        ((words,), torch.int64): 1, ((6, 61), torch.float64): 16, ((6,), torch.int32): 16, ((6,), torch.int64): 16,
        ((16, 6), torch.int32): 1,
    }  # fmt: skip


def test_operations_per_layer():
    def count(n_layer):
        runner = filled(random_model(n_layer=n_layer), 4)
        return len(recorded(lambda: runner.decode(np.arange(3), np.ones(3, int))))

    two, three = count(2), count(3)
    print(f"\noperations: {three - two} per layer, {two - 2 * (three - two)} besides, of them sampling most")
    assert three - two <= OPERATIONS_PER_LAYER


def test_state_stays_where_it_is():
    """Graphs read fixed addresses."""
    runner = filled(random_model(), 4)

    def addresses():
        held = [vars(runner), vars(runner._sampler), runner._plan.tensors, runner._pieces.tensors, runner._layers]
        return [it.data_ptr() for it in torch.utils._pytree.tree_leaves(held) if isinstance(it, torch.Tensor)]

    before = addresses()
    assert len(before) >= 30
    run_at_random(Engine(runner), requests(20))
    assert addresses() == before


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_slots_that_fit_leave_a_tenth_of_the_memory(dtype):
    config = random_model(block_size=256, n_layer=6, n_embd=384, n_head=6, n_kv_head=6).config
    item = {"float64": 8, "float32": 4, "bfloat16": 2}[dtype]
    slot = item * 2 * 6 * 6 * 257 * 64
    slots = slots_that_fit(config, dtype, 8e9)
    assert 0.5 * 7.2e9 < slots * slot < 7.2e9
    assert slots_that_fit(config, dtype, 1e9) == 0 and slots_that_fit(config, dtype, 1e13) == 4096


@pytest.mark.cuda
def test_another_gpu_than_the_first_gives_the_same_texts():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model = random_model(block_size=70)
    texts = [run_at_random(Engine(runner_of(model, 6, "float64", f"cuda:{i}")), requests(30)) for i in (0, 1)]
    assert texts[0] == texts[1]


@pytest.mark.cuda
def test_graphs_allocate_nothing_after_warm_up():
    runner = runner_of(random_model(block_size=128), 32, "float32", "cuda")
    for turn in range(2):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        run_at_random(Engine(runner), requests(50), turn)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.cuda
def test_graphs_equal_the_same_operations_run_eagerly():
    model = random_model(block_size=70)
    texts = []
    for has_graphs in (True, False):
        runner = CudaRunner(model, 6, "float32", "cuda")
        if not has_graphs:
            runner._has_graphs = False
            runner._capture_all()
        texts.append(run_at_random(Engine(runner), requests(40)))
    assert texts[0] == texts[1]


@pytest.mark.cuda
def test_out_of_memory_is_one_sentence(tmp_path):
    save_random(tmp_path / "m", block_size=4096, n_layer=24, n_embd=1024, n_head=8, n_kv_head=8)
    with RunningServer(tmp_path / "m", accelerator="cuda", max_running_requests=4096) as server:
        with pytest.raises(ServerError):
            server.wait_until_ready()
        assert "out of memory on cuda:0 with 4096 slots" in server.output()
        assert "Traceback" not in server.output()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("slots", "count", "at_once"), [(64, 10_000, 4), (64, 1000, 1), (512, 1000, 1)])
def test_ten_thousand_texts_do_not_depend_on_the_load(dtype, slots, count, at_once):
    ours = bench_engine.Ours(BUNDLED, "cuda", dtype, slots=slots, threads=1, device="cuda")
    assert ours.texts(count, 64) == ours.texts(count, 64, at_once)


@pytest.mark.cuda
def test_a_killed_worker_is_replaced_and_two_http_processes_answer_the_same_text():
    body = {"prompt": "ROMEO:", "max_tokens": 200, "seed": 3}
    with RunningServer(BUNDLED, accelerator="cuda", http_processes=2) as server:

        def ask():
            return httpx.post(server.url + "/generate", json=body, timeout=PATIENCE)

        server.wait_until_ready()
        text = ask().json()["choices"][0]["text"]
        assert httpx.get(server.url + "/info").json()["backend"] == "cuda"
        server.worker().kill()
        wait_until(lambda: all(ask().status_code == 200 for _ in range(10)))
        assert {ask().json()["choices"][0]["text"] for _ in range(10)} == {text}
