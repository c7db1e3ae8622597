"""What becomes of a run when gpt.py is changed, as a reader of the code does first."""

from __future__ import annotations

import json
from types import SimpleNamespace

import chargpt
import pytest
import torch
from rich.console import Console
from torch.nn import functional as F

from service.engine import native
from service.engine.backends import open_runner
from service.engine.selfcheck import SelfCheckError, check
from service.model import checkpoint, gpt
from service.model.checkpoint import Checkpoint, CheckpointError
from service.model.config import GPTConfig
from service.model.tokenizer import CharTokenizer
from service.text.model import TextModel
from tests.helpers import VOCABULARY, random_model
from tests.training.runs import crash, events, resume, start, tiny, weights
from training.commands.export import export
from training.config import ConfigError
from training.measure.losses import whole_loss
from training.messages import Refusal
from training.model import fused, selfcheck
from training.model.loading import open_model
from training.model.selfcheck import first_difference, is_servable, refuse_other_weights
from training.run import saving
from training.text.corpus import prepare

SHAPE = {"vocab_size": 11, "block_size": 70, "n_layer": 2, "n_head": 2, "n_kv_head": 1, "n_embd": 32}
CHANGED = "gpt.py has changed: the fast step of fused.py differs first in the output of blocks.0.mlp (by "


@pytest.fixture
def relu2(monkeypatch):
    """SwiGLU with ReLU² for its SiLU."""

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.proj(F.relu(gate).square() * up)

    monkeypatch.setattr(gpt.SwiGLU, "forward", forward)


def model_of(**fields):
    return gpt.GPT(GPTConfig(**{**SHAPE, **fields}))


def differences(model):
    return [first_difference(model, dtype) for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(
    "fields",
    [{}, {"dropout": 0.4}, {"n_layer": 6, "n_embd": 128}, {"n_head": 1, "n_embd": 4, "n_layer": 1, "block_size": 1}],
)
def test_the_unchanged_model_takes_the_fast_step(fields):
    model = model_of(**fields)
    state = torch.get_rng_state()
    assert differences(model) == [None, None] and is_servable(model)
    refuse_other_weights(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_another_activation_is_trained_as_written(relu2, tmp_path):
    """The fast step once trained the original; the model that was saved and scored was another one."""
    start(tiny(tmp_path, dtype="float32"), tmp_path / "out", console := Console(record=True, width=500))
    start(tiny(tmp_path, dtype="float32", fused="false"), tmp_path / "autograd")
    output = console.export_text()
    assert CHANGED in output and "so this run goes through autograd\n" in output
    assert selfcheck.NOT_SERVABLE in output
    assert weights(tmp_path / "out") == weights(tmp_path / "autograd")
    assert events(tmp_path / "out") == events(tmp_path / "autograd")
    best = Checkpoint.read(tmp_path / "out" / "best")
    end = events(tmp_path / "out")[-1]
    printed = min(r["val_loss"] for r in events(tmp_path / "out") if r["event"] == "evaluation")
    found = whole_loss(best.load_model(), prepare(tiny(tmp_path).data).val)
    assert found == pytest.approx(end["whole"], rel=1e-6) and found == pytest.approx(printed, rel=1e-5)
    with pytest.raises(ConfigError, match="was trained with a changed gpt.py, and llama.cpp would compute Qwen3"):
        export(best, "gguf", tmp_path / "model.gguf")


@pytest.mark.slow
def test_a_graph_with_other_logits_is_not_exported(tmp_path, monkeypatch):
    forward = gpt.SwiGLU.forward
    monkeypatch.setattr(gpt.SwiGLU, "forward", lambda self, x: forward(self, x) * (2 - torch.compiler.is_exporting()))
    start(tiny(tmp_path), tmp_path / "out")
    with pytest.raises(ConfigError, match="the graph's logits differ from those of gpt.py by up to"):
        export(Checkpoint.read(tmp_path / "out" / "best"), "onnx", tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()


def test_samples_are_those_of_the_changed_model(relu2, tmp_path):
    """The native engine, which holds the model once more, would have written those of another."""
    model = random_model()
    first, text = [3, 1, 4], []
    for _ in range(30):
        text.append(int(model(torch.tensor([first + text]))[0, -1].argmax()))
    tokenizer = CharTokenizer(VOCABULARY)
    with open_model(model, TextModel(tokenizer, None, model.config.receptive_field), slots=1) as served:
        assert served.backend == "torch"
        found = served.generate(tokenizer.decode(first), max_tokens=30, temperature=0).text
    assert tokenizer.encode(found) == text


def test_a_model_changed_before_a_resume_is_refused(tmp_path, request):
    """The run once went on, and its next checkpoint claimed to have been trained with the changed gpt.py."""
    with crash(9):
        start(tiny(tmp_path, save_seconds=0), tmp_path / "out", console := Console(record=True, width=500))
    assert "gpt.py" not in console.export_text()
    before = weights(tmp_path / "out")
    request.getfixturevalue("relu2")
    with pytest.raises(CheckpointError, match="was trained with another service/model/gpt.py"):
        resume(tmp_path / "out")
    assert weights(tmp_path / "out") == before


def test_autograd_resumes_to_the_same_bytes(relu2, tmp_path):
    start(config := tiny(tmp_path, threads=2, dropout=0.0), tmp_path / "uninterrupted")
    with crash(9):
        start(config, tmp_path / "out")
    resume(tmp_path / "out")
    assert weights(tmp_path / "out") == weights(tmp_path / "uninterrupted")


def test_masks_of_a_dropout_in_gpt_py_follow_from_seed_and_step(monkeypatch, tmp_path):
    """The settings have no dropout. Two runs once differed, as two threads drew from one generator without a seed."""
    forward = gpt.CausalSelfAttention.forward
    monkeypatch.setattr(
        gpt.CausalSelfAttention, "forward", lambda self, *given: F.dropout(forward(self, *given), 0.2, self.training)
    )
    config = tiny(tmp_path, threads=2, dropout=0.0, steps=12)
    start(config, tmp_path / "one")
    torch.rand(3)
    with crash(9):
        start(config, tmp_path / "two")
    resume(tmp_path / "two")
    assert weights(tmp_path / "one") == weights(tmp_path / "two")


@pytest.mark.parametrize("kind", ["norm", "residual", "dropout", "parts", "angles"])
def test_other_changes_are_seen_too(monkeypatch, kind):
    block = gpt.Block.forward

    def forward(self, x, rope, cache):
        if kind == "norm":
            x = x + self.attn(F.layer_norm(x, x.shape[-1:], self.attn_norm.weight), rope, cache)
        elif kind == "residual":
            x = x + 0.5 * self.attn(self.attn_norm(x), rope, cache)
        elif kind == "dropout":
            x = x + self.attn(F.dropout(self.attn_norm(x), self.dropout, self.training), rope, cache)
        else:
            self.__dict__["own"] = self._modules.pop("attn_norm", None) or self.own
            return block(self, x, rope, cache)
        return x + F.dropout(self.mlp(self.mlp_norm(x)), self.dropout, self.training)

    if kind == "parts":
        init = gpt.Block.__init__

        def renamed(self, *given):
            init(self, *given)
            self.before = self._modules.pop("attn_norm")

        monkeypatch.setattr(gpt.Block, "__init__", renamed)

        def forward(self, x, rope, cache):
            x = x + self.attn(self.before(x), rope, cache)
            return x + self.mlp(self.mlp_norm(x))

    if kind == "angles":  # of a part of each head, which once were read beyond their end
        angles = gpt.rope_angles
        for module in (gpt, fused):
            monkeypatch.setattr(module, "rope_angles", lambda *given: [part[..., :1] for part in angles(*given)])
    else:
        monkeypatch.setattr(gpt.Block, "forward", forward)
    first, second = differences(model_of(dropout=0.2))
    expected = {
        "parts": "other weights, so this run goes through autograd: blocks.0.attn_norm.weight has shape none",
        "angles": "the fast step fails (ValueError: rope_angles must have shape",
    }.get(kind, "differs first in the output of blocks.0.")
    assert expected in first and expected in second


def changed_weights(monkeypatch, kind):
    """Change gpt.py, and `layout` as the refusal advises: the model has other weights than Qwen3."""
    described, init, forward = checkpoint.layout, gpt.GPT.__init__, gpt.GPT.forward
    block, attention, embedding = gpt.Block.forward, gpt.CausalSelfAttention.__init__, gpt.nn.Embedding.forward

    def layout(config):
        found, C, own = described(config), config.n_embd, {}
        if kind == "scale":
            own = {f"blocks.{i}.scale": {f"model.layers.{i}.scale": (C,)} for i in range(config.n_layer)}
        elif kind == "positions":
            own = {"pos.weight": {"model.pos.weight": (config.block_size, C)}}
        elif kind == "scalar":
            own = {"scale": {"model.scale": ()}}
        elif kind == "no norm":
            found = {name: parts for name, parts in found.items() if "q_norm" not in name and "k_norm" not in name}
        return dict(sorted({**found, **own}.items()))

    for module in (checkpoint, saving, selfcheck):
        monkeypatch.setattr(module, "layout", layout)

    def new(self, config):
        init(self, config)
        if kind == "tied":
            self.head.weight = self.embed.weight
        elif kind == "scalar":
            self.scale = torch.nn.Parameter(torch.ones(()))
        elif kind == "positions":
            self.pos = torch.nn.Embedding(config.block_size, config.n_embd)
        elif kind == "scale":
            for each in self.blocks:
                each.scale = torch.nn.Parameter(torch.full((config.n_embd,), 0.5))

    def without_norms(self, config, layer):
        attention(self, config, layer)
        if kind == "no norm":
            del self.q_norm, self.k_norm
            self.__dict__ |= dict.fromkeys(("q_norm", "k_norm"), SimpleNamespace(weight=torch.ones(config.head_dim)))

    def scaled(self, x, rope, cache):
        return block(self, x * self.scale if kind == "scale" else x, rope, cache)

    def placed(self, idx, cache=None):
        if kind == "positions":
            places = torch.arange(idx.size(1)) if cache is None else cache.positions
            self.embed.__dict__["more"] = self.pos(places % self.config.block_size)
        return forward(self, idx, cache)

    monkeypatch.setattr(gpt.GPT, "__init__", new)
    monkeypatch.setattr(gpt.GPT, "forward", placed)
    monkeypatch.setattr(gpt.Block, "forward", scaled)
    monkeypatch.setattr(gpt.CausalSelfAttention, "__init__", without_norms)
    monkeypatch.setattr(
        gpt.nn.Embedding, "forward", lambda self, idx: embedding(self, idx) + self.__dict__.pop("more", 0)
    )


@pytest.mark.parametrize("kind", ["scale", "positions", "no norm", "tied"])
def test_other_weights_are_trained_and_scored_as_written(tmp_path, monkeypatch, kind):
    """Pointers into the native engine once shifted: the run ended with nan ± nan. Others ended with tracebacks."""
    changed_weights(monkeypatch, kind)
    start(tiny(tmp_path), tmp_path / "out", console := Console(record=True, width=500))
    output, is_qwen3 = console.export_text(), kind == "tied"
    assert ("the fast step of fused.py has other weights, so this run goes through autograd" in output) != is_qwen3
    assert (selfcheck.NOT_SERVABLE in output) != is_qwen3
    best = Checkpoint.read(tmp_path / "out" / "best")
    val = prepare(tiny(tmp_path).data).val
    assert best.training["losses"]["whole"] == pytest.approx(whole_loss(best.load_model(), val), rel=1e-6)
    assert json.loads((best.path / "config.json").read_text())["model_type"] == ("qwen3" if is_qwen3 else "chargpt")
    if is_qwen3:
        check(open_runner(best, "auto", "float32", 1, 1), best)
        export(best, "gguf", tmp_path / "model.gguf")
        return
    if native.why_not() is None:
        with pytest.raises(SelfCheckError, match="backend native does not compute the model: .*; use --backend torch"):
            open_runner(best, "native", "float32", 1, 1)
        with pytest.warns(UserWarning, match="running on backend torch"), chargpt.load(best.path) as model:
            assert model.generate("the ", max_tokens=3).text
    check(open_runner(best, "torch", "float32", 1, 1), best)
    with pytest.raises(ConfigError, match="llama.cpp would compute Qwen3 with its weights"):
        export(best, "gguf", tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


def test_a_scalar_is_refused_before_a_run(tmp_path, monkeypatch):
    changed_weights(monkeypatch, "scalar")
    with pytest.raises(Refusal, match=r"no scalars: give the weight scale the shape \(1,\) in gpt.py and layout\(\)"):
        start(tiny(tmp_path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_that_no_checkpoint_holds_are_refused_before_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(gpt.nn, "RMSNorm", torch.nn.LayerNorm)
    with pytest.raises(Refusal, match=r"the weight blocks.0.attn.k_norm.bias has shape \(8,\) in gpt.py, none in layo"):
        start(tiny(tmp_path), tmp_path / "out")
    assert not (tmp_path / "out").exists()
