// Adds the low-rank products of LoRA adapters to the output of a linear, each token with the adapter in its slot.
//
// A slot holds, for each part of the outputs that its adapter changes, A [rank, k] and B [rank, outputs]; the parts
// follow one another. Matrices are float32, or bfloat16 where the lowest bit of their address is set, whatever the type of
// the inputs: in a model in float32, adapters that were saved in bfloat16 are read in half the bytes. Tokens with one
// adapter, wherever they stand, are runs, which read the matrices once for several tokens.
// Sums are in float32 over the inputs in a fixed order, so a token's result depends on no other.
#include "kernels.h"
#include "pool.h"
#include "vec.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace {

constexpr int64_t WORK_TO_SHARE = 1 << 15;  // products of a call, below which waking a thread does not pay off
constexpr int64_t MIN_RUN = 8, MAX_RUN = 32;  // the longest run has between so many tokens
constexpr int64_t TASKS_PER_THREAD = 2;
// Tokens, rows of A, and vectors of outputs that are computed at once: with fewer, each sum waits for its last product.
constexpr int JOINT = 4;
constexpr int64_t PANEL = JOINT * LANES;  // outputs that are computed at once
constexpr int64_t MIN_TO_COPY = 8;        // tokens for which copying a panel of B pays off
constexpr int64_t MAX_RANK = 256;         // of adapters, for copied panels
// Up to so many tokens wait for the matrices rather than for products, so what is read next is requested ahead.
constexpr int FEW = 2;

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline void put(float* p, float x) { *p = x; }

inline void put(bf16* p, float x) {
    vh rounded = to_bf16(splat(x));
    p->bits = rounded[0];
}

// Adds the upper half to the lower one, until one sum is left.
inline float sum_of(vf v) {
#if defined(__AVX512F__)
    __m512d all = (__m512d)v;
    __m256 eight = (__m256)_mm256_castpd_ps(_mm512_castpd512_pd256(all));
    eight = _mm256_add_ps(eight, _mm256_castpd_ps(_mm512_extractf64x4_pd(all, 1)));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#else
    for (int width = LANES / 2; width; width /= 2)
        for (int lane = 0; lane < width; lane++) v[lane] += v[lane + width];
    return v[0];
#endif
}

struct Call {
    int64_t x_stride, out_stride;
    const int32_t* slots;
    const int64_t *a, *b;
    const int32_t* ranks;
    const float* scales;
    const int64_t* sizes;
    int64_t parts, k;
};

// low[i][j] = scale * A[j] · x[tokens[i]], for COUNT tokens and ROWS rows of A.
template <typename T, typename W, int COUNT, int ROWS>
void shrink_rows(const T* x, int64_t x_stride, const int32_t* tokens, const W* a, int64_t k, float scale, float* low,
                 int64_t low_stride) {
    const T* rows[COUNT];
#pragma GCC unroll 4
    for (int i = 0; i < COUNT; i++) rows[i] = x + tokens[i] * x_stride;
    int64_t whole = k / LANES * LANES;
    vf sums[ROWS][COUNT] = {};
    for (int64_t at = 0; at < whole; at += LANES) {
        vf inputs[COUNT];
#pragma GCC unroll 4
        for (int i = 0; i < COUNT; i++) inputs[i] = load(rows[i] + at);
#pragma GCC unroll 4
        for (int j = 0; j < ROWS; j++) {
            if (COUNT <= FEW) __builtin_prefetch(a + (j + ROWS) * k + at);
            vf weight = load(a + j * k + at);
#pragma GCC unroll 4
            for (int i = 0; i < COUNT; i++) sums[j][i] = fma(inputs[i], weight, sums[j][i]);
        }
    }
#pragma GCC unroll 4
    for (int j = 0; j < ROWS; j++) {
#pragma GCC unroll 4
        for (int i = 0; i < COUNT; i++) {
            float sum = sum_of(sums[j][i]);
            for (int64_t at = whole; at < k; at++) sum += to_float(rows[i][at]) * to_float(a[j * k + at]);
            low[i * low_stride + j] = sum * scale;
        }
    }
}

template <typename T, typename W, int COUNT>
void shrink(const T* x, int64_t x_stride, const int32_t* tokens, const W* a, int64_t rank, int64_t k, float scale,
            float* low, int64_t low_stride) {
    int64_t r = 0;
    for (; r + JOINT <= rank; r += JOINT)
        shrink_rows<T, W, COUNT, JOINT>(x, x_stride, tokens, a + r * k, k, scale, low + r, low_stride);
    for (; r < rank; r++) shrink_rows<T, W, COUNT, 1>(x, x_stride, tokens, a + r * k, k, scale, low + r, low_stride);
}

// out[tokens[i]] += low[i] B, for COUNT tokens and VECTORS vectors of outputs.
template <typename T, typename B, int COUNT, int VECTORS>
void expand_vectors(T* out, int64_t out_stride, const int32_t* tokens, const B* b, int64_t b_stride, int64_t rank,
                    const float* low, int64_t low_stride) {
    vf sums[VECTORS][COUNT] = {};
    for (int64_t r = 0; r < rank; r++) {
        vf factors[COUNT];
#pragma GCC unroll 4
        for (int i = 0; i < COUNT; i++) factors[i] = splat(low[i * low_stride + r]);
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            if (COUNT <= FEW) __builtin_prefetch(b + r * b_stride + PANEL + j * LANES);
            vf weight = load(b + r * b_stride + j * LANES);
#pragma GCC unroll 4
            for (int i = 0; i < COUNT; i++) sums[j][i] = fma(weight, factors[i], sums[j][i]);
        }
    }
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
#pragma GCC unroll 4
        for (int i = 0; i < COUNT; i++) {
            T* place = out + tokens[i] * out_stride + j * LANES;
            store(place, load(place) + sums[j][i]);
        }
    }
}

// Calls f.template operator()<COUNT>(first) for groups of COUNT tokens, at most JOINT.
template <typename F>
void in_groups(int64_t tokens, F f) {
    int64_t first = 0;
    for (; first + JOINT <= tokens; first += JOINT) f.template operator()<JOINT>(first);
    switch (tokens - first) {
        case 1: return f.template operator()<1>(first);
        case 2: return f.template operator()<2>(first);
        case 3: return f.template operator()<3>(first);
        default: return;
    }
}

// Tokens with one adapter: `count` in the order of tokens by adapter, from `first` on.
struct Run {
    int64_t first, count;
};

// Calls f with the matrices at an address as a table has it.
template <typename F>
void typed(int64_t address, F f) {
    if (address & 1)
        f((const bf16*)(address - 1));
    else
        f((const float*)address);
}

template <typename T>
struct Product {
    const Call& call;
    const T* x;
    T* out;
    const int32_t* order;  // tokens by adapter
    float* low;            // [tokens][low_stride]: in that order, the ranks of all parts
    int64_t low_stride;

    int64_t slot(const Run& run) const { return call.slots[order[run.first]]; }
    const int32_t* ranks(const Run& run) const { return call.ranks + slot(run) * call.parts; }

    // Piece `piece` of `pieces` of the rows of A.
    void shrink_run(const Run& run, int64_t piece, int64_t pieces) const {
        typed(call.a[slot(run)], [&](const auto* a) { shrink_with(a, run, piece, pieces); });
    }

    // Piece `piece` of `pieces` of the outputs.
    void expand_run(const Run& run, int64_t piece, int64_t pieces) const {
        typed(call.b[slot(run)], [&](const auto* b) { expand_with(b, run, piece, pieces); });
    }

  private:
    template <typename W>
    void shrink_with(const W* all, const Run& run, int64_t piece, int64_t pieces) const {
        int64_t total = 0;
        for (int64_t part = 0; part < call.parts; part++) total += ranks(run)[part];
        int64_t units = (total + JOINT - 1) / JOINT;
        int64_t from = units * piece / pieces * JOINT, to = units * (piece + 1) / pieces * JOINT;
        int64_t first = 0;
        for (int64_t part = 0; part < call.parts; part++) {
            int64_t last = first + ranks(run)[part], begin = std::max(first, from), end = std::min(last, to);
            float scale = call.scales[slot(run) * call.parts + part];
            // A few rows of A at a time, for all tokens.
            for (; begin < end; begin += JOINT) {
                int64_t rows = std::min<int64_t>(JOINT, end - begin);
                const W* a = all + begin * call.k;
                in_groups(run.count, [&]<int COUNT>(int64_t at) {
                    at += run.first;
                    shrink<T, W, COUNT>(x, call.x_stride, order + at, a, rows, call.k, scale,
                                        low + at * low_stride + begin, low_stride);
                });
            }
            first = last;
        }
    }

    template <typename W>
    void expand_with(const W* b, const Run& run, int64_t piece, int64_t pieces) const {
        int64_t total = 0;
        for (int64_t part = 0; part < call.parts; part++)
            if (ranks(run)[part]) total += (call.sizes[part] + PANEL - 1) / PANEL;
        int64_t from = total * piece / pieces, to = total * (piece + 1) / pieces;
        int64_t output = 0, panel = 0, rank_at = 0;
        for (int64_t part = 0; part < call.parts; part++) {
            int64_t rank = ranks(run)[part], size = call.sizes[part];
            for (int64_t at = 0; rank && at < size; at += PANEL, panel++)
                if (from <= panel && panel < to)
                    expand_panel(run, b + at, size, rank, rank_at, output + at, std::min(PANEL, size - at));
            b += rank * size, rank_at += rank, output += size;
        }
    }

    // `count` outputs from `output` on, at most PANEL.
    template <typename W>
    void expand_panel(const Run& run, const W* b, int64_t size, int64_t rank, int64_t rank_at, int64_t output,
                      int64_t count) const {
        if (run.count < MIN_TO_COPY || count < PANEL || rank > MAX_RANK)
            return expand_from(run, b, size, rank, rank_at, output, count);
        alignas(64) float panel[MAX_RANK * PANEL];
        for (int64_t r = 0; r < rank; r++)
            for (int64_t at = 0; at < PANEL; at += LANES) store(panel + r * PANEL + at, load(b + r * size + at));
        expand_from(run, panel, PANEL, rank, rank_at, output, count);
    }

    template <typename B>
    void expand_from(const Run& run, const B* b, int64_t b_stride, int64_t rank, int64_t rank_at, int64_t output,
                     int64_t count) const {
        in_groups(run.count, [&]<int COUNT>(int64_t first) {
            first += run.first;
            const int32_t* tokens = order + first;
            T* place = out + output;
            const float* own = low + first * low_stride + rank_at;
            if (count == PANEL)
                return expand_vectors<T, B, COUNT, JOINT>(place, call.out_stride, tokens, b, b_stride, rank, own,
                                                          low_stride);
            int64_t at = 0;
            for (; at + LANES <= count; at += LANES)
                expand_vectors<T, B, COUNT, 1>(place + at, call.out_stride, tokens, b + at, b_stride, rank, own,
                                               low_stride);
            for (; at < count; at++) {
                for (int64_t i = 0; i < COUNT; i++) {
                    float sum = 0;
                    for (int64_t r = 0; r < rank; r++) sum += to_float(b[r * b_stride + at]) * own[i * low_stride + r];
                    T* target = place + tokens[i] * call.out_stride + at;
                    put(target, to_float(*target) + sum);
                }
            }
        });
    }
};

// The tokens by adapter, each adapter's in their own order.
const int32_t* by_slot(const int32_t* slots, int64_t tokens) {
    static thread_local std::vector<int32_t> order;
    order.resize(tokens);
    std::iota(order.begin(), order.end(), 0);
    if (!std::is_sorted(slots, slots + tokens))
        std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return slots[a] < slots[b]; });
    return order.data();
}

template <typename T>
void add_all(const Call& call, const T* x, T* out, int64_t tokens) {
    // As long as they can be, if there are enough for all threads.
    int64_t num_tasks = TASKS_PER_THREAD * pool::threads();
    int64_t longest = std::clamp((tokens / num_tasks + JOINT - 1) / JOINT * JOINT, MIN_RUN, MAX_RUN);
    const int32_t* order = by_slot(call.slots, tokens);
    std::vector<Run> runs;
    int64_t work = 0, widest = 0;
    for (int64_t first = 0, last = 0; first < tokens; first = last) {
        int32_t slot = call.slots[order[first]];
        while (last < tokens && last - first < longest && call.slots[order[last]] == slot) last++;
        const int32_t* ranks = call.ranks + slot * call.parts;
        int64_t width = 0;
        for (int64_t part = 0; part < call.parts; part++) {
            width += ranks[part];
            work += (last - first) * ranks[part] * (call.k + call.sizes[part]);
        }
        if (width) runs.push_back({first, last - first});
        widest = std::max(widest, width);
    }
    if (runs.empty()) return;
    static thread_local std::vector<float> memory;
    if ((int64_t)memory.size() < tokens * widest) memory.resize(tokens * widest);
    Product<T> product{call, x, out, order, memory.data(), widest};
    int64_t count = runs.size(), pieces = (num_tasks + count - 1) / count;
    if (work < WORK_TO_SHARE || pieces == 1) {
        pool::for_each(count, work >= WORK_TO_SHARE, [&](int64_t index) {
            product.shrink_run(runs[index], 0, 1);
            product.expand_run(runs[index], 0, 1);
        });
        return;
    }
    pool::for_each(count * pieces, true,
                   [&](int64_t task) { product.shrink_run(runs[task / pieces], task % pieces, pieces); });
    pool::for_each(count * pieces, true,
                   [&](int64_t task) { product.expand_run(runs[task / pieces], task % pieces, pieces); });
}

}  // namespace

extern "C" void millrace_add_lora(int dtype, const void* x, int64_t x_stride, void* out, int64_t out_stride,
                                  int64_t tokens, const int32_t* slots, const int64_t* a, const int64_t* b,
                                  const int32_t* ranks, const float* scales, const int64_t* sizes, int64_t parts,
                                  int64_t k) {
    Call call{x_stride, out_stride, slots, a, b, ranks, scales, sizes, parts, k};
    if (dtype == F32)
        add_all(call, (const float*)x, (float*)out, tokens);
    else
        add_all(call, (const bf16*)x, (bf16*)out, tokens);
}
