// The counts of the training text, a checkpoint's second expert, and their mixture with the network.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "abi.h"
#include "lanes.h"
#include "sampler.h"
#include "weights.h"

namespace {

// The tree of service/model/counts.py, which defines all of it.
//
// A table finds the context of each length by a hash of its characters. So the loads of all lengths are under way
// together, while a walk through the tree would wait for about fifteen of them, one after the other.
class Counts {
 public:
  static constexpr int HISTORY = 7;
  using History = std::array<int32_t, HISTORY>;  // ids, the newest last; NONE: the text begins later

  // The search for the contexts that end a history. Each step of it prefetches what the next one reads, so a batch takes
  // each step for all of its rows.
  struct Search {
    History history;
    uint64_t hashes[HISTORY];   // of the contexts, from the shortest
    int32_t contexts[HISTORY];  // places in the table
    int count;                  // of known contexts
  };

  explicit Counts(const ChargptConfig& c)
      : order(c.counts_order), vocab_size(c.vocab_size), base(c.base, c.base + (order ? vocab_size : 0)),
        weights(c.mixture_weights, c.mixture_weights + 256 * order) {
    mixes = std::any_of(weights.begin(), weights.end(), [](double w) { return w > 0; });
    if (!order) return;
    std::copy_n(c.rest_codes, 256, rests);
    std::copy_n(c.share_codes, 256, shares);
    const int64_t N = c.num_contexts, E = c.first_follower[N];
    followers = Buffer<uint32_t>(E);
    for (int64_t i = 0; i < E; ++i) followers.data[i] = uint32_t(c.follower_ids[i]) << 8 | c.shares[i];
    uint64_t size = 16;
    while (2 * size < 3 * uint64_t(N)) size *= 2;
    table = Buffer<Context>(size), mask = size - 1;
    std::vector<uint64_t> hashes(N);
    std::vector<int32_t> names(N, ROOT);
    for (int64_t i = 1, parent = 0; i < N; ++i) {
      while (c.first_child[parent + 1] <= i) ++parent;
      hashes[i] = hash(hashes[parent], c.older[i]);
      uint64_t at = hashes[i] & mask;
      while (table.data[at].parent) at = (at + 1) & mask;
      names[i] = int32_t(at) + 1;
      const int32_t first = c.first_follower[i], count = c.first_follower[i + 1] - first;
      double total = 0;  // exact, as all are integers
      for (int32_t k = first; k < first + count; ++k) total += shares[c.shares[k]];
      table.data[at] = {count ? (1 - rests[c.rests[i]]) / total : 0, names[parent],
                        uint32_t(c.older[i]) << 8 | c.rests[i], first, count};
    }
  }

  bool is_empty() const { return order == 0; }
  bool is_mixed() const { return mixes; }

  // The first step, from s.history.
  void begin(Search& s) const {
    for (int k = 0; k < order - 1; ++k) {
      s.hashes[k] = hash(k ? s.hashes[k - 1] : 0, s.history[HISTORY - 1 - k]);
      __builtin_prefetch(&table.data[s.hashes[k] & mask]);
    }
  }

  // The second step.
  void find(Search& s) const {
    int32_t parent = ROOT;
    for (s.count = 0; s.count < order - 1; ++s.count) {
      const uint32_t id = uint32_t(s.history[HISTORY - 1 - s.count]);
      uint64_t at = s.hashes[s.count] & mask;
      while (table.data[at].parent && !(table.data[at].parent == parent && table.data[at].key >> 8 == id))
        at = (at + 1) & mask;
      const Context& context = table.data[at];
      if (!context.parent) return;
      s.contexts[s.count] = int32_t(at), parent = int32_t(at) + 1;
      __builtin_prefetch(&followers.data[context.first]);
    }
  }

  // The last step: fill p (V,) with the distribution after the history, and return its weight in the mixture.
  double fill(const Search& s, double* p) const {
    std::fill_n(p, vocab_size, 0.0);
    double rest = 1;
    int length = 0;  // of the longest context with followers
    uint32_t code = 0;
    for (int k = s.count; k >= 1; --k) {
      const Context& context = table.data[s.contexts[k - 1]];
      if (!context.count) continue;
      if (!length) length = k, code = context.key & 255;
      const uint32_t* its = &followers.data[context.first];
      for (int32_t i = 0; i < context.count; ++i) p[its[i] >> 8] += rest * (context.scale * shares[its[i] & 255]);
      rest *= rests[context.key & 255];
    }
    for (int i = 0; i < vocab_size; ++i) p[i] += rest * base[i];
    return weights[256 * length + code];
  }

  double after(const History& history, double* p) const {
    Search s;
    s.history = history;
    begin(s);
    find(s);
    return fill(s, p);
  }

  // Replace the network's logits by those of the mixture, with the counts' p after a history and their weight. Logits
  // that are not finite stay. z and p (V,) have room for whole Lanes.
  static void mix(double* z, const double* p, double weight, int V) {
    const double top = highest(z, V), lowest = -std::numeric_limits<double>::max();
    bool is_finite = top <= -lowest;
    for (int i = 0; i < V; ++i) is_finite &= z[i] >= lowest;
    if (!is_finite) return;
    Lanes<double> total = all(0.0);
    for (int i = 0; i < V; i += LANES<double>) {
      const Lanes<double> e = exp_of_negative(load(z + i) - all(top));
      store(z + i, e);
      total = total + e;
    }
    const Lanes<double> network = all((1 - weight) / sum(total)), counts = all(weight);
    const Lanes<double> least = all(std::numeric_limits<double>::min());
    for (int i = 0; i < V; i += LANES<double>)
      store(z + i, log_of(larger(fma(load(z + i), network, load(p + i) * counts), least)));
  }

 private:
  static constexpr int32_t ROOT = -1;

  struct Context {
    double scale;          // of its shares
    int32_t parent;        // the context without the oldest character: its place + 1, or ROOT; 0: the place is empty
    uint32_t key;          // the oldest character, and the code of the rest
    int32_t first, count;  // of its followers
  };

  // Of a context, from that of its parent. The key is random, so that no file can be written whose contexts collide.
  uint64_t hash(uint64_t parent, int32_t id) const {
    uint64_t x = (parent ^ key) + uint32_t(id);
    x = (x ^ x >> 32) * 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 29) * 0xBF58476D1CE4E5B9u;
    return x ^ x >> 32;
  }

  int order, vocab_size;  // order 0: there are no counts
  bool mixes;
  std::vector<double> base;        // (V,)
  std::vector<double> weights;     // (order, 256): by the length of the longest context, and the code of its rest
  Buffer<Context> table;           // with linear probing
  uint64_t mask = 0;               // of places in it
  const uint64_t key = uint64_t(std::random_device()()) << 32 | std::random_device()();
  Buffer<uint32_t> followers;      // id, and code of the share
  double rests[256], shares[256];  // by code
};

}  // namespace
