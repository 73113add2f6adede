// The products in NEON, with dot-product instructions (SDOT), and for several rows with matrix products of integers
// (SMMLA) if there are any.
//
// The sums of integers are exact, so both give the same results; the operations in float32 and their order are the same
// for any number of rows.
#pragma once

#include <utility>

#include "int8/int8_rows.h"
#include "quantised/quantised_scales.h"

namespace int8 {

using quantised::Panel;

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr const char* KERNEL = "NEON i8mm";
constexpr bool HAS_MATRIX_PRODUCTS = true;
#else
constexpr const char* KERNEL = "NEON dotprod";
constexpr bool HAS_MATRIX_PRODUCTS = false;
#endif

// A part is a quarter of a panel: four outputs, one register of sums.
constexpr int PARTS = 4;

// --- weights ---

template <int SHIFT>
inline uint8x16_t shift_right(uint8x16_t bytes) {
    if constexpr (SHIFT > 0) return vshrq_n_u8(bytes, SHIFT);
    if constexpr (SHIFT < 0) return vshlq_n_u8(bytes, -SHIFT);
    return bytes;
}

// Chunk C of a tile: four inputs of each output of a part, whose bytes start at `tile`.
template <int PACKING, int C>
inline __attribute__((always_inline)) int8x16_t chunk(const char* tile) {
    constexpr int BITS = quantised::packed_bits(PACKING);
    auto* bytes = reinterpret_cast<const uint8_t*>(tile);
    if constexpr (BITS == 8) return vreinterpretq_s8_u8(vld1q_u8(bytes + 64 * C));
    uint8x16_t value = shift_right<C / 4 * 4>(vld1q_u8(bytes + C % 4 * 64));
    if constexpr (C < 4) value = vandq_u8(value, vdupq_n_u8(15));
    if constexpr (BITS == 5)
        value = vorrq_u8(value, vandq_u8(shift_right<C - 4>(vld1q_u8(bytes + 256)), vdupq_n_u8(1 << 4)));
    if constexpr (BITS == 6)
        value = vorrq_u8(value, vandq_u8(shift_right<C % 4 * 2 - 4>(vld1q_u8(bytes + 256 + C / 4 * 64)),
                                         vdupq_n_u8(3 << 4)));
    if constexpr (PACKING != BITS) return vqtbl1q_s8(vld1q_s8(quantised::levels_of(PACKING)), value);
    return vreinterpretq_s8_u8(value);
}

// The chunks of half a tile: 16 inputs.
struct Half {
    int8x16_t chunks[4];
};

template <int PACKING, int HALF>
inline __attribute__((always_inline)) Half half_tile(const char* tile) {
    return {chunk<PACKING, 4 * HALF>(tile), chunk<PACKING, 4 * HALF + 1>(tile), chunk<PACKING, 4 * HALF + 2>(tile),
            chunk<PACKING, 4 * HALF + 3>(tile)};
}

// --- scales ---

// Of one tile: [group of inputs][part]. Offsets include the integer that represents 0.
struct TileScales {
    float32x4_t scales[2][PARTS], offsets[2][PARTS];
};

inline __attribute__((always_inline)) void load_halves(const char* from, float32x4_t (&to)[PARTS]) {
    for (int part = 0; part < PARTS; part++)
        to[part] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(from) + 4 * part)));
}

inline __attribute__((always_inline)) void load_bytes(const char* from, bool is_signed, float32x4_t (&to)[PARTS]) {
    if (is_signed) {
        int8x16_t bytes = vld1q_s8(reinterpret_cast<const int8_t*>(from));
        int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
        to[0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), to[1] = vcvtq_f32_s32(vmovl_high_s16(low));
        to[2] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), to[3] = vcvtq_f32_s32(vmovl_high_s16(high));
    } else {
        uint8x16_t bytes = vld1q_u8(reinterpret_cast<const uint8_t*>(from));
        uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_high_u8(bytes);
        to[0] = vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), to[1] = vcvtq_f32_u32(vmovl_high_u16(low));
        to[2] = vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))), to[3] = vcvtq_f32_u32(vmovl_high_u16(high));
    }
}

// As quantised::read_scales, in registers of four.
template <int F>
inline __attribute__((always_inline)) void tile_scales(const Panel& panel, int64_t tile, TileScales& out) {
    constexpr quantised::Format f = quantised::format_of(F);
    const char* halves = panel.halves + (f.super ? tile / quantised::SUPER_TILES : tile) * half_scale_bytes(f);
    float32x4_t scales[PARTS], offsets[PARTS], small[PARTS];
    load_halves(halves, scales);
    if (f.offset) load_halves(halves + 2 * quantised::ROWS, offsets);
    const char* bytes = panel.byte_scales + tile * byte_scale_bytes(f);
    for (int g = 0; g < f.groups; g++) {
        if (f.super) load_bytes(bytes + g * quantised::ROWS, !f.offset, small);
        for (int part = 0; part < PARTS; part++) {
            if (f.unit != 1) small[part] = vmulq_n_f32(small[part], f.unit);
            out.scales[g][part] = f.super ? vmulq_f32(scales[part], small[part]) : scales[part];
        }
        if (f.super && f.offset) load_bytes(bytes + (f.groups + g) * quantised::ROWS, false, small);
        for (int part = 0; part < PARTS; part++) {
            float32x4_t offset = vdupq_n_f32(0);
            if (f.offset) offset = f.super ? vnegq_f32(vmulq_f32(offsets[part], small[part])) : offsets[part];
            if (f.zero) offset = vfmaq_f32(offset, out.scales[g][part], vdupq_n_f32(-f.zero));
            out.offsets[g][part] = offset;
        }
    }
}

template <int F>
__attribute__((noinline)) void read_tile_scales(const Panel& panel, int64_t tile, TileScales& out) {
    tile_scales<F>(panel, tile, out);
}

// --- products ---

using Dots = int32x4_t;

inline __attribute__((always_inline)) Dots dot(Dots sum, const Half& weights, int8x16_t x) {
    sum = vdotq_laneq_s32(sum, weights.chunks[0], x, 0);
    sum = vdotq_laneq_s32(sum, weights.chunks[1], x, 1);
    sum = vdotq_laneq_s32(sum, weights.chunks[2], x, 2);
    return vdotq_laneq_s32(sum, weights.chunks[3], x, 3);
}

// Dot products of ROWS rows with the outputs of a part. `clear` and `add` for each half of a tile, then `of` each row.
template <int ROWS, bool MATRIX>
class Products {
  public:
    // `values`: of this tile, [row][32].
    explicit Products(const int8_t* values) : values_(values) {}

    inline __attribute__((always_inline)) void clear() {
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; row++) sums_[row] = vdupq_n_s32(0);
    }

    template <int HALF>
    inline __attribute__((always_inline)) void add(const Half& weights) {
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; row++)
            sums_[row] = dot(sums_[row], weights, vld1q_s8(values_ + row * TILE_K + 16 * HALF));
    }

    Dots of(int row) const { return sums_[row]; }

  private:
    const int8_t* values_;
    Dots sums_[ROWS];
};

#if defined(__ARM_FEATURE_MATMUL_INT8)

inline int8x16_t zip_low(int8x16_t a, int8x16_t b) {
    return vreinterpretq_s8_s32(vzip1q_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b)));
}

inline int8x16_t zip_high(int8x16_t a, int8x16_t b) {
    return vreinterpretq_s8_s32(vzip2q_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b)));
}

// One instruction multiplies eight inputs of two rows with those of two outputs:
// {row 0 output 0, row 0 output 1, row 1 output 0, row 1 output 1}.
template <int ROWS>
class Products<ROWS, true> {
    static constexpr int PAIRS = ROWS / 2;

  public:
    explicit Products(const int8_t* values) {
#pragma GCC unroll 6
        for (int pair = 0; pair < PAIRS; pair++)
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                const int8_t* from = values + 2 * pair * TILE_K + 16 * half;
                int64x2_t first = vreinterpretq_s64_s8(vld1q_s8(from));
                int64x2_t second = vreinterpretq_s64_s8(vld1q_s8(from + TILE_K));
                x_[pair][half][0] = vreinterpretq_s8_s64(vzip1q_s64(first, second));
                x_[pair][half][1] = vreinterpretq_s8_s64(vzip2q_s64(first, second));
            }
    }

    inline __attribute__((always_inline)) void clear() {
#pragma GCC unroll 6
        for (int pair = 0; pair < PAIRS; pair++) left_[pair] = right_[pair] = vdupq_n_s32(0);
    }

    template <int HALF>
    inline __attribute__((always_inline)) void add(const Half& weights) {
        const int8x16_t *c = weights.chunks, left[2] = {zip_low(c[0], c[1]), zip_low(c[2], c[3])},
                        right[2] = {zip_high(c[0], c[1]), zip_high(c[2], c[3])};
#pragma GCC unroll 6
        for (int pair = 0; pair < PAIRS; pair++)
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                left_[pair] = vmmlaq_s32(left_[pair], x_[pair][HALF][i], left[i]);
                right_[pair] = vmmlaq_s32(right_[pair], x_[pair][HALF][i], right[i]);
            }
    }

    inline __attribute__((always_inline)) Dots of(int row) const {
        int64x2_t left = vreinterpretq_s64_s32(left_[row / 2]), right = vreinterpretq_s64_s32(right_[row / 2]);
        return vreinterpretq_s32_s64(row % 2 ? vzip2q_s64(left, right) : vzip1q_s64(left, right));
    }

  private:
    int8x16_t x_[PAIRS][2][2];             // [pair][half][8 inputs]
    int32x4_t left_[PAIRS], right_[PAIRS];  // outputs 0 and 1; 2 and 3
};

#endif

// Calls f with 0 to COUNT - 1 as constants.
template <int COUNT, typename F>
inline __attribute__((always_inline)) void for_each(F f) {
    [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
        (f(std::integral_constant<int, I>{}), ...);
    }(std::make_integer_sequence<int, COUNT>{});
}

// v * x[LANE]. One load serves four rows.
template <int LANE, int ROWS>
inline float32x4_t times_lane(float32x4_t v, const float* x) {
    if constexpr (ROWS == 1) return vmulq_n_f32(v, *x);
    return vmulq_laneq_f32(v, vld1q_f32(x), LANE);
}

template <int LANE, int ROWS>
inline float32x4_t add_times_lane(float32x4_t sum, float32x4_t v, const float* x) {
    if constexpr (ROWS == 1) return vfmaq_n_f32(sum, v, *x);
    return vfmaq_laneq_f32(sum, v, vld1q_f32(x), LANE);
}

using ReadScales = void (*)(const Panel& panel, int64_t tile, TileScales& out);

// Sums [row][part] of a block of rows. All formats with the same packing and groups share this code.
template <int PACKING, int GROUPS, int ROWS, typename Read>
inline __attribute__((always_inline)) void multiply_tiles(const Panel& panel, int64_t panel_bytes, const RowBlock& x,
                                                          int64_t tiles, Read read_scales, float* out) {
    constexpr int64_t TILE_BYTES = quantised::TILE_ITEMS * quantised::packed_bits(PACKING) / 8;
    constexpr bool HAS_OFFSETS = PACKING < 8;
    const int64_t share = panel_bytes / tiles;
    float32x4_t sums[ROWS][PARTS];
    for (int row = 0; row < ROWS; row++)
        for (int part = 0; part < PARTS; part++) sums[row][part] = vdupq_n_f32(0);
    for (int64_t tile = 0; tile < tiles; tile++) {
        const char* integers = panel.integers + tile * TILE_BYTES;
        if (ROWS < BLOCK_ROWS[0])  // the part of the next panel that lies where this tile does in its own
            for (int64_t at = 0; at < share; at += 64) __builtin_prefetch(panel.integers + panel_bytes + tile * share + at);
        TileScales scales;
        read_scales(panel, tile, scales);
        const float* x_scales = x.scales + tile * ROWS;
        Products<ROWS, HAS_MATRIX_PRODUCTS && ROWS % 2 == 0> products(x.values + tile * ROWS * TILE_K);
        auto add_scaled = [&](int part, int g, const float* x_sums) __attribute__((always_inline)) {
            for_each<ROWS>([&](auto row) __attribute__((always_inline)) {
                float32x4_t own = times_lane<row % 4, ROWS>(scales.scales[g][part], x_scales + row / 4 * 4);
                float32x4_t sum = vfmaq_f32(sums[row][part], vcvtq_f32_s32(products.of(row)), own);
                if (HAS_OFFSETS) sum = add_times_lane<row % 4, ROWS>(sum, scales.offsets[g][part], x_sums + row / 4 * 4);
                sums[row][part] = sum;
            });
        };
        auto multiply_part = [&](int part) __attribute__((always_inline)) {
            products.clear();
            products.template add<0>(half_tile<PACKING, 0>(integers + 16 * part));
            if constexpr (GROUPS == 2) {
                add_scaled(part, 0, x.halves + 2 * tile * ROWS);
                products.clear();
            }
            products.template add<1>(half_tile<PACKING, 1>(integers + 16 * part));
            if constexpr (GROUPS == 2)
                add_scaled(part, 1, x.halves + (2 * tile + 1) * ROWS);
            else
                add_scaled(part, 0, x.sums + tile * ROWS);
        };
        // The sums of one row stay in registers; those of several are in memory, and one part is multiplied at a time.
        if constexpr (ROWS == 1) {
            multiply_part(0), multiply_part(1), multiply_part(2), multiply_part(3);
        } else {
#pragma GCC unroll 1
            for (int part = 0; part < PARTS; part++) multiply_part(part);
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int part = 0; part < PARTS; part++) vst1q_f32(out + row * quantised::ROWS + 4 * part, sums[row][part]);
}

template <int PACKING, int GROUPS, int ROWS>
__attribute__((noinline)) void multiply_rows(const Panel& panel, int64_t panel_bytes, const RowBlock& x, int64_t tiles,
                                             ReadScales read_scales, float* out) {
    multiply_tiles<PACKING, GROUPS, ROWS>(panel, panel_bytes, x, tiles, read_scales, out);
}

template <int F, int ROWS>
void multiply_panel(const Panel& panel, const RowBlock& x, int64_t tiles, float* out) {
    constexpr quantised::Format f = quantised::format_of(F);
    const int64_t bytes = quantised::PanelLayout(f, tiles * TILE_K).end;
    if constexpr (ROWS == 1)
        multiply_tiles<quantised::packing_of(f), f.groups, 1>(
            panel, bytes, x, tiles, [](auto&... arguments) __attribute__((always_inline)) { tile_scales<F>(arguments...); },
            out);
    else
        multiply_rows<quantised::packing_of(f), f.groups, ROWS>(panel, bytes, x, tiles, read_tile_scales<F>, out);
}

}  // namespace int8
