"""The curves of a run."""

from itertools import pairwise

import pytest

from training.run.curves import curves


def log_of(train, val, **losses):
    records = [{"event": "train", "step": s, "train_loss": x, "muon_lr": 0.01} for s, x in train.items()]
    records += [{"event": "evaluation", "step": step, "val_loss": loss} for step, loss in val.items()]
    return [*records, {"event": "end", **losses}]


def test_runs_that_counted_bigrams_are_drawn_as_before():
    losses = {"uniform": 3.0, "unigram": 2.5, "bigram": 2.2, "whole": 2.3, "streamed": 2.2}
    names = [name.get_text() for name in curves(log_of({10: 2.0}, {10: 2.0}, **losses)).axes[0].texts]
    assert any("bigram 2.20" in name for name in names) and not any("kneser_ney" in name for name in names)


@pytest.mark.parametrize("ends", [(9.0, 8.0, 7.0), (1.61, 1.6, 1.59)])
def test_names_at_the_curves_do_not_cover_each_other(ends):
    baselines = dict(zip(("uniform", "unigram", "kneser_ney"), ends, strict=True))
    figure = curves(log_of({10: 2.0, 20: 1.6}, {10: 1.8, 20: 1.6}, **baselines))
    axes = figure.axes[0]
    low, high = axes.get_ylim()
    places = sorted(name.xy[1] for name in axes.texts)
    assert len(places) == 5 and all(b - a > 0.05 * (high - low) for a, b in pairwise(places))
    assert low <= places[0] and places[-1] <= high + 1e-9
    above = [name.get_text() for name in axes.texts if name.get_text().startswith("↑")]
    assert len(above) == sum(end > high for end in ends)
