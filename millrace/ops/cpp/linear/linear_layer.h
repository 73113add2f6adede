// Shared by the kernels of linear layers: a part of a layer, how its work is split, and how an output is stored.
#pragma once

#include <algorithm>
#include <vector>

#include "linear/linear.h"
#include "pool.h"
#include "quantised/quantised.h"
#include "vec.h"

namespace linear_layer {

constexpr int64_t PANEL = 16;
constexpr int64_t TILE_K = 32;
constexpr int64_t MIN_PARALLEL = 1 << 16;
// Weights of this size stay in the L2 cache while all rows are multiplied with them.
constexpr int64_t GROUP_BYTES = 512 << 10;

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// One part of a layer: its outputs are columns from `first_column` on, in rows of `out_stride` items.
struct Layer {
    int format;
    const void* packed;
    const float* bias;  // [N] or null
    int64_t n, k, padded_k, out_stride, first_column;
    bool wide;                // outputs are float32 whatever the dtype
    int64_t first_panel = 0;  // index of the panel at `packed`

    bool is_quantised() const { return format > FORMAT_BF16; }
    int64_t panels() const { return round_up(n, 2 * PANEL) / PANEL; }
    int64_t tiles() const { return padded_k / TILE_K; }
    template <typename T>
    int64_t units() const {
        return padded_k * sizeof(T) / 4;
    }
};

template <typename T>
inline void finish(const Layer& layer, T* out, int64_t row, int64_t panel, vf sum) {
    int64_t column = panel * PANEL;
    int lanes = layer.n - column < PANEL ? layer.n - column : PANEL;
    if (lanes <= 0) return;
    if (layer.bias) sum += load_upto(layer.bias + column, lanes);
    int64_t at = row * layer.out_stride + layer.first_column + column;
    if (layer.wide)
        store_upto((float*)out + at, sum, lanes);
    else
        store_upto(out + at, sum, lanes);
}

// Calls f(first, last) for ranges of `size` panels.
template <typename F>
void for_panels(const Layer& layer, int64_t size, F f) {
    int64_t panels = layer.panels();
    pool::for_each((panels + size - 1) / size, layer.n * layer.padded_k >= MIN_PARALLEL, [&](int64_t piece) {
        f(piece * size, std::min((piece + 1) * size, panels));
    });
}

// Panels per range: several ranges per thread, none with more plain weights than GROUP_BYTES.
template <typename T>
int64_t group_size(const Layer& layer) {
    constexpr int64_t STEP = 4;
    int64_t most = GROUP_BYTES / (layer.units<T>() * PANEL * 4) / STEP * STEP;
    return std::max(STEP, std::min(round_up(layer.panels() / (3 * pool::threads()), STEP), most));
}

// Aligned memory of this thread; valid until the thread's next call with the same USE.
enum Use { WEIGHTS, PLAIN_ROWS, TRANSPOSED_ROWS, INT8_ROWS, INT8_SUMS };

template <Use USE = WEIGHTS>
void* scratch(int64_t bytes) {
    struct alignas(64) Line {
        char bytes[64];
    };
    static thread_local std::vector<Line> lines;
    if ((int64_t)lines.size() * 64 < bytes) lines.resize((bytes + 63) / 64);
    return lines.data();
}

// Panels `first` to `last` as plain ones; quantised ones are unpacked into this thread's memory.
template <typename T>
Layer as_plain(const Layer& layer, int64_t first, int64_t last) {
    if (!layer.is_quantised()) return layer;
    constexpr int dtype = sizeof(T) == 4 ? F32 : BF16;
    Layer own = layer;
    void* unpacked = scratch((last - first) * layer.units<T>() * PANEL * 4);
    quantised::unpack_panels(layer.format, dtype, layer.packed, layer.k, first, last, unpacked);
    own.packed = unpacked;
    own.format = dtype;
    own.first_panel = first;
    return own;
}

// All parts of a layer on the AMX unit; only if use_amx(). `decode` as for `linear`.
void amx_linear(const std::vector<Layer>& parts, const bf16* x, int64_t stride, bf16* out, int64_t rows, bool decode);

}  // namespace linear_layer
