"""A checkpoint: a plain Hugging Face model folder, which transformers loads unchanged.

    config.json            model_type qwen3, a sliding window of W in every layer, and a `chargpt` section
    model.safetensors      weights under Qwen3's names
    tokenizer.json         one character, one id; AutoTokenizer reads it with tokenizer_config.json
    training.json          recipe, seed, data hash, losses, versions
    manifest.json          SHA-256 and size of every other file

Saving is atomic, loading verifies the manifest. Only JSON and safetensors are read, never pickle. Only functions
that handle tensors import torch, so that reading a checkpoint's description does not load it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from service.model.config import GPTConfig
from service.model.tokenizer import CharTokenizer

if TYPE_CHECKING:
    import torch

    from service.model.gpt import GPT

FORMAT_VERSION = 1
WEIGHTS = "model.safetensors"
MANIFEST = "manifest.json"
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # safetensors' names -> how NumPy reads them

# GPTConfig field -> key in config.json
CONFIG_NAMES = {
    "vocab_size": "vocab_size",
    "block_size": "sliding_window",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
}

# Our parameter -> tensors in model.safetensors; ours concatenates the rows of several.
OUTER_NAMES = {
    "embed.weight": ["model.embed_tokens.weight"],
    "norm.weight": ["model.norm.weight"],
    "head.weight": ["lm_head.weight"],
}
BLOCK_NAMES = {
    "attn_norm.weight": ["input_layernorm.weight"],
    "attn.qkv.weight": ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
    "attn.q_norm.weight": ["self_attn.q_norm.weight"],
    "attn.k_norm.weight": ["self_attn.k_norm.weight"],
    "attn.proj.weight": ["self_attn.o_proj.weight"],
    "mlp_norm.weight": ["post_attention_layernorm.weight"],
    "mlp.gate_up.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "mlp.proj.weight": ["mlp.down_proj.weight"],
}


class CheckpointError(ValueError):
    """A checkpoint is missing, altered or unsupported; the message names the file."""


def weight_names(n_layer: int) -> dict[str, list[str]]:
    """Every parameter of a model of `n_layer` blocks -> its tensors in model.safetensors."""
    names = dict(OUTER_NAMES)
    for i in range(n_layer):
        for ours, theirs in BLOCK_NAMES.items():
            names[f"blocks.{i}.{ours}"] = [f"model.layers.{i}.{name}" for name in theirs]
    return names


def weight_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of model.safetensors -> its shape."""
    assert config.n_inner is not None
    C, queries, keys = config.n_embd, config.n_head * config.head_dim, config.n_kv_head * config.head_dim
    by_suffix: dict[str, tuple[int, ...]] = {
        "embed_tokens": (config.vocab_size, C),
        "lm_head": (config.vocab_size, C),
        "q_proj": (queries, C),
        "k_proj": (keys, C),
        "v_proj": (keys, C),
        "o_proj": (C, queries),
        "gate_proj": (config.n_inner, C),
        "up_proj": (config.n_inner, C),
        "down_proj": (C, config.n_inner),
        "q_norm": (config.head_dim,),
        "k_norm": (config.head_dim,),
    }
    names = (name for parts in weight_names(config.n_layer).values() for name in parts)
    return {name: by_suffix.get(name.split(".")[-2], (C,)) for name in names}


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint folder, without the weights."""

    path: Path
    hyperparameters: dict[str, Any]  # the fields of GPTConfig
    tokenizer: CharTokenizer
    training: dict[str, Any]  # training.json
    digest: str  # SHA-256 of manifest.json, which covers all files

    @classmethod
    def read(cls, path: str | Path) -> Checkpoint:
        """Verify every file in the manifest, and read all but the weights.

        Raises:
            CheckpointError: a file is missing or altered, or the format is unsupported.
        """
        path = Path(path)
        if not path.is_dir():
            raise CheckpointError(f"no checkpoint at {path}: not a folder")
        digest = hashlib.sha256(_read(path / MANIFEST)).hexdigest()
        manifest = _parse(path / MANIFEST)
        for name in manifest.get("files", {}):
            _verified(path, name, manifest)
        config = _parse(path / "config.json")
        version = config.get("chargpt", {}).get("format_version")
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{path / 'config.json'}: chargpt.format_version is {version}, this program reads {FORMAT_VERSION}"
            )
        if config.get("model_type") != "qwen3":
            raise CheckpointError(f"{path / 'config.json'}: model_type is {config.get('model_type')!r}, not 'qwen3'")
        try:
            hyperparameters = {ours: config[theirs] for ours, theirs in CONFIG_NAMES.items()}
            vocab = _parse(path / "tokenizer.json")["model"]["vocab"]
        except KeyError as error:
            raise CheckpointError(f"{path}: config.json or tokenizer.json lacks the key {error}") from None
        tokenizer = CharTokenizer(sorted(vocab, key=vocab.__getitem__))
        if tokenizer.vocab_size != hyperparameters["vocab_size"]:
            raise CheckpointError(
                f"{path}: vocab_size in config.json is {hyperparameters['vocab_size']}, but the tokenizer has "
                f"{tokenizer.vocab_size} characters"
            )
        return cls(path, hyperparameters, tokenizer, _parse(path / "training.json"), digest)

    @property
    def receptive_field(self) -> int:
        """See GPTConfig."""
        return GPTConfig(**self.hyperparameters).receptive_field

    def load_weights(self) -> dict[str, np.ndarray]:
        """The weights under the names of GPT's parameters, in the precision of the file; without torch.

        Raises:
            CheckpointError: the weights are altered, or tensors are missing, unknown or of the wrong shape.
        """
        from safetensors import deserialize

        file = self.path / WEIGHTS
        tensors = {}
        for name, tensor in deserialize(_verified(self.path, WEIGHTS, _parse(self.path / MANIFEST))):
            dtype = tensor["dtype"]
            if dtype not in _DTYPES:
                raise CheckpointError(f"{file}: {name} must be one of {', '.join(_DTYPES)}, got {dtype}")
            values = np.frombuffer(tensor["data"], _DTYPES[dtype])
            if dtype == "BF16":  # the upper half of a float32
                values = (values.astype("<u4") << 16).view("<f4")
            tensors[name] = values.reshape(tensor["shape"])
        shapes = weight_shapes(GPTConfig(**self.hyperparameters))
        if set(shapes) != set(tensors):
            wrong = sorted(set(shapes) ^ set(tensors))
            raise CheckpointError(f"{file}: missing or unknown tensors: {', '.join(wrong[:5])}")
        for name, shape in shapes.items():
            if tensors[name].shape != shape:
                raise CheckpointError(
                    f"{file}: {name} must have shape {shape} by config.json, got {tensors[name].shape}"
                )
        names = weight_names(self.hyperparameters["n_layer"])
        return {ours: np.concatenate([tensors[name] for name in theirs]) for ours, theirs in names.items()}

    def load_model(self, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> GPT:
        """The model in evaluation mode, fp32 by default.

        Raises:
            CheckpointError: as `load_weights`.
        """
        import torch

        from service.model.gpt import GPT

        model = GPT(GPTConfig(**self.hyperparameters))
        model.load_state_dict({name: torch.from_numpy(value) for name, value in self.load_weights().items()})
        return model.to(device, dtype or torch.float32).eval().requires_grad_(False)


def named_tensors(model: GPT) -> dict[str, torch.Tensor]:
    """The weights under Hugging Face's names, fp32, on the CPU."""
    config = model.config
    state = model.state_dict()
    tensors = {}
    for ours, theirs in weight_names(config.n_layer).items():
        value = state[ours].detach().float().cpu()
        sizes = [len(value) // len(theirs)] * len(theirs)
        if ours.endswith("qkv.weight"):
            sizes = [config.n_head * config.head_dim] + [config.n_kv_head * config.head_dim] * 2
        for name, part in zip(theirs, value.split(sizes), strict=True):
            tensors[name] = part.contiguous()
    return tensors


def save_checkpoint(
    path: str | Path,
    model: GPT,
    tokenizer: CharTokenizer,
    training: Mapping[str, Any],
    extra: Mapping[str, bytes] | None = None,
    dtype: Literal["float32", "float16"] = "float32",
) -> None:
    """Write a checkpoint folder, atomically replacing any previous one.

    `training` becomes training.json; `extra` adds files (name -> content), which the manifest covers too; `dtype` is
    that of the stored weights. A failure, a full disk or a kill leaves the previous folder intact.

    Raises:
        OSError: the disk is full or not writable.
    """
    import torch
    from safetensors.torch import save

    files = {
        "config.json": _dump(_hf_config(model) | {"dtype": dtype}),
        WEIGHTS: save(
            {name: t.to(getattr(torch, dtype)) for name, t in named_tensors(model).items()}, {"format": "pt"}
        ),
        "tokenizer.json": _dump(_hf_tokenizer(tokenizer)),
        "tokenizer_config.json": _dump(
            {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        ),
        "training.json": _dump(training),
        **(extra or {}),
    }
    listed = {name: {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)} for name, data in files.items()}
    files[MANIFEST] = _dump({"format_version": FORMAT_VERSION, "files": listed})
    try:
        with replacing_folder(Path(path)) as folder:
            for name, data in files.items():
                with open(folder / name, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)  # failed writes do not set it
        raise


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that atomically replaces `path` when the block succeeds.

    On Linux the two folders are exchanged. Where the system or file system lacks that call, the old folder is renamed
    first, and a kill between the two renames leaves only `<name>.previous`.
    Concurrent processes all succeed; the last one's folder remains.
    """
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name}.saving-"
    for leftover in path.parent.glob(f"{glob.escape(prefix)}*"):
        if not _is_other_process(leftover.name.removeprefix(prefix)):
            shutil.rmtree(leftover, ignore_errors=True)
    new = path.parent / f"{prefix}{os.getpid()}"
    new.mkdir()
    try:
        yield new
        _fsync_folder(new)
        try:
            new.rename(path)  # the first save
        except OSError:
            if not path.exists():
                raise
            if not _exchange(new, path):
                previous = path.with_name(f"{path.name}.previous")
                shutil.rmtree(previous, ignore_errors=True)
                path.rename(previous)
                new.rename(path)
                shutil.rmtree(previous, ignore_errors=True)
        _fsync_folder(path.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _is_other_process(pid: str) -> bool:
    """Whether another process with this PID is alive. (In a container, our own PID may be that of a killed save.)"""
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        pass  # it belongs to another user
    return int(pid) != os.getpid()


def _exchange(a: Path, b: Path) -> bool:
    """Atomically exchange two paths (renameat2, Linux); False where this is not supported."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    AT_FDCWD, RENAME_EXCHANGE = -100, 2
    if renameat2(AT_FDCWD, os.fsencode(a), AT_FDCWD, os.fsencode(b), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(b))


def _fsync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hf_config(model: GPT) -> dict[str, Any]:
    config = model.config
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **{theirs: getattr(config, ours) for ours, theirs in CONFIG_NAMES.items()},
        "head_dim": config.head_dim,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "use_sliding_window": True,
        "max_window_layers": 0,
        "layer_types": ["sliding_attention"] * config.n_layer,
        # Nominal: attention is banded and positions are relative, so texts are unbounded.
        "max_position_embeddings": 131072,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "chargpt": {"format_version": FORMAT_VERSION, "block_size": config.block_size},
    }


def _hf_tokenizer(tokenizer: CharTokenizer) -> dict[str, Any]:
    """One code point, one id, in the format of Hugging Face's tokenizers; there too unknown characters raise."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": r"[\s\S]"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {character: i for i, character in enumerate(tokenizer.characters)},
            "unk_token": "",  # not a character, so never in the vocabulary
        },
    }


def _dump(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from None


def _parse(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read(file))
    except ValueError as error:
        raise CheckpointError(f"{file}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return value


def _verified(path: Path, name: str, manifest: Mapping[str, Any]) -> bytes:
    """A file's content, checked against the manifest."""
    listed = manifest.get("files", {}).get(name)
    if listed is None:
        raise CheckpointError(f"{path / MANIFEST}: {name} is not listed")
    data = _read(path / name)
    if len(data) != listed["size"] or hashlib.sha256(data).hexdigest() != listed["sha256"]:
        raise CheckpointError(f"{path / name}: size or SHA-256 differs from {MANIFEST}; the file was altered")
    return data
