"""A checkpoint: a plain Hugging Face model folder, which transformers loads unchanged.

    config.json            model_type qwen3, a sliding window of W in every layer, and a `chargpt` section
    model.safetensors      weights under Qwen3's names
    tokenizer.json         one character, one id; AutoTokenizer reads it with tokenizer_config.json
    training.json          recipe, seed, data hash, losses, versions
    manifest.json          SHA-256 and size of every other file

Saving is atomic. Loading trusts nothing: names, types and sizes are checked before a file is read, its SHA-256 before
it is parsed, and every value after that. Only JSON and safetensors are read, never pickle. Only functions that handle
tensors import torch, so that reading a checkpoint's description does not load it.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import errno
import functools
import glob
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal, TypeVar

import msgspec
import numpy as np

from service.model.config import GPTConfig
from service.model.tokenizer import CharTokenizer

if TYPE_CHECKING:
    import torch

    from service.model.gpt import GPT

T = TypeVar("T")

FORMAT_VERSION = 1
WEIGHTS = "model.safetensors"
MANIFEST = "manifest.json"
REQUIRED = ("config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json", "training.json")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # of further files: no folder, not hidden
_MAX_CONFIG_BYTES = 1 << 20  # of config.json and of the manifest
_MAX_JSON_BYTES = 16 << 20  # of the other JSON files except tokenizer.json
EXAMPLE_PROMPT = "ROMEO:\n"  # of a checkpoint that has none, as far as its vocabulary goes
_MAX_EXAMPLE = 100  # characters
_MAX_DEPTH = 200  # of JSON; each fine-tuning adds one to training.json, and GET /info encodes it on a deeper stack
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


class FileEntry(msgspec.Struct, frozen=True):
    """What the manifest lists of a file."""

    sha256: str
    size: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # in bytes


class _Manifest(msgspec.Struct):
    format_version: int
    files: dict[str, FileEntry]


class _Version(msgspec.Struct):
    format_version: int


class _Config(msgspec.Struct):
    model_type: str
    chargpt: _Version


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int]


class _Tokenizer(msgspec.Struct):
    model: _Vocabulary


class _Training(msgspec.Struct):
    """The parts of training.json that programs use; all may be absent."""

    losses: dict[str, float | None] = {}
    recipe: dict[str, Any] = {}
    data: dict[str, Any] = {}
    example_prompt: str = ""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint folder, without the weights."""

    path: Path
    hyperparameters: dict[str, Any]  # the fields of GPTConfig
    tokenizer: CharTokenizer
    training: dict[str, Any]  # training.json
    digest: str  # SHA-256 of manifest.json, which covers all files
    files: Mapping[str, FileEntry] = field(default_factory=dict, repr=False)  # the manifest's

    @classmethod
    def read(cls, path: str | Path, digest: str | None = None) -> Checkpoint:
        """Verify every file in the manifest, and parse all but the weights.

        `digest`, if given, is the only one accepted.

        Raises:
            CheckpointError: a file is missing, altered, not a regular file or malformed, the format is unsupported, or
                the folder was replaced by one with another digest.
        """
        path = Path(path)
        if not os.path.isfile(path / MANIFEST) and os.path.isdir(previous_of(path.absolute())):
            raise CheckpointError(
                f"no checkpoint at {path}: a save was interrupted; the one before is {previous_of(path)}, rename it"
            )
        if not os.path.isdir(path):
            raise CheckpointError(f"no checkpoint at {path}: not a folder")
        file = path / MANIFEST
        with _open(file) as (stream, size):
            if size > _MAX_CONFIG_BYTES:
                raise CheckpointError(f"{file}: must have at most {_MAX_CONFIG_BYTES:,} bytes, got {size:,}")
            content = stream.read(size)
        found = hashlib.sha256(content).hexdigest()
        if digest not in (None, found):
            raise CheckpointError(
                f"{path}: the checkpoint was replaced: its manifest has SHA-256 {found}, this server serves {digest}; "
                "restart it to serve the new one"
            )
        manifest = _decode(file, content, _Manifest)
        if manifest.format_version != FORMAT_VERSION:
            raise CheckpointError(
                f"{file}: format_version is {_short(manifest.format_version)}, this program reads {FORMAT_VERSION}"
            )
        files = manifest.files
        for name in REQUIRED:
            if name not in files:
                raise CheckpointError(f"{file}: {name} is not listed")
        for name in files:
            if not _PLAIN_NAME.fullmatch(name) or name == MANIFEST:
                raise CheckpointError(
                    f"{file}: lists {_short(name)}, but names must be of other files in this folder, made of letters, "
                    "digits, '_', '-' and '.', beginning with a letter, digit or '_'"
                )
        # config.json first: it limits the sizes of the others.
        config = _parse_config(path / "config.json", _read(path, "config.json", files, _MAX_CONFIG_BYTES))
        weights, size = config.num_parameters, files[WEIGHTS].size
        limits = dict.fromkeys(files, _MAX_JSON_BYTES + 64 * weights) | {
            WEIGHTS: _max_header_bytes(config) + 8 * weights,
            "tokenizer.json": (1 << 20) + 64 * config.vocab_size,  # an entry has at most 32 bytes
            "tokenizer_config.json": _MAX_JSON_BYTES,
            "training.json": _MAX_JSON_BYTES,
        }
        if size < 2 * weights:
            raise CheckpointError(f"{path / WEIGHTS}: config.json describes {weights:,} weights, got {size:,} bytes")
        tokenizer = _parse_tokenizer(path, _read(path, "tokenizer.json", files, limits["tokenizer.json"]), config)
        file, data = path / "training.json", _read(path, "training.json", files, limits["training.json"])
        _decode(file, data, _Training)
        training = _decode_object(file, data)
        for name in files.keys() - {"config.json", "tokenizer.json", "training.json"}:
            for _ in _blocks(path, name, files, limits[name]):
                pass  # only verified
        return cls(path, {name: getattr(config, name) for name in CONFIG_NAMES}, tokenizer, training, found, files)

    def read_file(self, name: str) -> bytes:
        """The content of a file in the manifest, as it was when the checkpoint was read.

        Raises:
            CheckpointError: the file is not in the manifest, or it was altered.
        """
        return _read(self.path, name, self.files)

    @functools.cached_property
    def record_end(self) -> int | None:
        """Of a model of records: the id of the line break that precedes each and ends it, its bos and eos token.

        None: the model is of other texts.
        """
        if self.training.get("recipe", {}).get("records") and "\n" in self.tokenizer:
            return self.tokenizer.encode("\n")[0]
        return None

    @functools.cached_property
    def example_prompt(self) -> str:
        """A text to begin with, in this vocabulary; empty for records, which begin by themselves."""
        given = self.training.get("example_prompt", "")
        if given and len(given) <= _MAX_EXAMPLE and all(c in self.tokenizer for c in given):
            return str(given)
        return "" if self.record_end is not None else self.tokenizer.adapted(EXAMPLE_PROMPT)

    @functools.cached_property
    def receptive_field(self) -> int:
        """See GPTConfig."""
        return GPTConfig(**self.hyperparameters).receptive_field

    def load_weights(self) -> dict[str, np.ndarray]:
        """The weights under the names of GPT's parameters, in the precision of the file; without torch.

        Raises:
            CheckpointError: the weights are altered, not finite in float32, or tensors are missing, unknown or of the
                wrong dtype or shape.
        """
        from safetensors import SafetensorError, deserialize

        file, config = self.path / WEIGHTS, GPTConfig(**self.hyperparameters)
        data = self.read_file(WEIGHTS)
        if int.from_bytes(data[:8], "little") > _max_header_bytes(config):
            raise CheckpointError(f"{file}: the header must have at most {_max_header_bytes(config):,} bytes")
        try:
            found = dict(deserialize(data))
        except SafetensorError as error:
            raise CheckpointError(f"{file}: {error}") from None
        del data
        shapes = weight_shapes(config)
        if wrong := sorted(shapes.keys() ^ found.keys()):
            raise CheckpointError(f"{file}: missing or unknown tensors: {', '.join(map(_short, wrong[:5]))}")
        tensors = {}
        for name, shape in shapes.items():
            dtype = found[name]["dtype"]
            if dtype not in _DTYPES:
                raise CheckpointError(f"{file}: {name} must be one of {', '.join(_DTYPES)}, got {dtype}")
            if tuple(found[name]["shape"]) != shape:
                raise CheckpointError(
                    f"{file}: {name} must have shape {shape} by config.json, got {_short(tuple(found[name]['shape']))}"
                )
            values = np.frombuffer(found[name]["data"], _DTYPES[dtype])
            if dtype == "BF16":  # the upper half of a float32
                values = (values.astype("<u4") << 16).view("<f4")
            if not _are_finite(values):
                raise CheckpointError(f"{file}: {name} has values that are NaN, infinite or beyond float32")
            tensors[name] = values.reshape(shape)
        names = weight_names(config.n_layer)
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

    special: dict[str, int] = {}
    if training.get("recipe", {}).get("records") and "\n" in tokenizer:
        # Not in tokenizer_config.json: transformers leaves special tokens out of decoded texts.
        special = dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.encode("\n")[0])
        extra = {"generation_config.json": _dump(special), **(extra or {})}
    files = {
        "config.json": _dump(_hf_config(model.config) | {"dtype": dtype} | special),
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

    On Linux and macOS the two folders are exchanged. Where the system or file system lacks that call, the old folder is
    moved to `.<name>.previous` first; after a kill before all is done, `restore_folder` moves it back.
    Concurrent processes all succeed; the last one's folder remains.

    Raises:
        OSError: the folder cannot be written.
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
                _move(path, previous_of(path))
                new.rename(path)
        if previous_of(path).is_dir() and not new.exists():
            previous_of(path).rename(new)  # done; removed below
        try:
            _fsync_folder(path.parent)
        except OSError as error:
            reason = f"it is saved, but a power failure could lose it: {error.strerror}"
            raise OSError(error.errno, reason, str(path)) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def previous_of(path: Path) -> Path:
    """Where `replacing_folder` keeps the old folder, whole, on systems that cannot exchange two, until it is done."""
    return path.with_name(f".{path.name}.previous")


def restore_folder(path: Path) -> None:
    """Undo a `replacing_folder` that was killed before it was done: put the old folder back."""
    if previous_of(path).is_dir():
        shutil.rmtree(path, ignore_errors=True)
        previous_of(path).rename(path)


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
    """Atomically exchange two paths (renameat2 of Linux, renamex_np of macOS); False where this is not supported."""
    library, exchange = ctypes.CDLL(None, use_errno=True), 2  # RENAME_EXCHANGE, RENAME_SWAP
    if hasattr(library, "renameat2"):
        at_cwd = -100
        failed = library.renameat2(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange)
    elif hasattr(library, "renamex_np"):
        failed = library.renamex_np(os.fsencode(a), os.fsencode(b), exchange)
    else:
        return False
    code = ctypes.get_errno()
    # EXDEV: a folder of a lower layer of overlayfs, such as one of an image.
    if failed and code not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EXDEV):
        raise OSError(code, os.strerror(code), str(b))
    return not failed


def _move(folder: Path, to: Path) -> None:
    """Rename a folder; copy one that overlayfs cannot rename, since it lies in a lower layer. `to` is always whole."""
    shutil.rmtree(to, ignore_errors=True)
    try:
        folder.rename(to)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        part = to.with_name(f"{to.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(folder, part)
        part.rename(to)
        shutil.rmtree(folder)


def _fsync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hf_config(config: GPTConfig) -> dict[str, Any]:
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


@contextlib.contextmanager
def _open(file: Path) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file, or a link to one, and its size. Never waits, as for the writer of a FIFO."""
    try:
        with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)) as stream:
            about = os.fstat(stream.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise CheckpointError(f"{file}: not a regular file")
            yield stream, about.st_size
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from None


def _blocks(
    path: Path, name: str, files: Mapping[str, FileEntry], max_bytes: int | None = None, block_bytes: int = 1 << 18
) -> Iterator[bytes]:
    """The content of a file, which is verified when the iterator ends."""
    file, listed, sha256 = path / name, files.get(name), hashlib.sha256()
    if listed is None:
        raise CheckpointError(f"{path / MANIFEST}: {name} is not listed")
    if max_bytes is not None and listed.size > max_bytes:
        raise CheckpointError(f"{file}: must have at most {max_bytes:,} bytes, got {listed.size:,}")
    with _open(file) as (stream, size):
        left = size if size == listed.size else 0
        while block := stream.read(min(left, block_bytes)):
            sha256.update(block)
            left -= len(block)
            yield block
    if size != listed.size or sha256.hexdigest() != listed.sha256:
        raise CheckpointError(f"{file}: size or SHA-256 differs from {MANIFEST}; the file was altered")


def _read(path: Path, name: str, files: Mapping[str, FileEntry], max_bytes: int | None = None) -> bytes:
    size = files[name].size if name in files else 0
    return b"".join(_blocks(path, name, files, max_bytes, size))


def _decode(file: Path, data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data.removeprefix(codecs.BOM_UTF8), type=kind)
    except RecursionError:
        raise CheckpointError(f"{file}: nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: {error}") from None


def _decode_object(file: Path, data: bytes) -> dict[str, Any]:
    value = _decode(file, data, dict[str, Any])
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        inner = (x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list))
        level = list(itertools.chain.from_iterable(inner))
    if level:
        raise CheckpointError(f"{file}: nested too deeply")
    return value


def _parse_config(file: Path, data: bytes) -> GPTConfig:
    about, values = _decode(file, data, _Config), _decode_object(file, data)
    if about.chargpt.format_version != FORMAT_VERSION:
        raise CheckpointError(
            f"{file}: chargpt.format_version is {_short(about.chargpt.format_version)}, this program reads "
            f"{FORMAT_VERSION}"
        )
    if about.model_type != "qwen3":
        raise CheckpointError(f"{file}: model_type is {_short(about.model_type)}, not 'qwen3'")
    try:
        config = GPTConfig(**{ours: values[theirs] for ours, theirs in CONFIG_NAMES.items()})
    except KeyError as error:
        raise CheckpointError(f"{file}: lacks the key {error}") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from None
    for key, value in _hf_config(config).items():
        if key not in ("architectures", "max_position_embeddings") and values.get(key, value) != value:
            raise CheckpointError(f"{file}: {key} must be {_short(value)}, got {_short(values[key])}")
    return config


def _parse_tokenizer(path: Path, data: bytes, config: GPTConfig) -> CharTokenizer:
    file = path / "tokenizer.json"
    vocab = _decode(file, data, _Tokenizer).model.vocab
    if len(vocab) != config.vocab_size:
        raise CheckpointError(
            f"{path}: vocab_size in config.json is {config.vocab_size}, but the tokenizer has {len(vocab)} characters"
        )
    if missing := set(range(len(vocab))) - set(vocab.values()):
        raise CheckpointError(f"{file}: ids must be 0 to {len(vocab) - 1}, but no character has id {min(missing)}")
    try:
        return CharTokenizer(sorted(vocab, key=vocab.__getitem__))
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from None


def _max_header_bytes(config: GPTConfig) -> int:
    """Of model.safetensors: generous for names, types and metadata."""
    return (1 << 20) + 1024 * len(OUTER_NAMES) + 1024 * config.n_layer * sum(map(len, BLOCK_NAMES.values()))


def _are_finite(values: np.ndarray) -> bool:
    """Whether all are finite in float32, in which engines compute."""
    for start in range(0, len(values), 1 << 16):
        chunk = values[start : start + (1 << 16)]
        if chunk.dtype == np.float16:  # np.isfinite is 10 times as slow
            finite = (chunk.view("<u2") & 0x7FFF).max() < 0x7C00
        else:
            finite = (np.abs(chunk) <= np.finfo(np.float32).max).all()
        if not finite:
            return False
    return True


def _short(value: object) -> str:
    return f"{value!r:.100}"
