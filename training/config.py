"""What a training run is made of: one frozen dataclass, whose fields are the flags of `train`, and the presets.

Loads without torch, so that `--help` answers at once.
"""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from service.model.config import GPTConfig


class ConfigError(ValueError):
    """A setting that cannot be used; names it, its value and what is allowed."""


def option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


Device = Literal["auto", "cpu", "cuda", "mps"]
Dtype = Literal["auto", "float32", "bfloat16"]
Weights = Literal["float32", "float16"]


# The settings that a checkpoint fixes for whoever goes on from its weights: GPTConfig's, but for the vocabulary and
# what is for training only.
SHAPE = ("block_size", "n_layer", "n_head", "n_kv_head", "n_embd", "n_inner", "rope_theta", "norm_eps")


@dataclass(frozen=True)
class TrainConfig:
    """One run. On a CPU, two runs of equal configs, dtypes and threads give equal bytes.

    Raises:
        ConfigError: a value is out of its bounds.
    """

    data: tuple[str, ...] = option(
        ("tinyshakespeare",), "UTF-8 text files, plain or gzip, or folders of them, or the name tinyshakespeare"
    )
    records: bool = option(False, "each line is a record (a name, a SMILES, a game); one in ten validates")
    seed: int = option(1337, "of the initial weights, the order of the windows and dropout")

    # fine-tuning
    init_from: str | None = option(
        None, "checkpoint folder whose weights to begin with; the model's shape is its own, whatever the preset"
    )
    extend_vocabulary: bool = option(False, "add the text's characters that the checkpoint of init_from lacks")

    # the model (GPTConfig)
    block_size: int = option(256, "characters a query sees, itself included; the training length")
    n_layer: int = option(6, "blocks")
    n_head: int = option(4, "query heads")
    n_kv_head: int = option(2, "key/value heads; divides n_head")
    n_embd: int = option(128, "width; n_embd / n_head must be even")
    n_inner: int | None = option(None, "width of the SwiGLU; none: 8/3 of n_embd")
    rope_theta: float = option(10_000.0, "base of the wavelengths of rotary positions")
    norm_eps: float = option(1e-6, "what RMSNorm adds to the mean square")
    dropout: float = option(0.0, "share of each residual branch dropped in training, in [0, 1)")

    # the optimisation
    steps: int = option(1952, "optimizer steps")
    batch_size: int = option(8, "windows of block_size characters per step")
    muon_lr: float = option(0.03, "peak learning rate of the hidden matrices (Muon)")
    adamw_lr: float = option(0.003, "peak learning rate of embedding, head and norms (AdamW)")
    muon_momentum: float = option(0.93, "Nesterov momentum of Muon, in [0, 1)")
    muon_beta2: float = option(0.95, "decay of the strength of each row of Muon's updates, in [0, 1)")
    adamw_beta1: float = option(0.9, "decay of AdamW's first moment, in [0, 1)")
    adamw_beta2: float = option(0.99, "decay of AdamW's second moment, in [0, 1)")
    weight_decay: float = option(0.2, "of the hidden matrices, decoupled, times the learning rate")
    warmup_steps: int = option(50, "steps of linear warm-up; then linear decay to 0 at the last step")
    grad_clip: float = option(1.0, "largest norm of the gradient; 0: no clipping")
    ema_decay: float = option(0.0, "evaluate and keep an exponential average of the weights, in [0, 1); 0: none")

    # what is reported and kept
    eval_every: int = option(488, "steps between evaluations")
    eval_chars: int = option(
        1_000_000, "most validation characters an evaluation scores, 0: all; the report scores all"
    )
    patience: int = option(
        0, "evaluations without a new best that end the run, before the learning rate has come down; 0: never"
    )
    log_every: int = option(10, "steps between lines of the log")
    save_seconds: float = option(30.0, "most seconds of work that a kill can lose")
    keep_every: int = option(0, "steps between checkpoints that stay, OUT/step-00000500 and so on; 0: none")
    sample_chars: int = option(200, "characters of the sample at each evaluation; 0: none")
    weights: Weights = option("float32", "dtype of the saved weights; in float16, best is half as large")
    tensorboard: bool = option(False, "write the log as TensorBoard's event files too, to OUT/tensorboard")

    # the machine
    device: Device = option("auto", "auto: cuda, else mps, else cpu")
    dtype: Dtype = option("auto", "of matrix products; auto: bfloat16 where a probe finds it faster")
    threads: int = option(0, "CPU threads of all processes; 0: OMP_NUM_THREADS, else one per core")
    processes: int = option(0, "that share each batch; 0: on a CPU one per thread, 4 windows for each at least, else 1")
    accumulate: int = option(1, "parts of a process's share that go one after the other, to save memory")
    compile: bool = option(False, "torch.compile the model: up to a minute before the first step")

    def __post_init__(self) -> None:
        # One name may stand alone; JSON knows lists only.
        object.__setattr__(self, "data", (self.data,) if isinstance(self.data, str) else tuple(self.data))
        bounds: dict[str, tuple[float, float]] = {
            "seed": (0, 2**63 - 1),
            "steps": (1, 10**9),
            "batch_size": (1, 10**6),
            "warmup_steps": (0, 10**9),
            "eval_every": (1, 10**9),
            "patience": (0, 10**9),
            "log_every": (1, 10**9),
            "keep_every": (0, 10**9),
            "threads": (0, 4096),
            "processes": (0, 4096),
            "accumulate": (1, 10**6),
            "eval_chars": (0, 10**12),
            "sample_chars": (0, 10**6),
            "save_seconds": (0, 10**9),
            "muon_lr": (0, 100),
            "adamw_lr": (0, 100),
            "weight_decay": (0, 100),
            "grad_clip": (0, float("inf")),
            "rope_theta": (1, float("inf")),
            "norm_eps": (0, 1),
        }
        for name, (low, high) in bounds.items():
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"{name} must be in [{low:g}, {high:g}], got {getattr(self, name)}")
        for name in (
            "muon_momentum",
            "muon_beta2",
            "adamw_beta1",
            "adamw_beta2",
            "ema_decay",
            "dropout",
        ):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                raise ConfigError(f"{name} must be one of {', '.join(get_args(hint))}, got {getattr(self, name)!r}")
        if self.extend_vocabulary and self.init_from is None:
            raise ConfigError("extend_vocabulary extends that of a checkpoint: pass init_from too")
        # Known before anything is replaced or trained.
        if self.tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise ConfigError("tensorboard needs the package of that name: pip install 'chargpt[tensorboard]'")

    @classmethod
    def from_preset(cls, preset: str, **changes: Any) -> TrainConfig:
        """A preset with some fields changed.

        Raises:
            ConfigError: there is no such preset or field, or a value is out of its bounds.
        """
        if preset not in PRESETS:
            raise ConfigError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
        names = [f.name for f in fields(cls)]
        for name in changes:
            if name not in names:
                raise ConfigError(f"there is no setting {name!r}; allowed are {', '.join(names)}")
        return cls(**{**PRESETS[preset], **changes})

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.block_size

    def model_config(self, vocab_size: int) -> GPTConfig:
        """The model's shape.

        Raises:
            ConfigError: the sizes do not fit together.
        """
        try:
            shape = {name: getattr(self, name) for name in SHAPE}
            return GPTConfig(vocab_size=vocab_size, dropout=self.dropout, **shape)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


# What was tried to get here, and what it gave: RECIPE.md.
PRESETS: dict[str, dict[str, Any]] = {
    "quick": dict(
        n_layer=4,
        block_size=64,
        batch_size=16,
        muon_lr=0.04,
        muon_momentum=0.9,
        weight_decay=0.0,
        steps=400,
        eval_every=200,
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
        dropout=0.2,
        weight_decay=0.3,
        ema_decay=0.995,
    ),
}
