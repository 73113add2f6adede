// Transposes 16 x 16 matrices of 32-bit words.
#pragma once

#include "vec.h"

#if defined(__AVX512F__)

// A transposition takes two rounds of four independent steps. Step i of the first round works in place on rows 4 i to
// 4 i + 3: its register c then holds items c, c + 4, c + 8 and c + 12 of those rows.
inline __attribute__((always_inline)) void gather_four(__m512i (&a)[4]) {
    __m512i low = _mm512_unpacklo_epi32(a[0], a[1]), high = _mm512_unpackhi_epi32(a[0], a[1]);
    __m512i later_low = _mm512_unpacklo_epi32(a[2], a[3]), later_high = _mm512_unpackhi_epi32(a[2], a[3]);
    a[0] = _mm512_unpacklo_epi64(low, later_low);
    a[1] = _mm512_unpackhi_epi64(low, later_low);
    a[2] = _mm512_unpacklo_epi64(high, later_high);
    a[3] = _mm512_unpackhi_epi64(high, later_high);
}

// Step c of the second round takes register c of all four steps and returns rows c, c + 4, c + 8 and c + 12.
inline __attribute__((always_inline)) void spread_four(__m512i (&a)[4]) {
    __m512i upper_even = _mm512_shuffle_i32x4(a[0], a[1], 0x88);  // columns c and c + 8 of rows 0 to 7
    __m512i upper_odd = _mm512_shuffle_i32x4(a[0], a[1], 0xdd);   // c + 4 and c + 12
    __m512i lower_even = _mm512_shuffle_i32x4(a[2], a[3], 0x88);
    __m512i lower_odd = _mm512_shuffle_i32x4(a[2], a[3], 0xdd);
    a[0] = _mm512_shuffle_i32x4(upper_even, lower_even, 0x88);
    a[1] = _mm512_shuffle_i32x4(upper_odd, lower_odd, 0x88);
    a[2] = _mm512_shuffle_i32x4(upper_even, lower_even, 0xdd);
    a[3] = _mm512_shuffle_i32x4(upper_odd, lower_odd, 0xdd);
}

// out[j][i] = in[i][j]; strides in words.
inline __attribute__((noinline)) void transpose16(const uint32_t* in, int64_t in_stride, uint32_t* out, int64_t out_stride) {
    __m512i a[4][4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) a[i][j] = _mm512_loadu_si512(in + (4 * i + j) * in_stride);
        gather_four(a[i]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        __m512i rows[4] = {a[0][c], a[1][c], a[2][c], a[3][c]};
        spread_four(rows);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) _mm512_storeu_si512(out + (c + 4 * j) * out_stride, rows[j]);
    }
}

#elif defined(__AVX2__)

inline void transpose8(const uint32_t* in, int64_t in_stride, uint32_t* out, int64_t out_stride) {
    __m256i a[8], b[8];
    for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_si256((const __m256i*)(in + i * in_stride));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        b[2 * i] = _mm256_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm256_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        a[4 * i] = _mm256_unpacklo_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 1] = _mm256_unpackhi_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 2] = _mm256_unpacklo_epi64(b[4 * i + 1], b[4 * i + 3]);
        a[4 * i + 3] = _mm256_unpackhi_epi64(b[4 * i + 1], b[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        _mm256_storeu_si256((__m256i*)(out + c * out_stride), _mm256_permute2x128_si256(a[c], a[4 + c], 0x20));
        _mm256_storeu_si256((__m256i*)(out + (c + 4) * out_stride), _mm256_permute2x128_si256(a[c], a[4 + c], 0x31));
    }
}

inline __attribute__((noinline)) void transpose16(const uint32_t* in, int64_t in_stride, uint32_t* out, int64_t out_stride) {
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 16; j += 8)
            transpose8(in + i * in_stride + j, in_stride, out + j * out_stride + i, out_stride);
}

#else

inline __attribute__((noinline)) void transpose16(const uint32_t* in, int64_t in_stride, uint32_t* out, int64_t out_stride) {
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) out[j * out_stride + i] = in[i * in_stride + j];
}

#endif
