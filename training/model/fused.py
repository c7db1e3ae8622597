"""The model's forward for training on a CPU, with a hand-written backward for each half block.

On a CPU, autograd spends most of a small model's step outside the matrix products, on dozens of small operations, dtype
conversions and saved intermediates. Here each half block is one autograd function with few passes over memory. It
folds norm gains into the weights that follow and includes the residual addition. Norms, attention and SwiGLU are
written in C++ (fused.cpp); torch's operations replace them if fused.cpp was not compiled. The module computes
`GPT.forward` without a cache, for texts no longer than the attention window. Texts of different lengths need no
padding, because they lie one after another.

This module knows nothing about optimizers or data.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from service.engine.native import built, opened
from service.model.gpt import GPT, Block, rope_angles
from training.messages import Refusal


class FusedForward:
    """idx (B, T) -> logits (B, T, V), differentiable through autograd. Each row is a text of its own.

    With `lengths`, the ids of all rows are texts of these lengths, one after another. Each text starts at position 0
    and attends only to itself. No text is longer than block_size.

    Products with weights, except the head's, have inputs and outputs in `dtype`. The residual stream, the values
    between products, the parameters and their gradients are float64 if `dtype` is, else float32. In bfloat16,
    attention's own products also multiply pairs of bfloat16 if the CPU has such an instruction.
    """

    def __init__(self, model: GPT, dtype: torch.dtype):
        self.model, self.dtype = model, dtype

    def __call__(self, idx: Tensor, lengths: Tensor | None = None, stream: list[Tensor] | None = None) -> Tensor:
        """Return the logits. stream: receives the embedding and each half block's output, (B, T, C) each."""
        if lengths is None:
            lengths = torch.full((idx.size(0),), idx.size(1))
        with torch.autocast("cpu", enabled=False):  # dtypes are explicit here
            return self._forward(idx, lengths, [] if stream is None else stream)

    def _forward(self, idx: Tensor, lengths: Tensor, stream: list[Tensor]) -> Tensor:
        model, config = self.model, self.model.config
        longest = int(lengths.max())
        computed = torch.float64 if self.dtype == torch.float64 else torch.float32
        # fused.cpp is given pointers.
        if not (0 < lengths.min() and longest <= config.block_size and lengths.sum() == idx.numel()):
            raise ValueError("each text must have 1 to block_size ids, and the texts together all of `idx`")
        if model.head.weight.dtype != computed:
            raise ValueError(f"the model must be {computed}, got {model.head.weight.dtype}")
        p = config.dropout if model.training else 0.0
        x = model.embed(idx)
        cos, sin = rope_angles(torch.arange(longest), config, x.dtype)
        if not cos.shape == sin.shape == (longest, config.head_dim):  # of a changed gpt.py
            raise ValueError(f"rope_angles must have shape {(longest, config.head_dim)}, got {tuple(cos.shape)}")
        starts = F.pad(lengths.cumsum(0), (1, 0)).int()
        stream.append(x)
        for block in model.blocks:
            assert isinstance(block, Block)
            attn, mlp = block.attn, block.mlp
            x = _Attention.apply(
                x, block.attn_norm.weight, attn.qkv.weight, attn.q_norm.weight, attn.k_norm.weight, attn.proj.weight,
                (starts, cos, sin, config.norm_eps, p, self.dtype),
            )  # fmt: skip
            stream.append(x)
            x = _SwiGLU.apply(
                x, block.mlp_norm.weight, mlp.gate_up.weight, mlp.proj.weight, (config.norm_eps, p, self.dtype)
            )
            stream.append(x)
        return F.linear(model.norm(x), model.head.weight)  # bfloat16 would round a logit of 10 by up to 0.03


def _normalize(x: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x (rows, C) divided by its root mean square, in `dtype`, and that root's reciprocal (rows, 1)."""
    normed, scale = torch.empty_like(x, dtype=dtype), x.new_empty(len(x), 1)
    if not _call("rms_norm", dtype, tuple(x.size()), eps, x, scale, normed):
        scale = (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_() / x.size(-1) + eps).rsqrt_()
        normed = (x * scale).to(dtype)
    return normed, scale


def _normalize_backward(grad_normed: Tensor, x: Tensor, scale: Tensor, grad: Tensor) -> Tensor:
    """Return `grad` plus the gradient of x, given the gradient of the normed x."""
    grad_x = torch.empty_like(x)
    if _call("rms_norm_backward", grad_normed.dtype, tuple(x.size()), x, scale, grad_normed, grad, grad_x):
        return grad_x
    grad_normed, normed = grad_normed.to(x.dtype), x * scale
    dot = (grad_normed * normed).sum(-1, keepdim=True)
    return (grad_normed * scale).addcmul_(normed, dot * scale / -x.size(-1)).add_(grad)


def _fold_backward(grad: Tensor, weight: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gain (C,) and weight (rows, C), given the gradient `grad` of their product."""
    grad = grad.to(weight.dtype)
    return (grad * weight).sum(0), grad * gain


def _dropout(y: Tensor, p: float) -> tuple[Tensor, Tensor | None]:
    """Return y after dropout, and the factors that multiplied it, None if p is 0."""
    if p == 0.0:
        return y, None
    factors = torch.empty_like(y).bernoulli_(1 - p).div_(1 - p)
    return y * factors, factors


VERSION = 3  # version of the functions of fused.cpp


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the library of fused.cpp for this CPU, or None if it was not compiled or the CPU is too old.

    Raises:
        Refusal: the file is not such a library, or has another version.
    """
    try:
        path = built(Path(__file__).with_name("_fused"))
    except RuntimeError:
        return None
    try:
        return opened(path, "fused_version", VERSION)
    except RuntimeError as error:
        raise Refusal(str(error)) from None


def _call(name: str, dtype: torch.dtype, sizes: tuple[int, ...], *arguments: Tensor | float) -> bool:
    """Call a function of the library for products in `dtype`. Return whether the library has it.

    sizes: the function's first argument, to which the number of threads is appended.

    Raises:
        MemoryError: the function reports a failure, which means that it could not allocate memory.
    """
    library, suffix = _library(), str(dtype).removeprefix("torch.")
    if library is None or suffix not in ("float32", "float64", "bfloat16"):
        return False
    function = getattr(library, f"{name}_{suffix}")
    function.restype = ctypes.c_bool
    values = (ctypes.c_double(x) if isinstance(x, float) else ctypes.c_void_p(x.data_ptr()) for x in arguments)
    if not function((ctypes.c_int32 * (len(sizes) + 1))(*sizes, torch.get_num_threads()), *values):
        raise MemoryError(f"{name} of {sizes}")
    return True


class _Heads:
    """Attention between the input product (queries, keys and values) and the output projection.

    starts (texts + 1,): the first row of each text, then the number of rows. heads (rows, nh + 2 nkv, hs): queries,
    then keys, then values, in the products' dtype. gains (nh + nkv, hs): the gains of the queries' norms, times
    1 / √hs, then of the keys' norms. cos, sin (longest, hs): the result of rope_angles.
    """

    def __init__(self, starts: Tensor, heads: Tensor, gains: Tensor, cos: Tensor, sin: Tensor, nh: int, eps: float):
        self.inputs, self.nh, self.eps = (starts, heads.contiguous(), gains.contiguous(), cos, sin), nh, eps
        self.sizes = (len(starts) - 1, len(cos), nh, len(gains) - nh, heads.size(2))

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the attended values (rows, nh, hs) and the log-sum-exp of the scores (rows, nh), for the backward."""
        _, heads, gains, *_ = self.inputs
        attended, lse = heads.new_empty(len(heads), self.nh, heads.size(2)), gains.new_empty(len(heads), self.nh)
        if not _call("attention", heads.dtype, self.sizes, self.eps, *self.inputs, attended, lse):
            attended = self._by_torch(heads, gains)
        return attended, lse

    def backward(self, attended: Tensor, lse: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of heads and of gains, given the gradient of the attended values."""
        _, heads, gains, *_ = self.inputs
        grad_heads, grad_gains = torch.empty_like(heads), gains.new_empty(self.sizes[0], *gains.size())
        given = (*self.inputs, attended, lse, grad.contiguous())
        if _call("attention_backward", heads.dtype, self.sizes, self.eps, *given, grad_heads, grad_gains):
            return grad_heads, grad_gains.sum(0)
        with torch.enable_grad():
            heads, gains = heads.detach().requires_grad_(), gains.detach().requires_grad_()
            return torch.autograd.grad(self._by_torch(heads, gains), (heads, gains), grad)  # type: ignore[return-value]

    def _by_torch(self, heads: Tensor, gains: Tensor) -> Tensor:
        """Return the attended values, computed by torch.

        Each text has a row of its own, padded on the right, where padding does not affect causal attention.
        """
        starts, _, _, cos, sin = self.inputs
        nqk, hs = gains.size()
        lengths = starts.diff().tolist()
        qkv = torch.nn.utils.rnn.pad_sequence(heads.to(gains.dtype).split(lengths), batch_first=True)
        qk = torch.rms_norm(qkv[:, :, :nqk], (hs,), None, self.eps) * gains
        qk = (qk * cos[:, None]).addcmul(qk.roll(hs // 2, -1), sin[:, None]).transpose(1, 2)
        v = qkv[:, :, nqk:].transpose(1, 2)
        y = F.scaled_dot_product_attention(
            qk[:, : self.nh], qk[:, self.nh :], v, is_causal=True, scale=1.0, enable_gqa=True
        ).transpose(1, 2)
        return torch.cat([row[:length] for row, length in zip(y, lengths, strict=True)]).to(heads.dtype)


class _Attention(torch.autograd.Function):
    """x + proj(attention(norm(x)))."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, qkv: Tensor, q_gain: Tensor, k_gain: Tensor, proj: Tensor, rest: Any
    ) -> Tensor:
        starts, cos, sin, eps, p, dtype = rest
        B, T, C = x.size()
        hs = q_gain.numel()
        nh, nkv = C // hs, (qkv.size(0) - C) // hs // 2
        x = x.reshape(B * T, C).contiguous()
        normed, scale = _normalize(x, eps, dtype)
        folded, proj_low = (qkv * gain).to(dtype), proj.to(dtype)
        heads = (normed @ folded.mT).view(B * T, nh + 2 * nkv, hs)
        gains = torch.cat((q_gain.expand(nh, hs) * hs**-0.5, k_gain.expand(nkv, hs)))
        core, ctx.eps = _Heads(starts, heads, gains, cos, sin, nh, eps), eps
        attended, lse = core.forward()
        y, factors = _dropout(attended.view(B * T, C) @ proj_low.mT, p)
        ctx.save_for_backward(x, scale, normed, attended, lse, factors, gain, qkv, folded, proj_low, *core.inputs)
        return (x + y).view(B, T, C)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, normed, attended, lse, factors, gain, qkv, folded, proj_low, *inputs = ctx.saved_tensors
        starts, heads, gains, cos, sin = inputs
        B, T, C = grad.size()
        nh, hs = attended.size()[1:]
        grad = grad.reshape(B * T, C).contiguous()
        grad_y = grad.to(proj_low.dtype) if factors is None else grad.to(proj_low.dtype) * factors
        grad_proj = grad_y.mT @ attended.view(B * T, C)
        grad_attended = (grad_y @ proj_low).view_as(attended)
        core = _Heads(starts, heads, gains, cos, sin, nh, ctx.eps)
        grad_heads, grad_gains = core.backward(attended, lse, grad_attended)
        grad_heads = grad_heads.view(B * T, -1)
        grad_gain, grad_qkv = _fold_backward(grad_heads.mT @ normed, qkv, gain)
        grad_x = _normalize_backward(grad_heads @ folded, x, scale, grad).view(B, T, C)
        grad_q_gain, grad_k_gain = grad_gains[:nh].sum(0) * hs**-0.5, grad_gains[nh:].sum(0)
        return grad_x, grad_gain, grad_qkv, grad_q_gain, grad_k_gain, grad_proj.to(qkv.dtype), None


class _SwiGLU(torch.autograd.Function):
    """x + proj(silu(gate) · up) of norm(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, gate_up: Tensor, proj: Tensor, rest: Any) -> Tensor:
        eps, p, dtype = rest
        B, T, C = x.size()
        x = x.reshape(B * T, C).contiguous()
        normed, scale = _normalize(x, eps, dtype)
        folded, proj_low = (gate_up * gain).to(dtype), proj.to(dtype)
        inner = normed @ folded.mT  # (B·T, 2 n_inner)
        hidden = inner.new_empty(B * T, proj.size(1))
        if not _call("swiglu", dtype, tuple(hidden.size()), inner, hidden):
            gate, up = inner.chunk(2, dim=-1)
            hidden = F.silu(gate) * up
        y, factors = _dropout(hidden @ proj_low.mT, p)
        ctx.save_for_backward(x, scale, normed, inner, hidden, factors, gain, gate_up, folded, proj_low)
        return (x + y).view(B, T, C)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, normed, inner, hidden, factors, gain, gate_up, folded, proj_low = ctx.saved_tensors
        B, T, C = grad.size()
        grad = grad.reshape(B * T, C).contiguous()
        grad_y = grad.to(inner.dtype) if factors is None else grad.to(inner.dtype) * factors
        grad_proj = grad_y.mT @ hidden
        grad_hidden, grad_inner = grad_y @ proj_low, torch.empty_like(inner)
        if not _call("swiglu_backward", inner.dtype, tuple(hidden.size()), inner, grad_hidden, grad_inner):
            gate, up = inner.chunk(2, dim=-1)
            grad_gate, grad_up = grad_inner.chunk(2, dim=-1)
            torch.mul(grad_hidden, F.silu(gate), out=grad_up)
            torch.ops.aten.silu_backward.grad_input(grad_hidden.mul_(up), gate, grad_input=grad_gate)
        grad_gain, grad_gate_up = _fold_backward(grad_inner.mT @ normed, gate_up, gain)
        grad_x = _normalize_backward(grad_inner @ folded, x, scale, grad).view(B, T, C)
        return grad_x, grad_gain, grad_gate_up, grad_proj.to(gate_up.dtype), None
