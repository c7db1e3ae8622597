"""The command `prepare`: encode a text and store it in the cache."""

from __future__ import annotations

import argparse

from training.messages import plural
from training.text.corpus import prepare
from training.text.files import cache_dir


def command(args: argparse.Namespace) -> None:
    glob, exclude = args.glob or (), args.exclude or ()
    corpus = prepare(
        args.data, records=args.records, column=args.column, glob=glob, exclude=exclude, min_count=args.min_count
    )
    print(
        f"{corpus.name}: {plural(len(corpus.ids), 'character')}, {plural(corpus.symbols, 'symbol')}; "
        f"{len(corpus.train):,} for training, {len(corpus.val):,} for validation\n"
        f"SHA-256 {corpus.sha256}, encoded in {cache_dir() / 'corpora'}",
        *corpus.notes,
        sep="\n",
    )
