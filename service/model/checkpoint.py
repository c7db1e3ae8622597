"""A checkpoint: a plain Hugging Face model folder that transformers loads as it is.

    config.json            model_type qwen3, a sliding window of W in every layer, and a `chargpt` section
    model.safetensors      weights under Qwen3's names
    tokenizer.json         one character, one id; with tokenizer_config.json, what AutoTokenizer reads
    training.json          recipe, seed, data hash, losses, versions
    manifest.json          SHA-256 and size of each other file

Saving is atomic, loading verifies. Only JSON and safetensors are read, never pickle. Torch is imported where
tensors are touched, so that a process that only describes a checkpoint does not load it.
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

from service.model.config import GPTConfig
from service.model.tokenizer import CharTokenizer

if TYPE_CHECKING:
    import torch

    from service.model.gpt import GPT

FORMAT_VERSION = 1
WEIGHTS = "model.safetensors"
MANIFEST = "manifest.json"

# GPTConfig field -> Hugging Face's name in config.json
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

# Parameter -> Hugging Face's names; several: ours holds their rows one after the other.
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
    """A folder is not a checkpoint that can be trusted; says which file and why."""


def weight_names(n_layer: int) -> dict[str, list[str]]:
    """Every parameter of a model of `n_layer` blocks -> its names in `model.safetensors`."""
    names = dict(OUTER_NAMES)
    for i in range(n_layer):
        for ours, theirs in BLOCK_NAMES.items():
            names[f"blocks.{i}.{ours}"] = [f"model.layers.{i}.{name}" for name in theirs]
    return names


@dataclass(frozen=True)
class Checkpoint:
    """A verified folder, without its weights."""

    path: Path
    hyperparameters: dict[str, Any]  # the fields of GPTConfig
    tokenizer: CharTokenizer
    training: dict[str, Any]  # training.json
    digest: str  # SHA-256 of manifest.json, and so of all the files

    @classmethod
    def read(cls, path: str | Path) -> Checkpoint:
        """Verify every file of the manifest and read all but the weights.

        Raises:
            CheckpointError: something is missing, altered, or of an unknown version.
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
            raise CheckpointError(f"{path}: key {error} is missing in config.json or tokenizer.json") from None
        tokenizer = CharTokenizer(sorted(vocab, key=vocab.__getitem__))
        if tokenizer.vocab_size != hyperparameters["vocab_size"]:
            raise CheckpointError(
                f"{path}: the tokenizer has {tokenizer.vocab_size} characters, config.json says "
                f"vocab_size {hyperparameters['vocab_size']}"
            )
        return cls(path, hyperparameters, tokenizer, _parse(path / "training.json"), digest)

    @property
    def receptive_field(self) -> int:
        """As GPTConfig's, without torch."""
        return int(self.hyperparameters["n_layer"] * (self.hyperparameters["block_size"] - 1) + 1)

    def load_model(self, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> GPT:
        """The network, in evaluation mode; fp32 unless `dtype` says otherwise.

        Raises:
            CheckpointError: the weights are altered, or a tensor is missing, superfluous or of another shape.
        """
        import torch
        from safetensors.torch import load

        from service.model.gpt import GPT

        tensors = load(_verified(self.path, WEIGHTS, _parse(self.path / MANIFEST)))
        names = weight_names(self.hyperparameters["n_layer"])
        expected = {name for parts in names.values() for name in parts}
        if expected != set(tensors):
            wrong = sorted(expected ^ set(tensors))
            raise CheckpointError(f"{self.path / WEIGHTS}: missing or unknown tensors: {', '.join(wrong[:5])}")
        model = GPT(GPTConfig(**self.hyperparameters))
        state = {ours: torch.cat([tensors[name] for name in theirs]) for ours, theirs in names.items()}
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            raise CheckpointError(f"{self.path / WEIGHTS}: {error}") from None
        return model.to(device, dtype or torch.float32).eval().requires_grad_(False)


def named_tensors(model: GPT) -> dict[str, torch.Tensor]:
    """The model's weights under Hugging Face's names, in fp32 on the CPU."""
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
    """Write a checkpoint folder at `path`, replacing the one there in one step.

    `training` becomes training.json; `extra` adds files (name -> content) that the manifest covers too; `dtype` is
    that of the weights in the file.
    A failure, a full disk or a kill at any moment leaves the previous folder as it was.

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
        error.filename = error.filename or str(path)  # a write that fails does not say where
        raise


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A new folder beside `path` that takes its place in one step when the block ends without an error.

    On Linux the two are exchanged atomically. Where the system or file system cannot do that, the old folder
    is renamed first, and a kill between the two renames leaves only `<name>.previous`.
    Of several processes that do this at once, each succeeds, and the last one's folder stays.
    """
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name}.saving-"
    for stray in path.parent.glob(f"{glob.escape(prefix)}*"):
        if not _is_of_another_process(stray.name.removeprefix(prefix)):
            shutil.rmtree(stray, ignore_errors=True)
    new = path.parent / f"{prefix}{os.getpid()}"
    new.mkdir()
    try:
        yield new
        _fsync_folder(new)
        try:
            new.rename(path)  # there is none yet
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


def _is_of_another_process(pid: str) -> bool:
    """Whether a process of this number runs and is not this one (a container's number is the same each time)."""
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        pass  # another user's
    return int(pid) != os.getpid()


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names atomically (renameat2, Linux); False where that does not exist."""
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
        # Texts have no bound of their own: attention is banded and positions are relative.
        "max_position_embeddings": 131072,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "chargpt": {"format_version": FORMAT_VERSION, "block_size": config.block_size},
    }


def _hf_tokenizer(tokenizer: CharTokenizer) -> dict[str, Any]:
    """One code point, one id, with the parts of Hugging Face's tokenizers; an unknown character raises there too."""
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
            "unk_token": "",  # a name no character has
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
        raise CheckpointError(f"{file}: must hold a JSON object")
    return value


def _verified(path: Path, name: str, manifest: Mapping[str, Any]) -> bytes:
    """The content of a file that the manifest lists."""
    listed = manifest.get("files", {}).get(name)
    if listed is None:
        raise CheckpointError(f"{path / MANIFEST}: {name} is not listed")
    data = _read(path / name)
    if len(data) != listed["size"] or hashlib.sha256(data).hexdigest() != listed["sha256"]:
        raise CheckpointError(f"{path / name}: size or SHA-256 differs from {MANIFEST}; the file was altered")
    return data
