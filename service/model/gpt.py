"""A character-level GPT in the Qwen3 layout: RoPE, RMSNorm, QK-norm, SwiGLU, grouped KV heads, no biases.

Training, prefill and decode share one attention rule: a query at position p sees the keys at positions j with
p − W < j ≤ p. The cache is an argument of the forward pass, and without a cache the pass runs whole texts. The model
knows nothing about optimizers, files or text.

Letters: B rows, T characters, C n_embd, nh n_head, nkv n_kv_head, hs head_dim, W block_size, V vocab_size.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from service.model.config import GPTConfig
from service.model.counts import Counts, mixed_logits
from service.model.kv_cache import CacheRows, additive
from service.model.params import SamplingParams
from service.model.sampling import Sampler, uniforms


def rope_angles(positions: Tensor, config: GPTConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and signed sin of `positions` (…), each (…, hs).

    The rotation of x is x · cos + roll(x, hs / 2) · sin (Su et al. 2021, in the half-split layout of Hugging Face).
    Angles are fp64, so they are accurate at any text length.
    """
    hs = config.head_dim
    half = torch.arange(0, hs, 2, dtype=torch.float64, device=positions.device) / hs
    angles = positions.double()[..., None] * config.rope_theta**-half  # (..., T, hs/2)
    cos, sin = angles.cos(), angles.sin()
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return cos.to(dtype), sin.to(dtype)


def banded_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Compute causal attention in which a query sees at most `window` keys, its own included.

    q (B, nh, T, hs), k and v (B, nkv, T, hs) -> (B, nh, T, hs).

    A text longer than the window is split into blocks of `window` queries. A block attends to its own keys and to those
    of the block before it. The cost is O(T · window).
    """
    B, T = q.size(0), q.size(2)
    if T <= window:
        return attend(q, k, v, is_causal=True)
    n = (T - 1) // window  # number of blocks after the first
    q, k, v = (F.pad(x, (0, 0, 0, (n + 1) * window - T)).unflatten(2, (n + 1, window)) for x in (q, k, v))
    first = attend(q[:, :, 0], k[:, :, 0], v[:, :, 0], is_causal=True)  # (B, nh, W, hs)
    k, v = (torch.cat((x[:, :, :-1], x[:, :, 1:]), dim=3) for x in (k, v))  # (B, nkv, n, 2W, hs)
    query = torch.arange(window, device=q.device)[:, None] + window  # index within the 2W keys
    key = torch.arange(2 * window, device=q.device)
    band = (key <= query) & (key > query - window)  # (W, 2W)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q[:, :, 1:], k, v))  # (B·n, heads, ·, hs)
    y = attend(q, k, v, attn_mask=additive(band, q.dtype))  # (B·n, nh, W, hs)
    return torch.cat((first, y.unflatten(0, (B, n)).transpose(1, 2).flatten(2, 3)), dim=2)[:, :, :T]


def attend(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """Compute softmax(q·kᵀ / √hs) · v over grouped heads.

    q (B, nh, T, hs), k and v (B, nkv, S, hs) -> (B, nh, T, hs).
    """
    if q.size(2) == 1 and not is_causal:
        # Decode: the query heads that share a key head form one matrix, which is faster on a CPU.
        B, nh, _, hs = q.size()
        y = F.scaled_dot_product_attention(q.reshape(B, k.size(1), -1, hs), k, v, attn_mask=attn_mask)
        return y.reshape(B, nh, 1, hs)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, is_causal=is_causal, enable_gqa=q.size(1) != k.size(1)
    )


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        hs = config.head_dim
        self.config, self.layer = config, layer
        self.sizes = [config.n_embd, config.n_kv_head * hs, config.n_kv_head * hs]
        self.qkv = nn.Linear(config.n_embd, sum(self.sizes), bias=False)  # rows: queries, then keys, then values
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.q_norm = nn.RMSNorm(hs, config.norm_eps)  # QK-norm (Henry et al. 2020)
        self.k_norm = nn.RMSNorm(hs, config.norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: CacheRows | None) -> Tensor:
        (B, T, C), (cos, sin) = x.size(), rope  # cos and sin (…, T, 1, hs) broadcast over the heads
        nh, nkv, hs = self.config.n_head, self.config.n_kv_head, self.config.head_dim
        qkv = self.qkv(x).view(B, T, nh + 2 * nkv, hs)
        qk, v = qkv[:, :, : nh + nkv], qkv[:, :, nh + nkv :].transpose(1, 2)
        # Queries and keys are in one tensor, which halves the number of operations.
        gain = torch.cat((self.q_norm.weight,) * nh + (self.k_norm.weight,) * nkv).view(-1, hs)
        qk = torch.rms_norm(qk, (hs,), None, self.config.norm_eps) * gain.to(qk.dtype)
        qk = torch.addcmul(qk * cos, qk.roll(hs // 2, dims=-1), sin).to(v.dtype).transpose(1, 2)  # (B, nh + nkv, T, hs)
        q, k = qk[:, :nh], qk[:, nh:]
        if cache is None:
            y = banded_attention(q, k, v, self.config.block_size)
        else:
            k, v = cache.update_and_fetch(self.layer, k, v)
            y = attend(q, k, v, attn_mask=cache.mask)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class SwiGLU(nn.Module):
    """The feed-forward layer: proj(silu(gate) · up) (Shazeer 2020)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        assert config.n_inner is not None  # __post_init__ sets it
        self.gate_up = nn.Linear(config.n_embd, 2 * config.n_inner, bias=False)  # rows: gate, then up
        self.proj = nn.Linear(config.n_inner, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.proj(F.silu(gate) * up)


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.attn = CausalSelfAttention(config, layer)
        self.mlp_norm = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = SwiGLU(config)
        self.dropout = config.dropout

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: CacheRows | None) -> Tensor:
        x = x + F.dropout(self.attn(self.attn_norm(x), rope, cache), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.mlp_norm(x)), self.dropout, self.training)


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, idx: Tensor, cache: CacheRows | None = None) -> Tensor:
        """Compute the logits (B, T, V) of the character ids idx (B, T).

        Without a cache, every row starts at position 0. With a cache, the characters of row b are at
        `cache.positions[b]`, and their keys and values are written to the cache.
        """
        x = self.embed(idx)  # (B, T, C)
        positions = torch.arange(idx.size(1), device=idx.device) if cache is None else cache.positions  # (T,) or (B, T)
        rope = rope_angles(positions[..., None], self.config, x.dtype)
        for block in self.blocks:
            x = block(x, rope, cache)
        logits: Tensor = self.head(self.norm(x))
        return logits

    @torch.no_grad()
    def generate(
        self, prompt: list[int], max_tokens: int, params: SamplingParams, counts: Counts | None = None
    ) -> list[int]:
        """Return `max_tokens` ids generated after `prompt`, by the mixture with `counts` if these have weights above 0.

        Each character takes one forward pass over the whole text, without a cache. In fp64 (`model.double()`), this
        method defines the text of a seed: an engine in float64 generates the same ids.
        """
        ids = list(prompt)
        sampler, every = Sampler(1, self.config.vocab_size), slice(0, 1)
        sampler.start(0, params, prompt)
        sampler.send()
        for u in torch.from_numpy(uniforms(params.seed, 0, max_tokens)):
            logits = self(torch.tensor([ids], device=self.head.weight.device))[:, -1].cpu().double()  # (1, V)
            if counts is not None and counts.is_mixed:
                p, weight = counts.next(ids)
                logits = torch.from_numpy(mixed_logits(logits.numpy(), p[None], np.array([weight])))
            ids.append(int(sampler.choose(logits, every, u[None])[0]))
            sampler.counts[0, ids[-1]] += 1.0
        return ids[len(prompt) :]
