// The native engine: the model of service/model/gpt.py and the sampler of service/model/sampling.py on a CPU.
//
// One promise shapes all of it: a row's arithmetic depends on nothing but that row. Each output is a sum in an order
// that is fixed here, written with explicit fused multiply-adds, so neither the other rows of a batch, nor the number
// of threads, nor the instruction set changes a bit of it. Hence the same seed gives the same text under any load.
//
//   Lanes<T>   64 bytes of numbers, the unit of all layouts: 16 floats or 8 doubles, in one, two or four registers
//   Matrix     weights packed into panels of one Lanes of outputs: [panel][input][lane]. A lane is an output, so every
//              sum over inputs is sequential. Stored as fp32, or in float32's arithmetic as fp16 if that is exact
//   cache      per slot, layer and key head: keys as [BLOCKS × Lanes keys][dimension][key], so a lane is a key and all
//              is read in the order in which it lies; values as [key][dimension]. Position p is at ring index p mod W,
//              as in service/model/kv_cache.py. With float32's arithmetic they are fp16 numbers, of half the size,
//              where no text can make them overflow: see `fits_half`
//   padding    heads, widths and the vocabulary are padded with zeros to whole Lanes
//
// Every thread takes whole sequences and runs them on its own for all steps of a call. If there is much to read, or if
// there are few sequences, threads share each product and wait for each other in between: see `Net::run`.
// Compiled once per instruction set (setup.py); native.py chooses one at run time and calls the functions at the end.
// Knows ids and slots; nothing of requests, stops or text.

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#else
#error "this needs AVX2, FMA and F16C, or NEON"
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

// -- Lanes --

#if defined(__AVX512F__)
constexpr int REGISTER = 64;  // bytes
constexpr int TILE = 24;      // accumulators, in Lanes, that fit the registers
#elif defined(__AVX2__)
constexpr int REGISTER = 32;
constexpr int TILE = 6;
#else
constexpr int REGISTER = 16;
constexpr int TILE = 6;
#endif

template <class T> struct Register;
template <> struct Register<float> { typedef float type __attribute__((vector_size(REGISTER))); };
template <> struct Register<double> { typedef double type __attribute__((vector_size(REGISTER))); };
template <> struct Register<int32_t> { typedef int32_t type __attribute__((vector_size(REGISTER))); };
template <> struct Register<int64_t> { typedef int64_t type __attribute__((vector_size(REGISTER))); };
template <class T> using Reg = typename Register<T>::type;

template <class T> struct IntOf;
template <> struct IntOf<float> { using type = int32_t; };
template <> struct IntOf<double> { using type = int64_t; };

constexpr int PARTS = 64 / REGISTER;
template <class T> constexpr int LANES = 64 / sizeof(T);
template <class T> constexpr int PER_REGISTER = REGISTER / sizeof(T);

template <class T> struct Lanes { Reg<T> part[PARTS]; };

#define INLINE inline __attribute__((always_inline))
#define RARE __attribute__((cold, noinline))  // small rather than fast, and so compiled sooner
#define EACH_PART for (int k = 0; k < PARTS; ++k)

#if defined(__AVX512F__)
INLINE Reg<float> fma(Reg<float> a, Reg<float> b, Reg<float> c) { return (Reg<float>)_mm512_fmadd_ps(a, b, c); }
INLINE Reg<double> fma(Reg<double> a, Reg<double> b, Reg<double> c) { return (Reg<double>)_mm512_fmadd_pd(a, b, c); }
#elif defined(__AVX2__)
INLINE Reg<float> fma(Reg<float> a, Reg<float> b, Reg<float> c) { return (Reg<float>)_mm256_fmadd_ps(a, b, c); }
INLINE Reg<double> fma(Reg<double> a, Reg<double> b, Reg<double> c) { return (Reg<double>)_mm256_fmadd_pd(a, b, c); }
#else
INLINE Reg<float> fma(Reg<float> a, Reg<float> b, Reg<float> c) {
  return (Reg<float>)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
INLINE Reg<double> fma(Reg<double> a, Reg<double> b, Reg<double> c) {
  return (Reg<double>)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
}
#endif

template <class T> INLINE Lanes<T> all(T value) {
  Lanes<T> v;
  EACH_PART v.part[k] = value - Reg<T>{};
  return v;
}
template <class T> INLINE Lanes<T> load(const T* from) {
  Lanes<T> v;
  EACH_PART std::memcpy(&v.part[k], from + k * PER_REGISTER<T>, REGISTER);
  return v;
}
template <class T> INLINE void store(T* to, Lanes<T> v) {
  EACH_PART std::memcpy(to + k * PER_REGISTER<T>, &v.part[k], REGISTER);
}
template <class T> INLINE Lanes<T> fma(Lanes<T> a, Lanes<T> b, Lanes<T> c) {
  EACH_PART c.part[k] = fma(a.part[k], b.part[k], c.part[k]);
  return c;
}
#define LANEWISE(name, expression)                                 \
  template <class T> INLINE Lanes<T> name(Lanes<T> a, Lanes<T> b) { \
    EACH_PART { Reg<T> x = a.part[k], y = b.part[k]; a.part[k] = expression; } \
    return a;                                                      \
  }
LANEWISE(operator+, x + y)
LANEWISE(operator-, x - y)
LANEWISE(operator*, x * y)
LANEWISE(operator/, x / y)
LANEWISE(larger, y > x ? y : x)
#undef LANEWISE

// Reduced pairwise, in one order for all instruction sets.
template <class T> INLINE T sum(Lanes<T> v) {
  T a[LANES<T>];
  store(a, v);
  for (int width = LANES<T> / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) a[i] += a[i + width];
  return a[0];
}
template <class T> INLINE T largest(Lanes<T> v) {
  T a[LANES<T>];
  store(a, v);
  for (int width = LANES<T> / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) a[i] = a[i + width] > a[i] ? a[i + width] : a[i];
  return a[0];
}

// e^x for x ≤ 0, within 2 units of the last place; 0 where it would leave the normal numbers; NaN stays NaN.
// x = n·ln 2 + r, |r| ≤ ln 2 / 2, and the Taylor series of e^r. Adding `shift` rounds to an integer, which is then in
// the low bits.
template <class T> struct Exp;
template <> struct Exp<float> {
  static constexpr float shift = 12582912.0f, low = -87.0f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
  static constexpr int degree = 7, bias = 127, mantissa = 23;
};
template <> struct Exp<double> {
  static constexpr double shift = 6755399441055744.0, low = -708.0, ln2_high = 6.93147180369123816490e-01,
                          ln2_low = 1.90821492927058770002e-10;
  static constexpr int degree = 13, bias = 1023, mantissa = 52;
};
template <class T> struct Taylor {
  T c[Exp<T>::degree + 1] = {1};
  constexpr Taylor() {
    for (int i = 1; i <= Exp<T>::degree; ++i) c[i] = T(1);
    double factorial = 1;
    for (int i = 1; i <= Exp<T>::degree; ++i) c[i] = T(1 / (factorial *= i));
  }
};
template <class T> INLINE Lanes<T> exp_of_negative(Lanes<T> lanes) {
  using E = Exp<T>;
  using Int = typename IntOf<T>::type;
  constexpr Taylor<T> taylor;
  const Reg<T> shift = E::shift - Reg<T>{};
  EACH_PART {
    const Reg<T> given = lanes.part[k];
    const Reg<T> x = given < E::low ? E::low - Reg<T>{} : given;
    const Reg<T> shifted = fma(x, T(1.4426950408889634) - Reg<T>{}, shift);
    const Reg<T> n = shifted - shift;
    const Reg<T> r = fma(n, -E::ln2_low - Reg<T>{}, fma(n, -E::ln2_high - Reg<T>{}, x));
    Reg<T> y = taylor.c[E::degree] - Reg<T>{};
#pragma GCC unroll 16
    for (int i = E::degree - 1; i >= 0; --i) y = fma(y, r, taylor.c[i] - Reg<T>{});
    Int base;
    const T value = E::shift;
    std::memcpy(&base, &value, sizeof base);
    const Reg<T> power = (Reg<T>)(((Reg<Int>)shifted - base + E::bias) << E::mantissa);
    lanes.part[k] = given < E::low ? Reg<T>{} : y * power;
  }
  return lanes;
}

// -- weights --

// fp16 numbers.
constexpr float LARGEST_HALF = 65504;
struct Half { uint16_t bits; };
#if defined(__F16C__)
INLINE Half to_half(float x) { return {(uint16_t)_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)}; }
#if defined(__AVX512F__)
INLINE Reg<float> widen(const Half* from, float) {
  return (Reg<float>)_mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256((const __m256i*)from));
}
#else
INLINE Reg<float> widen(const Half* from, float) {
  return (Reg<float>)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
}
#endif
#else
INLINE Half to_half(float x) {
  const __fp16 half = __fp16(x);
  Half h;
  std::memcpy(&h, &half, sizeof h);
  return h;
}
INLINE Reg<float> widen(const Half* from, float) {
  float16x4_t half;
  std::memcpy(&half, from, sizeof half);
  return (Reg<float>)vcvt_f32_f16(half);
}
#endif
INLINE Reg<float> widen(const float* from, float) {
  Reg<float> r;
  std::memcpy(&r, from, REGISTER);
  return r;
}
INLINE Reg<double> widen(const float* from, double) {
#if defined(__AVX512F__)
  return (Reg<double>)_mm512_maskz_cvtps_pd(0xFF, _mm256_loadu_ps(from));
#elif defined(__AVX2__)
  return (Reg<double>)_mm256_cvtps_pd(_mm_loadu_ps(from));
#else
  return Reg<double>{from[0], from[1]};
#endif
}
INLINE Reg<double> widen(const double* from, double) {
  Reg<double> r;
  std::memcpy(&r, from, REGISTER);
  return r;
}
template <class T, class W> INLINE Lanes<T> load_as(const W* from) {
  Lanes<T> v;
  EACH_PART v.part[k] = widen(from + k * PER_REGISTER<T>, T());
  return v;
}

INLINE void convert(float x, float& to) { to = x; }
INLINE void convert(double x, double& to) { to = x; }
INLINE void convert(float x, Half& to) { to = to_half(x); }
// `count` numbers, whole Lanes.
template <class T, class W> INLINE void convert_all(const T* from, W* to, int count) {
  for (int i = 0; i < count; ++i) convert(from[i], to[i]);
}
#if defined(__AVX512F__)
INLINE void convert_all(const float* from, Half* to, int count) {
  for (int i = 0; i < count; i += 16)
    _mm256_storeu_si256((__m256i*)(to + i),
                        _mm512_maskz_cvtps_ph(0xFFFF, _mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__F16C__)
INLINE void convert_all(const float* from, Half* to, int count) {
  for (int i = 0; i < count; i += 8)
    _mm_storeu_si128((__m128i*)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
}
#endif

constexpr size_t PAGE = size_t(2) << 20;

// Zeroed memory: the cache and the weights, which are read in long strides, in large pages where the system has them.
template <class T> struct Buffer {
  T* data = nullptr;
  size_t bytes = 0;
  Buffer() = default;
  explicit Buffer(size_t count) : bytes(count * sizeof(T) + 64) {
#if defined(__linux__)
    if (bytes > PAGE) {
      // The kernel gives zeroed pages when they are first touched.
      bytes = (bytes + PAGE - 1) / PAGE * PAGE;
      void* memory = mmap(nullptr, bytes + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (memory == MAP_FAILED) throw std::bad_alloc();
      base = memory;
      data = (T*)(((uintptr_t)memory + PAGE - 1) / PAGE * PAGE);
      madvise(data, bytes, MADV_HUGEPAGE);
      return;
    }
#endif
    bytes = (bytes + 4095) / 4096 * 4096;
    base = std::aligned_alloc(4096, bytes);
    if (!base) throw std::bad_alloc();
    std::memset(base, 0, bytes);
    data = (T*)base;
  }
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data, other.data);
    std::swap(base, other.base);
    std::swap(bytes, other.bytes);
    return *this;
  }
  ~Buffer() {
#if defined(__linux__)
    if (bytes > PAGE) {
      munmap(base, bytes + PAGE);
      return;
    }
#endif
    std::free(base);
  }

 private:
  void* base = nullptr;
};

template <class T> INLINE int padded(int n) { return (n + LANES<T> - 1) / LANES<T> * LANES<T>; }

template <class T, class W> struct Matrix {
  int n_in = 0, n_out = 0;  // padded
  W* data = nullptr;

  // value(o, i): the weight of output o and input i, 0 for padding.
  template <class F> RARE W* pack(W* to, int outputs, int inputs, F value) {
    n_in = inputs, n_out = outputs, data = to;
    for (int panel = 0; panel < outputs; panel += LANES<T>)
      for (int i = 0; i < inputs; ++i)
        for (int lane = 0; lane < LANES<T>; ++lane) convert(value(panel + lane, i), *to++);
    return to;
  }
};

// y[r][o] = Σ x[r][i] · w[o][i] for R rows and P panels, from i = 0 on.
template <int R, int P, class T, class W>
INLINE void multiply_tile(const W* w, size_t panel, int n_in, const T* x, size_t x_stride, T* y, size_t y_stride) {
  Lanes<T> total[R][P];
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) total[r][p] = all(T(0));
  for (int i = 0; i < n_in; ++i) {
    Lanes<T> weight[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      const W* from = w + p * panel + size_t(i) * LANES<T>;
      __builtin_prefetch((const char*)from + (R <= 3 ? 1024 : 4096));  // fewer rows pass faster, but more panels
      weight[p] = load_as<T>(from);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const Lanes<T> value = all(x[r * x_stride + i]);
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) total[r][p] = fma(weight[p], value, total[r][p]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) store(y + r * y_stride + p * LANES<T>, total[r][p]);
}

// All panels for R rows, P at a time.
template <int R, int P, class T, class W>
INLINE int multiply_panels(const Matrix<T, W>& m, int first, int end, const T* x, size_t x_stride, T* y,
                           size_t y_stride) {
  const size_t panel = size_t(m.n_in) * LANES<T>;
  for (; first + P <= end; first += P)
    multiply_tile<R, P>(m.data + first * panel, panel, m.n_in, x, x_stride, y + size_t(first) * LANES<T>, y_stride);
  return first;
}

constexpr int panels_for(int rows) { return std::clamp(TILE / rows, 1, 8); }
constexpr int MOST_ROWS = TILE >= 24 ? 8 : 6;  // rows of a tile

template <int R, class T, class W>
__attribute__((noinline)) void multiply_rows(const Matrix<T, W>& m, int first, int end, const T* x, size_t x_stride,
                                             T* y, size_t y_stride) {
  constexpr int P = panels_for(R);
  int at = multiply_panels<R, P>(m, first, end, x, x_stride, y, y_stride);
  if constexpr (P > 4) at = multiply_panels<R, 4>(m, at, end, x, x_stride, y, y_stride);
  if constexpr (P > 2) at = multiply_panels<R, 2>(m, at, end, x, x_stride, y, y_stride);
  if constexpr (P > 1) at = multiply_panels<R, 1>(m, at, end, x, x_stride, y, y_stride);
}

template <class T, class W, int... R>
void dispatch_rows(std::integer_sequence<int, R...>, int rows, const Matrix<T, W>& m, int first, int end,
                   const T* x, size_t x_stride, T* y, size_t y_stride) {
  using Function = void (*)(const Matrix<T, W>&, int, int, const T*, size_t, T*, size_t);
  static constexpr Function functions[] = {multiply_rows<R + 1, T, W>...};
  functions[rows - 1](m, first, end, x, x_stride, y, y_stride);
}

// y (rows, n_out) = x (rows, n_in) · mᵀ, for a range of panels. A few at a time pass all rows, so they stay in the
// first cache.
template <class T, class W>
void multiply(const Matrix<T, W>& m, std::pair<int, int> panels, int rows, const T* x, size_t x_stride, T* y,
              size_t y_stride) {
  const int tiles = (rows + MOST_ROWS - 1) / MOST_ROWS, end = panels.second;
  const int step = tiles <= 1 ? end : panels_for((rows + tiles - 1) / tiles);
  for (int first = panels.first; first < end; first += step)
    for (int tile = 0, row = 0; tile < tiles; ++tile) {
      const int count = (rows - row + tiles - tile - 1) / (tiles - tile);
      dispatch_rows(std::make_integer_sequence<int, MOST_ROWS>{}, count, m, first, std::min(end, first + step),
                    x + row * x_stride, x_stride, y + row * y_stride, y_stride);
      row += count;
    }
}

// -- sampling: the steps of service/model/sampling.py, in fp64 --

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

}  // namespace

extern "C" {
// As native.py packs them.
struct ChargptParams {
  double temperature, top_p, log_min_p, typical_p, repetition, presence, frequency;
  uint64_t seed;
  int64_t top_k, position, num_biased, num_seen, num_written, num_ends, num_recent;  // position: of the first id
  const int32_t* biased;  // (num_biased,) ids
  const double* bias;     // (num_biased,)
  const int32_t* seen;    // (num_seen,) ids of the prompt; only where a penalty needs them
  const int32_t* written; // (num_written,) ids that were chosen before
  const int32_t* ends;    // (num_ends,) ids after which no more is chosen in a call
  const int32_t* recent;  // (num_recent,) the last ids before the first choice, by which the first guess is made
};

// A sequence's place in a pattern: an automaton as in constrain/automaton.py.
struct ChargptGuide {
  const uint16_t* classes;   // (V,) of each id
  const int16_t* table;      // (states, num_classes) next states; -1: outside the pattern
  const uint8_t* accepting;  // (states,)
  const int32_t* distance;   // (states,) fewest characters to an accepting state
  const uint8_t* layers;     // (num_layers, layer_bytes) bits of states, the first the highest; null: no minimum
  int32_t num_classes, layer_bytes, num_layers, repeat;
  int32_t state, remaining, missing, rules;  // remaining to the maximum, missing to the minimum length; MAY_LEAVE | …
};

struct ChargptItem {
  int32_t slot;
  int32_t count;              // ids to run; 0: the one that was chosen last
  int32_t steps;              // ids to choose after them
  int32_t alternatives;       // reported beside each log-probability
  const int32_t* ids;         // (count,)
  const int32_t* targets;     // (count,) the id after each, to be reported; −1: not to be; null: none is
  const ChargptGuide* guide;  // null: any id may be chosen
  int32_t* chosen;            // (steps,); those after one of `ends`, or with which a guide ends, are left as they are
  // The report: of R ids, first the targets, then the chosen ones; left as it is where logits are not finite.
  double* values;             // (R,) log-probabilities; null: no report
  uint32_t* top_ids;          // (R, alternatives)
  double* top_values;         // (R, alternatives)
  const uint32_t* which;      // (alternatives,) ids to report; null: the likeliest
};

struct ChargptConfig {
  int32_t vocab_size, block_size, n_layer, n_head, n_kv_head, n_embd, n_inner, slots, threads;
  int32_t dtype, is_half;  // 0 fp32, 1 fp64, 2 fp32 without fp16 in store; weights stored as fp16
  double norm_eps;
  const double* frequencies;  // (head_dim / 2,) radians per position
  // The tree of service/model/ngrams.py; num_ngrams is 0 without one.
  int64_t num_ngrams;
  const uint16_t* ngram_ids;     // (num_ngrams,)
  const uint8_t* ngram_shares;   // (num_ngrams,)
  const int32_t* ngram_children; // (num_ngrams + 1,) the first child of each
};
}

namespace {

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
    p.biased = p.seen = p.written = p.ends = p.recent = nullptr, p.bias = nullptr;
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
  // the penalties will have counted until then. margin: of the draw, how far it is from drawing another id; 1: it cannot.
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

// -- guesses --

// A guess of the next character is run beside the character before it, and counts only if that character is then chosen
// as guessed: guesses change the time that a text takes and nothing else. They come from the training text and from the
// sequence's own text, never from another's: times tell nothing of what others write.

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

// -- threads --

// Whether `is_due` becomes true within a moment that is too short to sleep.
template <class F> INLINE bool comes_soon(F&& is_due) {
  for (int spins = 0; spins < 1000; ++spins) {
    if (is_due()) return true;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  return false;
}

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// Runs a function on several threads, including the caller's.
class Pool {
 public:
  explicit Pool(int size) : begins(size) {
    try {
      for (int i = 1; i < size; ++i) threads.emplace_back([this, i] { work(i); });
    } catch (...) {
      stop();
      throw;
    }
  }
  ~Pool() { stop(); }
  int size() const { return int(threads.size()) + 1; }

  // Call function(i) for i in [0, count), and wait for the ends of the calls. is_optional: threads that have not woken up
  // when the caller's function ends do not call it.
  template <class F> void run(int count, F&& function, bool is_optional = false) {
    if (count > 1) {
      {
        std::lock_guard<std::mutex> guard(mutex);
        call = [](void* f, int i) { (*(std::remove_reference_t<F>*)f)(i); };
        argument = (void*)&function;
        wanted = asleep = count - 1;
        pending = count - 1;
        ++generation;
      }
      for (int i = 1; i < count; ++i) begins[i].notify_one();
    }
    function(0);
    if (count > 1 && is_optional) {
      std::lock_guard<std::mutex> guard(mutex);
      pending -= std::exchange(asleep, 0);
      wanted = 0;
    }
    const auto is_done = [this] { return pending.load(std::memory_order_acquire) == 0; };
    if (count > 1 && !comes_soon(is_done)) {
      std::unique_lock<std::mutex> lock(mutex);
      end.wait(lock, is_done);
    }
  }

 private:
  void stop() {
    {
      std::lock_guard<std::mutex> guard(mutex);
      is_ending = true;
    }
    for (auto& begin : begins) begin.notify_one();
    for (auto& thread : threads) thread.join();
  }

  void work(int index) {
    uint64_t seen = 0;
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex);
        begins[index].wait(lock, [&] { return is_ending || generation != seen; });
        if (is_ending) return;
        seen = generation;
        if (index > wanted) continue;
        --asleep;
      }
      call(argument, index);
      std::lock_guard<std::mutex> guard(mutex);
      if (--pending == 0) end.notify_one();
    }
  }

  std::vector<std::thread> threads;
  std::mutex mutex;
  std::vector<std::condition_variable> begins;  // one per thread
  std::condition_variable end;
  void (*call)(void*, int) = nullptr;
  void* argument = nullptr;
  int wanted = 0, asleep = 0;  // threads of the call beside the caller's, and those of them that have not begun
  std::atomic<int> pending{0};
  uint64_t generation = 0;
  bool is_ending = false;
};

// What the threads of a team share.
class Barrier {
 public:
  // is_optional: the first thread also runs batches alone, see Team::meets.
  Barrier(int size, bool is_optional) : is_optional(is_optional), places(size) {}

  const bool is_optional;
  int size() const { return int(places.size()); }
  // Whether the threads of an optional team recently got a CPU each.
  bool is_quick() const { return Clock::now() >= slow_until; }

 private:
  friend class Team;
  struct alignas(64) Place {
    std::atomic<uint32_t> arrivals{0};
  };
  std::vector<Place> places;  // one per thread
  bool is_dismissed = false;  // the first thread writes it before it arrives
  Clock::time_point slow_until{};
};

// A thread's membership of a team, whose threads run each batch together. The first thread leads, the others follow.
class Team {
 public:
  Team() = default;  // of one thread
  Team(Barrier& barrier, int index) : index(index), size(barrier.size()), barrier(&barrier) {
    if (index) return;
    for (auto& place : barrier.places) place.arrivals.store(0, std::memory_order_relaxed);
    barrier.is_dismissed = false;
  }

  bool is_alone() const { return size == 1; }
  // The thread's share of `count` things, as (first, end).
  std::pair<int, int> share(int count) const { return {count * index / size, count * (index + 1) / size}; }

  // Wait for all others. Spins, as each thread is meant to have a CPU, then offers the CPU to other threads.
  void wait() {
    if (is_alone()) return;
    arrive();
    if (comes_soon([this] { return have_arrived(arrivals); })) return;
    const auto began = Clock::now();
    while (!have_arrived(arrivals)) std::this_thread::yield();
    waited += Seconds(Clock::now() - began).count();
  }

  // For the first thread, before a batch: wait for the others, and return whether they share it. In an optional team
  // they do not share it if one of them has not yet woken up, or has no CPU.
  bool meets() {
    if (is_alone()) return true;
    if (barrier->is_optional) {
      if (waited > HELD_UP) {
        barrier->slow_until = Clock::now() + std::chrono::duration_cast<Clock::duration>(Seconds(TIMES_SLOW * waited));
        dismiss();
        return true;
      }
      if (!have_arrived(arrivals + 1)) return false;
    }
    wait();
    return true;
  }

  // For the first thread: go on alone.
  void dismiss() {
    if (is_alone()) return;
    barrier->is_dismissed = true;
    arrive();
    size = 1;
  }

  // For the others: whether there is another batch.
  bool follows() {
    wait();
    return !barrier->is_dismissed;
  }

 private:
  // Threads that wait for each other lose more than they win if other programs use their CPUs. If the first thread of an
  // optional team has waited for HELD_UP seconds in a call, beyond its spins, it does the rest of the call alone, and
  // further calls for TIMES_SLOW times the time that it waited. So waiting costs at most 1 / TIMES_SLOW of the time.
  static constexpr double HELD_UP = 0.0005, TIMES_SLOW = 20;

  void arrive() { barrier->places[index].arrivals.store(++arrivals, std::memory_order_release); }

  bool have_arrived(uint32_t count) const {
    for (int i = 0; i < size; ++i)
      if (i != index && int32_t(barrier->places[i].arrivals.load(std::memory_order_acquire) - count) < 0) return false;
    return true;
  }

  int index = 0, size = 1;
  Barrier* barrier = nullptr;
  uint32_t arrivals = 0;
  double waited = 0;  // seconds
};

// -- the engine --

class Engine {
 public:
  virtual ~Engine() = default;
  virtual void start(int slot, const ChargptParams& params) = 0;
  virtual const char* copy(int source, int target, int64_t length) = 0;
  virtual void run(const ChargptItem* items, int count) noexcept = 0;  // allocates nothing
  virtual const char* refuses(const ChargptItem* items, int count) = 0;
  virtual void count_guesses(int64_t* guessed, int64_t* right) const = 0;
  int slots = 0, vocab_size = 0, cache_bits = 0;  // of a number in the cache
};

constexpr int MOST_GUESSES = 4;    // in a batch: with more, rows cost more than reading the weights again
constexpr double WORTH_IT = 0.5;   // certainty from which a further row takes less time than it saves
constexpr int BATCH = 48;          // rows that pass the layers together; activations of wide models still fit a cache
constexpr int64_t ANGLES = 4096;   // positions whose rotation is kept; of later ones it is computed

// T: arithmetic; W: stored weights; K: stored keys and values.
template <class T, class W, class K> class Net final : public Engine {
  static constexpr int N = LANES<T>;

  struct Layer {
    std::vector<T> attn_norm, q_norm, k_norm, mlp_norm;
    Matrix<T, W> qkv, proj, gate_up, down;
  };
  struct Slot {
    Sampler sampler;
    int64_t position = 0;  // characters that have run
    int32_t last = NONE;   // the id that was chosen last
    std::array<int32_t, NGrams::ORDER> recent;  // the last ids, those of the prompt included, for guesses
    Repetitions repetitions;
    std::vector<int32_t> ends;

    bool is_end(int32_t id) const { return std::find(ends.begin(), ends.end(), id) != ends.end(); }
  };
  struct Row {
    int slot;
    int32_t id;
    int64_t position;
    bool wants_logits;
  };
  // An item that is under way.
  struct Progress {
    const ChargptItem* item;
    Walk walk;
    int fed = 0, chosen = 0, reported = 0;
    int rows = 0;                        // in the batch
    std::array<int32_t, MOST_GUESSES> guess{};  // the ids of its last rows
    int guessed = 0, kept = 0;           // number of guesses; where in `kept` what they overwrite is
    NGrams::Places places{};             // of the slot's recent ids
    bool has_places = false;
    bool goes_on = true;
  };
  struct Workspace {
    Buffer<T> x, h, qkv, y, out, gate_up, p, cos_sin, logits;
    Buffer<double> z, weight;
    std::vector<K> key;  // (hp,)
    std::vector<int32_t> order;
    std::vector<uint8_t> allowed;  // (V,)
    std::vector<const ChargptItem*> share;
    std::vector<Progress> active;
    size_t taken = 0;  // of `active`, those with rows in the batch
    std::vector<Row> rows;
    Buffer<K> kept;  // keys and values that guesses overwrite
    int num_kept = 0;
    int64_t num_guessed = 0, num_right = 0;
  };

 public:
  RARE Net(const ChargptConfig& config, const float* const* weights)
      : c(config), hs(c.n_embd / c.n_head), hp(padded<T>(hs)), Wp(padded<T>(c.block_size)), C(padded<T>(c.n_embd)),
        F(padded<T>(c.n_inner)), V(padded<T>(c.vocab_size)), heads(c.n_head + 2 * c.n_kv_head),
        frequencies(c.frequencies, c.frequencies + hs / 2), ngrams(c), pool(c.threads),
        everyone(c.threads, false), pair(2, true) {
    slots = c.slots, vocab_size = c.vocab_size, cache_bits = 8 * sizeof(K);
    pack(weights);
    head_size = values_at() + size_t(Wp) * hp;
    slot_size = head_size * c.n_kv_head * c.n_layer;
    cache = Buffer<K>(slot_size * c.slots);
    std::memset((void*)cache.data, 0, cache.bytes);  // the kernel gives its pages now, not within a step
    states.resize(c.slots);
    used.resize(c.slots);
    num_rows.resize(pool.size());
    order.reserve(c.slots);
    angles.resize(ANGLES * hs);
    for (int64_t p = 0; p < ANGLES; ++p) rotate_by(p, &angles[p * hs]);
    for (int i = 0; i < pool.size(); ++i) {
      Workspace w;
      w.x = Buffer<T>(BATCH * C), w.h = Buffer<T>(BATCH * C), w.qkv = Buffer<T>(BATCH * heads * hp);
      w.y = Buffer<T>(BATCH * c.n_head * hp), w.out = Buffer<T>(BATCH * C), w.gate_up = Buffer<T>(BATCH * 2 * F);
      w.p = Buffer<T>(HEADS * Wp), w.cos_sin = Buffer<T>(BATCH * hs);
      w.logits = Buffer<T>(BATCH * V), w.z = Buffer<double>(V), w.weight = Buffer<double>(V);
      w.kept = Buffer<K>(MOST_GUESSES * place_size());
      w.key.resize(hp);
      w.order.resize(V);
      w.allowed.resize(V);
      w.share.reserve(c.slots);
      w.rows.reserve(BATCH);
      w.active.reserve(c.slots);
      spaces.push_back(std::move(w));
    }
  }

  RARE ~Net() override = default;

  void start(int slot, const ChargptParams& params) override {
    Slot& s = states[slot];
    s.sampler.start(params, c.vocab_size);
    s.ends.assign(params.ends, params.ends + params.num_ends);
    s.position = params.position, s.last = NONE;
    if (s.position)  // rows see all places, also those of positions that never ran
      for (int layer = 0; layer < c.n_layer; ++layer) std::fill_n(ring(slot, layer, 0), c.n_kv_head * head_size, K{});
    s.recent.fill(NONE);
    const int64_t count = std::min<int64_t>(params.num_recent, s.recent.size());
    std::copy_n(params.recent + params.num_recent - count, count, s.recent.end() - count);
    s.repetitions.forget();
  }

  void count_guesses(int64_t* guessed, int64_t* right) const override {
    *guessed = *right = 0;
    for (const Workspace& w : spaces) *guessed += w.num_guessed, *right += w.num_right;
  }

  const char* copy(int source, int target, int64_t length) override {
    const int64_t position = states[source].position;
    if (source == target || length < 1 || length > position) return "the source does not hold what is to be copied";
    if (position > std::max<int64_t>(c.block_size, length)) return "the source's ring has lost what is to be copied";
    const size_t used = std::min<int64_t>(length, c.block_size);
    const size_t keys = (used + KEYS - 1) / KEYS * KEYS * hs, values = used * hp;
    for (int layer = 0; layer < c.n_layer; ++layer)
      for (int h = 0; h < c.n_kv_head; ++h) {
        const K* from = ring(source, layer, h);
        K* to = ring(target, layer, h);
        std::memcpy(to, from, keys * sizeof(K));
        std::memcpy(to + values_at(), from + values_at(), values * sizeof(K));
      }
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
      if (item.count && !item.ids) return "ids are missing";
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

  // Each thread takes whole sequences, about as many rows as the others.
  // All threads run each batch together if a batch is so much work that waiting for each other pays: with fewer
  // sequences than threads, and if the weights outgrow 32 MB, because each thread then reads only its share of them.
  // Two threads run each batch of one or two sequences together: half of the weights fits into a core's second cache.
  void run(const ChargptItem* items, int count) noexcept override {
    order.resize(count);
    for (int i = 0; i < count; ++i) order[i] = &items[i];
    std::sort(order.begin(), order.end(), [](auto a, auto b) {
      return rows_of(*a) > rows_of(*b) || (rows_of(*a) == rows_of(*b) && a < b);
    });
    const bool is_large = storage.bytes > TEAM_BYTES || order[0]->count >= TEAM_ROWS;
    if ((count < pool.size() && is_large) || storage.bytes > OUTGROWN_BYTES) return run_together(everyone);
    const bool is_long = order[0]->steps >= PAIR_STEPS;
    if (pool.size() > 1 && count <= PAIR_SEQUENCES && is_long && pair.is_quick()) return run_together(pair);
    const int threads = std::min(pool.size(), count);
    for (int i = 0; i < threads; ++i) num_rows[i] = 0, spaces[i].share.clear();
    for (const ChargptItem* item : order) {
      const size_t least = std::min_element(num_rows.begin(), num_rows.begin() + threads) - num_rows.begin();
      num_rows[least] += rows_of(*item);
      spaces[least].share.push_back(item);
    }
    pool.run(threads, [&](int i) {
      Team alone;
      lead(spaces[i].share, spaces[i], alone);
    });
  }

 private:
  static constexpr size_t TEAM_BYTES = size_t(16) << 20, OUTGROWN_BYTES = size_t(32) << 20;  // of weights
  static constexpr int TEAM_ROWS = 64;                    // of a prompt
  static constexpr int TOGETHER = 8;                      // sequences of a thread
  static constexpr int PAIR_SEQUENCES = 2, PAIR_STEPS = 8;  // fewer steps are not worth waking a thread

  void run_together(Barrier& barrier) {
    Team team(barrier, 0);
    const auto run = [&](int i) {
      if (i == 0) return lead(order, spaces[0], team);
      Team member(barrier, i);
      while (member.follows()) forward(spaces[i], spaces[0], member);
    };
    pool.run(barrier.size(), run, barrier.is_optional);
  }

  static int64_t rows_of(const ChargptItem& item) {
    return item.count + item.steps - (item.count ? std::min(item.steps, 1) : 0);
  }

  static bool only_choose(const std::vector<const ChargptItem*>& items) {
    return std::all_of(items.begin(), items.end(), [](auto item) { return item->count == 0; });
  }

  // Run items to their ends: feed the ids that were given, then what is chosen, BATCH rows at a time. Where all only
  // choose, TOGETHER of them take all their steps before the next ones begin: their keys and values stay in the cache,
  // where all rows' would be read from memory at every step. Not with weights that a cache does not hold either.
  void lead(const std::vector<const ChargptItem*>& items, Workspace& w, Team& team) {
    const bool stays = only_choose(items) && storage.bytes <= TEAM_BYTES;
    Team alone;
    begin(items, w);
    while (gather(w, stays)) {
      forward(w, w, team.meets() ? team : alone);
      finish(w);
      settle(w, stays);
    }
    team.dismiss();
  }

  void begin(const std::vector<const ChargptItem*>& items, Workspace& w) {
    w.active.clear();
    w.rows.clear();
    w.taken = 0;
    for (const ChargptItem* item : items) w.active.push_back({item, Walk(item->guide)});
  }

  // Sequences that are done leave; the others stay at the front, or let those wait that have run.
  void settle(Workspace& w, bool stays) {
    std::vector<Progress>& active = w.active;
    const auto end = active.begin() + w.taken;
    const auto kept = std::remove_if(active.begin(), end, [](const Progress& it) { return !it.goes_on; });
    const ptrdiff_t count = kept - active.begin();
    active.erase(kept, end);
    w.taken = 0;
    if (!stays) std::rotate(active.begin(), active.begin() + count, active.end());
  }

  // The next batch; returns whether there is one.
  bool gather(Workspace& w, bool stays) {
    w.rows.clear();
    w.num_kept = 0;
    const int depth = MOST_GUESSES / int(std::max<size_t>(1, w.active.size()));  // of each
    const int limit = stays && !depth ? TOGETHER : BATCH;
    for (Progress& it : w.active) {
      const int room = limit - int(w.rows.size());
      if (room == 0) break;
      const ChargptItem& item = *it.item;
      Slot& s = states[item.slot];
      const int given = item.count ? item.count - it.fed : 0;
      const int rows = given ? std::min(given, room) : 1;
      for (int k = 0; k < rows; ++k) {
        const bool is_last = given <= k + 1;
        const bool wants = (is_last && item.steps) || (given && target_of(item, it.fed + k) >= 0);
        w.rows.push_back({item.slot, given ? item.ids[it.fed + k] : s.last, s.position + k, wants});
      }
      it.rows = rows;
      if (depth && !given) {
        guess(it, w, std::min({depth, room - rows, item.steps - it.chosen - 1, c.block_size - 1}));
        it.kept = w.num_kept;
        for (int k = 0; k < it.guessed; ++k) {
          const int64_t position = s.position + it.rows++;
          w.rows.push_back({item.slot, it.guess[k], position, true});
          if (position >= c.block_size) keep(true, item.slot, position, &w.kept.data[w.num_kept++ * place_size()]);
        }
      }
      ++w.taken;
    }
    return !w.rows.empty();
  }

  // Fill in at most `most` guesses: of the next id, of the one after it if that is right, and so on. None ends the text,
  // as nothing runs after that.
  void guess(Progress& it, Workspace& w, int most) {
    const Slot& s = states[it.item->slot];
    const bool has_tree = !ngrams.is_empty(), repeats = may_repeat(s);
    if (has_tree && !it.has_places) it.places = ngrams.find(s.recent.data(), int(s.recent.size())), it.has_places = true;
    NGrams::Places places = it.places;
    auto recent = s.recent;
    Walk walk = it.walk;
    double all_right = 1;  // certainty that this guess and those before it are right
    for (it.guessed = 0; it.guessed < most; ++it.guessed) {
      double certainty = 0;
      int32_t id = repeats ? s.repetitions.after(recent.end(), &certainty) : NONE;
      if (id < 0 && has_tree) {
        ngrams.logits(places, w.z.data, c.vocab_size);
        const uint8_t* allowed = walk.allow(w.allowed.data(), c.vocab_size);
        double margin = 0.05;
        id = s.sampler.choose_at(it.guessed, w.z.data, w.weight.data, w.order.data(), c.vocab_size, allowed, &margin);
        certainty = (margin + 0.02) / (margin + 0.06);  // as counted in texts of tiny Shakespeare
      }
      if (id < 0 || (all_right *= certainty) < WORTH_IT || !walk.push(id) || s.is_end(id)) return;
      it.guess[it.guessed] = id;
      append(recent, id);
      if (has_tree) places = ngrams.next(places, id);
    }
  }

  // Whether guesses come from the sequence's own text, before the tree.
  bool may_repeat(const Slot& s) const { return ngrams.is_empty() || s.sampler.p.temperature == 0; }

  template <class Ids> static void append(Ids& recent, int32_t id) {
    std::copy(recent.begin() + 1, recent.end(), recent.begin());
    recent.back() = id;
  }

  // Numbers of a position in the cache: in each layer a key and a value of each head.
  size_t place_size() const { return size_t(c.n_layer) * c.n_kv_head * (hs + hp); }

  // Copy the keys and values in the place of a position to `kept`, or from there.
  void keep(bool keeps, int slot, int64_t position, K* kept) const {
    const int index = int(position % c.block_size);
    for (int layer = 0; layer < c.n_layer; ++layer)
      for (int h = 0; h < c.n_kv_head; ++h) {
        K* key = ring(slot, layer, h) + size_t(index / KEYS) * KEYS * hs + index % KEYS;
        K* value = ring(slot, layer, h) + values_at() + size_t(index) * hp;
        for (int d = 0; d < hs; ++d, ++kept) {
          K& number = key[d * KEYS];
          if (keeps) *kept = number;
          else number = *kept;
        }
        std::memcpy(keeps ? kept : value, keeps ? value : kept, hp * sizeof(K));
        kept += hp;
      }
  }

  // Take in the rows of a batch after a forward: choose where the given ids have run.
  void finish(Workspace& w) {
    int row = 0;
    const T* logits = w.logits.data;  // of the rows that want them
    for (size_t k = 0; k < w.taken; ++k) {
      Progress& it = w.active[k];
      const Row* rows = &w.rows[row];
      const ptrdiff_t wanted = std::count_if(rows, rows + it.rows, [](const Row& r) { return r.wants_logits; });
      row += it.rows;
      it.goes_on = finish(it, w, rows, logits, wanted);
      logits += wanted * V;
    }
  }

  bool finish(Progress& it, Workspace& own, const Row* rows, const T* logits, ptrdiff_t wanted) {
    const ChargptItem& item = *it.item;
    Slot& s = states[item.slot];
    if (it.fed < item.count) {
      const T* next = logits;
      for (int k = 0; k < it.rows; ++k) {
        if (!rows[k].wants_logits) continue;
        if (target_of(item, it.fed + k) >= 0) report(it, own, next, target_of(item, it.fed + k));
        next += V;
      }
      it.fed += it.rows;
      s.position += it.rows;
      if (it.fed < item.count) return true;
      return item.steps && choose(it, own, logits + (wanted - 1) * V);
    }
    const int64_t first = ++s.position;  // of the guesses
    int right = 0;
    bool goes_on = choose(it, own, logits);
    while (goes_on && right < it.guessed && s.last == it.guess[right]) {
      ++s.position;
      goes_on = choose(it, own, logits + ++right * V);
    }
    // The wrong ones give back the places that they took: of positions that the next row sees, or that others may copy.
    for (int k = 0, kept = it.kept; k < it.guessed; ++k)
      if (first + k >= c.block_size) {
        const K* from = &own.kept.data[kept++ * place_size()];
        if (k >= right) keep(false, item.slot, first + k, const_cast<K*>(from));
      }
    own.num_guessed += it.guessed > 0, own.num_right += right > 0;
    it.guessed = 0;
    return goes_on;
  }

  bool choose(Progress& it, Workspace& w, const T* logits) {
    const ChargptItem& item = *it.item;
    Slot& s = states[item.slot];
    double* z = w.z.data;
    std::copy_n(logits, c.vocab_size, z);
    const uint8_t* allowed = it.walk.allow(w.allowed.data(), c.vocab_size);
    s.last = s.sampler.choose(z, w.weight.data, w.order.data(), c.vocab_size, allowed);
    item.chosen[it.chosen++] = s.last;
    if (s.last >= 0) report(it, w, logits, s.last);
    if (may_repeat(s)) s.repetitions.learn(s.recent.end(), s.last);
    append(s.recent, s.last);
    if (it.has_places) it.places = ngrams.next(it.places, s.last);
    return s.last >= 0 && it.walk.push(s.last) && !s.is_end(s.last) && it.chosen < item.steps;
  }

  static int32_t target_of(const ChargptItem& item, int index) { return item.targets ? item.targets[index] : NONE; }

  // Report the log-probability of an id under the logits of the one before it, and those of the alternatives.
  void report(Progress& it, Workspace& w, const T* logits, int32_t id) {
    const ChargptItem& item = *it.item;
    if (!item.values) return;
    const int V = c.vocab_size, k = item.alternatives;
    const size_t at = it.reported++;
    double* z = w.z.data;
    bool is_finite = true;
    for (int i = 0; i < V; ++i) is_finite &= std::abs(logits[i]) <= std::numeric_limits<T>::max();
    if (!is_finite) return;
    std::copy_n(logits, V, z);
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
      int32_t* order = w.order.data();
      for (int i = 0; i < V; ++i) order[i] = i;
      std::partial_sort(order, order + k, order + V,
                        [z](int32_t a, int32_t b) { return z[a] > z[b] || (z[a] == z[b] && a < b); });
      std::copy_n(order, k, ids);
    }
    for (int i = 0; i < k; ++i) item.top_values[at * k + i] = z[ids[i]] - whole;
  }

  // One pass of a batch through the layers. Of a team, each thread has its own copy of the residual stream (own.x) and
  // computes its share of every product, and the attention of its share of the key heads.
  void forward(Workspace& own, Workspace& batch, Team& team) {
    const std::vector<Row>& rows = batch.rows;
    int count = int(rows.size());
    for (int r = 0; r < count; ++r) {
      std::copy_n(&embed[size_t(rows[r].id) * C], C, own.x.data + size_t(r) * C);
      const int64_t position = rows[r].position;
      if (position < ANGLES)
        std::copy_n(&angles[position * hs], hs, own.cos_sin.data + r * hs);
      else
        rotate_by(position, own.cos_sin.data + r * hs);
    }
    const int attended = c.n_head * hp, group = c.n_head / c.n_kv_head, per_head = hp / N, inner = F / N;
    const auto [first_kv, end_kv] = team.share(c.n_kv_head);
    const auto [first_out, end_out] = team.share(C / N);
    const auto [first_inner, end_inner] = team.share(inner);
    T *x = own.x.data, *h = own.h.data, *qkv = own.qkv.data, *gate = batch.gate_up.data, *out = batch.out.data;
    for (int l = 0; l < c.n_layer; ++l) {
      const Layer& layer = layers[l];
      for (int r = 0; r < count; ++r) norm(x + r * C, layer.attn_norm.data(), h + r * C, C, c.n_embd);
      if (team.is_alone()) {
        multiply(layer.qkv, {0, heads * per_head}, count, h, C, qkv, heads * hp);
      } else {
        const int firsts[] = {0, c.n_head, c.n_head + c.n_kv_head}, sizes[] = {group, 1, 1};
        for (int part = 0; part < 3; ++part) {
          const int first = firsts[part] + first_kv * sizes[part], end = firsts[part] + end_kv * sizes[part];
          multiply(layer.qkv, {first * per_head, end * per_head}, count, h, C, qkv, heads * hp);
        }
      }
      const bool is_last = l == c.n_layer - 1;
      int wanted = 0;  // of the last layer only what leads to logits matters
      for (int r = 0; r < count; ++r) {
        const bool is_wanted = !is_last || rows[r].wants_logits;
        attend(own, rows, l, r, first_kv, end_kv,
               is_wanted ? batch.y.data + size_t(wanted) * attended : nullptr);
        if (!is_wanted) continue;
        if (wanted != r) std::copy_n(x + size_t(r) * C, C, x + size_t(wanted) * C);
        ++wanted;
      }
      count = wanted;
      team.wait();
      multiply(layer.proj, {first_out, end_out}, count, batch.y.data, attended, out, C);
      team.wait();
      for (int r = 0; r < count; ++r) {
        add(x + r * C, out + r * C, C);
        norm(x + r * C, layer.mlp_norm.data(), h + r * C, C, c.n_embd);
      }
      if (team.is_alone()) {
        multiply(layer.gate_up, {0, 2 * inner}, count, h, C, gate, 2 * F);
      } else {
        multiply(layer.gate_up, {first_inner, end_inner}, count, h, C, gate, 2 * F);
        multiply(layer.gate_up, {inner + first_inner, inner + end_inner}, count, h, C, gate, 2 * F);
      }
      for (int r = 0; r < count; ++r) swiglu(gate + size_t(r) * 2 * F, first_inner * N, end_inner * N);
      team.wait();
      multiply(layer.down, {first_out, end_out}, count, gate, 2 * F, out, C);
      team.wait();
      for (int r = 0; r < count; ++r) add(x + r * C, out + r * C, C);
    }
    for (int r = 0; r < count; ++r) norm(x + r * C, final_norm.data(), h + r * C, C, c.n_embd);
    multiply(head, team.share(V / N), count, h, C, batch.logits.data, V);
    team.wait();
  }

  static void add(T* x, const T* y, int n) {
    for (int i = 0; i < n; i += N) store(x + i, load(x + i) + load(y + i));
  }

  // RMSNorm over n numbers, padded with zeros to `length`.
  void norm(const T* x, const T* gain, T* y, int length, int n) const {
    Lanes<T> squares = all(T(0));
    for (int i = 0; i < length; i += N) squares = fma(load(x + i), load(x + i), squares);
    const Lanes<T> scale = all(T(1) / std::sqrt(sum(squares) / T(n) + T(c.norm_eps)));
    for (int i = 0; i < length; i += N) store(y + i, load(x + i) * scale * load(gain + i));
  }

  // gate · σ(gate) · up, over the gate. σ(x) = e^min(x, 0) / (1 + e^−|x|).
  void swiglu(T* gate, int first, int end) const {
    const T* up = gate + F;
    const Lanes<T> one = all(T(1)), zero = all(T(0));
    for (int i = first; i < end; i += N) {
      const Lanes<T> x = load(gate + i);
      Lanes<T> magnitude = larger(x, zero - x);
      const Lanes<T> e = exp_of_negative(zero - magnitude);
      Lanes<T> numerator;
      EACH_PART numerator.part[k] = x.part[k] < 0 ? e.part[k] : one.part[k];
      store(gate + i, x * (numerator / (one + e)) * load(up + i));
    }
  }

  // cos (hs/2), then sin (hs/2), of a position's angles.
  void rotate_by(int64_t position, T* to) const {
    for (int d = 0; d < hs / 2; ++d) {
      const double angle = double(position) * frequencies[d];
      to[d] = T(std::cos(angle)), to[d + hs / 2] = T(std::sin(angle));
    }
  }

  void norm_and_rotate(T* x, const T* gain, const T* cos_sin) const {
    norm(x, gain, x, hp, hs);
    const int half = hs / 2;
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

  // Of a ring, after whole groups of keys.
  size_t values_at() const { return size_t(Wp + KEYS - 1) / KEYS * KEYS * hs; }

  K* ring(int slot, int layer, int head) const {
    return cache.data + slot * slot_size + (size_t(layer) * c.n_kv_head + head) * head_size;
  }

  // Rows of a sequence come in order, and each writes its key and value before it attends: as in a ring of W.
  // y: null if only the key and the value are needed.
  void attend(Workspace& w, const std::vector<Row>& rows, int layer, int r, int first, int end, T* y) {
    const Row& row = rows[r];
    T* q = w.qkv.data + size_t(r) * heads * hp;
    const T* cos_sin = w.cos_sin.data + r * hs;
    const int index = int(row.position % c.block_size);
    const int group = c.n_head / c.n_kv_head;
    const T scale = T(1) / std::sqrt(T(hs));
    // Keys and values come from far: while these are used, those of the next sequence are fetched, or of the first one
    // in the next layer.
    const bool is_end = size_t(r) + 1 == rows.size();
    const Row& next = rows[is_end ? 0 : r + 1];
    const int next_layer = is_end ? (layer + 1) % c.n_layer : layer;
    for (int h = first * group; y && h < end * group; ++h) {
      norm_and_rotate(q + h * hp, layers[layer].q_norm.data(), cos_sin);
      for (int d = 0; d < hp; ++d) q[h * hp + d] *= scale;
    }
    for (int h = first; h < end; ++h) {
      T* k = q + (c.n_head + h) * hp;
      const T* v = q + (c.n_head + c.n_kv_head + h) * hp;
      norm_and_rotate(k, layers[layer].k_norm.data(), cos_sin);
      K* keys = ring(row.slot, layer, h);
      K* values = keys + values_at();
      K* key = keys + size_t(index / KEYS) * KEYS * hs + index % KEYS;
      convert_all(k, w.key.data(), hp);
      for (int d = 0; d < hs; ++d) key[d * KEYS] = w.key[d];
      convert_all(v, values + size_t(index) * hp, hp);
      if (!y) continue;
      const int seen = int(std::min<int64_t>(row.position + 1, c.block_size));
      ptrdiff_t ahead = (const char*)ring(next.slot, next_layer, h) - (const char*)keys;
      for (int g = 0; g < group; g += HEADS) {
        const int many = std::min(HEADS, group - g);
        const T* queries = q + (h * group + g) * hp;
        T* to = y + (h * group + g) * hp;
        if (g) ahead = 0;
        if constexpr (HEADS == 1) attend_heads<1>(queries, keys, values, seen, w.p.data, to, ahead);
        else if (many == 1) attend_heads<1>(queries, keys, values, seen, w.p.data, to, ahead);
        else if (many == 2) attend_heads<2>(queries, keys, values, seen, w.p.data, to, ahead);
        else if (many == 3) attend_heads<3>(queries, keys, values, seen, w.p.data, to, ahead);
        else attend_heads<4>(queries, keys, values, seen, w.p.data, to, ahead);
      }
    }
  }

  static constexpr int HEADS = TILE >= 24 ? 4 : 1;  // query heads that share one reading of the keys
  static constexpr int BLOCKS = 4, KEYS = BLOCKS * N;  // blocks of keys, and keys, whose scores are computed together

  // Into the second cache, for reading soon.
  static INLINE void prefetch(const K* from, ptrdiff_t ahead) { __builtin_prefetch((const char*)from + ahead, 0, 2); }

  // Scores of the first B blocks of a group of keys for G heads.
  template <int G, int B> INLINE void score(const T* q, const K* keys, T* p, ptrdiff_t ahead) const {
    Lanes<T> total[G][B];
    for (int g = 0; g < G; ++g)
      for (int b = 0; b < B; ++b) total[g][b] = all(T(0));
    for (int d = 0; d < hs; ++d) {
      Lanes<T> key[B];
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) {
        const K* from = keys + size_t(d) * KEYS + b * N;
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
  template <int G, int M> INLINE void mix(const T* p, const K* values, int seen, const T* scale, T* y,
                                      ptrdiff_t ahead) const {
    constexpr int S = 4;
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

  template <int G>
  __attribute__((noinline)) void attend_heads(const T* q, const K* keys, const K* values, int seen, T* p, T* y,
                                              ptrdiff_t ahead) const {
    const int blocks = (seen + N - 1) / N;
    int b = 0;
    for (; b + BLOCKS <= blocks; b += BLOCKS) score<G, BLOCKS>(q, keys + size_t(b) * hs * N, p + b * N, ahead);
    const K* rest = keys + size_t(b) * hs * N;
    if (blocks - b == 3) score<G, 3>(q, rest, p + b * N, ahead);
    else if (blocks - b == 2) score<G, 2>(q, rest, p + b * N, ahead);
    else if (blocks - b == 1) score<G, 1>(q, rest, p + b * N, ahead);
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
    for (; d + M * N <= hp; d += M * N) mix<G, M>(p, values + d, seen, scale, y + d, ahead);
    for (; d < hp; d += N) mix<G, 1>(p, values + d, seen, scale, y + d, ahead);
  }

  RARE void pack(const float* const* given) {
    const int in = c.n_embd;
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
    for (Layer& layer : layers) {
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

  const ChargptConfig c;
  const int hs, hp, Wp, C, F, V, heads;  // head_dim; then padded: head_dim, block_size, n_embd, n_inner, vocab_size
  const std::vector<double> frequencies;
  const NGrams ngrams;
  Pool pool;
  Barrier everyone, pair;
  Buffer<W> storage;
  std::vector<T> embed, final_norm, angles;
  std::vector<Layer> layers;
  Matrix<T, W> head;
  size_t head_size = 0, slot_size = 0;  // of the cache, in numbers
  Buffer<K> cache;
  std::vector<Slot> states;
  std::vector<Workspace> spaces;
  // Of a call: its items by size, the rows of each thread, and which slots it names.
  std::vector<const ChargptItem*> order;
  std::vector<int64_t> num_rows;
  std::vector<bool> used;
};

// Whether fp16 holds keys and values of any text. Inputs of a layer and keys are RMS-normalized, so their lengths are at
// most √n_embd and √head_dim times the norm's weights; rotation keeps that of a pair. weights: as `Net::pack` takes them.
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

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

// All return null or a message.

// The layout of the structures above, which native.py must share.
API int32_t chargpt_layout(void) {
  return 9 << 24 | int(sizeof(ChargptConfig) << 16 | sizeof(ChargptItem) << 8 | sizeof(ChargptParams));
}

API const char* chargpt_open(const ChargptConfig* config, const float* const* weights, void** opened) try {
  Engine* engine = nullptr;
  if (config->dtype == 2) engine = new Net<float, float, float>(*config, weights);
  if (config->dtype == 0 && fits_half(*config, weights)) {
    if (config->is_half) engine = new Net<float, Half, Half>(*config, weights);
    else engine = new Net<float, float, Half>(*config, weights);
  }
  if (!engine && config->dtype == 0) engine = new Net<float, float, float>(*config, weights);
  if (!engine && config->dtype == 1) engine = new Net<double, float, double>(*config, weights);
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
