"""An independent GPT, written from the papers as explicit loops over scalars: fp64, no torch, no cache.

It reads the checkpoint files itself and shares no code with `service`, so that the two cannot share an error in the
model, the tensor names or the configuration.
"""

import json
import math
from pathlib import Path

from safetensors.numpy import load_file


def matvec(matrix, x):
    return [sum(float(w) * v for w, v in zip(row, x, strict=True)) for row in matrix]


def rms_norm(x, weight, eps):
    scale = 1.0 / math.sqrt(sum(v * v for v in x) / len(x) + eps)
    return [v * scale * float(w) for v, w in zip(x, weight, strict=True)]


def rope(x, position, theta):
    """Rotate the pairs (x[i], x[i + n/2]) by position · theta^(−2i/n)."""
    n = len(x)
    out = list(x)
    for i in range(n // 2):
        angle = position * theta ** (-2 * i / n)
        a, b = x[i], x[i + n // 2]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + n // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def softmax(scores):
    top = max(scores)
    weights = [math.exp(s - top) for s in scores]
    return [w / sum(weights) for w in weights]


def attention(q, k, v, window, kept=None):
    """One head: q, k, v lists of vectors, one per position -> one vector per position.

    The query at p attends to the keys at p − window < j ≤ p. To `kept`, a list, its weights are appended: for each
    query a dict by key.
    """
    out, rows = [], []
    for p in range(len(q)):
        seen = [j for j in range(len(k)) if p - window < j <= p]
        # scaled before the softmax
        scores = [sum(a * b for a, b in zip(q[p], k[j], strict=True)) / math.sqrt(len(q[p])) for j in seen]
        weights = softmax(scores)
        rows.append(dict(zip(seen, weights, strict=True)))
        out.append([sum(w * v[j][d] for w, j in zip(weights, seen, strict=True)) for d in range(len(v[0]))])
    if kept is not None:
        kept.append(rows)
    return out


def logits(folder, ids, kept=None):
    """Logits (len(ids), vocab_size), as nested lists, of a checkpoint folder in the Qwen3 layout.

    kept: a list to which the weights of each head of each layer are appended, as `attention` does.
    """
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
    w = load_file(folder / "model.safetensors")
    n_head, n_kv = config["num_attention_heads"], config["num_key_value_heads"]
    size, eps = config["head_dim"], config["rms_norm_eps"]
    theta, window = config["rope_parameters"]["rope_theta"], config["sliding_window"]
    x = [[float(v) for v in w["model.embed_tokens.weight"][i]] for i in ids]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        normed = [rms_norm(h, w[at + "input_layernorm.weight"], eps) for h in x]

        def heads(name, count, norm=None, normed=normed, at=at):
            out = []
            for head in range(count):
                rows = w[f"{at}self_attn.{name}.weight"][head * size : (head + 1) * size]
                vectors = [matvec(rows, h) for h in normed]
                if norm is not None:
                    weight = w[f"{at}self_attn.{norm}.weight"]
                    vectors = [rope(rms_norm(u, weight, eps), p, theta) for p, u in enumerate(vectors)]
                out.append(vectors)
            return out

        q, k, v = heads("q_proj", n_head, "q_norm"), heads("k_proj", n_kv, "k_norm"), heads("v_proj", n_kv)
        per_head = [attention(q[h], k[h * n_kv // n_head], v[h * n_kv // n_head], window, kept) for h in range(n_head)]
        for p in range(len(x)):
            joined = [value for head in per_head for value in head[p]]
            x[p] = [a + b for a, b in zip(x[p], matvec(w[at + "self_attn.o_proj.weight"], joined), strict=True)]
            h = rms_norm(x[p], w[at + "post_attention_layernorm.weight"], eps)
            gate, up = matvec(w[at + "mlp.gate_proj.weight"], h), matvec(w[at + "mlp.up_proj.weight"], h)
            inner = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
            x[p] = [a + b for a, b in zip(x[p], matvec(w[at + "mlp.down_proj.weight"], inner), strict=True)]
    return [matvec(w["lm_head.weight"], rms_norm(h, w["model.norm.weight"], eps)) for h in x]


def mixture(folder, ids, rows=None):
    """Logits (len(ids), vocab_size) of a checkpoint folder with counts.bin: ln of the mixture after each id.

    rows: the network's logits, if they are known.
    """
    rows = logits(folder, ids) if rows is None else rows
    after, found = counts(folder), []
    for i, row in enumerate(rows):
        expert, weight = after(ids[max(0, i - 6) : i + 1])
        found.append([math.log((1 - weight) * p + weight * q) for p, q in zip(softmax(row), expert, strict=True)])
    return found


def counts(folder):
    """The counts of a folder: a function from at most 7 ids to the distribution after them, and its weight."""
    file = load_file(Path(folder) / "counts.bin")
    weights, base = file["weights"].tolist(), [int(n) / 2**32 for n in file["base"]]
    older, children, followers, rests, ids, shares = (
        file[name].tolist() for name in ("older", "children", "followers", "rests", "ids", "shares")
    )
    contexts = [()]
    for parent, count in enumerate(children):
        for _ in range(count):
            contexts.append((older[len(contexts)], *contexts[parent]))
    table, start = {}, 0  # context -> rest, and the share of each follower
    for context, count, code in zip(contexts, followers, rests, strict=True):
        rest = 1 / (1 + 2 ** ((code - 64) / 12)) if count else 1.0
        steps = [round(2 ** (24 - code / 16)) for code in shares[start : start + count]]
        given = {id: (1 - rest) * n / sum(steps) for id, n in zip(ids[start : start + count], steps, strict=True)}
        table[context], start = (rest, given), start + count

    def after(history):
        known, longest = [], ()
        for length in range(1, min(len(weights) - 1, len(history)) + 1):
            context = tuple(history[-length:])
            if context not in table:
                break
            known.append(context)
            longest = context if table[context][1] else longest
        p = base
        for context in known:  # from short to long
            rest, given = table[context]
            p = [rest * lower + given.get(id, 0.0) for id, lower in enumerate(p)]
        rest = table[longest][0]
        return p, weights[len(longest)][0 if rest < 0.15 else 1 if rest < 0.45 else 2]

    return after
