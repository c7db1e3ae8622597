"""The commands: python -m training prepare | train | evaluate | sample | score | report | export | lecture.

python -m training train --data FILE --out DIR --preset quick
python -m training train --resume --out DIR
python -m training train --init-from DIR/best --data FILE --out DIR2
python -m training evaluate --checkpoint DIR/best --data FILE
python -m training sample --checkpoint DIR/best --prompt "ROMEO:" -n 3
python -m training score --checkpoint DIR/best --data FILE > scores.jsonl
python -m training report --checkpoint DIR/best
python -m training export --checkpoint DIR/best --to gguf --out model.gguf
python -m training lecture

`chargpt train` and so on run the same commands.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from training.config import DATA_HELP, GLOB_HELP, PRESETS, SHAPE, ConfigError, Device, TrainConfig
from training.messages import plural, program, unescaped

if TYPE_CHECKING:
    from service.model.checkpoint import Checkpoint
    from service.model.gpt import GPT
    from training.data import Corpus
    from training.encoding import Encoder


MAX_REPORTED = 20  # lines that are not scored
ESCAPES = r"\n, \t and \\ stand for a line break, a tab and a backslash"


class Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows every default, except for switches that are off."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Refuses abbreviated flags, so that adding a flag never changes what an existing command means; and says what is
    wrong in a line, without a page of usage.
    """

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, formatter_class=Formatter, **options)

    def parse_args(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser: argparse.ArgumentParser = parsed.parser
            flags = [flag for action in parser._actions for flag in action.option_strings]
            close = difflib.get_close_matches(unknown[0], flags, n=1)
            parser.error(f"unknown argument {unknown[0]}" + (f"; did you mean {close[0]}?" if close else ""))
        return parsed

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\nAll flags: {self.prog} --help\n")


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per field of TrainConfig; a flag that is not given is absent from the namespace."""
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
        shown = " ".join(field.default) or "none" if isinstance(field.default, tuple) else field.default
        default = ", ".join([f"default {shown}".replace("None", "none"), *changed])
        parser.add_argument(f"--{field.name.replace('_', '-')}", help=f"{help} ({default})", **options)


def build_parser() -> Parser:
    parser = Parser(prog=program(), description="Train a character-level GPT on a text.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Any, help: str) -> Parser:
        added: Parser = commands.add_parser(name, help=help, description=help)
        added.set_defaults(run=run, parser=added)
        return added

    p = command("prepare", run_prepare, "encode a text into the cache; train does this too")
    add_data_flags(p, DATA_HELP, default=["tinyshakespeare"])
    p.add_argument("--records", action="store_true", help="each line is a record; every tenth goes to validation")

    p = command("train", run_train, "train a model; losses are in nats per character")
    p.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="the run's folder")
    p.add_argument("--preset", choices=PRESETS, help="defaults of the other flags (default: cpu)")
    p.add_argument("--resume", action="store_true", help="continue the run in --out, with its settings")
    p.add_argument("--overwrite", action="store_true", help="replace the run in --out")
    add_config_flags(p)

    p = command("evaluate", run_evaluate, "measure a checkpoint's loss on a text")
    add_model_flags(p)
    add_data_flags(p, f"{DATA_HELP} (default: the validation split of the training text)")
    add_unknown_flags(p, "--data")

    p = command("sample", run_sample, "generate texts from a checkpoint")
    add_model_flags(p)
    add_sampling_flags(p, n=1, max_tokens=500)
    p.add_argument(
        "--prompt", help=rf"text to continue (default: a line break, or the first character); {ESCAPES}", metavar="TEXT"
    )
    p.add_argument("--temperature", type=float, default=1.0, help="sampling temperature; 0: greedy")
    p.add_argument("--top-k", type=int, default=0, help="sample from the k likeliest characters; 0: all")
    p.add_argument(
        "--top-p", type=float, default=1.0, help="sample from the likeliest characters up to this total probability"
    )
    p.add_argument(
        "--min-p", type=float, default=0.0, help="sample from characters at least this probable beside the likeliest"
    )
    p.add_argument(
        "--typical-p", type=float, default=1.0, help="sample from the most typical characters with this probability"
    )
    p.add_argument(
        "--stop", action="append", default=[], metavar="TEXT",
        help=rf"end a text before this string; repeatable (default for records: a line break); {ESCAPES}",
    )  # fmt: skip
    p.add_argument("--stop-regex", metavar="REGEX", help="end a text before the first match of this regular expression")
    p.add_argument("--regex", help="what follows the prompt matches this regular expression as a whole")
    add_unknown_flags(p, "the prompt")
    p.add_argument("--unique", action="store_true", help="skip duplicate texts")
    p.add_argument("--novel", action="store_true", help="skip texts that are lines of the training text")
    add_data_flags(p, f"of --novel, the training text: {DATA_HELP} (default: where the run read it)")
    p.add_argument("--format", choices=("text", "jsonl"), default="text", help="plain texts, or JSON lines with seeds")

    p = command("score", run_score, "print the log-likelihood of each line of a text, as JSON lines")
    add_model_flags(p)
    p.add_argument("--data", type=Path, required=True, metavar="FILE", help="a UTF-8 text file")
    p.add_argument(
        "--records",
        action="store_true",
        help="score each line from the line break before it to its own, as a record is trained on; without it the "
        "first character of a line is not scored, and the line break is no part of it, as for texts of /v1/score",
    )
    add_unknown_flags(p, "lines")

    p = command("report", run_report, "measure how much generated text is copied from the training text")
    add_model_flags(p)
    add_sampling_flags(p, n=None, max_tokens=5000)
    p.add_argument("--regex", help="for records: valid ones match this regular expression (Python's) as a whole")
    p.add_argument(
        "--command",
        "--check",
        dest="check",
        metavar="CMD",
        help="for records: a command that prints the valid ones of its input",
    )
    add_data_flags(p, f"the training text: {DATA_HELP} (default: where the run read it)")
    p.add_argument(
        "--html", type=Path, metavar="FILE", help="the page to write (default: report.html in the run's folder)"
    )

    p = command("export", run_export, "convert a checkpoint to GGUF or ONNX")
    add_checkpoint_flag(p)
    p.add_argument("--to", choices=("gguf", "onnx"), required=True, help="gguf: llama.cpp; onnx: onnxruntime")
    p.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file to write")

    p = command("lecture", run_lecture, "show how it works, from a table of bigrams to attention, on a text")
    add_data_flags(p, DATA_HELP, default=["tinyshakespeare"])
    p.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="the full model at the end (default: the bundled one)"
    )
    p.add_argument("--steps", type=int, default=10_000, help="training steps of the bigram table; of one head, half")
    p.add_argument("--seed", type=int, default=1337, help="seed of all that is random")
    p.add_argument("--out", type=Path, default=Path("out/lecture.png"), metavar="FILE", help="the picture to write")
    return parser


def add_checkpoint_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR", help="a checkpoint folder, or a run's, for its best"
    )


def add_data_flags(parser: argparse.ArgumentParser, help: str, default: list[str] | None = None) -> None:
    parser.add_argument("--data", nargs="+", default=default, help=help)
    parser.add_argument("--glob", nargs="+", metavar="GLOB", help=GLOB_HELP)


def add_unknown_flags(parser: argparse.ArgumentParser, where: str) -> None:
    """Read by `encoder_of`."""
    parser.add_argument(
        "--unknown-characters", choices=("refuse", "replace", "drop"), default="refuse",
        help=f"for characters of {where} outside the vocabulary",
    )  # fmt: skip
    parser.add_argument(
        "--replacement-character", default=" ", metavar="TEXT", help=f"of --unknown-characters replace; {ESCAPES}"
    )


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """The checkpoint and where it runs, read by `load_model`."""
    add_checkpoint_flag(parser)
    parser.add_argument("--device", choices=get_args(Device), default="auto", help="auto: cuda, else mps, else cpu")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: OMP_NUM_THREADS, else one per core")


def add_sampling_flags(parser: argparse.ArgumentParser, *, n: int | None, max_tokens: int) -> None:
    default = "" if n else " (default: 20, of records 1000)"
    parser.add_argument("-n", type=int, default=n, help=f"number of texts{default}")
    parser.add_argument("--max-tokens", type=int, default=max_tokens, help="characters per text")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first text; each further text adds 1")


def check_sampling_flags(args: argparse.Namespace) -> None:
    if args.n < 1 or args.max_tokens < 1:
        raise ConfigError(f"-n and --max-tokens must be at least 1, got {args.n} and {args.max_tokens}")


def run_prepare(args: argparse.Namespace) -> None:
    from training.data import cache_dir, prepare

    corpus = prepare(args.data, records=args.records, glob=args.glob or ())
    print(
        f"{corpus.name}: {plural(len(corpus.ids), 'character')}, {plural(corpus.symbols, 'symbol')}; "
        f"{len(corpus.train):,} for training, {len(corpus.val):,} for validation\n"
        f"SHA-256 {corpus.sha256}, encoded in {cache_dir() / 'corpora'}"
    )
    print(*corpus.notes, sep="\n", end="\n" if corpus.notes else "")


def run_train(args: argparse.Namespace) -> None:
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    flags = {name: value for name, value in vars(args).items() if name in names}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in flags.items()}
    try:
        _train(args, dict(given))
    except ConfigError as error:
        name, _, rest = str(error).partition(" ")
        if name not in given:
            raise
        raise ConfigError(f"--{name.replace('_', '-')} {rest}") from None  # as the user typed it


def _train(args: argparse.Namespace, given: dict[str, Any]) -> None:
    from rich.console import Console

    from training import jobs
    from training.finetune import checkpoint_shape
    from training.recipe import SETTINGS

    console = Console(stderr=True, highlight=False)
    # A resumed run no longer needs the one it began from, so that may be gone.
    if "init_from" in given:
        given["init_from"] = str(find_checkpoint(Path(given["init_from"])))
    if "teachers" in given:
        given["teachers"] = tuple(str(find_checkpoint(Path(path))) for path in given["teachers"])
    if args.resume and args.overwrite:
        raise ConfigError("--resume continues a run, --overwrite replaces it; pass only one of them")
    if args.resume:
        data = given.pop("data", None)
        if args.preset:
            wanted = TrainConfig.from_preset(args.preset, **given).as_dict()
            # The shape is the checkpoint's, not the preset's, and the checkpoint may be gone by now.
            fixed = {*SHAPE, "window_stages"} if "init_from" in given else set()
            # So may what the text was too small for.
            left_out = {"data", *((fixed | SETTINGS) - set(given))}
            given = {name: value for name, value in wanted.items() if name not in left_out}
        jobs.resume(args.out, given, console, data=data)
    else:
        if "init_from" in given:
            given = checkpoint_shape(given["init_from"]) | {"window_stages": 1} | given  # it has seen whole windows
        config = TrainConfig.from_preset(args.preset or "cpu", **given)
        jobs.start(config, args.out, console, overwrite=args.overwrite, adaptable=SETTINGS - given.keys())


def run_evaluate(args: argparse.Namespace) -> None:
    from training.data import encode_files, find_texts
    from training.evaluate import bits, split_losses

    checkpoint, model = load_model(args)
    records = checkpoint.record_end is not None
    train = None
    if args.data is None:
        corpus = training_corpus(checkpoint, args)
        ids, train, scored = corpus.val, corpus.train, f"validation split of {corpus.name}"
    else:
        notes: set[str] = set()
        files = find_texts(args.data, args.glob or (), notes)
        encoder = encoder_of(args, checkpoint)
        ids, scored = encode_files(files, encoder, records=records), " ".join(args.data)
        report_unknown(encoder)
        print(*sorted(notes), sep="\n", end="\n" if notes else "")
    print(f"{scored}: {plural(len(ids), 'character')}, all but the first scored")
    for name, loss in split_losses(model, ids, records=records, train=train).items():
        print(f"{name:<9} {loss:.4f} nats  {bits(loss):.4f} bits per character")


def run_sample(args: argparse.Namespace) -> None:
    import json

    from rich.console import Console
    from rich.progress import track

    from service.model.params import SamplingParams
    from service.model.tokenizer import UnknownCharacterError
    from training.encoding import compile_pattern
    from training.sample import ExhaustedError, sample_texts

    check_sampling_flags(args)
    if args.prompt == "":
        raise ConfigError("--prompt must not be empty")
    if args.regex is not None and (args.stop or args.stop_regex is not None):
        raise ConfigError(
            "--regex cannot be combined with --stop or --stop-regex, which could end a text before a match"
        )
    try:
        params = SamplingParams(
            args.temperature, args.top_k, args.top_p, args.seed, min_p=args.min_p, typical_p=args.typical_p
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    checkpoint, model = load_model(args)
    tokenizer, encoder = checkpoint.tokenizer, encoder_of(args, checkpoint)
    # Without a prompt, what precedes a text; a model of texts without line breaks begins with its first character.
    begins = "\n" if "\n" in tokenizer else tokenizer.characters[0]
    try:
        prompt = encoder.encode(unescaped(args.prompt or ""))
    except UnknownCharacterError as error:
        raise ConfigError(f"--prompt: {error}") from None
    given = tokenizer.decode(prompt)
    if not given and begins != "\n":
        given = begins
    prompt = prompt or tokenizer.encode(begins)
    end = checkpoint.record_end
    if end is not None and prompt[0] != end:
        prompt = [end, *prompt]  # a record begins after the line break of the one before
    stops = [unescaped(text) for text in args.stop]
    if end is not None and not stops and args.stop_regex is None and args.regex is None:
        stops = ["\n"]
    if "" in stops:
        raise ConfigError("--stop must not be empty")
    try:
        stop = tuple(tuple(tokenizer.encode(text)) for text in stops)
    except UnknownCharacterError as error:
        raise ConfigError(f"--stop: {error}") from None
    stop_pattern = constraint = None
    if args.stop_regex is not None:
        stop_pattern = compile_pattern("--stop-regex", args.stop_regex, tokenizer).pack()
    if args.regex is not None:
        automaton = compile_pattern("--regex", args.regex, tokenizer)
        if automaton.min_length > args.max_tokens:
            raise ConfigError(
                f"--regex: the shortest match has {plural(automaton.min_length, 'character')}, --max-tokens is "
                f"{args.max_tokens:,}"
            )
        constraint = automaton.pack()
    is_known = known_lines(training_corpus(checkpoint, args)) if args.novel else None
    texts = sample_texts(
        model, prompt, args.n, args.max_tokens, params,
        stop=stop, stop_pattern=stop_pattern, constraint=constraint, unique=args.unique,
        is_novel=is_known and (lambda ids: not is_known(given + tokenizer.decode(ids))),
        device=str(model.head.weight.device),
    )  # fmt: skip
    report_unknown(encoder)
    console = Console(stderr=True)
    shown = track(texts, "texts", total=args.n, console=console, disable=not console.is_terminal or args.n == 1)
    separator = "\n" if stops or args.stop_regex is not None or args.regex is not None else "\n\n"
    started, characters = time.monotonic(), 0
    try:
        for number, (seed, ids) in enumerate(shown):
            characters += len(ids)
            text = given + tokenizer.decode(ids)
            if args.format == "jsonl":
                print(json.dumps({"text": text, "seed": seed}, ensure_ascii=False))
            else:
                print(separator if number else "", text, sep="", end="")
        if args.format == "text":
            print()
        if args.n > 1:
            seconds = time.monotonic() - started
            speed = f"{plural(characters, 'character')} in {seconds:.1f} s, {characters / seconds:,.0f} characters/s"
            print(f"{plural(args.n, 'text')}: {speed}", file=sys.stderr)
    except ExhaustedError as error:
        raise ConfigError(str(error)) from None


def run_score(args: argparse.Namespace) -> None:
    import json

    from training.data import DataError, read_lines
    from training.score import score_lines

    checkpoint, model = load_model(args)
    encoder = encoder_of(args, checkpoint)
    num_scored = num_refused = 0

    def refused(number: int, reason: str) -> None:
        nonlocal num_refused
        num_refused += 1
        if num_refused <= MAX_REPORTED:
            print(f"line {number:,}: {reason}", file=sys.stderr)

    for record in score_lines(model, encoder, read_lines(args.data), records=args.records, refused=refused):
        num_scored += 1
        print(json.dumps(record, ensure_ascii=False))
    report_unknown(encoder)
    if checkpoint.record_end is not None and not args.records:
        print("the model was trained on records: --records scores each line as one", file=sys.stderr)
    if num_refused:
        more = f", the first {MAX_REPORTED} of which are named above" if num_refused > MAX_REPORTED else ""
        raise DataError(f"{plural(num_refused, 'line')} of {num_scored + num_refused:,} not scored{more}")


def run_report(args: argparse.Namespace) -> None:
    from rich.console import Console

    from training import report
    from training.display import print_copies
    from training.page import write_page

    args.checkpoint = find_checkpoint(args.checkpoint)
    out = args.checkpoint.parent
    is_run = (out / "log.jsonl").is_file()
    checkpoint, model = load_model(args)
    are_records = checkpoint.record_end is not None
    if args.n is None:
        args.n = 1000 if are_records else 20
    check_sampling_flags(args)
    if (args.check is not None or args.regex is not None) and not are_records:
        raise ConfigError("--regex and --command are for models of records")
    corpus = training_corpus(checkpoint, args)
    try:
        found = report.examine(model, corpus, args.n, args.max_tokens, args.seed, args.regex, args.check)
    except report.CheckError as error:
        raise ConfigError(str(error)) from None
    print_copies(Console(highlight=False), found.columns)
    if page := args.html or (out / "report.html" if is_run else None):
        write_page(page, checkpoint, corpus, found, out if is_run else None)
        print(f"report {page}", file=sys.stderr)


def run_export(args: argparse.Namespace) -> None:
    from service.model.checkpoint import Checkpoint
    from training.export import export

    try:
        export(Checkpoint.read(find_checkpoint(args.checkpoint)), args.to, args.out)
    except ModuleNotFoundError as error:
        raise ConfigError(f"--to {args.to} needs the package {error.name}; pip install -e '.[export]'") from None
    print(f"{args.out}: {plural(args.out.stat().st_size, 'byte')}")


def run_lecture(args: argparse.Namespace) -> None:
    from service.model import checkpoint as module
    from training.data import prepare
    from training.lecture import give

    if args.steps < 1:
        raise ConfigError(f"--steps must be at least 1, got {args.steps}")
    bundled = Path(module.__file__).parents[1] / "checkpoints" / "tinyshakespeare"
    checkpoint = module.Checkpoint.read(find_checkpoint(args.checkpoint) if args.checkpoint else bundled)
    give(prepare(args.data, glob=args.glob or ()), checkpoint, args.out, steps=args.steps, seed=args.seed)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at `path`; of a run's folder its best, which a line says.

    Raises:
        ConfigError: a run's folder has no best yet.
    """
    from service.model.checkpoint import MANIFEST

    if (path / MANIFEST).is_file():
        return path
    if (path / "best" / MANIFEST).is_file():
        print(f"{path} is a run's folder: taking its best, {path / 'best'}", file=sys.stderr)
        return path / "best"
    if (path / "last" / MANIFEST).is_file():
        raise ConfigError(
            f"{path} is the folder of a run that has no best yet, as it was not evaluated; its newest weights are "
            f"{path / 'last'}"
        )
    return path


def encoder_of(args: argparse.Namespace, checkpoint: Checkpoint) -> Encoder:
    from training.encoding import Encoder

    return Encoder(checkpoint.tokenizer, args.unknown_characters, unescaped(args.replacement_character))


def report_unknown(encoder: Encoder) -> None:
    if encoder.num_unknown:
        done = "replaced" if encoder.policy == "replace" else "dropped"
        print(f"{plural(encoder.num_unknown, 'unknown character')} {done}", file=sys.stderr)


def known_lines(corpus: Corpus) -> Callable[[str], bool]:
    """Whether a text is a line of the training text, of either split, or several consecutive ones."""
    text = corpus.tokenizer.decode_array(corpus.ids)
    lines, text = set(text.split("\n")), f"\n{text}\n"
    return lambda it: f"\n{it}\n" in text if "\n" in it else it in lines


def training_corpus(checkpoint: Checkpoint, args: argparse.Namespace) -> Corpus:
    """The text a checkpoint was trained on, in its vocabulary, read from `--data` or from where the run read it.

    Raises:
        ConfigError: the checkpoint does not record its training text, or `--data` is a different one.
    """
    from training.data import prepare, recode

    data, glob = args.data, args.glob
    if data is None:
        if "recipe" not in checkpoint.training:
            raise ConfigError(f"{checkpoint.path / 'training.json'} does not record the training text; pass --data")
        data = checkpoint.training["recipe"]["data"]
    if glob is None:
        glob = checkpoint.training.get("recipe", {}).get("glob", ())
    corpus = prepare(data, records=checkpoint.record_end is not None, glob=glob)
    expected = checkpoint.training.get("data", {}).get("sha256")
    if corpus.sha256 != expected:
        raise ConfigError(
            f"{' '.join(data)} is not the training text of {checkpoint.path}: "
            f"SHA-256 {corpus.sha256}, expected {expected}"
        )
    if corpus.describe()["split"] != checkpoint.training["data"].get("split"):
        raise ConfigError(
            f"{checkpoint.path} was trained by an older version, which shuffled records in another order: it is not "
            "known which of them it has seen"
        )
    return recode(corpus, checkpoint.tokenizer)


def load_model(args: argparse.Namespace) -> tuple[Checkpoint, GPT]:
    import torch

    from service.model.checkpoint import Checkpoint
    from training.device import pick_device

    if args.threads:
        torch.set_num_threads(args.threads)
    checkpoint = Checkpoint.read(find_checkpoint(args.checkpoint))
    return checkpoint, checkpoint.load_model(pick_device(args.device))


def main() -> int:
    """Exit status: 0, 1 for a refusal, 2 for a bad command line, 128 + n after signal n."""
    # Threads of GNU OpenMP spin while waiting, which slows a step when another program needs the core; this many
    # spins cost nothing otherwise (RECIPE.md). Read when torch is imported.
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
        # The reader, `head` for example, closed the pipe; keep the interpreter from flushing into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except refusals as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        if "out of memory" not in str(error).lower():
            raise
        remedy = "--accumulate 2 computes a batch in two parts; or choose a smaller --batch-size"
        print(f"error: the device's memory is full: {remedy}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        status = main()
        from training.distributed import exit_if_distributed

        exit_if_distributed(status)
        sys.exit(status)
    except KeyboardInterrupt:  # also during the import of torch
        sys.exit(130)
