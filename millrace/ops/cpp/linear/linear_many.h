// Products of many rows on the AMX matrix unit, and the order in which it reads them.
#pragma once

#include "amx.h"
#include "linear/linear_layer.h"
#include "transpose.h"

#if HAS_AMX

namespace linear_layer {

// Up to so many rows are few: the kernels of linear_amx.cpp are faster.
constexpr int64_t FEW_ROWS = 64;

// Sixteen rows of x from `row` on by pairs of inputs, [k / 2][16]; rows that are not there are zeros.
inline void by_pairs(const bf16* x, int64_t stride, int64_t row, int64_t rows, int64_t k, uint32_t* out) {
    alignas(64) uint32_t some[16][16] = {};
    bool direct = row + 16 <= rows && stride % 2 == 0;
    for (int64_t pair = 0; pair < k / 2; pair += 16, out += 256) {
        const bf16* source = x + row * stride + 2 * pair;
        for (int64_t r = 0; r < 16 && row + r < rows && !direct; r++) memcpy(some[r], source + r * stride, 64);
        transpose16(direct ? (const uint32_t*)source : some[0], direct ? stride / 2 : 16, out, 16);
    }
}

// x as the matrix unit reads it, in tiles of 16 rows by 32 inputs of 1 KiB: all tiles of the first sixteen rows, then those
// of the next, with zeros for inputs and rows that are not there. Rows are a whole number of blocks of 32. A tile is
// [16 rows][32 inputs] for plain weights, which are the right operand, and [16 pairs of inputs][16 rows][2] for quantised
// ones, which are the left.
int64_t tiles_bytes(int64_t rows, int64_t padded_k);
void lay_out(const bf16* x, int64_t stride, int64_t rows, const Layer& layer, bool turned, void* tiles);

// Each output is summed in the same order as for few rows. `tiles` are in the order of the part's weights.
void many_rows(const std::vector<Layer>& parts, const void* plain_tiles, const void* turned_tiles, void* out,
               int64_t rows);

// Whether `gated_rows` can be used: gates and ups have panels that correspond, both of one kind, as `next` is.
bool can_gate(const std::vector<Layer>& gate_up, const std::vector<Layer>& next);

// act(gate) * up, where the first half of the outputs are gates, as tiles for the layer that comes next.
void gated_rows(const std::vector<Layer>& gate_up, int activation, const void* tiles, void* out, int64_t rows);

}  // namespace linear_layer

#endif
