// Vectors of sixteen floats in portable vector types: the compiler lowers them to AVX-512, AVX2, NEON or scalar code.
//
// All kernels keep one rule: the operations on a token, and their order, never depend on the number of other tokens or
// on the token's place in a tile. This makes results bit-identical whatever the batch. A compiler may fuse a
// multiplication and an addition in one loop but not in another, so it is told not to (-ffp-contract=off); `fma` is
// used where fusing is wanted.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

constexpr int LANES = 16;

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));
typedef int8_t vb __attribute__((vector_size(16)));

struct bf16 {
    uint16_t bits;
};

struct f16 {
    uint16_t bits;
};

// Two integers from 0 to 15. Byte i of each eight holds number i of sixteen in its lower half and i + 8 in its upper.
struct nibbles {
    uint8_t bits;
};

// Values of the `dtype` and `kv_dtype` arguments; the same numbers as in ops/cpp/native.py. INT8, F16 and INT4 are for a
// KV cache only, F16 for that of a float32 model.
enum { F32 = 0, BF16 = 1, INT8 = 2, F16 = 3, INT4 = 4 };

inline vf splat(float x) { return vf{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

// a * b + c. Rounded once with AVX-512 or FMA; elsewhere twice, because the compiler would move a fused operation
// through memory.
inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    __m256 x[2], y[2], z[2];
    memcpy(x, &a, sizeof a);
    memcpy(y, &b, sizeof b);
    memcpy(z, &c, sizeof c);
    for (int i = 0; i < 2; i++) z[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
    memcpy(&c, z, sizeof c);
    return c;
#else
    return a * b + c;
#endif
}

inline vf fma(vf a, float b, vf c) { return fma(a, splat(b), c); }

inline vf load(const float* p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

// bfloat16 to float.
inline vf widen(vh v) {
#if defined(__AVX512F__)
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)v), 16);
#else
    return (vf)(__builtin_convertvector(v, vu) << 16);
#endif
}

inline vf load(const bf16* p) {
    vh v;
    memcpy(&v, p, sizeof v);
    return widen(v);
}

inline vf load(const int8_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#else
    vb v;
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, vf);
#endif
}

inline vf load(const nibbles* p) {
#if defined(__AVX512F__)
    __m128i both = _mm_loadl_epi64((const __m128i*)p);
    both = _mm_unpacklo_epi64(both, _mm_srli_epi16(both, 4));
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_and_si128(both, _mm_set1_epi8(15))));
#else
    typedef uint8_t bytes __attribute__((vector_size(16)));
    const bytes shifts = {0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4};
    bytes both;
    memcpy(&both, p, 8);
    memcpy((char*)&both + 8, p, 8);
    return __builtin_convertvector((both >> shifts) & 15, vf);
#endif
}

inline float to_float(f16 half) {
    uint32_t sign = (half.bits & 0x8000u) << 16, exponent = half.bits >> 10 & 31, fraction = half.bits & 1023;
    if (exponent == 0) {
        float value = fraction * 0x1p-24f;
        return sign ? -value : value;
    }
    uint32_t bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline vf load(const f16* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    __m256 halves[2] = {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
                        _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))};
    vf v;
    memcpy(&v, halves, sizeof v);
    return v;
#elif defined(__aarch64__)
    float32x4_t parts[4];
    for (int i = 0; i < 4; i++) parts[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits + 4 * i)));
    vf v;
    memcpy(&v, parts, sizeof v);
    return v;
#else
    float values[LANES];
    for (int i = 0; i < LANES; i++) values[i] = to_float(p[i]);
    return load(values);
#endif
}

inline void store(float* p, vf v) { memcpy(p, &v, sizeof v); }

// Rounds to nearest even; NaN stays NaN.
inline vh to_bf16(vf v) {
#if defined(__AVX512BF16__)
    return (vh)_mm512_cvtneps_pbh((__m512)v);
#endif
    vu bits = (vu)v;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vu quiet = (bits >> 16) | 0x40;
    return __builtin_convertvector((vu)(v != v) ? quiet : rounded, vh);
}

inline void store(bf16* p, vf v) {
    vh h = to_bf16(v);
    memcpy(p, &h, sizeof h);
}

// Rounds to nearest even; NaN stays NaN.
inline f16 to_f16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu, half;
    if (size > 0x7f800000u) {
        half = 0x7e00;
    } else if (size < 0x38800000u) {  // below 2^-14: the sum with 0.5 is rounded to units of 2^-24
        float sum;
        memcpy(&sum, &size, sizeof sum);
        sum += 0.5f;
        memcpy(&half, &sum, sizeof half);
        half -= 0x3f000000u;
    } else {
        half = ((size + 0xfff + (size >> 13 & 1)) >> 13) - (112 << 10);
    }
    return {uint16_t(sign | half)};
}

// Numbers beyond the range of float16 become its largest.
inline void store(f16* p, vf v) {
    constexpr float LARGEST = 65504;
    v = v > LARGEST ? splat(LARGEST) : v;
    v = v < -LARGEST ? splat(-LARGEST) : v;
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
    __m256 halves[2];
    memcpy(halves, &v, sizeof v);
    for (int i = 0; i < 2; i++) _mm_storeu_si128((__m128i*)p + i, _mm256_cvtps_ph(halves[i], _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
    float32x4_t parts[4];
    memcpy(parts, &v, sizeof v);
    for (int i = 0; i < 4; i++) vst1_u16(&p->bits + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(parts[i])));
#else
    for (int i = 0; i < LANES; i++) p[i] = to_f16(v[i]);
#endif
}

// Only the first n lanes: the others are loaded as zero and not stored.
template <typename T>
inline vf load_some(const T* p, int n) {
    T padded[LANES] = {};
    memcpy(padded, p, n * sizeof(T));
    return load(padded);
}

template <typename T>
inline void store_some(T* p, vf v, int n) {
    T padded[LANES];
    store(padded, v);
    memcpy(p, padded, n * sizeof(T));
}

template <typename T>
inline vf load_upto(const T* p, int n) {
    return n >= LANES ? load(p) : load_some(p, n);
}

template <typename T>
inline void store_upto(T* p, vf v, int n) {
    if (n >= LANES)
        store(p, v);
    else
        store_some(p, v, n);
}

// Swaps lanes i and i ^ WIDTH.
template <int WIDTH>
inline vf other_lanes(vf v) {
    const vi index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return __builtin_shuffle(v, index ^ WIDTH);
}

inline float sum_lanes(vf v) {
    v += other_lanes<8>(v);
    v += other_lanes<4>(v);
    v += other_lanes<2>(v);
    v += other_lanes<1>(v);
    return v[0];
}

inline vf max(vf a, vf b) { return a > b ? a : b; }
inline vf min(vf a, vf b) { return a < b ? a : b; }

inline float max_lanes(vf v) {
    v = max(v, other_lanes<8>(v));
    v = max(v, other_lanes<4>(v));
    v = max(v, other_lanes<2>(v));
    v = max(v, other_lanes<1>(v));
    return v[0];
}

// e^x to about one unit in the last place; exactly 0 below -87, so that masked scores have weight 0. Computed in two
// halves, between which other work can be scheduled: x = n ln 2 + r with an integer n, then 2^n e^r.
inline void split_exp(vf x, vf& n, vf& r) {
    x = min(max(x, splat(-87.0f)), splat(88.0f));
    n = fma(x, 1.44269504f, splat(12582912.0f)) - 12582912.0f;
    r = fma(n, 2.12194440e-4f, fma(n, -0.693359375f, x));
}

// e^r for the r of `split_exp`.
inline vf exp_of_remainder(vf r) {
    vf y = splat(1.9875691500e-4f);
    y = fma(y, r, splat(1.3981999507e-3f));
    y = fma(y, r, splat(8.3334519073e-3f));
    y = fma(y, r, splat(4.1665795894e-2f));
    y = fma(y, r, splat(1.6666665459e-1f));
    y = fma(y, r, splat(5.0000001201e-1f));
    return fma(y, r * r, r) + 1.0f;
}

// y * 2^n for an integer n from -126 to 127.
inline vf times_power_of_two(vf y, vf n) {
#if defined(__AVX512F__)
    return (vf)_mm512_scalef_ps((__m512)y, (__m512)n);
#else
    vi power = (__builtin_convertvector(n, vi) + 127) << 23;
    return y * (vf)power;
#endif
}

inline vf join_exp(vf x, vf n, vf r) { return x < -87.0f ? vf{} : times_power_of_two(exp_of_remainder(r), n); }

inline vf exp(vf x) {
    vf n, r;
    split_exp(x, n, r);
    return join_exp(x, n, r);
}

inline vf tanh(vf x) {
    vf bounded = min(max(x, splat(-20.0f)), splat(20.0f));
    return 1.0f - 2.0f / (exp(2.0f * bounded) + 1.0f);
}

// Walsh-Hadamard transforms of as many numbers as the largest power of two that divides `dim`, a multiple of LANES. The
// same sums in the same order as `rotate` in ops/kv/four_bits.py.
inline void rotate_numbers(float* x, int64_t dim) {
    const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t d = 0; d < dim; d += LANES) {
        vf v = load(x + d);
        v = other_lanes<1>(v) + ((lanes & 1) != 0 ? -v : v);
        v = other_lanes<2>(v) + ((lanes & 2) != 0 ? -v : v);
        v = other_lanes<4>(v) + ((lanes & 4) != 0 ? -v : v);
        v = other_lanes<8>(v) + ((lanes & 8) != 0 ? -v : v);
        store(x + d, v);
    }
    for (int64_t half = LANES, size = dim & -dim; half < size; half *= 2)
        for (int64_t d = 0; d < dim; d += d % (2 * half) == half - LANES ? half + LANES : LANES) {
            vf first = load(x + d), second = load(x + d + half);
            store(x + d, first + second);
            store(x + d + half, first - second);
        }
}
