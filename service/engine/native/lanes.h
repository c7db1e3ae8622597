// Lanes: 64 bytes of numbers in one, two or four registers, with arithmetic whose bits do not depend on the number of
// registers.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#else
#error "this needs AVX2, FMA and F16C, or NEON"
#endif

namespace {

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

// ln x for a normal x > 0, within 1 unit of the last place. x = 2^n · m, √½ ≤ m < √2; the series of ln m in
// s = (m − 1) / (m + 1) is that of FreeBSD's e_log.c (Sun Microsystems 1993).
INLINE Lanes<double> log_of(Lanes<double> lanes) {
  using Int = Reg<int64_t>;
  using E = Exp<double>;
  constexpr double series[] = {6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01,
                               2.222219843214978396e-01, 1.818357216161805012e-01, 1.531383769920937332e-01,
                               1.479819860511658591e-01};
  constexpr int64_t root_half = 0x3FE6A09E667F3BCD;
  int64_t base;
  const double value = E::shift;
  std::memcpy(&base, &value, sizeof base);
  EACH_PART {
    const Int bits = (Int)lanes.part[k];
    const Int exponent = (bits - root_half) >> E::mantissa;
    const Reg<double> f = (Reg<double>)(bits - (exponent << E::mantissa)) - 1.0;
    const Reg<double> n = (Reg<double>)(exponent + base) - E::shift;
    const Reg<double> s = f / (f + 2.0), z = s * s, half = 0.5 * f * f;
    Reg<double> y = series[6] - Reg<double>{};
#pragma GCC unroll 6
    for (int i = 5; i >= 0; --i) y = fma(y, z, series[i] - Reg<double>{});
    y = fma(s, fma(y, z, half), n * E::ln2_low);
    lanes.part[k] = n * E::ln2_high - ((half - y) - f);
  }
  return lanes;
}

template <class T> INLINE int padded(int n) { return (n + LANES<T> - 1) / LANES<T> * LANES<T>; }

}  // namespace
