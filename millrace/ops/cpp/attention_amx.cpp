// Attention for bfloat16 on the AMX unit, over the same tiles of 64 keys as attention.cpp.
//
// Scores are computed transposed, keys by queries: keys then come straight from the cache, and the softmax runs down
// the vectors with one query per lane. Weights are rounded to bfloat16 before they multiply the values.
//
// A unit of work has either up to 64 queries of one KV head, in groups of 16 lanes that share each tile of keys and
// values while it is in the first-level cache; or few queries of each of several KV heads, which share the lanes of one
// group: each head's products are added to the scores with zeros for the queries of the others, and of each head's sums
// only the rows of its own queries are used.
#include "attention.h"

#include "amx.h"

#if HAS_AMX

namespace {

constexpr int CHUNK = 32;  // inner items of one tile product
constexpr int MAX_CHUNKS = MAX_HEAD / CHUNK;
constexpr int RUN = 16;  // keys of one tile row block: they lie in one block of the cache, or are copied together
constexpr int RUNS = KEYS / RUN;
constexpr int MAX_GROUPS = 4;  // of 16 queries in a unit
constexpr int PARTS = MAX_GROUPS > UNIT_HEADS ? MAX_GROUPS : UNIT_HEADS;
constexpr float LOG2E = 1.44269504f;

struct Scratch {
    alignas(64) bf16 queries[PARTS][MAX_CHUNKS][16][CHUNK];  // [group or head][chunk][pair of dimensions][query][2]
    alignas(64) bf16 keys[KEYS][MAX_HEAD];                   // where they cannot be read in place
    alignas(64) float scores[2][KEYS][QUERIES];  // [turn]
    alignas(64) bf16 weights[2][KEYS / CHUNK][QUERIES][CHUNK];
    // [turn][pair of keys][chunk][half][dimension][2], without gaps between the pairs however many chunks there are
    alignas(64) bf16 values[2][KEYS / 2 * MAX_CHUNKS * 2 * CHUNK];
    alignas(64) float sums[PARTS][2 * MAX_CHUNKS][QUERIES][LANES];  // [group or head][chunk and half][query][dimension]
};

// 2^x, and exactly 0 where that would be denormal.
inline __m512 exp2(__m512 x) {
    __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_GE_OQ);
    __m512 r = _mm512_reduce_ps(x, 0);  // x less the nearest whole number
    __m512 y = _mm512_set1_ps(1.3333558e-3f);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(9.6181291e-3f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(5.5504109e-2f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(2.4022651e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(6.9314718e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(normal, y, _mm512_sub_ps(x, r));
}

// Sixteen lanes of queries and what they have summed so far.
struct Group {
    alignas(64) int32_t positions[QUERIES];  // -1 for lanes without a query
    int count;
    int64_t lowest, highest;  // positions that some of its queries see: lowest <= k < highest
    __m512 base, total;       // per query: what its weights are relative to, in units of log2; and their sum
};

// Sixteen consecutive positions of one head. Of them from <= k < to are seen by some query; all others may hold
// anything, and there is nothing at all to read where `to` is 0.
struct Run {
    const bf16 *keys, *values;
    int from, to;
};

struct AmxAttention {
    const Step& s;
    const bf16* queries;
    const bf16* kv;
    bf16* out;
    Scratch& m;
    int64_t chunks, values_at;
    bool in_place;  // runs of keys can be multiplied where they lie
    Group groups[MAX_GROUPS];
    int num_groups;
    int64_t lowest, highest;
    Run runs[2][UNIT_HEADS][RUNS];
    Run(*now)[RUNS] = runs[0];
    Run(*next)[RUNS] = runs[1];
    // Runs of keys and values that come next, in the order in which they will be read, and how far they are fetched.
    const bf16* coming[2 * UNIT_HEADS * RUNS];
    int num_coming = 0, fetching = 0;
    int64_t fetched = 0;

    AmxAttention(const Step& s, const bf16* queries, const bf16* kv, bf16* out, Scratch& scratch)
        : s(s),
          queries(queries),
          kv(kv),
          out(out),
          m(scratch),
          chunks((s.head_dim + CHUNK - 1) / CHUNK),
          values_at(s.num_blocks * s.kv_heads * s.block_size * s.head_dim),
          in_place(s.block_size % RUN == 0 && s.head_dim % CHUNK == 0) {}

    // `following`, or null, is likely to be this thread's next unit.
    void run(const Unit& unit, const Unit* following) {
        begin(unit);
        load_queries(unit);
        int parts = unit.heads > 1 ? unit.heads : num_groups;
        for (int part = 0; part < parts; part++) memset(m.sums[part], 0, 2 * chunks * sizeof m.sums[part][0]);
        if (unit.from) resume(unit);
        int64_t first_tile = lowest / KEYS * KEYS;
        find_all(unit, first_tile);
        for (int64_t tile = first_tile; tile < highest; tile += KEYS) {
            std::swap(now, next);
            find_all(unit, tile + KEYS);
            if (tile + KEYS < highest)
                expect(unit, tile + KEYS, highest);
            else
                expect_unit(following);
            if (unit.heads > 1)
                several_heads(unit, tile);
            else
                several_groups(unit, tile);
        }
        if (unit.members)
            leave(unit);
        else
            finish(unit);
    }

    // --- sums that another unit goes on with: of each query its base, its total, and the vectors of its sums ---

    int64_t state_size() const { return (1 + 2 * chunks) * LANES; }

    // Where query i of a unit is among its sums.
    static int64_t part_of(const Unit& unit, int64_t i) { return unit.heads > 1 ? i / unit.each : i / QUERIES; }
    Group& group_of(const Unit& unit, int64_t i) { return groups[unit.heads > 1 ? 0 : i / QUERIES]; }

    void resume(const Unit& unit) {
        for (int64_t i = 0; i < unit.count(); i++) {
            const float* state = state_of(s, unit, i, state_size());
            Group& group = group_of(unit, i);
            int64_t lane = i % QUERIES;
            group.base = _mm512_mask_mov_ps(group.base, 1 << lane, _mm512_set1_ps(state[0]));
            group.total = _mm512_mask_mov_ps(group.total, 1 << lane, _mm512_set1_ps(state[1]));
            for (int64_t part = 0; part < 2 * chunks; part++)
                store(m.sums[part_of(unit, i)][part][lane], load(state + (1 + part) * LANES));
        }
    }

    void leave(const Unit& unit) {
        for (int64_t i = 0; i < unit.count(); i++) {
            float *state = state_of(s, unit, i, state_size()), base[LANES], total[LANES];
            const Group& group = group_of(unit, i);
            int64_t lane = i % QUERIES;
            _mm512_storeu_ps(base, group.base);
            _mm512_storeu_ps(total, group.total);
            state[0] = base[lane];
            state[1] = total[lane];
            for (int64_t part = 0; part < 2 * chunks; part++)
                store(state + (1 + part) * LANES, load(m.sums[part_of(unit, i)][part][lane]));
        }
    }

    // --- which queries, and where their keys are ---

    void begin(const Unit& unit) {
        int64_t count = unit.count();
        num_groups = (count + QUERIES - 1) / QUERIES;
        for (int index = 0; index < num_groups; index++) {
            Group& group = groups[index];
            group.count = std::min<int64_t>(QUERIES, count - index * QUERIES);
            for (int i = 0; i < QUERIES; i++)
                group.positions[i] = i < group.count ? unit.position_of(s, index * QUERIES + i) : -1;
            group.highest = std::min<int64_t>(unit.to, group.positions[group.count - 1] + 1);
            group.lowest = std::max(unit.from, s.window ? group.positions[0] - s.window + 1 : 0);
            group.base = _mm512_set1_ps(-INFINITY);
            group.total = _mm512_setzero_ps();
        }
        lowest = groups[0].lowest;
        highest = groups[num_groups - 1].highest;
    }

    void find_all(const Unit& unit, int64_t tile) {
        for (int head = 0; head < unit.heads; head++)
            for (int run = 0; run < RUNS; run++) next[head][run] = find(unit, unit.kv_head + head, tile + run * RUN);
    }

    const bf16* place(const Unit& unit, int64_t kv_head, int64_t position) const {
        int64_t block = s.tables[unit.row * s.table_width + position / s.block_size];
        return kv + ((block * s.kv_heads + kv_head) * s.block_size + position % s.block_size) * s.head_dim;
    }

    Run find(const Unit& unit, int64_t kv_head, int64_t position) const {
        int64_t from = std::max(position, lowest), to = std::min(position + RUN, highest);
        if (from >= to) return {nullptr, nullptr, 0, 0};
        // Where runs are read in place, the address of the run; else that of the first key, to be looked up one by one.
        const bf16* keys = in_place ? place(unit, kv_head, position) : nullptr;
        return {keys, keys + values_at, int(from - position), int(to - position)};
    }

    __m512i load_chunk(const bf16* row, int64_t chunk) const {
        if (in_place) return _mm512_loadu_si512(row + chunk * CHUNK);
        int64_t left = s.head_dim - chunk * CHUNK;
        __mmask32 mask = left >= CHUNK ? 0xffffffffu : (1u << left) - 1;
        return _mm512_maskz_loadu_epi16(mask, row + chunk * CHUNK);
    }

    // --- memory ahead of its use ---

    // From now on `fetch` brings the keys and values of a tile closer, as far as positions below `end` go.
    void expect(const Unit& unit, int64_t tile, int64_t end) {
        num_coming = fetching = fetched = 0;
        if (!in_place) return;
        for (int64_t values = 0; values < 2; values++)
            for (int head = 0; head < unit.heads; head++)
                for (int64_t position = tile; position < std::min(tile + KEYS, end); position += RUN)
                    coming[num_coming++] = place(unit, unit.kv_head + head, position) + values * values_at;
    }

    void expect_unit(const Unit* unit) {
        num_coming = 0;
        if (!unit) return;
        int64_t first = unit->position_of(s, 0), last = unit->position_of(s, unit->count() - 1);
        int64_t start = std::max(unit->from, s.window ? first - s.window + 1 : 0);
        expect(*unit, start / KEYS * KEYS, std::min(unit->to, last + 1));
    }

    // A few lines, of which a run has a multiple. Called all through a tile's work: memory that is asked for in one go is
    // waited for, and stands still during the rest of the work.
    void fetch(int lines) {
        if (fetching == num_coming) return;
        const char* line = (const char*)coming[fetching] + fetched;
        for (int i = 0; i < lines; i++) _mm_prefetch(line + i * 64, _MM_HINT_T1);  // a tile may be all of the first level
        fetched += lines * 64;
        if (fetched < RUN * s.head_dim * int64_t(sizeof(bf16))) return;
        fetched = 0;
        fetching++;
    }

    void load_queries(const Unit& unit) {
        int64_t count = unit.each * unit.heads, each = unit.heads > 1 ? unit.each : QUERIES;
        for (int64_t first = 0, part = 0; first < count; first += each, part++) {
            int64_t lane = unit.heads > 1 ? first : 0, end = std::min(first + each, count);
            for (int64_t chunk = 0; chunk < chunks; chunk++) {
                vf rows[LANES] = {};
                for (int64_t i = first; i < end; i++)
                    rows[lane + i - first] = (vf)load_chunk(
                        queries + unit.token_of(s, i) * s.query_stride + unit.head_of(s, i) * s.head_dim, chunk);
                transpose(rows);
                memcpy(m.queries[part][chunk], rows, sizeof rows);
            }
        }
    }

    // --- one tile of keys ---

    void several_heads(const Unit& unit, int64_t tile) {
        clear_scores();
        for (int head = 0; head < unit.heads; head++) multiply_keys(unit, tile, head, m.queries[head]);
        pair_values(unit, tile, 0);  // keeps the vector units busy while the products are computed
        store_scores(0);
        __m512 shrink = weigh(groups[0], tile, 0);
        for (int head = 0; head < unit.heads; head++)
            rescale(shrink, m.sums[head], head * unit.each, (head + 1) * unit.each);
        for (int head = 0; head < unit.heads; head++) {
            if (head + 1 < unit.heads) pair_values(unit, tile, head + 1);
            add(m.sums[head], m.values[head % 2], 0);
        }
    }

    // The matrix unit computes the next group's scores while the vector units weigh this group's, and adds the values of
    // the group before.
    void several_groups(const Unit& unit, int64_t tile) {
        pair_values(unit, tile, 0);
        int seeing[MAX_GROUPS], count = 0;
        for (int index = 0; index < num_groups; index++)
            if (tile < groups[index].highest && tile + KEYS > groups[index].lowest) seeing[count++] = index;
        for (int i = -1; i <= count; i++) {
            int turn = i & 1;
            if (i + 1 < count) {
                clear_scores();
                multiply_keys(unit, tile, 0, m.queries[seeing[i + 1]]);
            }
            if (i >= 0 && i < count) {
                Group& group = groups[seeing[i]];
                rescale(weigh(group, tile, turn), m.sums[seeing[i]], 0, group.count);
            }
            if (i + 1 < count) store_scores(turn ^ 1);
            if (i > 0) add(m.sums[seeing[i - 1]], m.values[0], turn ^ 1);
        }
    }

    // A run of keys as the rows of tiles: in place, or copied together. What is not seen is masked later.
    const bf16* keys_at(const Unit& unit, int64_t tile, int head, int run) {
        const Run& r = now[head][run];
        bf16(*copied)[MAX_HEAD] = m.keys + run * RUN;
        if (!r.to) return nullptr;
        if (in_place) return r.keys;
        for (int k = 0; k < RUN; k++) {
            bool seen = k >= r.from && k < r.to;
            const bf16* row = seen ? place(unit, unit.kv_head + head, tile + run * RUN + k) : nullptr;
            for (int64_t chunk = 0; chunk < chunks; chunk++)
                _mm512_store_si512(copied[k] + chunk * CHUNK, seen ? load_chunk(row, chunk) : _mm512_setzero_si512());
        }
        return copied[0];
    }

    void clear_scores() {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }

    void multiply_keys(const Unit& unit, int64_t tile, int head, const bf16 (*query)[16][CHUNK]) {
        int64_t strides[RUNS];
        const bf16* keys[RUNS];
        for (int run = 0; run < RUNS; run++) {
            keys[run] = keys_at(unit, tile, head, run);
            strides[run] = keys[run] == m.keys[run * RUN] ? MAX_HEAD * 2 : s.head_dim * 2;
        }
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
            _tile_loadd(4, query[chunk], 64);
            if (keys[0]) {
                _tile_loadd(5, keys[0] + chunk * CHUNK, strides[0]);
                _tile_dpbf16ps(0, 5, 4);
            }
            fetch(8);
            if (keys[1]) {
                _tile_loadd(6, keys[1] + chunk * CHUNK, strides[1]);
                _tile_dpbf16ps(1, 6, 4);
            }
            fetch(8);
            if (keys[2]) {
                _tile_loadd(5, keys[2] + chunk * CHUNK, strides[2]);
                _tile_dpbf16ps(2, 5, 4);
            }
            fetch(8);
            if (keys[3]) {
                _tile_loadd(6, keys[3] + chunk * CHUNK, strides[3]);
                _tile_dpbf16ps(3, 6, 4);
            }
            fetch(8);
        }
    }

    void store_scores(int turn) {
        _tile_stored(0, m.scores[turn][0], 64);
        _tile_stored(1, m.scores[turn][16], 64);
        _tile_stored(2, m.scores[turn][32], 64);
        _tile_stored(3, m.scores[turn][48], 64);
    }

    // Cap and mask the scores where they need it, and find each query's largest. What is left to multiply them with,
    // to have them in units of log2, is returned by `scale_of`.
    __m512 shape_scores(const Group& group, int64_t tile, float (*scores)[QUERIES]) {
        int32_t first = group.positions[0], last = group.positions[group.count - 1];
        bool all_seen = tile + KEYS - 1 <= first && (!s.window || last - tile < s.window);
        __m512 top[4];
        for (__m512& part : top) part = _mm512_set1_ps(-INFINITY);
        if (all_seen && s.softcap <= 0) {
            for (int k = 0; k < KEYS; k += 4)
                for (int i = 0; i < 4; i++) top[i] = _mm512_max_ps(top[i], _mm512_load_ps(scores[k + i]));
        } else {
            __m512i position = _mm512_load_si512(group.positions);
            __m512i before = s.window ? _mm512_sub_epi32(position, _mm512_set1_epi32(s.window)) : _mm512_set1_epi32(-1);
            __m512 shrunk = _mm512_set1_ps(s.scale / s.softcap), cap = _mm512_set1_ps(s.softcap * LOG2E);
            for (int k = 0; k < KEYS; k++) {
                __m512 x = _mm512_load_ps(scores[k]);
                if (s.softcap > 0) x = _mm512_mul_ps((__m512)tanh((vf)_mm512_mul_ps(x, shrunk)), cap);
                __m512i key = _mm512_set1_epi32(tile + k);
                __mmask16 seen = _mm512_cmple_epi32_mask(key, position) & _mm512_cmpgt_epi32_mask(key, before);
                x = _mm512_mask_blend_ps(seen, _mm512_set1_ps(-INFINITY), x);
                _mm512_store_ps(scores[k], x);
                top[0] = _mm512_max_ps(top[0], x);
            }
        }
        return _mm512_max_ps(_mm512_max_ps(top[0], top[1]), _mm512_max_ps(top[2], top[3]));
    }

    __m512 scale_of() const { return _mm512_set1_ps(s.softcap > 0 ? 1.0f : s.scale * LOG2E); }

    // Turn the scores into weights relative to each query's base, which is a score that it has seen and follows its
    // largest once that is far above; what earlier sums shrink by is returned.
    __m512 weigh(Group& group, int64_t tile, int turn) {
        const __m512 far = _mm512_set1_ps(8.0f);  // weights are at most 2^8, which costs them no precision
        __m512 scale = scale_of();
        __m512 top = _mm512_mul_ps(shape_scores(group, tile, m.scores[turn]), scale);
        __mmask16 follows = _mm512_cmp_ps_mask(top, _mm512_add_ps(group.base, far), _CMP_GT_OQ);
        __m512 next = _mm512_mask_mov_ps(group.base, follows, top);
        // A query that has seen no key yet has -inf here; against a finite number all its weights become 0.
        __m512 base = _mm512_max_ps(next, _mm512_set1_ps(-1e30f));
        __m512 shrink = exp2(_mm512_sub_ps(group.base, base));
        __m512 sum[4] = {_mm512_mul_ps(group.total, shrink), _mm512_setzero_ps(), _mm512_setzero_ps(),
                         _mm512_setzero_ps()};
        // Item i of the first sixteen next to item i of the second: word 2 i takes i, word 2 i + 1 takes 16 + i.
        const vu index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const __m512i interleave = (__m512i)(index | (index + 16) << 16);
        for (int half = 0; half < KEYS / CHUNK; half++) {
            vf rows[LANES];
            for (int pair = 0; pair < LANES; pair++) {
                const float* scores = m.scores[turn][half * CHUNK + 2 * pair];
                __m512 even = exp2(_mm512_fmsub_ps(_mm512_load_ps(scores), scale, base));
                __m512 odd = exp2(_mm512_fmsub_ps(_mm512_load_ps(scores + QUERIES), scale, base));
                sum[2 * (pair % 2)] = _mm512_add_ps(sum[2 * (pair % 2)], even);
                sum[2 * (pair % 2) + 1] = _mm512_add_ps(sum[2 * (pair % 2) + 1], odd);
                rows[pair] = (vf)_mm512_permutexvar_epi16(interleave, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
            }
            transpose(rows);
            memcpy(m.weights[turn][half], rows, sizeof rows);
        }
        group.total = _mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3]));
        group.base = next;
        return shrink;
    }

    void rescale(__m512 shrink, float (*sums)[QUERIES][LANES], int first, int last) {
        if (_mm512_cmp_ps_mask(shrink, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) == 0) return;
        float by[LANES];
        _mm512_storeu_ps(by, shrink);
        for (int64_t part = 0; part < 2 * chunks; part++)
            for (int i = first; i < last; i++) store(sums[part][i], load(sums[part][i]) * by[i]);
    }

    // Values of two keys interleaved, as the unit wants them. The halves of a chunk hold every other four dimensions.
    // Those that are not seen count as zeros.
    void pair_values(const Unit& unit, int64_t tile, int head) {
        for (int run = 0; run < RUNS; run++) {
            const Run& r = now[head][run];
            bool whole = in_place && r.from == 0 && r.to == RUN;
            for (int pair = 0; pair < RUN / 2; pair++) {
                bf16* target = m.values[head % 2] + (run * RUN / 2 + pair) * chunks * 2 * CHUNK;
                fetch(2 * chunks);
                if (whole)
                    pair_up(r.values + 2 * pair * s.head_dim, r.values + (2 * pair + 1) * s.head_dim, target);
                else
                    pair_up(value_at(unit, tile, head, run, 2 * pair), value_at(unit, tile, head, run, 2 * pair + 1),
                            target);
            }
        }
    }

    const bf16* value_at(const Unit& unit, int64_t tile, int head, int run, int k) const {
        static const bf16 zeros[MAX_HEAD] = {};
        const Run& r = now[head][run];
        if (k < r.from || k >= r.to) return zeros;
        return place(unit, unit.kv_head + head, tile + run * RUN + k) + values_at;
    }

    void pair_up(const bf16* first, const bf16* second, bf16* target) const {
        for (int64_t chunk = 0; chunk < chunks; chunk++, target += 2 * CHUNK) {
            __m512i even = load_chunk(first, chunk), odd = load_chunk(second, chunk);
            _mm512_store_si512(target, _mm512_unpacklo_epi16(even, odd));
            _mm512_store_si512(target + CHUNK, _mm512_unpackhi_epi16(even, odd));
        }
    }

    void add(float (*sums)[QUERIES][LANES], const bf16* values, int turn) {
        int64_t stride = chunks * 2 * CHUNK * sizeof(bf16);
        const bf16* later = values + KEYS / 4 * chunks * 2 * CHUNK;  // of the second 32 keys
        _tile_loadd(4, m.weights[turn][0], 64);
        _tile_loadd(5, m.weights[turn][1], 64);
        for (int64_t chunk = 0; chunk < chunks; chunk++, sums += 2) {
            int64_t at = chunk * 2 * CHUNK;
            _tile_loadd(0, sums[0], 64);
            _tile_loadd(1, sums[1], 64);
            _tile_loadd(6, values + at, stride);
            _tile_dpbf16ps(0, 4, 6);
            fetch(8);
            _tile_loadd(7, values + at + CHUNK, stride);
            _tile_dpbf16ps(1, 4, 7);
            fetch(8);
            _tile_loadd(6, later + at, stride);
            _tile_dpbf16ps(0, 5, 6);
            fetch(8);
            _tile_loadd(7, later + at + CHUNK, stride);
            _tile_dpbf16ps(1, 5, 7);
            fetch(8);
            _tile_stored(0, sums[0], 64);
            _tile_stored(1, sums[1], 64);
        }
    }

    void finish(const Unit& unit) {
        for (int64_t i = 0; i < unit.count(); i++) {
            float totals[LANES];
            _mm512_storeu_ps(totals, group_of(unit, i).total);
            bf16* target = out + (unit.token_of(s, i) * s.heads + unit.head_of(s, i)) * s.head_dim;
            write(m.sums[part_of(unit, i)], i % QUERIES, 1.0f / totals[i % QUERIES], target);
        }
    }

    void write(const float (*sums)[QUERIES][LANES], int64_t lane, float scale, bf16* target) const {
        const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
        const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
            __m512 low = _mm512_load_ps(sums[2 * chunk][lane]), high = _mm512_load_ps(sums[2 * chunk + 1][lane]);
            int64_t d = chunk * CHUNK;
            store_upto(target + d, (vf)_mm512_permutex2var_ps(low, first, high) * scale, s.head_dim - d);
            if (d + LANES < s.head_dim)
                store_upto(target + d + LANES, (vf)_mm512_permutex2var_ps(low, second, high) * scale,
                           s.head_dim - d - LANES);
        }
    }
};

// Rows with few queries put several KV heads into one unit; those with many, up to four groups of 16 of one head. There
// are several units per thread where there is work for that, and those with most keys come first.
std::vector<Unit> amx_units(const Step& s, int64_t num_rows) {
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

}  // namespace

bool attend_amx(const Step& s, const bf16* queries, const bf16* kv, bf16* out, int64_t num_rows, bool parallel) {
    if (!use_amx()) return false;
    int64_t state_size = (1 + 2 * ((s.head_dim + CHUNK - 1) / CHUNK)) * LANES;
    run_units(s, num_rows, amx_units(s, num_rows), MAX_GROUPS * QUERIES, state_size, parallel, [&](const Unit& unit, const Unit* following) {
        static thread_local Scratch scratch;
        const TileConfig config;
        _tile_loadconfig(&config);
        AmxAttention(s, queries, kv, out, scratch).run(unit, following);
        _tile_release();
    });
    return true;
}

#else

bool attend_amx(const Step&, const bf16*, const bf16*, bf16*, int64_t, bool) { return false; }

#endif
