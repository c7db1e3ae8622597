// The native engine: the model of service/model/gpt.py and the sampler of service/model/sampling.py on a CPU.
//
// One promise shapes all of it: a row's arithmetic depends on nothing but that row. Each output is a sum in an order
// that is fixed here, written with explicit fused multiply-adds, so neither the other rows of a batch, nor the number
// of threads, nor the instruction set changes a bit of it. Hence the same seed gives the same text under any load.
//
//   Lanes<T>   64 bytes of numbers, the unit of all layouts: 16 floats or 8 doubles, in one, two or four registers
//   Matrix     weights packed into panels of one Lanes of outputs: [panel][input][lane]. A lane is an output, so every
//              sum over inputs is sequential. Stored as fp32, or in float32's arithmetic as fp16 if that is exact
//   cache      per slot, layer and key head: keys as [KEYS keys][dimension][key], so a lane is a key and all
//              is read in the order in which it lies; values as [key][dimension]. Position p is at ring index p mod W,
//              as in service/model/kv_cache.py. With float32's arithmetic they are fp16 numbers, of half the size,
//              where no text can make them overflow: see `fits_half`
//   padding    heads, widths and the vocabulary are padded with zeros to whole Lanes
//
// Every thread takes whole sequences and runs them on its own for all steps of a call. If there is much to read, or if
// there are few sequences, threads share each product and wait for each other in between: see `NetEngine::run`.
//
//   native/lanes.h      Lanes and their arithmetic        native/counts.h   the counts, and their mixture
//   native/weights.h    Matrix, and products with it      native/sampler.h  patterns, and the choice of an id
//   native/attention.h  the cache, and attention over it  native/guesses.h  guesses of the next ids
//   native/net.h        the model, and its forward        native/batch.h    the rows of a step, and what follows them
//   native/abi.h        what native.py passes             native/threads.h  the pool, and teams that share batches
//   here                slots and threads, and the functions for native.py
//
// All is one translation unit. setup.py compiles it once per instruction set; native.py chooses a library at run time
// and calls the functions at the end. The engine knows ids and slots, and nothing of requests, stops or text.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "native/batch.h"

namespace {

class Engine {
 public:
  virtual ~Engine() = default;
  virtual void start(int slot, const ChargptParams& params) = 0;
  virtual const char* copy(int source, int target, int64_t length) = 0;
  virtual const char* refuses(const ChargptItem* items, int count) = 0;
  virtual void run(const ChargptItem* items, int count) noexcept = 0;  // allocates nothing
  virtual void count_guesses(int64_t* guessed, int64_t* right) const = 0;
  int slots = 0, vocab_size = 0, cache_bits = 0;  // of a number in the cache
};

// A model with its slots and threads.
template <class T, class W, class K> class NetEngine final : public Engine {
 public:
  RARE NetEngine(const ChargptConfig& c, const float* const* weights)
      : net(c, weights), counts(c), pool(c.threads), everyone(c.threads, false), pair(2, true) {
    slots = c.slots, vocab_size = c.vocab_size, cache_bits = 8 * sizeof(K);
    states.resize(c.slots);
    used.resize(c.slots);
    order.reserve(c.slots);
    num_rows.resize(pool.size());
    for (int i = 0; i < pool.size(); ++i)
      batches.push_back(std::make_unique<Batch<T, W, K>>(net, states, counts, c.vocab_size));
  }

  RARE ~NetEngine() override = default;

  void start(int slot, const ChargptParams& params) override {
    Slot& s = states[slot];
    s.sampler.start(params, vocab_size);
    s.ends.assign(params.ends, params.ends + params.num_ends);
    s.position = params.position, s.last = NONE;
    if (s.position) net.cache.clear(slot);  // rows see all places, also those of positions that never ran
    s.recent.fill(NONE);
    s.repetitions.forget();
  }

  void count_guesses(int64_t* guessed, int64_t* right) const override {
    *guessed = *right = 0;
    for (const auto& batch : batches) *guessed += batch->num_guessed, *right += batch->num_right;
  }

  const char* copy(int source, int target, int64_t length) override {
    const int64_t position = states[source].position;
    if (source == target || length < 1 || length > position) return "the source does not hold what is to be copied";
    if (position > std::max<int64_t>(net.sizes.W, length)) return "the source's ring has lost what is to be copied";
    net.cache.copy(source, target, length);
    states[target].position = length;
    return nullptr;
  }

  const char* refuses(const ChargptItem* items, int count) override {
    if (count < 1) return "nothing to run";
    std::fill(used.begin(), used.end(), false);
    for (int i = 0; i < count; ++i) {
      const ChargptItem& item = items[i];
      if (item.slot < 0 || item.slot >= slots) return "a slot is out of range";
      if (used[item.slot]) return "a slot is named twice";
      used[item.slot] = true;
      if (item.count < 0 || item.steps < 0 || item.count + item.steps == 0) return "nothing to run";
      if (item.count == 0 && states[item.slot].last < 0) return "a slot has no chosen id to continue from";
      if (item.count && !(item.ids && item.before)) return "ids are missing";
      if (item.steps && !item.chosen) return "there is no room for the chosen ids";
      for (int k = 0; k < item.count; ++k)
        if (item.ids[k] < 0 || item.ids[k] >= vocab_size) return "an id is out of range";
      for (int k = 0; item.targets && k < item.count; ++k)
        if (item.targets[k] < NONE || item.targets[k] >= vocab_size) return "an id is out of range";
      if (item.alternatives < 0 || item.alternatives > vocab_size) return "there are not so many alternatives";
      for (int k = 0; item.which && k < item.alternatives; ++k)
        if (item.which[k] >= uint32_t(vocab_size)) return "an id is out of range";
      if (item.guide && (item.guide->remaining < 1 || item.guide->distance[item.guide->state] > item.guide->remaining))
        return "no match of a pattern is that short";
    }
    return nullptr;
  }

  // Each thread takes whole sequences, about as many rows as the others. All threads run each batch together if a batch
  // is so much work that waiting for each other pays: with fewer sequences than threads, and if the weights outgrow 32
  // MB, because each thread then reads only its share of them. Two threads run each batch of one or two sequences
  // together, because the second caches of two cores hold more of the weights than one. With counts, this is 1.6 times
  // as fast for one sequence and 1.05 times for two. For four it would be 0.96 times as fast, and for eight 0.88 times.
  void run(const ChargptItem* items, int count) noexcept override {
    order.resize(count);
    for (int i = 0; i < count; ++i) order[i] = &items[i];
    std::sort(order.begin(), order.end(), [](auto a, auto b) {
      return rows_of(*a) > rows_of(*b) || (rows_of(*a) == rows_of(*b) && a < b);
    });
    const bool is_large = net.weight_bytes() > TEAM_BYTES || order[0]->count >= TEAM_ROWS;
    if ((count < pool.size() && is_large) || net.weight_bytes() > OUTGROWN_BYTES) return run_together(everyone);
    const bool is_long = order[0]->steps >= PAIR_STEPS;
    if (pool.size() > 1 && count <= PAIR_SEQUENCES && is_long && pair.is_quick()) return run_together(pair);
    const int threads = std::min(pool.size(), count);
    for (int i = 0; i < threads; ++i) num_rows[i] = 0, batches[i]->share.clear();
    for (const ChargptItem* item : order) {
      const size_t least = std::min_element(num_rows.begin(), num_rows.begin() + threads) - num_rows.begin();
      num_rows[least] += rows_of(*item);
      batches[least]->share.push_back(item);
    }
    pool.run(threads, [&](int i) {
      Team alone;
      batches[i]->lead(batches[i]->share, stay(batches[i]->share), alone);
    });
  }

 private:
  static constexpr size_t TEAM_BYTES = size_t(16) << 20, OUTGROWN_BYTES = size_t(32) << 20;  // of weights
  static constexpr int TEAM_ROWS = 64;                      // of a prompt
  static constexpr int PAIR_SEQUENCES = 2, PAIR_STEPS = 8;  // fewer steps are not worth waking a thread

  void run_together(Barrier& barrier) {
    Team team(barrier, 0);
    const auto run = [&](int i) {
      if (i == 0) return batches[0]->lead(order, stay(order), team);
      Team member(barrier, i);
      batches[i]->follow(*batches[0], member);
    };
    pool.run(barrier.size(), run, barrier.is_optional);
  }

  // Whether some sequences take all their steps before the next ones begin: if they only choose, and if a cache holds
  // the weights.
  bool stay(const std::vector<const ChargptItem*>& items) const {
    const bool only_choose = std::all_of(items.begin(), items.end(), [](auto item) { return item->count == 0; });
    return only_choose && net.weight_bytes() <= TEAM_BYTES;
  }

  Net<T, W, K> net;
  std::vector<Slot> states;
  const Counts counts;
  std::vector<std::unique_ptr<Batch<T, W, K>>> batches;  // one per thread
  Pool pool;
  Barrier everyone, pair;
  // Of a call: its items by size, the rows of each thread, and which slots it names.
  std::vector<const ChargptItem*> order;
  std::vector<int64_t> num_rows;
  std::vector<bool> used;
};

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

// All return null or a message.

// The layout of the structures above, which native.py must share.
API int32_t chargpt_layout(void) {
  return 10 << 24 | int(sizeof(ChargptConfig) << 16 | sizeof(ChargptItem) << 8 | sizeof(ChargptParams));
}

API const char* chargpt_open(const ChargptConfig* config, const float* const* weights, void** opened) try {
  Engine* engine = nullptr;
  if (config->dtype == 2) engine = new NetEngine<float, float, float>(*config, weights);
  if (config->dtype == 0 && fits_half(*config, weights)) {
    if (config->is_half) engine = new NetEngine<float, Half, Half>(*config, weights);
    else engine = new NetEngine<float, float, Half>(*config, weights);
  }
  if (!engine && config->dtype == 0) engine = new NetEngine<float, float, float>(*config, weights);
  if (!engine && config->dtype == 1) engine = new NetEngine<double, float, double>(*config, weights);
  if (!engine) return "this build has no such arithmetic";
  *opened = engine;
  return nullptr;
} catch (const std::bad_alloc&) {
  return "out of memory";
} catch (const std::exception&) {
  return "its threads cannot be started: choose fewer with --threads";
}

API void chargpt_close(void* engine) { delete (Engine*)engine; }

API const char* chargpt_start(void* engine, int32_t slot, const ChargptParams* params) try {
  Engine& e = *(Engine*)engine;
  if (slot < 0 || slot >= e.slots) return "a slot is out of range";
  for (int64_t i = 0; i < params->num_biased; ++i)
    if (params->biased[i] < 0 || params->biased[i] >= e.vocab_size) return "logit_bias is for an id out of range";
  for (int64_t i = 0; i < params->num_seen; ++i)
    if (params->seen[i] < 0 || params->seen[i] >= e.vocab_size) return "an id is out of range";
  for (int64_t i = 0; i < params->num_written; ++i)
    if (params->written[i] < 0 || params->written[i] >= e.vocab_size) return "an id is out of range";
  e.start(slot, *params);
  return nullptr;
} catch (const std::bad_alloc&) {
  return "out of memory";
}

API const char* chargpt_copy(void* engine, int32_t source, int32_t target, int64_t length) {
  Engine& e = *(Engine*)engine;
  if (source < 0 || source >= e.slots || target < 0 || target >= e.slots) return "a slot is out of range";
  return e.copy(source, target, length);
}

API const char* chargpt_run(void* engine, const ChargptItem* items, int32_t count) try {
  Engine& e = *(Engine*)engine;
  if (const char* refusal = e.refuses(items, count)) return refusal;
  e.run(items, count);
  return nullptr;
} catch (const std::bad_alloc&) {
  return "out of memory";
}

// In how many steps a character was guessed, and in how many rightly, since the engine was opened.
API void chargpt_guesses(void* engine, int64_t* guessed, int64_t* right) {
  ((Engine*)engine)->count_guesses(guessed, right);
}

API int32_t chargpt_cache_bits(void* engine) { return ((Engine*)engine)->cache_bits; }

API int32_t chargpt_register_bits(void) { return 8 * REGISTER; }
