"""The commands: python -m training prepare | train | evaluate | sample | score | report | export.

python -m training train --data FILE --out DIR --preset quick
python -m training train --resume --out DIR
python -m training train --init-from DIR/best --data FILE --out DIR2
python -m training evaluate --checkpoint DIR/best --data FILE
python -m training sample --checkpoint DIR/best --prompt "ROMEO:" -n 3
python -m training score --checkpoint DIR/best --data FILE > scores.jsonl
python -m training report --checkpoint DIR/best
python -m training export --checkpoint DIR/best --to gguf --out model.gguf
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import signal
import sys
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from training.config import PRESETS, SHAPE, ConfigError, Device, TrainConfig

if TYPE_CHECKING:
    from service.model.checkpoint import Checkpoint
    from service.model.gpt import GPT
    from training.data import Corpus


class Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Says each default, but not that a switch is off."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Names what is allowed; no abbreviations, so that a new flag never changes what an old command means."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, formatter_class=Formatter, **options)

    def parse_args(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser: argparse.ArgumentParser = parsed.parser
            flags = [flag for action in parser._actions for flag in action.option_strings]
            close = difflib.get_close_matches(unknown[0], flags, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            parser.error(f"unknown argument {unknown[0]}{meant} Allowed are: {', '.join(flags)}")
        return parsed


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per field of TrainConfig; a flag that is not given is not in the result."""
    hints = get_type_hints(TrainConfig)
    for field in dataclasses.fields(TrainConfig):
        kind = hints[field.name]
        options: dict[str, Any] = {"default": argparse.SUPPRESS}
        help = field.metadata["help"]
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
        shown = " ".join(field.default) if isinstance(field.default, tuple) else field.default
        default = ", ".join([f"default {shown}".replace("None", "none"), *changed])
        parser.add_argument(f"--{field.name.replace('_', '-')}", help=f"{help} ({default})", **options)


def build_parser() -> Parser:
    parser = Parser(prog="python -m training", description="Turn a text into a checkpoint.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Any, help: str) -> Parser:
        added: Parser = commands.add_parser(name, help=help, description=help)
        added.set_defaults(run=run, parser=added)
        return added

    data_help = "UTF-8 text files, plain or gzip, or folders of them, or the name tinyshakespeare"
    p = command("prepare", run_prepare, "encode a text once into the cache; train does it too")
    p.add_argument("--data", nargs="+", default=["tinyshakespeare"], help=data_help)
    p.add_argument("--records", action="store_true", help="each line is a record; one in ten validates")

    p = command("train", run_train, "train a model; every loss is nats per character")
    p.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="the run's folder")
    p.add_argument("--preset", choices=PRESETS, help="what the other flags start from (default: cpu)")
    p.add_argument("--resume", action="store_true", help="go on where the run in --out stopped, settings and all")
    p.add_argument("--overwrite", action="store_true", help="replace the run in --out")
    add_config_flags(p)

    p = command("evaluate", run_evaluate, "score a text with a checkpoint")
    p.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="a checkpoint folder")
    p.add_argument("--data", nargs="+", help=f"{data_help}; all is scored (default: the run's own validation split)")
    add_machine_flags(p)

    p = command("sample", run_sample, "write texts with a checkpoint")
    p.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="a checkpoint folder")
    p.add_argument("--prompt", help="what each text goes on from; a line end if none is given")
    p.add_argument("-n", type=int, default=1, help="texts")
    p.add_argument("--max-tokens", type=int, default=500, help="characters of each text")
    p.add_argument("--temperature", type=float, default=1.0, help="0: the likeliest character each time")
    p.add_argument("--top-k", type=int, default=0, help="draw among the k likeliest; 0: all")
    p.add_argument("--top-p", type=float, default=1.0, help="draw among the likeliest with this probability together")
    p.add_argument("--seed", type=int, default=0, help="of the first text; the next ones take the next seeds")
    p.add_argument(
        "--stop", action="append", default=[], help=r"a text ends before this; may be repeated; \n is a line break"
    )
    p.add_argument("--unique", action="store_true", help="leave out what was written before")
    p.add_argument(
        "--format", choices=("text", "jsonl"), default="text", help="texts alone, or objects with their seeds"
    )
    add_machine_flags(p)

    p = command("score", run_score, "print the log-likelihood of each line of a text, as JSON lines")
    p.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="a checkpoint folder")
    p.add_argument("--data", type=Path, required=True, metavar="FILE", help="a UTF-8 text file, one record a line")
    add_machine_flags(p)

    p = command("report", run_report, "how much of what a model writes is copied from its training text")
    p.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="a checkpoint folder")
    p.add_argument("--data", nargs="+", help=f"the training text: {data_help} (default: the run's own)")
    p.add_argument("-n", type=int, default=20, help="texts to write")
    p.add_argument("--max-tokens", type=int, default=5000, help="characters of each text")
    p.add_argument("--seed", type=int, default=0, help="of the first text; the next ones take the next seeds")
    add_machine_flags(p)

    p = command("export", run_export, "write a checkpoint in another program's format")
    p.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="a checkpoint folder")
    p.add_argument("--to", choices=("gguf", "onnx"), required=True, help="llama.cpp's format, or onnxruntime's")
    p.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file to write")
    return parser


def add_machine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=get_args(Device), default="auto", help="auto: cuda, else mps, else cpu")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: OMP_NUM_THREADS, else one per core")


def run_prepare(args: argparse.Namespace) -> None:
    from training.data import cache_dir, prepare

    corpus = prepare(args.data, records=args.records)
    about = corpus.describe()
    print(
        f"{about['name']}: {about['characters']:,} characters, {about['symbols']:,} symbols; "
        f"{about['train_characters']:,} train, {about['val_characters']:,} validate\n"
        f"SHA-256 {corpus.sha256}, encoded in {cache_dir() / 'corpora'}"
    )


def run_train(args: argparse.Namespace) -> None:
    from rich.console import Console

    from training import loop
    from training.finetune import shape_of

    names = {field.name for field in dataclasses.fields(TrainConfig)}
    given = {name: value for name, value in vars(args).items() if name in names}
    console = Console(stderr=True, highlight=False)
    if args.resume and args.overwrite:
        raise ConfigError("--resume goes on with a run, --overwrite replaces it: pass one of them")
    if args.resume:
        data = given.pop("data", None)
        if args.preset:
            wanted = TrainConfig.from_preset(args.preset, **given).as_dict()
            # Not the preset's shape but that of a checkpoint, which need not be there any more.
            fixed = set(SHAPE) - set(given) if "init_from" in given else set()
            given = {name: value for name, value in wanted.items() if name not in {"data", *fixed}}
        loop.resume(args.out, given, console, data=data)
    else:
        if "init_from" in given:
            given = shape_of(given["init_from"]) | given
        config = TrainConfig.from_preset(args.preset or "cpu", **given)
        loop.start(config, args.out, console, overwrite=args.overwrite)


def run_evaluate(args: argparse.Namespace) -> None:
    from training.data import encode_files, find_texts
    from training.evaluate import bits, streamed_loss, whole_loss

    checkpoint, model = load_model(args)
    if args.data is None:
        corpus = run_corpus(checkpoint, None)
        ids, scored = corpus.val, f"validation split of {corpus.name}"
    else:
        ids, scored = encode_files(find_texts(args.data), checkpoint.tokenizer), " ".join(args.data)
    print(f"{scored}: {len(ids):,} characters, all but the first scored")
    for name, loss in ("whole", whole_loss(model, ids)), ("streamed", streamed_loss(model, ids)):
        print(f"{name:<9} {loss:.4f} nats  {bits(loss):.4f} bits per character")


def run_sample(args: argparse.Namespace) -> None:
    import json

    from rich.console import Console
    from rich.progress import track

    from service.model.params import SamplingParams
    from training.sample import ExhaustedError, sample_texts

    if args.n < 1 or args.max_tokens < 1:
        raise ConfigError(f"-n and --max-tokens must be at least 1, got {args.n} and {args.max_tokens}")
    if args.prompt == "":
        raise ConfigError("--prompt must hold at least one character")
    try:
        params = SamplingParams(args.temperature, args.top_k, args.top_p, args.seed)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    checkpoint, model = load_model(args)
    tokenizer = checkpoint.tokenizer
    prompt = tokenizer.encode("\n" if args.prompt is None else args.prompt)
    stop = tuple(tuple(tokenizer.encode(text.replace("\\n", "\n"))) for text in args.stop)
    if () in stop:
        raise ConfigError("--stop must hold at least one character")
    texts = sample_texts(model, prompt, args.n, args.max_tokens, params, stop=stop, unique=args.unique)
    console = Console(stderr=True)
    shown = track(texts, "texts", total=args.n, console=console, disable=not console.is_terminal or args.n == 1)
    begin = args.prompt or ""
    between = "\n" if args.stop else "\n\n"
    try:
        for number, (seed, ids) in enumerate(shown):
            text = begin + tokenizer.decode(ids)
            if args.format == "jsonl":
                print(json.dumps({"text": text, "seed": seed}, ensure_ascii=False))
            else:
                print(between if number else "", text, sep="", end="")
        if args.format == "text":
            print()
    except ExhaustedError as error:
        raise ConfigError(str(error)) from None


def run_score(args: argparse.Namespace) -> None:
    import json

    from training.data import read_lines
    from training.score import score_lines

    checkpoint, model = load_model(args)
    for record in score_lines(model, checkpoint.tokenizer, read_lines(args.data)):
        print(json.dumps(record, ensure_ascii=False))


def run_report(args: argparse.Namespace) -> None:
    import numpy as np
    from rich.console import Console

    from service.model.params import SamplingParams
    from training.display import print_copies
    from training.report import describe_copies
    from training.sample import sample_texts

    if args.n < 1 or args.max_tokens < 1:
        raise ConfigError(f"-n and --max-tokens must be at least 1, got {args.n} and {args.max_tokens}")
    checkpoint, model = load_model(args)
    corpus = run_corpus(checkpoint, args.data)
    prompt = [int(corpus.val[0])]
    texts = sample_texts(model, prompt, args.n, args.max_tokens, SamplingParams(seed=args.seed))
    written = np.concatenate([np.array(ids, corpus.ids.dtype) for _, ids in texts])
    held_out = corpus.val[: len(written)]
    print_copies(
        Console(highlight=False),
        {
            "written by the model": describe_copies(written, corpus.train, corpus.tokenizer),
            "the validation split": describe_copies(held_out, corpus.train, corpus.tokenizer),
        },
    )


def run_export(args: argparse.Namespace) -> None:
    from service.model.checkpoint import Checkpoint
    from training.export import export

    try:
        export(Checkpoint.read(args.checkpoint), args.to, args.out)
    except ModuleNotFoundError as error:
        raise ConfigError(f"--to {args.to} needs the package {error.name}: pip install 'chargpt[export]'") from None
    print(f"{args.out}: {args.out.stat().st_size:,} bytes")


def run_corpus(checkpoint: Checkpoint, data: list[str] | None) -> Corpus:
    """The text a checkpoint was trained on, in its vocabulary: at `data`, or where the run found it.

    Raises:
        ConfigError: the checkpoint does not say, or it is another text.
    """
    from training.data import prepare, recode

    if data is None:
        if "recipe" not in checkpoint.training:
            raise ConfigError(f"{checkpoint.path / 'training.json'} does not say what the text was: pass --data")
        data = checkpoint.training["recipe"]["data"]
    corpus = prepare(data, records=checkpoint.training.get("recipe", {}).get("records", False))
    expected = checkpoint.training.get("data", {}).get("sha256")
    if corpus.sha256 != expected:
        raise ConfigError(
            f"{' '.join(data)} is not the text that {checkpoint.path} was trained on: "
            f"SHA-256 {corpus.sha256}, not {expected}"
        )
    return recode(corpus, checkpoint.tokenizer)


def load_model(args: argparse.Namespace) -> tuple[Checkpoint, GPT]:
    import torch

    from service.model.checkpoint import Checkpoint
    from training.loop import pick_device

    if args.threads:
        torch.set_num_threads(args.threads)
    checkpoint = Checkpoint.read(args.checkpoint)
    return checkpoint, checkpoint.load_model(pick_device(args.device))


def main() -> int:
    # GNU OpenMP's threads spin while they wait, which slows a step where another program wants the core; this many
    # turns cost nothing alone (RECIPE.md). Read when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    args = build_parser().parse_args()
    from service.model.checkpoint import CheckpointError
    from service.model.tokenizer import UnknownCharacterError
    from training.data import DataError
    from training.distributed import LostProcessError
    from training.loop import DivergedError, InterruptedRun
    from training.state import ResumeError

    refusals = (
        ConfigError,
        DataError,
        ResumeError,
        CheckpointError,
        UnknownCharacterError,
        DivergedError,
        LostProcessError,
        OSError,
    )
    try:
        args.run(args)
    except InterruptedRun as stop:
        print(stop, file=sys.stderr)
        return 128 + stop.number
    except BrokenPipeError:
        # Whoever read the output, say `head`, has enough; nor must the interpreter flush what is left at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except refusals as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        status = main()
        from training.distributed import leave

        leave(status)
        sys.exit(status)
    except KeyboardInterrupt:  # also while torch is being imported
        sys.exit(130)
