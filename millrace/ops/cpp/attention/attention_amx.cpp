// Attention for bfloat16 on the AMX unit, over the same tiles of 64 keys as attention.cpp.
//
// Scores are computed transposed, keys by queries: keys then come straight from the cache, and the softmax runs down
// the vectors with one query per lane. Weights are rounded to bfloat16 before they multiply the values.
//
// A unit of work has either up to 192 queries of one KV head, in groups of 16 lanes that share each tile of keys and
// values while it is in the first-level cache; or few queries of each of several KV heads, which share the lanes of one
// group: each head's products are added to the scores with zeros for the queries of the others, and of each head's sums
// only the rows of its own queries are used.
#include "attention/attention_amx.h"
#include "attention/attention_weights.h"

#if HAS_AMX

namespace {

constexpr int CHUNK = 32;  // inner items of one tile product
constexpr int MAX_CHUNKS = MAX_HEAD / CHUNK;
constexpr int SLOTS = 16;  // parts into which a pair's products are divided

struct Scratch {
    alignas(64) bf16 queries[PARTS][MAX_CHUNKS][16][CHUNK];  // [group or head][chunk][pair of dimensions][query][2]
    alignas(64) bf16 keys[KEYS][MAX_HEAD];                   // where they cannot be read in place
    alignas(64) float scores[2][KEYS][QUERIES];  // [turn]
    alignas(64) bf16 weights[2][KEYS / CHUNK][QUERIES][CHUNK];
    // [turn][pair of keys][chunk][half][dimension][2], without gaps between the pairs however many chunks there are
    alignas(64) bf16 values[2][KEYS / 2 * MAX_CHUNKS * 2 * CHUNK];
    alignas(64) Sums sums[PARTS];  // the vectors are halves of chunks
};

// Sixteen consecutive positions of one head. Of them from <= k < to are seen by some query; all others may hold
// anything, and there is nothing at all to read where `to` is 0.
struct Run {
    const bf16 *keys, *values;
    int from, to;
};

// Of a head of CHUNKS chunks, or, where that is 0, of any.
template <int CHUNKS>
struct AmxAttention : AmxUnit<bf16> {
    Scratch& m;
    const int64_t any_chunks;
    Run now[UNIT_HEADS][RUNS];  // those of the tile at hand, by head

    static int64_t chunks_of(const Step& s) { return (s.head_dim + CHUNK - 1) / CHUNK; }
    static int64_t vectors_of(const Step& s) { return 2 * chunks_of(s); }

    AmxAttention(const Step& s, const bf16* queries, const bf16* kv, bf16* out, Scratch& scratch)
        : AmxUnit(s, queries, kv, out, scratch.sums, vectors_of(s),
                  s.block_size % RUN == 0 && s.head_dim % CHUNK == 0),
          m(scratch),
          any_chunks(chunks_of(s)) {}

    int64_t num_chunks() const { return CHUNKS ? CHUNKS : any_chunks; }

    // --- which queries, and where their keys are ---

    void find_all(const Unit& unit, int64_t tile) {
        for (int head = 0; head < unit.heads; head++)
            for (int run = 0; run < RUNS; run++) now[head][run] = find(unit, unit.kv_head + head, tile + run * RUN);
    }

    Run find(const Unit& unit, int64_t kv_head, int64_t position) const {
        int64_t from = std::max(position, lowest), to = std::min(position + RUN, highest);
        if (from >= to) return {nullptr, nullptr, 0, 0};
        // Where runs are read in place, the address of the run; else that of the first key, to be looked up one by one.
        const bf16* keys = in_place ? place(unit, kv_head, position) : nullptr;
        return {keys, keys + cache.values_at, int(from - position), int(to - position)};
    }

    __m512i load_chunk(const bf16* row, int64_t chunk) const {
        if (in_place) return _mm512_loadu_si512(row + chunk * CHUNK);
        int64_t left = s.head_dim - chunk * CHUNK;
        __mmask32 mask = left >= CHUNK ? 0xffffffffu : (1u << left) - 1;
        return _mm512_maskz_loadu_epi16(mask, row + chunk * CHUNK);
    }

    void load_queries(const Unit& unit) {
        int64_t count = unit.count(), each = unit.heads > 1 ? unit.each : QUERIES;
        for (int64_t first = 0, part = 0; first < count; first += each, part++) {
            const bf16* rows[QUERIES] = {};  // null where there is none
            int64_t lane = unit.heads > 1 ? first : 0, end = std::min(first + each, count);
            for (int64_t i = first; i < end; i++) rows[lane + i - first] = query(i);
            for (int64_t chunk = 0; chunk < num_chunks(); chunk++) turn_queries(rows, chunk, m.queries[part][chunk]);
        }
    }

    void turn_queries(const bf16* const (&rows)[QUERIES], int64_t chunk, bf16 (*target)[CHUNK]) const {
        __m512i a[4][4];  // as transpose.h says
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++)
                a[i][j] = rows[4 * i + j] ? load_chunk(rows[4 * i + j], chunk) : _mm512_setzero_si512();
            gather_four(a[i]);
        }
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            __m512i turned[4] = {a[0][c], a[1][c], a[2][c], a[3][c]};
            spread_four(turned);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) _mm512_store_si512(target[c + 4 * j], turned[j]);
        }
    }

    // The sums of groups begin in tiles.
    void clear(const Unit& unit) {
        if (num_groups == 1 || unit.from) AmxUnit::clear(unit);
    }

    // --- units of one group, of one head or several: tile after tile ---

    // A step that decodes comes here with nothing in the caches, not even instructions: there are few of them.

    void one_group(const Unit& unit, const Unit* following) {
        for (int64_t tile = first_tile(); tile < highest; tile += KEYS) {
            find_all(unit, tile);
            expect_after(unit, tile, following);
            clear_scores();
            for (int head = 0; head < unit.heads; head++) multiply_keys(unit, tile, head, m.queries[head]);
            pair_values(unit, tile, m.values[0], 0);  // keeps the vector units busy while the products are computed
            store_scores(0);
            shape_scores(groups[0], tile, m.scores[0], KEYS);
            __m512 shrink = _mm512_set1_ps(1.0f);
            if (follow(groups[0], m.scores[0], KEYS, unit_scale(), shrink))
                for (int head = 0; head < unit.heads; head++)
                    rescale(shrink, m.sums[head], head * unit.each, (head + 1) * unit.each);
            weigh(groups[0], m.scores[0], unit_scale(), KEYS / CHUNK, m.weights[0], [](int, int) {});
            before_tile_loads();
            for (int head = 0; head < unit.heads; head++) {
                if (head + 1 < unit.heads) pair_values(unit, tile, m.values[(head + 1) % 2], head + 1);
                before_tile_loads();
                add(m.sums[head], m.values[head % 2], 0);
            }
        }
    }

    // --- units of several groups: pairs of a tile of keys and a group that sees some of it, tile after tile ---

    struct Pair {
        int64_t tile;
        int group;
    };

    // The next pair; false where there is none.
    bool advance(Pair& pair) const {
        do {
            if (++pair.group == num_groups) pair = {pair.tile + KEYS, 0};
            if (pair.tile >= highest) return false;
        } while (pair.tile >= groups[pair.group].highest || pair.tile + KEYS <= groups[pair.group].lowest);
        return true;
    }

    bf16* values_of(const Pair& pair) { return m.values[pair.tile / KEYS % 2]; }

    // What the matrix unit has to do while the vector units weigh a pair: the scores of the pair after it, and the sums
    // of the pair before it.
    struct Products {
        const bf16 (*queries)[16][CHUNK] = nullptr;  // null where there is no pair after it
        const bf16* keys[RUNS];
        int64_t key_stride;
        float (*sums)[QUERIES][LANES] = nullptr;  // null where there is no pair before it
        const bf16* values;
        bool fresh;        // the sums begin here
        int halves, turn;  // of the weights; the scores go to the same turn
    };

    void several_groups(const Unit& unit, const Unit* following) {
        Pair now{first_tile(), -1}, next = now;
        Products products;
        bool more = advance(next);
        enter(unit, next.tile, following);
        plan_scores(products, unit, next, 0);
        for (int slot = 0; slot < SLOTS / 2; slot++) multiply(products, slot);
        store_last_scores(products);
        for (int turn = 0; more; turn ^= 1) {
            bool entered = next.tile != now.tile || now.group < 0;
            now = next;
            if (entered) pair_values(unit, now.tile, values_of(now), 0);
            more = advance(next);
            products.queries = nullptr;
            if (more && next.tile != now.tile) enter(unit, next.tile, following);
            if (more) plan_scores(products, unit, next, turn ^ 1);
            before_tile_loads();
            weigh_pair(now, turn, products);
        }
        before_tile_loads();
        for (int slot = SLOTS / 2; slot < SLOTS; slot++) multiply(products, slot);
        store_last_sums(products);
    }

    void enter(const Unit& unit, int64_t tile, const Unit* following) {
        find_all(unit, tile);
        expect_after(unit, tile, following);
    }

    // Weigh a pair while the products are computed; then they have its own sums ahead.
    __attribute__((always_inline)) void weigh_pair(const Pair& pair, int turn, Products& products) {
        Group& group = groups[pair.group];
        int halves = groups[pair.group].highest - pair.tile > CHUNK ? 2 : 1;
        __m512 shrink = _mm512_set1_ps(1.0f);
        shape_scores(group, pair.tile, m.scores[turn], halves * CHUNK);
        bool shrinks = follow(group, m.scores[turn], halves * CHUNK, unit_scale(), shrink);
        auto between = [&](int half, int eighth) __attribute__((always_inline)) {
            if (halves == 1) {
                multiply(products, 2 * eighth);
                multiply(products, 2 * eighth + 1);
            } else if (half == 0) {
                multiply(products, eighth);
            } else {
                multiply(products, SLOTS / 2 + eighth);
            }
        };
        weigh(group, m.scores[turn], unit_scale(), halves, m.weights[turn], between);
        store_last_sums(products);
        if (shrinks && group.begun) rescale(shrink, m.sums[pair.group], 0, group.count);
        products.sums = m.sums[pair.group];
        products.values = values_of(pair);
        products.fresh = !group.begun;
        products.halves = halves;
        products.turn = turn;
        group.begun = true;
    }

    void plan_scores(Products& products, const Unit& unit, const Pair& pair, int turn) {
        products.queries = m.queries[pair.group];
        products.turn = turn;
        products.key_stride = in_place ? s.head_dim * 2 : MAX_HEAD * 2;
        for (int run = 0; run < RUNS; run++)
            products.keys[run] =
                pair.tile + run * RUN < groups[pair.group].highest ? keys_at(unit, pair.tile, 0, run) : nullptr;
    }

    // The part of the products that belongs to a slot: in the first half of them scores, two slots for each run of keys;
    // in the second half sums. What is complete is stored a slot later, and a little at a time: stores wait in a queue,
    // in which there is room for seven tiles.
    __attribute__((always_inline)) void multiply(const Products& p, int slot) {
        if (slot < SLOTS / 2) {
            if (p.queries) multiply_scores(p, slot / 2, slot % 2);
        } else {
            if (slot == SLOTS / 2 && p.queries) store_last_scores(p);
            if (p.sums) multiply_sums(p, slot - SLOTS / 2);
        }
        fetch(8);
    }

    __attribute__((always_inline)) void multiply_scores(const Products& p, int run, int part) {
        int64_t middle = (num_chunks() + 1) / 2, first = part ? middle : 0, end = part ? num_chunks() : middle;
        bool reload = run == 0 || num_chunks() > 2;  // two chunks of queries stay in tiles
        if (part == 0 && run % 2 == 0) _tile_zero(0);
        if (part == 0 && run % 2 == 1) _tile_zero(1);
        for (int64_t chunk = first; chunk < end; chunk++) {
            if (chunk % 2 == 0 && reload) _tile_loadd(4, p.queries[chunk], 64);
            if (chunk % 2 == 1 && reload) _tile_loadd(5, p.queries[chunk], 64);
            if (!p.keys[run]) continue;
            const bf16* keys = p.keys[run] + chunk * CHUNK;
            if (chunk % 2 == 0) {
                _tile_loadd(2, keys, p.key_stride);
                if (run % 2 == 0)
                    _tile_dpbf16ps(0, 2, 4);
                else
                    _tile_dpbf16ps(1, 2, 4);
            } else {
                _tile_loadd(3, keys, p.key_stride);
                if (run % 2 == 0)
                    _tile_dpbf16ps(0, 3, 5);
                else
                    _tile_dpbf16ps(1, 3, 5);
            }
        }
        if (part == 1 || run == 0) return;
        if (run % 2 == 0)
            _tile_stored(1, m.scores[p.turn][(run - 1) * RUN], 64);
        else
            _tile_stored(0, m.scores[p.turn][(run - 1) * RUN], 64);
    }

    void store_last_scores(const Products& p) { _tile_stored(1, m.scores[p.turn][(RUNS - 1) * RUN], 64); }

    __attribute__((always_inline)) void multiply_sums(const Products& p, int slot) {
        int64_t stride = num_chunks() * 2 * CHUNK * sizeof(bf16), later = KEYS / 4 * num_chunks() * 2 * CHUNK;
        if (slot == 0) {
            _tile_loadd(6, m.weights[p.turn][0], 64);
            if (p.halves > 1) _tile_loadd(7, m.weights[p.turn][1], 64);
        }
        for (int64_t i = slot * num_chunks() / 2; i < (slot + 1) * num_chunks() / 2; i++) {
            int64_t v = i / 2;
            const bf16* values = p.values + v * CHUNK;
            if (i % 2 == 0) {
                _tile_loadd(2, values, stride);
                v % 2 == 0 ? begin_even(p, v) : begin_odd(p, v);
            } else {
                if (p.halves > 1) _tile_loadd(3, values + later, stride);
                v % 2 == 0 ? end_even(p, v) : end_odd(p, v);
            }
        }
    }

    // The first and the second 32 keys of a vector of sums, which is in tile 0 or 1. The vector before it is stored.
    __attribute__((always_inline)) void begin_even(const Products& p, int64_t v) {
        if (p.fresh)
            _tile_zero(0);
        else
            _tile_loadd(0, p.sums[v], 64);
        _tile_dpbf16ps(0, 6, 2);
    }

    __attribute__((always_inline)) void begin_odd(const Products& p, int64_t v) {
        if (p.fresh)
            _tile_zero(1);
        else
            _tile_loadd(1, p.sums[v], 64);
        _tile_dpbf16ps(1, 6, 2);
    }

    __attribute__((always_inline)) void end_even(const Products& p, int64_t v) {
        if (p.halves > 1) _tile_dpbf16ps(0, 7, 3);
        if (v) _tile_stored(1, p.sums[v - 1], 64);
    }

    __attribute__((always_inline)) void end_odd(const Products& p, int64_t v) {
        if (p.halves > 1) _tile_dpbf16ps(1, 7, 3);
        _tile_stored(0, p.sums[v - 1], 64);
    }

    void store_last_sums(const Products& p) {
        if (p.sums) _tile_stored(1, p.sums[vectors - 1], 64);
    }

    // --- one tile of keys ---

    // A run of keys as the rows of tiles: in place, or copied together. What is not seen is masked later.
    const bf16* keys_at(const Unit& unit, int64_t tile, int head, int run) {
        const Run& r = now[head][run];
        bf16(*copied)[MAX_HEAD] = m.keys + run * RUN;
        if (!r.to) return nullptr;
        if (in_place) return r.keys;
        for (int k = 0; k < RUN; k++) {
            bool seen = k >= r.from && k < r.to;
            const bf16* row = seen ? place(unit, unit.kv_head + head, tile + run * RUN + k) : nullptr;
            for (int64_t chunk = 0; chunk < num_chunks(); chunk++)
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
        for (int64_t chunk = 0; chunk < num_chunks(); chunk++) {
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

    // Values of two keys interleaved, as the unit wants them. The halves of a chunk hold every other four dimensions.
    // Those that are not seen count as zeros.
    void pair_values(const Unit& unit, int64_t tile, bf16* to, int head) {
        for (int run = 0; run < RUNS; run++) {
            const Run& r = now[head][run];
            bool whole = in_place && r.from == 0 && r.to == RUN;
            for (int pair = 0; pair < RUN / 2; pair++) {
                bf16* target = to + (run * RUN / 2 + pair) * num_chunks() * 2 * CHUNK;
                fetch(2 * num_chunks());
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
        return place(unit, unit.kv_head + head, tile + run * RUN + k) + cache.values_at;
    }

    void pair_up(const bf16* first, const bf16* second, bf16* target) const {
        for (int64_t chunk = 0; chunk < num_chunks(); chunk++, target += 2 * CHUNK) {
            __m512i even = load_chunk(first, chunk), odd = load_chunk(second, chunk);
            _mm512_store_si512(target, _mm512_unpacklo_epi16(even, odd));
            _mm512_store_si512(target + CHUNK, _mm512_unpackhi_epi16(even, odd));
        }
    }

    void add(float (*sums)[QUERIES][LANES], const bf16* values, int turn) {
        int64_t stride = num_chunks() * 2 * CHUNK * sizeof(bf16);
        const bf16* later = values + KEYS / 4 * num_chunks() * 2 * CHUNK;  // of the second 32 keys
        _tile_loadd(4, m.weights[turn][0], 64);
        _tile_loadd(5, m.weights[turn][1], 64);
        for (int64_t chunk = 0; chunk < num_chunks(); chunk++, sums += 2) {
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
        alignas(64) float shares[MAX_GROUPS][LANES];
        for (int group = 0; group < num_groups; group++)
            _mm512_store_ps(shares[group], _mm512_div_ps(_mm512_set1_ps(1.0f), groups[group].total));
        for (int64_t i = 0; i < unit.count(); i++)
            write(m.sums[part_of(unit, i)], i % QUERIES, shares[unit.heads > 1 ? 0 : i / QUERIES][i % QUERIES], target(i));
    }

    void write(const float (*sums)[QUERIES][LANES], int64_t lane, float share, bf16* target) const {
        const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
        const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
        const __m512 scale = _mm512_set1_ps(share);
        for (int64_t chunk = 0; chunk < num_chunks(); chunk++) {
            __m512 even = _mm512_load_ps(sums[2 * chunk][lane]), odd = _mm512_load_ps(sums[2 * chunk + 1][lane]);
            __m512 low = _mm512_mul_ps(_mm512_permutex2var_ps(even, first, odd), scale);
            __m512 high = _mm512_mul_ps(_mm512_permutex2var_ps(even, second, odd), scale);
            int64_t left = s.head_dim - chunk * CHUNK;
            __mmask32 mask = left >= CHUNK ? 0xffffffffu : (1u << left) - 1;
            _mm512_mask_storeu_epi16(target + chunk * CHUNK, mask, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
    }
};

}  // namespace

bool attend_amx(const Step& s, const bf16* queries, const bf16* kv, bf16* out, int64_t num_rows, bool parallel) {
    switch (s.head_dim) {  // the commonest sizes have code of their own
        case 2 * CHUNK:
            return attend_units<AmxAttention<2>, Scratch>(s, queries, kv, out, num_rows, parallel);
        case 4 * CHUNK:
            return attend_units<AmxAttention<4>, Scratch>(s, queries, kv, out, num_rows, parallel);
        default:
            return attend_units<AmxAttention<0>, Scratch>(s, queries, kv, out, num_rows, parallel);
    }
}

#else

bool attend_amx(const Step&, const bf16*, const bf16*, bf16*, int64_t, bool) { return false; }

#endif
