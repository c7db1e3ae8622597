"""The attention weights for a text, against explicit loops, which test_model.py holds against the GPT module."""

import math

import numpy as np
import pytest
import torch

from service.model.attention import attention_layers
from service.model.config import GPTConfig
from service.model.gpt import GPT, CausalSelfAttention
from service.model.tokenizer import CharTokenizer
from tests import reference
from tests.helpers import random_model, save_random
from training.saving import save_checkpoint

IDS = [3, 14, 15, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]


def computed(checkpoint, ids=IDS):
    config = GPTConfig(**checkpoint.hyperparameters)
    return config, list(attention_layers(checkpoint.load_weights(), config, ids))


@pytest.mark.parametrize("n_kv_head", [1, 2, 4])
def test_weights_equal_explicit_loops_within_the_window_and_beyond(tmp_path, n_kv_head):
    checkpoint = save_random(tmp_path / "c", n_layer=3, n_kv_head=n_kv_head)
    config, layers = computed(checkpoint)
    assert len(IDS) > config.block_size
    kept = []
    reference.logits(checkpoint.path, IDS, kept)
    found = np.concatenate([layer.weights for layer in layers])  # (n_layer · nh, T, T)
    expected = np.zeros_like(found)
    for number, rows in enumerate(kept):
        for p, row in enumerate(rows):
            expected[number, p, list(row)] = list(row.values())
    assert len(found) == len(kept) == 12
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


def test_rows_sum_to_1_and_see_only_the_window(tmp_path):
    config, layers = computed(save_random(tmp_path / "c"))
    T = len(IDS)
    for scores, weights, _ in layers:
        assert scores.shape == weights.shape == (config.n_head, T, T)
        np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=0, atol=1e-12)
        for t in range(T):
            seen = [t - config.block_size < j <= t for j in range(T)]
            assert (weights[:, t, seen] > 0).all()
            assert (weights[:, t, np.logical_not(seen)] == 0).all()
            scaled = scores[:, t, seen] / math.sqrt(config.head_dim)
            expected = np.array([reference.softmax(list(row)) for row in scaled])
            np.testing.assert_allclose(weights[:, t, seen], expected, rtol=0, atol=1e-12)


def test_weights_are_those_of_the_gpt_module(tmp_path, monkeypatch):
    """Its last layer's weights times the identity as values are what its attention gives with these values."""
    model = random_model(torch.float64, n_layer=2, n_kv_head=4, n_head=4)
    save_checkpoint(tmp_path / "c", model, CharTokenizer([chr(65 + i) for i in range(model.config.vocab_size)]), {})
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    ids = IDS[: model.config.block_size]
    *_, last = attention_layers(weights, model.config, ids)
    seen = []
    forward = CausalSelfAttention.forward
    monkeypatch.setattr(
        CausalSelfAttention, "forward", lambda self, x, *rest: seen.append(x) or forward(self, x, *rest)
    )
    model(torch.tensor([ids]))
    attn, x = model.blocks[-1].attn, seen[-1]
    v = torch.nn.functional.linear(x, attn.qkv.weight)[..., -model.config.n_embd :]
    v = v.view(len(ids), model.config.n_head, -1).transpose(0, 1)  # (nh, T, hs)
    expected = forward(attn, x, rope(model, len(ids)), None)[0]
    y = (torch.from_numpy(last.weights) @ v).transpose(0, 1).reshape(len(ids), -1)
    torch.testing.assert_close(torch.nn.functional.linear(y, attn.proj.weight), expected, rtol=0, atol=1e-9)


def rope(model: GPT, length: int):
    from service.model.gpt import rope_angles

    return rope_angles(torch.arange(length)[:, None], model.config, torch.float64)


def test_texts_of_one_and_no_character(tmp_path):
    checkpoint = save_random(tmp_path / "c")
    _, layers = computed(checkpoint, [5])
    assert all((layer.weights == 1).all() for layer in layers)
    _, layers = computed(checkpoint, [])
    assert [layer.weights.shape for layer in layers] == [(4, 0, 0)] * 2
