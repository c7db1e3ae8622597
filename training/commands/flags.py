"""The flags of each command.

This module loads without torch, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from training.config import (
    COLUMN_HELP,
    DATA_HELP,
    EXCLUDE_HELP,
    GLOB_HELP,
    MAX_CANDIDATES,
    MIN_COUNT_HELP,
    PRESETS,
    RECORDS_HELP,
    Device,
    TrainConfig,
)
from training.messages import unescaped
from training.text.records import LINES

ESCAPES = r"\n, \t and \\ stand for a line break, a tab and a backslash"


def train_flags(parser: argparse.ArgumentParser, show_all: bool) -> None:
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="the run's folder")
    parser.add_argument("--preset", choices=PRESETS, help="defaults of the other flags (default: cpu)")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out, with its settings")
    parser.add_argument("--overwrite", action="store_true", help="replace the run in --out")
    add_config_flags(parser, show_all)


def evaluate_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    add_data_flags(parser, f"{DATA_HELP} (default: the validation split of the training text)")
    add_unknown_flags(parser, "--data")


def sample_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    add_sampling_flags(parser, n=1, max_tokens=500)
    parser.add_argument(
        "--prompt",
        help=rf"text to continue (default: a line break, or the first character); {ESCAPES}",
        metavar="TEXT",
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="sampling temperature; 0: greedy")
    parser.add_argument("--top-k", type=int, default=0, help="sample from the k likeliest characters; 0: all")
    for flag, default, characters in (
        ("--top-p", 1.0, "the smallest set of likeliest characters with this probability"),
        ("--min-p", 0.0, "characters at least this probable, relative to the likeliest"),
        ("--typical-p", 1.0, "the most typical characters with this probability"),
    ):
        parser.add_argument(flag, type=float, default=default, help=f"sample from {characters}")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT",
        help=rf"end a text before this string; repeatable (default for records: the end of a record); {ESCAPES}",
    )  # fmt: skip
    parser.add_argument(
        "--stop-regex", metavar="REGEX", help="end a text before the first match of this regular expression"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="for records: go on after the end of one")
    parser.add_argument(
        "--regex", help="generate texts that match this regular expression as a whole, without the prompt"
    )
    add_exact_flags(parser)
    add_unknown_flags(parser, "the prompt")
    parser.add_argument("--unique", action="store_true", help="skip duplicate texts")
    parser.add_argument("--novel", action="store_true", help="skip texts that are lines of the training text")
    add_data_flags(parser, f"the training text for --novel: {DATA_HELP} (default: the files that the run read)")
    add_format_flag(parser, ("text", "jsonl", "csv"), "plain texts; or JSON lines or CSV, with seeds")


def score_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="a UTF-8 text file")
    parser.add_argument(
        "--records", action=argparse.BooleanOptionalAction,
        help="score records as in training: with their end, after the end of another record. --no-records: score lines "
        "without their line break; the first character of a line is not scored (default: as the model was trained, as "
        "in /v1/score)",
    )  # fmt: skip
    parser.add_argument(
        "--top", type=int, metavar="N", help="print the N strangest lines: most bits per character first"
    )
    parser.add_argument("--sort", action="store_true", help="print all lines, the strangest first")
    add_format_flag(parser, ("jsonl", "csv"), "JSON lines, or CSV with a header")
    add_unknown_flags(parser, "lines", default=None, chosen="replace, or drop if the vocabulary has no replacement")


def report_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    add_sampling_flags(parser, n=None, max_tokens=5000)
    parser.add_argument("--regex", help="for records: a valid record matches this Python regular expression as a whole")
    add_exact_flags(parser)
    parser.add_argument(
        "--command", "--check", dest="check", metavar="CMD",
        help="for records: a command that reads records and prints the valid ones",
    )  # fmt: skip
    add_data_flags(parser, f"the training text: {DATA_HELP} (default: the files that the run read)")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="the page to write (default: report.html in the run's folder)"
    )


def export_flags(parser: argparse.ArgumentParser) -> None:
    add_checkpoint_flag(parser)
    parser.add_argument("--to", choices=("gguf", "onnx"), required=True, help="gguf: llama.cpp; onnx: onnxruntime")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file to write")


def prepare_flags(parser: argparse.ArgumentParser) -> None:
    add_data_flags(parser, DATA_HELP, default=["tinyshakespeare"])
    add_records_flags(parser)
    parser.add_argument("--min-count", type=int, default=1, metavar="INT", help=MIN_COUNT_HELP)


def lecture_flags(parser: argparse.ArgumentParser) -> None:
    add_data_flags(parser, DATA_HELP, default=["tinyshakespeare"])
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="the full model, shown last (default: the bundled checkpoint)"
    )
    parser.add_argument(
        "--steps", type=int, default=10_000, help="training steps of the bigram table; one head takes half"
    )
    parser.add_argument("--seed", type=int, default=1337, help="seed of all random numbers")
    parser.add_argument(
        "--out", type=Path, default=Path("out/lecture.png"), metavar="FILE", help="the picture to write"
    )


# -- flags that several commands share --


def add_exact_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--exact", action="store_true",
        help="with --regex: sample without the constraint, and keep only texts that match; they have the frequencies "
        "of the model's own matching texts",
    )  # fmt: skip
    parser.add_argument(
        "--max-candidates", type=int, metavar="N",
        help=f"with --exact: limit of the average number of candidates for a text (default: {MAX_CANDIDATES})",
    )  # fmt: skip


def add_config_flags(parser: argparse.ArgumentParser, show_all: bool) -> None:
    """Add a flag for each field of TrainConfig. A flag that is not given is absent from the namespace."""
    hints = get_type_hints(TrainConfig)
    for field in dataclasses.fields(TrainConfig):
        if field.name == "records":
            add_records_flags(parser, default=argparse.SUPPRESS)
        if field.name in ("records", "column"):
            continue
        kind = hints[field.name]
        options: dict[str, Any] = {"default": argparse.SUPPRESS}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif get_origin(kind) is Literal:
            options["choices"] = get_args(kind)
        elif get_origin(kind) is tuple:
            options |= {"nargs": "+", "metavar": field.name.upper()}
        else:
            options["type"] = next((k for k in get_args(kind) if k is not NoneType), kind)
            options["metavar"] = options["type"].__name__.upper()
        changed = [f"{preset}: {values[field.name]}" for preset, values in PRESETS.items() if field.name in values]
        shown = " ".join(field.default) or "none" if isinstance(field.default, tuple) else field.default
        default = ", ".join([f"default {shown}".replace("None", "none"), *changed])
        is_shown = show_all or field.metadata["is_common"]
        options["help"] = f"{field.metadata['help']} ({default})" if is_shown else argparse.SUPPRESS
        parser.add_argument(f"--{field.name.replace('_', '-')}", **options)


def add_records_flags(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    def separator(text: str) -> str:
        if not text:
            raise argparse.ArgumentTypeError("must not be empty")
        return unescaped(text)

    parser.add_argument(
        "--records", nargs="?", type=separator, const=LINES, default=default, metavar="SEPARATOR",
        help=f"{RECORDS_HELP}; {ESCAPES} (default none)",
    )  # fmt: skip
    parser.add_argument(
        "--no-records", dest="records", action="store_const", const="", default=default,
        help="learn a text, even if the model of --init-from learned records",
    )  # fmt: skip
    parser.add_argument("--column", default=default, metavar="NAME", help=f"{COLUMN_HELP} (default none)")


def add_checkpoint_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR", help="a checkpoint folder, or a run's to use its best"
    )


def add_data_flags(parser: argparse.ArgumentParser, help: str, default: list[str] | None = None) -> None:
    parser.add_argument("--data", nargs="+", default=default, help=help)
    parser.add_argument("--glob", nargs="+", metavar="GLOB", help=GLOB_HELP)
    parser.add_argument("--exclude", nargs="+", metavar="GLOB", help=EXCLUDE_HELP)


def add_format_flag(parser: argparse.ArgumentParser, choices: tuple[str, ...], help: str) -> None:
    parser.add_argument("--format", choices=choices, default=choices[0], help=help)


def add_unknown_flags(
    parser: argparse.ArgumentParser, where: str, default: str | None = "refuse", chosen: str = ""
) -> None:
    """Add the flags that `inputs.Encoder` reads.

    where: the text that may have unknown characters, for the help.
    chosen: the help's description of the default if `default` is None.
    """
    parser.add_argument(
        "--unknown-characters", choices=("refuse", "replace", "drop"), default=default,
        help=f"treatment of characters of {where} outside the vocabulary" + (f" (default: {chosen})" if chosen else ""),
    )  # fmt: skip
    parser.add_argument(
        "--replacement-character", metavar="TEXT",
        help=f"for --unknown-characters replace (default: the vocabulary's unknown symbol, else a space); {ESCAPES}",
    )  # fmt: skip


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `loading.load_model` reads: the checkpoint, the device and the threads."""
    add_checkpoint_flag(parser)
    parser.add_argument("--device", choices=get_args(Device), default="auto", help="auto: cuda, else cpu")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: OMP_NUM_THREADS, else one per core")


def add_sampling_flags(parser: argparse.ArgumentParser, *, n: int | None, max_tokens: int) -> None:
    default = "" if n else " (default: 20, or 1000 records)"
    parser.add_argument("-n", type=int, default=n, help=f"number of texts{default}")
    parser.add_argument("--max-tokens", type=int, default=max_tokens, help="characters per text")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first text; each further text adds 1")
