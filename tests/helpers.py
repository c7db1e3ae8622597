"""Small real things that several test files need."""

import string
from pathlib import Path

import torch

from service.model.checkpoint import Checkpoint, save_checkpoint
from service.model.gpt import GPT, GPTConfig
from service.model.tokenizer import CharTokenizer

CORPUS = Path(__file__).parents[2] / "shared" / "data" / "tinyshakespeare.txt"
VOCABULARY = sorted("\n !'.,:;?" + string.ascii_letters)


def random_model(dtype: torch.dtype = torch.float32, seed: int = 0, **config: int) -> GPT:
    """A small model with weights large enough that its texts vary and every part matters."""
    fields = {"vocab_size": len(VOCABULARY), "block_size": 8, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 16}
    model = GPT(GPTConfig(**(fields | config)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
            else:
                std = 1.5 * parameter.size(1) ** -0.5
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype).eval().requires_grad_(False)


def save_random(folder: Path, **options: int) -> Checkpoint:
    """A checkpoint folder with a random model over VOCABULARY."""
    save_checkpoint(folder, random_model(**options), CharTokenizer(VOCABULARY), {"losses": {}})
    return Checkpoint.read(folder)
