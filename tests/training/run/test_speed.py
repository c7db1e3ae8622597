import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from service.model.config import GPTConfig
from service.model.gpt import GPT
from tests.bench.nanogpt import NanoGPT, Recipe
from training.run.estimate import flops_per_character


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        # Each in a dtype in which its attention consists of products that torch counts, not of one fused kernel.
        (GPT(GPTConfig(7, 16, n_layer=3, n_head=4, n_kv_head=2, n_embd=32)), torch.bfloat16),
        (NanoGPT(Recipe(n_layer=2, n_head=2, n_embd=16, block_size=8), vocab_size=7), torch.float32),
    ],
    ids=["ours", "nanogpt"],
)
def test_flops_per_character_equal_torchs_count(model, dtype):
    T = model.config.block_size
    idx = torch.zeros(3, T, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            model(idx).float().sum().backward()
    assert counter.get_total_flops() == 3 * T * flops_per_character(model)
