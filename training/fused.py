"""The model's forward for training on a CPU, with each half block's backward written out.

Autograd on a CPU spends half of a step of a small model on what lies between its matrix products: dozens of small
operations, conversions between types, kept intermediates. Here each half block is one operation with few passes over
memory: gains are folded into the weights that follow them, and the residual sum is part of it. The same function as
`GPT.forward` without a cache, in any dtype, for texts no longer than the attention window.

Knows nothing of optimizers or data.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from service.model.gpt import GPT, Block, rope_angles


class FusedForward:
    """idx (B, T) -> logits (B, T, V), T at most block_size; parameters receive their gradients through autograd.

    Matrix products, and what lies between those of a half block, run in `dtype`; the residual stream, sums and the
    gradients that parameters receive keep the parameters' dtype.
    """

    def __init__(self, model: GPT, dtype: torch.dtype):
        self.model, self.dtype = model, dtype

    def __call__(self, idx: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):  # it says itself what is in which dtype
            return self._forward(idx)

    def _forward(self, idx: Tensor) -> Tensor:
        model, config = self.model, self.model.config
        T = idx.size(1)
        assert T <= config.block_size, "longer texts need the band of GPT.forward"
        p = config.dropout if model.training else 0.0
        x = model.embed(idx)
        cos, sin = rope_angles(torch.arange(T), config, x.dtype)
        future = torch.full((T, T), -torch.inf, dtype=self.dtype).triu(1).repeat(config.n_head // config.n_kv_head, 1)
        for block in model.blocks:
            assert isinstance(block, Block)
            attn, mlp = block.attn, block.mlp
            x = _Attention.apply(
                x, block.attn_norm.weight, attn.qkv.weight, attn.q_norm.weight, attn.k_norm.weight, attn.proj.weight,
                (cos, sin, future, config.norm_eps, p, self.dtype),
            )  # fmt: skip
            x = _SwiGLU.apply(
                x, block.mlp_norm.weight, mlp.gate_up.weight, mlp.proj.weight, (config.norm_eps, p, self.dtype)
            )
        return F.linear(model.norm(x).to(self.dtype), model.head.weight.to(self.dtype))


def _normalize(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x (..., C) over its root mean square, and the reciprocal of that (..., 1)."""
    scale = (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_() / x.size(-1) + eps).rsqrt_()
    return x * scale, scale


def _normalize_backward(grad: Tensor, normal: Tensor, scale: Tensor, along: Tensor) -> Tensor:
    """Of x, from `grad` of the normalized and `along`, the sum of grad · normal over the last dimension (..., 1)."""
    return (grad * scale).addcmul_(normal, along * scale / -normal.size(-1))


def _folded_backward(grad: Tensor, weight: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """Of gain (C,) and weight (rows, C), from `grad` of their product."""
    grad = grad.to(weight.dtype)
    return (grad * weight).sum(0), grad * gain


def _dropped(y: Tensor, p: float) -> tuple[Tensor, Tensor | None]:
    """y with a share p of it zeroed and the rest scaled to keep its mean, and the factors."""
    if p == 0.0:
        return y, None
    factors = torch.empty_like(y).bernoulli_(1 - p).div_(1 - p)
    return y * factors, factors


def _transposed_product(many: Tensor, few: Tensor) -> Tensor:
    """manyᵀ · few of each of a batch: (n, rows, m) and (n, rows, f) -> (n, m, f).

    A batched product copies a transposed left side matrix by matrix: better the small one.
    """
    return (few.mT.contiguous() @ many).mT


class _Attention(torch.autograd.Function):
    """x + proj(attention(norm(x))), by plain products over all T² scores, which are kept until the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, qkv: Tensor, q_gain: Tensor, k_gain: Tensor, proj: Tensor, rest: Any
    ) -> Tensor:
        cos, sin, future, eps, p, dtype = rest
        B, T, C = x.size()
        hs = q_gain.numel()
        nh, nkv = C // hs, (qkv.size(0) - C) // hs // 2
        nqk = nh + nkv
        x = x.reshape(B * T, C)
        normal, scale = _normalize(x, eps)
        narrow, folded, projected = normal.to(dtype), (qkv * gain).to(dtype), proj.to(dtype)
        heads = (narrow @ folded.mT).view(B, T, nqk + nkv, hs)
        # Query and key heads differ in their gains alone, and those go into the tables: one pass for both.
        gains = torch.cat((q_gain.expand(nh, hs) * hs**-0.5, k_gain.expand(nkv, hs)))
        unit, unit_scale = _normalize(heads[:, :, :nqk].to(x.dtype), eps)
        cos_gains, sin_gains = cos[:, None] * gains, sin[:, None] * gains.roll(hs // 2, -1)
        turned = (unit * cos_gains).addcmul_(unit.roll(hs // 2, -1), sin_gains).to(dtype)
        # The queries that share a key as one matrix: (B·nkv, group·T, hs).
        q = turned[:, :, :nh].transpose(1, 2).reshape(B * nkv, -1, hs)
        k = turned[:, :, nh:].transpose(1, 2).reshape(B * nkv, T, hs)
        v = heads[:, :, nqk:].transpose(1, 2).reshape(B * nkv, T, hs)
        weights = torch.baddbmm(future, q, k.mT).softmax(-1)  # (B·nkv, group·T, T)
        seen = (weights @ v).view(B, nh, T, hs).transpose(1, 2).reshape(B * T, C)
        y, factors = _dropped(seen @ projected.mT, p)
        ctx.save_for_backward(normal, scale, narrow, unit, unit_scale, q, k, v, weights, seen, factors, cos, sin,
                              gain, qkv, gains, folded, projected)  # fmt: skip
        return (x + y).view(B, T, C)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (normal, scale, narrow, unit, unit_scale, q, k, v, weights, seen, factors, cos, sin,
         gain, qkv, gains, folded, projected) = ctx.saved_tensors  # fmt: skip
        B, T, C = grad.size()
        (nqk, hs), nkv = gains.size(), k.size(0) // B
        nh = nqk - nkv
        grad = grad.reshape(B * T, C)
        grad_y = grad.to(q.dtype) if factors is None else grad.to(q.dtype) * factors
        grad_proj = grad_y.mT @ seen
        grad_seen = (grad_y @ projected).view(B, T, nh, hs).transpose(1, 2).reshape(B * nkv, -1, hs)
        grad_scores = torch._softmax_backward_data(grad_seen @ v.mT, weights, -1, weights.dtype)
        grad_q = (grad_scores @ k).view(B, nh, T, hs).transpose(1, 2)
        grad_k = _transposed_product(grad_scores, q).unflatten(0, (B, nkv)).transpose(1, 2)
        grad_v = _transposed_product(weights, grad_seen).unflatten(0, (B, nkv)).transpose(1, 2)
        turned = torch.cat((grad_q, grad_k), dim=2).to(unit.dtype)  # (B, T, nh + nkv, hs)
        # Half a turn of the row is its own inverse.
        turned = (turned * sin[:, None]).roll(hs // 2, -1).addcmul_(turned, cos[:, None])
        along = turned * unit
        grad_gains = along.sum((0, 1))  # (nh + nkv, hs)
        along = along.mul_(gains).sum(-1, keepdim=True)
        turned = _normalize_backward(turned.mul_(gains), unit, unit_scale, along)
        grad_heads = torch.cat((turned.to(v.dtype), grad_v), dim=2).view(B * T, -1)
        grad_gain, grad_qkv = _folded_backward(grad_heads.mT @ narrow, qkv, gain)
        grad_normal = (grad_heads @ folded).to(grad.dtype)
        along = (grad_normal * normal).sum(-1, keepdim=True)
        grad_x = _normalize_backward(grad_normal, normal, scale, along).add_(grad).view(B, T, C)
        grad_q_gain, grad_k_gain = grad_gains[:nh].sum(0) * hs**-0.5, grad_gains[nh:].sum(0)
        return grad_x, grad_gain, grad_qkv, grad_q_gain, grad_k_gain, grad_proj.to(qkv.dtype), None


class _SwiGLU(torch.autograd.Function):
    """x + proj(silu(gate) · up) of norm(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, gate_up: Tensor, proj: Tensor, rest: Any) -> Tensor:
        eps, p, dtype = rest
        B, T, C = x.size()
        x = x.reshape(B * T, C)
        normal, scale = _normalize(x, eps)
        narrow, folded, projected = normal.to(dtype), (gate_up * gain).to(dtype), proj.to(dtype)
        both = narrow @ folded.mT  # (B·T, 2 n_inner)
        gate, up = both.chunk(2, dim=-1)
        opened = F.silu(gate)
        hidden = opened * up
        y, factors = _dropped(hidden @ projected.mT, p)
        ctx.save_for_backward(normal, scale, narrow, both, opened, hidden, factors, gain, gate_up, folded, projected)
        return (x + y).view(B, T, C)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        normal, scale, narrow, both, opened, hidden, factors, gain, gate_up, folded, projected = ctx.saved_tensors
        B, T, C = grad.size()
        grad = grad.reshape(B * T, C)
        grad_y = grad.to(both.dtype) if factors is None else grad.to(both.dtype) * factors
        grad_proj = grad_y.mT @ hidden
        grad_hidden = grad_y @ projected
        gate, up = both.chunk(2, dim=-1)
        grad_both = torch.empty_like(both)
        grad_gate, grad_up = grad_both.chunk(2, dim=-1)
        torch.mul(grad_hidden, opened, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad_hidden.mul_(up), gate, grad_input=grad_gate)
        grad_gain, grad_gate_up = _folded_backward(grad_both.mT @ narrow, gate_up, gain)
        grad_normal = (grad_both @ folded).to(grad.dtype)
        along = (grad_normal * normal).sum(-1, keepdim=True)
        grad_x = _normalize_backward(grad_normal, normal, scale, along).add_(grad).view(B, T, C)
        return grad_x, grad_gain, grad_gate_up, grad_proj.to(gate_up.dtype), None
