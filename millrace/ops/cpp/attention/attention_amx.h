// Attention on the AMX unit, shared by the bfloat16 and int8 caches: queries in lanes, prefetching, partial sums.
#pragma once

#include "amx.h"
#include "attention/attention.h"

#if HAS_AMX

constexpr int RUN = 16;  // consecutive keys that form the rows of one AMX tile: in one cache block, or copied
constexpr int RUNS = KEYS / RUN;
constexpr int MAX_GROUPS = 12;  // maximum number of groups of 16 queries in a unit
constexpr int PARTS = MAX_GROUPS > UNIT_HEADS ? MAX_GROUPS : UNIT_HEADS;
constexpr float LOG2E = 1.44269504f;

typedef float Sums[MAX_HEAD / LANES][QUERIES][LANES];  // [vector][query][dimension], per group or head

// 2^x; exactly 0 where the result would be subnormal.
inline __m512 exp2(__m512 x) {
    __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_GE_OQ);
    __m512 r = _mm512_reduce_ps(x, 0);  // x minus the nearest integer
    __m512 y = _mm512_set1_ps(1.3333558e-3f);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(9.6181291e-3f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(5.5504109e-2f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(2.4022651e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(6.9314718e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(normal, y, _mm512_sub_ps(x, r));
}

// Sixteen queries in lanes, and their partial sums.
struct Group {
    alignas(64) int32_t positions[QUERIES];  // -1: lane without a query
    int count;
    int64_t lowest, highest;  // positions that some of its queries see: lowest <= k < highest
    bool has_sums;               // its sums are not empty
    __m512 base, total;       // per query: base of its weights, in log2, and sum of the weights
};

// A unit of work over a cache of items C.
template <typename C>
struct AmxUnit {
    const Step& s;
    const bf16* queries;
    const Cache<C> cache;
    bf16* out;
    Sums* sums;       // per group or head
    int64_t vectors;  // number of vectors of a query's sums
    bool in_place;    // runs of keys can be loaded directly from the cache
    Group groups[MAX_GROUPS];
    int num_groups;
    int64_t lowest, highest;
    // Runs of keys and values to prefetch, in reading order, and how far prefetching has got.
    const C* prefetch_runs[2 * UNIT_HEADS * RUNS];
    int num_prefetch_runs = 0, prefetch_run = 0;
    int64_t prefetch_offset = 0;

    AmxUnit(const Step& s, const bf16* queries, const C* kv, bf16* out, Sums* sums, int64_t vectors, bool in_place)
        : s(s), queries(queries), cache(s, kv), out(out), sums(sums), vectors(vectors), in_place(in_place) {}

    // --- queries, and addresses of their keys ---

    // Query i of the unit: its token and head in the step, and its position in its row.
    struct Lane {
        int64_t token, head, position;
    };
    Lane lanes[MAX_GROUPS * QUERIES];

    // Fills `lanes` for all queries of the unit, by counting: a division per query would take longer than its tile.
    void list_lanes(const Unit& unit) {
        Lane* lane = lanes;
        for (int64_t head = unit.kv_head; head < unit.kv_head + unit.heads; head++) {
            int64_t index = unit.first / s.group, in_group = unit.first % s.group;
            for (int64_t i = 0; i < unit.per_head; i++, lane++) {
                int64_t row = unit.shared_rows ? unit.shared_rows[index] : unit.row;
                lane->token = s.query_starts[row] + (unit.shared_rows ? 0 : index);
                lane->head = head * s.group + in_group;
                lane->position = s.seq_lens[row] - (s.query_starts[row + 1] - lane->token);
                if (++in_group == s.group) in_group = 0, index++;
            }
        }
    }

    void begin(const Unit& unit) {
        int64_t count = unit.count();
        list_lanes(unit);
        num_groups = (count + QUERIES - 1) / QUERIES;
        for (int index = 0; index < num_groups; index++) {
            Group& group = groups[index];
            group.count = std::min<int64_t>(QUERIES, count - index * QUERIES);
            for (int i = 0; i < QUERIES; i++)
                group.positions[i] = i < group.count ? lanes[index * QUERIES + i].position : -1;
            group.highest = std::min<int64_t>(unit.to, group.positions[group.count - 1] + 1);
            group.lowest = std::max(unit.from, s.window ? group.positions[0] - s.window + 1 : 0);
            // Lanes without a query have scores of zero and get the base 0.
            __mmask16 used = (1 << group.count) - 1;
            group.base = _mm512_mask_mov_ps(_mm512_setzero_ps(), used, _mm512_set1_ps(-INFINITY));
            group.total = _mm512_setzero_ps();
            group.has_sums = unit.from > 0;
        }
        lowest = groups[0].lowest;
        highest = groups[num_groups - 1].highest;
    }

    int64_t first_tile() const { return lowest / KEYS * KEYS; }

    const C* key_at(const Unit& unit, int64_t kv_head, int64_t position) const {
        int64_t block = s.tables[unit.row * s.table_width + position / s.block_size];
        return cache.key(block, kv_head, position % s.block_size);
    }

    const bf16* query(int64_t i) const {
        return queries + lanes[i].token * s.query_stride + lanes[i].head * s.head_dim;
    }

    bf16* target(int64_t i) const { return out + (lanes[i].token * s.heads + lanes[i].head) * s.head_dim; }

    // Initialises the sums of a unit: zero, or the saved ones of an earlier unit.
    void clear(const Unit& unit) {
        int parts = unit.heads > 1 ? unit.heads : num_groups;
        for (int part = 0; part < parts; part++) memset(sums[part], 0, vectors * sizeof sums[part][0]);
        if (unit.from) restore_state(unit);
    }

    // --- saved partial sums: base, total and sums of each query ---

    int64_t state_size() const { return (1 + vectors) * LANES; }

    // Index into `sums` of query i of a unit.
    static int64_t part_of(const Unit& unit, int64_t i) { return unit.heads > 1 ? i / unit.per_head : i / QUERIES; }
    Group& group_of(const Unit& unit, int64_t i) { return groups[unit.heads > 1 ? 0 : i / QUERIES]; }

    void restore_state(const Unit& unit) {
        for (int64_t i = 0; i < unit.count(); i++) {
            const float* state = state_of(s, unit, i, state_size());
            Group& group = group_of(unit, i);
            int64_t lane = i % QUERIES;
            group.base = _mm512_mask_mov_ps(group.base, 1 << lane, _mm512_set1_ps(state[0]));
            group.total = _mm512_mask_mov_ps(group.total, 1 << lane, _mm512_set1_ps(state[1]));
            for (int64_t part = 0; part < vectors; part++)
                store(sums[part_of(unit, i)][part][lane], load(state + (1 + part) * LANES));
        }
    }

    void save_state(const Unit& unit) {
        for (int64_t i = 0; i < unit.count(); i++) {
            float *state = state_of(s, unit, i, state_size()), base[LANES], total[LANES];
            const Group& group = group_of(unit, i);
            int64_t lane = i % QUERIES;
            _mm512_storeu_ps(base, group.base);
            _mm512_storeu_ps(total, group.total);
            state[0] = base[lane];
            state[1] = total[lane];
            for (int64_t part = 0; part < vectors; part++)
                store(state + (1 + part) * LANES, load(sums[part_of(unit, i)][part][lane]));
        }
    }

    // --- prefetching ---

    // Makes `prefetch_lines` fetch the keys and values of a tile, for positions below `end`.
    void plan_prefetch(const Unit& unit, int64_t tile, int64_t end) {
        num_prefetch_runs = prefetch_run = prefetch_offset = 0;
        if (!in_place) return;
        for (int64_t values = 0; values < 2; values++)
            for (int head = 0; head < unit.heads; head++)
                for (int64_t position = tile; position < std::min(tile + KEYS, end); position += RUN)
                    prefetch_runs[num_prefetch_runs++] =
                        key_at(unit, unit.kv_head + head, position) + values * cache.values_at;
    }

    void plan_prefetch_unit(const Unit* unit) {
        num_prefetch_runs = prefetch_run = 0;
        if (!unit) return;
        int64_t first = unit->position_of(s, 0), last = unit->position_of(s, unit->count() - 1);
        int64_t start = std::max(unit->from, s.window ? first - s.window + 1 : 0);
        plan_prefetch(*unit, start / KEYS * KEYS, std::min(unit->to, last + 1));
    }

    // Plans prefetching of what follows a tile; `following`, or null, is likely this thread's next unit. Units with
    // many queries are limited by computation and do not prefetch.
    void plan_prefetch_after(const Unit& unit, int64_t tile, const Unit* following) {
        if (num_groups > 2) return;
        if (tile + KEYS < highest)
            plan_prefetch(unit, tile + KEYS, highest);
        else
            plan_prefetch_unit(following);
    }

    // Prefetches a few cache lines; lines beyond the end of a run are useless but harmless. Called throughout a tile's
    // work: a burst of prefetches would stall, and leave memory idle for the rest of the time.
    void prefetch_lines(int lines) {
        if (prefetch_run == num_prefetch_runs) return;
        const char* line = (const char*)prefetch_runs[prefetch_run] + prefetch_offset;
        for (int i = 0; i < lines; i++) _mm_prefetch(line + i * 64, _MM_HINT_T1);  // a tile may fill the L1 cache
        prefetch_offset += lines * 64;
        if (prefetch_offset < RUN * s.head_dim * int64_t(sizeof(C))) return;
        prefetch_offset = 0;
        prefetch_run++;
    }

    // --- scores and sums ---

    // Applies the soft cap and the mask to the scores, if needed. `scale_of` is the remaining factor that converts
    // scores to log2. No query sees more than the first `keys` keys of the tile.
    void cap_and_mask(const Group& group, int64_t tile, float (*scores)[QUERIES], int keys) const {
        int32_t first = group.positions[0], last = group.positions[group.count - 1];
        bool all_seen = tile + KEYS - 1 <= first && (!s.window || last - tile < s.window);
        if (all_seen && s.softcap <= 0) return;
        __m512i position = _mm512_load_si512(group.positions);
        __m512i before = s.window ? _mm512_sub_epi32(position, _mm512_set1_epi32(s.window)) : _mm512_set1_epi32(-1);
        __m512 shrunk = _mm512_set1_ps(s.scale / s.softcap), cap = _mm512_set1_ps(s.softcap * LOG2E);
        for (int k = 0; k < keys; k++) {
            __m512 x = _mm512_load_ps(scores[k]);
            if (s.softcap > 0) x = _mm512_mul_ps((__m512)tanh((vf)_mm512_mul_ps(x, shrunk)), cap);
            __m512i key = _mm512_set1_epi32(tile + k);
            __mmask16 seen = _mm512_cmple_epi32_mask(key, position) & _mm512_cmpgt_epi32_mask(key, before);
            _mm512_store_ps(scores[k], _mm512_mask_blend_ps(seen, _mm512_set1_ps(-INFINITY), x));
        }
    }

    float unit_scale() const { return s.softcap > 0 ? 1.0f : s.scale * LOG2E; }
    __m512 scale_of() const { return _mm512_set1_ps(unit_scale()); }

    void rescale(__m512 shrink, float (*sums)[QUERIES][LANES], int first, int last) {
        if (_mm512_cmp_ps_mask(shrink, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) == 0) return;
        float by[LANES];
        _mm512_storeu_ps(by, shrink);
        for (int64_t part = 0; part < vectors; part++)
            for (int i = first; i < last; i++) store(sums[part][i], load(sums[part][i]) * by[i]);
    }
};

// A unit has several KV heads of a row with few queries, or up to twelve groups of 16 queries of one head. There are
// several units per thread if there is enough work; within a row those with most keys come first.
inline std::vector<Unit> amx_units(const Step& s, int64_t num_rows) {
    int64_t enough = pool::threads(), tokens = s.query_starts[num_rows];
    int64_t most = std::clamp<int64_t>((s.kv_heads * num_rows + enough - 1) / enough, 1, UNIT_HEADS);
    int64_t groups = std::clamp<int64_t>(tokens * s.heads / (QUERIES * 4 * enough), 1, MAX_GROUPS);
    std::vector<Unit> units;
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t vectors = int64_t(s.query_starts[row + 1] - s.query_starts[row]) * s.group;
        if (!vectors) continue;
        int64_t heads = std::clamp<int64_t>(QUERIES / vectors, 1, most), size = groups * QUERIES;
        for (int64_t first = (vectors - 1) / size * size; first >= 0; first -= size)
            for (int64_t head = 0; head < s.kv_heads; head += heads)
                units.push_back({row, head, std::min(heads, s.kv_heads - head), first, std::min(size, vectors - first)});
    }
    return units;
}

// Runs one unit tile by tile; `following`, or null, is likely this thread's next unit.
template <typename A>
void attend_unit(A& a, const Unit& unit, const Unit* following) {
    a.begin(unit);
    a.load_queries(unit);
    a.clear(unit);
    if (a.num_groups == 1)
        a.one_group(unit, following);
    else
        a.several_groups(unit, following);
    if (unit.shared_rows)
        a.save_state(unit);
    else
        a.finish(unit);
}

// Runs all units of a step with attention class A and scratch memory S; false if there is no AMX.
template <typename A, typename S, typename C>
bool attend_units(const Step& s, const bf16* queries, const C* kv, bf16* out, int64_t num_rows, bool parallel) {
    if (!use_amx()) return false;
    auto run = [&](const Unit& unit, const Unit* following) {
        static thread_local S scratch;
        const TileConfig config;
        configure_tiles(config);
        A attention(s, queries, kv, out, scratch);
        attend_unit(attention, unit, following);
        _tile_release();
    };
    run_levels(s, num_rows, amx_units(s, num_rows), MAX_GROUPS, (1 + A::vectors_of(s)) * LANES, parallel, run);
    return true;
}

#endif
