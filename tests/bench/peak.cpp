// Two limits of this machine's cores: fused multiply-adds per second, and bytes read per second.
//
// Built by roofline.py for the machine it runs on. One call runs in one thread; callers start several.

#include <cstddef>
#include <cstdint>

namespace {

#ifdef __AVX512F__
constexpr int BYTES = 64;
#else
constexpr int BYTES = 32;
#endif
constexpr int CHAINS = 10;  // independent sums: enough to hide the latency of an FMA, few enough for 16 registers

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// In float32. Operations (a multiplication and an addition count as two) of one repeat.
EXPORT int64_t operations() { return 2 * CHAINS * BYTES / 4; }
EXPORT double run(int64_t repeats) {
    typedef float Vector __attribute__((vector_size(BYTES)));
    Vector sums[CHAINS] = {}, a, b;
    for (size_t i = 0; i < BYTES / sizeof(float); i++) {
        a[i] = 1 - float(i) / 1024;
        b[i] = 1.0f / 1024;
    }
    asm volatile("" : "+v"(a), "+v"(b));
    for (int64_t n = 0; n < repeats; n++)
#pragma GCC unroll 10
        for (int c = 0; c < CHAINS; c++) {
            sums[c] = sums[c] * a + b;
            asm volatile("" : "+v"(sums[c]));  // keeps each chain in a register
        }
#pragma GCC unroll 10
    for (int c = 1; c < CHAINS; c++) sums[0] += sums[c];
    return sums[0][0];
}

// Reads `bytes` (a multiple of 512) `repeats` times.
EXPORT uint64_t read_bytes(const char* data, int64_t bytes, int64_t repeats) {
    typedef uint64_t Words __attribute__((vector_size(BYTES)));
    Words sums[4] = {};
    for (int64_t n = 0; n < repeats; n++) {
        for (int64_t at = 0; at < bytes; at += 4 * BYTES)
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) sums[c] ^= *(const Words*)(data + at + c * BYTES);
        asm volatile("" : "+v"(sums[0])::"memory");
    }
    uint64_t total = 0;
    for (int c = 0; c < 4; c++)
        for (size_t i = 0; i < BYTES / 8; i++) total ^= sums[c][i];
    return total;
}
