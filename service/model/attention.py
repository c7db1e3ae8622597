"""A forward pass of one short text that keeps the attention weights, in NumPy and float64, without torch.

Attention kernels do not store these weights. `training/LECTURE.md` explains the steps. Letters as in gpt.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from service.model.config import GPTConfig

Array = np.ndarray


class LayerAttention(NamedTuple):
    """The attention of each head of a layer. Rows are queries and columns are keys."""

    scores: Array  # (nh, T, T): q · k, before scale and mask
    weights: Array  # (nh, T, T): softmax of the scaled scores over the keys that the query sees; 0 for other keys
    values: Array  # (nh, T, hs): the weights mix these


def weight_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of this model, by the names of GPT's parameters.

    The backends `native` and `cuda` and training/model/fused.py have no others. `layout` in checkpoint.py has those of
    a file, which a changed gpt.py may need to extend.
    """
    assert config.n_inner is not None
    C, F, V, hs = config.n_embd, config.n_inner, config.vocab_size, config.head_dim
    block: dict[str, tuple[int, ...]] = {
        "attn_norm": (C,),
        "attn.qkv": ((config.n_head + 2 * config.n_kv_head) * hs, C),
        "attn.q_norm": (hs,),
        "attn.k_norm": (hs,),
        "attn.proj": (C, C),
        "mlp_norm": (C,),
        "mlp.gate_up": (2 * F, C),
        "mlp.proj": (C, F),
    }
    blocks = {f"blocks.{i}.{name}.weight": shape for i in range(config.n_layer) for name, shape in block.items()}
    return {"embed.weight": (V, C), **blocks, "norm.weight": (C,), "head.weight": (V, C)}


def logits_of(weights: Mapping[str, Array], config: GPTConfig, ids: list[int]) -> Array:
    """Return the logits of a text, (T, V), computed by `attention_layers`."""
    logits = np.empty((len(ids), config.vocab_size))
    for _ in attention_layers(weights, config, ids, logits):
        pass
    return logits


def attention_layers(
    weights: Mapping[str, Array], config: GPTConfig, ids: list[int], logits: Array | None = None
) -> Iterator[LayerAttention]:
    """Yield the attention of each layer in order. A layer is computed when the caller asks for it.

    weights: the weights by the names of GPT's parameters, in any precision, as from `Checkpoint.load_weights`.
    logits: optional array (T, V); it is filled with the logits after the caller has taken all layers.
    """
    T, hs, nh, nkv = len(ids), config.head_dim, config.n_head, config.n_kv_head
    angles = np.arange(T)[:, None] * config.rope_theta ** -(np.arange(0, hs, 2) / hs)  # (T, hs/2)
    cos, sin = np.tile(np.cos(angles), 2), np.concatenate((-np.sin(angles), np.sin(angles)), axis=1)  # (T, hs)
    place = np.arange(T)
    is_seen = (place <= place[:, None]) & (place > place[:, None] - config.block_size)  # (T, T)

    def get(name: str) -> Array:
        return weights[name].astype(np.float64)

    def normed(x: Array, name: str) -> Array:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config.norm_eps) * get(name)

    def rotated(x: Array) -> Array:  # (heads, T, hs)
        return x * cos + np.roll(x, hs // 2, axis=-1) * sin

    x = get("embed.weight")[ids]  # (T, C)
    for layer in range(config.n_layer):
        at = f"blocks.{layer}."
        qkv = normed(x, at + "attn_norm.weight") @ get(at + "attn.qkv.weight").T  # (T, (nh + 2·nkv)·hs)
        heads = qkv.reshape(T, nh + 2 * nkv, hs).transpose(1, 0, 2)
        q, k, v = np.split(heads, [nh, nh + nkv])
        q = rotated(normed(q, at + "attn.q_norm.weight"))  # (nh, T, hs)
        k, v = (np.repeat(part, nh // nkv, axis=0) for part in (rotated(normed(k, at + "attn.k_norm.weight")), v))
        scores = q @ k.transpose(0, 2, 1)
        seen = np.where(is_seen, scores / math.sqrt(hs), -np.inf)
        exponentials = np.exp(seen - seen.max(axis=-1, keepdims=True, initial=-np.inf))
        mix = exponentials / exponentials.sum(axis=-1, keepdims=True)
        yield LayerAttention(scores, mix, v)
        y = (mix @ v).transpose(1, 0, 2).reshape(T, nh * hs)
        x = x + y @ get(at + "attn.proj.weight").T
        gate, up = np.split(normed(x, at + "mlp_norm.weight") @ get(at + "mlp.gate_up.weight").T, 2, axis=1)
        with np.errstate(over="ignore"):  # exp may overflow to infinity; the quotient is then 0
            x = x + (gate / (1 + np.exp(-gate)) * up) @ get(at + "mlp.proj.weight").T
    if logits is not None:
        logits[:] = normed(x, "norm.weight") @ get("head.weight").T
