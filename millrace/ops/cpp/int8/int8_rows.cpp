// Rounds activations to INT8.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3")  // vectorises the loops over a tile
#endif

#include "int8/int8_rows.h"

#include "linear/linear_layer.h"

namespace int8 {
namespace {

// Consecutive tiles of a row are rounded in batches.
constexpr int BATCH = 64;

struct Batch {
    alignas(64) float scales[BATCH];
    alignas(64) int32_t halves[2][BATCH];  // sums of the first and the last 16 values of each tile
};

#if defined(__AVX512BW__)

// Bits of the largest magnitude of a tile. As integers, magnitudes are in the same order, infinity and NaN last.
inline int32_t largest_bits(const float* x) {
    const __m512i mask = _mm512_set1_epi32(0x7fffffff);
    __m512i first = _mm512_and_si512(_mm512_loadu_si512(x), mask);
    __m512i second = _mm512_and_si512(_mm512_loadu_si512(x + 16), mask);
    __m512i both = _mm512_max_epi32(first, second);
    __m256i eight = _mm256_max_epi32(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1));
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
    return _mm_cvtsi128_si32(four);
}

// Tile i of `count` is written to out + i * stride.
void round_batch(const float* x, int count, int8_t* out, int64_t stride, Batch& batch) {
    alignas(64) int32_t largest[BATCH];
    alignas(64) float inverses[BATCH];
    for (int i = 0; i < count; i++) largest[i] = largest_bits(x + i * TILE_K);
    for (int i = 0; i < count; i += LANES) {
        const __m512i bits = _mm512_load_si512(largest + i);
        const __m512 most = _mm512_castsi512_ps(bits), limit = _mm512_set1_ps(127.0f);
        __mmask16 finite = _mm512_cmplt_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
        __mmask16 positive = _mm512_cmpgt_epi32_mask(bits, _mm512_setzero_si512()) & finite;
        _mm512_store_ps(batch.scales + i, _mm512_mask_div_ps(_mm512_set1_ps(NAN), finite, most, limit));
        _mm512_store_ps(inverses + i, _mm512_maskz_div_ps(positive, limit, most));
    }
    const __m256i flip = _mm256_set1_epi8((char)0x80);
    for (int i = 0; i < count; i++) {
        const __m512 inverse = _mm512_set1_ps(inverses[i]);
        __m512i left = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i * TILE_K), inverse));
        __m512i right = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i * TILE_K + 16), inverse));
        __m256i bytes = _mm256_set_m128i(_mm512_cvtsepi32_epi8(right), _mm512_cvtsepi32_epi8(left));
        _mm256_storeu_si256((__m256i*)(out + i * stride), bytes);
        // Sums of eight bytes, each 128 too large; then of sixteen.
        __m256i sums = _mm256_sad_epu8(_mm256_xor_si256(bytes, flip), _mm256_setzero_si256());
        sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0x4e));
        batch.halves[0][i] = _mm256_cvtsi256_si32(sums) - 16 * 128;
        batch.halves[1][i] = _mm_cvtsi128_si32(_mm256_extracti128_si256(sums, 1)) - 16 * 128;
    }
}

#else

struct Rounded {
    float scale;
    int32_t halves[2];  // sums of values
};

#if defined(__aarch64__)

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

void round_batch(const float* x, int count, int8_t* out, int64_t stride, Batch& batch) {
    for (int i = 0; i < count; i++) {
        Rounded rounded = round_tile(x + i * TILE_K, out + i * stride);
        batch.scales[i] = rounded.scale;
        for (int half = 0; half < 2; half++) batch.halves[half][i] = rounded.halves[half];
    }
}

#endif

}  // namespace

Rows::Rows(const float* x, int64_t stride, int64_t rows, int64_t k, bool with_halves)
    : rows_(rows), k_(k), with_halves_(with_halves) {
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
        for (int64_t first = 0; first < tiles; first += BATCH) {
            Batch batch;
            int count = std::min<int64_t>(BATCH, tiles - first);
            round_batch(x + (row + r) * stride + first * TILE_K, count, values + (first * size + r) * TILE_K,
                        size * TILE_K, batch);
            for (int i = 0; i < count; i++) {
                int64_t at = (first + i) * size + r;
                scales[at] = batch.scales[i];
                sums[at] = batch.scales[i] * (batch.halves[0][i] + batch.halves[1][i]);
            }
            if (!with_halves_) continue;
            for (int half = 0; half < 2; half++)
                for (int i = 0; i < count; i++)
                    halves[(2 * (first + i) + half) * size + r] = batch.scales[i] * batch.halves[half][i];
        }
}

}  // namespace int8
