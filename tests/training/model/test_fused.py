"""The hand-written forward and backward against the model's own forward under autograd."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from service.engine import native
from service.model.config import GPTConfig
from service.model.gpt import GPT
from training.model import fused
from training.model.fused import FusedForward

LIBRARIES = {path.stem: path for path in Path(fused.__file__).parent.glob("_fused_*.so")}
if given := os.environ.get("CHARGPT_FUSED_LIBRARY"):
    LIBRARIES = {"sanitized": Path(given)}


@pytest.fixture(params=["torch", *LIBRARIES])
def library(request, monkeypatch):
    """What computes attention, SwiGLU and norms: torch's operations, or the library of each instruction set."""
    variant = request.param.rpartition("_")[2]
    if variant in native._VARIANTS and not native._VARIANTS[variant] <= native._cpu_flags():
        pytest.skip(f"this CPU has no {variant}")
    library = ctypes.CDLL(str(LIBRARIES[request.param])) if request.param in LIBRARIES else None
    monkeypatch.setattr(fused, "_library", lambda: library)
    return library


def some_model(**fields) -> GPT:
    torch.manual_seed(0)
    shape = {"vocab_size": 11, "block_size": 9, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 16} | fields
    model = GPT(GPTConfig(**shape)).double()
    for parameter in model.parameters():  # a zero projection or a gain of one would hide a term
        torch.nn.init.uniform_(parameter, 0.5, 1.5) if parameter.ndim == 1 else torch.nn.init.normal_(
            parameter, std=0.5
        )
    return model


def loss_and_gradients(model: GPT, forward, idx: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = F.cross_entropy(forward(idx[:, :-1]).float().flatten(0, 1), idx[:, 1:].flatten())
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.needs("compiler")
def test_the_library_is_used_where_there_is_a_compiler():
    assert LIBRARIES and fused._library()


# Heads of 4, and of 32 and 64, whose size the library knows; more than a block of queries, and of keys.
@pytest.mark.parametrize("T", [1, 9, 70])
@pytest.mark.parametrize(
    "fields",
    [
        {}, {"n_kv_head": 4}, {"n_inner": 7, "norm_eps": 0.1, "n_layer": 1}, {"n_embd": 36, "n_head": 2},
        {"n_embd": 64, "n_head": 2, "n_kv_head": 1}, {"n_embd": 192, "n_head": 3, "n_kv_head": 1, "n_layer": 1},
    ],
)  # fmt: skip
def test_loss_and_gradients_equal_autograd_in_fp64(library, T, fields):
    model = some_model(block_size=70, **fields)
    idx = torch.randint(11, (3, T + 1))

    def in_double(forward):
        return lambda x: forward(x).double()

    expected_loss, expected = loss_and_gradients(model, in_double(model), idx)
    loss, gradients = loss_and_gradients(model, in_double(FusedForward(model, torch.float64)), idx)
    assert loss == expected_loss
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-7 * scale + 1e-12, msg=name)


@pytest.mark.parametrize(
    ("dtype", "fields", "slack"),
    [
        *((torch.float32, {"n_head": n, "n_kv_head": 1, "block_size": 50}, 1e-6) for n in (1, 2, 4)),  # of 64 to 16
        *((torch.bfloat16, {"n_head": n, "n_kv_head": 1, "block_size": 50 - n}, 0.01) for n in (1, 2, 4)),
        (torch.bfloat16, {"n_embd": 36, "n_head": 2, "block_size": 9}, 0.01),
    ],
)
def test_gradients_are_as_accurate_as_autograd_and_autocast(library, dtype, fields, slack):
    model = some_model(**{"n_embd": 64, "vocab_size": 40} | fields)
    idx = torch.randint(40, (8, model.config.block_size + 1))
    _, exact = loss_and_gradients(model, FusedForward(model, torch.float64), idx)
    exact = {name: gradient.float() for name, gradient in exact.items()}
    model.float()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        _, autograd = loss_and_gradients(model, model, idx)
    _, gradients = loss_and_gradients(model, FusedForward(model, dtype), idx)
    for name, gradient in exact.items():
        expected, error = ((x[name] - gradient).norm() / gradient.norm() for x in (autograd, gradients))
        assert error < 2 * expected + slack, (name, error, expected)


# Fewer and more than a block of queries, and of keys. The longest is in the middle: what it leaves must not count.
LENGTHS = [3, 1, 17, 70, 8, 1, 33, 7]


@pytest.mark.parametrize("fields", [{}, {"n_embd": 128, "n_kv_head": 1}, {"n_embd": 128, "n_head": 2}])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_packed_texts_give_the_loss_and_gradients_of_each_in_a_row_of_its_own(library, fields, dtype):
    exact = some_model(block_size=70, **fields)
    texts = [torch.randint(11, (length + 1,)) for length in LENGTHS]

    def found(model, logits_of_texts) -> dict[str, Tensor]:
        model.zero_grad()
        targets = torch.cat([text[1:] for text in texts])
        loss = F.cross_entropy(logits_of_texts().to(exact.head.weight.dtype), targets)
        loss.backward()
        return {"loss": loss.detach()} | {name: p.grad.double() for name, p in model.named_parameters()}

    def in_rows(forward):
        return lambda: torch.cat([forward(text[None, :-1])[0] for text in texts])

    expected = found(exact, in_rows(exact))
    model = some_model(block_size=70, **fields).to(exact.head.weight.dtype if dtype == torch.float64 else torch.float32)
    forward = FusedForward(model, dtype)
    idx = torch.cat([text[:-1] for text in texts])
    packed = found(model, lambda: forward(idx.view(2, -1), torch.tensor(LENGTHS)).flatten(0, 1))
    alone = found(model, in_rows(forward))
    for name, value in expected.items():
        scale = value.norm()
        error, of_rows = ((each[name] - value).norm() / scale for each in (packed, alone))
        assert error < {torch.float64: 1e-12, torch.float32: 1e-4}.get(dtype, 2 * of_rows + 0.01), name


@pytest.mark.parametrize("lengths", [[5, 4], [5, 6], [10, 0], [11, -1], [10]])
def test_texts_that_do_not_fill_their_tensor_are_refused(library, lengths):
    """The library would read beyond it."""
    with pytest.raises(ValueError, match="1 to block_size ids"):
        FusedForward(some_model(), torch.float64)(torch.zeros(2, 5, dtype=torch.long), torch.tensor(lengths))


def test_a_model_in_another_dtype_is_refused(library):
    with pytest.raises(ValueError, match="must be torch.float32, got torch.float64"):
        FusedForward(some_model(), torch.bfloat16)(torch.zeros(2, 5, dtype=torch.long))


@pytest.mark.parametrize("library", LIBRARIES, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_librarys_results_do_not_depend_on_the_number_of_threads(library, dtype):
    heads, grad, cos = torch.randn(200, 8, 32).to(dtype), torch.randn(200, 4, 32).to(dtype), torch.rand(60, 32)
    starts = torch.tensor([0, 40, 41, 100, 160, 200], dtype=torch.int32)
    x, found = torch.randn(2000, 300), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        each = fused._Heads(starts, heads, torch.full((6, 32), 0.7), cos, cos, 4, 1e-6)
        attended, lse = each.forward()
        (normed, scale), hidden = fused._normalize(x, 0.0, dtype), torch.empty(2000, 150, dtype=dtype)
        grad_x = torch.empty_like(normed)
        assert fused._call("swiglu", dtype, (2000, 150), normed, hidden)
        assert fused._call("swiglu_backward", dtype, (2000, 150), normed, hidden, grad_x)
        given = fused._normalize_backward(grad_x, x, scale, x)
        found.append((attended, *each.backward(attended, lse, grad), hidden, grad_x, normed, given))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_dropout_zeroes_a_share_of_the_branch_and_preserves_its_mean():
    """With attention disabled, the residual stream minus the embedding is the MLP branch alone."""
    model = some_model(dropout=0.25, n_layer=1, n_embd=64, n_head=4)
    with torch.no_grad():
        model.blocks[0].attn.proj.weight.zero_()
    forward = FusedForward(model, torch.float64)
    seen: list[Tensor] = []
    model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    idx = torch.randint(11, (400, 9))
    forward(idx)
    model.eval()
    forward(idx)
    dropped, kept = ((x - model.embed(idx)).detach() for x in seen)
    zero = dropped.abs() < 1e-12
    assert zero.double().mean() == pytest.approx(0.25, abs=0.005)
    torch.testing.assert_close(dropped[~zero], kept[~zero] / 0.75)


def test_gradients_match_finite_differences_under_dropout():
    model = some_model(dropout=0.5)
    idx = torch.randint(11, (2, 6))

    def loss() -> Tensor:
        torch.manual_seed(3)
        return F.cross_entropy(FusedForward(model, torch.float64)(idx[:, :-1]).flatten(0, 1), idx[:, 1:].flatten())

    model.zero_grad()
    loss().backward()
    step = 1e-6
    for parameter in (model.embed.weight, model.blocks[0].attn.qkv.weight, model.blocks[1].mlp.gate_up.weight):
        with torch.no_grad():
            along = parameter.grad / parameter.grad.norm()
            parameter.add_(step * along)
            above = loss()
            parameter.sub_(2 * step * along)
            below = loss()
            parameter.add_(step * along)
        assert ((above - below) / (2 * step)).item() == pytest.approx(parameter.grad.norm().item(), rel=1e-5)
