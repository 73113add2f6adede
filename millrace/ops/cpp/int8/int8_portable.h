// The products in plain C++: the reference for other kernels, and what processors without one use.
#pragma once

#include "int8/int8_rows.h"
#include "quantised/quantised_scales.h"

namespace int8 {

using quantised::Panel;

// Integer of output r and input j of a tile in dot order, as stored, or the level that it stands for.
template <int PACKING>
inline int integer_at(const char* tile, int r, int j) {
    constexpr int BITS = quantised::packed_bits(PACKING);
    int chunk = j / 4, at = 4 * r + j % 4;
    auto* bytes = reinterpret_cast<const uint8_t*>(tile);
    if (BITS == 8) return (int8_t)bytes[64 * chunk + at];
    int value = bytes[chunk % 4 * 64 + at] >> chunk / 4 * 4 & 15;
    if (BITS == 5) value |= (bytes[256 + at] >> chunk & 1) << 4;
    if (BITS == 6) value |= (bytes[256 + chunk / 4 * 64 + at] >> chunk % 4 * 2 & 3) << 4;
    return PACKING == BITS ? value : quantised::levels_of(PACKING)[value];
}

namespace portable {

constexpr const char* KERNEL = "portable";

template <int F, int ROWS>
void multiply_panel(const Panel& panel, const RowBlock& x, int64_t tiles, float* out) {
    constexpr quantised::Format f = quantised::format_of(F);
    constexpr int64_t OUTPUTS = quantised::ROWS, GROUP = TILE_K / f.groups;
    memset(out, 0, ROWS * OUTPUTS * sizeof(float));
    for (int64_t tile = 0; tile < tiles; tile++) {
        quantised::ScaleVectors read;
        quantised::read_scales<F>(panel, tile, read);
        const char* integers = panel.integers + tile * quantised::integer_bytes(f);
        for (int g = 0; g < f.groups; g++) {
            vf scale = read.scales[g], offset = scale * -(float)f.zero;
            if (f.offset) offset += read.offsets[g];
            for (int r = 0; r < OUTPUTS; r++) {
                int8_t weights[TILE_K];
                for (int j = 0; j < GROUP; j++) weights[j] = integer_at<quantised::packing_of(f)>(integers, r, g * GROUP + j);
                for (int row = 0; row < ROWS; row++) {
                    const int8_t* values = x.values + (tile * ROWS + row) * TILE_K + g * GROUP;
                    int32_t dot = 0;
                    for (int j = 0; j < GROUP; j++) dot += weights[j] * values[j];
                    float sum = f.groups == 1 ? x.sums[tile * ROWS + row] : x.halves[(2 * tile + g) * ROWS + row];
                    out[row * OUTPUTS + r] += dot * (scale[r] * x.scales[tile * ROWS + row]) + offset[r] * sum;
                }
            }
        }
    }
}

}  // namespace portable
}  // namespace int8
