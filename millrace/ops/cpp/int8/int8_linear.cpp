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
constexpr int64_t MAX_CHUNK_ROWS = 192;
// The least work that is worth a task of its own.
constexpr int64_t MIN_TILES = 256;

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
            for (int j = 0; j < LANES; j++) values[j] = integer_at<quantised::packing_of(f)>(integers, r, 16 * half + j) - f.zero;
            values *= read.scales[group][r];
            store(out + tile * TILE_K + 16 * half, f.offset ? values + read.offsets[group][r] : values);
        }
    }
}

using UnpackRow = void (*)(const quantised::Panel& panel, int64_t k, int r, float* out);

template <int... I>
UnpackRow unpack_row_of(int format, std::integer_sequence<int, I...>) {
    static constexpr UnpackRow all[] = {unpack_row<quantised::FIRST_FORMAT + I>...};
    return all[format - quantised::FIRST_FORMAT];
}

// Consecutive panels of one part of a layer.
struct Task {
    const Layer* part;
    int64_t first, last;
};

// Tasks of nearly the same size, as many for each thread if there are enough. They start at even panels.
void add_tasks(const Layer& part, std::vector<Task>& tasks) {
    int64_t pairs = part.panels() / 2, threads = pool::threads();
    int64_t count = std::clamp<int64_t>(part.panels() * part.tiles() / MIN_TILES, 1, std::min(pairs, 4 * threads));
    if (count > threads) count = count / threads * threads;
    for (int64_t i = 0; i < count; i++) tasks.push_back({&part, pairs * i / count * 2, pairs * (i + 1) / count * 2});
}

// Rows of one chunk after the other, so that they stay in the L2 cache.
void run_task(const Task& task, const Rows& x, float* out) {
    const int64_t chunk = std::clamp<int64_t>(CHUNK_BYTES / task.part->k, 1, MAX_CHUNK_ROWS);
    for (int64_t row = 0; row < x.count();) {
        int64_t end = row;
        while (end < x.count() && end - row < chunk) end += block_rows(x.count() - end);
        multiply_panels(*task.part, x, out, row, end, task.first, task.last);
        row = end;
    }
}

}  // namespace

void linear(const std::vector<Layer>& parts, const float* x, int64_t stride, float* out, int64_t rows) {
    bool halves = std::any_of(parts.begin(), parts.end(), [](const Layer& p) { return format_of(p.format).groups == 2; });
    Rows rounded(x, stride, rows, parts[0].k, halves);
    std::vector<Task> tasks;
    for (const Layer& part : parts) add_tasks(part, tasks);
    pool::for_each(tasks.size(), true, [&](int64_t i) { run_task(tasks[i], rounded, out); });
}

void unpack_row(int format, const void* packed, int64_t k, int64_t row, float* out) {
    UnpackRow unpack = unpack_row_of(format, std::make_integer_sequence<int, quantised::NUM_FORMATS>{});
    unpack(quantised::panel_at(format, packed, k, row / PANEL), k, row % PANEL, out);
}

}  // namespace int8

extern "C" {

const char* millrace_int8_kernel() { return int8::KERNEL; }
}
