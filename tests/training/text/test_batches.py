"""The order of windows and records, and how they are arranged as batches."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.model.tokenizer import CharTokenizer
from training.text import batches
from training.text.batches import RecordSampler, WindowSampler, window_pieces
from training.text.files import DataError


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
@pytest.mark.parametrize(("characters", "block_size"), [(16, 8), (1000, 7), (1025, 1), (999, 64)])
def test_an_epoch_has_each_window_once(characters, block_size, seed):
    sampler = WindowSampler(np.arange(characters), block_size, seed)
    n = sampler.per_epoch
    phases = set()
    for epoch in range(5):
        starts = np.sort(sampler.starts(np.arange(epoch * n, (epoch + 1) * n)))
        assert 0 <= starts[0] < block_size
        assert np.array_equal(np.diff(starts), np.full(n - 1, block_size)), "adjacent, without duplicates"
        assert starts[-1] + block_size + 1 <= characters
        phases.add(starts[0])
    assert block_size == 1 or len(phases) > 1, "the phase changes"


def test_the_order_is_uncorrelated():
    sampler = WindowSampler(np.arange(64_100), 64, seed=7)
    n = sampler.per_epoch
    first, second = (sampler.starts(np.arange(n) + epoch * n) // 64 for epoch in (0, 1))
    for order in (first, second):
        assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 0.1
        assert np.count_nonzero(np.diff(order) == 1) < 10
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.1
    assert not np.array_equal(first, WindowSampler(np.arange(64_100), 64, seed=8).starts(np.arange(n)) // 64)


def test_the_order_is_the_same_in_every_version_of_numpy():
    """As this one drew it: a resumed run must find its windows, and a checkpoint its validation records."""
    assert WindowSampler(np.arange(1000), 64, seed=1337).starts(np.arange(6)).tolist() == [211, 19, 595, 339, 787, 659]


@given(st.integers(0, 200), st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 2**63 - 1))
def test_windows_depend_only_on_seed_and_position(position, batches, seed):
    """For any grouping into batches and any position to resume from."""
    ids = np.arange(400)
    whole = WindowSampler(ids, 16, seed, position)
    inputs = np.concatenate([whole.next_batch(n)[0] for n in batches])
    again = WindowSampler(ids, 16, seed)
    again.next_batch(position or 1)
    again.position = position
    x, y = again.next_batch(sum(batches))
    assert np.array_equal(x, inputs) and np.array_equal(y, x + 1)  # shifted by one, as the ids are 0, 1, 2 …
    assert np.array_equal(x[:, 0], whole.starts(np.arange(position, position + sum(batches))))
    assert again.position == whole.position


def test_a_text_shorter_than_two_windows_is_refused():
    with pytest.raises(DataError, match="has 31 characters; block_size 16 needs at least 32: pass a longer text or"):
        WindowSampler(np.arange(31), 16, seed=0)
    assert WindowSampler(np.arange(32), 16, seed=0).per_epoch == 1


@given(st.lists(st.text("abc", min_size=1, max_size=9), min_size=1, max_size=30), st.integers(1, 12), st.integers(0, 3))
def test_each_record_is_drawn_once_an_epoch_in_a_row_of_its_own(records, block_size, seed):
    tokenizer = CharTokenizer("\nabc")
    ids = np.array(tokenizer.encode("\n" + "".join(f"{record}\n" for record in records)), np.uint8)
    sampler = RecordSampler(ids, block_size, seed)
    expected = []
    for text in (f"\n{record}\n" for record in records):
        expected += [text[i : i + block_size + 1] for i in range(0, len(text) - 1, block_size)]
    assert sampler.per_epoch == len(expected)
    idx, targets = sampler.next_batch(2 * sampler.per_epoch)
    rows = []
    for inputs, following in zip(idx, targets, strict=True):
        count = (following >= 0).sum()
        assert (following[count:] == -1).all() and (inputs[count:] == 0).all()
        assert (inputs[1:count] == following[: count - 1]).all()
        rows.append(tokenizer.decode([*inputs[:1].tolist(), *following[:count].tolist()]))
    assert idx.shape[1] == max(map(len, rows)) - 1 <= block_size
    assert Counter(rows[: len(expected)]) == Counter(rows[len(expected) :]) == Counter(expected)
    again = RecordSampler(ids, block_size, seed, position=len(expected)).next_batch(len(expected))[0]
    assert np.array_equal(again[:, : idx.shape[1]], idx[len(expected) :, : again.shape[1]])


@given(st.integers(2, 40), st.integers(1, 12))
def test_consecutive_windows_predict_each_character_but_the_first_once(size, length):
    starts, lengths = window_pieces(np.arange(size), length)
    predicted = [i + 1 for start, count in zip(starts, lengths, strict=True) for i in range(start, start + count)]
    assert predicted == list(range(1, size))
    assert set(lengths[:-1]) <= {length} and 1 <= lengths[-1] <= length


def test_records_that_are_trained_on_too_are_left_out():
    tokenizer = CharTokenizer("\nabc")
    chance = random.Random(4)
    lists = [["".join(chance.choices("abc", k=chance.randint(1, 5))) for _ in range(300)] for _ in range(2)]
    train, val = (np.array(tokenizer.encode("\n" + "".join(f"{it}\n" for it in some)), np.uint8) for some in lists)
    expected = [it for it in lists[1] if it not in lists[0]]
    assert 20 < len(expected) < 280
    found = batches.unseen_records(val, train)
    assert [it for it, is_unseen in zip(lists[1], found, strict=True) if is_unseen] == expected
    assert not batches.unseen_records(val, val).any()


def test_a_padded_batch_is_cut_into_parts_of_bounded_size():
    lengths = [1, 9, 2, 2, 5, 1, 300]
    targets = np.array([[1] * n + [-1] * (300 - n) for n in lengths])
    parts = list(batches.micro_batches(targets + 1, targets, 20))
    assert [part.shape for part, _ in parts] == [(1, 300), (1, 9), (1, 5), (3, 2), (1, 1)]
    assert all(np.array_equal(idx, its_targets + 1) for idx, its_targets in parts)
    assert sum((its_targets >= 0).sum() for _, its_targets in parts) == sum(lengths)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=40), st.integers(1, 4))
def test_a_batch_is_packed_without_its_padding(lengths, count):
    targets = np.array([[n] * n + [-1] * (90 - n) for n in lengths])
    idx = np.where(targets < 0, 0, targets + np.arange(90))
    parts, rows = batches.packed(idx, targets, count), []
    assert len(parts) == min(count, len(lengths))
    for its_idx, its_targets, its_lengths in parts:
        assert its_idx.shape == its_targets.shape == (1, its_lengths.sum()) and its_idx.size % batches.PACK == 0
        assert 0 < its_lengths.min() and its_lengths.max() <= max(lengths)
        for start, length in zip(np.cumsum(its_lengths) - its_lengths, its_lengths, strict=True):
            row, following = its_idx[0, start : start + length], its_targets[0, start : start + length]
            if following[0] >= 0:
                assert (following == length).all() and (row == length + np.arange(length)).all()
                rows.append(length)
            else:
                assert (following == batches.IGNORED).all() and (row == 0).all()
    assert sorted(rows) == sorted(lengths)
    sizes = [its_idx.size for its_idx, *_ in parts]
    assert max(sizes) - min(sizes) < max(lengths) + 2 * batches.PACK or len(lengths) < count
