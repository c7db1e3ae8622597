"""The commands: python -m training prepare | train | evaluate | sample | score | report | export | lecture.

`chargpt train` and so on run the same commands. Each calls the function `command` of the module of its name in
training/commands, with the flags that commands/flags.py defines.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from service import release
from training.commands import flags
from training.messages import Refusal, program, visible
from training.text.records import LINES

HELP_ALL = "--help-all"
LESS_COMMON = ("prepare", "lecture")  # commands that only HELP_ALL lists


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
            known = [flag for action in parser._actions for flag in action.option_strings]
            close = difflib.get_close_matches(unknown[0], known, n=1)
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

    def command(name: str, help: str, add_flags: Callable[[Parser], None]) -> None:
        listed: dict[str, Any] = {"help": help} if show_all or name not in LESS_COMMON else {}
        added: Parser = commands.add_parser(name, description=help, **listed)
        added.set_defaults(parser=added)
        add_flags(added)

    command("train", "train a model; losses are in nats per character", partial(flags.train_flags, show_all=show_all))
    command("evaluate", "measure the loss of a checkpoint on a text", flags.evaluate_flags)
    command("sample", "generate texts from a checkpoint", flags.sample_flags)
    command("score", "print the log-likelihood of each line of a text, or its strangest lines", flags.score_flags)
    command("report", "measure how much generated text is copied from the training text", flags.report_flags)
    command("export", "convert a checkpoint to GGUF or ONNX", flags.export_flags)
    command("prepare", "encode a text and store it in the cache; train does this too", flags.prepare_flags)
    command("lecture", "explain the model on a text, from a table of bigrams to attention", flags.lecture_flags)

    for some, more in ((parser, "commands"), (commands.choices["train"], "flags")):
        some.add_argument(HELP_ALL, action="help", help=f"show the less common {more} too, and exit")
    return parser


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
