// The loop over panels and blocks of rows, for kernels that multiply one panel with one block:
//   template <int F, int ROWS> void multiply_panel(const Panel& panel, const RowBlock& x, int64_t tiles, float* out);
// writes the sums of 16 outputs for ROWS rows to out [ROWS][16], for format F in dot order (int8_linear.h).
#pragma once

#include <utility>

#include "int8/int8_rows.h"
#include "linear/linear_layer.h"
#include "quantised/quantised_format.h"

namespace int8 {

using linear_layer::Layer;
using Multiply = void (*)(const quantised::Panel& panel, const RowBlock& x, int64_t tiles, float* out);

// Indexed by number of rows; null where there is no block of this size.
struct Functions {
    Multiply multiply[MAX_BLOCK_ROWS + 1];
};

template <int F, int... I>
constexpr Functions functions(std::integer_sequence<int, I...>) {
    Functions all{};
    ((all.multiply[BLOCK_ROWS[I]] = multiply_panel<F, BLOCK_ROWS[I]>), ...);
    return all;
}

template <int... I>
const Functions& functions_of(int format, std::integer_sequence<int, I...>) {
    static constexpr Functions all[] = {
        functions<quantised::FIRST_FORMAT + I>(std::make_integer_sequence<int, NUM_BLOCKS>{})...};
    return all[format - quantised::FIRST_FORMAT];
}

// Rows `first_row` to `last_row`, which starts and ends with a block, against panels `first` to `last`.
inline void multiply_panels(const Layer& layer, const Rows& x, float* out, int64_t first_row, int64_t last_row,
                            int64_t first, int64_t last) {
    const Functions& use = functions_of(layer.format, std::make_integer_sequence<int, quantised::NUM_FORMATS>{});
    alignas(64) float sums[MAX_BLOCK_ROWS * linear_layer::PANEL];
    for (int64_t panel = first; panel < last; panel++) {
        quantised::Panel weights = quantised::panel_at(layer.format, layer.packed, layer.k, panel);
        for (int64_t row = first_row; row < last_row;) {
            int size = block_rows(x.count() - row);
            use.multiply[size](weights, x.block(row), layer.tiles(), sums);
            for (int r = 0; r < size; r++) finish(layer, out, row + r, panel, load(sums + r * linear_layer::PANEL));
            row += size;
        }
    }
}

}  // namespace int8
