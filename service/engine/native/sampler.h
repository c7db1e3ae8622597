// The choice of an id from logits: patterns, and the steps of service/model/sampling.py in fp64.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "abi.h"
#include "lanes.h"

namespace {

// Philox 4×64 (Salmon et al. 2011), as numpy counts it: the first block has counter 1.
double uniform(uint64_t seed, uint64_t number) {
  uint64_t c[4] = {number / 4 + 1, 0, 0, 0}, key[2] = {seed, 0};
  for (int round = 0; round < 10; ++round) {
    const auto a = (unsigned __int128)0xD2E7470EE14C6C93u * c[0], b = (unsigned __int128)0xCA5A826395121157u * c[2];
    const uint64_t next[4] = {uint64_t(b >> 64) ^ c[1] ^ key[0], uint64_t(b), uint64_t(a >> 64) ^ c[3] ^ key[1],
                              uint64_t(a)};
    std::copy(next, next + 4, c);
    key[0] += 0x9E3779B97F4A7C15u, key[1] += 0xBB67AE8584CAA73Bu;
  }
  return double(c[number % 4] >> 11) * 0x1p-53;
}

constexpr int32_t NONE = -1, FAILED = -2;  // no id; logits that are not finite

enum Rules : int32_t { MAY_LEAVE = 1, MASKS = 2 };  // of a guide

// The path of a sequence through its guide during a call; what is allowed is said in constrain/automaton.py.
struct Walk {
  const ChargptGuide* guide = nullptr;
  int32_t state = 0, remaining = 0, missing = 0;

  explicit Walk(const ChargptGuide* from) : guide(from) {
    if (guide) state = guide->state, remaining = guide->remaining, missing = guide->missing;
  }

  // Fills allowed (V,) and returns it; null: all ids are allowed.
  const uint8_t* allow(uint8_t* allowed, int V) {
    if (!guide || !(guide->rules & MASKS)) return nullptr;
    bool any = false;
    for (int i = 0; i < V; ++i) {
      const int next = after(i);
      allowed[i] = next >= 0 && (missing ? reaches(next) : guide->distance[next] < remaining);
      any = any || allowed[i];
    }
    if (!missing && guide->accepting[state] && (guide->rules & MAY_LEAVE || !any))
      for (int i = 0; i < V; ++i)
        if (after(i) < 0) any = true, allowed[i] = true;
    return any ? allowed : nullptr;
  }

  // Take the id that was chosen; returns whether the text goes on after it.
  bool push(int id) {
    if (!guide) return true;
    const int next = after(id);
    if (next < 0 || guide->distance[next] >= remaining) return false;
    if (missing && !(guide->rules & MASKS) && !reaches(next)) return false;
    state = next;
    --remaining;
    if (missing) --missing;
    const int16_t* row = guide->table + size_t(state) * guide->num_classes;
    return !guide->accepting[state] || std::any_of(row, row + guide->num_classes, [](int16_t to) { return to >= 0; });
  }

 private:
  int after(int id) const { return guide->table[size_t(state) * guide->num_classes + guide->classes[id]]; }

  bool reaches(int next) const {  // a match of an allowed length
    int layer = missing - 1;
    const int count = guide->num_layers, repeat = guide->repeat;
    if (layer >= count) layer = repeat + (layer - repeat) % (count - repeat);
    return guide->layers[size_t(layer) * guide->layer_bytes + next / 8] >> (7 - next % 8) & 1;
  }
};

// The largest of z (V), which has room for whole Lanes and is filled up with −∞.
INLINE double highest(double* z, int V) {
  for (int i = V; i % LANES<double>; ++i) z[i] = -HUGE_VAL;
  Lanes<double> most = load(z);
  for (int i = LANES<double>; i < V; i += LANES<double>) most = larger(most, load(z + i));
  return largest(most);
}

struct Sampler {
  ChargptParams p{};
  std::vector<std::pair<int32_t, double>> bias;
  std::vector<uint8_t> seen;   // (V,) in prompt or completion; empty: no penalty
  std::vector<double> counts;  // (V,) occurrences in the completion
  uint64_t drawn = 0;

  void start(const ChargptParams& params, int vocab_size) {
    p = params;  // its pointers are the caller's, and not kept
    drawn = uint64_t(p.num_written);
    bias.clear();
    for (int64_t i = 0; i < p.num_biased; ++i) bias.emplace_back(p.biased[i], p.bias[i]);
    const bool is_penalised = p.repetition != 1 || p.presence != 0 || p.frequency != 0;
    seen.assign(is_penalised ? vocab_size : 0, 0);
    counts.assign(seen.size(), 0);
    for (int64_t i = 0; is_penalised && i < p.num_seen; ++i) seen[p.seen[i]] = 1;
    for (int64_t i = 0; is_penalised && i < p.num_written; ++i) seen[p.written[i]] = 1, counts[p.written[i]] += 1;
    p.biased = p.seen = p.written = p.ends = nullptr, p.bias = nullptr;
  }

  // z (V) and weight (V) have room for whole Lanes; order (V) is scratch.
  int32_t choose(double* z, double* weight, int32_t* order, int V, const uint8_t* allowed) {
    const int32_t id = choose_at(0, z, weight, order, V, allowed);
    if (id < 0) return id;
    ++drawn;
    if (!seen.empty()) seen[id] = 1, counts[id] += 1;
    return id;
  }

  // The same for the draw that is `ahead` of the next one. Only logits can make this choose another id later, and what
  // the penalties will have counted until then. margin: of the draw, how far it is from drawing another id; 1: it
  // cannot.
  int32_t choose_at(int ahead, double* z, double* weight, int32_t* order, int V, const uint8_t* allowed,
                    double* margin = nullptr) const {
    bool is_finite = true;
    for (int i = 0; i < V; ++i) is_finite &= std::abs(z[i]) <= 1.7976931348623157e308;
    if (!is_finite) return FAILED;
    for (auto [id, value] : bias) z[id] += value;
    for (size_t i = 0; i < seen.size(); ++i) {
      if (seen[i]) z[i] = z[i] > 0 ? z[i] / p.repetition : z[i] * p.repetition;
      z[i] -= p.frequency * counts[i] + (counts[i] > 0 ? p.presence : 0);
    }
    for (int i = 0; allowed && i < V; ++i)
      if (!allowed[i]) z[i] = -HUGE_VAL;
    const double top = highest(z, V);
    int id = int(std::find(z, z + V, top) - z);
    if (p.temperature > 0) {
      const double u = uniform(p.seed, drawn + ahead);
      for (int i = 0; i < V; ++i) z[i] = (z[i] - top) / p.temperature;
      for (int i = 0; i < V; i += LANES<double>) store(weight + i, exp_of_negative(load(z + i)));
      truncate(z, weight, order, V);
      double total = 0, below = 0;
      for (int i = 0; i < V; ++i) total += weight[i];
      id = 0;
      while (id < V - 1 && (below += weight[id]) / total <= u) ++id;
      if (margin) {
        constexpr double NEGLIGIBLE = 1e-4;
        const double end = id < V - 1 ? below / total : 1, first = end - weight[id] / total;
        *margin = std::min(first > NEGLIGIBLE ? u - first : 1, end < 1 - NEGLIGIBLE ? end - u : 1);
      }
    }
    return id;
  }

 private:
  static constexpr int RANKED = 256;  // ids up to which counting is faster than sorting

  // order (V): ids by z, the largest first and of equals the lower id. An id's place is the number of those before it,
  // counted without a branch. z has whole Lanes, filled with −∞.
  static void rank(const double* z, int32_t* order, int V) {
    using Count = Reg<int64_t>;
    constexpr int N = PER_REGISTER<double>;
    for (int i = 0; i < V; i += N) {
      Reg<double> own;
      std::memcpy(&own, z + i, sizeof own);
      Count before{};
      for (int j = 0; j < i; ++j) before -= z[j] >= own;
      for (int j = i; j < V; ++j) before -= z[j] > own;
      for (int a = 0; a < N; ++a) {
        int64_t at = before[a];
        for (int b = 0; b < a; ++b) at += own[b] == own[a];
        if (i + a < V) order[at] = i + a;
      }
    }
  }

  // Set the weights that top_k, top_p, min_p and typical_p drop to 0.
  void truncate(const double* z, double* weight, int32_t* order, int V) const {
    const auto likelier = [z](int32_t a, int32_t b) { return z[a] > z[b] || (z[a] == z[b] && a < b); };
    const bool has_k = p.top_k > 0 && p.top_k < V, has_p = p.top_p < 1;
    if (has_k || has_p) {
      const int k = has_k ? int(p.top_k) : V;
      int sorted = 0;  // of order, the likeliest
      const auto sort = [&](int count) {
        std::partial_sort(order + sorted, order + count, order + V, likelier);
        sorted = count;
      };
      if (V <= RANKED) rank(z, order, V), sorted = V;
      else for (int i = 0; i < V; ++i) order[i] = i;
      if (has_k && sorted < k) sort(k);
      int kept = k;
      if (has_p) {
        double total = 0, mass = 0;
        for (int i = 0; i < k; ++i) total += weight[order[i]];
        for (kept = 0; kept < k && mass / total < p.top_p; ++kept) {
          if (kept == sorted) sort(std::min(k, 2 * kept + 32));
          mass += weight[order[kept]];
        }
      }
      for (int i = kept; i < V; ++i) weight[order[i]] = 0;
    }
    if (p.log_min_p > -HUGE_VAL)
      for (int i = 0; i < V; ++i)
        if (z[i] < p.log_min_p) weight[i] = 0;
    if (p.typical_p < 1) {
      double total = 0, mean = 0, mass = 0;
      int kept = 0;
      for (int i = 0; i < V; ++i)
        if (weight[i] > 0) total += weight[i], order[kept++] = i;
      for (int i = 0; i < kept; ++i) mean += weight[order[i]] / total * z[order[i]];
      std::sort(order, order + kept, [&](int32_t a, int32_t b) {
        const double x = std::abs(z[a] - mean), y = std::abs(z[b] - mean);
        return x < y || (x == y && a < b);
      });
      double whole = 0;
      for (int i = 0; i < kept; ++i) whole += weight[order[i]] / total;
      for (int i = 0; i < kept; ++i) {
        const double share = weight[order[i]] / total;
        if (!(mass / whole < p.typical_p)) weight[order[i]] = 0;
        mass += share;
      }
    }
  }
};

}  // namespace
