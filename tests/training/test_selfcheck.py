"""What becomes of a run when gpt.py is changed, as a reader of the code does first."""

from __future__ import annotations

import re

import pytest
import torch
from rich.console import Console
from torch.nn import functional as F

from service.model import gpt
from service.model.checkpoint import Checkpoint
from service.model.config import GPTConfig
from service.model.tokenizer import CharTokenizer
from service.text.model import TextModel
from tests.helpers import VOCABULARY, random_model
from tests.training.runs import crash, events, resume, start, tiny, weights
from training import jobs, selfcheck
from training.data import prepare
from training.evaluate import whole_loss
from training.inputs import open_model
from training.messages import Refusal
from training.selfcheck import first_difference, is_servable, refuse_other_weights

SHAPE = {"vocab_size": 11, "block_size": 70, "n_layer": 2, "n_head": 2, "n_kv_head": 1, "n_embd": 32}
CHANGED = "gpt.py has changed: the fast step of fused.py differs first in the output of blocks.0.mlp (by "


@pytest.fixture
def relu2(monkeypatch):
    """SwiGLU with ReLU² for its SiLU."""

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.proj(F.relu(gate).square() * up)

    monkeypatch.setattr(gpt.SwiGLU, "forward", forward)


def differences(**fields):
    config = GPTConfig(**{**SHAPE, **fields})
    return [first_difference(config, dtype, rows=2) for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(
    "fields",
    [{}, {"dropout": 0.4}, {"n_layer": 6, "n_embd": 128}, {"n_head": 1, "n_embd": 4, "n_layer": 1, "block_size": 1}],
)
def test_the_unchanged_model_takes_the_fast_step(fields):
    state = torch.get_rng_state()
    assert differences(**fields) == [None, None] and is_servable(GPTConfig(**{**SHAPE, **fields}))
    refuse_other_weights(GPTConfig(**{**SHAPE, **fields}))
    assert torch.equal(torch.get_rng_state(), state)


def test_another_activation_is_trained_as_written(relu2, tmp_path):
    """The fast step once trained the original; the model that was saved and scored was another one."""
    start(tiny(tmp_path, dtype="float32"), tmp_path / "out", console := Console(record=True, width=500))
    start(tiny(tmp_path, dtype="float32", fused="false"), tmp_path / "autograd")
    output = console.export_text()
    assert CHANGED in output and re.search(r"through autograd, about \d+\.\d times as long for a step\n", output)
    assert selfcheck.NOT_SERVABLE in output
    assert weights(tmp_path / "out") == weights(tmp_path / "autograd")
    assert events(tmp_path / "out") == events(tmp_path / "autograd")
    best = Checkpoint.read(tmp_path / "out" / "best")
    end = events(tmp_path / "out")[-1]
    printed = min(r["val_loss"] for r in events(tmp_path / "out") if r["event"] == "evaluation")
    found = whole_loss(best.load_model(), prepare(tiny(tmp_path).data).val)
    assert found == pytest.approx(end["whole"], rel=1e-6) and found == pytest.approx(printed, rel=1e-5)


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


def test_a_model_changed_before_a_resume_is_seen(tmp_path, request):
    with crash(9):
        start(tiny(tmp_path), tmp_path / "out", console := Console(record=True, width=500))
    assert "gpt.py" not in console.export_text()
    request.getfixturevalue("relu2")
    jobs.resume(tmp_path / "out", {}, console)
    assert CHANGED in console.export_text()


def test_autograd_resumes_to_the_same_bytes(relu2, tmp_path):
    start(config := tiny(tmp_path, threads=2, dropout=0.0), tmp_path / "uninterrupted")
    with crash(9):
        start(config, tmp_path / "out")
    resume(tmp_path / "out")
    assert weights(tmp_path / "out") == weights(tmp_path / "uninterrupted")


@pytest.mark.parametrize("kind", ["norm", "residual", "dropout", "parts"])
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

    monkeypatch.setattr(gpt.Block, "forward", forward)
    first, second = differences(dropout=0.2)
    expected = "the fast step fails (AttributeError" if kind == "parts" else "differs first in the output of blocks.0."
    assert expected in first and expected in second


def test_weights_that_no_checkpoint_holds_are_refused_before_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(gpt.nn, "RMSNorm", torch.nn.LayerNorm)
    with pytest.raises(Refusal, match=r"the weight blocks.0.attn.k_norm.bias has shape \(8,\) in gpt.py, none in layo"):
        start(tiny(tmp_path), tmp_path / "out")
    assert not (tmp_path / "out").exists()
