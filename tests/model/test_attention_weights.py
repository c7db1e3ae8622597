"""The attention weights for a text, against explicit loops, which test_model.py holds against the GPT module."""

import numpy as np
import pytest

from service.model.attention import attention_layers
from tests import reference
from tests.helpers import save_random

IDS = [3, 14, 15, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]


@pytest.mark.parametrize("n_kv_head", [1, 2, 4])
def test_weights_equal_explicit_loops_within_the_window_and_beyond(tmp_path, n_kv_head):
    checkpoint = save_random(tmp_path / "c", n_layer=3, n_kv_head=n_kv_head)
    layers = list(attention_layers(checkpoint.load_weights(), checkpoint.config, IDS))
    assert len(IDS) > checkpoint.config.block_size
    kept = []
    reference.logits(checkpoint.path, IDS, kept)
    found = np.concatenate([layer.weights for layer in layers])  # (n_layer · nh, T, T)
    expected = np.zeros_like(found)
    for number, rows in enumerate(kept):
        for p, row in enumerate(rows):
            expected[number, p, list(row)] = list(row.values())
    assert len(found) == len(kept) == 12
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
