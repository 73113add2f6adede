// Products of many rows on the AMX matrix unit, and the layout of their inputs.
#pragma once

#include "amx.h"
#include "linear/linear_layer.h"
#include "transpose.h"

#if HAS_AMX

namespace linear_layer {

// Up to this many rows the kernels of linear_amx.cpp are faster.
constexpr int64_t FEW_ROWS = 64;

// Transposes sixteen rows of x from `row` on: [k / 2 pairs of inputs][16 rows]; missing rows are zeros.
inline void transpose_pairs(const bf16* x, int64_t stride, int64_t row, int64_t rows, int64_t k, uint32_t* out) {
    alignas(64) uint32_t some[16][16] = {};
    bool direct = row + 16 <= rows && stride % 2 == 0;
    for (int64_t pair = 0; pair < k / 2; pair += 16, out += 256) {
        const bf16* source = x + row * stride + 2 * pair;
        for (int64_t r = 0; r < 16 && row + r < rows && !direct; r++) memcpy(some[r], source + r * stride, 64);
        transpose16(direct ? (const uint32_t*)source : some[0], direct ? stride / 2 : 16, out, 16);
    }
}

// x as tiles of 16 rows by 32 inputs (1 KiB): all tiles of the first sixteen rows, then those of the next; missing rows
// and inputs are zeros, and rows are padded to a multiple of 32. A tile is [16 rows][32 inputs] for plain weights,
// which are the right operand, and `transposed`, [16 pairs of inputs][16 rows][2], for quantised weights, the left
// operand.
int64_t tiles_bytes(int64_t rows, int64_t padded_k);
void to_tiles(const bf16* x, int64_t stride, int64_t rows, const Layer& layer, bool transposed, void* tiles);

// The order of summation is the same as for few rows. Plain parts read `plain_tiles`, quantised ones
// `transposed_tiles`.
void multiply_many_rows(const std::vector<Layer>& parts, const void* plain_tiles, const void* transposed_tiles, void* out,
               int64_t rows);

// Whether `gated_rows` can be used: matching panels of gates and ups, all in one format, and `next` of the same kind.
bool can_fuse_gate(const std::vector<Layer>& gate_up, const std::vector<Layer>& next);

// act(gate) * up, where the first half of the outputs are gates, as input tiles of the next layer.
void gated_rows(const std::vector<Layer>& gate_up, int activation, const void* tiles, void* out, int64_t rows);

}  // namespace linear_layer

#endif
