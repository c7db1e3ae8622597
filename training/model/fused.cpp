// What stands between the products of a training step on a CPU, forward and backward, for fused.py: RMSNorm, SwiGLU,
// and causal attention, from the product that gives queries, keys and values to the one that takes what was attended.
//
// S is the type of the products' factors and results: float, double, or bfloat16, with which this computes in float;
// its own products take pairs of bfloat16 where the CPU has an instruction for that. T is the type computed in.
//
// A window is a text of its own, which attends to itself alone; windows lie one after another, of any lengths.
//
// One group of heads of one window, those that share a key head, is computed at a time. Its keys and values fit the
// first caches, and its attention weights are never written to memory: the backward computes them again from the
// log-sum-exp of each row (Dao et al. 2022). What lies above the diagonal is skipped. A group's results depend on that
// group alone, hence not on the number of threads.
//
//   starts    (windows + 1): the first row of each window, then the number of rows
//   heads     S (rows, nh + 2 nkv, hs): queries, then keys, then values, as the product gives them
//   gains     T (nh + nkv, hs): of the norms of queries, times 1 / √hs, and of keys
//   cos, sin  T (longest, hs): of RoPE by place in the window, sin with its sign: y rotated is y · cos + roll(y, hs / 2) · sin
//   attended  S (rows, nh, hs)
//   lse       T (rows, nh): logarithm of the sum of the exponentials of a query's scores
//   inner     S (rows, 2 width): gate, then up; hidden S (rows, width) is silu(gate) · up
//   x, scale  T (rows, width), (rows): the residual stream, and the reciprocal of a row's root mean square
//
// setup.py compiles it once per instruction set; fused.py calls the functions at the end.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <new>
#include <thread>
#include <type_traits>
#include <vector>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int REGISTER = 64;  // bytes
constexpr int ROWS = 8;       // of a tile: with two registers each, and their operands, they fit the registers
#elif defined(__AVX2__)
constexpr int REGISTER = 32;
constexpr int ROWS = 4;
#else
constexpr int REGISTER = 16;
constexpr int ROWS = 4;
#endif
constexpr int BLOCK = 16;  // queries at a time in the backward, a multiple of ROWS

template <class T> struct Register { typedef T type __attribute__((vector_size(REGISTER))); };
template <class T> using Reg = typename Register<T>::type;
template <class T> constexpr int LANES = REGISTER / sizeof(T);
#define INLINE inline __attribute__((always_inline))

struct BFloat16 {
  uint16_t bits;
};

// What is computed in, and what a product takes at once: K numbers that are summed, a number itself or a pair of them.
template <class S> struct Types { typedef S T, Unit, Factor; };
template <> struct Types<BFloat16> {
  typedef float T;
#if defined(__AVX512BF16__)
  typedef BFloat16 Unit;
  typedef uint32_t Factor;
#else
  typedef float Unit, Factor;
#endif
};

template <class T> INLINE Reg<T> load(const T* from) {
  Reg<T> v;
  std::memcpy(&v, from, REGISTER);
  return v;
}
template <class T> INLINE void store(T* to, Reg<T> v) { std::memcpy(to, &v, REGISTER); }

// The first n lanes, with zeros after them.
template <class T, class = std::enable_if_t<std::is_floating_point_v<T>>>
INLINE Reg<T> some(const T* from, int n) {
  Reg<T> v = {};
  std::memcpy(&v, from, n * sizeof(T));
  return v;
}
template <class T, class = std::enable_if_t<std::is_floating_point_v<T>>>
INLINE void put(T* to, Reg<T> v, int n) {
  std::memcpy(to, &v, n * sizeof(T));
}

// Of bfloat16, the upper halves of floats, rounded to nearest, ties to even.
typedef uint16_t Halves __attribute__((vector_size(REGISTER / 2)));
INLINE Reg<uint32_t> rounded(Reg<float> x) {
  Reg<uint32_t> bits = (Reg<uint32_t>)x;
  return bits + 0x7fff + ((bits >> 16) & 1);
}
INLINE Reg<float> some(const BFloat16* from, int n) {
  Halves v = {};
  std::memcpy(&v, from, n * sizeof(BFloat16));
  return (Reg<float>)(__builtin_convertvector(v, Reg<uint32_t>) << 16);
}
INLINE void put(BFloat16* to, Reg<float> v, int n) {
#if defined(__AVX512BF16__)
  Halves halves = (Halves)_mm512_cvtneps_pbh((__m512)v);
#else
  Halves halves = __builtin_convertvector(rounded(v) >> 16, Halves);
#endif
  std::memcpy(to, &halves, n * sizeof(BFloat16));
}

// Calls each(i, n) for all i < width, n lanes from i on at a time; n is known to the compiler.
template <class T, class F> INLINE void pieces(int width, F each) {
  int i = 0;
  for (; i + LANES<T> <= width; i += LANES<T>) each(i, std::integral_constant<int, LANES<T>>());
  for (; i < width; ++i) each(i, std::integral_constant<int, 1>());
}

template <class T> INLINE Reg<T> plus_product(Reg<T> sum, T x, Reg<T> y) { return sum + x * y; }
#if defined(__AVX512BF16__)
INLINE Reg<float> plus_product(Reg<float> sum, uint32_t x, Reg<uint32_t> y) {
  return (Reg<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int(x)), (__m512bh)y);
}
#endif

template <class T> INLINE T total(Reg<T> sums) {
  for (int n = LANES<T> / 2; n; n /= 2)
    for (int i = 0; i < n; ++i) sums[i] += sums[i + n];
  return sums[0];
}

int rounded_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// e^x of finite x, to some 1e-7 of it; of x beyond ±87, e^±87
INLINE Reg<float> exponential(Reg<float> x) {
  typedef int32_t Ints __attribute__((vector_size(REGISTER)));
  Reg<float> most = x * 0.0f + 87.0f;
  x = x > -most ? x : -most;
  x = x < most ? x : most;
  Reg<float> whole = x * 1.44269504f + 12582912.0f;  // rounded to an integer in the low bits
  Ints power = (Ints)whole << 23;                    // to be added to the exponent
  whole -= 12582912.0f;
  x = x - whole * 0.693359375f + whole * 2.12194440e-4f;  // ln 2 in two parts
  Reg<float> sum = x * (1.0f / 5040) + 1.0f / 720;
  for (float next : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) sum = sum * x + next;
  return (Reg<float>)((Ints)sum + power);
}
INLINE Reg<double> exponential(Reg<double> x) {
  for (int i = 0; i < LANES<double>; ++i) x[i] = std::exp(x[i]);
  return x;
}

// exp(x[i] - shift) for i < n, zeros from there to `end`, a multiple of LANES; `write` takes a register of them at i.
template <class T, class F> INLINE void exponentials(const T* x, int n, int end, T shift, F write) {
  int i = 0;
  for (; i + LANES<T> <= n; i += LANES<T>) write(i, exponential(load(x + i) - shift));
  for (; i < end; i += LANES<T>) {
    Reg<T> last = i < n ? exponential(load(x + i) - shift) : Reg<T>{};
    for (int lane = std::max(0, n - i); lane < LANES<T>; ++lane) last[lane] = 0;
    write(i, last);
  }
}

// Calls each(own, i) for i < n, once each, in up to `threads` threads, each with an object of its own that `make`
// returns. Threads without memory leave their part to the others; returns whether all of it was done.
template <class M, class F> bool in_threads(int n, int threads, M make, F each) {
  std::atomic<int> next{0}, done{0};
  auto work = [&] {
    try {
      auto own = make();
      for (int i; (i = next++) < n; ++done) each(own, i);
    } catch (const std::bad_alloc&) {
    }
  };
  std::vector<std::thread> others;
  try {
    for (int i = 1; i < std::min(threads, n); ++i) {
      others.reserve(i);
      others.emplace_back(work);
    }
  } catch (const std::exception&) {  // no more threads: those that there are do all
  }
  work();
  for (auto& other : others) other.join();
  return done == n;
}

template <class T> struct Shape {
  int windows, longest, heads, key_heads, size, threads;
  T eps;
  const int32_t* starts;
  Shape(const int32_t* sizes, double eps, const int32_t* starts)
      : windows(sizes[0]), longest(sizes[1]), heads(sizes[2]), key_heads(sizes[3]), size(sizes[4]), threads(sizes[5]),
        eps(T(eps)), starts(starts) {}
  int group() const { return heads / key_heads; }
  int all() const { return heads + 2 * key_heads; }
};

// One group of heads at a time; each thread has one of these. SIZE: of a head, known to the compiler; 0: any.
//
// Factors of products hold K numbers each that are summed: neighbours of a row, "across", or of a column, "down".
template <class S, int SIZE> class Group {
 public:
  using T = typename Types<S>::T;
  using Unit = typename Types<S>::Unit;
  using Factor = typename Types<S>::Factor;
  static constexpr int N = LANES<T>, TILE = 2 * N, K = sizeof(Factor) / sizeof(Unit);

  __attribute__((cold)) Group(const Shape<T>& shape, const S* heads, const T* gains, const T* cos, const T* sin)
      : s(shape), size(SIZE ? SIZE : s.size), heads(heads), gains(gains), cos(cos), sin(sin),
        width(rounded_up(size, N)),
        keys(rounded_up(s.longest, std::max(TILE, ROWS)) + N) {  // a power of two would share few lines of the cache
    for (auto* each : {&k, &v, &grad_k, &grad_v}) each->resize(size_t(keys) * width);
    for (auto* each : {&kt, &vt}) each->resize(size_t(keys) * width);
    for (auto* each : {&q, &grad, &out, &grad_q}) each->resize(size_t(BLOCK) * width);
    for (auto* each : {&row, &normed, &other}) each->resize(width);
    for (auto* each : {&weights, &grads}) each->resize(size_t(BLOCK) * keys);
    weights_low.resize(size_t(BLOCK) * keys);
    if (K == 1) return;
    for (auto* each : {&k_low, &v_low}) each->resize(size_t(keys) * width);
    for (auto* each : {&q_low, &grad_low}) each->resize(size_t(BLOCK) * width);
    grads_low.resize(size_t(BLOCK) * keys);
  }

  void forward(int window, int key_head, S* attended, T* lse) {
    enter(window);
    take_keys(key_head, false);
    for (int head = key_head * s.group(); head < (key_head + 1) * s.group(); ++head)
      for (int first = 0; first < length; first += ROWS) {
        int rows = std::min(ROWS, length - first), seen = columns(first + rows);
        take_queries(head, first, rows);
        products(across(q, q_low, ROWS, width, width), kt.data(), seen, weights.data());
        T sums[ROWS];
        for (int i = 0; i < rows; ++i) {
          const T* its = &weights[size_t(i) * keys];
          Unit* to = &weights_low[size_t(i) * keys];
          T most = largest(its, first + i + 1);
          Reg<T> sum = {};
          exponentials(its, first + i + 1, seen, most, [&](int j, Reg<T> each) {
            sum += each;
            put(to + j, each, N);
          });
          sums[i] = total<T>(sum);
          lse[at(first + i, head)] = most + std::log(sums[i]);
        }
        std::fill(out.begin(), out.end(), T(0));
        mix(weights_low.data(), keys / K, 1, value_rows, first + rows, out.data());
        for (int i = 0; i < rows; ++i) {
          S* to = attended + at(first + i, head) * size;
          const T* from = &out[size_t(i) * width];
          T factor = 1 / sums[i];
          pieces<T>(length_of_head(), [&](int d, auto n) { put(to + d, some(from + d, n) * factor, n); });
        }
      }
  }

  // grad_gains (nh + nkv, hs) of this window; the rows of these heads are written.
  void backward(int window, int key_head, const S* attended, const T* lse, const S* grad_attended, S* grad_heads,
                T* grad_gains) {
    enter(window);
    take_keys(key_head, true);
    for (auto* each : {&grad_k, &grad_v}) std::fill_n(each->begin(), size_t(rounded_up(length, ROWS)) * width, T(0));
    for (int head = key_head * s.group(); head < (key_head + 1) * s.group(); ++head) {
      std::fill_n(grad_gains + size_t(head) * size, size, T(0));
      for (int first = 0; first < length; first += BLOCK) {
        int rows = std::min(BLOCK, length - first), seen = columns(first + rows), padded = rounded_up(rows, ROWS);
        take_queries(head, first, rows);
        T dots[BLOCK];
        for (int i = 0; i < rows; ++i) {
          copy(attended + at(first + i, head) * size, other.data());
          copy(grad_attended + at(first + i, head) * size, &grad[size_t(i) * width]);
          dots[i] = dot_of(&grad[size_t(i) * width], other.data(), length_of_head());
        }
        const Unit* its_q = across(q, q_low, padded, width, width);
        const Unit* its_grad = across(grad, grad_low, padded, width, width);
        for (int i = 0; i < padded; i += ROWS) {
          products(its_q + size_t(i) * width, kt.data(), seen, &weights[size_t(i) * keys]);
          products(its_grad + size_t(i) * width, vt.data(), seen, &grads[size_t(i) * keys]);
        }
        for (int i = 0; i < padded; ++i) {
          T *its = &weights[size_t(i) * keys], *its_grads = &grads[size_t(i) * keys];
          T dot = i < rows ? dots[i] : T(0);
          T shift = i < rows ? lse[at(first + i, head)] : T(0);
          exponentials(its, i < rows ? first + i + 1 : 0, seen, shift, [&](int j, Reg<T> each) {
            store(its + j, each);
            store(its_grads + j, each * (load(its_grads + j) - dot));
          });
        }
        std::fill(grad_q.begin(), grad_q.end(), T(0));
        const Unit* low = across(grads, grads_low, padded, seen, keys);
        for (int i = 0; i < padded; i += ROWS)
          mix(low + size_t(i) * keys, keys / K, 1, key_rows, first + rows, &grad_q[size_t(i) * width]);
        low = down(grads, grads_low, padded, seen, keys);
        const Unit* weights_down = down(weights, weights_low, padded, seen, keys);
        its_q = down(q, q_low, padded, width, width), its_grad = down(grad, grad_low, padded, width, width);
        for (int j = 0; j < rounded_up(first + rows, ROWS); j += ROWS) {
          mix(low + size_t(j) * K, 1, keys, its_q, rows, &grad_k[size_t(j) * width]);
          mix(weights_down + size_t(j) * K, 1, keys, its_grad, rows, &grad_v[size_t(j) * width]);
        }
        for (int i = 0; i < rows; ++i)
          turn_back(first + i, head, &grad_q[size_t(i) * width], grad_heads, grad_gains);
      }
    }
    std::fill_n(grad_gains + size_t(s.heads + key_head) * size, size, T(0));
    for (int t = 0; t < length; ++t) {
      turn_back(t, s.heads + key_head, &grad_k[size_t(t) * width], grad_heads, grad_gains);
      copy(&grad_v[size_t(t) * width], grad_heads + place(t, s.heads + s.key_heads + key_head));
    }
  }

 private:
  const Shape<T>& s;
  const int size;
  const S* heads;
  const T *gains, *cos, *sin;
  int width, keys;    // of a head, and of a row of scores, with their padding of zeros
  int start, length;  // of the window
  std::vector<T> k, v, grad_k, grad_v;             // (keys, width)
  std::vector<T> q, grad, out, grad_q;             // (BLOCK, width)
  std::vector<T> weights, grads;                   // (BLOCK, keys)
  std::vector<T> row, normed, other;               // (width)
  const Unit *key_rows, *value_rows;               // as factors, down
  std::vector<Unit> kt, vt;                        // keys and values as factors, across, transposed
  std::vector<Unit> weights_low;                   // the attention weights of the forward as factors
  std::vector<Unit> k_low, v_low, q_low, grad_low, grads_low;  // as pairs, across or down

  void enter(int window) { start = s.starts[window], length = s.starts[window + 1] - start; }
  size_t place(int t, int head) const { return (size_t(start + t) * s.all() + head) * size; }
  size_t at(int t, int head) const { return size_t(start + t) * s.heads + head; }
  int columns(int seen) const { return rounded_up(seen, TILE); }
  int length_of_head() const { return SIZE ? SIZE : size; }

  template <class From, class To> void copy(const From* from, To* to) const {
    pieces<T>(length_of_head(), [&](int d, auto n) { put(to + d, some(from + d, n), n); });
  }

  static T dot_of(const T* x, const T* y, int n) {
    Reg<T> sums = {};
    pieces<T>(n, [&](int d, auto count) { sums += some(x + d, count) * some(y + d, count); });
    return total<T>(sums);
  }

  // x divided by its root mean square; returns the reciprocal of that.
  T normalize(const T* x, T* __restrict to) const {
    const int n = length_of_head();
    T scale = 1 / std::sqrt(dot_of(x, x, n) / n + s.eps);
    pieces<T>(n, [&](int d, auto count) { put(to + d, some(x + d, count) * scale, count); });
    return scale;
  }

  // A query or key head: normalized, multiplied by its gain, rotated.
  void turn(int t, int head, T* __restrict to) {
    const int n = length_of_head(), half = n / 2;
    const T *gain = gains + size_t(head) * n, *c = cos + size_t(t) * n, *its_sin = sin + size_t(t) * n;
    T* __restrict y = normed.data();
    copy(heads + place(t, head), to);
    normalize(to, y);
    pieces<T>(n, [&](int d, auto count) { put(y + d, some(y + d, count) * some(gain + d, count), count); });
    pieces<T>(half, [&](int d, auto count) {
      Reg<T> first = some(y + d, count), second = some(y + d + half, count);
      put(to + d, first * some(c + d, count) + second * some(its_sin + d, count), count);
      put(to + d + half, second * some(c + d + half, count) + first * some(its_sin + d + half, count), count);
    });
  }

  // The gradients of the head and of its gain, given that of what `turn` wrote.
  void turn_back(int t, int head, const T* __restrict grad, S* grad_heads, T* grad_gains) {
    const int n = length_of_head(), half = n / 2;
    const T *gain = gains + size_t(head) * n, *c = cos + size_t(t) * n, *its_sin = sin + size_t(t) * n;
    T *__restrict y = normed.data(), *__restrict to = row.data();
    T* __restrict of_gain = grad_gains + size_t(head) * n;
    copy(heads + place(t, head), other.data());
    T scale = normalize(other.data(), y);
    pieces<T>(half, [&](int d, auto count) {
      Reg<T> first = some(grad + d, count), second = some(grad + d + half, count);
      put(to + d, first * some(c + d, count) + second * some(its_sin + d + half, count), count);
      put(to + d + half, second * some(c + d + half, count) + first * some(its_sin + d, count), count);
    });
    Reg<T> dots = {};
    pieces<T>(n, [&](int d, auto count) {
      Reg<T> each = some(to + d, count), its = some(y + d, count);
      put(of_gain + d, some(of_gain + d, count) + each * its, count);
      each *= some(gain + d, count);
      dots += each * its;
      put(to + d, each, count);
    });
    T mean = total<T>(dots) / n;
    S* its_grad = grad_heads + place(t, head);
    pieces<T>(n, [&](int d, auto count) {
      put(its_grad + d, (some(to + d, count) - some(y + d, count) * mean) * scale, count);
    });
  }

  // What the products of a group take of its keys and values; what only the backward needs, if it `is_backward`.
  void take_keys(int key_head, bool is_backward) {
    for (int t = 0; t < length; ++t) {
      turn(t, s.heads + key_head, &k[size_t(t) * width]);
      copy(heads + place(t, s.heads + s.key_heads + key_head), &v[size_t(t) * width]);
    }
    transpose(across(k, k_low, length, width, width), kt);
    if (is_backward) {
      transpose(across(v, v_low, length, width, width), vt);
      key_rows = down(k, k_low, rounded_up(length, K), width, width);
    } else {
      value_rows = down(v, v_low, rounded_up(length, K), width, width);
    }
  }

  void transpose(const Unit* from, std::vector<Unit>& to) const {
    for (int t = 0; t < length; ++t)
      for (int d = 0; d < length_of_head() / K; ++d)
        std::memcpy(&to[(size_t(d) * keys + t) * K], from + size_t(t) * width + d * K, sizeof(Factor));
  }

  void take_queries(int head, int first, int rows) {
    for (int i = 0; i < rows; ++i) turn(first + i, head, &q[size_t(i) * width]);
  }

  // The first n columns, a multiple of N, of `rows` rows of `columns` as factors, in `low` where these are pairs.
  const Unit* across(const std::vector<T>& from, std::vector<Unit>& low, int rows, int n, int columns) const {
    if constexpr (K == 1) {
      return from.data();
    } else {
      for (int i = 0; i < rows; ++i)
        for (int j = 0; j < n; j += N) put(&low[size_t(i) * columns + j], load(&from[size_t(i) * columns + j]), N);
      return low.data();
    }
  }
  const Unit* down(const std::vector<T>& from, std::vector<Unit>& low, int rows, int n, int columns) const {
    if constexpr (K == 1) {
      return from.data();
    } else {
      for (int i = 0; i < rows; i += K)
        for (int j = 0; j < n; j += N) {
          const T* upper = &from[size_t(i) * columns + j];
          Reg<Factor> pairs = rounded(load(upper)) >> 16 | (rounded(load(upper + columns)) & 0xffff0000);
          std::memcpy(&low[size_t(i) * columns + size_t(j) * K], &pairs, REGISTER);
        }
      return low.data();
    }
  }

  static T largest(const T* x, int n) {
    T found = x[0];
    if (n >= N) {
      Reg<T> most = load(x);
      for (int i = N; i + N <= n; i += N) {
        Reg<T> next = load(x + i);
        most = next > most ? next : most;
      }
      for (int i = 0; i < N; ++i) found = std::max(found, most[i]);
    }
    for (int i = n / N * N; i < n; ++i) found = std::max(found, x[i]);
    return found;
  }

  // The i-th factor from `x` on, and those from the i-th on that fill a register.
  static INLINE Factor factor(const Unit* x, size_t i) {
    Factor found;
    std::memcpy(&found, x + i * K, sizeof found);
    return found;
  }
  static INLINE Reg<Factor> factors(const Unit* x, size_t i) {
    Reg<Factor> found;
    std::memcpy(&found, x + i * K, sizeof found);
    return found;
  }

  // to[r][j] = Σ_d x[r][d] · y[d][j] for r < ROWS, j < n, a multiple of TILE; x is across, y transposed
  void products(const Unit* x, const Unit* y, int n, T* to) const {
    for (int j = 0; j < n; j += TILE) {
      Reg<T> sums[ROWS][2] = {};
      for (int d = 0; d < length_of_head() / K; ++d) {
        Reg<Factor> a = factors(y, size_t(d) * keys + j), b = factors(y, size_t(d) * keys + j + N);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
          sums[r][0] = plus_product(sums[r][0], factor(x, size_t(r) * width / K + d), a);
          sums[r][1] = plus_product(sums[r][1], factor(x, size_t(r) * width / K + d), b);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        store(to + size_t(r) * keys + j, sums[r][0]);
        store(to + size_t(r) * keys + j + N, sums[r][1]);
      }
    }
  }

  // to[r][:] += Σ_j w[r · beside + j · along] · y[j][:] for r < ROWS, j < n / K rounded up; y is down
  void mix(const Unit* w, int beside, int along, const Unit* y, int n, T* to) const {
    int c = 0;
    for (; c + 2 * N <= width; c += 2 * N) mix_columns<2>(w, beside, along, y + c * K, n, to + c);
    if (c < width) mix_columns<1>(w, beside, along, y + c * K, n, to + c);
  }

  template <int C>
  INLINE void mix_columns(const Unit* w, int beside, int along, const Unit* y, int n, T* to) const {
    Reg<T> sums[ROWS][C];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
      for (int c = 0; c < C; ++c) sums[r][c] = load(to + size_t(r) * width + c * N);
    for (int j = 0; j < (n + K - 1) / K; ++j) {
      Reg<Factor> its[C];
      for (int c = 0; c < C; ++c) its[c] = factors(y, size_t(j) * width + c * N);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < C; ++c)
          sums[r][c] = plus_product(sums[r][c], factor(w, size_t(r) * beside + size_t(j) * along), its[c]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
      for (int c = 0; c < C; ++c) store(to + size_t(r) * width + c * N, sums[r][c]);
  }
};

template <class S> using Computed = typename Types<S>::T;

// Calls each(group, window, key_head) for all of them.
template <class S, int SIZE, class T, class F>
bool for_groups_of(const Shape<T>& s, const S* heads, const T* gains, const T* cos, const T* sin, F each) {
  auto make = [&] { return Group<S, SIZE>(s, heads, gains, cos, sin); };
  return in_threads(s.windows * s.key_heads, s.threads, make,
                    [&](auto& group, int i) { each(group, i / s.key_heads, i % s.key_heads); });
}

template <class S, class T, class F>
bool for_each_group(const Shape<T>& s, const S* heads, const T* gains, const T* cos, const T* sin, F each) {
  if constexpr (!std::is_same_v<S, double>) {  // which only tests compute in
    if (s.size == 32) return for_groups_of<S, 32>(s, heads, gains, cos, sin, each);
    if (s.size == 64) return for_groups_of<S, 64>(s, heads, gains, cos, sin, each);
  }
  return for_groups_of<S, 0>(s, heads, gains, cos, sin, each);
}

template <class S, class T>
bool attention(const Shape<T>& s, const S* heads, const T* gains, const T* cos, const T* sin, S* attended, T* lse) {
  return for_each_group(s, heads, gains, cos, sin, [&](auto& group, int window, int key_head) {
    group.forward(window, key_head, attended, lse);
  });
}

template <class S, class T>
bool attention_backward(const Shape<T>& s, const S* heads, const T* gains, const T* cos, const T* sin,
                        const S* attended, const T* lse, const S* grad, S* grad_heads, T* grad_gains) {
  return for_each_group(s, heads, gains, cos, sin, [&](auto& group, int window, int key_head) {
    T* its = grad_gains + size_t(window) * (s.heads + s.key_heads) * s.size;
    group.backward(window, key_head, attended, lse, grad, grad_heads, its);
  });
}

// One register at a time, the last one of a row overlapping the one before it or, in a narrow row, number by number.
template <class T, class F> INLINE void along(int width, F each) {
  if (width < LANES<T>)
    for (int i = 0; i < width; ++i) each(i, std::integral_constant<int, 1>());
  else
    for (int i = 0; i < width; i += LANES<T>)
      each(std::min(i, width - LANES<T>), std::integral_constant<int, LANES<T>>());
}

constexpr int CHUNK = 64;            // rows that a thread takes at a time
constexpr int64_t ENOUGH = 1 << 18;  // numbers for a thread of their own, whose start takes as long as some thousands

template <class F> bool for_rows(int rows, int width, int threads, F each) {
  threads = int(std::min<int64_t>(threads, (int64_t(rows) * width + ENOUGH - 1) / ENOUGH));
  return in_threads((rows + CHUNK - 1) / CHUNK, threads, [] { return 0; }, [&](int, int chunk) {
    for (int row = chunk * CHUNK; row < std::min(rows, (chunk + 1) * CHUNK); ++row) each(row);
  });
}

template <class S> bool swiglu(int rows, int width, int threads, const S* inner, S* hidden) {
  using T = Computed<S>;
  return for_rows(rows, width, threads, [&](int row) {
    const S *gate = inner + size_t(row) * 2 * width, *up = gate + width;
    S* to = hidden + size_t(row) * width;
    along<T>(width, [&](int i, auto n) {
      Reg<T> g = some(gate + i, n);
      put(to + i, g / (T(1) + exponential(-g)) * some(up + i, n), n);
    });
  });
}

template <class S>
bool swiglu_backward(int rows, int width, int threads, const S* inner, const S* grad, S* grad_inner) {
  using T = Computed<S>;
  return for_rows(rows, width, threads, [&](int row) {
    const S *gate = inner + size_t(row) * 2 * width, *up = gate + width, *from = grad + size_t(row) * width;
    S *to_gate = grad_inner + size_t(row) * 2 * width, *to_up = to_gate + width;
    along<T>(width, [&](int i, auto n) {
      Reg<T> g = some(gate + i, n), y = some(from + i, n), sigmoid = T(1) / (T(1) + exponential(-g));
      put(to_gate + i, y * some(up + i, n) * sigmoid * (T(1) + g * (T(1) - sigmoid)), n);
      put(to_up + i, y * g * sigmoid, n);
    });
  });
}

// normed is x · scale
template <class S, class T>
bool rms_norm(int rows, int width, int threads, T eps, const T* x, T* scale, S* normed) {
  return for_rows(rows, width, threads, [&](int row) {
    const T* its = x + size_t(row) * width;
    Reg<T> squares = {};
    pieces<T>(width, [&](int i, auto n) { squares += some(its + i, n) * some(its + i, n); });
    T factor = scale[row] = 1 / std::sqrt(total<T>(squares) / width + eps);
    S* to = normed + size_t(row) * width;
    pieces<T>(width, [&](int i, auto n) { put(to + i, some(its + i, n) * factor, n); });
  });
}

// grad_x: of x, which is also added to what the block gives, whose gradient is `grad`
template <class S, class T>
bool rms_norm_backward(int rows, int width, int threads, const T* x, const T* scale, const S* grad_normed,
                       const T* grad, T* grad_x) {
  return for_rows(rows, width, threads, [&](int row) {
    const T *its = x + size_t(row) * width, *added = grad + size_t(row) * width;
    const S* given = grad_normed + size_t(row) * width;
    Reg<T> dots = {};
    pieces<T>(width, [&](int i, auto n) { dots += some(its + i, n) * some(given + i, n); });
    T factor = scale[row], back = total<T>(dots) * factor * factor * factor / width;
    T* to = grad_x + size_t(row) * width;
    pieces<T>(width, [&](int i, auto n) {
      put(to + i, some(given + i, n) * factor - some(its + i, n) * back + some(added + i, n), n);
    });
  });
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default"))) bool
#define FUNCTIONS(S, name)                                                                                            \
  EXPORTED attention_##name(const int32_t* sizes, double eps, const int32_t* starts, const S* heads,                  \
                            const Computed<S>* gains, const Computed<S>* cos, const Computed<S>* sin, S* attended,    \
                            Computed<S>* lse) {                                                                       \
    return attention<S, Computed<S>>({sizes, eps, starts}, heads, gains, cos, sin, attended, lse);                    \
  }                                                                                                                   \
  EXPORTED attention_backward_##name(const int32_t* sizes, double eps, const int32_t* starts, const S* heads,         \
                                     const Computed<S>* gains, const Computed<S>* cos, const Computed<S>* sin,        \
                                     const S* attended, const Computed<S>* lse, const S* grad, S* grad_heads,         \
                                     Computed<S>* grad_gains) {                                                       \
    return attention_backward<S, Computed<S>>({sizes, eps, starts}, heads, gains, cos, sin, attended, lse, grad,      \
                                              grad_heads, grad_gains);                                                \
  }                                                                                                                   \
  EXPORTED swiglu_##name(const int32_t* sizes, const S* inner, S* hidden) {                                           \
    return swiglu<S>(sizes[0], sizes[1], sizes[2], inner, hidden);                                                    \
  }                                                                                                                   \
  EXPORTED swiglu_backward_##name(const int32_t* sizes, const S* inner, const S* grad, S* grad_inner) {               \
    return swiglu_backward<S>(sizes[0], sizes[1], sizes[2], inner, grad, grad_inner);                                 \
  }                                                                                                                   \
  EXPORTED rms_norm_##name(const int32_t* sizes, double eps, const Computed<S>* x, Computed<S>* scale, S* normed) {   \
    return rms_norm<S, Computed<S>>(sizes[0], sizes[1], sizes[2], Computed<S>(eps), x, scale, normed);                \
  }                                                                                                                   \
  EXPORTED rms_norm_backward_##name(const int32_t* sizes, const Computed<S>* x, const Computed<S>* scale,             \
                                    const S* grad_normed, const Computed<S>* grad, Computed<S>* grad_x) {             \
    return rms_norm_backward<S, Computed<S>>(sizes[0], sizes[1], sizes[2], x, scale, grad_normed, grad, grad_x);      \
  }
extern "C" __attribute__((visibility("default"))) int fused_version() { return 3; }  // of fused.py
FUNCTIONS(float, float32)
FUNCTIONS(double, float64)
FUNCTIONS(BFloat16, bfloat16)
