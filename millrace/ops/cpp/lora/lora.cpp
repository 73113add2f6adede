// Adds the low-rank products of LoRA adapters to the output of a linear, each token with the adapter in its slot.
//
// A slot holds, for each part of the outputs that its adapter changes, A [rank, k] and B [rank, outputs]; the parts
// follow one another. Sums are in float32 over the inputs in a fixed order, so a token's result depends on no other.
#include "kernels.h"
#include "pool.h"
#include "vec.h"

#include <algorithm>
#include <vector>

namespace {

constexpr int64_t RUN = 4;  // tokens that share a read of the matrices
constexpr int64_t WORK_TO_SHARE = 1 << 16;  // products of a call, below which waking a thread does not pay off

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

inline float sum_of(vf v) {
    for (int width = LANES / 2; width; width /= 2)
        for (int lane = 0; lane < width; lane++) v[lane] += v[lane + width];
    return v[0];
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

// Rows of A, or vectors of outputs, that are summed at once: with fewer, each sum waits for its last product.
constexpr int64_t JOINT = 4;

// low[i][r + j] = scale * A[r + j] · x[i], for COUNT tokens and ROWS rows of A.
template <typename T, int COUNT, int ROWS>
void shrink_rows(const T* const* x, const T* a, int64_t k, float scale, float* low, int64_t low_stride) {
    int64_t whole = k / LANES * LANES;
    vf sums[ROWS][COUNT] = {};
    for (int64_t at = 0; at < whole; at += LANES) {
        vf inputs[COUNT];
        for (int i = 0; i < COUNT; i++) inputs[i] = load(x[i] + at);
        for (int j = 0; j < ROWS; j++) {
            vf weight = load(a + j * k + at);
            for (int i = 0; i < COUNT; i++) sums[j][i] = fma(inputs[i], weight, sums[j][i]);
        }
    }
    for (int j = 0; j < ROWS; j++) {
        for (int i = 0; i < COUNT; i++) {
            float sum = sum_of(sums[j][i]);
            for (int64_t at = whole; at < k; at++) sum += to_float(x[i][at]) * to_float(a[j * k + at]);
            low[i * low_stride + j] = sum * scale;
        }
    }
}

template <typename T, int COUNT>
void shrink(const T* const* x, const T* a, int64_t rank, int64_t k, float scale, float* low, int64_t low_stride) {
    int64_t r = 0;
    for (; r + JOINT <= rank; r += JOINT) shrink_rows<T, COUNT, JOINT>(x, a + r * k, k, scale, low + r, low_stride);
    for (; r < rank; r++) shrink_rows<T, COUNT, 1>(x, a + r * k, k, scale, low + r, low_stride);
}

// out[i] += low[i] B, for COUNT tokens and VECTORS vectors of outputs from `at` on.
template <typename T, int COUNT, int VECTORS>
void expand_vectors(T* const* out, const T* b, int64_t rank, int64_t size, const float* low, int64_t low_stride,
                    int64_t at) {
    vf sums[VECTORS][COUNT] = {};
    for (int64_t r = 0; r < rank; r++) {
        for (int j = 0; j < VECTORS; j++) {
            vf weight = load(b + r * size + at + j * LANES);
            for (int i = 0; i < COUNT; i++) sums[j][i] = fma(weight, splat(low[i * low_stride + r]), sums[j][i]);
        }
    }
    for (int j = 0; j < VECTORS; j++)
        for (int i = 0; i < COUNT; i++) {
            T* place = out[i] + at + j * LANES;
            store(place, load(place) + sums[j][i]);
        }
}

template <typename T, int COUNT>
void expand(T* const* out, const T* b, int64_t rank, int64_t size, const float* low, int64_t low_stride) {
    int64_t at = 0;
    for (; at + JOINT * LANES <= size; at += JOINT * LANES)
        expand_vectors<T, COUNT, JOINT>(out, b, rank, size, low, low_stride, at);
    for (; at + LANES <= size; at += LANES) expand_vectors<T, COUNT, 1>(out, b, rank, size, low, low_stride, at);
    for (; at < size; at++) {
        for (int64_t i = 0; i < COUNT; i++) {
            float sum = 0;
            for (int64_t r = 0; r < rank; r++) sum += to_float(b[r * size + at]) * low[i * low_stride + r];
            put(out[i] + at, to_float(out[i][at]) + sum);
        }
    }
}

template <typename T, int COUNT>
void add_run(const Call& call, const T* x, T* out, int64_t first) {
    int64_t slot = call.slots[first];
    const int32_t* ranks = call.ranks + slot * call.parts;
    const T* a = (const T*)call.a[slot];
    const T* b = (const T*)call.b[slot];
    int64_t most = 0;
    for (int64_t part = 0; part < call.parts; part++) most = std::max(most, (int64_t)ranks[part]);
    if (!most) return;
    std::vector<float> low(COUNT * most);
    const T* inputs[COUNT];
    T* outputs[COUNT];
    for (int64_t i = 0; i < COUNT; i++) {
        inputs[i] = x + (first + i) * call.x_stride;
        outputs[i] = out + (first + i) * call.out_stride;
    }
    for (int64_t part = 0; part < call.parts; part++) {
        int64_t rank = ranks[part], size = call.sizes[part];
        if (rank) {
            float scale = call.scales[slot * call.parts + part];
            shrink<T, COUNT>(inputs, a, rank, call.k, scale, low.data(), most);
            expand<T, COUNT>(outputs, b, rank, size, low.data(), most);
            a += rank * call.k;
            b += rank * size;
        }
        for (int64_t i = 0; i < COUNT; i++) outputs[i] += size;
    }
}

template <typename T>
void add_all(const Call& call, const T* x, T* out, int64_t tokens) {
    std::vector<int64_t> firsts;
    int64_t work = 0;
    for (int64_t first = 0, last = 0; first < tokens; first = last) {
        while (last < tokens && last - first < RUN && call.slots[last] == call.slots[first]) last++;
        if (!call.slots[first]) continue;
        firsts.push_back(first);
        for (int64_t part = 0; part < call.parts; part++)
            work += (last - first) * call.ranks[call.slots[first] * call.parts + part] * (call.k + call.sizes[part]);
    }
    pool::for_each((int64_t)firsts.size(), work >= WORK_TO_SHARE, [&](int64_t index) {
        int64_t first = firsts[index], last = first + 1;
        while (last < tokens && last - first < RUN && call.slots[last] == call.slots[first]) last++;
        switch (last - first) {
            case 1: return add_run<T, 1>(call, x, out, first);
            case 2: return add_run<T, 2>(call, x, out, first);
            case 3: return add_run<T, 3>(call, x, out, first);
            default: return add_run<T, RUN>(call, x, out, first);
        }
    });
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
