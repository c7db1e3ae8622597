// What stands between the products of a training step on a CPU, forward and backward, for fused.py: causal attention,
// between the product that gives queries, keys and values and the one that takes what was attended, and SwiGLU.
//
// One group of heads of one window, those that share a key head, is computed at a time. Its keys and values fit the
// first caches, and its attention weights are never written to memory: the backward computes them again from the
// log-sum-exp of each row (Dao et al. 2022). What lies above the diagonal is skipped. A group's results depend on that
// group alone, hence not on the number of threads.
//
//   heads     (B, T, nh + 2 nkv, hs): queries, then keys, then values, as the product gives them
//   gains     (nh + nkv, hs): of the norms of queries, times 1 / √hs, and of keys
//   cos, sin  (T, hs): of RoPE, sin with its sign: y rotated is y · cos + roll(y, hs / 2) · sin
//   attended  (B, T, nh, hs)
//   lse       (B, nh, T): logarithm of the sum of the exponentials of a row's scores
//   inner     (rows, 2 width): gate, then up; hidden (rows, width) is silu(gate) · up
//
// setup.py compiles it once per instruction set; fused.py calls the functions at the end.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <limits>
#include <new>
#include <thread>
#include <type_traits>
#include <vector>

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

template <class T> INLINE Reg<T> load(const T* from) {
  Reg<T> v;
  std::memcpy(&v, from, REGISTER);
  return v;
}
template <class T> INLINE void store(T* to, Reg<T> v) { std::memcpy(to, &v, REGISTER); }

// The first n lanes, with zeros after them.
template <class T> INLINE Reg<T> some(const T* from, int n) {
  Reg<T> v = {};
  std::memcpy(&v, from, n * sizeof(T));
  return v;
}
template <class T> INLINE void put(T* to, Reg<T> v, int n) { std::memcpy(to, &v, n * sizeof(T)); }

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

// x[i] <- exp(x[i] - shift) for i < n, a multiple of LANES
template <class T> void exponentials(T* x, int n, T shift) {
  for (int i = 0; i < n; i += LANES<T>) store(x + i, exponential(load(x + i) - shift));
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
  int windows, length, heads, key_heads, size, threads;
  T eps;
  Shape(const int32_t* sizes, double eps)
      : windows(sizes[0]), length(sizes[1]), heads(sizes[2]), key_heads(sizes[3]), size(sizes[4]), threads(sizes[5]),
        eps(T(eps)) {}
  int group() const { return heads / key_heads; }
  int all() const { return heads + 2 * key_heads; }
};

// One group of heads at a time; each thread has one of these. SIZE: of a head, known to the compiler; 0: any.
template <class T, int SIZE> class Group {
 public:
  static constexpr int N = LANES<T>, TILE = 2 * N;

  Group(const Shape<T>& shape, const T* heads, const T* gains, const T* cos, const T* sin)
      : s(shape), size(SIZE ? SIZE : s.size), heads(heads), gains(gains), cos(cos), sin(sin), width(rounded_up(size, N)),
        keys(rounded_up(s.length, std::max(TILE, ROWS))) {
    for (auto* each : {&k, &v, &kt, &vt, &grad_k, &grad_v}) each->resize(size_t(keys) * width);
    for (auto* each : {&q, &out, &grad_q, &normed}) each->resize(size_t(BLOCK) * width);
    for (auto* each : {&weights, &grads}) each->resize(size_t(BLOCK) * keys);
  }

  void forward(int window, int key_head, T* attended, T* lse) {
    take_keys(window, key_head);
    for (int head = key_head * s.group(); head < (key_head + 1) * s.group(); ++head)
      for (int first = 0; first < s.length; first += ROWS) {
        int rows = std::min(ROWS, s.length - first), seen = columns(first + rows);
        take_queries(window, head, first, rows);
        products(q.data(), kt.data(), seen, weights.data());
        T sums[ROWS];
        for (int i = 0; i < rows; ++i) {
          T* row = &weights[size_t(i) * keys];
          std::fill(row + first + i + 1, row + seen, -std::numeric_limits<T>::infinity());
          T most = largest(row, seen);
          exponentials(row, seen, most);
          std::fill(row + first + i + 1, row + seen, T(0));
          sums[i] = sum_of(row, seen);
          lse[(size_t(window) * s.heads + head) * s.length + first + i] = most + std::log(sums[i]);
        }
        std::fill(out.begin(), out.end(), T(0));
        mix(weights.data(), keys, 1, v.data(), first + rows, out.data());
        for (int i = 0; i < rows; ++i) {
          T* to = attended + ((size_t(window) * s.length + first + i) * s.heads + head) * size;
          for (int d = 0; d < length_of_head(); ++d) to[d] = out[size_t(i) * width + d] / sums[i];
        }
      }
  }

  // grad_gains (nh + nkv, hs) of this window; the rows of these heads are written.
  void backward(int window, int key_head, const T* attended, const T* lse, const T* grad, T* grad_heads,
                T* grad_gains) {
    take_keys(window, key_head);
    std::fill(grad_k.begin(), grad_k.end(), T(0));
    std::fill(grad_v.begin(), grad_v.end(), T(0));
    for (int head = key_head * s.group(); head < (key_head + 1) * s.group(); ++head) {
      std::fill_n(grad_gains + size_t(head) * size, size, T(0));
      for (int first = 0; first < s.length; first += BLOCK) {
        int rows = std::min(BLOCK, s.length - first), seen = columns(first + rows);
        take_queries(window, head, first, rows);
        for (int i = 0; i < rows; ++i)
          std::copy_n(grad + ((size_t(window) * s.length + first + i) * s.heads + head) * size, size,
                      &out[size_t(i) * width]);
        for (int i = 0; i < rounded_up(rows, ROWS); i += ROWS) {
          products(&q[size_t(i) * width], kt.data(), seen, &weights[size_t(i) * keys]);
          products(&out[size_t(i) * width], vt.data(), seen, &grads[size_t(i) * keys]);
        }
        for (int i = 0; i < rounded_up(rows, ROWS); ++i) {
          T *row = &weights[size_t(i) * keys], *its = &grads[size_t(i) * keys], dot = 0;
          int visible = i < rows ? first + i + 1 : 0;
          if (visible) {
            size_t place = ((size_t(window) * s.length + first + i) * s.heads + head) * size;
            dot = dot_of(grad + place, attended + place, length_of_head());
            exponentials(row, columns(visible), lse[(size_t(window) * s.heads + head) * s.length + first + i]);
          }
          std::fill(row + visible, row + seen, T(0));
          for (int j = 0; j < seen; j += N) store(its + j, load(row + j) * (load(its + j) - dot));
        }
        std::fill(grad_q.begin(), grad_q.end(), T(0));
        for (int i = 0; i < rounded_up(rows, ROWS); i += ROWS)
          mix(&grads[size_t(i) * keys], keys, 1, k.data(), first + rows, &grad_q[size_t(i) * width]);
        for (int j = 0; j < rounded_up(first + rows, ROWS); j += ROWS) {
          mix(&grads[j], 1, keys, q.data(), rows, &grad_k[size_t(j) * width]);
          mix(&weights[j], 1, keys, out.data(), rows, &grad_v[size_t(j) * width]);
        }
        for (int i = 0; i < rows; ++i)
          turn_back(window, first + i, head, &grad_q[size_t(i) * width], grad_heads, grad_gains);
      }
    }
    std::fill_n(grad_gains + size_t(s.heads + key_head) * size, size, T(0));
    for (int t = 0; t < s.length; ++t) {
      turn_back(window, t, s.heads + key_head, &grad_k[size_t(t) * width], grad_heads, grad_gains);
      std::copy_n(&grad_v[size_t(t) * width], size, grad_heads + place(window, t, s.heads + s.key_heads + key_head));
    }
  }

 private:
  const Shape<T>& s;
  const int size;
  const T *heads, *gains, *cos, *sin;
  int width, keys;  // of a head, and of a row of scores, with their padding of zeros
  std::vector<T> k, v, kt, vt, grad_k, grad_v;  // (keys, width), kt and vt (width, keys)
  std::vector<T> q, out, grad_q, normed;        // (BLOCK, width)
  std::vector<T> weights, grads;                // (BLOCK, keys)

  size_t place(int window, int t, int head) const { return ((size_t(window) * s.length + t) * s.all() + head) * size; }
  int columns(int seen) const { return rounded_up(seen, TILE); }
  int length_of_head() const { return SIZE ? SIZE : size; }

  static T dot_of(const T* x, const T* y, int n) {
    T parts[16] = {}, sum = 0;
    int d = 0;
    for (; d + 16 <= n; d += 16)
      for (int i = 0; i < 16; ++i) parts[i] += x[d + i] * y[d + i];
    for (; d < n; ++d) sum += x[d] * y[d];
    for (T part : parts) sum += part;
    return sum;
  }

  // x divided by its root mean square; returns the reciprocal of that.
  T normalize(const T* x, T* __restrict to) const {
    const int n = length_of_head();
    T scale = 1 / std::sqrt(dot_of(x, x, n) / n + s.eps);
    for (int d = 0; d < n; ++d) to[d] = x[d] * scale;
    return scale;
  }

  // A query or key head: normalized, multiplied by its gain, rotated.
  void turn(int window, int t, int head, T* __restrict to) {
    const int n = length_of_head(), half = n / 2;
    const T *gain = gains + size_t(head) * n, *c = cos + size_t(t) * n, *its_sin = sin + size_t(t) * n;
    T* __restrict y = normed.data();
    normalize(heads + place(window, t, head), y);
    for (int d = 0; d < n; ++d) y[d] *= gain[d];
    for (int d = 0; d < half; ++d) {
      to[d] = y[d] * c[d] + y[d + half] * its_sin[d];
      to[d + half] = y[d + half] * c[d + half] + y[d] * its_sin[d + half];
    }
  }

  // The gradients of the head and of its gain, given that of what `turn` wrote.
  void turn_back(int window, int t, int head, const T* __restrict grad, T* grad_heads, T* grad_gains) {
    const int n = length_of_head(), half = n / 2;
    const T *gain = gains + size_t(head) * n, *c = cos + size_t(t) * n, *its_sin = sin + size_t(t) * n;
    T* __restrict y = normed.data();
    T* __restrict to = grad_heads + place(window, t, head);
    T* __restrict of_gain = grad_gains + size_t(head) * n;
    T scale = normalize(heads + place(window, t, head), y);
    for (int d = 0; d < half; ++d) {
      to[d] = grad[d] * c[d] + grad[d + half] * its_sin[d + half];
      to[d + half] = grad[d + half] * c[d + half] + grad[d] * its_sin[d];
    }
    for (int d = 0; d < n; ++d) of_gain[d] += to[d] * y[d];
    for (int d = 0; d < n; ++d) to[d] *= gain[d];
    T mean = dot_of(to, y, n) / n;
    for (int d = 0; d < n; ++d) to[d] = scale * (to[d] - y[d] * mean);
  }

  void take_keys(int window, int key_head) {
    for (int t = 0; t < s.length; ++t) {
      turn(window, t, s.heads + key_head, &k[size_t(t) * width]);
      std::copy_n(heads + place(window, t, s.heads + s.key_heads + key_head), size, &v[size_t(t) * width]);
      for (int d = 0; d < length_of_head(); ++d) {
        kt[size_t(d) * keys + t] = k[size_t(t) * width + d];
        vt[size_t(d) * keys + t] = v[size_t(t) * width + d];
      }
    }
  }

  void take_queries(int window, int head, int first, int rows) {
    for (int i = 0; i < rows; ++i) turn(window, first + i, head, &q[size_t(i) * width]);
  }

  static T largest(const T* x, int n) {
    Reg<T> most = load(x);
    for (int i = N; i < n; i += N) {
      Reg<T> next = load(x + i);
      most = next > most ? next : most;
    }
    T found = most[0];
    for (int i = 1; i < N; ++i) found = std::max(found, most[i]);
    return found;
  }

  static T sum_of(const T* x, int n) {
    Reg<T> sums = {};
    for (int i = 0; i < n; i += N) sums += load(x + i);
    T sum = 0;
    for (int i = 0; i < N; ++i) sum += sums[i];
    return sum;
  }

  // to[r][j] = Σ_d x[r][d] · y[d][j] for r < ROWS, j < n, a multiple of TILE; y has `keys` columns
  void products(const T* x, const T* y, int n, T* to) const {
    for (int j = 0; j < n; j += TILE) {
      Reg<T> sums[ROWS][2] = {};
      for (int d = 0; d < length_of_head(); ++d) {
        Reg<T> a = load(y + size_t(d) * keys + j), b = load(y + size_t(d) * keys + j + N);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
          sums[r][0] += x[size_t(r) * width + d] * a;
          sums[r][1] += x[size_t(r) * width + d] * b;
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        store(to + size_t(r) * keys + j, sums[r][0]);
        store(to + size_t(r) * keys + j + N, sums[r][1]);
      }
    }
  }

  // to[r][:] += Σ_j w[r · across + j · along] · y[j][:] for r < ROWS, j < n
  void mix(const T* w, int across, int along, const T* y, int n, T* to) const {
    int c = 0;
    for (; c + 2 * N <= width; c += 2 * N) mix_columns<2>(w, across, along, y + c, n, to + c);
    if (c < width) mix_columns<1>(w, across, along, y + c, n, to + c);
  }

  template <int C> INLINE void mix_columns(const T* w, int across, int along, const T* y, int n, T* to) const {
    Reg<T> sums[ROWS][C];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
      for (int c = 0; c < C; ++c) sums[r][c] = load(to + size_t(r) * width + c * N);
    for (int j = 0; j < n; ++j) {
      Reg<T> its[C];
      for (int c = 0; c < C; ++c) its[c] = load(y + size_t(j) * width + c * N);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < C; ++c) sums[r][c] += w[size_t(r) * across + size_t(j) * along] * its[c];
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
      for (int c = 0; c < C; ++c) store(to + size_t(r) * width + c * N, sums[r][c]);
  }
};

// Calls each(group, window, key_head) for all of them.
template <class T, int SIZE, class F>
bool for_groups_of(const Shape<T>& s, const T* heads, const T* gains, const T* cos, const T* sin, F each) {
  auto make = [&] { return Group<T, SIZE>(s, heads, gains, cos, sin); };
  return in_threads(s.windows * s.key_heads, s.threads, make,
                    [&](auto& group, int i) { each(group, i / s.key_heads, i % s.key_heads); });
}

template <class T, class F>
bool for_each_group(const Shape<T>& s, const T* heads, const T* gains, const T* cos, const T* sin, F each) {
  if (s.size == 32) return for_groups_of<T, 32>(s, heads, gains, cos, sin, each);
  if (s.size == 64) return for_groups_of<T, 64>(s, heads, gains, cos, sin, each);
  return for_groups_of<T, 0>(s, heads, gains, cos, sin, each);
}

template <class T>
bool attention(const Shape<T>& s, const T* heads, const T* gains, const T* cos, const T* sin, T* attended, T* lse) {
  return for_each_group(s, heads, gains, cos, sin, [&](auto& group, int window, int key_head) {
    group.forward(window, key_head, attended, lse);
  });
}

template <class T>
bool attention_backward(const Shape<T>& s, const T* heads, const T* gains, const T* cos, const T* sin,
                        const T* attended, const T* lse, const T* grad, T* grad_heads, T* grad_gains) {
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

constexpr int CHUNK = 64;  // rows that a thread takes at a time

template <class T> bool swiglu(int rows, int width, int threads, const T* inner, T* hidden) {
  return in_threads((rows + CHUNK - 1) / CHUNK, threads, [] { return 0; }, [&](int, int chunk) {
    for (int row = chunk * CHUNK; row < std::min(rows, (chunk + 1) * CHUNK); ++row) {
      const T *gate = inner + size_t(row) * 2 * width, *up = gate + width;
      T* to = hidden + size_t(row) * width;
      along<T>(width, [&](int i, auto n) {
        Reg<T> g = some(gate + i, n);
        put(to + i, g / (T(1) + exponential(-g)) * some(up + i, n), n);
      });
    }
  });
}

template <class T>
bool swiglu_backward(int rows, int width, int threads, const T* inner, const T* grad, T* grad_inner) {
  return in_threads((rows + CHUNK - 1) / CHUNK, threads, [] { return 0; }, [&](int, int chunk) {
    for (int row = chunk * CHUNK; row < std::min(rows, (chunk + 1) * CHUNK); ++row) {
      const T *gate = inner + size_t(row) * 2 * width, *up = gate + width, *from = grad + size_t(row) * width;
      T *to_gate = grad_inner + size_t(row) * 2 * width, *to_up = to_gate + width;
      along<T>(width, [&](int i, auto n) {
        Reg<T> g = some(gate + i, n), y = some(from + i, n), sigmoid = T(1) / (T(1) + exponential(-g));
        put(to_gate + i, y * some(up + i, n) * sigmoid * (T(1) + g * (T(1) - sigmoid)), n);
        put(to_up + i, y * g * sigmoid, n);
      });
    }
  });
}

}  // namespace

#define FUNCTIONS(T, name)                                                                                        \
  extern "C" __attribute__((visibility("default"))) bool attention_##name(                                        \
      const int32_t* sizes, double eps, const T* heads, const T* gains, const T* cos, const T* sin, T* attended,  \
      T* lse) {                                                                                                   \
    return attention<T>({sizes, eps}, heads, gains, cos, sin, attended, lse);                                     \
  }                                                                                                               \
  extern "C" __attribute__((visibility("default"))) bool attention_backward_##name(                               \
      const int32_t* sizes, double eps, const T* heads, const T* gains, const T* cos, const T* sin,               \
      const T* attended, const T* lse, const T* grad, T* grad_heads, T* grad_gains) {                             \
    return attention_backward<T>({sizes, eps}, heads, gains, cos, sin, attended, lse, grad, grad_heads, grad_gains); \
  }                                                                                                               \
  extern "C" __attribute__((visibility("default"))) bool swiglu_##name(const int32_t* sizes, const T* inner,      \
                                                                       T* hidden) {                               \
    return swiglu<T>(sizes[0], sizes[1], sizes[2], inner, hidden);                                                \
  }                                                                                                               \
  extern "C" __attribute__((visibility("default"))) bool swiglu_backward_##name(                                  \
      const int32_t* sizes, const T* inner, const T* grad, T* grad_inner) {                                       \
    return swiglu_backward<T>(sizes[0], sizes[1], sizes[2], inner, grad, grad_inner);                             \
  }
extern "C" __attribute__((visibility("default"))) int fused_version() { return 1; }  // of fused.py
FUNCTIONS(float, float32)
FUNCTIONS(double, float64)
