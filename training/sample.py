"""The command `sample`, and bulk sampling: many continuations of one prompt, batched through the engine.

Text i has seed `params.seed + i`, so that each text can be reproduced alone.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import msgspec
import torch
from rich.console import Console
from rich.progress import Progress

from service.constrain.automaton import MinimumLength
from service.constrain.regex import RegexError, compile_regex, ended
from service.engine.engine import Engine
from service.model.checkpoint import Checkpoint
from service.model.gpt import GPT
from service.model.params import MAX_SEED, SamplingParams
from service.model.tokenizer import RECORD_SEPARATOR, CharTokenizer, UnknownCharacterError
from service.text.exact import Bounds, Ending, Exact
from service.wire import Submit
from training.config import MAX_CANDIDATES, ConfigError
from training.data import Corpus
from training.inputs import Encoder, compile_pattern, load_model, splitting_of, training_corpus
from training.messages import Refusal, plural, unescaped, visible
from training.records import separator_between
from training.rows import write_rows
from training.selfcheck import checked_runner

MAX_RUNNING = 128
# Consecutive texts that may be skipped before sampling gives up: per requested text, and at most.
SKIPPED_PER_TEXT, MAX_SKIPPED = 100, 10_000


@dataclass
class Drawn:
    """The cost of exact texts so far."""

    candidates: int = 0
    matches: int = 0
    characters: int = 0


class ExhaustedError(Refusal):
    """Fewer distinct or novel texts were found than requested."""


def command(args: argparse.Namespace) -> None:
    check_counts(args)
    params = parameters(args)
    checkpoint, model = load_model(args)
    params = msgspec.structs.replace(params, logit_bias=checkpoint.tokenizer.sampling_bias)
    encoder = Encoder.of(args, checkpoint)
    plan = Plan.of(args, checkpoint, encoder)
    drawn = Drawn() if args.exact else None
    texts = sample_texts(
        model, plan.prompt, args.n, args.max_tokens, params,
        stop=plan.stop, stop_pattern=plan.stop_pattern, condition=plan.condition, begins=plan.begins,
        unique=args.unique, is_novel=novelty(args, checkpoint, plan.given) if args.novel else None,
        drawn=drawn, tokenizer=checkpoint.tokenizer, max_candidates=args.max_candidates or MAX_CANDIDATES,
        device=str(model.head.weight.device),
    )  # fmt: skip
    encoder.report()
    started = time.monotonic()
    characters = write(texts, args.n, args.format, plan, checkpoint.tokenizer)
    if drawn is not None:
        print(acceptance(drawn), file=sys.stderr)
    if args.n > 1:
        seconds = time.monotonic() - started
        speed = f"{plural(characters, 'character')} in {seconds:.1f} s, {characters / seconds:,.0f} characters/s"
        print(f"{plural(args.n, 'text')}: {speed}", file=sys.stderr)


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


def parameters(args: argparse.Namespace) -> SamplingParams:
    """Return the sampling parameters.

    Raises:
        ConfigError: arguments are out of bounds or exclude each other.
    """
    if args.prompt == "":
        raise ConfigError("--prompt must not be empty")
    if args.regex is not None and (args.stop or args.stop_regex is not None):
        raise ConfigError(
            "--regex cannot be combined with --stop or --stop-regex, which could end a text before a match"
        )
    try:
        return SamplingParams(
            args.temperature, args.top_k, args.top_p, args.seed, min_p=args.min_p, typical_p=args.typical_p
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


class Plan(NamedTuple):
    """How texts begin and end, and the separator between them."""

    prompt: list[int]  # the ids that the model continues
    given: str  # the part of the prompt that is printed
    stop: tuple[tuple[int, ...], ...]
    stop_pattern: bytes | None
    condition: Condition | None
    begins: bytes | None  # packed automaton of the first character, so that no record is empty
    between: str  # printed between two texts

    @classmethod
    def of(cls, args: argparse.Namespace, checkpoint: Checkpoint, encoder: Encoder) -> Plan:
        """Return the plan for the arguments.

        Raises:
            ConfigError: a prompt, stop or pattern is impossible for this model.
        """
        tokenizer, end = checkpoint.tokenizer, checkpoint.record_end
        separator, _, end_character = splitting_of(checkpoint)
        is_plain = args.stop_regex is None and args.regex is None
        stops = [unescaped(text) for text in args.stop] or [end_character] * (end is not None and is_plain)
        if "" in stops:
            raise ConfigError("--stop must not be empty")
        # As in the service, a stop is dropped if the model lacks one of its characters, because it never occurs.
        stop = tuple(tuple(tokenizer.encode(text)) for text in stops if all(c in tokenizer for c in text))
        try:
            prompt = encoder.encode(unescaped(args.prompt or "")).tolist()
        except UnknownCharacterError as error:
            raise ConfigError(f"--prompt: {error}") from None
        given = tokenizer.decode(prompt)
        if end is not None:  # a record begins after the end of the previous one
            prompt = prompt if prompt[:1] == [end] else [end, *prompt]
        elif not prompt:  # a text begins after a line break, or with the first character of a model without line breaks
            first = "\n" if "\n" in tokenizer else tokenizer.characters[0]
            prompt, given = tokenizer.encode(first), first.strip("\n")
        is_begun = end is None or prompt[-1] != end or (end,) not in stop
        stop_pattern, condition = None, None
        if args.stop_regex is not None:
            automaton = compile_pattern("--stop-regex", args.stop_regex, tokenizer, checkpoint.text_characters)
            stop_pattern = automaton.pack()
        if args.regex is not None:
            condition = Condition.of(args.regex, tokenizer, args.max_tokens, end, is_empty=prompt[-1] == end)
        between = "\n" if stops or not is_plain else "\n\n"
        if end is not None and end_character != "\n":
            between = separator_between(separator, end_character)
        begins = None if is_begun else beginning_of_record(end_character, tokenizer)
        return cls(prompt, given, stop, stop_pattern, condition, begins, between)


def novelty(args: argparse.Namespace, checkpoint: Checkpoint, given: str) -> Callable[[list[int]], bool]:
    """Return a function that tells whether a completion of `given` is not in the training text."""
    is_known, decode = known_lines(training_corpus(checkpoint, args)), checkpoint.tokenizer.decode
    end = splitting_of(checkpoint)[2] or "\n"
    return lambda ids: not is_known((given + decode(ids)).removeprefix(end))


def write(texts: Iterable[tuple[int, list[int]]], count: int, form: str, plan: Plan, tokenizer: CharTokenizer) -> int:
    """Print texts in a form of --format, with progress, and return the number of characters sampled."""
    characters = 0
    # Texts go to standard output, which may be a file; rich would send them to the console.
    console = Console(stderr=True)
    is_hidden = not console.is_terminal or count == 1 or sys.stdout.isatty()
    bar = Progress(console=console, disable=is_hidden, redirect_stdout=False)

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal characters
        for seed, ids in bar.track(texts, total=count, description="texts"):
            characters += len(ids)
            yield {"text": plan.given + tokenizer.decode(ids), "seed": seed}

    with bar:
        if form != "text":
            write_rows(rows(), ("text", "seed"), form)
            return characters
        try:
            for number, row in enumerate(rows()):
                text = (plan.between if number else "") + row["text"]
                print(visible(text) if sys.stdout.isatty() else text, end="")
        finally:  # before an error's line too
            print(flush=True)
    return characters


def acceptance(drawn: Drawn) -> str:
    """Return a line for the user about the cost of exact texts."""
    share = drawn.matches / max(1, drawn.candidates)
    counts = f"{drawn.matches:,} of {plural(drawn.candidates, 'candidate')}"
    return f"acceptance {100 * share:.3g} %: {counts} matched, {plural(drawn.characters, 'character')} were sampled"


class Condition(NamedTuple):
    """The condition that a text must match, as in Submit."""

    constraint: bytes
    minimum: bytes | None
    may_leave: bool
    stop: tuple[tuple[int, ...], ...]
    num_more: int  # characters of a record's end, which is not part of the text: 0 or 1

    @classmethod
    def of(
        cls, pattern: str, tokenizer: CharTokenizer, max_tokens: int, end: int | None, is_empty: bool = False
    ) -> Condition:
        """Return the condition that a text matches `pattern`, or that a whole record does if `end` is given.

        end: the id that ends a record. is_empty: the record has no character yet.

        Raises:
            ConfigError: the pattern is invalid, its shortest match is longer than max_tokens, or it has no match that
                a record could be.
        """
        characters, minimum, num_more = tokenizer.characters, None, int(end is not None)
        is_separated = end is not None and characters[end] == RECORD_SEPARATOR  # no pattern may match U+001E
        allowed = frozenset(characters) - {RECORD_SEPARATOR} if is_separated else None
        automaton = compile_pattern("--regex", pattern, tokenizer, allowed)
        try:
            automaton = automaton if end is None else ended(automaton, end)
        except RegexError:
            raise ConfigError(
                f"--regex: nothing can match: a record has {tokenizer.characters[end or 0]!r} at its end alone"
            ) from None
        if automaton.min_length - num_more > max_tokens:
            shortest = plural(automaton.min_length - num_more, "character")
            raise ConfigError(f"--regex: the shortest match has {shortest}, --max-tokens is {max_tokens:,}")
        if end is not None and is_empty and automaton.min_length < 2:
            found = MinimumLength.of(automaton, 2, max_tokens + 1)
            if found is None:
                raise ConfigError("--regex: no match has a character, and no record is empty")
            minimum = found.pack()
        return cls(automaton.pack(), minimum, end is None, () if end is None else ((end,),), num_more)


def known_lines(corpus: Corpus) -> Callable[[str], bool]:
    """Return a function that tells whether a text is a record or a line of either split of the training text.

    A text of several records or lines must occur with them in the same order, one after another.
    """
    text, end = corpus.tokenizer.decode_array(corpus.ids), corpus.record_end or "\n"
    known, text = set(text.split(end)), f"{end}{text}{end}"
    return lambda it: f"{end}{it}{end}" in text if end in it else it in known


def beginning_of_record(end: str, tokenizer: CharTokenizer) -> bytes:
    """Return the packed automaton of a record's first character, which is any except the record's end."""
    return compile_regex(f"[^{end}]", tokenizer.characters).pack()


def sample_texts(
    model: GPT,
    prompt: Sequence[int],
    count: int,
    max_tokens: int,
    params: SamplingParams,
    *,
    stop: tuple[tuple[int, ...], ...] = (),
    stop_pattern: bytes | None = None,
    condition: Condition | None = None,
    begins: bytes | None = None,
    unique: bool = False,
    is_novel: Callable[[list[int]], bool] | None = None,
    device: str = "cpu",
    drawn: Drawn | None = None,
    tokenizer: CharTokenizer | None = None,
    max_candidates: int = MAX_CANDIDATES,
) -> Iterator[tuple[int, list[int]]]:
    """Yield (seed, completion) of `count` texts in seed order.

    Repeated texts are skipped if `unique` is true, and texts for which `is_novel` returns False are skipped too.
    stop_pattern: a packed automaton, as in Submit. begins: a packed automaton that only the first character must match;
    a condition takes its place. device: the device of a copy of the model; a run in training samples on the CPU and
    keeps its own device for the steps.
    drawn: counts the cost of exact answers under the condition. If it is given, with the tokenizer, the texts are such
    answers, and at most max_candidates candidates are drawn per text on average.

    Raises:
        ExhaustedError: more than SKIPPED_PER_TEXT · count or MAX_SKIPPED consecutive texts were skipped, or too few
            candidates match.
    """
    running, threads = min(count, MAX_RUNNING) if drawn is None else MAX_RUNNING, torch.get_num_threads()
    runner = checked_runner(model, slots=running, threads=threads, device=device)
    engine = Engine(runner, max_waiting=running)
    shared = Submit(0, list(prompt), max_tokens, params, stop=stop, stop_pattern=stop_pattern)
    if condition is not None:
        shared.constraint, shared.minimum, shared.may_leave, shared.stop, num_more = condition
        shared.max_tokens += num_more
    elif begins is not None:
        shared.constraint, shared.constrains_first = begins, True
    found: Iterator[tuple[int, list[int]]]
    has_filter = unique or is_novel is not None
    if drawn is not None:
        answers = count * max_candidates if has_filter else count
        bounds = Bounds(answers, count * max_candidates, 2**62)
        found = _drawn(engine, shared, bounds, cast(CharTokenizer, tokenizer), drawn)
    else:
        found = _in_order(engine, shared, running, None if has_filter else count)
    seen: set[tuple[int, ...]] = set()
    remaining, skipped = count, 0  # skipped: since the last new text
    for seed, ids in found:
        if (unique and tuple(ids) in seen) or (is_novel is not None and not is_novel(ids)):
            skipped += 1
            if skipped > min(SKIPPED_PER_TEXT * count, MAX_SKIPPED):
                kind = " ".join(["distinct"] * unique + ["novel"] * (is_novel is not None))
                raise ExhaustedError(
                    f"found only {plural(count - remaining, f'{kind} text')} of {count:,} requested; raise the "
                    "temperature or request fewer"
                )
            continue
        skipped = 0
        if unique:
            seen.add(tuple(ids))
        remaining -= 1
        yield seed, ids
        if not remaining:
            return
    assert drawn is not None
    raise ExhaustedError(
        f"found only {plural(count - remaining, 'text')} of {count:,} requested: {acceptance(drawn)}; raise "
        "--max-candidates, loosen --regex or request fewer"
    )


def _drawn(
    engine: Engine, request: Submit, bounds: Bounds, tokenizer: CharTokenizer, drawn: Drawn
) -> Iterator[tuple[int, list[int]]]:
    """Yield (seed, completion) of each exact answer. `drawn` counts the cost."""
    end = tokenizer.decode(request.stop[0]) if request.stop else None
    model: Any = SimpleNamespace(tokenizer=tokenizer, record_end_character=end)
    exact = Exact(model, [request], bounds)
    running: dict[int, list[int]] = {}
    while True:
        for number, _, submit in exact.more(2 * MAX_RUNNING - len(running)):
            submit.id, submit.must_run, running[number] = number, True, []
            engine.submit(submit)
        if not running:
            return
        for delta in engine.step():
            if not exact.is_needed(delta.id):
                continue
            running[delta.id] += delta.ids
            if delta.finish_reason is not None:
                text = tokenizer.decode(running.pop(delta.id))
                answers = exact.ended(delta.id, Ending(text, delta.finish_reason, delta.num_unseen, delta.tried, None))
                drawn.candidates, drawn.matches, drawn.characters = exact.cost
                for answer in answers:
                    yield answer.seed, tokenizer.encode(answer.text)
        for number in exact.take_needless():
            engine.abort(number)
            del running[number]


def _in_order(engine: Engine, shared: Submit, running: int, count: int | None) -> Iterator[tuple[int, list[int]]]:
    """Yield (seed, completion) of `count` texts in seed order, or without end if `count` is None."""
    params, prompt = shared.sampling, shared.prompt
    numbers = itertools.count() if count is None else iter(range(count))
    completions: dict[int, tuple[int, list[int]]] = {}  # (seed, ids) by number, in order
    finished: set[int] = set()
    while count is None or count:
        for number in itertools.islice(numbers, 2 * running - len(engine.scheduler)):
            seed = (params.seed + number) & MAX_SEED
            sampling = msgspec.structs.replace(params, seed=seed)
            engine.submit(msgspec.structs.replace(shared, id=number, prompt=list(prompt), sampling=sampling))
            completions[number] = seed, []
        for delta in engine.step():
            completions[delta.id][1].extend(delta.ids)
            if delta.finish_reason is not None:
                finished.add(delta.id)
        while (first := next(iter(completions), -1)) in finished:
            finished.remove(first)
            yield completions.pop(first)
            count = None if count is None else count - 1
