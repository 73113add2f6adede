// Attention within texts that are packed one after another: every token sees its whole text, or a window of it in both
// directions. Float32 only.
//
// A task is one head of up to CHUNK queries of a text. Its keys are laid out as panels of two vectors of keys by
// dimension, and its values one after another. A block of queries is multiplied with all panels, its scores become
// weights, and the weights are multiplied with the values; sums stay in registers. Blocks begin at the text's first
// token, so a token's result depends on its own text alone.
#include "pool.h"
#include "transpose.h"
#include "vec.h"

#include <algorithm>
#include <vector>

namespace {

// Queries of a block: with two vectors for each, their sums fill most registers.
#if defined(__AVX512F__)
constexpr int BLOCK = 12;
#else
constexpr int BLOCK = 3;
#endif
constexpr int PANEL = 2 * LANES;      // keys
constexpr int64_t CHUNK = 32 * BLOCK;
constexpr int64_t WORK_TO_SHARE = 1 << 14;  // products, below which waking a thread does not pay off
// Rows of scores begin so many numbers apart from a multiple of a panel; else they would share few lines of the cache.
constexpr int64_t STAGGER = LANES;

struct Texts {
    const float* qkv;  // [tokens, 3, heads, dim]
    float* out;        // [tokens, heads, dim]
    const int64_t *starts, *seen;  // [texts + 1]; [texts]: tokens at the beginning of each that are attended to
    int64_t heads, dim, window;    // window 0: no limit
    float scale;

    int64_t row() const { return 3 * heads * dim; }
};

struct Task {
    int64_t text, head, first;
};

// Memory of a thread for one task.
struct Scratch {
    std::vector<float> memory;
    float *keys, *values, *queries, *scores, *turned;

    void reserve(int64_t panels, int64_t dim) {
        int64_t padded = panels * PANEL, stride = padded + STAGGER;
        int64_t size = 2 * padded * dim + BLOCK * dim + BLOCK * stride + LANES * LANES + LANES;
        if ((int64_t)memory.size() < size) memory.resize(size);
        auto at = reinterpret_cast<uintptr_t>(memory.data());
        keys = memory.data() + (64 - at % 64) % 64 / sizeof(float);
        values = keys + padded * dim;
        scores = values + padded * dim;
        turned = scores + BLOCK * stride;
        queries = turned + LANES * LANES;
    }
};

// scores[row][key] for ROWS queries [dim][ROWS] and one panel of keys [dim][PANEL].
template <int ROWS>
void score_panel(const float* queries, const float* keys, int64_t dim, float* scores, int64_t stride) {
    vf sums[ROWS][2] = {};
    for (int64_t d = 0; d < dim; d++, queries += ROWS, keys += PANEL) {
        vf left = load(keys), right = load(keys + LANES);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            vf query = splat(queries[r]);
            sums[r][0] = fma(left, query, sums[r][0]);
            sums[r][1] = fma(right, query, sums[r][1]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
        store(scores + r * stride, sums[r][0]);
        store(scores + r * stride + LANES, sums[r][1]);
    }
}

// Weights of one row, not yet divided by their sum, which is returned. Keys from `first` to `last` are seen, of `count`.
float to_weights(float* scores, int64_t first, int64_t last, int64_t count) {
    std::fill(scores, scores + first, -INFINITY);
    std::fill(scores + last, scores + count, -INFINITY);
    vf tops[2] = {splat(-INFINITY), splat(-INFINITY)};
    for (int64_t at = 0; at < count; at += PANEL) {
        tops[0] = max(tops[0], load(scores + at));
        tops[1] = max(tops[1], load(scores + at + LANES));
    }
    vf top = splat(max_lanes(max(tops[0], tops[1]))), sums[2] = {};
    for (int64_t at = 0; at < count; at += PANEL)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            vf weight = exp(load(scores + at + half * LANES) - top);
            store(scores + at + half * LANES, weight);
            sums[half] += weight;
        }
    return sum_lanes(sums[0] + sums[1]);
}

// out[row] = weights[row] values / sums[row], for ROWS rows and VECTORS vectors of a head.
template <int ROWS, int VECTORS>
void weigh(const float* weights, int64_t stride, const float* values, int64_t dim, int64_t count, const float* sums,
           float* out, int64_t out_stride) {
    vf totals[ROWS][VECTORS] = {};
    for (int64_t key = 0; key < count; key++, values += dim) {
        vf own[VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) own[v] = load(values + v * LANES);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            vf weight = splat(weights[r * stride + key]);
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) totals[r][v] = fma(own[v], weight, totals[r][v]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) store(out + r * out_stride + v * LANES, totals[r][v] / splat(sums[r]));
}

class Head {
  public:
    Head(const Texts& texts, const Task& task, Scratch& memory)
        : texts_(texts), memory_(memory), first_(task.first), length_(texts.starts[task.text + 1] - texts.starts[task.text]),
          seen_(texts.seen[task.text]), dim_(texts.dim),
          qkv_(texts.qkv + texts.starts[task.text] * texts.row() + task.head * dim_),
          out_(texts.out + (texts.starts[task.text] * texts.heads + task.head) * dim_) {
        int64_t last = std::min(length_, first_ + CHUNK);
        begin_ = texts.window ? std::max<int64_t>(0, first_ - texts.window) / PANEL * PANEL : 0;
        end_ = texts.window ? std::min(seen_, last + texts.window) : seen_;
        memory.reserve((end_ - begin_ + PANEL - 1) / PANEL + 1, dim_);
        lay_out();
        for (int64_t row = first_; row < last; row += BLOCK) block<BLOCK>(row, std::min<int64_t>(BLOCK, last - row));
    }

  private:
    const Texts& texts_;
    Scratch& memory_;
    int64_t first_, length_, seen_, dim_;
    const float* qkv_;  // the head's query of the text's first token
    float* out_;
    int64_t begin_, end_;  // keys of this task; the first is a panel's

    void lay_out() {
        int64_t hidden = texts_.heads * dim_;
        for (int64_t key = begin_; key < end_; key++)
            memcpy(memory_.values + (key - begin_) * dim_, qkv_ + key * texts_.row() + 2 * hidden, dim_ * sizeof(float));
        for (int64_t key = begin_; key < end_; key += LANES) {
            float* panel = memory_.keys + (key - begin_) / PANEL * PANEL * dim_ + (key - begin_) % PANEL;
            const float* source = qkv_ + key * texts_.row() + hidden;
            for (int64_t d = 0; d < dim_; d += LANES) turn(source + d, end_ - key, panel + d * PANEL);
        }
    }

    // Up to LANES keys of LANES dimensions as columns; those that are missing repeat the last one.
    void turn(const float* source, int64_t count, float* panel) {
        int64_t stride = texts_.row();
        if (count >= LANES)
            return transpose16((const uint32_t*)source, stride, (uint32_t*)panel, PANEL);
        for (int64_t i = 0; i < LANES; i++)
            memcpy(memory_.turned + i * LANES, source + std::min(i, count - 1) * stride, LANES * sizeof(float));
        transpose16((const uint32_t*)memory_.turned, LANES, (uint32_t*)panel, PANEL);
    }

    template <int ROWS>
    void block(int64_t row, int64_t count) {
        if constexpr (ROWS > 1)
            if (count < ROWS) return block<ROWS - 1>(row, count);
        int64_t window = texts_.window, begin = begin_, end = end_;
        if (window) {
            begin = std::max(begin, (row - window) / PANEL * PANEL);
            end = std::min(end, row + ROWS + window);
        }
        int64_t padded = (end - begin + PANEL - 1) / PANEL * PANEL, stride = padded + STAGGER;
        for (int r = 0; r < ROWS; r++)
            for (int64_t d = 0; d < dim_; d++)
                memory_.queries[d * ROWS + r] = qkv_[(row + r) * texts_.row() + d] * texts_.scale;
        const float* keys = memory_.keys + (begin - begin_) * dim_;
        for (int64_t at = 0; at < padded; at += PANEL)
            score_panel<ROWS>(memory_.queries, keys + at * dim_, dim_, memory_.scores + at, stride);
        float sums[ROWS];
        for (int r = 0; r < ROWS; r++) {
            int64_t first = window ? std::max<int64_t>(0, row + r - window) : 0;
            int64_t last = window ? std::min(seen_, row + r + window + 1) : seen_;
            sums[r] = to_weights(memory_.scores + r * stride, first - begin, last - begin, padded);
        }
        const float* values = memory_.values + (begin - begin_) * dim_;
        int64_t out_stride = texts_.heads * dim_, d = 0;
        float* out = out_ + row * out_stride;
        for (; d + PANEL <= dim_; d += PANEL)
            weigh<ROWS, 2>(memory_.scores, stride, values + d, dim_, end - begin, sums, out + d, out_stride);
        if (d < dim_) weigh<ROWS, 1>(memory_.scores, stride, values + d, dim_, end - begin, sums, out + d, out_stride);
    }
};

}  // namespace

extern "C" {

// qkv [tokens, 3, heads, dim] -> out [tokens, heads, dim]; `dim` is a multiple of 16. Text i has the tokens from
// starts[i] to starts[i + 1], and attends to the first seen[i] of them.
void millrace_text_attention(const float* qkv, float* out, const int64_t* starts, const int64_t* seen, int64_t texts,
                             int64_t heads, int64_t dim, int64_t window, float scale) {
    Texts all{qkv, out, starts, seen, heads, dim, window, scale};
    std::vector<Task> tasks;
    int64_t work = 0;
    // The longest texts come last and are the first to be shared out.
    for (int64_t text = texts - 1; text >= 0; text--) {
        int64_t length = starts[text + 1] - starts[text];
        work += length * seen[text] * heads;
        for (int64_t head = 0; head < heads; head++)
            for (int64_t first = 0; first < length; first += CHUNK) tasks.push_back({text, head, first});
    }
    pool::for_each(tasks.size(), work >= WORK_TO_SHARE, [&](int64_t i) {
        static thread_local Scratch memory;
        Head(all, tasks[i], memory);
    });
}
}
