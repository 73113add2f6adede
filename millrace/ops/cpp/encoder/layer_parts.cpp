// What stands between the products of an encoder's layer, in one pass each: bias and activation, bias and layer norm.
// Float32 only.
#include "activation.h"
#include "pool.h"

#include <algorithm>

namespace {

constexpr int64_t MIN_PARALLEL = 1 << 14;  // numbers, below which waking a thread does not pay off
constexpr int64_t ROWS_PER_TASK = 16;

template <typename F>
void for_rows(int64_t rows, int64_t width, F f) {
    pool::for_each((rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK, rows * width >= MIN_PARALLEL, [&](int64_t task) {
        int64_t end = std::min(rows, (task + 1) * ROWS_PER_TASK);
        for (int64_t row = task * ROWS_PER_TASK; row < end; row++) f(row);
    });
}

template <int KIND>
void activate_row(float* x, const float* bias, int64_t width) {
    for (int64_t i = 0; i < width; i += LANES) {
        int count = std::min<int64_t>(LANES, width - i);
        vf v = load_upto(x + i, count);
        if (bias) v += load_upto(bias + i, count);
        store_upto(x + i, activate(v, KIND), count);
    }
}

void norm_row(float* x, const float* bias, const float* weight, const float* offset, int64_t width, float eps) {
    const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vf sum = {}, squares = {};
    for (int64_t i = 0; i < width; i += LANES) {
        int count = std::min<int64_t>(LANES, width - i);
        vf v = load_upto(x + i, count);
        if (bias) v += load_upto(bias + i, count);
        store_upto(x + i, v, count);
        sum += v;
    }
    float mean = sum_lanes(sum) / width;
    for (int64_t i = 0; i < width; i += LANES) {
        int count = std::min<int64_t>(LANES, width - i);
        vf v = load_upto(x + i, count) - mean;
        if (count < LANES) v = lanes < count ? v : vf{};
        squares = fma(v, v, squares);
    }
    float scale = 1.0f / std::sqrt(sum_lanes(squares) / width + eps);
    for (int64_t i = 0; i < width; i += LANES) {
        int count = std::min<int64_t>(LANES, width - i);
        vf v = (load_upto(x + i, count) - mean) * scale * load_upto(weight + i, count);
        if (offset) v += load_upto(offset + i, count);
        store_upto(x + i, v, count);
    }
}

}  // namespace

extern "C" {

// x [rows, width] = activation(x + bias), in place; `bias` may be null.
void millrace_bias_activation(int kind, float* x, const float* bias, int64_t rows, int64_t width) {
    for_rows(rows, width, [&](int64_t row) {
        float* own = x + row * width;
        if (kind == SILU) return activate_row<SILU>(own, bias, width);
        if (kind == GELU_TANH) return activate_row<GELU_TANH>(own, bias, width);
        activate_row<GELU>(own, bias, width);
    });
}

// x [rows, width] = layer norm of x + bias, in place; `bias` and `offset` may be null.
void millrace_bias_layer_norm(float* x, const float* bias, const float* weight, const float* offset, int64_t rows,
                              int64_t width, float eps) {
    for_rows(rows, width, [&](int64_t row) { norm_row(x + row * width, bias, weight, offset, width, eps); });
}
}
