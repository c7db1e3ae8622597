"""The command `export`: convert a checkpoint to GGUF for llama.cpp or to ONNX for onnxruntime.

Transformers, vLLM and SGLang need no export, because they load a checkpoint folder directly.

Neither format has the service's ring cache. The ONNX graph applies the attention window at any length, but has no
cache. llama.cpp has no sliding window for qwen3. Beyond block_size characters its attention covers the whole text and
its logits differ, so the file states block_size as its context length. Within that length, its logits equal those of
GPT.forward to 1e-5 with an fp32 cache (-ctk f32 -ctv f32), and to about 1e-3 with its default, fp16.

Prompts for llama.cpp must use the model's own characters. It refuses most others, or takes the unknown symbol for each
of their bytes if the model has one. It loops forever on a character whose UTF-8 begins like that of a known one.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from service import installing
from service.model.checkpoint import Checkpoint
from service.model.config import GPTConfig
from service.model.gpt import GPT
from service.model.kv_cache import CacheRows
from service.model.tokenizer import UNKNOWN
from training.config import ConfigError
from training.messages import plural
from training.model.loading import find_checkpoint
from training.model.selfcheck import IS_SAME, is_qwen3
from training.run.saving import named_tensors

if TYPE_CHECKING:
    from gguf import GGUFWriter

COMPARED = 16  # characters whose logits are compared after an export to ONNX


def command(args: argparse.Namespace) -> None:
    checkpoint = Checkpoint.read(find_checkpoint(args.checkpoint))
    try:
        export(checkpoint, args.to, args.out)
    except ModuleNotFoundError as error:
        raise ConfigError(f"--to {args.to} needs the package {error.name}: {installing('export')}") from None
    print(f"{args.out}: {plural(args.out.stat().st_size, 'byte')}")
    counts, losses = checkpoint.load_counts(), checkpoint.training.get("losses", {})
    if counts and counts.is_mixed:
        both = f", {losses['streamed']:.4f} nats instead of {losses['mixed']:.4f}" if "mixed" in losses else ""
        print(f"it holds the network alone, without the counts that the service mixes in{both}")


def to_gguf(checkpoint: Checkpoint, file: Path) -> None:
    """Write a GGUF file (version 3, fp32) of architecture qwen3, with one token per character."""
    from gguf import GGUFWriter

    model = checkpoint.load_model()
    if not is_qwen3(model):
        raise ConfigError(
            f"{checkpoint.path} was trained with a changed gpt.py, and llama.cpp would compute Qwen3 with its weights: "
            "export it --to onnx, or serve it with --backend torch"
        )
    writer = GGUFWriter(str(file), "qwen3")
    writer.add_name("chargpt")
    _add_shape(writer, model.config)
    _add_vocabulary(writer, checkpoint)
    _add_tensors(writer, model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: GGUFWriter, config: GPTConfig) -> None:
    assert config.n_inner is not None
    writer.add_block_count(config.n_layer)
    writer.add_context_length(config.block_size)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(config.n_inner)
    writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.n_kv_head)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)


def _add_vocabulary(writer: GGUFWriter, checkpoint: Checkpoint) -> None:
    """Add the characters as tokens of RWKV's tokenizer, which greedily matches tokens as bytes.

    It is the only one without end and unknown tokens. The others would use some of the characters as special tokens,
    and would end a text at "!".
    """
    from gguf import TokenType

    characters = ["".join(f"\\x{byte:02x}" for byte in c.encode()) for c in checkpoint.tokenizer.characters]
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list(characters)
    writer.add_token_scores([0.0] * len(characters))
    types, unknown = [TokenType.NORMAL] * len(characters), checkpoint.tokenizer.unknown_id
    if unknown is not None:
        types[unknown] = TokenType.UNKNOWN
        writer.add_unk_token_id(unknown)
    writer.add_token_types(types)
    end = checkpoint.record_end
    if end is not None:
        writer.add_bos_token_id(end)
        writer.add_eos_token_id(end)
    writer.add_add_bos_token(end is not None)
    writer.add_add_eos_token(False)


def _add_tensors(writer: GGUFWriter, model: GPT) -> None:
    from gguf import MODEL_ARCH, get_tensor_name_map

    names = get_tensor_name_map(MODEL_ARCH.QWEN3, model.config.n_layer)
    for name, tensor in named_tensors(model).items():
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        assert gguf_name is not None
        writer.add_tensor(gguf_name, tensor.numpy())


class _WholeText(CacheRows):
    """A cache for one forward over a whole text. It returns the keys and values it receives, and its mask is the band.

    Without a cache, GPT.forward splits longer texts into blocks. This is a branch on the length, which a graph cannot
    have.
    """

    def __init__(self, idx: Tensor, window: int):
        places = torch.arange(idx.size(1))
        distance = places[:, None] - places
        self.positions = places.expand(idx.size())
        hidden = (distance < 0) | (distance >= window)  # (T, T)
        self.mask = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)

    def update_and_fetch(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v


class _OnnxForward(nn.Module):
    """GPT.forward over whole texts."""

    def __init__(self, model: GPT):
        super().__init__()
        self.model = model

    def forward(self, idx: Tensor) -> Tensor:
        logits: Tensor = self.model(idx, _WholeText(idx, self.model.config.block_size))
        return logits


def to_onnx(checkpoint: Checkpoint, file: Path) -> None:
    """Write an ONNX model: `idx` (batch, length) int64 -> `logits` (batch, length, vocab_size) fp32, any length."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    model = checkpoint.load_model()
    batch, length = torch.export.Dim("batch", min=1, max=1 << 20), torch.export.Dim("length", min=2, max=1 << 20)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # its warnings about torchvision do not concern us
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch warns about its own code
        program = torch.onnx.export(
            _OnnxForward(model).eval(),
            (torch.zeros(2, 7, dtype=torch.long),),
            input_names=["idx"],
            output_names=["logits"],
            dynamic_shapes=({0: batch, 1: length},),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    proto = program.model_proto
    metadata = {"vocabulary": "".join(checkpoint.tokenizer.characters)}
    if checkpoint.tokenizer.unknown_id is not None:
        metadata["unknown"] = UNKNOWN
    for key, value in metadata.items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, value
    onnx.checker.check_model(proto)
    idx = torch.arange(COMPARED)[None] ** 2 % model.config.vocab_size
    (logits,), exact = ReferenceEvaluator(proto).run(["logits"], {"idx": idx.numpy()}), model(idx)
    error = float((torch.from_numpy(logits) - exact).abs().max())
    if not error <= IS_SAME * max(1.0, float(exact.abs().max())):
        raise ConfigError(f"{checkpoint.path}: the graph's logits differ from those of gpt.py by up to {error:.3g}")
    onnx.save_model(proto, str(file))


FORMATS: dict[str, Callable[[Checkpoint, Path], None]] = {"gguf": to_gguf, "onnx": to_onnx}


def export(checkpoint: Checkpoint, format: str, file: Path) -> None:
    """Write `checkpoint` to `file` in one of FORMATS; atomically replaces an existing file.

    Raises:
        CheckpointError: the checkpoint cannot be loaded.
        ConfigError: the file cannot be written, or would have other logits than GPT.forward.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}.") as folder:
        new = Path(folder) / file.name
        try:
            FORMATS[format](checkpoint, new)
            os.replace(new, file)
        except OSError as error:  # NumPy's errors have no number
            raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from None
