"""The backend "cuda": CUDA graphs of static shapes, with sampling on the device.

    schedule   the host writes the plan of a launch: the work of each slot, or of each piece of a prompt
    replay     the device runs one graph: K steps of forward and sampler over all slots, or one block of pieces
    collect    the device copies the chosen ids into pinned memory; the host reads them during the next launch

Every decode step runs all slots, used or not. Every piece begins at a multiple of `piece`, counted from the beginning
of its prompt, and runs in a block of fixed size. Each kernel therefore always gets the same shapes, and a row's
arithmetic depends neither on the load nor on when its prompt was scheduled. The same seed gives the same text.

On a device without graphs (a CPU, in tests) the same operations run eagerly. The backend handles slots and ids; it
knows nothing about requests, stops or text.

Letters: S slots, R pieces of a block, T characters of a piece, N rows of a forward (S or R · T), K steps of a launch,
L layers; C n_embd, nh n_head, nkv n_kv_head, hs head_dim, W block_size, V vocab_size as in gpt.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from service.constrain.automaton import Guide
from service.engine.runner import FAILED, NONE, Outcome, Piece, Report, Runner, allowed_by, report_of
from service.engine.selfcheck import refuse_other_weights
from service.model.gpt import GPT, rope_angles
from service.model.kv_cache import additive
from service.model.params import SamplingParams
from service.model.sampling import Draws, Sampler, send

STEPS = (1, 4, 8, 16)  # the numbers of decode steps for which graphs are captured
PIECE = 64  # characters of a prompt per row of a block, at most W
BLOCK = 8  # pieces in a block

# Waits for a launch, and returns its results and its seconds on a GPU; 0 on a CPU, on which the launch itself blocks.
Wait = Callable[[], tuple[list[np.ndarray], float]]


class CudaRunner(Runner):
    """Copies `model` in `dtype` to `device`, and captures graphs for it.

    Raises:
        torch.OutOfMemoryError: the weights, the cache or the graphs do not fit.
    """

    backend = "cuda"
    step_counts = STEPS

    def __init__(self, model: GPT, slots: int, dtype: str, device: torch.device | str):
        self.dtype, self.slots, self.config = dtype, slots, model.config
        self._device = torch.device(device)
        if self._device.type == "cuda":  # events, streams and pinned memory use the process's current device
            torch.cuda.set_device(self._device.index or 0)
            # NVIDIA's containers enable TF32 with an environment variable.
            torch.backends.cuda.matmul.fp32_precision = "ieee"
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self.is_async = self._has_graphs = self._device.type == "cuda"
        c, S, V = model.config, slots, model.config.vocab_size
        self.piece = min(PIECE, c.block_size)
        place = functools.partial(torch.zeros, device=self._device)
        kind = getattr(torch, dtype)
        # In decode, the order of heads in attention's output is (key head, its group) or (group, key head), depending
        # on device and dtype.
        q = place(2, c.n_kv_head, c.n_head // c.n_kv_head, c.head_dim, dtype=kind)
        y = _attention(q, q, q, place(2, 1, 1, q.size(2), dtype=kind))
        self._is_group_first = y.stride(1) < y.stride(2)
        self._weights(model, kind)
        # Rows that do not run write to ring index W; unused pieces use slot S.
        self._cache = place(c.n_layer, S + 1, 2 * c.n_kv_head, c.block_size + 1, c.head_dim, dtype=kind)
        self._every_slot = torch.arange(S, device=self._device)
        self._ring = torch.arange(c.block_size, device=self._device)
        self._none, self._failed, self._spare = torch.tensor((NONE, FAILED, c.block_size), device=self._device)

        # The state of each slot between launches, on the device.
        self._last = place(S + 1, dtype=torch.int64)  # the id that the next decode step feeds
        self._sampler = Sampler(S + 1, V, self._device)

        # The state of each slot between launches, on the host.
        self._positions = np.zeros(S + 1, dtype=np.int64)
        self._draws = Draws(S)

        # The plan and the results of one launch, all at fixed addresses.
        self._plan = Plan(self._device, position=(S,), limit=(S,), u=(max(STEPS), S))
        rows = dict.fromkeys(("slot", "start", "count", "chooses", "u"), (BLOCK,))
        self._pieces = Plan(self._device, **rows, ids=(BLOCK, self.piece))
        self._allowed, self._is_masked = torch.ones(S + 1, V, dtype=torch.bool, device=self._device), False
        self._chosen = place(max(STEPS), S, dtype=torch.int32)
        self._logits = place(max(STEPS), S, V, dtype=torch.float64)
        self._first = place(BLOCK, dtype=torch.int32)
        self._piece_logits = place(BLOCK, self.piece, V, dtype=torch.float64)

        self._graphs: dict[tuple[object, ...], Callable[[], None]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._has_graphs else None  # shared: graphs run in turn
        self._capture_all()

    # -- Runner --

    def start(
        self,
        slot: int,
        params: SamplingParams,
        prompt: Sequence[int],
        ends: Sequence[int] = (),
        written: Sequence[int] = (),
        position: int = 0,
    ) -> None:
        self._sampler.start(slot, params, prompt, written)
        self._positions[slot] = position
        self._draws.start(slot, params.seed, len(written))
        self._cache[:, slot] = 0.0  # masked keys and values are multiplied by 0, and 0 times NaN or infinity is NaN

    def copy(self, source: int, target: int, length: int) -> None:
        used = min(length, self.config.block_size)
        self._cache[:, target, :, :used] = self._cache[:, source, :, :used]
        self._positions[target] = length

    @torch.inference_mode()
    def prefill(self, pieces: list[Piece]) -> Callable[[], Outcome]:
        """Run pieces that begin at multiples of `self.piece`. Longer pieces run in several blocks."""
        parts: list[list[tuple[int, int]]] = []  # blocks of (piece, offset); the parts of one piece are in order
        for offset in range(0, max(len(piece.ids) for piece in pieces), self.piece):
            some = [(b, offset) for b, piece in enumerate(pieces) if offset < len(piece.ids)]
            parts += [some[i : i + BLOCK] for i in range(0, len(some), BLOCK)]
        launches = [(part, self._launch_block(pieces, part)) for part in parts]

        def collect() -> Outcome:
            ids = np.full((len(pieces), 1), NONE, dtype=np.int32)
            logits: dict[int, list[np.ndarray]] = {}  # of pieces with a report: (T, V)
            seconds = 0.0
            for part, wait in launches:
                (chosen, *given), taken = wait()
                seconds += taken
                for r, (b, offset) in enumerate(part):
                    if chosen[r] != NONE:
                        ids[b, 0] = chosen[r]
                    if pieces[b].report is not None:
                        logits.setdefault(b, []).append(given[0][r, : len(pieces[b].ids) - offset])
            reports = {b: pieces[b].report_of(np.concatenate(some), int(ids[b, 0])) for b, some in logits.items()}
            return Outcome(ids, reports, seconds)

        return collect

    @torch.inference_mode()
    def decode(
        self, slots: np.ndarray, steps: np.ndarray, guides: Mapping[int, Guide] = {}, reports: Mapping[int, Report] = {}
    ) -> Callable[[], Outcome]:
        K = int(steps.max())
        plan = self._plan.host
        plan["limit"][:] = 0
        plan["limit"][slots] = steps
        plan["position"][:] = self._positions[: self.slots]
        plan["u"][:K, slots] = self._draws.take(slots, steps).T
        self._mask({int(slots[b]): guide for b, guide in guides.items()})
        self._positions[slots] += steps
        size = next(k for k in STEPS if k >= K)
        needs_all = bool(self._sampler.needs_all[slots].any())
        gives = [lambda: self._chosen[:size]]
        if reports:  # copy the logits of these rows only, because those of all slots are megabytes
            which = torch.from_numpy(slots[list(reports)])
            gives.append(lambda: self._logits[:K].index_select(1, which.to(self._device, non_blocking=True)))
        wait = self._launch(self._plan, ("decode", size, needs_all), gives)

        def collect() -> Outcome:
            (chosen, *logits), seconds = wait()
            ids = chosen[:K, slots].T  # (B, K)
            found = {
                b: report_of(logits[0][: steps[b], i], np.maximum(ids[b, : steps[b]], 0), report)
                for i, (b, report) in enumerate(reports.items())
            }
            return Outcome(ids, found, seconds * K / size)

        return collect

    def is_lost(self, error: Exception) -> bool:
        return isinstance(error, torch.AcceleratorError)

    # -- schedule --

    def _launch_block(self, pieces: list[Piece], part: list[tuple[int, int]]) -> Wait:
        plan, T = self._pieces.host, self.piece
        plan["slot"][:] = self.slots
        for name in ("start", "count", "chooses", "ids"):
            plan[name][:] = 0
        guides: dict[int, Guide] = {}
        needs_all = wants_logits = False
        for r, (b, offset) in enumerate(part):
            piece = pieces[b]
            slot, ids = piece.slot, piece.ids[offset : offset + T]
            plan["slot"][r], plan["start"][r], plan["count"][r] = slot, self._positions[slot], len(ids)
            plan["ids"][r, : len(ids)] = ids
            self._positions[slot] += len(ids)
            wants_logits |= piece.report is not None
            if piece.choose and offset + T >= len(piece.ids):
                plan["chooses"][r] = 1
                plan["u"][r] = self._draws.take(np.array([slot]), np.array([1]))[0, 0]
                needs_all |= bool(self._sampler.needs_all[slot])
                if piece.guide is not None:
                    guides[slot] = piece.guide
        self._mask(guides)
        gives = [lambda: self._first, lambda: self._piece_logits][: 1 + wants_logits]
        return self._launch(self._pieces, ("prefill", wants_logits, needs_all), gives)

    def _mask(self, guides: dict[int, Guide]) -> None:
        """Restrict the ids of the next launch to those that the guides allow, by slot."""
        if guides or self._is_masked:
            send(allowed_by(guides, tuple(self._allowed.shape)), self._allowed)
            self._is_masked = bool(guides)

    # -- replay --

    def _launch(self, plan: Plan, graph: tuple[object, ...], gives: list[Callable[[], Tensor]]) -> Wait:
        """Replay a graph, then copy its results to pinned memory."""
        self._sampler.send()
        is_cuda = self._device.type == "cuda"
        # blocking: a waiting thread leaves its core to others
        events = [torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2)] if is_cuda else []
        if is_cuda:
            events[0].record()
        plan.send()
        self._graphs[graph]()
        tensors = [give() for give in gives]
        copies = [torch.empty(it.shape, dtype=it.dtype, pin_memory=is_cuda) for it in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        if is_cuda:
            events[1].record()

        def wait() -> tuple[list[np.ndarray], float]:
            if is_cuda:
                events[1].synchronize()
            return [copy.numpy() for copy in copies], events[0].elapsed_time(events[1]) / 1e3 if is_cuda else 0.0

        return wait

    def _capture_all(self) -> None:
        self._pieces.tensors["slot"].fill_(self.slots)  # no slot runs yet, so every piece writes to the spare slot
        for needs_all in (False, True):
            for size in STEPS:
                self._capture(("decode", size, needs_all), functools.partial(self._decode, size, needs_all))
            for wants_logits in (False, True):
                function = functools.partial(self._prefill, wants_logits, needs_all)
                self._capture(("prefill", wants_logits, needs_all), function)

    def _capture(self, name: tuple[object, ...], function: Callable[[], None]) -> None:
        if not self._has_graphs:
            self._graphs[name] = function
            return
        with torch.inference_mode():
            stream = _capture_stream(self._device.index or 0)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # lets the libraries choose kernels and allocate before the capture
                function()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                function()
        self._graphs[name] = graph.replay

    def _decode(self, steps: int, needs_all: bool) -> None:
        plan, S, W = self._plan.tensors, self.slots, self.config.block_size
        step = torch.arange(steps, device=self._device)[:, None]
        position, runs = plan["position"] + step, plan["limit"] > step  # (K, S)
        index = torch.where(runs, position % W, self._spare)
        # A full ring holds exactly the band p − W < j ≤ p; before that, only its first p + 1 entries are valid.
        mask = additive(self._ring <= position[..., None], self._cache.dtype)[:, :, None, None]  # (K, S, 1, 1, W)
        cos, sin = rope_angles(position[..., None], self.config, self._cache.dtype)  # (K, S, 1, hs)
        for k in range(steps):
            x = self._forward(self._last[:S], cos[k], sin[k], self._decode_attention(index[k], mask[k]))
            logits = self._logits[k].copy_(self._logits_of(x))  # (S, V) fp64
            ids, is_finite = self._sampler.choose(logits, slice(0, S), plan["u"][k], self._allowed[:S], needs_all)
            self._chosen[k].copy_(torch.where(runs[k], torch.where(is_finite, ids, self._failed), self._none))
            self._last[:S].copy_(torch.where(runs[k], ids, self._last[:S]))
            if needs_all:
                self._sampler.counts[:S].scatter_add_(1, ids[:, None], runs[k, :, None].double())

    def _decode_attention(self, index: Tensor, mask: Tensor) -> Callable[[int, Tensor, Tensor], Tensor]:
        W, nkv, S = self.config.block_size, self.config.n_kv_head, self.slots

        def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            cache = self._cache[layer]
            cache[self._every_slot, :, index] = kv
            q = q.unflatten(1, (nkv, -1))  # (S, nkv, nh / nkv, hs): heads that share keys form one matrix
            y = _attention(q, cache[:S, :nkv, :W], cache[:S, nkv:, :W], mask)
            return (y.transpose(1, 2) if self._is_group_first else y).flatten(1)  # in memory order, without a copy

        return attend

    def _prefill(self, wants_logits: bool, needs_all: bool) -> None:
        plan = self._pieces.tensors
        slot, start, count = plan["slot"], plan["start"], plan["count"]
        x = self._prefill_states(slot, start, count)  # (R, T, C)
        if wants_logits:
            self._piece_logits.copy_(self._logits_of(x))
        last = x.gather(1, (count - 1).clamp(min=0)[:, None, None].expand(-1, 1, x.size(2)))[:, 0]  # (R, C)
        logits = self._logits_of(last).double()
        chooses = plan["chooses"] > 0
        ids, is_finite = self._sampler.choose(logits, slot, plan["u"], self._allowed[slot], needs_all)
        # Pieces that choose no id report a failure by their logits.
        self._first.copy_(torch.where(chooses, torch.where(is_finite, ids, self._failed), self._none))
        self._last.index_copy_(0, slot, torch.where(chooses, ids, self._last[slot]))
        if needs_all:
            self._sampler.counts.index_put_((slot, ids), chooses.double(), accumulate=True)

    def _prefill_states(self, slot: Tensor, start: Tensor, count: Tensor) -> Tensor:
        c, T, nh, nkv = self.config, self.piece, self.config.n_head, self.config.n_kv_head
        W, R = c.block_size, slot.size(0)
        offset = torch.arange(T, device=self._device)
        position = start[:, None] + offset  # (R, T)
        exists = offset < count[:, None]
        index = torch.where(exists, position % W, self._spare)
        # Ring index i holds the latest position before `start` that is congruent to i mod W.
        past = start[:, None] - 1 - (start[:, None] - 1 - self._ring) % W  # (R, W); negative: empty
        key = torch.cat((past, position), dim=1)  # (R, W + T)
        distance = position[:, :, None] - key[:, None]  # (R, T, W + T)
        seen = (distance >= 0) & (distance < W) & (key >= 0)[:, None]
        mask = additive(seen, self._cache.dtype)[:, None]

        def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            cache = self._cache[layer]
            q = q.view(R, T, nkv, -1, c.head_dim)
            kv = kv.view(R, T, 2 * nkv, c.head_dim)
            keys_values = torch.cat((cache[slot, :, :W], kv.transpose(1, 2)), dim=2)  # (R, 2nkv, W + T, hs)
            k, v = keys_values[:, :nkv], keys_values[:, nkv:]
            group = nh // nkv
            # (R, nkv, group · T, hs): the queries of a group form the rows of one matrix
            q = q.permute(0, 2, 3, 1, 4).reshape(R, nkv, group * T, c.head_dim)
            y = _attention(q, k, v, mask.repeat(1, 1, group, 1))
            cache[slot[:, None], :, index] = kv
            y = y.view(R, nkv, group, T, c.head_dim).permute(0, 3, 1, 2, 4)
            return (y.transpose(2, 3) if self._is_group_first else y).reshape(R * T, -1)

        cos, sin = rope_angles(position.view(-1, 1), c, self._cache.dtype)  # (R · T, 1, hs)
        return self._forward(self._pieces.tensors["ids"].flatten(), cos, sin, attend).view(R, T, -1)

    def _forward(
        self, ids: Tensor, cos: Tensor, sin: Tensor, attend: Callable[[int, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Return the states (N, C) of ids (N,); attend(layer, q (N, nh, hs), kv (N, 2nkv, hs)) -> (N, C)."""
        c = self.config
        heads, half = c.n_head + c.n_kv_head, c.head_dim // 2
        # Multiply the gains of QK-norm into the rotation, for all layers at once: x · g rotates to x · (g · cos) + …
        cos, sin = cos * self._gain, sin * self._rolled_gain  # (L, N, nh + nkv, hs)
        x = self._embedding[ids]
        for i, layer in enumerate(self._layers):
            h = torch.rms_norm(x, (c.n_embd,), layer["attn_norm.weight"], c.norm_eps)
            qkv = (h @ layer["attn.qkv.weight"]).view(len(x), -1, c.head_dim)  # (N, nh + 2nkv, hs)
            # The norm includes the values, whose result is unused, because the norm of a part would copy it first.
            qk = torch.rms_norm(qkv, (c.head_dim,), None, c.norm_eps)[:, :heads]
            torch.addcmul(qk * cos[i], qk.roll(half, dims=-1), sin[i], out=qkv[:, :heads])
            y = attend(i, qkv[:, : c.n_head], qkv[:, c.n_head :])
            x.addmm_(y, layer["attn.proj.weight"])  # in place, because a new tensor would need a copy of x
            h = torch.rms_norm(x, (c.n_embd,), layer["mlp_norm.weight"], c.norm_eps)
            gate, up = (h @ layer["mlp.gate_up.weight"]).chunk(2, dim=1)
            x.addmm_(F.silu(gate) * up, layer["mlp.proj.weight"])
        return x

    def _logits_of(self, x: Tensor) -> Tensor:
        return torch.rms_norm(x, (self.config.n_embd,), self._norm, self.config.norm_eps) @ self._head

    # -- weights --

    @torch.no_grad()
    def _weights(self, model: GPT, kind: torch.dtype) -> None:
        c = model.config

        def place(weight: Tensor) -> Tensor:
            return weight.detach().to(self._device, kind, copy=True).contiguous()

        weights = model.state_dict()
        refuse_other_weights(self.backend, c, weights)
        blocks = [block.state_dict() for block in model.blocks]
        if self._is_group_first:  # `proj` takes its inputs (nkv · group · hs) in the order of attention's output
            for block in blocks:
                by_head = block["attn.proj.weight"].view(c.n_embd, c.n_kv_head, -1, c.head_dim)
                block["attn.proj.weight"] = by_head.transpose(1, 2).reshape(c.n_embd, -1)
        self._layers = [{name: place(weight.t()) for name, weight in block.items()} for block in blocks]  # (in, out)
        heads = (("attn.q_norm.weight", c.n_head), ("attn.k_norm.weight", c.n_kv_head))
        gains = [torch.cat([block[name].expand(count, -1) for name, count in heads]) for block in blocks]
        self._gain = place(torch.stack(gains)[:, None])  # (L, 1, nh + nkv, hs)
        self._rolled_gain = self._gain.roll(c.head_dim // 2, dims=-1)
        self._embedding, self._norm = place(weights["embed.weight"]), place(weights["norm.weight"])
        self._head = place(weights["head.weight"].t())


class Plan:
    """The plan of a launch: the host writes it and sends it in one copy, and kernels read it at fixed addresses.

    shapes: the shape of each field. Fields are int64, except for the draws `u`, which are fp64.
    """

    def __init__(self, device: torch.device, **shapes: tuple[int, ...]):
        sizes = [math.prod(shape) for shape in shapes.values()]
        self._device_side = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self._host_side = torch.zeros_like(self._device_side, device="cpu")

        def fields(whole: Tensor) -> dict[str, Tensor]:
            parts = zip(shapes.items(), whole.split(sizes), strict=True)
            found = {name: part.view(shape) for (name, shape), part in parts}
            return found | {"u": found["u"].view(torch.float64)}

        self.tensors = fields(self._device_side)
        self.host = {name: part.numpy() for name, part in fields(self._host_side).items()}

    def send(self) -> None:
        send(self._host_side.numpy(), self._device_side)


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Return one stream for all models of a process, because the libraries keep a workspace per stream."""
    return torch.cuda.Stream(device)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attend; on a GPU, use only the two kernels whose order of summation is known not to depend on the batch."""
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
