"""The command `evaluate`: print the losses of a checkpoint on its validation split, or on another text."""

from __future__ import annotations

import argparse

import numpy as np

from service.model.checkpoint import Checkpoint
from service.model.tokenizer import UnknownCharacterError
from training.commands.inputs import (
    encode_files,
    encoder_of,
    refusing,
    report_unknown,
    training_corpus,
    unknown_options,
)
from training.measure.counts import baselines
from training.measure.losses import bits, sampled_scores
from training.measure.mixture import fit_mixture, mixed_loss
from training.messages import plural
from training.model.loading import load_model
from training.text.files import DataError, find_texts, read_text
from training.text.records import splitting_of


def command(args: argparse.Namespace) -> None:
    checkpoint, model = load_model(args)
    records, corpus = checkpoint.record_end is not None, None
    if args.data is None:
        corpus = training_corpus(checkpoint, args)
        ids, scored = corpus.val, f"validation split of {corpus.name}"
    else:
        ids, scored = ids_of(args, checkpoint), " ".join(args.data)
    print(f"{scored}: {plural(len(ids), 'character')}, all but the first scored")
    scores = sampled_scores(model, ids, len(ids), records, corpus.train if corpus else None)
    losses, counts, at = dict(scores.losses), checkpoint.load_counts(), np.arange(1, len(ids))
    if corpus:
        losses |= baselines(corpus.train, ids, at, counts or corpus.counts)
    if counts and counts.is_mixed:  # a run fits the weights on its validation split
        is_fitted = corpus is not None
        mixed = fit_mixture(counts, ids, scores.each).loss if is_fitted else mixed_loss(counts, ids, scores.each)
        losses["mixed"] = mixed
    for name, loss in losses.items():
        print(f"{name:<10} {loss:.4f} nats  {bits(loss):.4f} bits per character")


def ids_of(args: argparse.Namespace, checkpoint: Checkpoint) -> np.ndarray:
    """Return the ids of the text of --data, (characters,). Print notes about its files and unknown characters."""
    notes: set[str] = set()
    encoder = encoder_of(checkpoint.tokenizer, **unknown_options(args))
    files = find_texts(args.data, args.glob or (), args.exclude or (), notes)
    try:
        with refusing():
            ids = encode_files(files, encoder, splitting_of(checkpoint))
    except UnknownCharacterError as error:
        count = sum(c not in checkpoint.tokenizer for text in read_text(files) for c in text)
        many = f"one of {plural(count, 'character')} that are not; " if count > 1 else ""
        raise DataError(f"{error}, {many}--unknown-characters drop or replace scores the rest") from None
    report_unknown(encoder.replaced, encoder.dropped)
    for note in sorted(notes):
        print(note)
    return ids
