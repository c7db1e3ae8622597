// Prints every bit that the native engine computes for one fixed model and two sequences, without and with counts: one
// line per character, with the log-probabilities of all ids folded into a number. Two builds agree if they print the
// same.
//
// Includes the engine as source, so that one file compiles for any machine.

#include "service/engine/native.cpp"

namespace {

constexpr int V = 37, W = 20, LAYERS = 2, HEADS = 4, KV_HEADS = 2, C = 32, INNER = 72, HS = C / HEADS;
constexpr int PROMPT = 7, STEPS = 50;  // well past the window

uint32_t state = 1;
int draw(int n) { return int((state = state * 1664525u + 1013904223u) >> 8) % n; }

// Numbers with eight significant bits: exact in fp16.
std::vector<float> weights(int count, float middle, float scale) {
  std::vector<float> w(count);
  for (float& x : w) x = middle + scale * float(draw(255) - 127) / 128;
  return w;
}

uint64_t fold(const double* numbers, int count) {
  uint64_t hash = 14695981039346656037u;
  // To 36 bits after the point, as C libraries round logarithms differently.
  for (int i = 0; i < count; ++i) hash = (hash ^ uint64_t(std::llround(std::ldexp(numbers[i], 36)))) * 1099511628211u;
  return hash;
}

void require(const char* message) {
  if (!message) return;
  std::fprintf(stderr, "%s\n", message);
  std::exit(1);
}

// A tree of the contexts of one character, each with two followers.
struct Tree {
  double weights[2 * 256], base[V], rest_codes[256], share_codes[256];
  int32_t first_child[V + 2], first_follower[V + 2], older[V + 1], ids[2 * V];
  uint8_t rests[V + 1], shares[2 * V];

  explicit Tree(double weight) {
    std::fill_n(weights, 2 * 256, weight);
    std::fill_n(base, V, 1.0 / V);
    for (int i = 0; i < 256; ++i) rest_codes[i] = 1 - i / 256.0, share_codes[i] = 256 - i;
    for (int i = 0; i <= V + 1; ++i) first_child[i] = i ? V + 1 : 1, first_follower[i] = i ? 2 * (i - 1) : 0;
    for (int i = 0; i <= V; ++i) older[i] = i ? i - 1 : 0, rests[i] = i ? 20 + 5 * i : 0;
    for (int i = 0; i < 2 * V; ++i) ids[i] = i % 2 ? V - 1 - i / 3 : i / 3, shares[i] = i % 2 ? 3 * i : 0;
  }
};

void print(const char* dtype, bool is_double, double weight) {
  state = 1;
  std::vector<std::vector<float>> all{weights(V * C, 0, 1)};
  for (int layer = 0; layer < LAYERS; ++layer) {
    all.push_back(weights(C, 1, 0.5f));
    all.push_back(weights((HEADS + 2 * KV_HEADS) * HS * C, 0, 0.25f));
    all.push_back(weights(HS, 1, 0.5f));
    all.push_back(weights(HS, 1, 0.5f));
    all.push_back(weights(C * C, 0, 0.25f));
    all.push_back(weights(C, 1, 0.5f));
    all.push_back(weights(2 * INNER * C, 0, 0.25f));
    all.push_back(weights(C * INNER, 0, 0.25f));
  }
  all.push_back(weights(C, 1, 0.5f));
  all.push_back(weights(V * C, 0, 0.5f));
  std::vector<const float*> pointers;
  for (const auto& w : all) pointers.push_back(w.data());

  const Tree tree(weight);
  const double frequencies[HS / 2] = {1, 0.1, 0.01, 0.001};
  const ChargptConfig config{V, W, LAYERS, HEADS, KV_HEADS, C, INNER, 2, 2, is_double, !is_double, 1e-6,
                             frequencies, 2, V + 1, tree.weights, tree.base, tree.rest_codes, tree.share_codes,
                             tree.first_child, tree.first_follower, tree.older, tree.rests, tree.ids, tree.shares};
  void* engine = nullptr;
  require(chargpt_open(&config, pointers.data(), &engine));

  const int32_t before[] = {NONE, NONE, NONE, NONE, NONE, 3, 5};
  int32_t prompt[PROMPT], chosen[2][STEPS];
  for (int32_t& id : prompt) id = draw(V);
  uint32_t every[V], ids[STEPS * V];
  for (int i = 0; i < V; ++i) every[i] = i;
  double values[2][STEPS], all_values[2][STEPS * V];
  std::vector<ChargptItem> items;
  for (int slot = 0; slot < 2; ++slot) {
    // All of sampling, and the most probable character.
    ChargptParams params{};
    params.top_p = params.typical_p = params.repetition = 1, params.log_min_p = -HUGE_VAL;
    if (!slot) {
      params.temperature = 0.9, params.top_p = 0.95, params.log_min_p = -6, params.typical_p = 0.99;
      params.repetition = 1.1, params.presence = 0.1, params.frequency = 0.2;
      params.seed = 7, params.top_k = 30, params.num_seen = PROMPT, params.seen = prompt;
    }
    require(chargpt_start(engine, slot, &params));
    items.push_back({slot, PROMPT - slot, STEPS, V, prompt + slot, before, nullptr, nullptr, chosen[slot], values[slot], ids,
                     all_values[slot], every});
  }
  require(chargpt_run(engine, items.data(), int(items.size())));
  for (int slot = 0; slot < 2; ++slot)
    for (int k = 0; k < STEPS; ++k)
      std::printf("%s %g %d %d: %d %016llx\n", dtype, weight, slot, k, chosen[slot][k],
                  (unsigned long long)fold(&all_values[slot][size_t(k) * V], V));
  chargpt_close(engine);
}

}  // namespace

int main() {
  for (double weight : {0.0, 0.4}) {
    print("float32", false, weight);
    print("float64", true, weight);
  }
}
