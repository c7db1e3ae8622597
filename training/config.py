"""The settings of a training run, one frozen dataclass whose fields are the flags of `train`, and the presets.

Imports no torch, so that `--help` answers at once.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from service.model.config import BOUNDS, GPTConfig


class ConfigError(ValueError):
    """An invalid setting; the message gives its name, its value and the allowed values."""


def option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


MIN_WINDOW = 16  # characters; shorter ones would teach little
DATA_HELP = "UTF-8 text files, plain or gzip, or folders of them, or the name tinyshakespeare"
GLOB_HELP = "of a folder, take only the files whose names match one of these: '*.py' 'docs/*.md'"

Device = Literal["auto", "cpu", "cuda", "mps"]
Dtype = Literal["auto", "float32", "bfloat16"]
Weights = Literal["float32", "float16"]


# The settings that a run takes over from the checkpoint it starts from: those of GPTConfig except vocab_size and
# dropout.
SHAPE = ("block_size", "n_layer", "n_head", "n_kv_head", "n_embd", "n_inner", "rope_theta", "norm_eps")


@dataclass(frozen=True)
class TrainConfig:
    """Settings of one run. On a CPU, equal settings, dtype and threads give equal bytes.

    Raises:
        ConfigError: a value is out of bounds.
    """

    data: tuple[str, ...] = option(("tinyshakespeare",), DATA_HELP)
    glob: tuple[str, ...] = option((), GLOB_HELP)
    records: bool = option(False, "each line is a record (a name, a SMILES, a game); every tenth goes to validation")
    seed: int = option(1337, "seed of the initial weights, the window order and dropout")

    # fine-tuning
    init_from: str | None = option(
        None, "fine-tune: checkpoint folder to start from; its model shape overrides the preset's"
    )
    teachers: tuple[str, ...] = option(
        (), "checkpoint folders whose mean prediction is learned, instead of the text's next character (distillation)"
    )
    extend_vocabulary: bool = option(False, "add the text's characters that are absent from the init_from checkpoint")

    # the model (GPTConfig)
    block_size: int = option(256, "attention window and training length, in characters")
    n_layer: int = option(6, "number of blocks")
    n_head: int = option(4, "query heads")
    n_kv_head: int = option(2, "key/value heads; must divide n_head")
    n_embd: int = option(128, "embedding width; n_embd / n_head must be even")
    n_inner: int | None = option(None, "SwiGLU width; none: 8/3 of n_embd")
    rope_theta: float = option(10_000.0, "RoPE base")
    norm_eps: float = option(1e-6, "RMSNorm epsilon")
    dropout: float = option(0.0, "dropout on each residual branch, in [0, 1)")

    # optimization
    steps: int = option(2440, "optimizer steps")
    batch_size: int = option(8, "windows of block_size characters per step; cut ones are as many more")
    window_stages: int = option(
        3,
        "windows grow: with 3, they are cut in four, then in two, as far as they can be and have 16 characters, then "
        "whole for half of the steps; 1, and with init_from: always whole",
    )
    muon_lr: float = option(0.03, "peak learning rate of the hidden matrices (Muon)")
    adamw_lr: float = option(0.003, "peak learning rate of embedding, head and norms (AdamW)")
    muon_momentum: float = option(0.93, "Nesterov momentum of Muon, in [0, 1)")
    momentum_steps: int = option(1000, "steps over which Muon's momentum rises to it, from 0.85")
    muon_beta2: float = option(0.95, "decay of Muon's per-row second moment, in [0, 1)")
    adamw_beta1: float = option(0.9, "decay of AdamW's first moment, in [0, 1)")
    adamw_beta2: float = option(0.99, "decay of AdamW's second moment, in [0, 1)")
    weight_decay: float = option(
        0.2, "decoupled weight decay of the hidden matrices, times the learning rate, after three epochs; less before"
    )
    warmup_steps: int = option(50, "steps of linear warmup, followed by linear decay to 0")
    grad_clip: float = option(1.0, "maximum gradient norm; 0: no clipping")

    # evaluation, logs and checkpoints
    eval_every: int = option(610, "steps between evaluations")
    eval_chars: int = option(
        1_000_000, "validation characters per evaluation, 0: all; the final report always scores all"
    )
    patience: int = option(0, "stop after this many evaluations without a new best; 0: never")
    log_every: int = option(10, "steps between log lines")
    save_seconds: float = option(30.0, "seconds between saves; a killed run loses at most this much work")
    keep_every: int = option(0, "steps between checkpoints kept as OUT/step-00000500 and so on; 0: none")
    sample_chars: int = option(200, "characters of the sample at each evaluation; 0: none")
    weights: Weights = option("float32", "dtype of the weights in OUT/best and OUT/step-*; float16 halves their size")
    tensorboard: bool = option(False, "also write TensorBoard event files to OUT/tensorboard")

    # the machine
    device: Device = option("auto", "auto: cuda, else mps, else cpu")
    dtype: Dtype = option("auto", "dtype of matrix products; auto: bfloat16 if a short probe finds it faster")
    threads: int = option(0, "CPU threads of a process; 0: OMP_NUM_THREADS, else one per core")
    accumulate: int = option(1, "gradient accumulation: micro-batches per process and step, to save memory")
    compile: bool = option(False, "torch.compile the model, up to a minute for each size of window; not for cpu")

    def __post_init__(self) -> None:
        # A single name is allowed, and JSON has lists only.
        for name in ("data", "glob", "teachers"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        bounds: dict[str, tuple[float, float]] = {
            "seed": (0, 2**63 - 1),
            "steps": (1, 10**9),
            "batch_size": (1, 10**6),
            "window_stages": (1, 20),
            "warmup_steps": (0, 10**9),
            "momentum_steps": (0, 10**9),
            "eval_every": (1, 10**9),
            "patience": (0, 10**9),
            "log_every": (1, 10**9),
            "keep_every": (0, 10**9),
            "threads": (0, 4096),
            "accumulate": (1, 10**6),
            "eval_chars": (0, 10**12),
            "sample_chars": (0, 10**6),
            "save_seconds": (0, 10**9),
            "muon_lr": (0, 100),
            "adamw_lr": (0, 100),
            "weight_decay": (0, 100),
            "grad_clip": (0, 10**9),
            "rope_theta": BOUNDS["rope_theta"],
            "norm_eps": BOUNDS["norm_eps"],
        }
        for name, (low, high) in bounds.items():
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"{name} must be in [{low}, {high}], got {getattr(self, name)}")
        for name in ("muon_momentum", "muon_beta2", "adamw_beta1", "adamw_beta2", "dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                raise ConfigError(f"{name} must be one of {', '.join(get_args(hint))}, got {getattr(self, name)!r}")
        if self.extend_vocabulary and self.init_from is None:
            raise ConfigError("extend_vocabulary needs a checkpoint to extend; set init_from too")
        # Refused here, before an earlier run is replaced.
        if self.tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise ConfigError("tensorboard needs the package tensorboard; pip install -e '.[tensorboard]'")

    @classmethod
    def from_preset(cls, preset: str, **changes: Any) -> TrainConfig:
        """A preset with some fields changed.

        Raises:
            ConfigError: unknown preset or field, or a value out of bounds.
        """
        if preset not in PRESETS:
            raise ConfigError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
        names = [f.name for f in fields(cls)]
        for name in changes:
            if name not in names:
                raise ConfigError(f"unknown setting {name!r}; allowed: {', '.join(names)}")
        return cls(**{**PRESETS[preset], **changes})

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.block_size

    def window_at(self, step: int) -> int:
        """Characters per window at a step, which divides block_size (sequence length warmup, Li et al. 2021).

        Records are not cut.
        """
        cut_stages = self.window_stages - 1  # which share the first half of the steps
        halvings = max(0, cut_stages - 2 * cut_stages * step // self.steps)
        most = max(1, self.block_size // MIN_WINDOW).bit_length() - 1
        return self.block_size // math.gcd(self.block_size, 1 << min(halvings, most))

    def model_config(self, vocab_size: int) -> GPTConfig:
        """Raises ConfigError if the sizes are inconsistent."""
        try:
            shape = {name: getattr(self, name) for name in SHAPE}
            return GPTConfig(vocab_size=vocab_size, dropout=self.dropout, **shape)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


# The experiments behind these values are in RECIPE.md.
PRESETS: dict[str, dict[str, Any]] = {
    "quick": dict(
        n_layer=4,
        block_size=128,
        batch_size=8,
        muon_lr=0.04,
        steps=550,
        eval_every=275,
        eval_chars=30_000,
    ),
    "cpu": dict(),
    "gpu": dict(
        n_layer=6,
        n_head=6,
        n_kv_head=2,
        n_embd=384,
        block_size=256,
        batch_size=64,
        steps=2000,
        eval_every=250,
        muon_lr=0.02,
        muon_momentum=0.95,
        momentum_steps=300,
        dropout=0.2,
        weight_decay=0.3,
    ),
}
