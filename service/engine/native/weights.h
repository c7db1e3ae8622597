// Stored numbers, memory for them, and products of rows with packed matrices.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "lanes.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

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

}  // namespace
