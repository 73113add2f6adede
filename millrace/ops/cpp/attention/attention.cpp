// Causal attention over the paged cache in one pass, with an online softmax.
//
// The unit of work is up to 192 query vectors of one row (a decode row has one per head) against tiles of 64 keys. A
// query sums over the same tiles in the same order, whatever the block size, chunking or batch. This file is the
// version with plain vectors and one KV head per unit; attention_amx.cpp is the version for the matrix unit.
#include "attention/attention_tile.h"
#include "kernels.h"

namespace {

constexpr int64_t MIN_PARALLEL = 1 << 15;  // minimum number of multiplications for which other threads are used

template <typename T, typename C>
struct Attention : UnitRows<T, C> {
    using Rows = UnitRows<T, C>;
    static constexpr bool is_rotated = NUMBERS<C> == 2;  // keys, and with them queries
    Scratch& m;
    int count = 0;  // number of query vectors
    TileRows<C> tiles[2];
    TileRows<C>*now = tiles, *next = tiles + 1;
    using Rows::s;

    Attention(const Step& s, const T* queries, const C* kv, T* out, Scratch& scratch)
        : Rows{s, queries, {s, kv}, out}, m(scratch) {
        m.head_dim = s.head_dim;
        m.width = (s.head_dim + LANES - 1) / LANES * LANES;
    }

    // `following`: the unit whose first keys are prefetched at the end of this one, or null.
    void run(const Unit& unit, const Unit* following) {
        begin(unit);
        Positions seen = this->positions_of(unit);
        int64_t first_tile = seen.lowest / KEYS * KEYS;
        this->locate(unit, seen, first_tile, *next);
        for (int64_t tile = first_tile; tile < seen.highest; tile += KEYS) {
            std::swap(now, next);
            if (tile + KEYS < seen.highest || !following)
                this->locate(unit, seen, tile + KEYS, *next);
            else
                locate_first(*following, *next);
            transpose_keys();
            for (int first = 0; first < count; first += ROWS) score(m, first);
            for (int first = 0; first < count; first += ROWS) weigh(m, first, tile, s.window, s.softcap);
            add();
        }
        finish(unit);
    }

    void locate_first(const Unit& unit, TileRows<C>& rows) const {
        Positions seen = this->positions_of(unit);
        this->locate(unit, seen, seen.lowest / KEYS * KEYS, rows);
    }

    // Floats per query: sums, partial sums of its weights, largest score.
    static constexpr int64_t STATE = MAX_HEAD + 2 * LANES;

    void begin(const Unit& unit) {
        count = unit.count();
        int64_t rows = (count + ROWS - 1) / ROWS * ROWS;
        memset(m.queries, 0, rows * m.width * sizeof(float));
        memset(m.sums, 0, rows * m.width * sizeof(float));
        for (int i = 0; i < rows; i++) {
            m.largest[i] = -INFINITY;
            m.weights[i] = vf{};
            m.positions[i] = i < count ? unit.position_of(s, i) : -1;
        }
        for (int i = 0; i < count; i++) {
            const T* query = this->query(unit, i);
            float scale = is_rotated ? s.scale / (s.head_dim & -s.head_dim) : s.scale;
            for (int64_t d = 0; d < s.head_dim; d += LANES)
                store(m.query_at(i) + d, load_upto(query + d, s.head_dim - d) * scale);
            if constexpr (is_rotated) rotate_numbers(m.query_at(i), s.head_dim);
            if (unit.from) restore_state(i, state_of(s, unit, i, STATE));
        }
    }

    void restore_state(int i, const float* state) {
        memcpy(m.sums_at(i), state, m.width * sizeof(float));
        m.weights[i] = load(state + MAX_HEAD);
        m.largest[i] = state[MAX_HEAD + LANES];
    }

    void save_state(int i, float* state) const {
        memcpy(state, m.sums_at(i), m.width * sizeof(float));
        store(state + MAX_HEAD, m.weights[i]);
        state[MAX_HEAD + LANES] = m.largest[i];
    }

    // Prefetches what is read of `row` a tile later: its line at column d, if that begins one.
    static void prefetch(const C* row, int64_t d) {
        if (d * sizeof(C) / NUMBERS<C> % 64 == 0) __builtin_prefetch(item_at(row, d));
    }

    // Whether sixteen float keys follow each other in the cache, in whole vectors: they are of one block and all seen.
    bool are_in_line(int first) const {
        return sizeof(C) == sizeof(float) && m.width == s.head_dim && s.block_size % LANES == 0 &&
               now->keys[first + LANES - 1] == now->keys[first] + (LANES - 1) * s.head_dim;
    }

    void transpose_keys() {
        vf rows[LANES];
        for (int first = 0; first < KEYS; first += LANES) {
            bool in_line = are_in_line(first);
            for (int64_t d = 0; d < s.head_dim; d += LANES) {
                for (int k = 0; k < LANES; k++) prefetch(next->keys[first + k], d);
                if (in_line) {
                    auto* keys = reinterpret_cast<const uint32_t*>(now->keys[first] + d);
                    transpose16(keys, s.head_dim, reinterpret_cast<uint32_t*>(&m.keys[d][first]), KEYS);
                    continue;
                }
                for (int k = 0; k < LANES; k++) rows[k] = now->key_at(first + k, d, s.head_dim - d);
                transpose(rows, &m.keys[d][first], KEYS);
            }
        }
    }

    // Values are read where they are if that is no more work than converting them first.
    bool reads_values_in_place() const {
#if defined(__aarch64__)
        return false;
#else
        return m.width == s.head_dim && (sizeof(C) == sizeof(float) || count <= ROWS);
#endif
    }

    void add() {
        if (!reads_values_in_place()) {
            convert_values();
            for (int first = 0; first < count; first += ROWS) add_converted(m, first);
            return;
        }
        for (int first = 0; first < count; first += ROWS)
            add_values(m, first, [&](int k, int64_t d) {
                prefetch(next->values[k], d);
                return now->value_at(k, d, LANES);
            });
    }

    void convert_values() {
        for (int k = 0; k < KEYS; k++)
            for (int64_t d = 0; d < s.head_dim; d += LANES) {
                prefetch(next->values[k], d);
                store(m.values + k * m.width + d, now->value_at(k, d, s.head_dim - d));
            }
    }

    void finish(const Unit& unit) {
        for (int i = 0; i < count; i++) {
            if (unit.shared_rows) {
                save_state(i, state_of(s, unit, i, STATE));
                continue;
            }
            T* target = this->target(unit, i);
            float total = sum_lanes(m.weights[i]);
            if (s.sinks) total += exp(splat(s.sinks[unit.head_of(s, i)] - m.largest[i]))[0];
            float scale = 1.0f / total;
            for (int64_t d = 0; d < s.head_dim; d += LANES)
                store_upto(target + d, load(m.sums_at(i) + d) * scale, s.head_dim - d);
        }
    }
};

bool is_worth_threads(const Step& s, int64_t num_rows) {
    int64_t work = 0;
    for (int64_t row = 0; row < num_rows; row++)
        work += int64_t(s.query_starts[row + 1] - s.query_starts[row]) * s.seq_lens[row] * s.heads * s.head_dim;
    return work >= MIN_PARALLEL;
}

int64_t vectors_of(const Step& s, int64_t row) { return int64_t(s.query_starts[row + 1] - s.query_starts[row]) * s.group; }

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The number of query vectors per unit for which all threads are expected to finish first. Large units convert keys and
// values less often; small ones divide the work more evenly.
int64_t unit_size(const Step& s, int64_t num_rows) {
    constexpr int64_t TILE_COST = 16;  // a tile's part that its queries share, in queries
    auto keys_of = [&](int64_t row) { return s.window ? std::min<int64_t>(s.window, s.seq_lens[row]) : s.seq_lens[row]; };
    std::vector<std::pair<int64_t, int64_t>> chunks;  // vectors and keys of rows with several units to choose from
    int64_t largest = 0, longest = 0, decoding = 0;
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t vectors = vectors_of(s, row), keys = keys_of(row);
        if (vectors <= QUERIES) {
            decoding += (vectors + TILE_COST) * keys;
            continue;
        }
        chunks.emplace_back(vectors, keys);
        largest = std::max(largest, vectors);
        longest = std::max(longest, keys);
    }
    int64_t best = QUERIES, best_time = INT64_MAX, threads = pool::threads();
    for (int64_t parts = divide_up(largest, MAX_QUERIES); parts && parts * QUERIES <= largest; parts++) {
        int64_t size = divide_up(divide_up(largest, parts), ROWS) * ROWS, units = 0, total = decoding;
        for (auto [vectors, keys] : chunks) {
            units += divide_up(vectors, size);
            total += (vectors + TILE_COST * divide_up(vectors, size)) * keys;
        }
        int64_t rounds = divide_up(units * s.kv_heads, threads);
        int64_t time = std::max(rounds * (size + TILE_COST) * longest, total * s.kv_heads / threads);
        if (time < best_time) best = size, best_time = time;
        if (rounds > 16) break;  // smaller units divide the work no better
    }
    return best;
}

// The units of a step, with one KV head each. A row's last queries come first: they see the most keys, and short units
// at the end let the threads finish together.
std::vector<Unit> units_of(const Step& s, int64_t num_rows) {
    std::vector<Unit> units;
    int64_t size = unit_size(s, num_rows);
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t vectors = vectors_of(s, row);
        for (int64_t first = (divide_up(vectors, size) - 1) * size; first >= 0; first -= size)
            for (int64_t head = 0; head < s.kv_heads; head++)
                units.push_back({row, head, 1, first, std::min(size, vectors - first)});
    }
    return units;
}

template <typename T, typename C>
void attend(const Step& s, const T* queries, const C* kv, T* out, int64_t num_rows, bool parallel) {
    auto run = [&](const Unit& unit, const Unit* following) {
        static thread_local Scratch scratch;
        Attention<T, C>(s, queries, kv, out, scratch).run(unit, following);
    };
    run_levels(s, num_rows, units_of(s, num_rows), MAX_QUERIES / QUERIES, Attention<T, C>::STATE, parallel, run);
}

template <typename C>
void attend_bf16(const Step& s, const bf16* queries, const C* kv, bf16* out, int64_t num_rows, bool parallel) {
    // The version for the matrix unit has no sinks.
    if (s.sinks || !attend_amx(s, queries, kv, out, num_rows, parallel))
        attend(s, queries, kv, out, num_rows, parallel);
}

}  // namespace

void attend_sharing(int dtype, int kv_dtype, const void* queries, int64_t query_stride, const void* kv,
                    void* out, const int32_t* query_starts, const int32_t* seq_lens, const int32_t* tables,
                    int64_t num_rows, int64_t table_width, int64_t heads, int64_t kv_heads, int64_t head_dim,
                    int64_t num_blocks, int64_t block_size, int64_t window, float scale, float softcap,
                    Sharing& sharing, const float* sinks) {
    // With a window shorter than the row, a row starts at its own tile, so nothing is shared.
    bool shares = !sharing.levels.empty() && (!window || sharing.longest <= window);
    Step s{heads,        kv_heads, head_dim, heads / kv_heads, query_stride, num_blocks, block_size, table_width,
           query_starts, seq_lens, tables,   window,           scale,        softcap,    shares ? &sharing : nullptr,
           sinks};
    bool parallel = is_worth_threads(s, num_rows);
    if (dtype == F32 && kv_dtype == INT8)
        attend(s, (const float*)queries, (const int8_t*)kv, (float*)out, num_rows, parallel);
    else if (dtype == F32 && kv_dtype == INT4)
        attend(s, (const float*)queries, (const nibbles*)kv, (float*)out, num_rows, parallel);
    else if (dtype == F32 && kv_dtype == F16)
        attend(s, (const float*)queries, (const f16*)kv, (float*)out, num_rows, parallel);
    else if (dtype == F32)
        attend(s, (const float*)queries, (const float*)kv, (float*)out, num_rows, parallel);
    else if (kv_dtype == INT8)
        attend_bf16(s, (const bf16*)queries, (const int8_t*)kv, (bf16*)out, num_rows, parallel);
    else if (kv_dtype == INT4)
        attend(s, (const bf16*)queries, (const nibbles*)kv, (bf16*)out, num_rows, parallel);
    else
        attend_bf16(s, (const bf16*)queries, (const bf16*)kv, (bf16*)out, num_rows, parallel);
}

extern "C" {

void millrace_attention(int dtype, int kv_dtype, const void* queries, int64_t query_stride, const void* kv,
                        void* out, const int32_t* query_starts, const int32_t* seq_lens, const int32_t* tables,
                        int64_t num_rows, int64_t table_width, int64_t heads, int64_t kv_heads, int64_t head_dim,
                        int64_t num_blocks, int64_t block_size, int64_t window, float scale, float softcap,
                        const float* sinks) {
    Sharing sharing = find_sharing(query_starts, seq_lens, tables, num_rows, table_width, block_size);
    attend_sharing(dtype, kv_dtype, queries, query_stride, kv, out, query_starts, seq_lens, tables, num_rows,
                   table_width, heads, kv_heads, head_dim, num_blocks, block_size, window, scale, softcap, sharing,
                   sinks);
}
}
