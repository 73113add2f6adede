// Runs a layer: rounds its rows, multiplies them panel by panel, and reads single rows of the weight.
#include "int8/int8_linear.h"

#include <utility>

#include "int8/int8_kernel.h"
#include "int8/int8_portable.h"

namespace int8 {
namespace {

using namespace linear_layer;
using quantised::format_of;

// Rows of this size stay in the L2 cache while several panels are multiplied with them.
constexpr int64_t CHUNK_BYTES = 384 << 10;
// The least work that is worth a task of its own.
constexpr int64_t MIN_TILES = 256;

using Multiply = void (*)(const quantised::Panel& panel, const RowBlock& x, int64_t tiles, float* out);

// The functions for one format.
struct Functions {
    Multiply multiply[BLOCK_ROWS[0] + 1];  // by number of rows; null where there is no block of this size
    void (*unpack_row)(const quantised::Panel& panel, int64_t k, int r, float* out);
};

// Output r of a panel.
template <int F>
void unpack_row(const quantised::Panel& panel, int64_t k, int r, float* out) {
    constexpr quantised::Format f = format_of(F);
    for (int64_t tile = 0; tile < k / TILE_K; tile++) {
        quantised::ScaleVectors read;
        quantised::read_scales<F>(panel, tile, read);
        const char* integers = panel.integers + tile * quantised::integer_bytes(f);
        for (int half = 0; half < 2; half++) {
            vf values;
            int group = f.groups == 2 ? half : 0;
            for (int j = 0; j < LANES; j++) values[j] = integer_at<f.bits>(integers, r, 16 * half + j) - f.zero;
            values *= read.scales[group][r];
            store(out + tile * TILE_K + 16 * half, f.offset ? values + read.offsets[group][r] : values);
        }
    }
}

template <int F, int... I>
constexpr Functions functions(std::integer_sequence<int, I...>) {
    Functions all{{}, unpack_row<F>};
    ((all.multiply[BLOCK_ROWS[I]] = multiply_panel<F, BLOCK_ROWS[I]>), ...);
    return all;
}

template <int... I>
const Functions& functions_of(int format, std::integer_sequence<int, I...>) {
    static constexpr Functions all[] = {
        functions<quantised::FIRST_FORMAT + I>(std::make_integer_sequence<int, NUM_BLOCKS>{})...};
    return all[format - quantised::FIRST_FORMAT];
}

const Functions& functions_of(int format) {
    return functions_of(format, std::make_integer_sequence<int, quantised::NUM_FORMATS>{});
}

// Rows `first_row` to `last_row`, which starts and ends with a block, against panels `first` to `last`.
void multiply_panels(const Layer& layer, const Rows& x, float* out, int64_t first_row, int64_t last_row, int64_t first,
                     int64_t last) {
    const Functions& use = functions_of(layer.format);
    alignas(64) float sums[BLOCK_ROWS[0] * PANEL];
    for (int64_t panel = first; panel < last; panel++) {
        quantised::Panel weights = quantised::panel_at(layer.format, layer.packed, layer.k, panel);
        for (int64_t row = first_row; row < last_row;) {
            int size = block_rows(x.count() - row);
            use.multiply[size](weights, x.block(row), layer.tiles(), sums);
            for (int r = 0; r < size; r++) finish(layer, out, row + r, panel, load(sums + r * PANEL));
            row += size;
        }
    }
}

void multiply_part(const Layer& layer, const Rows& x, float* out) {
    int64_t chunk = std::max<int64_t>(1, CHUNK_BYTES / layer.k / BLOCK_ROWS[0]) * BLOCK_ROWS[0];
    int64_t tasks = 4 * pool::threads(), least = (MIN_TILES + layer.tiles() - 1) / layer.tiles();
    int64_t size = std::max(least, (layer.panels() + tasks - 1) / tasks);
    for_panels(layer, size, [&](int64_t first, int64_t last) {
        for (int64_t row = 0; row < x.count(); row += chunk)
            multiply_panels(layer, x, out, row, std::min(row + chunk, x.count()), first, last);
    });
}

}  // namespace

void linear(const std::vector<Layer>& parts, const float* x, int64_t stride, float* out, int64_t rows) {
    Rows rounded(x, stride, rows, parts[0].k);
    for (const Layer& part : parts) multiply_part(part, rounded, out);
}

void unpack_row(int format, const void* packed, int64_t k, int64_t row, float* out) {
    functions_of(format).unpack_row(quantised::panel_at(format, packed, k, row / PANEL), k, row % PANEL, out);
}

}  // namespace int8

extern "C" {

const char* millrace_int8_kernel() { return int8::KERNEL; }
}
