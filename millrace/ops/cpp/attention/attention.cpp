// Causal attention over the paged cache in one pass, with an online softmax.
//
// The unit of work is up to 64 query vectors of one row (a decode row has one per head) against tiles of 64 keys. A
// query sums over the same tiles in the same order, whatever the block size, chunking or batch. This file is the
// version with plain vectors and one KV head per unit; attention_amx.cpp is the version for the matrix unit.
#include "attention/attention.h"
#include "kernels.h"

namespace {

constexpr int ROWS = 4;  // query vectors held in registers at once
constexpr int KEY_VECTORS = KEYS / LANES;
constexpr int64_t MIN_PARALLEL = 1 << 15;  // minimum number of multiplications for which other threads are used

// Query vectors of a unit: many for prompts, so that a tile's keys are transposed for many queries at once.
constexpr int MAX_QUERIES = 4 * QUERIES;

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
};

#if defined(__aarch64__)
// out[row] = sum of vectors[i] * scalars[row][i], for ROWS rows and LANES columns; added to `out` if `adds`. For NEON,
// whose registers hold four floats: sums of vectors of sixteen would not stay in registers.
void sum_products(float* out, int64_t out_stride, const float* vectors, int64_t vector_stride, const float* scalars,
                  int64_t scalar_stride, int64_t n, bool adds) {
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

template <typename T, typename C>
struct Attention : UnitRows<T, C, MAX_QUERIES> {
    using Rows = UnitRows<T, C, MAX_QUERIES>;
    static constexpr bool SCALED = sizeof(C) == 1;
    Scratch& m;
    const int64_t width;
    TileRows<C> tiles[2];
    TileRows<C>*now = tiles, *next = tiles + 1;
    using Rows::s, Rows::positions, Rows::count;

    Attention(const Step& s, const T* queries, const C* kv, T* out, Scratch& scratch)
        : Rows{s, queries, {s, kv}, out, {}, 0, 0, 0},
          m(scratch),
          width((s.head_dim + LANES - 1) / LANES * LANES) {}

    float* query_at(int64_t i) const { return m.queries + i * width; }
    float* sums_at(int64_t i) const { return m.sums + i * width; }

    // Float values are read where they are, if no vector reaches beyond their end.
    bool reads_values_in_place() const {
#if defined(__aarch64__)
        return false;
#else
        return sizeof(C) == sizeof(float) && width == s.head_dim;
#endif
    }

    void run(const Unit& unit) {
        this->begin(unit);
        clear(unit);
        int64_t first_tile = this->lowest / KEYS * KEYS;
        this->locate(unit, unit.kv_head, first_tile, *next);
        for (int64_t tile = first_tile; tile < this->highest; tile += KEYS) {
            std::swap(now, next);
            this->locate(unit, unit.kv_head, tile + KEYS, *next);
            transpose_keys();
            for (int first = 0; first < count; first += ROWS) score(first);
            for (int i = 0; i < count; i++) weigh(i, tile);
            if (reads_values_in_place())
                point_to_values();
            else
                convert_values();
            for (int first = 0; first < count; first += ROWS) add(first);
        }
        finish(unit);
    }

    // Floats per query: sums, partial sums of its weights, largest score.
    static constexpr int64_t STATE = MAX_HEAD + 2 * LANES;

    void clear(const Unit& unit) {
        int64_t rows = (count + ROWS - 1) / ROWS * ROWS;
        memset(m.queries, 0, rows * width * sizeof(float));
        memset(m.sums, 0, rows * width * sizeof(float));
        memset(m.scores, 0, rows * sizeof m.scores[0]);
        for (int i = 0; i < count; i++) {
            m.largest[i] = -INFINITY;
            m.weights[i] = vf{};
            for (int64_t d = 0; d < s.head_dim; d += LANES)
                store(query_at(i) + d, load_upto(this->query(unit, i) + d, s.head_dim - d) * s.scale);
            if (unit.from) restore_state(i, state_of(s, unit, i, STATE));
        }
    }

    void restore_state(int i, const float* state) {
        memcpy(sums_at(i), state, width * sizeof(float));
        m.weights[i] = load(state + MAX_HEAD);
        m.largest[i] = state[MAX_HEAD + LANES];
    }

    void save_state(int i, float* state) const {
        memcpy(state, sums_at(i), width * sizeof(float));
        store(state + MAX_HEAD, m.weights[i]);
        state[MAX_HEAD + LANES] = m.largest[i];
    }

    // Whether sixteen float keys follow each other in the cache, in whole vectors: they are of one block and all seen.
    bool are_in_line(int first) const {
        return sizeof(C) == sizeof(float) && width == s.head_dim && s.block_size % LANES == 0 &&
               now->keys[first + LANES - 1] == now->keys[first] + (LANES - 1) * s.head_dim;
    }

    void transpose_keys() {
        vf rows[LANES];
        for (int first = 0; first < KEYS; first += LANES) {
            bool in_line = are_in_line(first);
            for (int64_t d = 0; d < s.head_dim; d += LANES) {
                if (in_line) {
                    auto* keys = reinterpret_cast<const uint32_t*>(now->keys[first] + d);
                    transpose16(keys, s.head_dim, reinterpret_cast<uint32_t*>(&m.keys[d][first]), KEYS);
                    continue;
                }
                for (int k = 0; k < LANES; k++) {
                    rows[k] = load_upto(now->keys[first + k] + d, s.head_dim - d);
                    if (SCALED) rows[k] *= now->key_scales[first + k];
                }
                transpose(rows, &m.keys[d][first], KEYS);
            }
        }
    }

    void score(int first) {
#if defined(__aarch64__)
        for (int v = 0; v < KEYS; v += LANES)
            sum_products(&m.scores[first][v], KEYS, &m.keys[0][v], KEYS, query_at(first), width, s.head_dim, false);
#else
        vf sums[ROWS][KEY_VECTORS] = {};
        const float* queries = query_at(first);
        for (int64_t d = 0; d < s.head_dim; d++, queries++)
#pragma GCC unroll 4
            for (int v = 0; v < KEY_VECTORS; v++) {
                vf keys = load(&m.keys[d][v * LANES]);
#pragma GCC unroll 4
                for (int row = 0; row < ROWS; row++) sums[row][v] = fma(keys, queries[row * width], sums[row][v]);
            }
        for (int row = 0; row < ROWS; row++)
            for (int v = 0; v < KEY_VECTORS; v++) store(&m.scores[first + row][v * LANES], sums[row][v]);
#endif
    }

    // Turns a query's scores into weights relative to the largest so far, and rescales the earlier sums.
    void weigh(int i, int64_t tile) {
        const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const vf hidden = splat(-INFINITY);
        int last = std::min<int64_t>(positions[i] - tile, KEYS);
        int before = s.window ? std::max<int64_t>(positions[i] - s.window - tile, -1) : -1;
        vf scores[KEY_VECTORS], top = hidden;
        for (int v = 0; v < KEY_VECTORS; v++) {
            vf x = load(&m.scores[i][v * LANES]);
            if (s.softcap > 0) x = s.softcap * tanh(x / s.softcap);
            vi key = lanes + v * LANES;
            scores[v] = (key <= last) & (key > before) ? x : hidden;
            top = max(top, scores[v]);
        }
        float largest = std::max(m.largest[i], max_lanes(top));
        float base = largest == -INFINITY ? 0.0f : largest;  // no key seen yet: all weights are 0
        float shrink = exp(splat(m.largest[i] - base))[0];
        m.largest[i] = largest;
        vf total = m.weights[i] * shrink;
        for (int v = 0; v < KEY_VECTORS; v++) {
            vf weight = exp(scores[v] - base);
            store(&m.scores[i][v * LANES], weight);
            total += weight;
        }
        m.weights[i] = total;
        if (shrink != 1.0f)
            for (int64_t d = 0; d < s.head_dim; d += LANES) store(sums_at(i) + d, load(sums_at(i) + d) * shrink);
    }

    const float* value_rows[KEYS];

    void point_to_values() {
        for (int k = 0; k < KEYS; k++) {
            this->prefetch(*next, k);
            value_rows[k] = reinterpret_cast<const float*>(now->values[k]);
        }
    }

    void convert_values() {
        for (int k = 0; k < KEYS; k++) {
            this->prefetch(*next, k);
            value_rows[k] = m.values + k * width;
            for (int64_t d = 0; d < s.head_dim; d += LANES) {
                vf value = load_upto(now->values[k] + d, s.head_dim - d);
                store(m.values + k * width + d, SCALED ? value * now->value_scales[k] : value);
            }
        }
    }

    void add(int first) {
        int64_t d = 0;
#if defined(__aarch64__)
        for (; d < s.head_dim; d += LANES)
            sum_products(sums_at(first) + d, width, m.values + d, width, m.scores[first], KEYS, KEYS, true);
#else
        for (; d + 4 * LANES <= s.head_dim; d += 4 * LANES) add_columns<4>(first, d);
        for (; d < s.head_dim; d += LANES) add_columns<1>(first, d);
#endif
    }

    template <int VECTORS>
    void add_columns(int first, int64_t d) {
        vf sums[ROWS][VECTORS];
        for (int row = 0; row < ROWS; row++)
            for (int v = 0; v < VECTORS; v++) sums[row][v] = load(sums_at(first + row) + d + v * LANES);
        for (int k = 0; k < KEYS; k++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                vf value = load(value_rows[k] + d + v * LANES);
#pragma GCC unroll 4
                for (int row = 0; row < ROWS; row++) sums[row][v] = fma(value, m.scores[first + row][k], sums[row][v]);
            }
        for (int row = 0; row < ROWS; row++)
            for (int v = 0; v < VECTORS; v++) store(sums_at(first + row) + d + v * LANES, sums[row][v]);
    }

    void finish(const Unit& unit) {
        for (int i = 0; i < count; i++) {
            if (unit.shared_rows) {
                save_state(i, state_of(s, unit, i, STATE));
                continue;
            }
            float scale = 1.0f / sum_lanes(m.weights[i]);
            for (int64_t d = 0; d < s.head_dim; d += LANES)
                store_upto(this->target(unit, i) + d, load(sums_at(i) + d) * scale, s.head_dim - d);
        }
    }
};

bool is_worth_threads(const Step& s, int64_t num_rows) {
    int64_t work = 0;
    for (int64_t row = 0; row < num_rows; row++)
        work += int64_t(s.query_starts[row + 1] - s.query_starts[row]) * s.seq_lens[row] * s.heads * s.head_dim;
    return work >= MIN_PARALLEL;
}

// The units of a step, with one KV head each: large ones if there are several for each thread.
std::vector<Unit> units_of(const Step& s, int64_t num_rows) {
    constexpr int64_t UNITS_PER_THREAD = 4;
    std::vector<Unit> units;
    int64_t groups = (s.query_starts[num_rows] - s.query_starts[0]) * s.heads / QUERIES;
    int64_t size = QUERIES * std::clamp<int64_t>(groups / (UNITS_PER_THREAD * pool::threads()), 1, MAX_QUERIES / QUERIES);
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t vectors = int64_t(s.query_starts[row + 1] - s.query_starts[row]) * s.group;
        for (int64_t first = 0; first < vectors; first += size)
            for (int64_t head = 0; head < s.kv_heads; head++)
                units.push_back({row, head, 1, first, std::min(size, vectors - first)});
    }
    return units;
}

template <typename T, typename C>
void attend(const Step& s, const T* queries, const C* kv, T* out, int64_t num_rows, bool parallel) {
    auto run = [&](const Unit& unit, const Unit*) {
        static thread_local Scratch scratch;
        Attention<T, C>(s, queries, kv, out, scratch).run(unit);
    };
    run_levels(s, num_rows, units_of(s, num_rows), MAX_QUERIES / QUERIES, Attention<T, C>::STATE, parallel, run);
}

template <typename C>
void attend_bf16(const Step& s, const bf16* queries, const C* kv, bf16* out, int64_t num_rows, bool parallel) {
    if (!attend_amx(s, queries, kv, out, num_rows, parallel)) attend(s, queries, kv, out, num_rows, parallel);
}

}  // namespace

void attend_sharing(int dtype, int kv_dtype, const void* queries, int64_t query_stride, const void* kv,
                    void* out, const int32_t* query_starts, const int32_t* seq_lens, const int32_t* tables,
                    int64_t num_rows, int64_t table_width, int64_t heads, int64_t kv_heads, int64_t head_dim,
                    int64_t num_blocks, int64_t block_size, int64_t window, float scale, float softcap,
                    Sharing& sharing) {
    // With a window shorter than the row, a row starts at its own tile, so nothing is shared.
    bool shares = !sharing.levels.empty() && (!window || sharing.longest <= window);
    Step s{heads,        kv_heads, head_dim, heads / kv_heads, query_stride, num_blocks, block_size, table_width,
           query_starts, seq_lens, tables,   window,           scale,        softcap,    shares ? &sharing : nullptr};
    bool parallel = is_worth_threads(s, num_rows);
    if (dtype == F32 && kv_dtype == INT8)
        attend(s, (const float*)queries, (const int8_t*)kv, (float*)out, num_rows, parallel);
    else if (dtype == F32 && kv_dtype == F16)
        attend(s, (const float*)queries, (const f16*)kv, (float*)out, num_rows, parallel);
    else if (dtype == F32)
        attend(s, (const float*)queries, (const float*)kv, (float*)out, num_rows, parallel);
    else if (kv_dtype == INT8)
        attend_bf16(s, (const bf16*)queries, (const int8_t*)kv, (bf16*)out, num_rows, parallel);
    else
        attend_bf16(s, (const bf16*)queries, (const bf16*)kv, (bf16*)out, num_rows, parallel);
}

extern "C" {

void millrace_attention(int dtype, int kv_dtype, const void* queries, int64_t query_stride, const void* kv,
                        void* out, const int32_t* query_starts, const int32_t* seq_lens, const int32_t* tables,
                        int64_t num_rows, int64_t table_width, int64_t heads, int64_t kv_heads, int64_t head_dim,
                        int64_t num_blocks, int64_t block_size, int64_t window, float scale, float softcap) {
    Sharing sharing = find_sharing(query_starts, seq_lens, tables, num_rows, table_width, block_size);
    attend_sharing(dtype, kv_dtype, queries, query_stride, kv, out, query_starts, seq_lens, tables, num_rows,
                   table_width, heads, kv_heads, head_dim, num_blocks, block_size, window, scale, softcap, sharing);
}
}
