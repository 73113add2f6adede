// What the attention kernels share: the facts of a step, its units of work, and where a unit's keys and values lie.
#pragma once

#include "transpose.h"
#include "vec.h"

#include <algorithm>
#include <vector>

constexpr int QUERIES = 16;  // query vectors per unit of work
constexpr int KEYS = 64;     // keys per tile, at positions 64 i .. 64 i + 63
constexpr int MAX_HEAD = 256;
constexpr int UNIT_HEADS = 8;  // most KV heads in one unit

struct Step {
    int64_t heads, kv_heads, head_dim, group;
    int64_t query_stride, num_blocks, block_size, table_width;
    const int32_t *query_starts, *seq_lens, *tables;
    int64_t window;  // keys a query sees, itself included; 0 for all
    float scale, softcap;
};

// Up to 16 query vectors of one row. Those that share a KV head are numbered: vector v is token v / group and head
// v % group of the KV head's group. A unit has `each` of them, from `first` on, for each of `heads` KV heads, from
// `kv_head` on: its query i is vector first + i % each of KV head kv_head + i / each.
struct Unit {
    int64_t row, kv_head, heads, first, each;
};

// Where the keys and values of a tile lie, and which of its positions are seen at all: from <= k < to.
template <typename T>
struct TileRows {
    const T *keys[KEYS], *values[KEYS];
    int64_t from, to;
};

template <typename T>
struct UnitRows {
    const Step& s;
    const T* queries;
    const T* kv;
    T* out;
    int32_t positions[QUERIES];
    int64_t lowest, highest;  // positions that some query of the unit sees: lowest <= k < highest
    int count;                // query vectors

    int64_t token_of(const Unit& unit, int i) const {
        return s.query_starts[unit.row] + (unit.first + i % unit.each) / s.group;
    }
    int64_t head_of(const Unit& unit, int i) const {
        return (unit.kv_head + i / unit.each) * s.group + (unit.first + i % unit.each) % s.group;
    }
    const T* query(const Unit& unit, int i) const {
        return queries + token_of(unit, i) * s.query_stride + head_of(unit, i) * s.head_dim;
    }
    T* target(const Unit& unit, int i) const {
        return out + (token_of(unit, i) * s.heads + head_of(unit, i)) * s.head_dim;
    }

    void begin(const Unit& unit) {
        int64_t start = s.query_starts[unit.row], tokens = s.query_starts[unit.row + 1] - start;
        count = unit.each * unit.heads;
        for (int i = 0; i < QUERIES; i++)
            positions[i] = i < count ? s.seq_lens[unit.row] - tokens + (token_of(unit, i) - start) : -1;
        highest = positions[count - 1] + 1;
        lowest = s.window ? std::max<int64_t>(0, positions[0] - s.window + 1) : 0;
    }

    // Point at a tile's keys and values of a head. Places that no query of the unit sees are not read: they may hold
    // anything.
    void find(const Unit& unit, int64_t kv_head, int64_t tile, TileRows<T>& rows) const {
        static const T zeros[MAX_HEAD] = {};
        const int32_t* table = s.tables + unit.row * s.table_width;
        int64_t values_at = s.num_blocks * s.kv_heads * s.block_size * s.head_dim;
        rows.from = std::max(tile, lowest);
        rows.to = std::min(tile + KEYS, highest);
        if (rows.to - rows.from < KEYS)
            for (int k = 0; k < KEYS; k++) rows.keys[k] = rows.values[k] = zeros;
        for (int64_t position = rows.from; position < rows.to;) {  // block by block
            int64_t block = position / s.block_size, end = std::min(rows.to, (block + 1) * s.block_size);
            int64_t head = table[block] * s.kv_heads + kv_head;
            const T* key = kv + (head * s.block_size + position - block * s.block_size) * s.head_dim;
            for (; position < end; position++, key += s.head_dim) {
                rows.keys[position - tile] = key;
                rows.values[position - tile] = key + values_at;
            }
        }
    }

    // Bring one key and value of the next tile closer. Spread over a tile's work, so that memory is never waited for.
    void prefetch(const TileRows<T>& next, int k) const {
        for (int64_t d = 0; d < s.head_dim; d += 64 / sizeof(T)) {
            __builtin_prefetch(next.keys[k] + d);
            __builtin_prefetch(next.values[k] + d);
        }
    }
};

// A 16 x 16 matrix of 32-bit items: four perfect shuffles of its rows are a transposition.
inline void transpose(vf* rows) {
#if defined(__AVX512F__)
    return transpose16((const uint32_t*)rows, LANES, (uint32_t*)rows, LANES);
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
}

// The units of a step. Rows with few queries put several KV heads into one, as long as there are `enough` units.
inline std::vector<Unit> units_of(const Step& s, int64_t num_rows, int64_t enough) {
    std::vector<Unit> units;
    int64_t most = std::clamp<int64_t>((s.kv_heads * num_rows + enough - 1) / enough, 1, UNIT_HEADS);
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t vectors = int64_t(s.query_starts[row + 1] - s.query_starts[row]) * s.group;
        int64_t heads = vectors ? std::clamp<int64_t>(QUERIES / vectors, 1, most) : 0;
        for (int64_t first = 0; first < vectors; first += QUERIES) {
            int64_t each = std::min<int64_t>(QUERIES, vectors - first);
            for (int64_t head = 0; head < s.kv_heads; head += heads)
                units.push_back({row, head, std::min(heads, s.kv_heads - head), first, each});
        }
    }
    return units;
}

// bfloat16 on the AMX unit; false where there is none.
bool attend_amx(const Step& s, const bf16* queries, const bf16* kv, bf16* out, int64_t num_rows, bool parallel);
