// Rounds activations to INT8.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3")  // vectorises the loops over a tile
#endif

#include "int8/int8_rows.h"

#include "linear/linear_layer.h"

namespace int8 {
namespace {

struct Rounded {
    float scale;
    int32_t halves[2];  // sums of values
};

#if defined(__AVX512BW__)

inline Rounded round_tile(const float* x, int8_t* out) {
    __m512 first = _mm512_loadu_ps(x), second = _mm512_loadu_ps(x + 16);
    float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(first), _mm512_abs_ps(second)));
    // Ordered comparisons with infinity are false for NaN, too.
    const __m512 infinity = _mm512_set1_ps(INFINITY);
    __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(first), infinity, _CMP_LT_OQ) &
                       _mm512_cmp_ps_mask(_mm512_abs_ps(second), infinity, _CMP_LT_OQ);
    const __m512 inverse = _mm512_set1_ps(largest > 0 ? 127.0f / largest : 0.0f);
    __m512i left = _mm512_cvtps_epi32(_mm512_mul_ps(first, inverse));
    __m512i right = _mm512_cvtps_epi32(_mm512_mul_ps(second, inverse));
    _mm_storeu_si128((__m128i*)out, _mm512_cvtsepi32_epi8(left));
    _mm_storeu_si128((__m128i*)(out + 16), _mm512_cvtsepi32_epi8(right));
    float scale = finite == 0xffff ? largest / 127.0f : NAN;
    return {scale, {_mm512_reduce_add_epi32(left), _mm512_reduce_add_epi32(right)}};
}

#elif defined(__aarch64__)

inline Rounded round_tile(const float* x, int8_t* out) {
    float32x4_t v[8], most = vdupq_n_f32(0);
    for (int i = 0; i < 8; i++) v[i] = vld1q_f32(x + 4 * i), most = vmaxq_f32(most, vabsq_f32(v[i]));
    float largest = vmaxvq_f32(most);  // NaN if there is one
    bool finite = largest < INFINITY;
    float inverse = finite && largest > 0 ? 127.0f / largest : 0.0f;
    Rounded result{finite ? largest / 127.0f : NAN, {0, 0}};
    for (int half = 0; half < 2; half++) {
        int16x4_t narrow[4];
        for (int i = 0; i < 4; i++) narrow[i] = vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(v[4 * half + i], inverse)));
        int8x16_t bytes = vcombine_s8(vqmovn_s16(vcombine_s16(narrow[0], narrow[1])),
                                      vqmovn_s16(vcombine_s16(narrow[2], narrow[3])));
        vst1q_s8(out + 16 * half, bytes);
        result.halves[half] = vaddlvq_s8(bytes);
    }
    return result;
}

#else

inline Rounded round_tile(const float* x, int8_t* out) {
    float largest = 0;
    bool finite = true;
    for (int i = 0; i < TILE_K; i++) {
        float size = std::fabs(x[i]);
        largest = size > largest ? size : largest;
        finite &= size < INFINITY;
    }
    float inverse = finite && largest > 0 ? 127.0f / largest : 0.0f;
    Rounded result{finite ? largest / 127.0f : NAN, {0, 0}};
    constexpr float TO_NEAREST = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in its low bits
    for (int half = 0; half < 2; half++)
        for (int i = 16 * half; i < 16 * half + 16; i++) {
            float shifted = (finite ? x[i] : 0.0f) * inverse + TO_NEAREST;
            int32_t bits;
            memcpy(&bits, &shifted, sizeof bits);
            int32_t value = bits - 0x4b400000;
            out[i] = (int8_t)value;
            result.halves[half] += value;
        }
    return result;
}

#endif

}  // namespace

Rows::Rows(const float* x, int64_t stride, int64_t rows, int64_t k) : rows_(rows), k_(k) {
    using namespace linear_layer;
    int64_t tiles = k / TILE_K, value_bytes = round_up(rows * k, 64);
    constexpr int64_t PADDING = 16;  // kernels load the scales of four rows at once, also where a block has fewer
    auto* memory = static_cast<char*>(scratch<INT8_ROWS>(value_bytes + 4 * rows * tiles * sizeof(float) + PADDING));
    values_ = reinterpret_cast<int8_t*>(memory);
    scales_ = reinterpret_cast<float*>(memory + value_bytes);
    sums_ = scales_ + rows * tiles;
    halves_ = sums_ + rows * tiles;
    std::vector<int64_t> starts;
    for (int64_t row = 0; row < rows; row += block_rows(rows - row)) starts.push_back(row);
    pool::for_each(starts.size(), rows * k >= MIN_PARALLEL, [&](int64_t i) {
        round_block(x, stride, starts[i], block_rows(rows - starts[i]));
    });
}

void Rows::round_block(const float* x, int64_t stride, int64_t row, int size) {
    int64_t tiles = k_ / TILE_K;
    int8_t* values = values_ + row * k_;
    float *scales = scales_ + row * tiles, *sums = sums_ + row * tiles, *halves = halves_ + row * 2 * tiles;
    for (int r = 0; r < size; r++)
        for (int64_t tile = 0; tile < tiles; tile++) {
            int64_t at = tile * size + r;
            Rounded rounded = round_tile(x + (row + r) * stride + tile * TILE_K, values + at * TILE_K);
            scales[at] = rounded.scale;
            sums[at] = rounded.scale * (rounded.halves[0] + rounded.halves[1]);
            for (int half = 0; half < 2; half++)
                halves[(2 * tile + half) * size + r] = rounded.scale * rounded.halves[half];
        }
}

}  // namespace int8
