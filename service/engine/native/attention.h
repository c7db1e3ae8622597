// The cache of keys and values, and attention over it.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "abi.h"
#include "lanes.h"
#include "weights.h"

namespace {

// Sizes of a model. hp, Wp, C, F and V are head_dim, block_size, n_embd, n_inner and vocab_size, padded with zeros.
template <class T> struct Sizes {
  explicit Sizes(const ChargptConfig& c)
      : W(c.block_size), n_layer(c.n_layer), n_head(c.n_head), n_kv_head(c.n_kv_head), n_embd(c.n_embd),
        hs(c.n_embd / c.n_head), hp(padded<T>(hs)), Wp(padded<T>(W)), C(padded<T>(n_embd)), F(padded<T>(c.n_inner)),
        V(padded<T>(c.vocab_size)), heads(n_head + 2 * n_kv_head), group(n_head / n_kv_head) {}

  const int W, n_layer, n_head, n_kv_head, n_embd, hs, hp, Wp, C, F, V;
  const int heads, group;  // of queries, keys and values together; query heads per key head
};

constexpr int QUERY_HEADS = TILE >= 24 ? 4 : 1;  // query heads that share one reading of the keys
constexpr int KEY_BLOCKS = 4;              // blocks of keys whose scores are computed together
template <class T> constexpr int KEYS = KEY_BLOCKS * LANES<T>;

// Keys and values of all slots. Position p is at index p mod W of a ring.
template <class T, class K> class Cache {
 public:
  RARE Cache(const Sizes<T>& sizes, int slots) : sizes(sizes) {
    head_size = values_at() + size_t(sizes.Wp) * sizes.hp;
    slot_size = head_size * sizes.n_kv_head * sizes.n_layer;
    numbers = Buffer<K>(slot_size * slots);
    std::memset((void*)numbers.data, 0, numbers.bytes);  // the kernel gives its pages now, not within a step
  }

  // The keys of a head, [KEYS keys][dimension][key].
  K* keys(int slot, int layer, int head) const {
    return numbers.data + slot * slot_size + (size_t(layer) * sizes.n_kv_head + head) * head_size;
  }
  // The values of a head, [key][dimension], from its keys.
  K* values(K* keys) const { return keys + values_at(); }

  // Where the first dimension of a key is. The next one is KEYS numbers further.
  K* key(K* keys, int index) const { return keys + size_t(index / KEYS<T>) * KEYS<T> * sizes.hs + index % KEYS<T>; }
  K* value(K* keys, int index) const { return values(keys) + size_t(index) * sizes.hp; }

  void clear(int slot) { std::fill_n(keys(slot, 0, 0), slot_size, K{}); }

  // Copy the first `length` positions, or the whole ring.
  void copy(int source, int target, int64_t length) {
    const size_t used = std::min<int64_t>(length, sizes.W);
    const size_t num_keys = (used + KEYS<T> - 1) / KEYS<T> * KEYS<T> * sizes.hs, num_values = used * sizes.hp;
    for (int layer = 0; layer < sizes.n_layer; ++layer)
      for (int h = 0; h < sizes.n_kv_head; ++h) {
        K *from = keys(source, layer, h), *to = keys(target, layer, h);
        std::memcpy(to, from, num_keys * sizeof(K));
        std::memcpy(values(to), values(from), num_values * sizeof(K));
      }
  }

  // Numbers of a position: in each layer a key and a value of each head.
  size_t place_size() const { return size_t(sizes.n_layer) * sizes.n_kv_head * (sizes.hs + sizes.hp); }

  // Copy the keys and values of a position to `to`.
  void save(int slot, int64_t position, K* to) const {
    each_place(slot, position, [&](const K* key, const K* value) {
      for (int d = 0; d < sizes.hs; ++d) *to++ = key[d * KEYS<T>];
      std::memcpy(to, value, sizes.hp * sizeof(K));
      to += sizes.hp;
    });
  }

  void restore(int slot, int64_t position, const K* from) {
    each_place(slot, position, [&](K* key, K* value) {
      for (int d = 0; d < sizes.hs; ++d) key[d * KEYS<T>] = *from++;
      std::memcpy(value, from, sizes.hp * sizeof(K));
      from += sizes.hp;
    });
  }

 private:
  // Of the keys of a head, after whole groups.
  size_t values_at() const { return size_t(sizes.Wp + KEYS<T> - 1) / KEYS<T> * KEYS<T> * sizes.hs; }

  template <class F> void each_place(int slot, int64_t position, F&& function) const {
    const int index = int(position % sizes.W);
    for (int layer = 0; layer < sizes.n_layer; ++layer)
      for (int h = 0; h < sizes.n_kv_head; ++h) {
        K* of_head = keys(slot, layer, h);
        function(key(of_head, index), value(of_head, index));
      }
  }

  const Sizes<T> sizes;
  size_t head_size = 0, slot_size = 0;  // in numbers
  Buffer<K> numbers;
};

// Into the second cache, for reading soon.
template <class K> INLINE void prefetch(const K* from, ptrdiff_t ahead) {
  __builtin_prefetch((const char*)from + ahead, 0, 2);
}

// Scores of the first B blocks of a group of keys for G heads.
template <int G, int B, class T, class K>
INLINE void score(const Sizes<T>& sizes, const T* q, const K* keys, T* p, ptrdiff_t ahead) {
  constexpr int N = LANES<T>;
  const int hs = sizes.hs, hp = sizes.hp, Wp = sizes.Wp;
  Lanes<T> total[G][B];
  for (int g = 0; g < G; ++g)
    for (int b = 0; b < B; ++b) total[g][b] = all(T(0));
  for (int d = 0; d < hs; ++d) {
    Lanes<T> key[B];
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
      const K* from = keys + size_t(d) * KEYS<T> + b * N;
      prefetch(from, ahead);
      key[b] = load_as<T>(from);
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const Lanes<T> query = all(q[g * hp + d]);
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) total[g][b] = fma(key[b], query, total[g][b]);
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) store(p + g * Wp + b * N, total[g][b]);
}

// M Lanes of the values' sum for G heads; the sums of every fourth key are added at the end.
template <int G, int M, class T, class K>
INLINE void mix(const Sizes<T>& sizes, const T* p, const K* values, int seen, const T* scale, T* y, ptrdiff_t ahead) {
  constexpr int N = LANES<T>, S = 4;
  const int hp = sizes.hp, Wp = sizes.Wp;
  Lanes<T> total[G][M][S];
  for (int g = 0; g < G; ++g)
    for (int d = 0; d < M; ++d)
      for (int s = 0; s < S; ++s) total[g][d][s] = all(T(0));
  int j = 0;
  for (; j + S <= seen; j += S)
#pragma GCC unroll 4
    for (int s = 0; s < S; ++s)
#pragma GCC unroll 4
      for (int d = 0; d < M; ++d) {
        const K* from = values + size_t(j + s) * hp + d * N;
        prefetch(from, ahead);
        const Lanes<T> value = load_as<T>(from);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) total[g][d][s] = fma(all(p[g * Wp + j + s]), value, total[g][d][s]);
      }
#pragma GCC unroll 3
  for (int s = 0; s < S - 1; ++s)
    if (j + s < seen)
#pragma GCC unroll 4
      for (int d = 0; d < M; ++d) {
        const Lanes<T> value = load_as<T>(values + size_t(j + s) * hp + d * N);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) total[g][d][s] = fma(all(p[g * Wp + j + s]), value, total[g][d][s]);
      }
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
    for (int d = 0; d < M; ++d)
      store(y + g * hp + d * N,
            ((total[g][d][0] + total[g][d][1]) + (total[g][d][2] + total[g][d][3])) * all(scale[g]));
}

// Attention of G heads with queries q (G, hp) to the first `seen` keys, into y (G, hp). p (G, Wp) is scratch. What is
// `ahead` of keys and values is prefetched.
template <int G, class T, class K>
__attribute__((noinline)) void attend_heads(const Sizes<T>& sizes, const T* q, const K* keys, const K* values, int seen,
                                            T* p, T* y, ptrdiff_t ahead) {
  constexpr int N = LANES<T>, BLOCKS = KEY_BLOCKS;
  const int hs = sizes.hs, hp = sizes.hp, Wp = sizes.Wp;
  const int blocks = (seen + N - 1) / N;
  int b = 0;
  for (; b + BLOCKS <= blocks; b += BLOCKS) score<G, BLOCKS>(sizes, q, keys + size_t(b) * hs * N, p + b * N, ahead);
  const K* rest = keys + size_t(b) * hs * N;
  if (blocks - b == 3) score<G, 3>(sizes, q, rest, p + b * N, ahead);
  else if (blocks - b == 2) score<G, 2>(sizes, q, rest, p + b * N, ahead);
  else if (blocks - b == 1) score<G, 1>(sizes, q, rest, p + b * N, ahead);
  T scale[G];
  for (int g = 0; g < G; ++g) {
    T* row = p + g * Wp;
    for (int j = seen; j < blocks * N; ++j) row[j] = -HUGE_VAL;
    Lanes<T> highest = load(row), total = all(T(0));
    for (int j = N; j < blocks * N; j += N) highest = larger(highest, load(row + j));
    const Lanes<T> top = all(largest(highest));
    for (int j = 0; j < blocks * N; j += N) {
      const Lanes<T> e = exp_of_negative(load(row + j) - top);
      store(row + j, e);
      total = total + e;
    }
    scale[g] = T(1) / sum(total);
  }
  constexpr int M = TILE >= 24 && G <= 2 ? 2 : 1;
  int d = 0;
  for (; d + M * N <= hp; d += M * N) mix<G, M>(sizes, p, values + d, seen, scale, y + d, ahead);
  for (; d < hp; d += N) mix<G, 1>(sizes, p, values + d, seen, scale, y + d, ahead);
}

}  // namespace
