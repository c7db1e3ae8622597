// A thread's batches: which rows a forward runs, and what is chosen after it.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "abi.h"
#include "counts.h"
#include "guesses.h"
#include "net.h"
#include "sampler.h"
#include "threads.h"
#include "weights.h"

namespace {

constexpr int MOST_GUESSES = 4;   // of a batch: with more, rows cost more than reading the weights again
constexpr double WORTH_IT = 0.6;  // certainty from which a further row takes less time than it saves
constexpr int TOGETHER = 8;       // sequences that take all their steps before the next ones begin

// The state of a slot, beside its cache.
struct Slot {
  Sampler sampler;
  int64_t position = 0;  // characters that have run
  int32_t last = NONE;   // the id that was chosen last
  Counts::History recent;  // the last ids, those of the prompt included
  Repetitions repetitions;
  std::vector<int32_t> ends;

  bool is_end(int32_t id) const { return std::find(ends.begin(), ends.end(), id) != ends.end(); }
};

// An item that is under way.
struct Progress {
  const ChargptItem* item;
  Walk walk;
  int fed = 0, chosen = 0, reported = 0;
  int rows = 0;                               // in the batch
  std::array<int32_t, MOST_GUESSES> guess{};  // the ids of its last rows
  int guessed = 0, kept = 0;                  // number of guesses; the index in Batch::kept of what they overwrite
  bool goes_on = true;
};

// The rows that an item runs if no guess is right.
inline int64_t rows_of(const ChargptItem& item) {
  return item.count + item.steps - (item.count ? std::min(item.steps, 1) : 0);
}

// The batches of a thread.
template <class T, class W, class K> class Batch {
 public:
  RARE Batch(Net<T, W, K>& net, std::vector<Slot>& slots, const Counts& counts, int vocab_size)
      : net(net), slots(slots), counts(counts), vocab_size(vocab_size), own(net.sizes), scratch(net.sizes.V),
        weight(net.sizes.V), expected(net.sizes.V), searches(BATCH), ids_in_order(net.sizes.V), mask(net.sizes.V),
        kept(MOST_GUESSES * net.cache.place_size()) {
    share.reserve(slots.size());
    active.reserve(slots.size());
    rows.reserve(BATCH);
  }

  std::vector<const ChargptItem*> share;   // the items that the thread runs alone
  int64_t num_guessed = 0, num_right = 0;  // steps with a guess, and those in which the first one was right

  // Run items to their ends: feed the given ids, then the chosen ones, BATCH rows at a time. If `stays`, TOGETHER of
  // them take all their steps before the next ones begin. So their keys and values stay in the cache, while those of
  // all rows would be read from memory at every step.
  void lead(const std::vector<const ChargptItem*>& items, bool stays, Team& team) {
    Team alone;
    begin(items);
    while (gather(stays)) {
      forward(net, rows, own, own, team.meets() ? team : alone);
      finish();
      settle(stays);
    }
    team.dismiss();
  }

  // Share in the batches of a team's first thread, until there are no more.
  void follow(Batch& first, Team& team) {
    while (team.follows()) forward(net, first.rows, own, first.own, team);
  }

 private:
  void begin(const std::vector<const ChargptItem*>& items) {
    active.clear();
    rows.clear();
    taken = 0;
    for (const ChargptItem* item : items) {
      active.push_back({item, Walk(item->guide)});
      if (item->count) std::copy_n(item->before, Counts::HISTORY, slots[item->slot].recent.begin());
    }
  }

  // Remove finished sequences. If not `stays`, those that have run move behind those that wait.
  void settle(bool stays) {
    const auto end = active.begin() + taken;
    const auto done = std::remove_if(active.begin(), end, [](const Progress& it) { return !it.goes_on; });
    const ptrdiff_t count = done - active.begin();
    active.erase(done, end);
    taken = 0;
    if (!stays) std::rotate(active.begin(), active.begin() + count, active.end());
  }

  // Collect the rows of the next batch. Return whether there is one.
  bool gather(bool stays) {
    rows.clear();
    num_kept = num_searches = 0;
    const int depth = MOST_GUESSES / int(std::max<size_t>(1, active.size()));  // of each
    const int limit = stays && !depth ? TOGETHER : BATCH;
    for (Progress& it : active) {
      const int room = limit - int(rows.size());
      if (room == 0) break;
      const ChargptItem& item = *it.item;
      Slot& s = slots[item.slot];
      const int given = item.count ? item.count - it.fed : 0;
      const int count = given ? std::min(given, room) : 1;
      for (int k = 0; k < count; ++k) {
        const bool is_last = given <= k + 1;
        const bool wants = (is_last && item.steps) || (given && target_of(item, it.fed + k) >= 0);
        if (given) append(s.recent, item.ids[it.fed + k]);
        rows.push_back({item.slot, s.recent.back(), s.position + k, wants});
        if (wants) searches[num_searches++].history = s.recent;
      }
      it.rows = count;
      if (depth && !given) {
        guess(it, std::min({depth, room - count, item.steps - it.chosen - 1, net.sizes.W - 1}));
        it.kept = num_kept;
        Counts::History recent = s.recent;
        for (int k = 0; k < it.guessed; ++k) {
          append(recent, it.guess[k]);
          searches[num_searches++].history = recent;
          const int64_t position = s.position + it.rows++;
          rows.push_back({item.slot, it.guess[k], position, true});
          if (position >= net.sizes.W)
            net.cache.save(item.slot, position, &kept.data[num_kept++ * net.cache.place_size()]);
        }
      }
      ++taken;
    }
    return !rows.empty();
  }

  // Add at most `most` guesses: of the next id, of the one after it if that is right, and so on. Guess no id that ends
  // the text, because nothing runs after it.
  void guess(Progress& it, int most) {
    const Slot& s = slots[it.item->slot];
    const bool repeats = may_repeat(s);
    auto recent = s.recent;
    Walk walk = it.walk;
    double all_right = 1;  // certainty that this guess and those before it are right
    for (it.guessed = 0; it.guessed < most; ++it.guessed) {
      double certainty = 0;
      int32_t id = repeats ? s.repetitions.after(recent.end(), &certainty) : NONE;
      if (id < 0 && !counts.is_empty()) {
        const double share = counts.after(recent, scratch.data);
        for (int i = 0; i < vocab_size; i += LANES<double>) store(&scratch.data[i], log_of(load(&scratch.data[i])));
        const uint8_t* allowed = walk.allow(mask.data(), vocab_size);
        double margin = 0.05;
        id = s.sampler.choose_at(it.guessed, scratch.data, weight.data, ids_in_order.data(), vocab_size, allowed,
                                 &margin);
        // As counted in texts of tiny Shakespeare. The mixture is nearer to the counts than the network by their share.
        margin /= std::max(1e-3, 1 - share);
        certainty = (margin + 0.012) / (margin + 0.054);
      }
      if (id < 0 || (all_right *= certainty) < WORTH_IT || !walk.push(id) || s.is_end(id)) return;
      it.guess[it.guessed] = id;
      append(recent, id);
    }
  }

  // Whether guesses come from the sequence's own text, before the counts.
  bool may_repeat(const Slot& s) const { return counts.is_empty() || s.sampler.p.temperature == 0; }

  template <class Ids> static void append(Ids& recent, int32_t id) {
    std::copy(recent.begin() + 1, recent.end(), recent.begin());
    recent.back() = id;
  }

  // After a forward: advance each sequence by its rows, and choose its next ids if its given ids have run.
  void finish() {
    if (counts.is_mixed()) {
      for (int i = 0; i < num_searches; ++i) counts.begin(searches[i]);
      for (int i = 0; i < num_searches; ++i) counts.find(searches[i]);
    }
    int row = 0;
    const T* logits = own.logits.data;  // of the rows that want them
    for (size_t k = 0; k < taken; ++k) {
      Progress& it = active[k];
      const Row* of_it = &rows[row];
      const ptrdiff_t wanted = std::count_if(of_it, of_it + it.rows, [](const Row& r) { return r.wants_logits; });
      row += it.rows;
      it.goes_on = finish(it, of_it, logits, wanted);
      logits += wanted * net.sizes.V;
    }
  }

  // The same for one sequence and its rows. Return whether it goes on.
  bool finish(Progress& it, const Row* of_it, const T* logits, ptrdiff_t wanted) {
    const ChargptItem& item = *it.item;
    Slot& s = slots[item.slot];
    if (it.fed < item.count) {
      const T* next = logits;
      for (int k = 0; k < it.rows; ++k) {
        if (!of_it[k].wants_logits) continue;
        if (target_of(item, it.fed + k) >= 0) report(it, next, target_of(item, it.fed + k));
        next += net.sizes.V;
      }
      it.fed += it.rows;
      s.position += it.rows;
      if (it.fed < item.count) return true;
      return item.steps && choose(it, logits + (wanted - 1) * net.sizes.V);
    }
    const int64_t first = ++s.position;  // of the guesses
    int right = 0;
    bool goes_on = choose(it, logits);
    while (goes_on && right < it.guessed && s.last == it.guess[right]) {
      ++s.position;
      goes_on = choose(it, logits + ++right * net.sizes.V);
    }
    // Restore what wrong guesses overwrote: positions that the next row sees, or that other slots may copy.
    for (int k = 0, at = it.kept; k < it.guessed; ++k)
      if (first + k >= net.sizes.W) {
        const K* from = &kept.data[at++ * net.cache.place_size()];
        if (k >= right) net.cache.restore(item.slot, first + k, from);
      }
    num_guessed += it.guessed > 0, num_right += right > 0;
    it.guessed = 0;
    return goes_on;
  }

  bool choose(Progress& it, const T* logits) {
    const ChargptItem& item = *it.item;
    Slot& s = slots[item.slot];
    double* z = scratch.data;
    copy(logits, z);
    const uint8_t* allowed = it.walk.allow(mask.data(), vocab_size);
    s.last = s.sampler.choose(z, weight.data, ids_in_order.data(), vocab_size, allowed);
    item.chosen[it.chosen++] = s.last;
    if (s.last >= 0) report(it, logits, s.last);
    if (may_repeat(s)) s.repetitions.learn(s.recent.end(), s.last);
    append(s.recent, s.last);
    return s.last >= 0 && it.walk.push(s.last) && !s.is_end(s.last) && it.chosen < item.steps;
  }

  // Copy the logits of a row to float64, mixed. z has room for whole Lanes.
  void copy(const T* logits, double* z) {
    std::copy_n(logits, vocab_size, z);
    if (!counts.is_mixed()) return;
    const double share = counts.fill(searches[(logits - own.logits.data) / net.sizes.V], expected.data);
    Counts::mix(z, expected.data, share, vocab_size);
  }

  static int32_t target_of(const ChargptItem& item, int index) { return item.targets ? item.targets[index] : NONE; }

  // Report the log-probability of an id under the logits of the id before it, and those of the alternatives.
  void report(Progress& it, const T* logits, int32_t id) {
    const ChargptItem& item = *it.item;
    if (!item.values) return;
    const int V = vocab_size, k = item.alternatives;
    const size_t at = it.reported++;
    double* z = scratch.data;
    bool is_finite = true;
    for (int i = 0; i < V; ++i) is_finite &= std::abs(logits[i]) <= std::numeric_limits<T>::max();
    if (!is_finite) return;
    copy(logits, z);
    const Lanes<double> top = all(highest(z, V));
    for (int i = 0; i < V; i += LANES<double>) store(z + i, load(z + i) - top);
    Lanes<double> total = all(0.0);
    for (int i = 0; i < V; i += LANES<double>) total = total + exp_of_negative(load(z + i));
    const double whole = std::log(sum(total));
    item.values[at] = z[id] - whole;
    if (!k) return;
    uint32_t* ids = item.top_ids + at * k;
    if (item.which) {
      std::copy_n(item.which, k, ids);
    } else {
      int32_t* order = ids_in_order.data();
      for (int i = 0; i < V; ++i) order[i] = i;
      std::partial_sort(order, order + k, order + V,
                        [z](int32_t a, int32_t b) { return z[a] > z[b] || (z[a] == z[b] && a < b); });
      std::copy_n(order, k, ids);
    }
    for (int i = 0; i < k; ++i) item.top_values[at * k + i] = z[ids[i]] - whole;
  }

  Net<T, W, K>& net;
  std::vector<Slot>& slots;
  const Counts& counts;
  const int vocab_size;
  Activations<T, K> own;
  Buffer<double> scratch, weight, expected;  // (V,)
  std::vector<Counts::Search> searches;  // of the rows that want logits
  int num_searches = 0;
  std::vector<int32_t> ids_in_order;
  std::vector<uint8_t> mask;  // (V,)
  std::vector<Progress> active;
  size_t taken = 0;  // of `active`, those with rows in the batch
  std::vector<Row> rows;
  Buffer<K> kept;  // keys and values that guesses overwrite
  int num_kept = 0;
};

}  // namespace
