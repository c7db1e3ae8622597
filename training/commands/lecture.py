"""The lecture as a program: from a table of bigrams to attention, step by step on a real text.

It follows the steps of Karpathy's "Let's build GPT: from scratch, in code, spelled out" (2023). Each step is a function
of about ten lines that returns its numbers. It uses the service's own modules if they exist. `give` prints the numbers,
and LECTURE.md explains them. Neither the service nor `train` depends on this module.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from service import BUNDLED
from service.model.checkpoint import Checkpoint
from service.model.counts import Counts
from service.model.gpt import GPT, attend
from service.text.model import TextModel
from training.commands.sample import first_prompt
from training.config import ConfigError
from training.messages import plural, visible
from training.model.loading import find_checkpoint, open_model
from training.text.batches import WindowSampler
from training.text.corpus import Corpus, prepare

B, T = 32, 8  # rows and characters of a batch
C = 32  # channels of the model with one head
GREETING = "hii, there!"


def command(args: argparse.Namespace) -> None:
    if args.steps < 1:
        raise ConfigError(f"--steps must be at least 1, got {args.steps}")
    checkpoint = Checkpoint.read(find_checkpoint(args.checkpoint or BUNDLED))
    checkpoint.load_model()  # raises now if it cannot be loaded, not after half a minute
    corpus = prepare(args.data, glob=args.glob or (), exclude=args.exclude or ())
    give(corpus, checkpoint, args.out, steps=args.steps, seed=args.seed)


# -- characters, windows --


def there_and_back(corpus: Corpus) -> tuple[list[int], str]:
    """Encode a text, and decode its ids again. Return the ids and the decoded text."""
    tokenizer, text = corpus.tokenizer, GREETING
    if not all(character in tokenizer for character in text):
        text = tokenizer.decode(corpus.train[: len(text)].tolist())
    ids = tokenizer.encode(text)
    return ids, tokenizer.decode(ids)


def examples(corpus: Corpus, seed: int) -> tuple[Tensor, list[tuple[str, str]]]:
    """Return a batch (B, T) and the T examples in its first window, each a context and the character that follows."""
    idx, targets = WindowSampler(corpus.train, T, seed).next_batch(B)
    decode = corpus.tokenizer.decode
    return torch.from_numpy(idx), [(decode(idx[0, : t + 1].tolist()), decode([int(targets[0, t])])) for t in range(T)]


# -- a table of bigrams --


class Bigram(nn.Module):
    """Predicts the next character from the last one alone: idx (B, T) -> logits (B, T, V), rows of a table."""

    def __init__(self, vocab_size: int):
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)  # N(0, 1)

    def forward(self, idx: Tensor) -> Tensor:
        return self.table(idx)


def train(model: nn.Module, corpus: Corpus, steps: int, seed: int) -> list[float]:
    """Train with AdamW on batches of B windows of T characters. Return each step's loss, in nats per character."""
    sampler, optimizer = WindowSampler(corpus.train, T, seed), torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        idx, targets = map(torch.from_numpy, sampler.next_batch(B))
        loss = F.cross_entropy(model(idx).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def validation_loss(model: nn.Module, corpus: Corpus) -> float:
    """Return the mean loss over the validation split, in windows of T characters."""
    ids = torch.from_numpy(corpus.val.astype("int64"))
    n = (len(ids) - 1) // T * T
    return F.cross_entropy(model(ids[:n].view(-1, T)).flatten(0, 1), ids[1 : n + 1]).item()


@torch.no_grad()
def generate(model: nn.Module, idx: Tensor, count: int, seed: int) -> Tensor:
    """Append `count` characters, one by one: idx (B, T) -> (B, T + count).

    Each is drawn from the softmax of the logits at the last position.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        logits = model(idx[:, -T:])[:, -1]  # (B, V)
        drawn = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
        idx = torch.cat((idx, drawn), dim=1)
    return idx


# -- averaging the past --


def averages(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean of each vector and all vectors before it, computed in three ways: x (T, C) -> (T, C) each."""
    by_loops = torch.stack([torch.stack([x[j] for j in range(i + 1)]).mean(dim=0) for i in range(len(x))])
    triangle = torch.ones(len(x), len(x), dtype=x.dtype).tril()
    by_matrix = triangle / triangle.sum(dim=1, keepdim=True) @ x
    zeros = torch.zeros_like(triangle)
    by_softmax = zeros.masked_fill(triangle == 0, -math.inf).softmax(dim=1) @ x
    return by_loops, by_matrix, by_softmax


# -- attention --


class Head(nn.Module):
    """One head of self-attention: an average whose weights come from the data.

    Each character emits what it looks for (query), what it holds (key) and what it passes on (value).
    """

    def __init__(self, channels: int, head_dim: int, is_causal: bool = True):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(channels, head_dim, bias=False) for _ in range(3))
        self.is_causal = is_causal

    def weights(self, x: Tensor) -> Tensor:
        """Return the weight of each character (last axis) in each character's average: x (B, T, C) -> (B, T, T)."""
        q, k = self.query(x), self.key(x)
        scores = q @ k.mT / math.sqrt(q.size(-1))
        if self.is_causal:  # nothing from the future
            scores = scores.masked_fill(torch.ones_like(scores).triu(1) == 1, -math.inf)
        return scores.softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.weights(x) @ self.value(x)


class OneHead(nn.Module):
    """The smallest model that looks back: idx (B, T) -> logits (B, T, V).

    It adds embeddings of the positions, because attention alone does not depend on the order.
    """

    def __init__(self, vocab_size: int):
        super().__init__()
        self.characters, self.places = nn.Embedding(vocab_size, C), nn.Embedding(T, C)
        self.head, self.logits = Head(C, C), nn.Linear(C, vocab_size)

    def vectors(self, idx: Tensor) -> Tensor:
        return self.characters(idx) + self.places.weight[: idx.size(1)]

    def forward(self, idx: Tensor) -> Tensor:
        return self.logits(self.head(self.vectors(idx)))


@torch.no_grad()
def difference_to_the_service(head: Head, x: Tensor) -> float:
    """Return the largest difference between a head and `attend`, the attention of the served model. x (B, T, C)."""
    q, k, v = (layer(x)[:, None] for layer in (head.query, head.key, head.value))  # (B, 1, T, hs)
    return (head(x) - attend(q, k, v, is_causal=True)[:, 0]).abs().max().item()


@torch.no_grad()
def heads_at_once(x: Tensor, num_heads: int) -> float:
    """Return the largest difference between heads computed together and one after another.

    Each head sees C / num_heads channels.
    """
    parts = x.unflatten(-1, (num_heads, -1)).transpose(1, 2)  # (B, nh, T, hs)
    together = attend(parts, parts, parts, is_causal=True)
    alone = [attend(part[:, None], part[:, None], part[:, None], is_causal=True) for part in parts.unbind(1)]
    return (together - torch.cat(alone, dim=1)).abs().max().item()


class Scale(NamedTuple):
    variance: float  # variance of q · k
    scaled: float  # variance of q · k / √head_dim
    sharpest: float  # mean of the largest of T weights without the scale
    softer: float  # mean of the largest of T weights with the scale
    sum_if_late: float  # sum of a row's weights if the scale comes after the softmax


def scale(head_dim: int, seed: int) -> Scale:
    """Measure why q · k is divided by √head_dim, and why before the softmax. q and k have unit variance."""
    q, *k = torch.randn(1 + T, 4096, head_dim, generator=torch.Generator().manual_seed(seed))
    scores = torch.stack([(q * key).sum(dim=1) for key in k], dim=1)  # (4096, T): T keys for each query
    root = math.sqrt(head_dim)
    sharp, soft = scores.softmax(dim=1), (scores / root).softmax(dim=1)
    largest = [weights.amax(dim=1).mean().item() for weights in (sharp, soft)]
    late = (sharp / root).sum(dim=1).mean().item()
    return Scale(scores.var().item(), (scores / root).var().item(), largest[0], largest[1], late)


@torch.no_grad()
def seen_from(model: Callable[[Tensor], Tensor], x: Tensor, changed: Tensor) -> list[float]:
    """Return how much each position's output differs between the inputs x and `changed`, (1, T, …) each."""
    return (model(x) - model(changed)).abs().amax(dim=-1)[0].tolist()


@torch.no_grad()
def difference_beside_others(model: GPT, idx: Tensor) -> float:
    """Return the largest difference between the first row's logits in a batch idx (B, T) and alone.

    It is rounding, because rows do not exchange anything.
    """
    return (model(idx)[:1] - model(idx[:1])).abs().max().item()


def score_bytes(rows: int, heads: int, length: int) -> int:
    """Return the bytes of a layer's attention weights in float32, if all are stored."""
    return 4 * rows * heads * length * length


# -- the lecture --


def give(corpus: Corpus, checkpoint: Checkpoint, picture: Path, *, steps: int, seed: int) -> None:
    """Print all steps and draw the picture, in under a minute on a CPU."""
    started = time.monotonic()
    torch.manual_seed(seed)
    show_characters(corpus)
    show_windows(corpus, seed)
    bigram_losses = show_bigram(corpus, steps, seed)
    show_means()
    head, vectors = show_head()
    show_scale(seed)
    show_mask(head, vectors)
    model = checkpoint.load_model()
    show_batch(model)
    one_head, one_head_losses = show_one_head(corpus, steps // 2, seed)
    loss = show_served(corpus, checkpoint, model, seed)
    draw(picture, corpus, {"bigram table": bigram_losses, "one head": one_head_losses}, one_head, loss, seed)
    print(f"\n{time.monotonic() - started:.0f} s; picture: {picture}")


def show_characters(corpus: Corpus) -> None:
    title(1, "A text is a sequence of integers")
    tokenizer = corpus.tokenizer
    ids, back = there_and_back(corpus)
    characters = "".join(tokenizer.characters)
    print(f"{plural(len(corpus.ids), 'character')}, {tokenizer.vocab_size} different: {characters!r}")
    print(f"{back!r} is {' '.join(map(str, ids))}, and back")
    print(f"the first 90 % to train on: {len(corpus.train):,}; the rest to validate: {len(corpus.val):,}")


def show_windows(corpus: Corpus, seed: int) -> None:
    title(2, f"A window of {T} characters holds {T} examples")
    batch, in_window = examples(corpus, seed)
    for context, following in in_window:
        print(f"after {context!r} comes {following!r}")
    print(f"a batch: {B} windows, {batch.numel()} examples")


def show_bigram(corpus: Corpus, steps: int, seed: int) -> list[float]:
    """Return the loss of each training step."""
    title(3, "The bigram model: a table with a row for each character")
    V = corpus.tokenizer.vocab_size
    bigram = Bigram(V)
    print(f"uniform guess: ln {V} = {math.log(V):.2f} nats; the untrained table: {validation_loss(bigram, corpus):.2f}")
    print(indented(generated(bigram, corpus, seed)))
    losses = train(bigram, corpus, steps, seed)
    counted = counted_bigrams(corpus)
    print(f"after {plural(steps, 'step')}: {validation_loss(bigram, corpus):.2f}; counting bigrams gives {counted:.2f}")
    print(indented(generated(bigram, corpus, seed)))
    return losses


def counted_bigrams(corpus: Corpus) -> float:
    """Return the loss of counts of bigrams, smoothed, on the validation split."""
    counts = Counts.count(corpus.train, corpus.tokenizer.vocab_size, order=2, max_bytes=None)
    return float(-np.log(counts.probabilities(corpus.val)[0]).mean())


def show_means() -> None:
    title(4, "Looking back: the mean of the past, in three ways")
    x = torch.randn(T, 2, dtype=torch.float64)
    by_loops, by_matrix, by_softmax = averages(x)
    print(f"loops and a triangular matrix differ by {(by_loops - by_matrix).abs().max():.0e},", end=" ")
    print(f"loops and a softmax of zeros and -inf by {(by_loops - by_softmax).abs().max():.0e}")


def show_head() -> tuple[Head, Tensor]:
    """Return the untrained head and the vectors (B, T, C) that it averaged."""
    title(5, "One head of attention: a mean whose weights come from the data")
    head, vectors = Head(C, 16), torch.randn(B, T, C)
    print("weights of one row:", *(f"{value:.2f}" for value in head.weights(vectors)[0, -1].tolist()))
    print(f"the service's kernel gives the same, to {difference_to_the_service(head, vectors):.0e}")
    print(f"4 heads of {C // 4} channels at once and one after the other: {heads_at_once(vectors, 4):.0e} apart")
    return head, vectors


def show_scale(seed: int) -> None:
    title(6, "The scale: q · k / √head_dim, before the softmax")
    measured = scale(16, seed)
    print(f"head_dim 16: q · k has variance {measured.variance:.1f}, divided by √16 {measured.scaled:.2f}")
    print(f"the largest of {T} weights is {measured.sharpest:.2f} on average, with the scale {measured.softer:.2f}")
    print(f"scaled after the softmax, a row's weights add up to {measured.sum_if_late:.2f} and stay as sharp")


def show_mask(head: Head, vectors: Tensor) -> None:
    title(7, "The mask, the order, the batch")
    changed, encoder = vectors[:1].clone(), Head(C, 16, is_causal=False)
    changed[:, -1] += 1
    print("change the last character; outputs change by", end=" ")
    print(*(f"{value:.2f}" for value in seen_from(head, vectors[:1], changed)))
    print("without the mask, as in an encoder, by      ", end=" ")
    print(*(f"{value:.2f}" for value in seen_from(encoder, vectors[:1], changed)))
    swapped = vectors[:1, [1, 0, *range(2, T)]]
    print(f"swap the first two; the last output changes by {seen_from(head, vectors[:1], swapped)[-1]:.0e}: ", end="")
    print("without positions, attention knows no order")


def show_batch(model: GPT) -> None:
    rows = torch.randint(model.config.vocab_size, (4, 64))
    print(f"a row beside three others and alone: {difference_beside_others(model, rows):.0e} apart")
    print(f"weights of 32 rows, 8 heads, 512 characters: {score_bytes(32, 8, 512) / 1e6:,.0f} MB; ", end="")
    print("a fused kernel writes none of them")


def show_one_head(corpus: Corpus, steps: int, seed: int) -> tuple[OneHead, list[float]]:
    """Return the trained model and the loss of each step."""
    title(8, "A model with one head")
    model = OneHead(corpus.tokenizer.vocab_size)
    losses = train(model, corpus, steps, seed)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {plural(steps, 'step')}:", end=" ")
    print(f"{validation_loss(model, corpus):.2f}")
    print(indented(generated(model, corpus, seed)))
    return model, losses


def show_served(corpus: Corpus, checkpoint: Checkpoint, model: GPT, seed: int) -> float | None:
    """Return the loss of the full model if it was trained on the same text, so that it can be compared."""
    title(9, f"The model that is served: {model.config.n_layer} layers of {model.config.n_head} heads, RoPE, SwiGLU")
    loss = checkpoint.training.get("losses", {}).get("whole")
    about = checkpoint.training.get("data", {})
    print(f"{model.config.num_parameters:,} parameters" + (f": {loss:.2f}" if loss else ""), end=" ")
    print(f"(trained on {about.get('name', 'another text')})")
    its_texts = TextModel.of(checkpoint)
    with open_model(model, its_texts, slots=1, counts=checkpoint.load_counts()) as served:
        prompt = first_prompt(its_texts)
        print(indented(served.generate(prompt, max_tokens=200, seed=seed, ignore_eos=True).text))
    return loss if about.get("sha256") == corpus.sha256 else None


def generated(model: nn.Module, corpus: Corpus, seed: int) -> str:
    """Return 200 characters that follow a line break, or the text's first character if it has none."""
    tokenizer = corpus.tokenizer
    first = tokenizer.encode("\n")[0] if "\n" in tokenizer else int(corpus.train[0])
    return tokenizer.decode(generate(model, torch.tensor([[first]]), 200, seed)[0, 1:].tolist())


def title(number: int, words: str) -> None:
    print(f"\n{number}. {words}\n")


def indented(text: str) -> str:
    return "\n".join("    " + visible(line) for line in text.splitlines())


def draw(
    picture: Path, corpus: Corpus, trained: dict[str, list[float]], one_head: OneHead, served: float | None, seed: int
) -> None:
    """Draw the losses, the two softmaxes, the weights of a mean and the weights of a trained head."""
    from matplotlib.figure import Figure  # takes half a second to import

    figure = Figure(figsize=(11, 8), layout="constrained")
    (losses, softmax), (mean, learned) = figure.subplots(2, 2)
    for label, values in trained.items():
        every = max(1, len(values) // 200)
        smooth = [sum(values[i : i + every]) / every for i in range(0, len(values) - every + 1, every)]
        losses.plot([i * every for i in range(len(smooth))], smooth, label=label)
    losses.axhline(math.log(corpus.tokenizer.vocab_size), color="gray", ls=":", label="uniform guess")
    if served:
        losses.axhline(served, color="tab:green", label="the model that is served")
    losses.set(title="training loss", xlabel="step", ylabel="nats per character")
    losses.legend()
    scores = torch.randn(T, generator=torch.Generator().manual_seed(seed))
    for label, factor, shift in (("q · k / √16", 1.0, -0.2), ("q · k", 4.0, 0.2)):
        softmax.bar([i + shift for i in range(T)], (factor * scores).softmax(0).tolist(), width=0.4, label=label)
    softmax.set(title="softmax with and without the scale", xlabel="key", ylabel="weight")
    softmax.legend()
    mean.imshow((torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None]).numpy(), cmap="Blues", vmin=0, vmax=1)
    mean.set(title="the mean of the past", xlabel="from", ylabel="to")
    ids = torch.from_numpy(corpus.val[:T].astype("int64"))
    with torch.no_grad():
        learned.imshow(one_head.head.weights(one_head.vectors(ids[None]))[0].numpy(), cmap="Blues", vmin=0, vmax=1)
    characters = [repr(character)[1:-1] for character in corpus.tokenizer.decode(ids.tolist())]
    learned.set(title="what one head has learned to look at", xlabel="from", ylabel="to")
    learned.set_xticks(range(T), characters)
    learned.set_yticks(range(T), characters)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)
