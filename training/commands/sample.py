"""The command `sample`, and bulk sampling: many continuations of one prompt, batched through the engine.

Text i has seed `--seed` + i, so that each text can be reproduced alone.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import Progress

from service.local import Acceptance, Answer, Model, RequestError, Sample
from service.model.checkpoint import Checkpoint
from service.model.gpt import GPT
from service.text.model import TextModel
from service.text.requests import MAX_ID
from service.text.work import run
from training.commands.inputs import encoder_of, refusing, report_unknown, training_corpus, unknown_options
from training.commands.rows import write_rows
from training.config import MAX_CANDIDATES, ConfigError
from training.messages import Refusal, plural, unescaped, visible
from training.model.loading import load_model, open_model
from training.text.corpus import Corpus
from training.text.records import separator_between, splitting_of

MAX_RUNNING = 128
# Consecutive texts that may be skipped before sampling gives up: per requested text, and at most.
SKIPPED_PER_TEXT, MAX_SKIPPED = 100, 10_000


class ExhaustedError(Refusal):
    """Fewer distinct or novel texts were found than requested."""


def command(args: argparse.Namespace) -> None:
    check_counts(args)
    if args.prompt == "":
        raise ConfigError("--prompt must not be empty")
    checkpoint, gpt = load_model(args)
    text = TextModel.of(checkpoint)
    encoder = encoder_of(text.tokenizer, **unknown_options(args))
    with opened(checkpoint, gpt, text, args) as model:
        given = text.tokenizer.decode(run(encoder.encode(unescaped(args.prompt or ""), "prompt")))
        if not given:
            given = first_prompt(text)
        is_novel = novelty(args, checkpoint, given) if args.novel else None
        sample = sample_of(model, args, request_of(args, text, given), args.unique or args.novel)
        report_unknown(encoder.replaced, encoder.dropped)
        started = time.monotonic()
        answers = kept(sample, args.n, args.unique, is_novel)
        characters = write(answers, args.n, args.format, given, between(args, checkpoint))
    report_cost(sample)
    if args.n > 1:
        seconds = time.monotonic() - started
        speed = f"{plural(characters, 'character')} in {seconds:.1f} s, {characters / seconds:,.0f} characters/s"
        print(f"{plural(args.n, 'text')}: {speed}", file=sys.stderr)


@contextlib.contextmanager
def opened(checkpoint: Checkpoint, gpt: GPT, text: TextModel, args: argparse.Namespace) -> Iterator[Model]:
    """Open a model for -n texts. Errors of requests name flags."""
    slots = MAX_RUNNING if args.exact else min(args.n, MAX_RUNNING)
    device = str(gpt.head.weight.device)
    with refusing(), open_model(gpt, text, slots, device, checkpoint.load_counts()) as model:
        yield model


def check_counts(args: argparse.Namespace) -> None:
    if args.n < 1 or args.max_tokens < 1:
        raise ConfigError(f"-n and --max-tokens must be at least 1, got {args.n} and {args.max_tokens}")
    if args.exact and args.regex is None:
        raise ConfigError("--exact needs --regex")
    if args.max_candidates is not None:
        if not args.exact:
            raise ConfigError("--max-candidates needs --exact")
        if args.max_candidates < 1:
            raise ConfigError(f"--max-candidates must be at least 1, got {args.max_candidates}")


def request_of(args: argparse.Namespace, text: TextModel, prompt: str) -> dict[str, Any]:
    """Return the fields of the request. A text goes on after the end of a record if other stops are given."""
    stops = [unescaped(stop) for stop in args.stop]
    names = ("max_tokens", "seed", "temperature", "top_k", "top_p", "min_p", "typical_p", "regex", "stop_regex")
    fields = {name: getattr(args, name) for name in names} | {"prompt": prompt, "stop": stops}
    has_other_stop = (stops or args.stop_regex is not None) and text.record_end_character not in stops
    return fields | {"ignore_eos": args.ignore_eos or bool(has_other_stop)}


def first_prompt(text: TextModel) -> str:
    """Return the prompt of a text that has none: "", or the first character of a vocabulary without line breaks."""
    is_begun = text.record_end is not None or "\n" in text.tokenizer
    return "" if is_begun else text.tokenizer.characters[0]


def between(args: argparse.Namespace, checkpoint: Checkpoint) -> str:
    """Return what is printed between two texts."""
    separator, _, end = splitting_of(checkpoint)
    if end not in ("", "\n"):
        return separator_between(separator, end)
    is_short = end or args.stop or args.stop_regex is not None or args.regex is not None
    return "\n" if is_short else "\n\n"


def novelty(args: argparse.Namespace, checkpoint: Checkpoint, given: str) -> Callable[[str], bool]:
    """Return a function that tells whether a text that continues `given` is not in the training text."""
    is_known = known_lines(training_corpus(checkpoint, args))
    end = splitting_of(checkpoint).end or "\n"
    return lambda text: not is_known((given + text).removeprefix(end))


def write(answers: Iterable[Answer], count: int, form: str, given: str, between: str) -> int:
    """Print texts in a form of --format, with progress, and return the number of characters sampled."""
    characters = 0
    # Texts go to standard output, which may be a file; rich would send them to the console.
    console = Console(stderr=True)
    is_hidden = not console.is_terminal or count == 1 or sys.stdout.isatty()
    bar = Progress(console=console, disable=is_hidden, redirect_stdout=False)

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal characters
        for answer in bar.track(answers, total=count, description="texts"):
            characters += len(answer.text)
            yield {"text": given + answer.text, "seed": answer.seed}

    with bar:
        if form != "text":
            write_rows(rows(), ("text", "seed"), form)
            return characters
        try:
            for number, row in enumerate(rows()):
                text = (between if number else "") + row["text"]
                print(visible(text) if sys.stdout.isatty() else text, end="")
        finally:  # before an error's line too
            print(flush=True)
    return characters


def acceptance(cost: Acceptance) -> str:
    """Return a line for the user about the cost of exact texts."""
    share = cost.matches / max(1, cost.candidates)
    counts = f"{cost.matches:,} of {plural(cost.candidates, 'candidate')}"
    return f"acceptance {100 * share:.3g} %: {counts} matched, {plural(cost.characters, 'character')} were sampled"


def report_cost(sample: Sample) -> None:
    if sample.exact is not None:
        print(acceptance(sample.exact), file=sys.stderr)


def known_lines(corpus: Corpus) -> Callable[[str], bool]:
    """Return a function that tells whether a text is a record or a line of either split of the training text.

    A text of several records or lines must occur with them in the same order, one after another.
    """
    text, end = corpus.tokenizer.decode_array(corpus.ids), corpus.record_end or "\n"
    known, text = set(text.split(end)), f"{end}{text}{end}"
    return lambda it: f"{end}{it}{end}" in text if end in it else it in known


def sample_of(model: Model, args: argparse.Namespace, fields: dict[str, Any], has_filter: bool = False) -> Sample:
    """Return the first -n answers to a request in the order of their seeds; all, if a filter will keep -n of them.

    Raises:
        RequestError: the request is invalid.
    """
    if not args.exact:
        return model.sample(MAX_ID if has_filter else args.n, **fields)
    each = args.max_candidates or MAX_CANDIDATES
    count, each = (args.n * each, 1) if has_filter else (args.n, each)
    return model.sample(count, exact=True, max_candidates=each, max_candidate_characters=MAX_ID, **fields)


def kept(
    sample: Sample, count: int, unique: bool = False, is_novel: Callable[[str], bool] | None = None
) -> Iterator[Answer]:
    """Yield `count` answers of a sample.

    Repeated texts are skipped if `unique` is true, and texts for which `is_novel` returns False are skipped too.

    Raises:
        ExhaustedError: more than SKIPPED_PER_TEXT · count or MAX_SKIPPED consecutive texts were skipped, or too few
            candidates of exact answers match.
    """
    seen: set[str] = set()
    found = skipped = 0  # skipped: since the last new text
    try:
        for answer in sample:
            if (unique and answer.text in seen) or (is_novel is not None and not is_novel(answer.text)):
                skipped += 1
                if skipped > min(SKIPPED_PER_TEXT * count, MAX_SKIPPED):
                    kind = " ".join(["distinct"] * unique + ["novel"] * (is_novel is not None))
                    raise ExhaustedError(
                        f"found only {plural(found, f'{kind} text')} of {count:,} requested; raise the temperature or "
                        "request fewer"
                    )
                continue
            skipped = 0
            if unique:
                seen.add(answer.text)
            found += 1
            yield answer
            if found == count:
                break
    except RequestError as error:
        if error.code != "too_few_matches":
            raise
    cost = sample.exact
    if found < count and cost is not None:
        raise ExhaustedError(
            f"found only {plural(found, 'text')} of {count:,} requested: {acceptance(cost)}; raise --max-candidates, "
            "loosen --regex or request fewer"
        )
