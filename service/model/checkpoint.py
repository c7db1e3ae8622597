"""A checkpoint: a plain Hugging Face model folder, which transformers loads unchanged.

    config.json            model_type qwen3, a sliding window of W in every layer, and a `chargpt` section; of a model
                           that a changed gpt.py trained, model_type chargpt, which no other program loads
    model.safetensors      weights under the names of Qwen3
    tokenizer.json         one id for each character; AutoTokenizer reads it with tokenizer_config.json
    training.json          recipe, seed, data hash, losses, versions, and a probe (see `Probe`)
    counts.bin             optional: counts of the training text, and their weights in the mixture, see counts.py
    manifest.json          SHA-256 and size of every other file

training/run/saving.py writes checkpoints. Loading trusts no file: it checks the name, type and size of a file before
reading it, the SHA-256 before parsing it, and then every value. It reads only JSON and safetensors, never pickle. Only
`load_model` imports torch, so all other methods work without torch.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import hashlib
import io
import itertools
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

import msgspec
import numpy as np

from service.model.config import GPTConfig
from service.model.counts import COUNTS, MAX_BYTES, Counts
from service.model.tokenizer import UNKNOWN, CharTokenizer

if TYPE_CHECKING:
    import torch

    from service.model.gpt import GPT

T = TypeVar("T")
Forward = Callable[[list[int]], np.ndarray]  # ids (T,) -> logits (T, V)

FORMAT_VERSION = 1
WEIGHTS = "model.safetensors"
MANIFEST = "manifest.json"
REQUIRED = ("config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json", "training.json")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # names without a folder, not hidden
_MAX_CONFIG_BYTES = 1 << 20  # for config.json and for the manifest
_MAX_JSON_BYTES = 16 << 20  # for the other JSON files except tokenizer.json
EXAMPLE_PROMPT = "ROMEO:\n"  # for checkpoints without an example; unknown characters of it are replaced
_MAX_EXAMPLE = 100  # characters
_PROBED = 16  # characters
# Relative to the largest absolute log-probability, or to 1 if that is larger. A different formula causes larger errors
# than this, and rounding causes smaller ones.
_PROBE_TOLERANCE = 1e-3
_MAX_DEPTH = 200  # levels of nested JSON; each fine-tuning adds a level to training.json, which GET /info encodes
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # dtype in safetensors -> dtype for NumPy

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


# The values in config.json of a model of a changed gpt.py, so that no other program loads it as Qwen3.
CHANGED = {"architectures": ["ChargptForCausalLM"], "model_type": "chargpt"}


class CheckpointError(ValueError):
    """A checkpoint is missing, altered or unsupported. The message names the file."""


def checkpoint_in(path: Path) -> Path:
    """Return the folder of the checkpoint. A training run keeps it in best/."""
    return path / "best" if not is_checkpoint(path) and is_checkpoint(path / "best") else path


def is_checkpoint(path: Path) -> bool:
    """True if there is a manifest. False also without permission; reading the folder then gives the reason."""
    return os.path.isfile(path / MANIFEST)


def layout(config: GPTConfig) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the parameters of GPT in order, each with its tensors in model.safetensors and their shapes.

    A parameter is the concatenation of its tensors by rows.
    """
    assert config.n_inner is not None
    C, F, V, hs = config.n_embd, config.n_inner, config.vocab_size, config.head_dim
    keys = (config.n_kv_head * hs, C)
    block: dict[str, dict[str, tuple[int, ...]]] = {
        "attn_norm": {"input_layernorm": (C,)},
        "attn.qkv": {"self_attn.q_proj": (C, C), "self_attn.k_proj": keys, "self_attn.v_proj": keys},
        "attn.q_norm": {"self_attn.q_norm": (hs,)},
        "attn.k_norm": {"self_attn.k_norm": (hs,)},
        "attn.proj": {"self_attn.o_proj": (C, C)},
        "mlp_norm": {"post_attention_layernorm": (C,)},
        "mlp.gate_up": {"mlp.gate_proj": (F, C), "mlp.up_proj": (F, C)},
        "mlp.proj": {"mlp.down_proj": (C, F)},
    }
    blocks = {
        f"blocks.{i}.{ours}.weight": {f"model.layers.{i}.{name}.weight": shape for name, shape in theirs.items()}
        for i in range(config.n_layer)
        for ours, theirs in block.items()
    }
    return {
        "embed.weight": {"model.embed_tokens.weight": (V, C)},
        **blocks,
        "norm.weight": {"model.norm.weight": (C,)},
        "head.weight": {"lm_head.weight": (V, C)},
    }


class FileEntry(msgspec.Struct, frozen=True):
    """The manifest's entry for a file."""

    sha256: str
    size: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # in bytes


class _Version(msgspec.Struct):
    format_version: int


class _Manifest(_Version):
    files: dict[str, FileEntry]


class _Config(msgspec.Struct):
    model_type: str
    chargpt: _Version


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int]
    unk_token: Any = None  # UNKNOWN: the vocabulary has an unknown symbol; any other value: it has none


class _Tokenizer(msgspec.Struct):
    model: _Vocabulary


class Probe(msgspec.Struct, frozen=True):
    """The log-probabilities that the saved model gave to the characters of a short text, except the first."""

    text: Annotated[str, msgspec.Meta(min_length=2, max_length=64)]
    log_probabilities: list[float]

    @classmethod
    def of(cls, forward: Forward, tokenizer: CharTokenizer) -> Self:
        ids = [i * i % tokenizer.vocab_size for i in range(_PROBED)]
        return cls(tokenizer.decode(ids), _log_probabilities(forward, ids).tolist())


def _log_probabilities(forward: Forward, ids: list[int]) -> np.ndarray:
    """Return the log-probability of each id except the first, given the ids before it: (T − 1,)."""
    with np.errstate(all="ignore"):
        logits = forward(ids)[:-1].astype(np.float64)
        shifted = logits - logits.max(axis=1, keepdims=True)
        found: np.ndarray = shifted[np.arange(len(ids) - 1), ids[1:]] - np.log(np.exp(shifted).sum(axis=1))
    return found


class _Training(msgspec.Struct):
    """The parts of training.json that programs use. Each part may be absent."""

    losses: dict[str, float | None] = {}
    recipe: dict[str, Any] = {}
    data: dict[str, Any] = {}
    example_prompt: str = ""
    probe: Probe | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint folder, without the weights."""

    path: Path
    config: GPTConfig
    tokenizer: CharTokenizer
    training: dict[str, Any]  # training.json
    digest: str  # SHA-256 of manifest.json, which covers all files
    files: Mapping[str, FileEntry] = field(default_factory=dict, repr=False)  # the entries of the manifest
    probe: Probe | None = field(default=None, repr=False)  # from training.json; older versions wrote none

    @classmethod
    def read(cls, path: str | Path, digest: str | None = None) -> Checkpoint:
        """Verify every file in the manifest, and parse the JSON files.

        digest: the expected digest; None accepts any.

        Raises:
            CheckpointError: a file is missing, altered, not a regular file or malformed, the format is unsupported, or
                the checkpoint has another digest than expected.
        """
        path = Path(path)
        if not os.path.isfile(path / MANIFEST) and os.path.isdir(previous_of(path.absolute())):
            raise CheckpointError(
                f"no checkpoint at {path}: a save was interrupted; rename {previous_of(path)} to {path} to restore the "
                "checkpoint before it"
            )
        if not os.path.isdir(path):
            raise CheckpointError(f"no checkpoint at {path}: not a folder")
        files, found = _read_manifest(path, digest)
        # config.json comes first, because it limits the sizes of the other files.
        config = _parse_config(path / "config.json", _read(path, "config.json", files, _MAX_CONFIG_BYTES))
        weights, size = config.num_parameters, files[WEIGHTS].size
        if size < 2 * weights:
            raise CheckpointError(f"{path / WEIGHTS}: config.json describes {weights:,} weights, got {size:,} bytes")
        limits = _size_limits(files, config)
        tokenizer = _parse_tokenizer(path, _read(path, "tokenizer.json", files, limits["tokenizer.json"]), config)
        data = _read(path, "training.json", files, limits["training.json"])
        training, probe = _parse_training(path / "training.json", data, tokenizer)
        for name in files.keys() - {"config.json", "tokenizer.json", "training.json"}:
            _read(path, name, files, limits[name], is_kept=False)
        return cls(path, config, tokenizer, training, found, files, probe)

    def read_file(self, name: str) -> bytes:
        """Return the content of a file in the manifest.

        Raises:
            CheckpointError: the file is not in the manifest, cannot be read, or was altered since.
        """
        return _read(self.path, name, self.files)

    @property
    def record_end_character(self) -> str | None:
        """The result of `end_of_records` for this checkpoint."""
        return end_of_records(self.training, self.tokenizer)

    @functools.cached_property
    def record_end(self) -> int | None:
        """The id of `record_end_character`, the bos and eos token; None if the model does not write records."""
        end = self.record_end_character
        return None if end is None else self.tokenizer.encode(end)[0]

    @functools.cached_property
    def example_prompt(self) -> str:
        """A prompt in this vocabulary for examples. It is empty for records, which need no prompt."""
        given = self.training.get("example_prompt", "")
        if given and len(given) <= _MAX_EXAMPLE and all(c in self.tokenizer for c in given):
            return str(given)
        return "" if self.record_end is not None else self.tokenizer.adapted(EXAMPLE_PROMPT)

    def is_computed_by(self, forward: Forward) -> bool:
        """Return True if `forward`, with these weights, gives the probe's log-probabilities within the tolerance.

        The result is False if `forward` computes another function than gpt.py when the checkpoint was saved, or lacks
        a weight. It is True if there is no probe.
        """
        if self.probe is None:
            return True
        recorded = np.array(self.probe.log_probabilities)
        try:
            found = _log_probabilities(forward, self.tokenizer.encode(self.probe.text))
        except KeyError:  # the model has other weights
            return False
        return bool(np.abs(found - recorded).max() <= _PROBE_TOLERANCE * max(1.0, np.abs(recorded).max()))

    def load_weights(self) -> dict[str, np.ndarray]:
        """Return the weights by the names of GPT's parameters, in the precision of the file, without torch.

        Raises:
            CheckpointError: the file was altered, a weight is not finite in float32, or a tensor is missing, is unknown
                or has the wrong dtype or shape.
        """
        from safetensors import SafetensorError, deserialize

        file, data, limit = self.path / WEIGHTS, self.read_file(WEIGHTS), _max_header_bytes(self.config)
        if int.from_bytes(data[:8], "little") > limit:
            raise CheckpointError(f"{file}: the header must have at most {limit:,} bytes")
        try:
            found = dict(deserialize(data))
        except SafetensorError as error:  # its message repeats text of the header unchanged
            raise CheckpointError(f"{file}: {_printable(str(error))}") from None
        del data
        parameters = layout(self.config)
        shapes = {name: shape for parts in parameters.values() for name, shape in parts.items()}
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
            if dtype == "BF16":  # the upper 16 bits of a float32
                values = (values.astype("<u4") << 16).view("<f4")
            with np.errstate(over="ignore"):
                if not np.isfinite(values.astype(np.float32, copy=False)).all():
                    raise CheckpointError(f"{file}: {name} has values that are NaN, infinite or beyond float32")
            tensors[name] = values.reshape(shape)
        return {ours: np.concatenate([tensors[name] for name in theirs]) for ours, theirs in parameters.items()}

    @property
    def validation_loss(self) -> float | None:
        """The loss of the served model, in nats per character: of the mixture, or of the network in windows."""
        losses: dict[str, float | None] = self.training.get("losses", {})
        is_mixed = self.training.get("recipe", {}).get("mixed") and "mixed" in losses  # not before the end of a run
        return losses.get("mixed" if is_mixed else "whole")

    def load_counts(self) -> Counts | None:
        """Return the counts of the training text, or None if the checkpoint has none.

        Raises:
            CheckpointError: the file is altered or malformed.
        """
        if COUNTS not in self.files:
            return None
        data = self.read_file(COUNTS)
        try:
            return Counts.load(data, self.config.vocab_size)
        except ValueError as error:
            raise CheckpointError(f"{self.path / COUNTS}: {error}") from None

    def load_model(self, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> GPT:
        """Return the model in evaluation mode, by default in fp32.

        Raises:
            CheckpointError: as in `load_weights`; or gpt.py is not the one that was trained.
        """
        import torch

        from service.model.gpt import GPT

        model = GPT(self.config).double().eval().requires_grad_(False)  # float64: as the probe
        try:
            model.load_state_dict({name: torch.from_numpy(value) for name, value in self.load_weights().items()})
            is_same = self.is_computed_by(lambda ids: model(torch.tensor([ids]))[0].numpy())
        except RuntimeError:  # gpt.py has other weights
            is_same = False
        if not is_same:
            raise CheckpointError(
                f"{self.path} was trained with another service/model/gpt.py, which computes another model: use that "
                "gpt.py, or train again with this one"
            )
        return model.to(device, dtype or torch.float32)


def end_of_records(training: Mapping[str, Any], tokenizer: CharTokenizer) -> str | None:
    """Return the character that ends each record of a model and precedes the next; None if the model has no records.

    training: the content of training.json.

    The character is the line break, or U+001E if records may have several lines.
    """
    if not training.get("recipe", {}).get("records"):
        return None
    end = training.get("data", {}).get("record_end") or "\n"  # older versions had only the line break
    return end if isinstance(end, str) and end in tokenizer else None


def previous_of(path: Path) -> Path:
    """Return the path at which a save keeps the old folder until the new folder is in place.

    Only systems that cannot exchange two folders need it.
    """
    return path.with_name(f".{path.name}.previous")


def hf_config(config: GPTConfig) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **{theirs: getattr(config, ours) for ours, theirs in CONFIG_NAMES.items()},
        "head_dim": config.head_dim,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "use_sliding_window": True,
        "max_window_layers": 0,
        "layer_types": ["sliding_attention"] * config.n_layer,
        # The value is nominal: attention is banded and positions are relative, so texts may have any length.
        "max_position_embeddings": 131072,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "chargpt": {"format_version": FORMAT_VERSION, "block_size": config.block_size},
    }


@contextlib.contextmanager
def _open(file: Path) -> Iterator[tuple[io.BufferedReader, int]]:
    """Open a regular file, or a link to one; yield its stream and its size.

    Opening never waits, for example for the writer of a FIFO.

    Raises:
        CheckpointError: the file cannot be read or is not a regular file.
    """
    try:
        with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)) as stream:
            about = os.fstat(stream.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise CheckpointError(f"{file}: not a regular file")
            yield stream, about.st_size
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from None


def _read(
    path: Path, name: str, files: Mapping[str, FileEntry], max_bytes: int | None = None, *, is_kept: bool = True
) -> bytes:
    """Verify a file, and return its content.

    max_bytes: the limit of its size; None: no limit.
    is_kept: False: return nothing, so that large files need no memory.

    Raises:
        CheckpointError: the file is not in the manifest, is too large, cannot be read, or was altered.
    """
    file, listed, data, sha256 = path / name, files.get(name), b"", hashlib.sha256()
    if listed is None:
        raise CheckpointError(f"{path / MANIFEST}: {name} is not listed")
    if max_bytes is not None and listed.size > max_bytes:
        raise CheckpointError(f"{file}: must have at most {max_bytes:,} bytes, got {listed.size:,}")
    with _open(file) as (stream, size):
        if size == listed.size and is_kept:
            data = stream.read(size)
            sha256.update(data)
        elif size == listed.size:
            sha256 = hashlib.file_digest(stream, "sha256")
    if size != listed.size or sha256.hexdigest() != listed.sha256:
        raise CheckpointError(f"{file}: size or SHA-256 differs from {MANIFEST}; the file was altered")
    return data


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
    if about.model_type not in ("qwen3", CHANGED["model_type"]):
        raise CheckpointError(f"{file}: model_type is {_short(about.model_type)}, not 'qwen3'")
    try:
        config = GPTConfig(**{ours: values[theirs] for ours, theirs in CONFIG_NAMES.items()})
    except KeyError as error:
        raise CheckpointError(f"{file}: lacks the key {error}") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from None
    for key, value in hf_config(config).items():
        if key not in (*CHANGED, "max_position_embeddings") and values.get(key, value) != value:
            raise CheckpointError(f"{file}: {key} must be {_short(value)}, got {_short(values[key])}")
    return config


def _parse_tokenizer(path: Path, data: bytes, config: GPTConfig) -> CharTokenizer:
    file = path / "tokenizer.json"
    model = _decode(file, data, _Tokenizer).model
    vocab = model.vocab
    if len(vocab) != config.vocab_size:
        raise CheckpointError(
            f"{path}: vocab_size in config.json is {config.vocab_size}, but the tokenizer has {len(vocab)} characters"
        )
    if missing := set(range(len(vocab))) - set(vocab.values()):
        raise CheckpointError(f"{file}: ids must be 0 to {len(vocab) - 1}, but no character has id {min(missing)}")
    try:
        return CharTokenizer(sorted(vocab, key=vocab.__getitem__), has_unknown=model.unk_token == UNKNOWN)
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from None


def _read_manifest(path: Path, digest: str | None) -> tuple[Mapping[str, FileEntry], str]:
    """Return the entries of a folder's manifest, and its SHA-256.

    Raises:
        CheckpointError: it is missing or malformed, the format is unsupported, or the digest is not the expected one.
    """
    file = path / MANIFEST
    with _open(file) as (stream, size):
        if size > _MAX_CONFIG_BYTES:
            raise CheckpointError(f"{file}: must have at most {_MAX_CONFIG_BYTES:,} bytes, got {size:,}")
        content = stream.read(size)
    found = hashlib.sha256(content).hexdigest()
    if digest not in (None, found):
        raise CheckpointError(
            f"{path}: the checkpoint was replaced: its manifest has SHA-256 {found}, expected {digest}"
        )
    manifest = _decode(file, content, _Manifest)
    if manifest.format_version != FORMAT_VERSION:
        raise CheckpointError(
            f"{file}: format_version is {_short(manifest.format_version)}, this program reads {FORMAT_VERSION}"
        )
    for name in REQUIRED:
        if name not in manifest.files:
            raise CheckpointError(f"{file}: {name} is not listed")
    for name in manifest.files:
        if not _PLAIN_NAME.fullmatch(name) or name == MANIFEST:
            raise CheckpointError(
                f"{file}: lists {_short(name)}, but a name must be of another file in this folder, consist of "
                "letters, digits, '_', '-' and '.', and begin with a letter, digit or '_'"
            )
    return manifest.files, found


def _size_limits(files: Iterable[str], config: GPTConfig) -> dict[str, int]:
    """Return the maximum bytes of each file but the manifest."""
    weights = config.num_parameters
    return dict.fromkeys(files, _MAX_JSON_BYTES + 64 * weights) | {
        WEIGHTS: _max_header_bytes(config) + 8 * weights,
        "tokenizer.json": (1 << 20) + 64 * config.vocab_size,  # an entry has at most 32 bytes
        "tokenizer_config.json": _MAX_JSON_BYTES,
        "training.json": _MAX_JSON_BYTES,
        COUNTS: MAX_BYTES,
    }


def _parse_training(file: Path, data: bytes, tokenizer: CharTokenizer) -> tuple[dict[str, Any], Probe | None]:
    """Return training.json and the probe in it. Raises CheckpointError: malformed."""
    probe = _decode(file, data, _Training).probe
    if probe and not (
        set(probe.text) <= {*tokenizer.characters} and len(probe.log_probabilities) == len(probe.text) - 1
    ):
        raise CheckpointError(
            f"{file}: probe must have a text in the vocabulary, and a number for each character but the first"
        )
    return _decode_object(file, data), probe


def _max_header_bytes(config: GPTConfig) -> int:
    """Return the limit of the header of model.safetensors, with room for names, types and metadata."""
    return (1 << 20) + 1024 * (3 + 11 * config.n_layer)


def _printable(text: str) -> str:
    """Return at most 300 characters of a text, with escapes for those that could control a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:300])[:300]


def _short(value: object) -> str:
    return f"{value!r:.100}"
