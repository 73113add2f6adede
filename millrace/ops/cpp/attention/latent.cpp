// Latent attention over the paged cache in one pass, with an online softmax: one vector per token is the key of every
// head and, but for its last numbers, the value.
//
// The unit of work is up to 64 query vectors of one row (a token has one per head) against tiles of 64 latents, which
// are read where they are, or converted to floats once per unit. A query sums over the same tiles in the same order,
// whatever the chunking or batch.
#include "attention/attention_tile.h"

#include <type_traits>

namespace {

constexpr int MAX_VECTORS = 64;
constexpr int64_t MIN_PARALLEL = 1 << 15;  // minimum number of multiplications for which other threads are used

struct Latents {
    const int32_t *query_starts, *seq_lens, *tables;
    int64_t table_width, heads, rank, width, block_size;
    float scale;

    int64_t vectors(int64_t row) const { return int64_t(query_starts[row + 1] - query_starts[row]) * heads; }
    // Of vector v of a row: token v / heads.
    int64_t position(int64_t row, int64_t v) const {
        return seq_lens[row] - (query_starts[row + 1] - query_starts[row]) + v / heads;
    }
};

struct LatentUnit {
    int64_t row, first, count;
};

// Queries, sums and converted latents have rows of `width` floats, whole vectors.
struct LatentScratch {
    std::vector<float> queries, sums, converted, zeros;
    const float* values = nullptr;
    const float* latents[KEYS];
    alignas(64) float scores[MAX_VECTORS][KEYS];
    alignas(64) vf weights[MAX_VECTORS];
    float largest[MAX_VECTORS];
    int32_t positions[MAX_VECTORS];  // -1 beyond the unit's queries
    int64_t width = 0, head_dim = 0;

    void resize(int64_t new_width, int64_t rank) {
        head_dim = rank;
        if (width == new_width) return;
        width = new_width;
        queries.assign(MAX_VECTORS * width, 0.0f);
        sums.assign(MAX_VECTORS * width, 0.0f);
        converted.assign(KEYS * width, 0.0f);
        zeros.assign(width, 0.0f);
        values = converted.data();
    }
    float* query_at(int64_t i) { return queries.data() + i * width; }
    float* sums_at(int64_t i) { return sums.data() + i * width; }
};

// Scores of ROWS queries with ROWS latents at a time.
inline __attribute__((noinline)) void score_latents(LatentScratch& m, int first) {
    const float* queries = m.query_at(first);
    const int64_t width = m.width;
    for (int key = 0; key < KEYS; key += ROWS) {
        vf sums[ROWS][ROWS] = {};
        for (int64_t d = 0; d < width; d += LANES) {
            vf query[ROWS];
#pragma GCC unroll 4
            for (int row = 0; row < ROWS; row++) query[row] = load(queries + row * width + d);
#pragma GCC unroll 4
            for (int k = 0; k < ROWS; k++) {
                vf latent = load(m.latents[key + k] + d);
#pragma GCC unroll 4
                for (int row = 0; row < ROWS; row++) sums[row][k] = fma(latent, query[row], sums[row][k]);
            }
        }
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
            for (int k = 0; k < ROWS; k++) m.scores[first + row][key + k] = sum_lanes(sums[row][k]);
    }
}

template <typename T, typename C>
struct LatentAttention {
    const Latents& s;
    const T* queries;
    const C* kv;
    T* out;
    LatentScratch& m;

    void run(const LatentUnit& unit) {
        m.resize((s.width + LANES - 1) / LANES * LANES, s.rank);
        begin(unit);
        int64_t highest = s.position(unit.row, unit.first + unit.count - 1) + 1;
        int count = int(unit.count);
        for (int64_t tile = 0; tile < highest; tile += KEYS) {
            locate(unit.row, tile, highest);
            for (int first = 0; first < count; first += ROWS) score_latents(m, first);
            for (int first = 0; first < count; first += ROWS) weigh(m, first, tile, 0, 0.0f);
            for (int first = 0; first < count; first += ROWS) add(first);
        }
        finish(unit);
    }

    // The vectors of a row follow each other in `queries` and in `out`.
    int64_t vector_of(const LatentUnit& unit, int64_t i) const {
        return s.query_starts[unit.row] * s.heads + unit.first + i;
    }

    void begin(const LatentUnit& unit) {
        int64_t rows = (unit.count + ROWS - 1) / ROWS * ROWS;
        memset(m.query_at(0), 0, rows * m.width * sizeof(float));
        memset(m.sums_at(0), 0, rows * m.width * sizeof(float));
        for (int64_t i = 0; i < rows; i++) {
            m.largest[i] = -INFINITY;
            m.weights[i] = vf{};
            m.positions[i] = i < unit.count ? int32_t(s.position(unit.row, unit.first + i)) : -1;
        }
        for (int64_t i = 0; i < unit.count; i++) {
            const T* query = queries + vector_of(unit, i) * s.width;
            for (int64_t d = 0; d < s.width; d += LANES)
                store(m.query_at(i) + d, load_upto(query + d, int(s.width - d)) * s.scale);
        }
    }

    static constexpr bool reads_in_place() {
#if defined(__aarch64__)
        return false;
#else
        return std::is_same_v<C, float>;
#endif
    }

    // Latents beyond the last that a query sees may hold anything, even NaN.
    void locate(int64_t row, int64_t tile, int64_t highest) {
        bool in_place = reads_in_place() && m.width == s.width;
        for (int k = 0; k < KEYS; k++) {
            int64_t position = tile + k;
            float* copy = m.converted.data() + k * m.width;
            m.latents[k] = in_place ? m.zeros.data() : copy;
            if (position >= highest) {
                if (!in_place) memset(copy, 0, m.width * sizeof(float));
                continue;
            }
            int64_t block = s.tables[row * s.table_width + position / s.block_size];
            const C* latent = kv + (block * s.block_size + position % s.block_size) * s.width;
            if constexpr (std::is_same_v<C, float>) {
                if (in_place) {
                    m.latents[k] = latent;
                    continue;
                }
            }
            for (int64_t d = 0; d < s.width; d += LANES) store(copy + d, load_upto(latent + d, int(s.width - d)));
        }
    }

    void add(int first) {
        if constexpr (!reads_in_place())
            add_converted(m, first);
        else
            add_values(m, first, [this](int k, int64_t d) { return load(m.latents[k] + d); });
    }

    void finish(const LatentUnit& unit) {
        for (int64_t i = 0; i < unit.count; i++) {
            T* target = out + vector_of(unit, i) * s.rank;
            float scale = 1.0f / sum_lanes(m.weights[i]);
            for (int64_t d = 0; d < s.rank; d += LANES)
                store_upto(target + d, load(m.sums_at(i) + d) * scale, int(s.rank - d));
        }
    }
};

// A row's last queries come first: they see the most latents. Rows are divided if there are fewer than threads.
std::vector<LatentUnit> latent_units(const Latents& s, int64_t num_rows) {
    std::vector<LatentUnit> units;
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t vectors = s.vectors(row), parts = num_rows < pool::threads() ? pool::threads() : 1;
        if (vectors <= 0) continue;
        int64_t each = (vectors + parts - 1) / parts, size = std::min<int64_t>((each + ROWS - 1) / ROWS * ROWS, MAX_VECTORS);
        for (int64_t first = (vectors - 1) / size * size; first >= 0; first -= size)
            units.push_back({row, first, std::min(size, vectors - first)});
    }
    return units;
}

template <typename T, typename C>
void attend_latents(const Latents& s, const void* queries, const void* kv, void* out, int64_t num_rows) {
    std::vector<LatentUnit> units = latent_units(s, num_rows);
    int64_t work = 0;
    for (const LatentUnit& unit : units) work += unit.count * s.seq_lens[unit.row] * s.width;
    pool::for_each(units.size(), work >= MIN_PARALLEL, [&](int64_t i) {
        static thread_local LatentScratch scratch;
        LatentAttention<T, C>{s, (const T*)queries, (const C*)kv, (T*)out, scratch}.run(units[i]);
    });
}

}  // namespace

extern "C" {

// queries [T, heads, width], kv [blocks, block_size, width], out [T, heads, rank]. A float32 model's cache may be float16.
void millrace_latent_attention(int dtype, int kv_dtype, const void* queries, const void* kv, void* out,
                               const int32_t* query_starts, const int32_t* seq_lens, const int32_t* tables,
                               int64_t num_rows, int64_t table_width, int64_t heads, int64_t rank, int64_t width,
                               int64_t block_size, float scale) {
    Latents s{query_starts, seq_lens, tables, table_width, heads, rank, width, block_size, scale};
    if (dtype == BF16)
        attend_latents<bf16, bf16>(s, queries, kv, out, num_rows);
    else if (kv_dtype == F16)
        attend_latents<float, f16>(s, queries, kv, out, num_rows);
    else
        attend_latents<float, float>(s, queries, kv, out, num_rows);
}
}
