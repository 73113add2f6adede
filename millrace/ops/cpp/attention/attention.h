// Shared by the attention kernels: the parameters of a step, its units of work, and the addresses of keys and values.
#pragma once

#include "amx.h"
#include "attention/attention_sharing.h"
#include "pool.h"
#include "transpose.h"
#include "vec.h"

#include <algorithm>
#include <vector>

constexpr int QUERIES = 16;  // query vectors per group
constexpr int MAX_HEAD = 256;
constexpr int UNIT_HEADS = 8;  // maximum number of KV heads in a unit

struct Step {
    int64_t heads, kv_heads, head_dim, group;
    int64_t query_stride, num_blocks, block_size, table_width;
    const int32_t *query_starts, *seq_lens, *tables;
    int64_t window;  // number of keys a query sees, including its own; 0: all
    float scale, softcap;
    Sharing* sharing;    // or null
    const float* sinks;  // per head a score without a value, which takes its share of the weights; or null
};

// A unit of work: query vectors of one row. The vectors of a KV head are numbered: vector v is token v / group and head
// v % group of the KV head's group. A unit has `per_head` vectors, from `first` on, of each of `heads` KV heads, from
// `kv_head` on: its query i is vector first + i % per_head of KV head kv_head + i / per_head.
//
// In a unit of rows that share tiles, vector v belongs to shared_rows[v / group], and `row` is the first of these rows.
// It ends at `to` and saves its partial sums; a unit with `from` > 0 restores them and continues.
struct Unit {
    int64_t row, kv_head, heads, first, per_head;
    const int32_t* shared_rows = nullptr;  // or null
    int64_t from = 0, to = INT64_MAX;

    int64_t count() const { return per_head * heads; }
    int64_t row_of(const Step& s, int64_t i) const {
        return shared_rows ? shared_rows[(first + i % per_head) / s.group] : row;
    }
    int64_t head_of(const Step& s, int64_t i) const {
        return (kv_head + i / per_head) * s.group + (first + i % per_head) % s.group;
    }
    int64_t token_of(const Step& s, int64_t i) const {
        return shared_rows ? s.query_starts[row_of(s, i)] : s.query_starts[row] + (first + i % per_head) / s.group;
    }
    int64_t position_of(const Step& s, int64_t i) const {
        int64_t own = row_of(s, i);
        return s.seq_lens[own] - (s.query_starts[own + 1] - token_of(s, i));
    }
};

// Numbers in an item of a cache.
template <typename C>
constexpr int64_t NUMBERS = 1;
template <>
constexpr int64_t NUMBERS<nibbles> = 2;

// Whether the items of a head in a block are followed by a 32-bit word per token with its scale.
template <typename C>
constexpr bool SCALED = sizeof(C) == 1;

// The item of number d.
template <typename C>
inline const C* item_at(const C* row, int64_t d) {
    return row + d / NUMBERS<C>;
}

// Addresses in a KV cache of items C. A scale is a float32, or in a four-bit cache a bfloat16 beside a lowest number.
template <typename C>
struct Cache {
    const C* kv;
    int64_t kv_heads, block_size;
    int64_t row_items;   // items of a key
    int64_t head_items;  // items of a head in a block, scales included
    int64_t values_at;   // distance from a key to its value

    Cache(const Step& s, const C* kv)
        : kv(kv), kv_heads(s.kv_heads), block_size(s.block_size), row_items(s.head_dim / NUMBERS<C>) {
        head_items = block_size * (row_items + (SCALED<C> ? sizeof(float) : 0));
        values_at = s.num_blocks * kv_heads * head_items;
    }

    const C* head(int64_t block, int64_t kv_head) const { return kv + (block * kv_heads + kv_head) * head_items; }
    const C* key(int64_t block, int64_t kv_head, int64_t offset) const {
        return head(block, kv_head) + offset * row_items;
    }
    const float* key_scale(int64_t block, int64_t kv_head, int64_t offset) const {
        return (const float*)(head(block, kv_head) + block_size * row_items) + offset;
    }
    const float* value_scale(const float* key_scale) const { return key_scale + values_at / sizeof(float); }
};

// Addresses of the keys and values of a tile.
template <typename C>
struct TileRows {
    const C *keys[KEYS], *values[KEYS];
    float key_scales[KEYS], value_scales[KEYS];  // caches with scales only
    float key_lowest[KEYS], value_lowest[KEYS];  // four-bit cache only

    vf key_at(int k, int64_t d, int n) const { return number(keys[k], d, n, key_scales[k], key_lowest[k]); }
    vf value_at(int k, int64_t d, int n) const { return number(values[k], d, n, value_scales[k], value_lowest[k]); }

    // Up to n numbers of a key or value, from number d on.
    static vf number(const C* row, int64_t d, int n, float scale, float lowest) {
        vf x = load_upto(item_at(row, d), n);
        if constexpr (NUMBERS<C> == 2) return fma(x, splat(scale), splat(lowest));
        return SCALED<C> ? x * scale : x;
    }

    void set_scales(int k, const float* key, const float* value) {
        if constexpr (NUMBERS<C> == 2) {
            read_word(key, key_scales[k], key_lowest[k]);
            read_word(value, value_scales[k], value_lowest[k]);
        } else {
            key_scales[k] = *key, value_scales[k] = *value;
        }
    }

    static void read_word(const float* from, float& scale, float& lowest) {
        uint32_t word, low;
        memcpy(&word, from, sizeof word);
        low = word << 16, word &= 0xffff0000;
        memcpy(&scale, &low, sizeof low);
        memcpy(&lowest, &word, sizeof word);
    }
};

// Positions that some query of a unit sees: lowest <= k < highest.
struct Positions {
    int64_t lowest, highest;
};

// Addresses of a unit's queries, results, keys and values.
template <typename T, typename C>
struct UnitRows {
    const Step& s;
    const T* queries;
    const Cache<C> cache;
    T* out;

    const T* query(const Unit& unit, int i) const {
        return queries + unit.token_of(s, i) * s.query_stride + unit.head_of(s, i) * s.head_dim;
    }
    T* target(const Unit& unit, int i) const {
        return out + (unit.token_of(s, i) * s.heads + unit.head_of(s, i)) * s.head_dim;
    }

    Positions positions_of(const Unit& unit) const {
        int64_t highest = std::min(unit.to, unit.position_of(s, unit.count() - 1) + 1);
        return {std::max(unit.from, s.window ? unit.position_of(s, 0) - s.window + 1 : 0), highest};
    }

    // Fills `rows` with the addresses of a tile's keys and values of the unit's first KV head. Slots that no query of
    // the unit sees are replaced by zeros: they may hold anything.
    void locate(const Unit& unit, Positions seen, int64_t tile, TileRows<C>& rows) const {
        static const C zeros[MAX_HEAD] = {};
        const int32_t* table = s.tables + unit.row * s.table_width;
        int64_t from = std::max(tile, seen.lowest), to = std::min(tile + KEYS, seen.highest);
        if (to - from < KEYS)
            for (int k = 0; k < KEYS; k++) {
                rows.keys[k] = rows.values[k] = zeros;
                rows.key_scales[k] = rows.value_scales[k] = rows.key_lowest[k] = rows.value_lowest[k] = 0;
            }
        for (int64_t position = from; position < to;) {  // block by block
            int64_t block = position / s.block_size, end = std::min(to, (block + 1) * s.block_size);
            int64_t offset = position - block * s.block_size;
            const C* key = cache.key(table[block], unit.kv_head, offset);
            const float* scale = cache.key_scale(table[block], unit.kv_head, offset);
            for (; position < end; position++, key += cache.row_items, scale++) {
                rows.keys[position - tile] = key;
                rows.values[position - tile] = key + cache.values_at;
                if constexpr (SCALED<C>) rows.set_scales(position - tile, scale, cache.value_scale(scale));
            }
        }
    }
};

// out[j][i] = rows[i][j] for 16 x 16 floats; overwrites `rows`. Without AVX-512 by four perfect shuffles of the rows.
inline void transpose(vf* rows, float* out, int64_t out_stride) {
#if defined(__AVX512F__)
    return transpose16((const uint32_t*)rows, LANES, (uint32_t*)out, out_stride);
#endif
    const vi low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    const vi high = low + 8;
    vf next[LANES];
#pragma GCC unroll 4
    for (int round = 0; round < 4; round++) {
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = __builtin_shuffle(rows[i], rows[i + LANES / 2], low);
            next[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + LANES / 2], high);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) rows[i] = next[i];
    }
    for (int i = 0; i < LANES; i++) store(out + i * out_stride, rows[i]);
}

// Saved partial sums of query i of a unit: `size` floats per query of the step.
inline float* state_of(const Step& s, const Unit& unit, int64_t i, int64_t size) {
    return s.sharing->state.data() + (unit.row_of(s, i) * s.heads + unit.head_of(s, i)) * size;
}

// Units for shared tiles, of up to `max_groups` groups of 16 queries, but at least one unit per thread if possible.
inline std::vector<Unit> shared_units(const Step& s, const std::vector<SharedTiles>& level, int64_t max_groups) {
    int64_t groups = 0;
    for (const SharedTiles& shared : level)
        groups += (int64_t(shared.rows.size()) * s.group + QUERIES - 1) / QUERIES * s.kv_heads;
    int64_t size = QUERIES * std::clamp<int64_t>(groups / pool::threads(), 1, max_groups);
    std::vector<Unit> units;
    for (const SharedTiles& shared : level) {
        int64_t vectors = shared.rows.size() * s.group;
        for (int64_t head = 0; head < s.kv_heads; head++)
            for (int64_t first = 0; first < vectors; first += size)
                units.push_back({shared.rows[0], head, 1, first, std::min(size, vectors - first), shared.rows.data(),
                                 shared.from, shared.to});
    }
    return units;
}

// Calls run(unit, following) for each unit; `following`, or null, is the unit that the same thread likely runs next.
template <typename F>
void run_units(const std::vector<Unit>& units, bool parallel, F run) {
    pool::for_each(units.size(), parallel,
                   [&](size_t i) { run(units[i], i + 1 < units.size() ? &units[i + 1] : nullptr); });
}

// Runs the units of all shared levels, level by level, then the rows' `own` units. `max_groups`: maximum number of
// groups of 16 queries in a unit of a level; `state_size`: floats of a query's partial sums.
template <typename F>
void run_levels(const Step& s, int64_t num_rows, std::vector<Unit> own, int64_t max_groups, int64_t state_size,
                bool parallel, F run) {
    if (s.sharing) {
        s.sharing->state.resize(num_rows * s.heads * state_size);
        for (const auto& level : s.sharing->levels) run_units(shared_units(s, level, max_groups), parallel, run);
        for (Unit& unit : own) unit.from = s.sharing->done[unit.row];
    }
    run_units(own, parallel, run);
}

// Attention in bfloat16 on the AMX unit, over a bfloat16 or int8 cache; false if there is no AMX.
#if HAS_AMX
bool attend_amx(const Step& s, const bf16* queries, const bf16* kv, bf16* out, int64_t num_rows, bool parallel);
#else
inline bool attend_amx(const Step&, const bf16*, const bf16*, bf16*, int64_t, bool) { return false; }
#endif
#if HAS_AMX && defined(__AMX_INT8__)
bool attend_amx(const Step& s, const bf16* queries, const int8_t* kv, bf16* out, int64_t num_rows, bool parallel);
#else
inline bool attend_amx(const Step&, const bf16*, const int8_t*, bf16*, int64_t, bool) { return false; }
#endif
