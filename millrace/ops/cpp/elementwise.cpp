// Per-token kernels: RMS norm with and without the residual sum, gated activation, and the op between the QKV
// projection and attention (QK norm, RoPE, cache write).
#include "activation.h"
#include "pool.h"
#include "vec.h"

namespace {

// Minimum number of items for which other threads are used; lower for rotations and activations, which cost more.
constexpr int64_t MIN_PARALLEL = 1 << 15, MIN_PARALLEL_SLOW = 1 << 13;
constexpr int64_t ROWS_PER_PIECE = 16;

// Calls f(row) for all rows, in tasks of up to 16 rows, several per thread.
template <typename F>
void for_rows(int64_t rows, int64_t width, int64_t enough, F f) {
    int64_t size = rows / (2 * pool::threads());
    size = size < 1 ? 1 : size > ROWS_PER_PIECE ? ROWS_PER_PIECE : size;
    pool::for_each((rows + size - 1) / size, rows * width >= enough, [&](int64_t piece) {
        int64_t end = (piece + 1) * size;
        for (int64_t row = piece * size; row < end && row < rows; row++) f(row);
    });
}

// WHOLE: the width is a multiple of 16, as it nearly always is, so there is no partial vector.
template <bool WHOLE, typename T>
inline vf load_lanes(const T* p, int n) {
    return WHOLE ? load(p) : load_upto(p, n);
}

template <bool WHOLE, typename T>
inline void store_lanes(T* p, vf v, int n) {
    WHOLE ? store(p, v) : store_upto(p, v, n);
}

// Stores a vector and returns its stored value, rounded to the dtype.
template <bool WHOLE>
inline vf keep_lanes(float* p, vf v, int n) {
    store_lanes<WHOLE>(p, v, n);
    return v;
}

template <bool WHOLE>
inline vf keep_lanes(bf16* p, vf v, int n) {
    vh kept = to_bf16(v);
    memcpy(p, &kept, WHOLE || n >= LANES ? sizeof kept : n * sizeof(bf16));
    return widen(kept);
}

template <bool WHOLE, bool SUM, typename T>
void norm_row(const T* x, const T* residual, const float* weight, T* out, T* total, int64_t dim, float eps) {
    constexpr int SUMS = 4;  // independent sums, so that none waits for the previous one
    vf squares[SUMS] = {};
    auto add = [&](int64_t i, vf& sum) {
        vf v = load_lanes<WHOLE>(x + i, dim - i);
        if (SUM) v = keep_lanes<WHOLE>(total + i, v + load_lanes<WHOLE>(residual + i, dim - i), dim - i);
        sum = fma(v, v, sum);
    };
    int64_t i = 0;
    for (; i + SUMS * LANES <= dim; i += SUMS * LANES)
#pragma GCC unroll 4
        for (int turn = 0; turn < SUMS; turn++) add(i + turn * LANES, squares[turn]);
#pragma GCC unroll 4
    for (int turn = 0; turn < SUMS; turn++, i += LANES)
        if (i < dim) add(i, squares[turn]);
    float scale = 1.0f / sqrtf(sum_lanes((squares[0] + squares[1]) + (squares[2] + squares[3])) / dim + eps);
    const T* source = SUM ? total : x;
    for (i = 0; i < dim; i += LANES) {
        int n = dim - i;
        store_lanes<WHOLE>(out + i, load_lanes<WHOLE>(source + i, n) * scale * load_lanes<WHOLE>(weight + i, n), n);
    }
}

template <bool SUM, typename T>
void norm(const T* x, const T* residual, const float* weight, T* out, T* total, int64_t rows, int64_t dim, float eps) {
    auto one = dim % LANES ? norm_row<false, SUM, T> : norm_row<true, SUM, T>;
    for_rows(rows, dim, MIN_PARALLEL, [&](int64_t row) {
        int64_t at = row * dim;
        one(x + at, SUM ? residual + at : nullptr, weight, out + at, SUM ? total + at : nullptr, dim, eps);
    });
}

template <typename T>
void norm(const T* x, const T* residual, const float* weight, T* out, T* total, int64_t rows, int64_t dim, float eps) {
    (residual ? norm<true, T> : norm<false, T>)(x, residual, weight, out, total, rows, dim, eps);
}

template <bool WHOLE, typename T>
void gated_row(const T* gate, T* out, int64_t inner, int kind) {
    const T* up = gate + inner;
    for (int64_t i = 0; i < inner; i += LANES) {
        int n = inner - i;
        vf active = activate(load_lanes<WHOLE>(gate + i, n), kind);
        store_lanes<WHOLE>(out + i, active * load_lanes<WHOLE>(up + i, n), n);
    }
}

template <typename T>
void gated(const T* gate_up, T* out, int64_t rows, int64_t inner, int kind) {
    auto one = inner % LANES ? gated_row<false, T> : gated_row<true, T>;
    for_rows(rows, inner, MIN_PARALLEL_SLOW,
             [&](int64_t row) { one(gate_up + row * 2 * inner, out + row * inner, inner, kind); });
}

struct QkvShape {
    int64_t heads, kv_heads, head_dim, rotary_dim, num_blocks, block_size;
    float eps;
};

// Rotates pairs (a, b).
inline void rotate(vf a, vf b, vf cosine, vf sine, vf& first, vf& second) {
    first = fma(a, cosine, -b * sine);
    second = fma(b, cosine, a * sine);
}

// The common case: the whole head is rotated, without a norm.
template <typename T, typename O>
void rotate_head(const T* x, O* out, const float* angles, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        vf first, second;
        rotate(load(x + i), load(x + half + i), load(angles + i), load(angles + half + i), first, second);
        store(out + i, first);
        store(out + half + i, second);
    }
}

// Normalises and rotates one head into `out`, which may be `x` itself.
template <typename T, typename O>
void prepare_head(const T* x, O* out, const float* weight, const float* angles, const QkvShape& s) {
    if (!weight && angles && s.rotary_dim == s.head_dim && s.head_dim % (2 * LANES) == 0)
        return rotate_head(x, out, angles, s.head_dim / 2);
    constexpr int MAX_HEAD = 512;
    float head[MAX_HEAD + LANES];
    vf squares = {};
    for (int64_t i = 0; i < s.head_dim; i += LANES) {
        vf v = load_upto(x + i, s.head_dim - i);
        squares = fma(v, v, squares);
        store(head + i, v);
    }
    if (weight) {
        float scale = 1.0f / sqrtf(sum_lanes(squares) / s.head_dim + s.eps);
        for (int64_t i = 0; i < s.head_dim; i += LANES)
            store(head + i, load(head + i) * scale * load_upto(weight + i, s.head_dim - i));
    }
    int64_t half = angles ? s.rotary_dim / 2 : 0;
    for (int64_t i = 0; i < half; i += LANES) {
        int n = half - i;
        vf a = load_upto(head + i, n), b = load_upto(head + half + i, n);
        vf first, second;
        rotate(a, b, load_upto(angles + i, n), load_upto(angles + half + i, n), first, second);
        store_upto(head + i, first, n);
        store_upto(head + half + i, second, n);
    }
    for (int64_t i = 0; i < s.head_dim; i += LANES) store_upto(out + i, load(head + i), s.head_dim - i);
}

// Quantises a head to int8: value = item * scale; the largest item is 127.
template <typename T>
void quantise_head(const T* x, int8_t* out, float* scale, int64_t dim) {
    vf largest = {};
    for (int64_t i = 0; i < dim; i += LANES) {
        vf v = load_upto(x + i, dim - i);
        largest = max(largest, max(v, -v));
    }
    float top = max_lanes(largest);
    *scale = top > 0 ? top / 127 : 1;
    constexpr float NEAREST = 12582912.0f;  // 1.5 x 2^23: adding it rounds to an integer, ties to even
    for (int64_t i = 0; i < dim; i += LANES) {
        vf number = (load_upto(x + i, dim - i) / *scale + NEAREST) - NEAREST;
        vb items = __builtin_convertvector(min(max(number, splat(-127.0f)), splat(127.0f)), vb);
        memcpy(out + i, &items, dim - i < LANES ? dim - i : LANES);
    }
}

// Stores a head in four bits: value = number * scale + lowest, both bfloat16 in the halves of one word.
inline void quantise_head(const float* x, nibbles* out, uint32_t* word, int64_t dim) {
    vf low = load(x), high = low;
    for (int64_t i = LANES; i < dim; i += LANES) low = min(low, load(x + i)), high = max(high, load(x + i));
    float first = -max_lanes(-low), step = (max_lanes(high) - first) / 15;
    uint32_t lowest = to_bf16(splat(first))[0], scale = to_bf16(splat(step))[0];
    if (!(step > 0) || scale == 0) scale = 0x3f80;  // 1
    *word = scale | lowest << 16;
    vf by = widen(vh{} + uint16_t(scale)), from = widen(vh{} + uint16_t(lowest));
    constexpr float NEAREST = 12582912.0f;  // 1.5 x 2^23: adding it rounds to an integer, ties to even
    for (int64_t i = 0; i < dim; i += LANES, out += LANES / 2) {
        vf number = ((load(x + i) - from) / by + NEAREST) - NEAREST;
        vb items = __builtin_convertvector(min(max(number, splat(0.0f)), splat(15.0f)), vb);
        for (int k = 0; k < LANES / 2; k++) out[k].bits = items[k] | items[k + LANES / 2] << 4;
    }
}

// Writes keys and values to a cache of items C: the model's dtype, or float16 if that is float32.
template <typename T, typename C>
struct WideCache {
    C* kv;
    const QkvShape& s;

    void put(int64_t block, int64_t head, int64_t offset, const T* key, const T* value, const float* norm,
             const float* angles) const {
        int64_t values_at = s.num_blocks * s.kv_heads * s.block_size * s.head_dim;
        C* place = kv + ((block * s.kv_heads + head) * s.block_size + offset) * s.head_dim;
        prepare_head(key, place, norm, angles, s);
        for (int64_t i = 0; i < s.head_dim; i += LANES)
            store_upto(place + values_at + i, load_upto(value + i, s.head_dim - i), s.head_dim - i);
    }
};

// The same for an int8 cache. Keys are first rounded to the model's dtype, as if a plain cache were quantised.
template <typename T>
struct NarrowCache {
    int8_t* kv;
    const QkvShape& s;

    void put(int64_t block, int64_t head, int64_t offset, const T* key, const T* value, const float* norm,
             const float* angles) const {
        constexpr int MAX_HEAD = 512;
        T prepared[MAX_HEAD];
        prepare_head(key, prepared, norm, angles, s);
        int64_t head_items = s.block_size * (s.head_dim + int64_t(sizeof(float)));
        int8_t* start = kv + (block * s.kv_heads + head) * head_items;
        const T* both[] = {prepared, value};
        for (const T* x : both) {
            auto* scales = (float*)(start + s.block_size * s.head_dim);
            quantise_head(x, start + offset * s.head_dim, scales + offset, s.head_dim);
            start += s.num_blocks * s.kv_heads * head_items;
        }
    }
};

// The same for a four-bit cache, whose keys are rotated. `shift` [kv_heads, head_dim] is subtracted from them, or null.
template <typename T>
struct FourBitCache {
    uint32_t* kv;
    const float* shift;
    const QkvShape& s;

    void put(int64_t block, int64_t head, int64_t offset, const T* key, const T* value, const float* norm,
             const float* angles) const {
        constexpr int MAX_HEAD = 512;
        T prepared[MAX_HEAD];
        float numbers[MAX_HEAD];
        prepare_head(key, prepared, norm, angles, s);
        int64_t words = s.head_dim / 8, head_words = s.block_size * (words + 1);
        uint32_t* start = kv + (block * s.kv_heads + head) * head_words;
        const T* both[] = {prepared, value};
        for (const T* x : both) {
            for (int64_t i = 0; i < s.head_dim; i += LANES) store(numbers + i, load(x + i));
            if (x == prepared && shift)
                for (int64_t i = 0; i < s.head_dim; i += LANES)
                    store(numbers + i, load(numbers + i) - load(shift + head * s.head_dim + i));
            if (x == prepared) rotate_numbers(numbers, s.head_dim);
            quantise_head(numbers, (nibbles*)(start + offset * words), start + s.block_size * words + offset, s.head_dim);
            start += s.num_blocks * s.kv_heads * head_words;
        }
    }
};

template <typename T, typename C>
void prepare_qkv(T* qkv, const float* step_angles, const float* q_norm, const float* k_norm, const C& cache,
                 const int64_t* block_ids, const int64_t* offsets, int64_t tokens, const QkvShape& s) {
    int64_t width = (s.heads + 2 * s.kv_heads) * s.head_dim;
    for_rows(tokens, width, MIN_PARALLEL_SLOW, [&](int64_t token) {
        T* head = qkv + token * width;
        const float* angles = step_angles ? step_angles + token * s.rotary_dim : nullptr;
        for (int64_t h = 0; h < s.heads; h++, head += s.head_dim) prepare_head(head, head, q_norm, angles, s);
        for (int64_t h = 0; h < s.kv_heads; h++, head += s.head_dim)
            cache.put(block_ids[token], h, offsets[token], head, head + s.kv_heads * s.head_dim, k_norm, angles);
    });
}

template <typename T>
void prepare_qkv(int kv_dtype, T* qkv, const float* step_angles, const float* q_norm, const float* k_norm,
                 const float* key_shift, void* kv, const int64_t* block_ids, const int64_t* offsets, int64_t tokens, const QkvShape& s) {
    if (kv_dtype == INT8)
        prepare_qkv(qkv, step_angles, q_norm, k_norm, NarrowCache<T>{(int8_t*)kv, s}, block_ids, offsets, tokens, s);
    else if (kv_dtype == INT4)
        prepare_qkv(qkv, step_angles, q_norm, k_norm, FourBitCache<T>{(uint32_t*)kv, key_shift, s}, block_ids,
                    offsets, tokens, s);
    else if (kv_dtype == F16)
        prepare_qkv(qkv, step_angles, q_norm, k_norm, WideCache<T, f16>{(f16*)kv, s}, block_ids, offsets, tokens, s);
    else
        prepare_qkv(qkv, step_angles, q_norm, k_norm, WideCache<T, T>{(T*)kv, s}, block_ids, offsets, tokens, s);
}

}  // namespace

extern "C" {

// x *= by, in place, rounded once.
void millrace_scale(int dtype, void* x, int64_t count, float by) {
    for (int64_t i = 0; i < count; i += LANES) {
        int n = count - i;
        if (dtype == F32)
            store_upto((float*)x + i, load_upto((float*)x + i, n) * by, n);
        else
            store_upto((bf16*)x + i, load_upto((bf16*)x + i, n) * by, n);
    }
}

void millrace_norm(int dtype, const void* x, const void* residual, const float* weight, void* out, void* total,
                   int64_t rows, int64_t dim, float eps) {
    if (dtype == F32)
        norm((const float*)x, (const float*)residual, weight, (float*)out, (float*)total, rows, dim, eps);
    else
        norm((const bf16*)x, (const bf16*)residual, weight, (bf16*)out, (bf16*)total, rows, dim, eps);
}

void millrace_gated(int dtype, int kind, const void* gate_up, void* out, int64_t rows, int64_t inner) {
    if (dtype == F32)
        gated((const float*)gate_up, (float*)out, rows, inner, kind);
    else
        gated((const bf16*)gate_up, (bf16*)out, rows, inner, kind);
}

void millrace_prepare_qkv(int dtype, int kv_dtype, void* qkv, const float* step_angles, const float* q_norm,
                          const float* k_norm, const float* key_shift, void* kv, const int64_t* block_ids,
                          const int64_t* offsets, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t rotary_dim,
                          int64_t num_blocks, int64_t block_size, float eps) {
    QkvShape s{heads, kv_heads, head_dim, rotary_dim, num_blocks, block_size, eps};
    if (dtype == F32)
        prepare_qkv(kv_dtype, (float*)qkv, step_angles, q_norm, k_norm, key_shift, kv, block_ids, offsets, tokens,
                    s);
    else
        prepare_qkv(kv_dtype, (bf16*)qkv, step_angles, q_norm, k_norm, key_shift, kv, block_ids, offsets, tokens,
                    s);
}
}
