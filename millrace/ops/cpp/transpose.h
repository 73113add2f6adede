// Transposing blocks of 16 x 16 words of 32 bits.
#pragma once

#include "vec.h"

#if defined(__AVX512F__)

// out[j][i] = in[i][j]; strides in words.
inline __attribute__((noinline)) void transpose16(const uint32_t* in, int64_t in_stride, uint32_t* out, int64_t out_stride) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(in + i * in_stride);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {  // pairs of rows
        b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {  // fours: a[4 i + c] holds columns c, c + 4, c + 8, c + 12 of rows 4 i to 4 i + 3
        a[4 * i] = _mm512_unpacklo_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 1] = _mm512_unpackhi_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 2] = _mm512_unpacklo_epi64(b[4 * i + 1], b[4 * i + 3]);
        a[4 * i + 3] = _mm512_unpackhi_epi64(b[4 * i + 1], b[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        __m512i upper_even = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);     // columns c and c + 8 of rows 0 to 7
        __m512i upper_odd = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);      // c + 4 and c + 12
        __m512i lower_even = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
        __m512i lower_odd = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
        _mm512_storeu_si512(out + c * out_stride, _mm512_shuffle_i32x4(upper_even, lower_even, 0x88));
        _mm512_storeu_si512(out + (c + 4) * out_stride, _mm512_shuffle_i32x4(upper_odd, lower_odd, 0x88));
        _mm512_storeu_si512(out + (c + 8) * out_stride, _mm512_shuffle_i32x4(upper_even, lower_even, 0xdd));
        _mm512_storeu_si512(out + (c + 12) * out_stride, _mm512_shuffle_i32x4(upper_odd, lower_odd, 0xdd));
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
