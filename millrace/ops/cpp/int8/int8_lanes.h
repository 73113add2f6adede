// Registers of AVX-512 or AVX2, with VNNI instructions if there are any: four inputs of 16 or eight outputs.
#pragma once

#include "vec.h"

namespace int8 {

#if defined(__AVX512BW__)

#if defined(__AVX512VNNI__)
constexpr const char* KERNEL = "AVX-512 VNNI";
constexpr bool HAS_DOT = true;  // an instruction that multiplies any eight bits
#else
constexpr const char* KERNEL = "AVX-512";
constexpr bool HAS_DOT = false;
#endif

// One register: 16 outputs, four inputs each.
struct Lanes {
    using Bytes = __m512i;
    using Floats = __m512;
    static constexpr int COUNT = 16;

    static Bytes load(const char* p) { return _mm512_loadu_si512(p); }
    static void store(char* p, Bytes bytes) { _mm512_storeu_si512(p, bytes); }
    static Bytes spread(const int8_t* four) {
        int32_t value;
        memcpy(&value, four, sizeof value);
        return _mm512_set1_epi32(value);
    }
    static Bytes set(char byte) { return _mm512_set1_epi8(byte); }
    static Bytes repeat(const int8_t* sixteen) {
        return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)sixteen));
    }
    // Bytes of a repeated table at these places from 0 to 15.
    static Bytes look_up(Bytes table, Bytes places) { return _mm512_shuffle_epi8(table, places); }
    static Bytes zero() { return _mm512_setzero_si512(); }
    template <int SHIFT>
    static Bytes shift_right(Bytes words) {
        if constexpr (SHIFT > 0) return _mm512_srli_epi16(words, SHIFT);
        if constexpr (SHIFT < 0) return _mm512_slli_epi16(words, -SHIFT);
        return words;
    }
    static Bytes both(Bytes a, Bytes b) { return _mm512_and_si512(a, b); }
    static Bytes flip(Bytes a, Bytes b) { return _mm512_xor_si512(a, b); }
    static Bytes sum(Bytes a, Bytes b) { return _mm512_add_epi32(a, b); }
    // a | b & mask
    static Bytes add_bits(Bytes a, Bytes b, Bytes mask) { return _mm512_ternarylogic_epi32(b, mask, a, 0xea); }
    template <int BITS>
    static Bytes dot(Bytes sum, Bytes weights, Bytes x) {
#if defined(__AVX512VNNI__)
        return _mm512_dpbusd_epi32(sum, weights, x);
#else
        const __m512i ones = _mm512_set1_epi16(1);
        if constexpr (BITS < 8)
            return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(weights, x), ones));
        // Sums of two products of eight bits do not fit into 16 bits: the upper and the lower four bits separately.
        const __m512i mask = set(15);
        __m512i low = _mm512_maddubs_epi16(both(weights, mask), x);
        __m512i high = _mm512_maddubs_epi16(both(shift_right<4>(weights), mask), x);
        sum = _mm512_add_epi32(sum, _mm512_madd_epi16(low, ones));
        return _mm512_add_epi32(sum, _mm512_madd_epi16(high, _mm512_set1_epi16(16)));
#endif
    }
    static Floats to_floats(Bytes sums) { return _mm512_cvtepi32_ps(sums); }
    static Floats load(const float* p) { return _mm512_loadu_ps(p); }
    static Floats spread(float x) { return _mm512_set1_ps(x); }
    static Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
};

#else

#if defined(__AVXVNNI__)
constexpr const char* KERNEL = "AVX-VNNI";
constexpr bool HAS_DOT = true;
#else
constexpr const char* KERNEL = "AVX2";
constexpr bool HAS_DOT = false;
#endif

// One register: eight outputs, four inputs each.
struct Lanes {
    using Bytes = __m256i;
    using Floats = __m256;
    static constexpr int COUNT = 8;

    static Bytes load(const char* p) { return _mm256_loadu_si256((const __m256i*)p); }
    static void store(char* p, Bytes bytes) { _mm256_storeu_si256((__m256i*)p, bytes); }
    static Bytes spread(const int8_t* four) {
        int32_t value;
        memcpy(&value, four, sizeof value);
        return _mm256_set1_epi32(value);
    }
    static Bytes set(char byte) { return _mm256_set1_epi8(byte); }
    static Bytes repeat(const int8_t* sixteen) {
        return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)sixteen));
    }
    static Bytes look_up(Bytes table, Bytes places) { return _mm256_shuffle_epi8(table, places); }
    static Bytes zero() { return _mm256_setzero_si256(); }
    template <int SHIFT>
    static Bytes shift_right(Bytes words) {
        if constexpr (SHIFT > 0) return _mm256_srli_epi16(words, SHIFT);
        if constexpr (SHIFT < 0) return _mm256_slli_epi16(words, -SHIFT);
        return words;
    }
    static Bytes both(Bytes a, Bytes b) { return _mm256_and_si256(a, b); }
    static Bytes flip(Bytes a, Bytes b) { return _mm256_xor_si256(a, b); }
    static Bytes sum(Bytes a, Bytes b) { return _mm256_add_epi32(a, b); }
    static Bytes add_bits(Bytes a, Bytes b, Bytes mask) { return _mm256_or_si256(a, both(b, mask)); }
    template <int BITS>
    static Bytes dot(Bytes sum, Bytes weights, Bytes x) {
#if defined(__AVXVNNI__)
        return _mm256_dpbusd_avx_epi32(sum, weights, x);
#else
        const __m256i ones = _mm256_set1_epi16(1);
        if constexpr (BITS < 8)
            return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(weights, x), ones));
        const __m256i mask = set(15);
        __m256i low = _mm256_maddubs_epi16(both(weights, mask), x);
        __m256i high = _mm256_maddubs_epi16(both(shift_right<4>(weights), mask), x);
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(low, ones));
        return _mm256_add_epi32(sum, _mm256_madd_epi16(high, _mm256_set1_epi16(16)));
#endif
    }
    static Floats to_floats(Bytes sums) { return _mm256_cvtepi32_ps(sums); }
    static Floats load(const float* p) { return _mm256_loadu_ps(p); }
    static Floats spread(float x) { return _mm256_set1_ps(x); }
    static Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static void store(float* p, Floats v) { _mm256_storeu_ps(p, v); }
};

#endif

}  // namespace int8
