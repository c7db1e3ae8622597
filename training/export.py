"""Other programs' formats of a checkpoint: GGUF for llama.cpp, ONNX for onnxruntime.

Transformers, vLLM and SGLang need no export: a checkpoint folder is theirs as it is.

Neither format knows a cache as a ring. An ONNX graph carries the band, for any length, but has no cache. llama.cpp
gives qwen3 no sliding window: a text of more than block_size characters attends to all of them there, and its logits
are others, so the file states block_size as its context length. Within it they are ours to 1e-5 where llama.cpp keeps
its cache in fp32 (-ctk f32 -ctv f32), and to some 1e-3 in fp16, its default. A prompt must be of the model's own
characters: llama.cpp refuses most others, but never ends on one whose UTF-8 starts as that of a character it knows.
"""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from service.model.checkpoint import Checkpoint, named_tensors
from service.model.gpt import GPT


def to_gguf(checkpoint: Checkpoint, file: Path) -> None:
    """A GGUF file (version 3, fp32) of architecture qwen3, with one token per character."""
    from gguf import MODEL_ARCH, GGUFWriter, TokenType, get_tensor_name_map

    model = checkpoint.load_model()
    config = model.config
    writer = GGUFWriter(str(file), "qwen3")
    writer.add_name("chargpt")
    writer.add_block_count(config.n_layer)
    writer.add_context_length(config.block_size)
    writer.add_embedding_length(config.n_embd)
    assert config.n_inner is not None
    writer.add_feed_forward_length(config.n_inner)
    writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.n_kv_head)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    # RWKV's tokenizer takes the longest token that matches, as bytes, and is the one that has neither an end nor an
    # unknown token: the others would take two or three of the characters for theirs, and end a text at the "!".
    characters = ["".join(f"\\x{byte:02x}" for byte in c.encode()) for c in checkpoint.tokenizer.characters]
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list(characters)
    writer.add_token_scores([0.0] * len(characters))
    writer.add_token_types([TokenType.NORMAL] * len(characters))
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    names = get_tensor_name_map(MODEL_ARCH.QWEN3, config.n_layer)
    for name, tensor in named_tensors(model).items():
        theirs = names.get_name(name, try_suffixes=(".weight",))
        assert theirs is not None
        writer.add_tensor(theirs, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class _Explicit(nn.Module):
    """The model's forward in operations that every ONNX runtime has."""

    def __init__(self, model: GPT):
        super().__init__()
        self.model = model
        self.blocks: list[Any] = list(model.blocks)

    def forward(self, idx: Tensor) -> Tensor:
        model, config = self.model, self.model.config
        hs, nh, nkv = config.head_dim, config.n_head, config.n_kv_head
        T = idx.size(1)
        p = torch.arange(T)
        half = config.rope_theta ** (-torch.arange(0, hs, 2, dtype=torch.float64) / hs)
        angles = p.double()[:, None] * half
        cos, sin = (torch.cat((f, f), dim=-1).float() for f in (angles.cos(), angles.sin()))
        distance = p[:, None] - p
        hidden = (distance < 0) | (distance >= config.block_size)  # (T, T)

        def norm(x: Tensor, weight: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.norm_eps) * weight

        def turn(x: Tensor) -> Tensor:
            a, b = x[..., : hs // 2], x[..., hs // 2 :]
            return x * cos + torch.cat((-b, a), dim=-1) * sin

        x = model.embed(idx)
        for block in self.blocks:
            attn, mlp = block.attn, block.mlp
            q, k, v = attn.qkv(norm(x, block.attn_norm.weight)).split(attn.sizes, dim=-1)
            q = turn(norm(q.unflatten(-1, (nh, hs)).transpose(1, 2), attn.q_norm.weight))
            k = turn(norm(k.unflatten(-1, (nkv, hs)).transpose(1, 2), attn.k_norm.weight))
            v = v.unflatten(-1, (nkv, hs)).transpose(1, 2)
            k, v = (y.repeat_interleave(nh // nkv, dim=1) for y in (k, v))
            scores = (q @ k.transpose(2, 3) * hs**-0.5).masked_fill(hidden, -torch.inf)
            x = x + attn.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
            gate, up = mlp.gate_up(norm(x, block.mlp_norm.weight)).chunk(2, dim=-1)
            x = x + mlp.proj(gate * torch.sigmoid(gate) * up)
        return model.head(norm(x, model.norm.weight))


def to_onnx(checkpoint: Checkpoint, file: Path) -> None:
    """An ONNX model: `idx` (batch, length) int64 -> `logits` (batch, length, vocab_size) fp32, banded, any length."""
    import onnx

    model = checkpoint.load_model()
    batch, length = torch.export.Dim("batch", min=1, max=1 << 20), torch.export.Dim("length", min=1, max=1 << 20)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it says which operators of torchvision it left out
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch about itself
        program = torch.onnx.export(
            _Explicit(model).eval(),
            (torch.zeros(2, 7, dtype=torch.long),),
            input_names=["idx"],
            output_names=["logits"],
            dynamic_shapes=({0: batch, 1: length},),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    proto = program.model_proto
    entry = proto.metadata_props.add()
    entry.key, entry.value = "vocabulary", "".join(checkpoint.tokenizer.characters)
    onnx.checker.check_model(proto)
    onnx.save_model(proto, str(file))


FORMATS: dict[str, Callable[[Checkpoint, Path], None]] = {"gguf": to_gguf, "onnx": to_onnx}


def export(checkpoint: Checkpoint, format: str, file: Path) -> None:
    """Write `checkpoint` to `file` in one of FORMATS; an earlier file stays until the new one is whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}.") as folder:
        new = Path(folder) / file.name
        FORMATS[format](checkpoint, new)
        os.replace(new, file)
