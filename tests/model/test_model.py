import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.model.config import GPTConfig
from service.model.gpt import banded_attention
from service.model.kv_cache import CacheRows, KVCache
from tests import reference
from tests.helpers import random_model, save_random


def ids(rows, length, seed=0, vocab_size=61):
    return torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_logits_equal_the_explicit_loop_reference(tmp_path):
    checkpoint = save_random(tmp_path / "ck", block_size=4)
    idx = ids(1, 11)  # several windows long
    expected = torch.tensor(reference.logits(tmp_path / "ck", idx[0].tolist()), dtype=torch.float64)
    actual = checkpoint.load_model(dtype=torch.float64)(idx)[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_logits_equal_transformers_qwen3(tmp_path):
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3 import Qwen3ForCausalLM

    checkpoint = save_random(tmp_path / "ck", block_size=16, n_layer=3, n_embd=32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ck")
    assert isinstance(theirs, Qwen3ForCausalLM)
    idx = ids(2, 16 * 5)
    with torch.no_grad():
        expected = theirs(idx).logits
    torch.testing.assert_close(checkpoint.load_model()(idx), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("T", [3, 7, 8, 29])
def test_a_query_sees_exactly_its_window(T):
    W = 7
    k = torch.zeros(1, 1, T, 4, dtype=torch.float64)
    v = torch.eye(T, dtype=torch.float64)[None, None]  # so that the output is the attention weights
    seen = banded_attention(k, k, v, window=W)[0, 0] > 0
    p, j = torch.arange(T)[:, None], torch.arange(T)
    assert torch.equal(seen, (j <= p) & (j > p - W))
    assert seen.sum(1).tolist() == [min(p + 1, W) for p in range(T)]


def test_the_receptive_field_is_exact():
    model = random_model(torch.float64, n_layer=3, block_size=5)
    field = model.config.receptive_field
    assert field == 13
    idx = ids(1, 40)
    torch.testing.assert_close(model(idx[:, -field:])[:, -1], model(idx)[:, -1], rtol=0, atol=1e-12)
    other = idx.clone()
    other[0, -field] = (other[0, -field] + 1) % 61
    assert (model(other)[:, -1] - model(idx)[:, -1]).abs().max() > 1e-9


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 0}, r"vocab_size must be in \[1, 1114112\], got 0"),
        ({"n_layer": True}, "n_layer must be an integer, got True"),
        ({"n_inner": "344"}, "n_inner must be an integer, got '344'"),
        ({"rope_theta": None}, "rope_theta must be a number, got None"),
        ({"rope_theta": math.nan}, r"rope_theta must be in \[1.0, 1000000000000.0\], got nan"),
        ({"norm_eps": math.inf}, r"norm_eps must be in \[1e-12, 1.0\], got inf"),
        ({"n_embd": 30, "n_head": 4}, "n_embd=30, n_head=4"),
        ({"n_head": 4, "n_kv_head": 3}, "n_kv_head must divide n_head, got n_kv_head=3, n_head=4"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
    ],
)
def test_bad_shapes_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**({"vocab_size": 10} | fields))


@pytest.mark.parametrize("shape", [{}, {"n_head": 2, "n_kv_head": 1, "n_layer": 3}, {"n_kv_head": 4, "n_inner": 7}])
def test_the_config_counts_the_parameters(shape):
    model = random_model(**shape)
    assert model.config.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def cached_logits(model, idx, pieces):
    """Logits of idx (B, T) through a cache, one forward per piece: {row: count} for a prefill, or "decode"."""
    cache = KVCache(model.config, len(idx), "cpu", model.head.weight.dtype)
    done = [0] * len(idx)
    out = [[] for _ in idx]
    for piece in pieces:
        if piece == "decode":
            x = torch.stack([idx[b, done[b] : done[b] + 1] for b in range(len(idx))])
            counts = dict.fromkeys(range(len(idx)), 1)
            logits = model(x, CacheRows(cache, range(len(idx)), [1] * len(idx)))
        else:
            counts = piece
            x = torch.zeros(len(counts), max(counts.values()), dtype=torch.long)
            for i, (b, n) in enumerate(counts.items()):
                x[i, :n] = idx[b, done[b] : done[b] + n]
            logits = model(x, CacheRows(cache, list(counts), list(counts.values())))
        for i, (b, n) in enumerate(counts.items()):
            out[b].append(logits[i, :n])
            done[b] += n
    return [torch.cat(rows) for rows in out]


@given(st.data())
@settings(max_examples=40)
def test_cached_logits_equal_one_uncached_forward(data):
    """Rows at different positions, prompts shorter and longer than W in random pieces, texts of five windows."""
    model = random_model(torch.float64, block_size=6)
    W = 6
    rows = data.draw(st.integers(1, 3))
    idx = ids(rows, 5 * W + 20, seed=data.draw(st.integers(0, 100)))
    pieces = []
    for _ in range(data.draw(st.integers(1, 3))):
        who = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, unique=True))
        pieces.append({b: data.draw(st.integers(1, 2 * W + 1)) for b in who})
    pieces += [{b: 1 for b in range(rows)}]
    longest = max(sum(p.get(b, 0) for p in pieces) for b in range(rows))
    pieces += ["decode"] * max(0, min(idx.size(1), 5 * W) - longest)
    full = model(idx)
    for b, logits in enumerate(cached_logits(model, idx, pieces)):
        torch.testing.assert_close(logits, full[b, : len(logits)], rtol=0, atol=1e-10)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 19])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_copied_slot_continues_the_first_positions_of_its_source(length, ahead):
    """In prefill and in decode; a ring that has lost a position which the next one sees is refused."""
    model = random_model(torch.float64, block_size=8)
    idx = ids(2, 40)
    other = torch.cat((idx[:1, :length], idx[1:, length:]), dim=1)  # begins as idx[0], then differs
    cache = KVCache(model.config, 3, "cpu", torch.float64)
    model(idx[:1, : length + ahead], CacheRows(cache, [2], [length + ahead]))
    model(idx[1:, :20], CacheRows(cache, [0], [20]))  # what the target held before
    if length + ahead > max(8, length):
        with pytest.raises(AssertionError, match="its ring must hold"):
            cache.copy(2, 0, length)
        return
    cache.copy(2, 0, length)
    logits = [model(other[:, length : length + 3], CacheRows(cache, [0], [3]))]
    logits += [model(other[:, p : p + 1], CacheRows(cache, [0], [1])) for p in range(length + 3, 35)]
    torch.testing.assert_close(torch.cat(logits, dim=1), model(other)[:, length:35], rtol=0, atol=1e-10)


def test_rows_that_only_fill_a_batch_keep_their_slots():
    """A full ring in the middle of a decoded slice is still copied and continued."""
    model = random_model(torch.float64, block_size=8)
    idx = ids(3, 30)
    cache = KVCache(model.config, 4, "cpu", torch.float64)
    model(idx[:, :12], CacheRows(cache, [0, 1, 2], [12] * 3))
    for p in range(12, 15):
        model(idx[:, p : p + 1], CacheRows(cache, range(3), [1, 0, 1]))
    cache.copy(1, 3, 12)
    assert cache.lengths[:4] == [15, 12, 15, 12]
    next = idx[[0, 1, 2, 1], [15, 12, 15, 12]][:, None]
    logits = model(next, CacheRows(cache, range(4), [1] * 4))[:, 0]
    full = model(idx)
    torch.testing.assert_close(logits, full[[0, 1, 2, 1], [15, 12, 15, 12]], rtol=0, atol=1e-10)
