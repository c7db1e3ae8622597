"""The settings of a training run and the presets. Each field of TrainConfig is a flag of `train`.

The module does not import torch, so `--help` answers at once.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from service import installing
from service.model.config import BOUNDS, GPTConfig
from training.messages import Refusal
from training.text.records import LINES


class ConfigError(Refusal):
    """A setting is invalid. The message gives its name, its value and the allowed values."""


COUNT, COUNT_OR_NONE, SMALL_COUNT, RATE, FRACTION = (1, 10**9), (0, 10**9), (1, 10**6), (0, 100), (0, 1)


def option(default: Any, help: str, bounds: tuple[float, float] | None = None, is_common: bool = True) -> Any:
    """Return a field of TrainConfig.

    bounds: the smallest and the largest allowed value; a FRACTION must be below 1.
    is_common: True: --help shows the flag; False: only --help-all shows it.
    """
    return field(default=default, metadata={"help": help, "bounds": bounds, "is_common": is_common})


expert = functools.partial(option, is_common=False)


# With score_chars "auto" the final report scores this share of the characters trained on, over all its scorings, or the
# minimum, in characters. At that share, scoring takes less than a tenth of the run's time.
SCORED_SHARE, MIN_SCORED = 1 / 8, 20_000
MIN_WINDOW = 16  # characters; a model learns little from shorter windows
MAX_CANDIDATES = 10_000  # default of sample --exact: the average number of candidates for a text
DATA_HELP = "UTF-8 text files, plain or gzip, or folders of them, or the name tinyshakespeare"
GLOB_HELP = "read only the files of a folder that match one of these patterns: '*.py' 'docs/*.md'"
MIN_COUNT_HELP = "replace characters that occur fewer times by one unknown symbol, U+FFFD; the line break always stays"
RECORDS_HELP = (
    "learn records (names, SMILES, games, tunes); one record in ten, chosen at random, is for validation. SEPARATOR is "
    "lines (the default), blank (blank lines) or a mark between records; write a mark that begins with - as --records=-"
)
COLUMN_HELP = "learn the cells of this column of .csv, .tsv and .jsonl files as records"
EXCLUDE_HELP = "leave out the files of a folder that match one of these patterns"

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16"]
Weights = Literal["float32", "float16"]
Fused = Literal["auto", "false"]


# The sizes of a model, which a plan chooses together.
MODEL_SIZES = ("n_layer", "n_head", "n_kv_head", "n_embd")
# A run that starts from a checkpoint takes these settings from it: all fields of GPTConfig except vocab_size and
# dropout.
SHAPE = ("block_size", "n_layer", "n_head", "n_kv_head", "n_embd", "n_inner", "rope_theta", "norm_eps")


@dataclass(frozen=True)
class TrainConfig:
    """The settings of one run. On the same CPU, equal settings, dtype and threads give checkpoints with equal bytes.

    Raises:
        ConfigError: a value is out of bounds.
    """

    data: tuple[str, ...] = option(("tinyshakespeare",), DATA_HELP)
    glob: tuple[str, ...] = option((), GLOB_HELP)
    exclude: tuple[str, ...] = option((), EXCLUDE_HELP)
    records: str = option("", RECORDS_HELP)
    column: str | None = option(None, COLUMN_HELP)
    min_count: int = option(1, MIN_COUNT_HELP, COUNT_OR_NONE)
    seed: int = option(1337, "seed of the initial weights, the window order and dropout", (0, 2**63 - 1))

    # fine-tuning
    init_from: str | None = option(
        None, "fine-tune the checkpoint in this folder; its model shape replaces the preset's"
    )
    teachers: tuple[str, ...] = option(
        (), "learn the mean prediction of the checkpoints in these folders instead of the next character (distillation)"
    )
    extend_vocabulary: bool = option(False, "add characters of the text that the init_from checkpoint does not have")

    # the model (GPTConfig)
    block_size: int = option(512, "attention window and training length, in characters")
    n_layer: int = option(6, "number of blocks")
    n_head: int = option(4, "query heads")
    n_kv_head: int = option(2, "key/value heads; must divide n_head")
    n_embd: int = option(128, "embedding width; n_embd / n_head must be even")
    n_inner: int | None = expert(None, "SwiGLU width; none: 8/3 of n_embd, rounded up to a multiple of 8")
    rope_theta: float = expert(10_000.0, "RoPE base", BOUNDS["rope_theta"])
    norm_eps: float = expert(1e-6, "RMSNorm epsilon", BOUNDS["norm_eps"])
    dropout: float = option(0.0, "dropout on each residual branch, in [0, 1)", FRACTION)

    # optimization
    minutes: float = option(
        0.0,
        "limit of the run's time in minutes; this machine's speed decides the model size and steps; 0: the preset does",
        (0, 10**6),
    )
    steps: int = option(2800, "optimizer steps", COUNT)
    batch_size: int = option(4, "windows of block_size characters per step; shorter windows: more of them", SMALL_COUNT)
    window_stages: int = expert(
        3,
        "stages of window length: with 3, windows have a quarter of block_size, then half of it (but at least 16 "
        "characters), then all of it for half of the steps; 1, and with init_from: always all of it",
        (1, 20),
    )
    muon_lr: float = expert(0.03, "peak learning rate of the hidden matrices (Muon)", RATE)
    adamw_lr: float = expert(0.003, "peak learning rate of embedding, head and norms (AdamW)", RATE)
    muon_momentum: float = expert(0.93, "Nesterov momentum of Muon, in [0, 1)", FRACTION)
    momentum_steps: int = expert(1000, "steps in which Muon's momentum rises from 0.85 to muon_momentum", COUNT_OR_NONE)
    adamw_beta1: float = expert(0.9, "decay of AdamW's first moment, in [0, 1)", FRACTION)
    adamw_beta2: float = expert(0.99, "decay of AdamW's second moment, in [0, 1)", FRACTION)
    weight_decay: float = option(
        0.1,
        "decoupled weight decay of the hidden matrices, times the learning rate; it rises from 0 over three epochs",
        RATE,
    )
    counted: float = expert(
        0.0,
        "share of each target that counts of the training split predict, at the first step; it falls to 0 at the last",
        (0.0, 1.0),
    )
    warmup_steps: int = expert(50, "steps of linear warmup, followed by linear decay to 0", COUNT_OR_NONE)
    grad_clip: float = expert(1.0, "maximum gradient norm; 0: no clipping", COUNT_OR_NONE)

    # evaluation, logs and checkpoints
    eval_every: int = option(700, "steps between evaluations", COUNT)
    eval_chars: int = expert(1_000_000, "validation characters per evaluation; 0: all", (0, 10**12))
    score_chars: str = expert(
        "auto",
        "validation characters that the final report scores, or all; auto: as many as a tenth of the time allows",
    )
    patience: int = option(0, "stop after this many evaluations without a new best; 0: never", COUNT_OR_NONE)
    log_every: int = expert(10, "steps between log lines", COUNT)
    save_seconds: float = option(
        30.0, "seconds between saves; a killed run loses at most this much work", COUNT_OR_NONE
    )
    keep_every: int = option(0, "steps between checkpoints kept as OUT/step-00000500 and so on; 0: none", COUNT_OR_NONE)
    sample_chars: int = option(200, "characters of the sample at each evaluation; 0: none", (0, 10**6))
    weights: Weights = option("float32", "dtype of the weights in OUT/best and OUT/step-*; float16 halves their size")
    mixed: bool = option(
        False, "mix counts of the training text into OUT/best: likelihoods become better, texts do not (RECIPE.md)"
    )
    tensorboard: bool = option(False, "also write TensorBoard event files to OUT/tensorboard")

    # the machine
    device: Device = option("auto", "auto: cuda, else cpu")
    dtype: Dtype = option(
        "auto",
        "dtype of matrix products; auto: bfloat16 on a GPU, and on a CPU with bfloat16 products if n_embd is at least "
        "128, else float32",
    )
    threads: int = option(0, "CPU threads per process; 0: OMP_NUM_THREADS, else one per core", (0, 4096))
    accumulate: int = option(
        1, "gradient accumulation: split the batch of a process into this many parts, to save memory", SMALL_COUNT
    )
    fused: Fused = expert(
        "auto", "auto: use the hand-written step on a CPU if it computes the same as gpt.py; false: use autograd"
    )
    compile: bool = expert(False, "torch.compile the model: up to a minute for each window size; not on cpu")

    def __post_init__(self) -> None:
        self._normalize()
        for each in fields(self):
            _check_bounds(each.name, getattr(self, each.name), each.metadata["bounds"])
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                raise ConfigError(f"{name} must be one of {', '.join(get_args(hint))}, got {getattr(self, name)!r}")
        if self.column is not None and self.records != LINES:
            raise ConfigError(
                f"records must be {LINES} if column is set, as its cells are the records, got {self.records!r}"
            )
        if self.score_chars not in ("auto", "all") and not (self.score_chars.isdecimal() and int(self.score_chars) > 0):
            raise ConfigError(f"score_chars must be auto, all or a number of at least 1, got {self.score_chars!r}")
        if self.extend_vocabulary and self.init_from is None:
            raise ConfigError("extend_vocabulary needs a checkpoint to extend; set init_from too")
        # This check comes before an earlier run is replaced.
        if self.tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise ConfigError(f"tensorboard needs the package tensorboard: {installing('tensorboard')}")

    def _normalize(self) -> None:
        """Give each value the type of its field: a caller may give a single name, and settings read from JSON are
        lists.
        """
        values: dict[str, Any] = {}
        for name in ("data", "glob", "exclude", "teachers"):
            value = getattr(self, name)
            values[name] = (value,) if isinstance(value, str) else tuple(value)
        if isinstance(self.records, bool):  # older versions had only records of one line
            values["records"] = LINES if self.records else ""
        elif self.column is not None and not self.records:
            values["records"] = LINES
        values["score_chars"] = "all" if str(self.score_chars) == "0" else str(self.score_chars)
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_preset(cls, preset: str, **changes: Any) -> TrainConfig:
        """Return the settings of a preset with changes.

        If block_size changes and batch_size does not, batch_size is adapted so that a step has about as many characters
        as before.

        Raises:
            ConfigError: the preset or a field is unknown, or a value is out of bounds.
        """
        if preset not in PRESETS:
            raise ConfigError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
        names = [f.name for f in fields(cls)]
        for name in changes:
            if name not in names:
                raise ConfigError(f"unknown setting {name!r}; allowed: {', '.join(names)}")
        if "block_size" in changes and "batch_size" not in changes:
            characters = cls(**PRESETS[preset]).tokens_per_step
            changes["batch_size"] = max(1, characters // max(1, changes["block_size"]))
        return cls(**{**PRESETS[preset], **changes})

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.block_size

    def window_at(self, step: int) -> int:
        """Return the number of characters per window at a step (sequence length warmup, Li et al. 2021).

        It divides block_size. For records, it is always block_size.
        """
        if self.records:
            return self.block_size
        cut_stages = self.window_stages - 1  # these stages share the first half of the steps
        halvings = max(0, cut_stages - 2 * cut_stages * step // self.steps)
        most = max(1, self.block_size // MIN_WINDOW).bit_length() - 1
        return self.block_size // math.gcd(self.block_size, 1 << min(halvings, most))

    def counted_at(self, step: int) -> float:
        """Return the share of each target that counts predict at a step."""
        return self.counted * (1 - step / self.steps)

    def model_config(self, vocab_size: int) -> GPTConfig:
        """Return the shape of the model.

        Raises:
            ConfigError: the sizes are out of bounds or do not fit each other.
        """
        try:
            shape = {name: getattr(self, name) for name in SHAPE}
            return GPTConfig(vocab_size=vocab_size, dropout=self.dropout, **shape)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _check_bounds(name: str, value: Any, bounds: tuple[float, float] | None) -> None:
    if bounds and not (bounds[0] <= value <= bounds[1] and (bounds is not FRACTION or value < 1)):
        end = ")" if bounds is FRACTION else "]"
        raise ConfigError(f"{name} must be in [{bounds[0]}, {bounds[1]}{end}, got {value}")


# RECIPE.md documents the experiments behind these values.
PRESETS: dict[str, dict[str, Any]] = {
    "quick": dict(
        n_layer=4,
        block_size=128,
        batch_size=8,
        steps=550,
        eval_every=275,
        eval_chars=30_000,
        muon_lr=0.04,
        weight_decay=0.2,
        counted=1.0,
    ),
    "cpu": dict(),
    "gpu": dict(
        block_size=256,
        n_layer=8,
        n_head=8,
        n_kv_head=4,
        n_embd=256,
        dropout=0.12,
        batch_size=16,
        steps=2400,
        eval_every=400,
        muon_momentum=0.95,
        momentum_steps=300,
        weight_decay=0.25,
    ),  # fmt: skip
}
