"""Muon against an explicit SVD; the parameters of each optimizer; the schedules."""

from __future__ import annotations

import pytest
import torch

from service.model.config import GPTConfig
from service.model.gpt import GPT
from training.config import TrainConfig
from training.model import optim
from training.model.optim import MARGIN, Muon, Optimizers, hidden_matrices, lr_scale, momentum_at, orthogonalize


def with_gradients(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    model = GPT(GPTConfig(vocab_size=11, block_size=8, n_layer=2, n_head=4, n_kv_head=2, n_embd=16, n_inner=24))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def orthogonalized_by_svd(matrix: torch.Tensor) -> torch.Tensor:
    """U·p(S)·Vᵀ of matrix = U·S·Vᵀ, p being the five polynomials one after the other, each scaled by the margin."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / (s.norm() * MARGIN + 1e-7)
    for a, b, c in optim.POLAR_EXPRESS:
        s = sum(factor * (s / MARGIN) ** power for factor, power in ((a, 1), (b, 3), (c, 5)))
    return u @ s.diag() @ vh


@pytest.mark.parametrize(("rows", "cols"), [(16, 16), (16, 48), (8, 1)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.06)])
def test_orthogonalize_keeps_singular_vectors_and_equalizes_singular_values(rows, cols, dtype, tolerance):
    generator = torch.Generator().manual_seed(1)
    matrices = torch.randn(3, rows, cols, generator=generator) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
    results = orthogonalize(matrices, dtype)
    assert results.dtype == dtype
    for matrix, result in zip(matrices, results, strict=True):
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        rotated = u.mT @ result.float() @ vh.mT  # in the basis of the singular vectors
        diagonal = rotated.diagonal()
        assert (rotated - diagonal.diag()).abs().max() < tolerance
        assert (diagonal[s > 0.02 * s.norm()] - 1).abs().max() < 0.25
        assert diagonal.min() > 0 and diagonal.max() < 1.25


@pytest.mark.parametrize(("rows", "cols"), [(16, 16), (16, 48)])
def test_orthogonalize_follows_the_polynomials_down_to_a_thousandth_of_the_norm(rows, cols):
    some = torch.randn(rows, cols, generator=torch.Generator().manual_seed(1))
    u, _, vh = torch.linalg.svd(some, full_matrices=False)
    matrix = u @ torch.logspace(0, -3, rows).diag() @ vh
    assert (orthogonalize(matrix[None])[0] - orthogonalized_by_svd(matrix)).abs().max() < 1e-3


def test_three_steps_of_muon_equal_nesterov_momentum_with_an_svd():
    """Query, key and value are separate matrices, although they share a parameter; gate and up are one."""
    model, lr, momentum, decay = with_gradients(), 0.1, 0.9, 0.2
    parts = {
        "attn.qkv.weight": [16, 8, 8], "attn.proj.weight": [16], "mlp.gate_up.weight": [48],
        "mlp.proj.weight": [16],
    }  # fmt: skip
    expected = {name: p.detach().double() for name, p in model.named_parameters()}
    average = {name: torch.zeros_like(p) for name, p in expected.items()}
    muon = Muon(hidden_matrices(model))
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        muon.step(lr, momentum, decay)
        for i in range(2):
            for suffix, sizes in parts.items():
                name = f"blocks.{i}.{suffix}"
                gradient = model.get_parameter(name).grad.double()
                average[name] = momentum * average[name] + (1 - momentum) * gradient
                nesterov = momentum * average[name] + (1 - momentum) * gradient
                updated = []
                for w, g in zip(expected[name].split(sizes), nesterov.split(sizes), strict=True):
                    scale = max(1, len(w) / w.size(1)) ** 0.5
                    updated.append(w * (1 - lr * decay) - lr * scale * orthogonalized_by_svd(g))
                expected[name] = torch.cat(updated)
    for name, parameter in model.named_parameters():
        assert (parameter - expected[name]).abs().max() < 1e-5, name


def test_every_parameter_has_one_optimizer():
    model = with_gradients()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizers = Optimizers(model, TrainConfig(warmup_steps=1))
    muon = {id(p) for p, _ in hidden_matrices(model)}
    parameters = dict(model.named_parameters())
    adamw = {id(p) for name, p in parameters.items() if f"adamw.{name}.exp_avg" in optimizers.tensors()}
    assert muon | adamw == {id(p) for p in model.parameters()} and not muon & adamw
    assert {name for name, p in model.named_parameters() if id(p) in muon} == {
        f"blocks.{i}.{name}.weight" for i in range(2) for name in ("attn.qkv", "attn.proj", "mlp.gate_up", "mlp.proj")
    }
    optimizers.step(0, 0.0)
    assert all(not torch.equal(before[name], p) for name, p in model.named_parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_muon_computes_in_the_type_of_the_run(dtype):
    assert Optimizers(with_gradients(), TrainConfig(dtype=dtype)).muon.dtype == getattr(torch, dtype)


def test_the_first_step_of_adamw_is_the_sign_of_the_gradient():
    model = with_gradients()
    before = model.embed.weight.detach().clone()
    config = TrainConfig(adamw_lr=0.01, warmup_steps=4)
    Optimizers(model, config).step(0, 0.0)
    torch.testing.assert_close(model.embed.weight, before - 0.01 / 4 * model.embed.weight.grad.sign())


def test_gradients_are_clipped_to_a_norm_and_what_follows_them_is_not():
    flat = optim.FlatGradients(GPT(GPTConfig(vocab_size=5, block_size=4, n_layer=1, n_head=2, n_embd=4)), extra=3)
    norm = flat.all.fill_(2.0)[:-3].norm()
    for most, value in (0.0, 2.0), (2 * norm, 2.0), (norm / 4, 0.5):
        assert flat.clip_(most) == norm and torch.allclose(flat.all[:-3], torch.tensor(value), rtol=1e-5)
    assert flat.extra.tolist() == [2.0, 2.0, 2.0]


def test_the_learning_rate_warms_up_then_decays_to_zero():
    config = TrainConfig(steps=100, warmup_steps=10)
    scales = [lr_scale(step, config) for step in range(100)]
    assert scales[0] == pytest.approx(0.1) and scales[9] == scales[10] == 1.0
    assert scales[55] == pytest.approx(0.5) and scales[99] == pytest.approx(1 / 90)
    assert lr_scale(0, TrainConfig(steps=100, warmup_steps=0)) == 1.0
    assert lr_scale(4, TrainConfig(steps=5, warmup_steps=50)) == 1.0, "a run shorter than its warm-up"


def test_momentum_rises_with_steps_and_weight_decay_with_epochs():
    config = TrainConfig(muon_momentum=0.95, momentum_steps=10, weight_decay=0.6)
    assert [momentum_at(step, config) for step in (0, 4, 9, 10, 10**6)] == pytest.approx([0.86, 0.9, 0.95, 0.95, 0.95])
    assert [momentum_at(step, TrainConfig(muon_momentum=0.5)) for step in (0, 9)] == [0.5, 0.5]
    assert momentum_at(0, TrainConfig(muon_momentum=0.9, momentum_steps=0)) == pytest.approx(0.9)
    decays = [optim.weight_decay_at(epochs, config) for epochs in (0, 0.5, 1.5, 3, 99)]
    assert decays == pytest.approx([0, 0.1, 0.3, 0.6, 0.6])
