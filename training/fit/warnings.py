"""Warn before a run, in at most six lines, about a text or a model size that would make training disappoint.

Symbols and the lengths of records are counted in the whole text. All other checks read the first AT_MOST characters of
each split, so that a text may be larger than memory. WARNINGS, at the end, lists them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from service.model.tokenizer import RECORD_SEPARATOR
from training.config import TrainConfig
from training.measure.copies import NGRAM, copied_share
from training.messages import plural
from training.text.batches import record_pieces
from training.text.corpus import Corpus, rare_characters
from training.text.records import BLANK, blocks

AT_MOST = 1 << 22  # characters
MANY_PARAMETERS = 10  # parameters per character of the training split; a model with more memorizes in few epochs
RARE = 5  # occurrences; little can be learned from fewer
MAX_NAMED = 10  # rare symbols named in a warning
RARE_SHARE = 0.05  # share of the parameters that --min-count must save to be suggested
LARGE_VOCABULARY = 1000  # more characters than a text in any alphabetic script has
VAL_CHARACTERS = 1 << 16  # characters of the validation split that are searched for in the training split
MUCH = 0.05  # share of duplicates, or of the validation split that is also in the training split
TABLE_SHARE = 0.95  # share of a table's lines that have the same number of columns
AT_MOST_LINES = 1000  # lines read to recognize a table
MIN_BLOCKS, ALIKE = 10, 2  # least number of groups of lines; characters with which most of them begin
# A list that should be read with --records: characters of its longest line, share of sorted lines, number of lines.
SHORT_LINE, SORTED_SHARE, MIN_LINES = 80, 0.95, 20


@dataclass(frozen=True)
class Subject:
    """What the warnings look at."""

    corpus: Corpus
    config: TrainConfig
    num_parameters: int

    @cached_property
    def text(self) -> str:
        return self.corpus.tokenizer.decode_array(self.corpus.train[:AT_MOST])

    @cached_property
    def lines(self) -> list[str]:
        """The records of the training split, or its lines that are not empty."""
        if self.corpus.records is not None:
            return self.corpus.texts_of(self.corpus.train[:AT_MOST])
        return [line for line in self.text.split("\n") if line]

    @cached_property
    def times(self) -> Counter[str]:
        """How often each of `lines` occurs."""
        return Counter(self.lines)

    @property
    def where(self) -> str:
        """The part of the text whose records are counted, if it is not the whole."""
        return f", of the first {AT_MOST:,} characters" if len(self.corpus.train) > AT_MOST else ""

    def share(self, num_symbols: int) -> str:
        """The parameters that this many symbols take in the embedding and the head."""
        parameters = 2 * num_symbols * self.config.n_embd
        whole = plural(self.num_parameters, "parameter")
        return f"{parameters:,} of {whole}, {parameters / self.num_parameters:.0%}"


def _size(subject: Subject) -> str:
    config, num_trained, advice = subject.config, len(subject.corpus.train), ""
    ratio = subject.num_parameters / num_trained
    if ratio > MANY_PARAMETERS and not config.teachers:
        others = "a smaller --n-embd and --n-layer"
        others = f"or {others}" if config.dropout else f"{others}, or --dropout"
        advice = f"; that many memorize a text: take more text, {others}"
    return (
        f"{plural(subject.num_parameters, 'parameter')} for {plural(num_trained, 'character')} to train on, "
        f"{ratio:.2g} per character{advice}"
    )


def _rare_vocabulary(subject: Subject) -> str | None:
    """Suggest --min-count if it saves many parameters, and leaves enough other characters."""
    if subject.config.init_from or subject.config.teachers:  # which give the vocabulary
        return None
    corpus, size = subject.corpus, subject.corpus.tokenizer.vocab_size
    rare = rare_characters(corpus, RARE)
    if size - len(rare) <= 2 or 2 * len(rare) * subject.config.n_embd < RARE_SHARE * subject.num_parameters:
        return None
    counts = dict(zip(corpus.tokenizer.characters, corpus.occurrences().tolist(), strict=True))
    occurrences = sum(counts[c] for c in rare)
    return (
        f"{len(rare):,} of {plural(size, 'symbol')} occur fewer than {RARE} times, "
        f"{1e6 * occurrences / len(corpus.ids):.3g} per million characters together, and take "
        f"{subject.share(len(rare))}; --min-count {RARE} makes them one unknown symbol, U+FFFD"
    )


def _large_vocabulary(subject: Subject) -> str | None:
    config, size = subject.config, subject.corpus.tokenizer.vocab_size
    if size < LARGE_VOCABULARY:
        return None
    return (
        f"embedding and head of {size:,} symbols take {subject.share(size)}, and the logits of a step "
        f"{config.tokens_per_step * size * 4 / 1e6:,.0f} MB, as Chinese, Japanese and Korean need"
    )


def _rare_symbols(subject: Subject) -> str | None:
    """Name the symbols of the text that hardly occur in the training split."""
    corpus = subject.corpus
    trained = np.zeros(corpus.tokenizer.vocab_size, dtype=np.int64)
    for start in range(0, len(corpus.train), AT_MOST):  # in pieces that fit memory
        trained += np.bincount(corpus.train[start : start + AT_MOST], minlength=len(trained))
    rare = np.flatnonzero((corpus.occurrences() > 0) & (trained < RARE)).tolist()
    if not rare:
        return None
    named = " ".join(repr(corpus.tokenizer.characters[id]) for id in rare[:MAX_NAMED])
    more = f" and {len(rare) - MAX_NAMED:,} more" if len(rare) > MAX_NAMED else ""
    return f"{plural(len(rare), 'symbol')} with fewer than {RARE} occurrences to learn from: {named}{more}"


def _cut_records(subject: Subject) -> str | None:
    lengths = record_pieces(subject.corpus.train, len(subject.corpus.train))[1]
    num_cut = int((lengths > subject.config.block_size).sum())
    if not num_cut:
        return None
    return (
        f"{plural(num_cut, 'record')} of {len(lengths):,} to train on have more than --block-size "
        f"{subject.config.block_size} characters with their ends and are learned in pieces; the longest has "
        f"{plural(int(lengths.max()), 'character')}"
    )


def _json_lines(subject: Subject) -> str | None:
    lines = subject.lines[:AT_MOST_LINES]
    objects = sum(line.startswith("{") and line.rstrip().endswith("}") for line in lines)
    if len(lines) < MIN_LINES or objects < TABLE_SHARE * len(lines):
        return None
    return (
        "the lines look like JSON objects, whose names, quotes and escapes are learned too; take out the text first, "
        "for example with jq -r .text"
    )


def _table(subject: Subject) -> str | None:
    """Find a table: nearly all lines have the same number of separators that no space follows."""
    lines = subject.lines[:AT_MOST_LINES]
    if len(lines) < MIN_LINES:
        return None
    for name, separator in (("commas", ","), ("tabs", "\t"), ("semicolons", ";")):
        counts = Counter(line.count(separator) - line.count(separator + " ") for line in lines)
        count, times = counts.most_common(1)[0]
        if count and times >= TABLE_SHARE * len(lines):
            return (
                f"the lines look like a table of {count + 1} columns, whose {name}, quotes and header are learned "
                "too; --column NAME reads one column of a .csv, .tsv or .jsonl file"
            )
    return None


def _blocks(subject: Subject) -> str | None:
    """Suggest --records blank if blank lines separate blocks of several lines that begin alike."""
    found = [block for block in "".join(blocks([subject.text], BLANK, "")).split(RECORD_SEPARATOR) if block]
    if len(found) < MIN_BLOCKS or subject.text.count("\n") < 3 * len(found):
        return None
    beginnings = Counter(block[:ALIKE] for block in found if not block[:1].isspace())
    ((beginning, times),) = beginnings.most_common(1) or [("", 0)]
    if times <= len(found) / 2:
        return None
    return (
        f"{times / len(found):.0%} of the {len(found):,} groups of lines between blank lines begin with "
        f"{beginning!r}; --records blank learns each as a record"
    )


def _sorted_lines(subject: Subject) -> str | None:
    lines = subject.lines
    if len(lines) < MIN_LINES or max(map(len, lines)) > SHORT_LINE:
        return None
    if sum(a <= b for a, b in pairwise(lines)) < SORTED_SHARE * len(lines):
        return None
    return "the lines are in order, and the last tenth validates; --records shuffles lines of a list"


def _duplicates(subject: Subject) -> str | None:
    duplicates = len(subject.lines) - len(subject.times)
    if duplicates <= MUCH * len(subject.lines):
        return None
    return (
        f"{plural(duplicates, 'record')} of {len(subject.lines):,} to train on repeat another{subject.where}, the "
        f"most frequent {plural(max(subject.times.values()), 'time')}: the model will favor them"
    )


def _known_passages(subject: Subject) -> str | None:
    share = copied_share(subject.corpus.val[:VAL_CHARACTERS], subject.corpus.train[:AT_MOST])
    if share <= MUCH:
        return None
    return (
        f"{share:.0%} of the validation split's {NGRAM}-grams occur in the training split: the validation loss will "
        "look better than the model is"
    )


def _known_records(subject: Subject) -> str | None:
    held_out = subject.corpus.texts_of(subject.corpus.val[:AT_MOST])
    known = sum(record in subject.times for record in held_out)
    if known <= MUCH * len(held_out):
        return None
    return (
        f"{plural(known, 'record')} of {len(held_out):,} to validate are also trained on{subject.where}: the "
        "validation loss will look better than the model is"
    )


Check = tuple[str, str, Callable[[Subject], str | None]]
# Each warning: its name, the corpora that it is for, and the function that returns its sentence if it applies. Only the
# first of a group is given.
WARNINGS: tuple[tuple[Check, ...], ...] = (
    (("size", "texts and records", _size),),
    (
        ("vocabulary", "texts and records", _rare_vocabulary),
        ("vocabulary", "texts and records", _large_vocabulary),
        ("rare", "texts and records", _rare_symbols),
    ),
    (("cut", "records", _cut_records),),
    (
        ("format", "texts and records", _json_lines),
        ("format", "texts and records", _table),
        ("blocks", "texts", _blocks),
        ("sorted", "texts", _sorted_lines),
    ),
    (("duplicates", "records", _duplicates),),
    (
        ("overlap", "texts", _known_passages),
        ("overlap", "records", _known_records),
    ),
)


def warnings_of(corpus: Corpus, config: TrainConfig, num_parameters: int) -> Iterator[str]:
    """Yield the size of a run, and the warnings that apply."""
    subject, kind = Subject(corpus, config, num_parameters), "texts" if corpus.records is None else "records"
    for group in WARNINGS:
        for name, kinds, find in group:
            if kind in kinds and (sentence := find(subject)):
                yield f"{name}: {sentence}"
                break
