"""The commands: python -m training prepare | train | evaluate | sample | score | report | export | lecture.

`chargpt train` and so on run the same commands. This module defines their flags. Each command calls the function
`command` of the module of its name in training/commands.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import io
import os
import signal
import sys
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from service import release
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
from training.messages import Refusal, program, unescaped, visible
from training.text.records import LINES

ESCAPES = r"\n, \t and \\ stand for a line break, a tab and a backslash"
HELP_ALL = "--help-all"


class Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of every flag that has one, except for switches that are off."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """A parser that refuses abbreviated flags, and prints an error as one line without the usage.

    If abbreviations were allowed, a new flag could change the meaning of an existing command.
    """

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, formatter_class=Formatter, **options)

    def parse_args(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser: argparse.ArgumentParser = parsed.parser
            flags = [flag for action in parser._actions for flag in action.option_strings]
            close = difflib.get_close_matches(unknown[0], flags, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            if not close and getattr(parsed, "records", None) == LINES:
                hint = f"; to use it as the separator of records, write --records={unknown[0]}"
            parser.error(f"unknown argument {unknown[0]}{hint}")
        return parsed

    def error(self, message: str) -> NoReturn:
        all_flags = HELP_ALL if HELP_ALL in self._option_string_actions else "--help"
        self.exit(2, f"{self.prog}: error: {message}\nAll flags: {self.prog} {all_flags}\n")


def build_parser(show_all: bool = False) -> Parser:
    """Return the parser of all commands.

    show_all: True: help also shows the less common commands and flags.
    """
    parser = Parser(prog=program(), description="Train a character-level GPT on a text.")
    parser.add_argument("--version", action="version", version=f"chargpt {release()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help: str, is_common: bool = True) -> Parser:
        listed: dict[str, Any] = {"help": help} if is_common or show_all else {}
        added: Parser = commands.add_parser(name, description=help, **listed)
        added.set_defaults(parser=added)
        return added

    p = command("train", "train a model; losses are in nats per character")
    p.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="the run's folder")
    p.add_argument("--preset", choices=PRESETS, help="defaults of the other flags (default: cpu)")
    p.add_argument("--resume", action="store_true", help="continue the run in --out, with its settings")
    p.add_argument("--overwrite", action="store_true", help="replace the run in --out")
    add_config_flags(p, show_all)

    p = command("evaluate", "measure the loss of a checkpoint on a text")
    add_model_flags(p)
    add_data_flags(p, f"{DATA_HELP} (default: the validation split of the training text)")
    add_unknown_flags(p, "--data")

    p = command("sample", "generate texts from a checkpoint")
    add_model_flags(p)
    add_sampling_flags(p, n=1, max_tokens=500)
    p.add_argument(
        "--prompt",
        help=rf"text to continue (default: a line break, or the first character); {ESCAPES}",
        metavar="TEXT",
    )
    p.add_argument("--temperature", type=float, default=1.0, help="sampling temperature; 0: greedy")
    p.add_argument("--top-k", type=int, default=0, help="sample from the k likeliest characters; 0: all")
    for flag, default, characters in (
        ("--top-p", 1.0, "the smallest set of likeliest characters with this probability"),
        ("--min-p", 0.0, "characters at least this probable, relative to the likeliest"),
        ("--typical-p", 1.0, "the most typical characters with this probability"),
    ):
        p.add_argument(flag, type=float, default=default, help=f"sample from {characters}")
    p.add_argument(
        "--stop", action="append", default=[], metavar="TEXT",
        help=rf"end a text before this string; repeatable (default for records: the end of a record); {ESCAPES}",
    )  # fmt: skip
    p.add_argument("--stop-regex", metavar="REGEX", help="end a text before the first match of this regular expression")
    p.add_argument("--ignore-eos", action="store_true", help="for records: go on after the end of one")
    p.add_argument("--regex", help="generate texts that match this regular expression as a whole, without the prompt")
    add_exact_flags(p)
    add_unknown_flags(p, "the prompt")
    p.add_argument("--unique", action="store_true", help="skip duplicate texts")
    p.add_argument("--novel", action="store_true", help="skip texts that are lines of the training text")
    add_data_flags(p, f"the training text for --novel: {DATA_HELP} (default: the files that the run read)")
    add_format_flag(p, ("text", "jsonl", "csv"), "plain texts; or JSON lines or CSV, with seeds")

    p = command("score", "print the log-likelihood of each line of a text, or its strangest lines")
    add_model_flags(p)
    p.add_argument("--data", type=Path, required=True, metavar="FILE", help="a UTF-8 text file")
    p.add_argument(
        "--records", action=argparse.BooleanOptionalAction,
        help="score records as in training: with their end, after the end of another record. --no-records: score lines "
        "without their line break; the first character of a line is not scored (default: as the model was trained, as "
        "in /v1/score)",
    )  # fmt: skip
    p.add_argument("--top", type=int, metavar="N", help="print the N strangest lines: most bits per character first")
    p.add_argument("--sort", action="store_true", help="print all lines, the strangest first")
    add_format_flag(p, ("jsonl", "csv"), "JSON lines, or CSV with a header")
    add_unknown_flags(p, "lines", default=None, chosen="replace, or drop if the vocabulary has no replacement")

    p = command("report", "measure how much generated text is copied from the training text")
    add_model_flags(p)
    add_sampling_flags(p, n=None, max_tokens=5000)
    p.add_argument("--regex", help="for records: a valid record matches this Python regular expression as a whole")
    add_exact_flags(p)
    p.add_argument(
        "--command", "--check", dest="check", metavar="CMD",
        help="for records: a command that reads records and prints the valid ones",
    )  # fmt: skip
    add_data_flags(p, f"the training text: {DATA_HELP} (default: the files that the run read)")
    p.add_argument(
        "--html", type=Path, metavar="FILE", help="the page to write (default: report.html in the run's folder)"
    )

    p = command("export", "convert a checkpoint to GGUF or ONNX")
    add_checkpoint_flag(p)
    p.add_argument("--to", choices=("gguf", "onnx"), required=True, help="gguf: llama.cpp; onnx: onnxruntime")
    p.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file to write")

    p = command("prepare", "encode a text and store it in the cache; train does this too", is_common=False)
    add_data_flags(p, DATA_HELP, default=["tinyshakespeare"])
    add_records_flags(p)
    p.add_argument("--min-count", type=int, default=1, metavar="INT", help=MIN_COUNT_HELP)

    p = command("lecture", "explain the model on a text, from a table of bigrams to attention", is_common=False)
    add_data_flags(p, DATA_HELP, default=["tinyshakespeare"])
    p.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="the full model, shown last (default: the bundled checkpoint)"
    )
    p.add_argument("--steps", type=int, default=10_000, help="training steps of the bigram table; one head takes half")
    p.add_argument("--seed", type=int, default=1337, help="seed of all random numbers")
    p.add_argument("--out", type=Path, default=Path("out/lecture.png"), metavar="FILE", help="the picture to write")

    for some, more in ((parser, "commands"), (commands.choices["train"], "flags")):
        some.add_argument(HELP_ALL, action="help", help=f"show the less common {more} too, and exit")
    return parser


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


def unwritten_output() -> str | None:
    """Return why standard output cannot be written, or None. The interpreter must not try it again at exit."""
    try:
        print(flush=True)  # a write, as nothing is buffered under PYTHONUNBUFFERED
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error.strerror
    return None


def main() -> int:
    """Run a command. Return its exit status: 0, 1 for a refusal, 2 for a bad command line, 128 + n after signal n."""
    # Threads of GNU OpenMP spin while they wait, which slows a step if another program needs the core. This limit of
    # spins costs nothing otherwise (RECIPE.md). OpenMP reads it when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as for stderr: its encoding may lack characters of a text
    args = build_parser(HELP_ALL in sys.argv).parse_args()
    from service.model.checkpoint import CheckpointError
    from service.model.tokenizer import UnknownCharacterError
    from training.run.distributed import LostProcessError
    from training.run.errors import InterruptedRun

    try:
        importlib.import_module(f"training.commands.{args.command}").command(args)
        sys.stdout.flush()
    except InterruptedRun as stop:
        print(stop, file=sys.stderr)
        return 128 + stop.number
    except BrokenPipeError:
        # The reader, for example `head`, closed the pipe. The interpreter must not flush into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (Refusal, CheckpointError, UnknownCharacterError, LostProcessError, OSError) as error:
        reason = unwritten_output() if isinstance(error, OSError) and error.errno and not error.filename else None
        message = f"standard output cannot be written: {reason}" if reason else visible(str(error))
        print(f"error: {message}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        if "out of memory" not in str(error).lower():
            raise
        remedy = "choose --device cpu"
        if args.command == "train":
            remedy = "--accumulate 2 computes a batch in two parts; or choose a smaller --batch-size"
        print(f"error: the device's memory is full: {remedy}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        status = main()
        from training.run.distributed import exit_if_distributed

        exit_if_distributed(status)
        sys.exit(status)
    except KeyboardInterrupt:  # possible at any time, for example during the import of torch
        sys.exit(130)
