import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.model import gpt
from service.model.config import GPTConfig
from service.model.gpt import banded_attention
from service.model.kv_cache import CacheRows, KVCache
from service.model.params import SamplingParams
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


def test_logits_equal_transformers_qwen3(tmp_path, monkeypatch):
    """transformers does not load the model of a changed gpt.py, which it once computed as Qwen3."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.models.qwen3 import Qwen3ForCausalLM

    checkpoint = save_random(tmp_path / "ck", block_size=16, n_layer=3, n_embd=32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ck")
    assert isinstance(theirs, Qwen3ForCausalLM)
    idx = ids(2, 16 * 5)
    with torch.no_grad():
        expected = theirs(idx).logits
    torch.testing.assert_close(checkpoint.load_model()(idx), expected, rtol=0, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ck", padding_side="left")
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    batch = tokenizer(["Hi", "Hello"], padding=True, return_tensors="pt")
    found = theirs.generate(**batch, max_new_tokens=20, do_sample=False)[:, 5:].tolist()
    model, greedy = checkpoint.load_model(), SamplingParams(temperature=0)
    assert found == [model.generate(checkpoint.tokenizer.encode(text), 20, greedy) for text in ("Hi", "Hello")]
    forward = gpt.SwiGLU.forward
    monkeypatch.setattr(gpt.SwiGLU, "forward", lambda self, x: 0.9 * forward(self, x))
    changed = save_random(tmp_path / "changed", block_size=16, n_embd=32)
    assert AutoTokenizer.from_pretrained(changed.path).decode([0, 5]) == changed.tokenizer.decode([0, 5])
    with pytest.raises(ValueError, match="model type `chargpt` but Transformers does not recognize this"):
        AutoModelForCausalLM.from_pretrained(changed.path)


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


@given(st.integers(0, 10_000))
@settings(max_examples=15)
def test_cached_logits_equal_one_uncached_forward(seed):
    """Rows at different positions and in any order, in pieces shorter and longer than W, some with nothing to run."""
    model, W, r = random_model(torch.float64, block_size=6), 6, random.Random(seed)
    idx, done = ids(3, 90, seed), [0, 0, 0]
    cache, full = KVCache(model.config, 3, "cpu", torch.float64), model(idx)
    while min(done) < 5 * W:
        slots = [0, 1, 2] if r.random() < 0.7 else r.sample(range(3), r.randint(1, 3))
        most = r.choice([1, 1, 1, W - 1, 2 * W + 1])
        counts = [min(r.randint(0, most), 90 - done[slot]) for slot in slots]
        x = torch.zeros(len(slots), max(1, *counts), dtype=torch.long)
        for row, slot, n in zip(x, slots, counts, strict=True):
            row[:n] = idx[slot, done[slot] : done[slot] + n]
        if any(counts):
            logits = model(x, CacheRows(cache, slots, counts))
            for row, slot, n in zip(logits, slots, counts, strict=True):
                torch.testing.assert_close(row[:n], full[slot, done[slot] : done[slot] + n], rtol=0, atol=1e-10)
                done[slot] += n
