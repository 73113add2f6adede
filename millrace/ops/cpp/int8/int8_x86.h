// The products in AVX-512 or AVX2, with VNNI instructions if there are any.
//
// An instruction multiplies unsigned with signed bytes, so signed weights are taken as q + 128. The constant that
// represents 0 is subtracted with the sums of x.
#pragma once

#include "int8/int8_rows.h"
#include "quantised/quantised_scales.h"

namespace int8 {

using quantised::Panel;

#if defined(__AVX512BW__)

#if defined(__AVX512VNNI__)
constexpr const char* KERNEL = "AVX-512 VNNI";
#else
constexpr const char* KERNEL = "AVX-512";
#endif

// One register: 16 outputs, four inputs each.
struct Lanes {
    using Bytes = __m512i;
    using Floats = __m512;
    static constexpr int COUNT = 16;

    static Bytes load(const char* p) { return _mm512_loadu_si512(p); }
    static Bytes spread(const int8_t* four) {
        int32_t value;
        memcpy(&value, four, sizeof value);
        return _mm512_set1_epi32(value);
    }
    static Bytes set(char byte) { return _mm512_set1_epi8(byte); }
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
    static Bytes dot(Bytes sum, Bytes weights, const int8_t* four) {
#if defined(__AVX512VNNI__)
        // One instruction; compilers load the four bytes with another one.
        asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*(const char(*)[4])four));
        return sum;
#else
        const __m512i x = spread(four);
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
    // Lanes `half` of the sixteen outputs.
    static Floats of(const vf& v, int) { return (__m512)v; }
};

#else

#if defined(__AVXVNNI__)
constexpr const char* KERNEL = "AVX-VNNI";
#else
constexpr const char* KERNEL = "AVX2";
#endif

// One register: eight outputs, four inputs each.
struct Lanes {
    using Bytes = __m256i;
    using Floats = __m256;
    static constexpr int COUNT = 8;

    static Bytes load(const char* p) { return _mm256_loadu_si256((const __m256i*)p); }
    static Bytes spread(const int8_t* four) {
        int32_t value;
        memcpy(&value, four, sizeof value);
        return _mm256_set1_epi32(value);
    }
    static Bytes set(char byte) { return _mm256_set1_epi8(byte); }
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
    static Bytes dot(Bytes sum, Bytes weights, const int8_t* four) {
        const __m256i x = spread(four);
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
    static Floats of(const vf& v, int half) {
        __m256 halves[2];
        memcpy(halves, &v, sizeof v);
        return halves[half];
    }
};

#endif

// What the integers of a tile mean, besides their scale: the constant that represents 0.
template <int F>
constexpr float zero_of() {
    return quantised::format_of(F).bits == 8 ? 128 : quantised::format_of(F).zero;
}

// Chunk C of a tile, whose bytes for these lanes start at `tile`.
template <int BITS, int C>
inline __attribute__((always_inline)) Lanes::Bytes chunk(const char* tile) {
    if constexpr (BITS == 8) return Lanes::flip(Lanes::load(tile + 64 * C), Lanes::set((char)0x80));
    const Lanes::Bytes mask = Lanes::set(15);
    Lanes::Bytes low = Lanes::both(Lanes::shift_right<C / 4 * 4>(Lanes::load(tile + C % 4 * 64)), mask);
    if constexpr (BITS == 5)
        return Lanes::add_bits(low, Lanes::shift_right<C - 4>(Lanes::load(tile + 256)), Lanes::set(1 << 4));
    if constexpr (BITS == 6)
        return Lanes::add_bits(low, Lanes::shift_right<C % 4 * 2 - 4>(Lanes::load(tile + 256 + C / 4 * 64)),
                               Lanes::set(3 << 4));
    return low;
}

// Requests the part of the next panel that lies where this tile does in its own, so that memory is read evenly.
inline void fetch_next(const char* place, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) _mm_prefetch(place + at, _MM_HINT_T0);
}

// Lanes of outputs from `HALF * Lanes::COUNT` on.
template <int F, int ROWS, int HALF>
inline __attribute__((always_inline)) void multiply_lanes(const Panel& panel, const RowBlock& x, int64_t tiles,
                                                          float* out) {
    constexpr quantised::Format f = quantised::format_of(F);
    constexpr int64_t OUTPUTS = quantised::ROWS;
    const quantised::PanelLayout layout(f, tiles * TILE_K);
    const int64_t share = layout.end / tiles;
    Lanes::Floats sums[ROWS];
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; row++) sums[row] = Lanes::spread(0.0f);
    for (int64_t tile = 0; tile < tiles; tile++) {
        const char* integers = panel.integers + tile * quantised::integer_bytes(f) + HALF * 4 * Lanes::COUNT;
        if (ROWS < BLOCK_ROWS[0] && HALF == 0) fetch_next(panel.integers + layout.end + tile * share, share);
        Lanes::Bytes weights[8] = {chunk<f.bits, 0>(integers), chunk<f.bits, 1>(integers), chunk<f.bits, 2>(integers),
                                   chunk<f.bits, 3>(integers), chunk<f.bits, 4>(integers), chunk<f.bits, 5>(integers),
                                   chunk<f.bits, 6>(integers), chunk<f.bits, 7>(integers)};
        quantised::ScaleVectors read;
        quantised::read_scales<F>(panel, tile, read);
#pragma GCC unroll 2
        for (int g = 0; g < f.groups; g++) {
            constexpr int CHUNKS = 8 / f.groups;
            Lanes::Floats scale = Lanes::of(read.scales[g], HALF);
            Lanes::Floats offset = f.offset ? Lanes::of(read.offsets[g], HALF) : Lanes::spread(0.0f);
            if constexpr (zero_of<F>() != 0) offset = Lanes::fma(scale, Lanes::spread(-zero_of<F>()), offset);
#pragma GCC unroll 12
            for (int row = 0; row < ROWS; row++) {
                const int8_t* values = x.values + (tile * ROWS + row) * TILE_K + g * 4 * CHUNKS;
                // Two sums, so that instructions wait less for each other.
                Lanes::Bytes even = Lanes::zero(), odd = Lanes::zero();
#pragma GCC unroll 4
                for (int c = 0; c < CHUNKS; c += 2) {
                    even = Lanes::dot<f.bits>(even, weights[g * CHUNKS + c], values + 4 * c);
                    odd = Lanes::dot<f.bits>(odd, weights[g * CHUNKS + c + 1], values + 4 * c + 4);
                }
                Lanes::Floats dot = Lanes::to_floats(Lanes::sum(even, odd));
                float sum = f.groups == 1 ? x.sums[tile * ROWS + row] : x.halves[(2 * tile + g) * ROWS + row];
                Lanes::Floats own = Lanes::times(scale, Lanes::spread(x.scales[tile * ROWS + row]));
                sums[row] = Lanes::fma(dot, own, sums[row]);
                sums[row] = Lanes::fma(offset, Lanes::spread(sum), sums[row]);
            }
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; row++) Lanes::store(out + row * OUTPUTS + HALF * Lanes::COUNT, sums[row]);
}

template <int F, int ROWS>
void multiply_panel(const Panel& panel, const RowBlock& x, int64_t tiles, float* out) {
    multiply_lanes<F, ROWS, 0>(panel, x, tiles, out);
    if constexpr (Lanes::COUNT < quantised::ROWS) multiply_lanes<F, ROWS, 1>(panel, x, tiles, out);
}

}  // namespace int8
