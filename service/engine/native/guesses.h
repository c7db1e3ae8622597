// Guesses of the next characters.
//
// The engine runs a guess beside the character before it. The guess counts only if the sampler then chooses it. So
// guesses change the time of a text and nothing else. They come from the training text and from the sequence's own
// text, never from another sequence: the time of a text tells nothing about the texts of others.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "abi.h"
#include "sampler.h"

namespace {

// The tree of service/model/ngrams.py, which says what the shares mean.
class NGrams {
 public:
  static constexpr int ORDER = 5;
  using Places = std::array<int32_t, ORDER + 1>;  // the nodes of the last 0 … ORDER characters; NONE: not in the tree

  explicit NGrams(const ChargptConfig& c) : nodes(c.num_ngrams ? c.num_ngrams + 1 : 0) {
    for (int i = 0; i < 256; ++i) shares[i] = std::exp2(-i / 16.0);
    for (int64_t i = 0; i < c.num_ngrams; ++i) nodes[i] = {c.ngram_children[i], c.ngram_ids[i], c.ngram_shares[i]};
    if (c.num_ngrams) nodes[c.num_ngrams].first_child = c.ngram_children[c.num_ngrams];
  }
  bool is_empty() const { return nodes.empty(); }

  // The places after `count` ids.
  Places find(const int32_t* ids, int count) const {
    Places at;
    at.fill(NONE);
    at[0] = 0;
    for (int i = 0; i < count; ++i) at = next(at, ids[i]);
    return at;
  }

  Places next(const Places& at, int32_t id) const {
    Places to;
    to[0] = 0;
    for (int k = 0; k < ORDER; ++k) to[k + 1] = at[k] < 0 ? NONE : child(at[k], id);
    return to;
  }

  // log p of each id, (V,), nearly.
  void logits(const Places& at, double* z, int V) const {
    std::fill_n(z, V, 0.0);
    double rest = 1;
    for (int k = ORDER; k >= 0; --k) {
      if (at[k] < 0) continue;
      double left = 1;
      for (int32_t i = nodes[at[k]].first_child, end = nodes[at[k] + 1].first_child; i < end; ++i) {
        const double share = shares[nodes[i].share];
        z[nodes[i].id] += rest * share;
        left -= share;
      }
      rest *= std::max(0.0, left);
    }
    for (int i = 0; i < V; ++i) z[i] = log_of(z[i] + (rest + 1e-6) / V);
  }

 private:
  struct Node {
    int32_t first_child;  // the others follow it, to that of the next node
    uint16_t id;
    uint8_t share;
  };

  int32_t child(int32_t node, int32_t id) const {
    int32_t first = nodes[node].first_child, end = nodes[node + 1].first_child;
    const int32_t last = end;
    while (first < end) {
      const int32_t middle = (first + end) / 2;
      if (nodes[middle].id < id) first = middle + 1;
      else end = middle;
    }
    return first < last && nodes[first].id == id ? first : NONE;
  }

  // ln x within 0.01.
  static double log_of(double x) {
    int64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const double m = double(bits & ((int64_t(1) << 52) - 1)) * 0x1p-52;
    return 0.6931471805599453 * (double(bits >> 52) - 1023 + m + 0.34 * m * (1 - m));
  }

  std::vector<Node> nodes;  // and the end of the last one's children
  double shares[256];
};

// What mostly follows the last four characters in a sequence's own text, as a processor predicts branches: for texts
// that are not drawn, as they repeat themselves, and where there is no tree.
class Repetitions {
 public:
  void forget() { table.assign(table.size(), Entry{}); }
  // `recent`: at least four ids. certainty: about how often this is right.
  int32_t after(const int32_t* recent, double* certainty) const {
    const Entry& entry = table[index(recent)];
    *certainty = (3 + entry.hits) / 6.0;
    return entry.hits ? entry.id : NONE;
  }
  void learn(const int32_t* recent, int32_t id) {
    Entry& entry = table[index(recent)];
    if (entry.id == id) entry.hits = std::min(entry.hits + 1, 3);
    else if (entry.hits) --entry.hits;
    else entry.id = id;
  }

 private:
  struct Entry {
    int32_t id = NONE, hits = 0;
  };
  static size_t index(const int32_t* recent) {
    uint64_t key = 0;
    for (int i = 1; i <= 4; ++i) key = key << 16 | uint16_t(recent[-i]);
    return key * 0x9E3779B97F4A7C15u >> 54;
  }
  std::vector<Entry> table = std::vector<Entry>(1 << 10);
};

}  // namespace
