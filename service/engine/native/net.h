// The model of service/model/gpt.py: its weights, its cache, and a forward of some rows.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "abi.h"
#include "attention.h"
#include "lanes.h"
#include "threads.h"
#include "weights.h"

namespace {

// The rotation of queries and keys by their positions.
template <class T> class Rotation {
 public:
  RARE Rotation(const double* frequencies, int hs) : hs(hs), frequencies(frequencies, frequencies + hs / 2) {
    kept.resize(KEPT * hs);
    for (int64_t p = 0; p < KEPT; ++p) compute(p, &kept[p * hs]);
  }

  // cos (hs/2), then sin (hs/2), of a position's angles.
  void write(int64_t position, T* to) const {
    if (position < KEPT) std::copy_n(&kept[position * hs], hs, to);
    else compute(position, to);
  }

 private:
  static constexpr int64_t KEPT = 4096;  // positions; of later ones it is computed

  void compute(int64_t position, T* to) const {
    for (int d = 0; d < hs / 2; ++d) {
      const double angle = double(position) * frequencies[d];
      to[d] = T(std::cos(angle)), to[d + hs / 2] = T(std::sin(angle));
    }
  }

  const int hs;
  const std::vector<double> frequencies;
  std::vector<T> kept;  // (KEPT, hs)
};

template <class T, class W> struct Layer {
  std::vector<T> attn_norm, q_norm, k_norm, mlp_norm;
  Matrix<T, W> qkv, proj, gate_up, down;
};

// T: arithmetic; W: stored weights; K: stored keys and values.
template <class T, class W, class K> struct Net {
  RARE Net(const ChargptConfig& c, const float* const* weights)
      : sizes(c), norm_eps(T(c.norm_eps)), rotation(c.frequencies, sizes.hs), cache(sizes, c.slots) {
    pack(c, weights);
  }

  size_t weight_bytes() const { return storage.bytes; }

  const Sizes<T> sizes;
  const T norm_eps;
  const Rotation<T> rotation;
  std::vector<T> embed, final_norm;
  std::vector<Layer<T, W>> layers;
  Matrix<T, W> head;
  Cache<T, K> cache;

 private:
  // given: embed, then the matrices of each layer in the order of native.py's _BLOCK, then norm and head.
  RARE void pack(const ChargptConfig& c, const float* const* given) {
    const int in = c.n_embd, hs = sizes.hs, hp = sizes.hp, C = sizes.C, F = sizes.F, V = sizes.V, heads = sizes.heads;
    const size_t attended = size_t(c.n_head) * hp;
    const size_t per_layer = size_t(heads) * hp * C + attended * C + size_t(2) * F * C + size_t(C) * F;
    storage = Buffer<W>(per_layer * c.n_layer + size_t(V) * C);
    W* to = storage.data;
    const auto vector = [](const float* from, int n, int length) {
      std::vector<T> v(length);
      std::copy_n(from, n, v.begin());
      return v;
    };
    const float* const* w = given;
    const float* table = *w++;
    embed.resize(size_t(c.vocab_size) * C);
    for (int id = 0; id < c.vocab_size; ++id) std::copy_n(table + size_t(id) * in, in, &embed[size_t(id) * C]);
    layers.resize(c.n_layer);
    for (Layer<T, W>& layer : layers) {
      layer.attn_norm = vector(*w++, in, C);
      const float* qkv = *w++;
      to = layer.qkv.pack(to, heads * hp, C, [&](int o, int i) {
        return o % hp < hs && i < in ? qkv[size_t(o / hp * hs + o % hp) * in + i] : 0.0f;
      });
      layer.q_norm = vector(*w++, hs, hp);
      layer.k_norm = vector(*w++, hs, hp);
      const float* proj = *w++;
      to = layer.proj.pack(to, C, int(attended), [&](int o, int i) {
        return o < in && i % hp < hs ? proj[size_t(o) * in + i / hp * hs + i % hp] : 0.0f;
      });
      layer.mlp_norm = vector(*w++, in, C);
      const float* gate_up = *w++;
      to = layer.gate_up.pack(to, 2 * F, C, [&](int o, int i) {
        return o % F < c.n_inner && i < in ? gate_up[size_t(o / F * c.n_inner + o % F) * in + i] : 0.0f;
      });
      const float* down = *w++;
      to = layer.down.pack(to, C, F, [&](int o, int i) {
        return o < in && i < c.n_inner ? down[size_t(o) * c.n_inner + i] : 0.0f;
      });
    }
    final_norm = vector(*w++, in, C);
    const float* out = *w++;
    head.pack(to, V, C, [&](int o, int i) { return o < c.vocab_size && i < in ? out[size_t(o) * in + i] : 0.0f; });
  }

  Buffer<W> storage;  // of the matrices
};

// Whether fp16 holds keys and values of any text. Inputs of a layer and keys are RMS-normalized, so their lengths are
// at most √n_embd and √head_dim times the norm's weights; rotation keeps that of a pair. weights: as `Net` takes them.
bool fits_half(const ChargptConfig& c, const float* const* weights) {
  const int hs = c.n_embd / c.n_head;
  double largest = 0;
  for (int layer = 0; layer < c.n_layer; ++layer) {
    const float* const* w = weights + 1 + 8 * layer;
    const float *norm = w[0], *values = w[1] + size_t(c.n_head + c.n_kv_head) * hs * c.n_embd, *k_norm = w[3];
    for (int d = 0; d < hs; ++d) largest = std::max(largest, std::sqrt(hs) * std::fabs(k_norm[d]));
    for (int o = 0; o < c.n_kv_head * hs; ++o, values += c.n_embd) {
      double squares = 0;
      for (int i = 0; i < c.n_embd; ++i) squares += std::pow(double(values[i]) * norm[i], 2);
      largest = std::max(largest, std::sqrt(c.n_embd * squares));
    }
  }
  return largest < 0.99 * LARGEST_HALF;
}

constexpr int BATCH = 48;  // rows that pass the layers together; activations of wide models still fit a cache

// A row to run.
struct Row {
  int slot;
  int32_t id;
  int64_t position;
  bool wants_logits;
};

// What a thread computes for up to BATCH rows. Of a team's batch, threads share y, out, gate_up and logits.
template <class T, class K> struct Activations {
  RARE explicit Activations(const Sizes<T>& s)
      : x(BATCH * s.C), h(BATCH * s.C), qkv(BATCH * s.heads * s.hp), y(BATCH * s.n_head * s.hp), out(BATCH * s.C),
        gate_up(BATCH * 2 * s.F), p(QUERY_HEADS * s.Wp), cos_sin(BATCH * s.hs), logits(BATCH * s.V), key(s.hp) {}

  Buffer<T> x, h, qkv, y, out, gate_up, p, cos_sin;
  Buffer<T> logits;    // (rows that want them, V)
  std::vector<K> key;  // (hp,)
};

template <class T> void add(T* x, const T* y, int n) {
  for (int i = 0; i < n; i += LANES<T>) store(x + i, load(x + i) + load(y + i));
}

// RMSNorm over n numbers, padded with zeros to `length`.
template <class T> void norm(const T* x, const T* gain, T* y, int length, int n, T eps) {
  Lanes<T> squares = all(T(0));
  for (int i = 0; i < length; i += LANES<T>) squares = fma(load(x + i), load(x + i), squares);
  const Lanes<T> scale = all(T(1) / std::sqrt(sum(squares) / T(n) + eps));
  for (int i = 0; i < length; i += LANES<T>) store(y + i, load(x + i) * scale * load(gain + i));
}

// gate · σ(gate) · up, over the gate. σ(x) = e^min(x, 0) / (1 + e^−|x|).
template <class T> void swiglu(T* gate, const T* up, int first, int end) {
  const Lanes<T> one = all(T(1)), zero = all(T(0));
  for (int i = first; i < end; i += LANES<T>) {
    const Lanes<T> x = load(gate + i);
    Lanes<T> magnitude = larger(x, zero - x);
    const Lanes<T> e = exp_of_negative(zero - magnitude);
    Lanes<T> numerator;
    EACH_PART numerator.part[k] = x.part[k] < 0 ? e.part[k] : one.part[k];
    store(gate + i, x * (numerator / (one + e)) * load(up + i));
  }
}

template <class T> void norm_and_rotate(const Sizes<T>& sizes, T* x, const T* gain, T eps, const T* cos_sin) {
  constexpr int N = LANES<T>;
  norm(x, gain, x, sizes.hp, sizes.hs, eps);
  const int half = sizes.hs / 2;
  const T *cos = cos_sin, *sin = cos_sin + half;
  int d = 0;
  for (; d + N <= half; d += N) {
    const Lanes<T> a = load(x + d), b = load(x + d + half), c = load(cos + d), s = load(sin + d);
    store(x + d, fma(b * all(T(-1)), s, a * c));
    store(x + d + half, fma(a, s, b * c));
  }
  for (; d < half; ++d) {
    const T a = x[d], b = x[d + half];
    x[d] = std::fma(-b, sin[d], a * cos[d]);
    x[d + half] = std::fma(a, sin[d], b * cos[d]);
  }
}

// Attention of row r in a layer, for a range of key heads. Rows of a sequence come in order, and each writes its key
// and value before it attends, as in a ring of W. y: null if only the key and the value are needed.
template <class T, class W, class K>
void attend(const Net<T, W, K>& net, const std::vector<Row>& rows, int layer, int r, std::pair<int, int> kv_heads,
            Activations<T, K>& own, T* y) {
  const Sizes<T>& sizes = net.sizes;
  const Cache<T, K>& cache = net.cache;
  const auto [first, end] = kv_heads;
  const int hs = sizes.hs, hp = sizes.hp, group = sizes.group;
  const Row& row = rows[r];
  T* q = own.qkv.data + size_t(r) * sizes.heads * hp;
  const T* cos_sin = own.cos_sin.data + r * hs;
  const int index = int(row.position % sizes.W);
  const T scale = T(1) / std::sqrt(T(hs));
  // Keys and values come from far. While these are used, those of the next row are prefetched, after the last row those
  // of the first one in the next layer.
  const bool is_end = size_t(r) + 1 == rows.size();
  const Row& next = rows[is_end ? 0 : r + 1];
  const int next_layer = is_end ? (layer + 1) % sizes.n_layer : layer;
  for (int h = first * group; y && h < end * group; ++h) {
    norm_and_rotate(sizes, q + h * hp, net.layers[layer].q_norm.data(), net.norm_eps, cos_sin);
    for (int d = 0; d < hp; ++d) q[h * hp + d] *= scale;
  }
  for (int h = first; h < end; ++h) {
    T* k = q + (sizes.n_head + h) * hp;
    const T* v = q + (sizes.n_head + sizes.n_kv_head + h) * hp;
    norm_and_rotate(sizes, k, net.layers[layer].k_norm.data(), net.norm_eps, cos_sin);
    K* keys = cache.keys(row.slot, layer, h);
    const K* values = cache.values(keys);
    K* key = cache.key(keys, index);
    convert_all(k, own.key.data(), hp);
    for (int d = 0; d < hs; ++d) key[d * KEYS<T>] = own.key[d];
    convert_all(v, cache.value(keys, index), hp);
    if (!y) continue;
    const int seen = int(std::min<int64_t>(row.position + 1, sizes.W));
    ptrdiff_t ahead = (const char*)cache.keys(next.slot, next_layer, h) - (const char*)keys;
    for (int g = 0; g < group; g += QUERY_HEADS) {
      const int many = std::min(QUERY_HEADS, group - g);
      const T* queries = q + (h * group + g) * hp;
      T* to = y + (h * group + g) * hp;
      if (g) ahead = 0;
      if constexpr (QUERY_HEADS == 1) attend_heads<1>(sizes, queries, keys, values, seen, own.p.data, to, ahead);
      else if (many == 1) attend_heads<1>(sizes, queries, keys, values, seen, own.p.data, to, ahead);
      else if (many == 2) attend_heads<2>(sizes, queries, keys, values, seen, own.p.data, to, ahead);
      else if (many == 3) attend_heads<3>(sizes, queries, keys, values, seen, own.p.data, to, ahead);
      else attend_heads<4>(sizes, queries, keys, values, seen, own.p.data, to, ahead);
    }
  }
}

// Run rows through the layers, and write the logits of those that want them to the batch. Each thread of a team has its
// own copy of the residual stream (own.x), and computes its share of every product and of the key heads. own: of this
// thread; batch: of the team's first thread.
template <class T, class W, class K>
void forward(const Net<T, W, K>& net, const std::vector<Row>& rows, Activations<T, K>& own, Activations<T, K>& batch,
             Team& team) {
  const Sizes<T>& s = net.sizes;
  const int C = s.C, F = s.F, hp = s.hp, heads = s.heads, n_embd = s.n_embd;
  int count = int(rows.size());
  for (int r = 0; r < count; ++r) {
    std::copy_n(&net.embed[size_t(rows[r].id) * C], C, own.x.data + size_t(r) * C);
    net.rotation.write(rows[r].position, own.cos_sin.data + r * s.hs);
  }
  const int attended = s.n_head * hp, per_head = hp / LANES<T>, inner = F / LANES<T>;
  const auto [first_kv, end_kv] = team.share(s.n_kv_head);
  const auto of_out = team.share(C / LANES<T>);
  const auto [first_inner, end_inner] = team.share(inner);
  T *x = own.x.data, *h = own.h.data, *qkv = own.qkv.data, *gate = batch.gate_up.data, *out = batch.out.data;
  for (int l = 0; l < s.n_layer; ++l) {
    const Layer<T, W>& layer = net.layers[l];
    for (int r = 0; r < count; ++r) norm(x + r * C, layer.attn_norm.data(), h + r * C, C, n_embd, net.norm_eps);
    if (team.is_alone()) {
      multiply(layer.qkv, {0, heads * per_head}, count, h, C, qkv, heads * hp);
    } else {
      const int firsts[] = {0, s.n_head, s.n_head + s.n_kv_head}, sizes[] = {s.group, 1, 1};
      for (int part = 0; part < 3; ++part) {
        const int first = firsts[part] + first_kv * sizes[part], end = firsts[part] + end_kv * sizes[part];
        multiply(layer.qkv, {first * per_head, end * per_head}, count, h, C, qkv, heads * hp);
      }
    }
    const bool is_last = l == s.n_layer - 1;
    int wanted = 0;  // of the last layer only what leads to logits matters
    for (int r = 0; r < count; ++r) {
      const bool is_wanted = !is_last || rows[r].wants_logits;
      T* y = is_wanted ? batch.y.data + size_t(wanted) * attended : nullptr;
      attend(net, rows, l, r, {first_kv, end_kv}, own, y);
      if (!is_wanted) continue;
      if (wanted != r) std::copy_n(x + size_t(r) * C, C, x + size_t(wanted) * C);
      ++wanted;
    }
    count = wanted;
    team.wait();
    multiply(layer.proj, of_out, count, batch.y.data, attended, out, C);
    team.wait();
    for (int r = 0; r < count; ++r) {
      add(x + r * C, out + r * C, C);
      norm(x + r * C, layer.mlp_norm.data(), h + r * C, C, n_embd, net.norm_eps);
    }
    if (team.is_alone()) {
      multiply(layer.gate_up, {0, 2 * inner}, count, h, C, gate, 2 * F);
    } else {
      multiply(layer.gate_up, {first_inner, end_inner}, count, h, C, gate, 2 * F);
      multiply(layer.gate_up, {inner + first_inner, inner + end_inner}, count, h, C, gate, 2 * F);
    }
    for (int r = 0; r < count; ++r) {
      T* of_row = gate + size_t(r) * 2 * F;
      swiglu(of_row, of_row + F, first_inner * LANES<T>, end_inner * LANES<T>);
    }
    team.wait();
    multiply(layer.down, of_out, count, gate, 2 * F, out, C);
    team.wait();
    for (int r = 0; r < count; ++r) add(x + r * C, out + r * C, C);
  }
  for (int r = 0; r < count; ++r) norm(x + r * C, net.final_norm.data(), h + r * C, C, n_embd, net.norm_eps);
  multiply(net.head, team.share(s.V / LANES<T>), count, h, C, batch.logits.data, s.V);
  team.wait();
}

}  // namespace
