// What plain vectors compute of a tile of 64 keys, all in float32: scores, weights, sums of weighted values. Every query
// has the same operations in the same order, whatever the other queries. attention.cpp uses a Scratch, latent.cpp has
// one of its own (M).
#pragma once

#include "attention/attention.h"

constexpr int ROWS = 4;  // query vectors held in registers at once
constexpr int KEY_VECTORS = KEYS / LANES;

// Query vectors of a unit: many for prompts, so that a tile's keys are transposed for many queries at once.
constexpr int MAX_QUERIES = 12 * QUERIES;

// Queries, values and sums have rows of `width` floats, the head's size in whole vectors: rows of MAX_HEAD would fall
// into few sets of the L1 cache.
struct Scratch {
    alignas(64) float queries[MAX_QUERIES * MAX_HEAD];
    alignas(64) float keys[MAX_HEAD][KEYS];  // transposed
    alignas(64) float values[KEYS * MAX_HEAD];
    alignas(64) float scores[MAX_QUERIES][KEYS];
    alignas(64) float sums[MAX_QUERIES * MAX_HEAD];
    alignas(64) vf weights[MAX_QUERIES];
    float largest[MAX_QUERIES];
    int32_t positions[MAX_QUERIES];  // -1 beyond the unit's queries
    int64_t width, head_dim;

    float* query_at(int64_t i) { return queries + i * width; }
    float* sums_at(int64_t i) { return sums + i * width; }
};

#if defined(__aarch64__)
// out[row] = sum of vectors[i] * scalars[row][i], for ROWS rows and LANES columns; added to `out` if `adds`. For NEON,
// whose registers hold four floats: sums of vectors of sixteen would not stay in registers.
inline void sum_products(float* out, int64_t out_stride, const float* vectors, int64_t vector_stride,
                         const float* scalars, int64_t scalar_stride, int64_t n, bool adds) {
    // Every loop over an array of sums must be unrolled; otherwise it stays in memory.
    float32x4_t sums[ROWS][4];
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++)
            sums[row][part] = adds ? vld1q_f32(out + row * out_stride + 4 * part) : vdupq_n_f32(0);
    for (int64_t i = 0; i < n; i++, vectors += vector_stride) {
        float32x4_t vector[4] = {vld1q_f32(vectors), vld1q_f32(vectors + 4), vld1q_f32(vectors + 8),
                                 vld1q_f32(vectors + 12)};
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; row++) {
            float32x4_t scalar = vld1q_dup_f32(scalars + row * scalar_stride + i);
#pragma GCC unroll 4
            for (int part = 0; part < 4; part++) sums[row][part] = vfmaq_f32(sums[row][part], vector[part], scalar);
        }
    }
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++) vst1q_f32(out + row * out_stride + 4 * part, sums[row][part]);
}
#endif

// Scores of ROWS queries. A function of its own, like those below: inlined, its pointers would not stay in registers.
inline __attribute__((noinline)) void score(Scratch& m, int first) {
#if defined(__aarch64__)
    for (int v = 0; v < KEYS; v += LANES)
        sum_products(&m.scores[first][v], KEYS, &m.keys[0][v], KEYS, m.query_at(first), m.width, m.head_dim, false);
#else
    vf sums[ROWS][KEY_VECTORS] = {};
    const float *queries = m.query_at(first), *keys = m.keys[0];
    const int64_t width = m.width;
    for (int64_t d = 0; d < m.head_dim; d++, queries++, keys += KEYS) {
        vf query[ROWS];
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; row++) query[row] = splat(queries[row * width]);
#pragma GCC unroll 4
        for (int v = 0; v < KEY_VECTORS; v++) {
            vf key = load(keys + v * LANES);
#pragma GCC unroll 4
            for (int row = 0; row < ROWS; row++) sums[row][v] = fma(key, query[row], sums[row][v]);
        }
    }
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
        for (int v = 0; v < KEY_VECTORS; v++) store(&m.scores[first + row][v * LANES], sums[row][v]);
#endif
}

// Scores of keys that a query does not see become -inf: it sees `before` < key <= `last` of the tile.
inline void hide(float* scores, int before, int last) {
    const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int v = 0; v < KEYS; v += LANES) {
        vi key = lanes + v;
        store(scores + v, (key <= last) & (key > before) ? load(scores + v) : splat(-INFINITY));
    }
}

// Turns the scores of ROWS queries into weights relative to the largest so far, and rescales their earlier sums.
template <typename M>
inline __attribute__((noinline)) void weigh(M& m, int first, int64_t tile, int64_t window, float softcap) {
    vf top[ROWS];
    for (int row = 0; row < ROWS; row++) {
        float* scores = m.scores[first + row];
        if (softcap > 0)
            for (int v = 0; v < KEYS; v += LANES) store(scores + v, softcap * tanh(load(scores + v) / softcap));
        int64_t position = m.positions[first + row];
        int last = std::min<int64_t>(position - tile, KEYS);
        int before = window ? std::max<int64_t>(position - window - tile, -1) : -1;
        if (last < KEYS - 1 || before >= 0) hide(scores, before, last);
        top[row] = max(max(load(scores), load(scores + LANES)), max(load(scores + 2 * LANES), load(scores + 3 * LANES)));
    }
    for (int row = 0; row < ROWS; row++) {
        int i = first + row;
        float largest = std::max(m.largest[i], max_lanes(top[row]));
        float base = largest == -INFINITY ? 0.0f : largest;  // no key seen yet: all weights are 0
        if (largest != m.largest[i]) {
            float shrink = exp(splat(m.largest[i] - base))[0];
            m.largest[i] = largest;
            m.weights[i] *= shrink;
            for (int64_t d = 0; d < m.width; d += LANES) store(m.sums_at(i) + d, load(m.sums_at(i) + d) * shrink);
        }
        vf total = m.weights[i];
#pragma GCC unroll 4
        for (int v = 0; v < KEY_VECTORS; v++) {
            float* scores = &m.scores[i][v * LANES];
            vf weight = exp(load(scores) - base);
            store(scores, weight);
            total += weight;
        }
        m.weights[i] = total;
    }
}

// Adds VECTORS vectors of the values, from column d on, times the weights of ROWS queries. value(k, d): a vector of the
// values of key k.
template <int VECTORS, typename M, typename F>
inline __attribute__((always_inline)) void add_columns(M& m, int first, int64_t d, F value) {
    vf sums[ROWS][VECTORS];
    float* targets = m.sums_at(first) + d;
    const float* weights = m.scores[first];
    const int64_t width = m.width;
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sums[row][v] = load(targets + row * width + v * LANES);
    for (int k = 0; k < KEYS; k++) {
        vf weight[ROWS];
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; row++) weight[row] = splat(weights[row * KEYS + k]);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            vf x = value(k, d + v * LANES);
#pragma GCC unroll 4
            for (int row = 0; row < ROWS; row++) sums[row][v] = fma(x, weight[row], sums[row][v]);
        }
    }
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) store(targets + row * width + v * LANES, sums[row][v]);
}

// Adds the values of a tile times the weights of ROWS queries.
template <typename M, typename F>
inline __attribute__((always_inline)) void add_values(M& m, int first, F value) {
    int64_t d = 0;
    for (; d + 4 * LANES <= m.head_dim; d += 4 * LANES) add_columns<4>(m, first, d, value);
    for (; d < m.head_dim; d += LANES) add_columns<1>(m, first, d, value);
}

// The same with values that were converted to floats.
template <typename M>
inline __attribute__((noinline)) void add_converted(M& m, int first) {
#if defined(__aarch64__)
    for (int64_t d = 0; d < m.head_dim; d += LANES)
        sum_products(m.sums_at(first) + d, m.width, m.values + d, m.width, m.scores[first], KEYS, KEYS, true);
#else
    const float* values = m.values;
    const int64_t width = m.width;
    add_values(m, first, [=](int k, int64_t d) { return load(values + k * width + d); });
#endif
}
