"""The model's forward for training on a CPU, with a hand-written backward for each half block.

On a CPU, autograd spends half of a small model's step between the matrix products: on dozens of small operations,
dtype conversions and saved intermediates. Here each half block is one autograd function with few passes over memory;
norm gains are folded into the weights that follow, and the residual addition is included. It computes `GPT.forward`
without a cache, in any dtype, for texts no longer than the attention window.

Knows nothing about optimizers or data.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from service.model.gpt import GPT, Block, rope_angles


class FusedForward:
    """idx (B, T) -> logits (B, T, V), T at most block_size; differentiable through autograd.

    Matrix products and the activations between them are in `dtype`; the residual stream, the norms and the parameters'
    gradients are in the parameters' dtype.
    """

    def __init__(self, model: GPT, dtype: torch.dtype):
        self.model, self.dtype = model, dtype

    def __call__(self, idx: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):  # dtypes are explicit here
            return self._forward(idx)

    def _forward(self, idx: Tensor) -> Tensor:
        model, config = self.model, self.model.config
        T = idx.size(1)
        assert T <= config.block_size, "longer texts need the band of GPT.forward"
        p = config.dropout if model.training else 0.0
        x = model.embed(idx)
        cos, sin = rope_angles(torch.arange(T), config, x.dtype)
        mask = torch.full((T, T), -torch.inf, dtype=self.dtype).triu(1).repeat(config.n_head // config.n_kv_head, 1)
        for block in model.blocks:
            assert isinstance(block, Block)
            attn, mlp = block.attn, block.mlp
            x = _Attention.apply(
                x, block.attn_norm.weight, attn.qkv.weight, attn.q_norm.weight, attn.k_norm.weight, attn.proj.weight,
                (cos, sin, mask, config.norm_eps, p, self.dtype),
            )  # fmt: skip
            x = _SwiGLU.apply(
                x, block.mlp_norm.weight, mlp.gate_up.weight, mlp.proj.weight, (config.norm_eps, p, self.dtype)
            )
        return F.linear(model.norm(x).to(self.dtype), model.head.weight.to(self.dtype))


def _normalize(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x (..., C) divided by its root mean square, and the reciprocal of the latter (..., 1)."""
    scale = (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_() / x.size(-1) + eps).rsqrt_()
    return x * scale, scale


def _normalize_backward(grad: Tensor, normed: Tensor, scale: Tensor, dot: Tensor) -> Tensor:
    """Gradient of x, given `grad` of the normed x and `dot` (..., 1), the sum of grad · normed over the last dim."""
    return (grad * scale).addcmul_(normed, dot * scale / -normed.size(-1))


def _fold_backward(grad: Tensor, weight: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gain (C,) and weight (rows, C), given `grad` of their product."""
    grad = grad.to(weight.dtype)
    return (grad * weight).sum(0), grad * gain


def _dropout(y: Tensor, p: float) -> tuple[Tensor, Tensor | None]:
    """y after dropout, and the factors it was multiplied by; None for p = 0."""
    if p == 0.0:
        return y, None
    factors = torch.empty_like(y).bernoulli_(1 - p).div_(1 - p)
    return y * factors, factors


def _transposed_product(large: Tensor, small: Tensor) -> Tensor:
    """Batched largeᵀ · small: (n, rows, l) and (n, rows, s) -> (n, l, s).

    A batched product copies a transposed left operand; this copies the small one.
    """
    return (small.mT.contiguous() @ large).mT


class _Attention(torch.autograd.Function):
    """x + proj(attention(norm(x))), with the full (T, T) attention weights saved for the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, qkv: Tensor, q_gain: Tensor, k_gain: Tensor, proj: Tensor, rest: Any
    ) -> Tensor:
        cos, sin, mask, eps, p, dtype = rest
        B, T, C = x.size()
        hs = q_gain.numel()
        nh, nkv = C // hs, (qkv.size(0) - C) // hs // 2
        nqk = nh + nkv
        x = x.reshape(B * T, C)
        normed, scale = _normalize(x, eps)
        normed_low, folded, proj_low = normed.to(dtype), (qkv * gain).to(dtype), proj.to(dtype)
        heads = (normed_low @ folded.mT).view(B, T, nqk + nkv, hs)
        # Query and key heads differ only in their gains; with these in the tables, one pass rotates both.
        gains = torch.cat((q_gain.expand(nh, hs) * hs**-0.5, k_gain.expand(nkv, hs)))
        normed_qk, qk_scale = _normalize(heads[:, :, :nqk].to(x.dtype), eps)
        cos_gains, sin_gains = cos[:, None] * gains, sin[:, None] * gains.roll(hs // 2, -1)
        rotated = (normed_qk * cos_gains).addcmul_(normed_qk.roll(hs // 2, -1), sin_gains).to(dtype)
        # The queries of a key/value head form one matrix: (B·nkv, group·T, hs).
        q = rotated[:, :, :nh].transpose(1, 2).reshape(B * nkv, -1, hs)
        k = rotated[:, :, nh:].transpose(1, 2).reshape(B * nkv, T, hs)
        v = heads[:, :, nqk:].transpose(1, 2).reshape(B * nkv, T, hs)
        weights = torch.baddbmm(mask, q, k.mT).softmax(-1)  # (B·nkv, group·T, T)
        attended = (weights @ v).view(B, nh, T, hs).transpose(1, 2).reshape(B * T, C)
        y, factors = _dropout(attended @ proj_low.mT, p)
        ctx.save_for_backward(normed, scale, normed_low, normed_qk, qk_scale, q, k, v, weights, attended, factors,
                              cos, sin, gain, qkv, gains, folded, proj_low)  # fmt: skip
        return (x + y).view(B, T, C)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (normed, scale, normed_low, normed_qk, qk_scale, q, k, v, weights, attended, factors,
         cos, sin, gain, qkv, gains, folded, proj_low) = ctx.saved_tensors  # fmt: skip
        B, T, C = grad.size()
        (nqk, hs), nkv = gains.size(), k.size(0) // B
        nh = nqk - nkv
        grad = grad.reshape(B * T, C)
        grad_y = grad.to(q.dtype) if factors is None else grad.to(q.dtype) * factors
        grad_proj = grad_y.mT @ attended
        grad_attended = (grad_y @ proj_low).view(B, T, nh, hs).transpose(1, 2).reshape(B * nkv, -1, hs)
        grad_scores = torch._softmax_backward_data(grad_attended @ v.mT, weights, -1, weights.dtype)
        grad_q = (grad_scores @ k).view(B, nh, T, hs).transpose(1, 2)
        grad_k = _transposed_product(grad_scores, q).unflatten(0, (B, nkv)).transpose(1, 2)
        grad_v = _transposed_product(weights, grad_attended).unflatten(0, (B, nkv)).transpose(1, 2)
        grad_qk = torch.cat((grad_q, grad_k), dim=2).to(normed_qk.dtype)  # (B, T, nh + nkv, hs)
        # roll by hs/2 is its own inverse
        grad_qk = (grad_qk * sin[:, None]).roll(hs // 2, -1).addcmul_(grad_qk, cos[:, None])
        dot = grad_qk * normed_qk
        grad_gains = dot.sum((0, 1))  # (nh + nkv, hs)
        dot = dot.mul_(gains).sum(-1, keepdim=True)
        grad_qk = _normalize_backward(grad_qk.mul_(gains), normed_qk, qk_scale, dot)
        grad_heads = torch.cat((grad_qk.to(v.dtype), grad_v), dim=2).view(B * T, -1)
        grad_gain, grad_qkv = _fold_backward(grad_heads.mT @ normed_low, qkv, gain)
        grad_normed = (grad_heads @ folded).to(grad.dtype)
        dot = (grad_normed * normed).sum(-1, keepdim=True)
        grad_x = _normalize_backward(grad_normed, normed, scale, dot).add_(grad).view(B, T, C)
        grad_q_gain, grad_k_gain = grad_gains[:nh].sum(0) * hs**-0.5, grad_gains[nh:].sum(0)
        return grad_x, grad_gain, grad_qkv, grad_q_gain, grad_k_gain, grad_proj.to(qkv.dtype), None


class _SwiGLU(torch.autograd.Function):
    """x + proj(silu(gate) · up) of norm(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, gate_up: Tensor, proj: Tensor, rest: Any) -> Tensor:
        eps, p, dtype = rest
        B, T, C = x.size()
        x = x.reshape(B * T, C)
        normed, scale = _normalize(x, eps)
        normed_low, folded, proj_low = normed.to(dtype), (gate_up * gain).to(dtype), proj.to(dtype)
        inner = normed_low @ folded.mT  # (B·T, 2 n_inner)
        gate, up = inner.chunk(2, dim=-1)
        activated = F.silu(gate)
        hidden = activated * up
        y, factors = _dropout(hidden @ proj_low.mT, p)
        ctx.save_for_backward(
            normed, scale, normed_low, inner, activated, hidden, factors, gain, gate_up, folded, proj_low
        )
        return (x + y).view(B, T, C)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        normed, scale, normed_low, inner, activated, hidden, factors, gain, gate_up, folded, proj_low = (
            ctx.saved_tensors
        )
        B, T, C = grad.size()
        grad = grad.reshape(B * T, C)
        grad_y = grad.to(inner.dtype) if factors is None else grad.to(inner.dtype) * factors
        grad_proj = grad_y.mT @ hidden
        grad_hidden = grad_y @ proj_low
        gate, up = inner.chunk(2, dim=-1)
        grad_inner = torch.empty_like(inner)
        grad_gate, grad_up = grad_inner.chunk(2, dim=-1)
        torch.mul(grad_hidden, activated, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad_hidden.mul_(up), gate, grad_input=grad_gate)
        grad_gain, grad_gate_up = _fold_backward(grad_inner.mT @ normed_low, gate_up, gain)
        grad_normed = (grad_inner @ folded).to(grad.dtype)
        dot = (grad_normed * normed).sum(-1, keepdim=True)
        grad_x = _normalize_backward(grad_normed, normed, scale, dot).add_(grad).view(B, T, C)
        return grad_x, grad_gain, grad_gate_up, grad_proj.to(gate_up.dtype), None
