"""The baseline of bench-train, checked against transformers' GPT-2, and the benchmark's runs on small texts."""

from __future__ import annotations

import json
import math
import os
import random

import numpy as np
import pytest
import torch

from tests.bench import train as bench
from tests.bench.nanogpt import NanoGPT, RandomWindows, Recipe, random_windows_loss, train
from tests.helpers import refusal
from training.config import TrainConfig
from training.evaluate import baselines, whole_loss

SMALL = Recipe(
    n_layer=2, n_head=2, n_embd=16, block_size=8, batch_size=8, steps=200, eval_every=80, lr=0.01, warmup_steps=10
)
TEXT = "".join(random.Random(0).choices(["the cat ", "a dog ", "sat on ", "ran to ", "the mat.\n"], k=400))


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def small_ids() -> np.ndarray:
    """2,977 ids over 15 symbols."""
    return np.unique(list(TEXT), return_inverse=True)[1].astype(np.uint8)


def test_baseline_has_the_published_size_and_initial_weights():
    torch.manual_seed(0)
    model = NanoGPT(Recipe(), vocab_size=65)
    numbers = {name: p.numel() for name, p in model.named_parameters()}
    assert sum(numbers.values()) == 804_096
    assert sum(numbers.values()) - numbers["positions.weight"] == 795_904  # printed by nanoGPT as 0.80M
    assert model.embed.weight is model.head.weight
    assert model.blocks[0].qkv.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert model.blocks[3].down.weight.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.03)


def test_baseline_equals_gpt2_without_biases():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ours = NanoGPT(SMALL, vocab_size=17).double()
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    config = GPT2Config(vocab_size=17, n_positions=8, n_embd=16, n_layer=2, n_head=2, activation_function="gelu")
    theirs = GPT2LMHeadModel(config).double().eval()
    names = {"norm1": "ln_1", "norm2": "ln_2", "qkv": "attn.c_attn", "proj": "attn.c_proj"}
    names |= {"up": "mlp.c_fc", "down": "mlp.c_proj"}
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
        theirs.transformer.wte.weight.copy_(ours.embed.weight)
        theirs.transformer.wpe.weight.copy_(ours.positions.weight)
        theirs.transformer.ln_f.weight.copy_(ours.norm.weight)
        for mine, block in zip(ours.blocks, theirs.transformer.h, strict=True):
            for name, other in names.items():
                weight = mine.get_submodule(name).weight
                block.get_submodule(other).weight.copy_(weight.T if weight.ndim == 2 else weight)
        idx = torch.randint(17, (3, 8))
        torch.testing.assert_close(ours(idx), theirs(idx).logits)


def test_learning_rate_warms_up_then_decays_as_a_cosine():
    recipe = Recipe()
    rates = [recipe.lr_at(step) for step in range(recipe.steps)]
    assert rates[0] == pytest.approx(1e-3 / 101)
    assert rates.index(max(rates)) == 100 and max(rates) == 1e-3
    assert recipe.lr_at(1050) == pytest.approx(5.5e-4)  # half way
    assert recipe.lr_at(2000) == pytest.approx(1e-4)


def test_random_windows_come_from_the_text_and_approximate_the_whole_loss():
    ids = small_ids()
    windows = RandomWindows(np.arange(20, dtype=np.uint8), 8, seed=0)
    idx, targets = windows.next_batch(500)
    assert torch.equal(idx[:, 1:], targets[:, :-1]) and torch.equal(targets[:, -1], idx[:, 0] + 8)
    assert set(idx[:, 0].tolist()) == set(range(12))  # every valid start
    torch.manual_seed(0)
    model = NanoGPT(SMALL, vocab_size=17).eval()
    torch.nn.init.normal_(model.head.weight, std=0.5)
    whole = whole_loss(model, ids)
    assert abs(whole - math.log(17)) > 0.5  # far from a uniform model, so that agreement is significant
    many = random_windows_loss(model, ids, seed=0, batches=200, batch_size=50)
    assert many == pytest.approx(whole, rel=0.01)


def test_baseline_training_is_deterministic_and_evaluates_on_schedule():
    ids = small_ids()
    losses: list[tuple[int, float]] = []
    steps: list[int] = []
    models = [
        train(
            SMALL,
            ids[:2500],
            15,
            seed,
            lambda model, step, cpu, wall: losses.append((step, whole_loss(model, ids[2500:]))),
            lambda step, loss: steps.append(step),
        )
        for seed in (1, 1, 2)
    ]
    assert [step for step, _ in losses] == [0, 80, 160, 200] * 3
    assert steps == [*range(1, 201)] * 3
    assert losses[:4] == losses[4:8] != losses[8:]
    assert losses[3][1] < baselines(ids[:2500], ids[2500:], 15)["unigram"]
    idx = torch.from_numpy(ids[None, :8].astype(np.int64))
    assert torch.equal(models[0](idx), models[1](idx))


def test_run_yields_all_figures_of_the_tables(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT)
    config = TrainConfig(
        data=(str(tmp_path / "text.txt"),),
        block_size=8,
        n_layer=2,
        n_head=2,
        n_kv_head=1,
        n_embd=16,
        steps=24,
        batch_size=4,
        eval_every=8,
        sample_chars=0,
        threads=1,
        device="cpu",
    )
    cost = bench.probe_ours(config, tmp_path / "probe")
    assert cost["step"] > 0 and cost["dtype"] in ("float32", "bfloat16")
    run = bench.run_ours(config, tmp_path / "out")
    assert [point["step"] for point in run["curve"]] == [8, 16, 24]
    seconds = [point["cpu_seconds"] for point in run["curve"]]
    assert 0 < seconds[0] < seconds[1] < seconds[2] == run["cpu_seconds"]
    assert run["whole"] == pytest.approx(run["curve"][-1]["val_loss"], abs=0.01)
    assert run["characters"] == 24 * 4 * 8 and run["threads"] == 1
    assert set(bench.FIGURES) - set(run) == {"cpu_ratio"}

    results = {"curve": {}, "runs": {"cpu": [run, run | {"seed": 1, "whole": run["whole"] + 1}]}, "share": 1}
    rows = {row[0]: row[1:] for row in bench.cells(results)}
    assert rows["nats per character"] == ["ours, --preset cpu"]
    assert rows["whole loss"] == [f"{run['whole'] + 0.5:.4f} ({run['whole']:.4f}–{run['whole'] + 1:.4f})"]
    assert rows["target"][0].startswith("whole loss ≤ 1.428: MISSED; ")
    json.dumps(run)


def test_failed_and_crashed_runs_report_the_reason():
    with pytest.raises(bench.BenchError, match="ValueError: invalid literal"):
        bench.in_child(int, "x")
    with pytest.raises(bench.BenchError, match="status 3"):
        bench.in_child(os._exit, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "tpu"], "unknown part 'tpu'; allowed: nanogpt, equal, quick, minute, cpu, gpu, curve"),
        (["--seeds", "a"], "must be comma-separated integers, got 'a'"),
        (["--share", "2"], "--share must be in (0, 1], got 2.0"),
    ],
)
def test_invalid_argument_is_named(arguments, message):
    assert message in refusal(bench.main, arguments)
