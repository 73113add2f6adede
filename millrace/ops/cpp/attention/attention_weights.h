// Turns scores into softmax weights for the matrix unit; sixteen queries in the lanes of a vector.
#pragma once

#include "attention/attention_amx.h"

#if HAS_AMX

// 2^x from z = x + EXP2_BIAS, with relative error 2^-13, exactly 0 for x < -127 or NaN; for weights that become
// bfloat16. The low 23 bits of z hold the eight exponent bits of the result and 15 bits of the fraction of x; x must be
// below 129. While the matrix unit is busy, the second vector port does no float products or maxima, so few are used
// here.
constexpr float EXP2_BIAS = 256 + 127;

inline __attribute__((always_inline)) __m512 exp2_of_sum(__m512 z) {
    __mmask16 normal = _mm512_cmp_ps_mask(z, _mm512_set1_ps(256.0f), _CMP_GE_OQ);
    __m512i bits = _mm512_slli_epi32(_mm512_castps_si512(z), 8);
    __m512 power = _mm512_castsi512_ps(_mm512_maskz_and_epi32(normal, bits, _mm512_set1_epi32(0x7f800000)));
    constexpr int PART = 0xea;  // a & b | c
    __m512 m = _mm512_castsi512_ps(
        _mm512_ternarylogic_epi32(bits, _mm512_set1_epi32(0x007fffff), _mm512_set1_epi32(0x3f800000), PART));
    __m512 y = _mm512_set1_ps(7.80246332e-2f);  // 2^(m - 1)
    y = _mm512_fmadd_ps(y, m, _mm512_set1_ps(-8.00663140e-3f));
    y = _mm512_fmadd_ps(y, m, _mm512_set1_ps(4.77772713e-1f));
    y = _mm512_fmadd_ps(y, m, _mm512_set1_ps(4.52134520e-1f));
    return _mm512_mul_ps(y, power);
}

// Largest score of each query.
inline __m512 largest(const float (*scores)[QUERIES], int keys) {
    __m512 top[4];
    for (__m512& part : top) part = _mm512_set1_ps(-INFINITY);
    for (int k = 0; k < keys; k += 4)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) top[i] = _mm512_max_ps(top[i], _mm512_load_ps(scores[k + i]));
    return _mm512_max_ps(_mm512_max_ps(top[0], top[1]), _mm512_max_ps(top[2], top[3]));
}

// Whether every score is at most the limit of its query.
inline bool all_within(const float (*scores)[QUERIES], int keys, __m512 limit) {
    __mmask16 within[4] = {0xffff, 0xffff, 0xffff, 0xffff};
    for (int k = 0; k < keys; k += 16)
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            within[i % 4] = _mm512_mask_cmp_ps_mask(within[i % 4], _mm512_load_ps(scores[k + i]), limit, _CMP_LE_OQ);
    return (within[0] & within[1] & within[2] & within[3]) == 0xffff;
}

// A query's weights are relative to its base, an integer near one of its scores. The base is raised when the largest
// score exceeds it by far. Returns true if a base changed; the sums so far must then be multiplied by `shrink`.
inline bool update_base(Group& group, const float (*scores)[QUERIES], int keys, float scale, __m512& shrink) {
    const __m512 far = _mm512_set1_ps(8.0f);  // weights are at most 2^8, without loss of precision
    __m512 limit = _mm512_mul_ps(_mm512_add_ps(group.base, far), _mm512_set1_ps(1 / scale));
    if (all_within(scores, keys, limit)) [[likely]]
        return false;
    __m512 top = largest(scores, keys);
    __mmask16 follows = _mm512_cmp_ps_mask(top, limit, _CMP_GT_OQ);
    __m512 next = _mm512_roundscale_ps(_mm512_mul_ps(top, _mm512_set1_ps(scale)), _MM_FROUND_TO_NEAREST_INT);
    next = _mm512_mask_mov_ps(group.base, follows, next);
    shrink = _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), follows, exp2(_mm512_sub_ps(group.base, next)));
    group.base = next;
    group.total = _mm512_mul_ps(group.total, shrink);
    return true;
}

// Turns the scores into bfloat16 weights relative to each query's base, transposed to one row per query, and adds them
// to its total. Only the first `halves` * 32 keys are used. Calls `between(half, eighth)` after every four keys, to
// interleave work of the matrix unit: a core looks only some hundred instructions ahead.
template <typename F>
inline __attribute__((always_inline)) void weigh(Group& group, const float (*scores)[QUERIES], float scale, int halves,
                                                 bf16 (*weights)[QUERIES][32], F between) {
    const __m512 by = _mm512_set1_ps(scale), offset = _mm512_sub_ps(_mm512_set1_ps(EXP2_BIAS), group.base);
    const __m512i half_bit = _mm512_set1_epi32(0x8000);  // half a unit in the last place of bfloat16
    __m512 sum[4] = {group.total, _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    // Byte positions of the upper halves of words in each 16 bytes.
    const vu word = {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3};
    const __m512i upper = (__m512i)(word * 0x0404 + 0x0302);
    constexpr __mmask64 LOWER = 0x3333333333333333;
    for (int half = 0; half < halves; half++) {
        __m512i partial[4][4];  // see transpose.h
#pragma GCC unroll 4
        for (int step = 0; step < 4; step++) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                const float(*pair)[QUERIES] = scores + half * 32 + 8 * step + 2 * i;
                __m512 even = exp2_of_sum(_mm512_fmadd_ps(_mm512_load_ps(pair[0]), by, offset));
                __m512 odd = exp2_of_sum(_mm512_fmadd_ps(_mm512_load_ps(pair[1]), by, offset));
                sum[2 * (i % 2)] = _mm512_add_ps(sum[2 * (i % 2)], even);
                sum[2 * (i % 2) + 1] = _mm512_add_ps(sum[2 * (i % 2) + 1], odd);
                __m512i lower = _mm512_add_epi32(_mm512_castps_si512(even), half_bit);
                __m512i higher = _mm512_add_epi32(_mm512_castps_si512(odd), half_bit);
                partial[step][i] = _mm512_mask_shuffle_epi8(higher, LOWER, lower, upper);
                if (i % 2) between(half, step * 2 + i / 2);
            }
            gather_four(partial[step]);
        }
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            __m512i rows[4] = {partial[0][c], partial[1][c], partial[2][c], partial[3][c]};
            spread_four(rows);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) _mm512_store_si512(weights[half][c + 4 * i], rows[i]);
        }
    }
    group.total = _mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3]));
}

#endif
