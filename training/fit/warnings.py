"""Warn before a run, in at most six lines, about a text or a model size that would make training disappoint.

Symbols and the lengths of records are counted in the whole text. All other checks read the first AT_MOST characters of
each split, so that a text may be larger than memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
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


def size_check(corpus: Corpus, config: TrainConfig, num_parameters: int) -> Iterator[str]:
    ratio = num_parameters / len(corpus.train)
    others = (
        "or a smaller --n-embd and --n-layer" if config.dropout else "a smaller --n-embd and --n-layer, or --dropout"
    )
    advice = f"; that many memorize a text: take more text, {others}"
    yield (
        f"size: {plural(num_parameters, 'parameter')} for {plural(len(corpus.train), 'character')} to train on, "
        f"{ratio:.2g} per character{advice if ratio > MANY_PARAMETERS and not config.teachers else ''}"
    )
    if large := _large_vocabulary(corpus, config, num_parameters):
        yield large
    elif rare := _rare_symbols(corpus):
        yield rare
    yield from _check_text(corpus) if corpus.records is None else _check_records(corpus, config)


def _rare_symbols(corpus: Corpus) -> str | None:
    """Return a warning if symbols of the text hardly occur in the training split."""
    counts = np.zeros((2, corpus.tokenizer.vocab_size), dtype=np.int64)  # occurrences of each symbol in both splits
    for split, its_counts in zip((corpus.train, corpus.val), counts, strict=True):
        for start in range(0, len(split), AT_MOST):  # in pieces that fit memory
            its_counts += np.bincount(split[start : start + AT_MOST], minlength=len(its_counts))
    rare = np.flatnonzero((counts.sum(axis=0) > 0) & (counts[0] < RARE)).tolist()
    if not rare:
        return None
    named = " ".join(repr(corpus.tokenizer.characters[id]) for id in rare[:MAX_NAMED])
    more = f" and {len(rare) - MAX_NAMED:,} more" if len(rare) > MAX_NAMED else ""
    return f"rare: {plural(len(rare), 'symbol')} with fewer than {RARE} occurrences to learn from: {named}{more}"


def _check_text(corpus: Corpus) -> Iterator[str]:
    """Yield warnings about a text that is not split into records."""
    train, val = corpus.train[:AT_MOST], corpus.val[:AT_MOST]
    text = corpus.tokenizer.decode_array(train)
    lines = [line for line in text.split("\n") if line]
    ordered = sum(a <= b for a, b in pairwise(lines))
    if found := _table_format(lines[:AT_MOST_LINES]):
        yield found
    elif found := _blocks(text):
        yield found
    elif len(lines) >= MIN_LINES and max(map(len, lines)) <= SHORT_LINE and ordered >= SORTED_SHARE * len(lines):
        yield "sorted: the lines are in order, and the last tenth validates; --records shuffles lines of a list"
    if (share := copied_share(val[:VAL_CHARACTERS], train)) > MUCH:
        yield (
            f"overlap: {share:.0%} of the validation split's {NGRAM}-grams occur in the training split: the "
            "validation loss will look better than the model is"
        )


def _check_records(corpus: Corpus, config: TrainConfig) -> Iterator[str]:
    """Yield warnings about records."""
    where = f", of the first {AT_MOST:,} characters" if len(corpus.train) > AT_MOST else ""
    lengths = record_pieces(corpus.train, len(corpus.train))[1]
    if num_cut := int((lengths > config.block_size).sum()):
        yield (
            f"cut: {plural(num_cut, 'record')} of {len(lengths):,} to train on have more than --block-size "
            f"{config.block_size} characters with their ends and are learned in pieces; the longest has "
            f"{plural(int(lengths.max()), 'character')}"
        )
    records, held_out = map(corpus.texts_of, (corpus.train[:AT_MOST], corpus.val[:AT_MOST]))
    repeated = Counter(records)
    if found := _table_format(records[:AT_MOST_LINES]):
        yield found
    duplicates = len(records) - len(repeated)
    if duplicates > MUCH * len(records):
        yield (
            f"duplicates: {plural(duplicates, 'record')} of {len(records):,} to train on repeat another{where}, the "
            f"most frequent {plural(max(repeated.values()), 'time')}: the model will favor them"
        )
    known = sum(record in repeated for record in held_out)
    if known > MUCH * len(held_out):
        yield (
            f"overlap: {plural(known, 'record')} of {len(held_out):,} to validate are also trained on{where}: the "
            "validation loss will look better than the model is"
        )


def _blocks(text: str) -> str | None:
    """Return a warning if blank lines of the text separate blocks of several lines that begin alike."""
    found = [block for block in "".join(blocks([text], BLANK, "")).split(RECORD_SEPARATOR) if block]
    if len(found) < MIN_BLOCKS or text.count("\n") < 3 * len(found):
        return None
    beginnings = Counter(block[:ALIKE] for block in found if not block[:1].isspace())
    ((beginning, times),) = beginnings.most_common(1) or [("", 0)]
    if times <= len(found) / 2:
        return None
    return (
        f"blocks: {times / len(found):.0%} of the {len(found):,} groups of lines between blank lines begin with "
        f"{beginning!r}; --records blank learns each as a record"
    )


def _large_vocabulary(corpus: Corpus, config: TrainConfig, num_parameters: int) -> str | None:
    """Return a warning if the vocabulary is large or its rare characters take many parameters.

    The warning does not suggest --min-count if the vocabulary comes from a checkpoint or must equal the teachers'.
    """
    size = corpus.tokenizer.vocab_size

    def taken(characters: int) -> str:
        parameters = 2 * characters * config.n_embd
        return f"{parameters:,} of {plural(num_parameters, 'parameter')}, {parameters / num_parameters:.0%}"

    is_free = not config.init_from and not config.teachers
    if is_free:
        rare = rare_characters(corpus, RARE)
        is_possible = size - len(rare) > 2  # enough other characters stay
        if is_possible and 2 * len(rare) * config.n_embd >= RARE_SHARE * num_parameters:
            counts = dict(zip(corpus.tokenizer.characters, corpus.counts().tolist(), strict=True))
            occurrences = sum(counts[c] for c in rare)
            return (
                f"vocabulary: {len(rare):,} of {plural(size, 'symbol')} occur fewer than {RARE} times, "
                f"{1e6 * occurrences / len(corpus.ids):.3g} per million characters together, and take "
                f"{taken(len(rare))}; --min-count {RARE} makes them one unknown symbol, U+FFFD"
            )
    if size < LARGE_VOCABULARY:
        return None
    advice = "; in other texts, --min-count N leaves rare characters out"
    return (
        f"vocabulary: embedding and head of {size:,} symbols take {taken(size)}, and the logits of a step "
        f"{config.tokens_per_step * size * 4 / 1e6:,.0f} MB, as Chinese, Japanese and Korean need"
        f"{advice if is_free and config.min_count <= 1 else ''}"
    )


def _table_format(lines: list[str]) -> str | None:
    """Return a warning if the lines look like JSON objects or like rows of a table.

    In a table nearly all lines have the same number of separators that no space follows.
    """
    if len(lines) < MIN_LINES:
        return None
    if sum(line.startswith("{") and line.rstrip().endswith("}") for line in lines) >= TABLE_SHARE * len(lines):
        return (
            "format: the lines look like JSON objects, whose names, quotes and escapes are learned too; take out the "
            "text first, for example with jq -r .text"
        )
    for name, separator in (("commas", ","), ("tabs", "\t"), ("semicolons", ";")):
        counts = Counter(line.count(separator) - line.count(separator + " ") for line in lines)
        count, times = counts.most_common(1)[0]
        if count and times >= TABLE_SHARE * len(lines):
            return (
                f"format: the lines look like a table of {count + 1} columns, whose {name}, quotes and header are "
                "learned too; take out the column that you want first, for example with cut or csvcut"
            )
    return None
