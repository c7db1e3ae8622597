"""The shape of a model; loads without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GPTConfig:
    """Hyperparameters of a GPT.

    Raises:
        ValueError: a size is not positive, or `n_embd`, `n_head` and `n_kv_head` are not divisible as required.
    """

    vocab_size: int
    block_size: int = 128  # W: the number of keys that a query sees, its own included
    n_layer: int = 6
    n_head: int = 4
    n_kv_head: int = 2  # each key/value head serves n_head / n_kv_head query heads (Ainslie et al. 2023)
    n_embd: int = 128
    n_inner: int | None = None  # width of the SwiGLU; None: 8/3 of n_embd, rounded up to a multiple of 8
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    dropout: float = 0.0  # of the residual branches, in training only

    def __post_init__(self) -> None:
        if self.n_inner is None:
            object.__setattr__(self, "n_inner", (8 * self.n_embd + 23) // 24 * 8)
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_kv_head", "n_embd", "n_inner"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.n_embd % (2 * self.n_head):
            raise ValueError(f"n_embd / n_head must be an even number, got n_embd={self.n_embd}, n_head={self.n_head}")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_kv_head must divide n_head, got n_kv_head={self.n_kv_head}, n_head={self.n_head}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def receptive_field(self) -> int:
        """Number of trailing characters on which the last position's logits depend: n_layer · (W − 1) + 1."""
        return self.n_layer * (self.block_size - 1) + 1
