"""The benchmarks: what would publish a wrong figure if it were wrong, and four of them, tiny, from end to end."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from service.model.kv_cache import CacheRows, KVCache
from tests.bench import engine, gpu, peers, report, roofline, serve, shapes, shares, train
from tests.bench.command import BenchError
from tests.bench.nanogpt import NanoGPT, Recipe
from tests.helpers import random_model
from tests.load import sweep
from tests.toolbox import load
from tests.toolbox.launch import ROOT
from tests.training.runs import tiny

TINY_PLAN = replace(
    serve.QUICK, repeats=1, shapes=("S",), rows=(1, 3), engine_seconds=0.01, clients=(1, 2), http_seconds=1.0,
    first_requests=3, path_seconds=3, streams=(1, 64), paced_length=10,
)  # fmt: skip


@pytest.mark.tools
def test_baseline_equals_gpt2_without_biases():
    from transformers import GPT2Config, GPT2LMHeadModel

    assert sum(p.numel() for p in NanoGPT(Recipe(), vocab_size=65).parameters()) == 804_096  # 0.80M, as published
    torch.manual_seed(0)
    ours = NanoGPT(Recipe(n_layer=2, n_head=2, n_embd=16, block_size=8), vocab_size=17).double()
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


def test_roofline_counts_the_operations_and_bytes_of_a_decode_step():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    rows, length = 3, 12
    model = random_model(vocab_size=65, block_size=16, n_layer=2, n_head=4, n_kv_head=4, n_embd=16)
    cache = KVCache(model.config, rows, "cpu", torch.float32)
    cache.lengths = [length - 1] * len(cache.lengths)
    # FlopCounterMode does not count fused attention on a CPU.
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(rows, 1, dtype=torch.long), CacheRows(cache, range(rows), [1] * rows))
    counts = roofline.count(model.config, rows, length, "float32")
    assert counts["product_operations"] + counts["attention_operations"] == counter.get_total_flops()
    # A step reads only its rows of the embedding.
    assert counts["weight_bytes"] == sum(p.nbytes for p in model.parameters()) - (65 - rows) * 16 * 4
    assert counts["cache_bytes"] == 2 * 2 * 4 * 4 * length * rows * 4  # keys and values, layers, heads, head size


@pytest.mark.parametrize(("name", "results"), [("bench", "serve"), ("load-sweep", "load-sweep")])
def test_the_document_shows_the_committed_results(name, results):
    tables = {"bench": report.markdown, "load-sweep": partial(sweep.markdown, shares=sweep.PUBLISHED_SHARES)}[name]
    document = (ROOT / "tests" / "README.md").read_text()
    [path] = (ROOT / "tests" / "bench" / "results").glob(f"{results}-*.json")
    assert f"<!-- {name} -->\n{tables(json.loads(path.read_text()))}<!-- /{name} -->" in document
    assert f"(bench/results/{path.name})" in document


def test_no_round_repeats_a_prompt_with_its_seed(monkeypatch):
    """The engine guesses from what it has written, so a text that comes again is written faster than users' texts."""
    asked = [(tuple(it.prompt), it.sampling.seed) for _ in range(3) for it in engine.sequences(5, 8)]
    assert len(set(asked)) == 15
    sent: list[bytes] = []

    def run(port, requests, **options):
        sent.extend(request for _, request, _ in itertools.islice(requests, 4))
        return load.Outcome(1.0, 0.0, [], 0.0)

    monkeypatch.setattr(load, "run", run)
    for _ in range(3):
        serve.answers_once(peers.ours(ROOT), SimpleNamespace(port=0), 2, 4, False)
        serve.stream_rate(peers.ours(ROOT), 0, 4, 1.0)
        serve.kind_once(0, {}, 2, 1.0)
    assert len(set(sent)) == len(sent) == 36


@pytest.mark.tools
@pytest.mark.timeout(900)
def test_tiny_benchmark_of_serving_gives_every_figure_but_the_peers(tmp_path):
    bench = serve.Bench(TINY_PLAN, {"S": shapes.TINY}, 1, tmp_path / "out", tmp_path / "no-llama.cpp")
    bench.llama_files = lambda shape: (_ for _ in ()).throw(BenchError("not here"))
    bench.run(["engine", "path", "mixed", "templates"])
    assert bench.results["errors"] == {"engine": "BenchError: not here"}
    path = bench.results["path"]
    for name in ("ours", "plain", "stock"):
        assert path[name]["requests"][0]["per_second"] > 0
        assert path[name]["streams"]["64"][0]["characters_per_event"] == pytest.approx(1) or name == "ours"
    assert min(run["beside"] for runs in bench.results["mixed"]["beside"].values() for run in runs) > 0
    for ways in bench.results["templates"]["at_once"].values():
        assert ways["with"][0]["p50"] > 0 and ways["without"][0]["copied"] == 0
    saved, text = json.loads((tmp_path / "out/serve.json").read_text()), (tmp_path / "out/serve.md").read_text()
    assert saved["path"] == path and "requests/s of one character" in text and "failed: engine" in text


@pytest.mark.tools
def test_tiny_benchmark_of_shares_measures_every_pair_of_clients(tmp_path):
    args = SimpleNamespace(threads=1, seconds=0.5, runs=1, scored=40_000, states=16, out=tmp_path)
    bench = shares.Bench(args)
    bench.run()
    assert not bench.results["errors"]
    assert len(bench.results["pairs"]) == 9
    for [run] in bench.results["pairs"].values():
        assert min(run.values()) > 0
    assert bench.results["weights"]["10"][0] > bench.results["weights"]["3"][0] > 1
    text = (tmp_path / "shares.md").read_text()
    assert "| 60 streams beside 0.04 MB of scoring | " in text and "| 10:1 | " in text


@pytest.mark.tools
def test_tiny_benchmark_of_training_judges_its_targets(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = tiny(tmp_path, sample_chars=0, device="cpu")
    run = train.run_ours(config, tmp_path / "out")
    assert run["whole"] == pytest.approx(run["curve"][-1]["val_loss"], abs=0.01) and run["characters"] == 24 * 4 * 8
    rows = {row[0]: row[1] for row in train.cells({"runs": {"cpu": [run, run]}})}
    assert rows["whole loss"] == f"{run['whole']:.4f}" and rows["target"].startswith("whole loss ≤ 1.408: MISSED; ")


@pytest.mark.tools
def test_tiny_benchmark_of_small_corpora_gives_every_figure(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(train, "in_child", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(train, "TrainConfig", lambda **given: replace(tiny(tmp_path), **given))
    monkeypatch.setattr(train, "PROBE_STEPS", 8)
    (names := tmp_path / "names.txt").write_text("".join(f"{'abcde'[i % 5] * 3}{i:o}\n" for i in range(400)))
    (code := tmp_path / "code.txt").write_text(names.read_text())
    (makemore := tmp_path / "makemore.py").write_text(
        "print('step time 0.01ms', *(f'step {s} train loss 4 test loss: 3.5' for s in (0, 500)), sep='\\n')"
    )
    given = {"lists": [names], "texts": [code], "seeds": [1, 2], "makemore": makemore, "threads": 1}
    bench = train.Bench(SimpleNamespace(out=tmp_path / "out", **given))
    bench.run([])
    assert not bench.results["errors"]
    for corpus in (names, code):
        assert [run["seed"] for run in bench.results["corpora"][corpus.stem]] == [1, 2]
        for run in bench.results["corpora"][corpus.stem]:
            assert run["nanogpt"] <= run["nanogpt_last"] and 0 < run["ours"] < 5 and run["nanogpt_steps"] >= 8
            assert ("makemore" in run) == (corpus == names) and run.get("makemore_last", 3.5) == 3.5
    held_out = set((tmp_path / "out" / "names-1" / "held-out.txt").read_text().split())
    assert len(held_out) == 40 and not held_out & set((tmp_path / "out" / "names-1" / "train.txt").read_text().split())
    text = (tmp_path / "out" / "train.md").read_text()
    assert "| names | " in text and "| code | " in text and "nats per character |" not in text


def test_gpu_report_shows_parts_that_are_missing():
    about = {"machine": {"cpu": "C", "cores": 2, "gpu": "G", "system": "L"}, "versions": {"torch": "2"}, "cuda": "13"}
    about |= {"date": "2026-11-22T00:00:00", "revision": "abc", "load_average": 0.1}
    run = {"shape": "M", "dtype": "float32", "rows": 512, "characters_per_second": 7e5, "bandwidth_share": 0.7}
    part = {"runs": [run | {"product_share": 0.2}], "absent": {"M float32, 2048 rows": "too large"}}
    text = gpu.markdown(about | {"errors": {"image": "BenchError: no space"}, "parts": {"engine": part}})
    for line in ("| M float32 | 512 | 700,000 | 70% | 20% |", "- image failed: BenchError: no space"):
        assert line in text.splitlines()
    assert "- http was not run" in text and "2048 rows was not measured: too large" in text
