// Unpacks a tile's integers as bfloat16 without their scales: exact and cheap. Integer q becomes 2^bits + q, by writing
// its bits into the mantissa under that exponent; the offsets subtract the constant again. Eight bits do not fit into
// the mantissa: they become two tiles, the second with the lower four bits. Levels are looked up.
#pragma once

#include <utility>

#include "quantised/quantised_scales.h"

namespace quantised {

constexpr int exact_tiles(int format) { return format_of(format).bits == 8 ? 2 : 1; }

// The constant to subtract: what the integer that represents 0 becomes.
constexpr int exact_zero(int format) {
    constexpr int EIGHT_BITS = 256 + 16 * 8 + 16;
    if (format_of(format).levels) return 0;
    return format_of(format).bits == 8 ? EIGHT_BITS : (1 << format_of(format).bits) + format_of(format).zero;
}

#if defined(__AVX512BW__)

template <int SHIFT>
inline __m512i shift_words_right(__m512i words) {
    if constexpr (SHIFT > 0) return _mm512_srli_epi16(words, SHIFT);
    if constexpr (SHIFT < 0) return _mm512_slli_epi16(words, -SHIFT);
    return words;
}

// The levels as bfloat16, twice, so that the fifth bit of a place does not matter.
template <int F>
inline __attribute__((always_inline)) __m512i exact_levels() {
    __m128i bytes = _mm_loadu_si128((const __m128i*)quantised::levels_of(packing_of(format_of(F))));
    __m512i floats = (__m512i)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    return _mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(_mm512_srli_epi32(floats, 16)));
}

// The 32 inputs of output R in the order of the packed words.
template <int F, int R>
inline __m512i exact_row(const char* tile) {
    if constexpr (format_of(F).levels != 0) {
        __m512i places = shift_words_right<4 * (R % 4)>(_mm512_loadu_si512(tile + R / 4 * 64));
        return _mm512_permutexvar_epi16(places, exact_levels<F>());
    }
    constexpr int bits = format_of(F).bits, place = 7 - bits;
    const __m512i exponent = _mm512_set1_epi16((127 + bits) << 7), low_mask = _mm512_set1_epi16(15 << place);
    __m512i low = shift_words_right<4 * (R % 4) - place>(_mm512_loadu_si512(tile + R / 4 * 64));
    __m512i row = _mm512_ternarylogic_epi32(low, low_mask, exponent, 0xea);  // low & mask | exponent
    if constexpr (bits == 4) return row;
    constexpr int above = bits == 5 ? R : 2 * (R % 8), vector = bits == 5 ? 0 : R / 8;
    const __m512i high_mask = _mm512_set1_epi16(((1 << bits) - 16) << place);
    __m512i high = shift_words_right<above - place - 4>(_mm512_loadu_si512(tile + 256 + vector * 64));
    return _mm512_ternarylogic_epi32(high, high_mask, row, 0xea);
}

// Upper four bits u, which are signed, as 256 + 16 (8 + u); lower four bits l as 16 + l.
inline __attribute__((always_inline)) void exact_bytes(const char* tile, int r, bf16* out) {
    const __m512i mask = _mm512_set1_epi16(15 << 3), upper = _mm512_set1_epi16(0x4380 | 8 << 3);
    __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)(tile + r * 32)));
    __m512i high = _mm512_ternarylogic_epi32(_mm512_srli_epi16(words, 1), mask, upper, 0x6a);  // word & mask ^ upper
    __m512i low = _mm512_ternarylogic_epi32(_mm512_slli_epi16(words, 3), mask, _mm512_set1_epi16(0x4180), 0xea);
    _mm512_store_si512(out + r * TILE_K, high);
    _mm512_store_si512(out + TILE_ITEMS + r * TILE_K, low);
}

template <int F, int... R>
inline __attribute__((always_inline)) void exact_rows(const char* tile, bf16* out, std::integer_sequence<int, R...>) {
    if constexpr (format_of(F).bits == 8)
        (exact_bytes(tile, R, out), ...);
    else
        (_mm512_store_si512(out + R * TILE_K, exact_row<F, R>(tile)), ...);
}

// [exact_tiles][16 outputs][32 inputs]
template <int F>
inline __attribute__((always_inline)) void exact_tile(const Panel& panel, int64_t tile, bf16* out) {
    const char* integers = panel.integers + tile * integer_bytes(format_of(F));
    exact_rows<F>(integers, out, std::make_integer_sequence<int, ROWS>{});
}

// Scales, and offsets that include the constant of exact integers.
template <int F>
inline __attribute__((always_inline)) void exact_scales(const Panel& panel, int64_t tile, ScaleVectors& out) {
    constexpr Format f = format_of(F);
    read_scales<F>(panel, tile, out);
    for (int g = 0; g < f.groups; g++) {
        vf offset = f.offset ? out.offsets[g] : vf{};
        out.offsets[g] = fma(out.scales[g], -(float)exact_zero(F), offset);
    }
}

#endif

}  // namespace quantised
