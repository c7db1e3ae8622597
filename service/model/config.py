"""The shape of a model. This module loads without torch."""

from __future__ import annotations

from dataclasses import dataclass

from service.model.counts import MAX_ORDER

# Field -> smallest and largest value. The largest are far beyond any character model, and no size overflows with them.
BOUNDS: dict[str, tuple[float, float]] = {
    "vocab_size": (1, 0x110000),  # the number of Unicode code points
    "block_size": (1, 1 << 20),
    "n_layer": (1, 10_000),
    "n_head": (1, 1 << 16),
    "n_kv_head": (1, 1 << 16),
    "n_embd": (1, 1 << 16),
    "n_inner": (1, 1 << 20),
    "rope_theta": (1.0, 1e12),
    "norm_eps": (1e-12, 1.0),
    "dropout": (0.0, 1.0),
}


@dataclass(frozen=True)
class GPTConfig:
    """Hyperparameters of a GPT.

    Raises:
        ValueError: a field has the wrong type or is out of BOUNDS, n_embd / n_head is not an even number, or n_kv_head
            does not divide n_head.
    """

    vocab_size: int
    block_size: int = 128  # W: a query sees this many keys, its own included
    n_layer: int = 6
    n_head: int = 4
    n_kv_head: int = 2  # each key/value head serves n_head / n_kv_head query heads (Ainslie et al. 2023)
    n_embd: int = 128
    n_inner: int | None = None  # width of SwiGLU; None: 8/3 of n_embd, rounded up to a multiple of 8
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    dropout: float = 0.0  # on the residual branches, in training only; must be below 1

    def __post_init__(self) -> None:
        if self.n_inner is None and type(self.n_embd) is int:
            object.__setattr__(self, "n_inner", (8 * self.n_embd + 23) // 24 * 8)
        for name, (low, high) in BOUNDS.items():
            value = getattr(self, name)
            if type(value) is not int and (type(low) is int or type(value) is not float):
                raise ValueError(
                    f"{name} must be {'an integer' if type(low) is int else 'a number'}, got {value!r:.50}"
                )
            if not low <= value <= high:  # NaN is in no range
                raise ValueError(f"{name} must be in [{low}, {high}], got {value!r:.50}")
        if self.n_embd % (2 * self.n_head):
            raise ValueError(f"n_embd / n_head must be an even number, got n_embd={self.n_embd}, n_head={self.n_head}")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_kv_head must divide n_head, got n_kv_head={self.n_kv_head}, n_head={self.n_head}")
        if self.dropout == 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def num_parameters(self) -> int:
        assert self.n_inner is not None
        C, hs = self.n_embd, self.head_dim
        block = 2 * C * C + 2 * C * self.n_kv_head * hs + 3 * C * self.n_inner + 2 * C + 2 * hs
        return self.n_layer * block + 2 * self.vocab_size * C + C

    @property
    def receptive_field(self) -> int:
        """The logits of a position depend on at most this many last characters, its own included.

        Those of the network depend on n_layer · (W − 1) + 1, those of the counts on MAX_ORDER − 1.
        """
        return max(self.n_layer * (self.block_size - 1) + 1, MAX_ORDER - 1)
