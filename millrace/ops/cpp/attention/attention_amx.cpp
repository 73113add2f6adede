// Attention for bfloat16 on the AMX unit, over the same tiles of 64 keys as attention.cpp.
//
// Scores are computed transposed, keys by queries: keys are loaded directly from the cache, and the softmax works on
// vectors with one query per lane. Weights are rounded to bfloat16 before they are multiplied with the values.
//
// A unit of work has either up to 192 queries of one KV head, in groups of 16 lanes that share each tile of keys and
// values while it is in the L1 cache; or few queries of each of several KV heads, which share the lanes of one group:
// each head's products are added to the scores with zeros for the queries of other heads, and only the rows of its own
// queries are used from each head's sums.
#include "amx.h"

#if HAS_AMX

#include "attention/attention_amx.h"
#include "attention/attention_weights.h"

namespace {

constexpr int CHUNK = 32;  // inner dimension of one tile product
constexpr int MAX_CHUNKS = MAX_HEAD / CHUNK;
constexpr int SLOTS = 16;  // steps into which a pair's products are divided

struct Scratch {
    alignas(64) bf16 queries[PARTS][MAX_CHUNKS][16][CHUNK];  // [group or head][chunk][pair of dimensions][query][2]
    alignas(64) bf16 keys[KEYS][MAX_HEAD];                   // used if they cannot be read in place
    alignas(64) float scores[2][KEYS][QUERIES];  // [buffer]
    alignas(64) bf16 weights[2][KEYS / CHUNK][QUERIES][CHUNK];
    // [buffer][pair of keys][chunk][half][dimension][2], contiguous for any number of chunks
    alignas(64) bf16 values[2][KEYS / 2 * MAX_CHUNKS * 2 * CHUNK];
    alignas(64) Sums sums[PARTS];  // vectors are halves of chunks
};

// Sixteen consecutive positions of one head. Some query sees from <= k < to; the others may hold anything. If `to` is 0
// there is nothing to read.
struct Run {
    const bf16 *keys, *values;
    int from, to;
};

// CHUNKS: chunks of a head, or 0 for any number.
template <int CHUNKS>
struct AmxAttention : AmxUnit<bf16> {
    Scratch& m;
    const int64_t any_chunks;
    Run now[UNIT_HEADS][RUNS];  // runs of the current tile, by head

    static int64_t chunks_of(const Step& s) { return (s.head_dim + CHUNK - 1) / CHUNK; }
    static int64_t vectors_of(const Step& s) { return 2 * chunks_of(s); }

    AmxAttention(const Step& s, const bf16* queries, const bf16* kv, bf16* out, Scratch& scratch)
        : AmxUnit(s, queries, kv, out, scratch.sums, vectors_of(s),
                  s.block_size % RUN == 0 && s.head_dim % CHUNK == 0),
          m(scratch),
          any_chunks(chunks_of(s)) {}

    int64_t num_chunks() const { return CHUNKS ? CHUNKS : any_chunks; }

    // --- queries, and addresses of their keys ---

    void locate_all(const Unit& unit, int64_t tile) {
        for (int head = 0; head < unit.heads; head++)
            for (int run = 0; run < RUNS; run++) now[head][run] = locate(unit, unit.kv_head + head, tile + run * RUN);
    }

    Run locate(const Unit& unit, int64_t kv_head, int64_t position) const {
        int64_t from = std::max(position, lowest), to = std::min(position + RUN, highest);
        if (from >= to) return {nullptr, nullptr, 0, 0};
        // The address of the run if it is read in place; otherwise keys are looked up one by one.
        const bf16* keys = in_place ? key_at(unit, kv_head, position) : nullptr;
        return {keys, keys + cache.values_at, int(from - position), int(to - position)};
    }

    __m512i load_chunk(const bf16* row, int64_t chunk) const {
        if (in_place) return _mm512_loadu_si512(row + chunk * CHUNK);
        int64_t left = s.head_dim - chunk * CHUNK;
        __mmask32 mask = left >= CHUNK ? 0xffffffffu : (1u << left) - 1;
        return _mm512_maskz_loadu_epi16(mask, row + chunk * CHUNK);
    }

    void load_queries(const Unit& unit) {
        int64_t count = unit.count(), per_head = unit.heads > 1 ? unit.per_head : QUERIES;
        for (int64_t first = 0, part = 0; first < count; first += per_head, part++) {
            const bf16* rows[QUERIES] = {};  // null: no query
            int64_t lane = unit.heads > 1 ? first : 0, end = std::min(first + per_head, count);
            for (int64_t i = first; i < end; i++) rows[lane + i - first] = query(i);
            for (int64_t chunk = 0; chunk < num_chunks(); chunk++) transpose_queries(rows, chunk, m.queries[part][chunk]);
        }
    }

    void transpose_queries(const bf16* const (&rows)[QUERIES], int64_t chunk, bf16 (*target)[CHUNK]) const {
        __m512i a[4][4];  // see transpose.h
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++)
                a[i][j] = rows[4 * i + j] ? load_chunk(rows[4 * i + j], chunk) : _mm512_setzero_si512();
            gather_four(a[i]);
        }
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            __m512i transposed[4] = {a[0][c], a[1][c], a[2][c], a[3][c]};
            spread_four(transposed);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) _mm512_store_si512(target[c + 4 * j], transposed[j]);
        }
    }

    // With several groups the sums start in tile registers, so memory need not be cleared.
    void clear(const Unit& unit) {
        if (num_groups == 1 || unit.from) AmxUnit::clear(unit);
    }

    // --- units of one group, of one or several heads: tile by tile ---

    // Decode steps come here with cold caches, instructions included, so the code is kept short.

    void one_group(const Unit& unit, const Unit* following) {
        for (int64_t tile = first_tile(); tile < highest; tile += KEYS) {
            locate_all(unit, tile);
            plan_prefetch_after(unit, tile, following);
            clear_scores();
            for (int head = 0; head < unit.heads; head++) multiply_keys(unit, tile, head, m.queries[head]);
            interleave_values(unit, tile, m.values[0], 0);  // vector work while the matrix unit computes the products
            store_scores(0);
            cap_and_mask(groups[0], tile, m.scores[0], KEYS);
            __m512 shrink = _mm512_set1_ps(1.0f);
            if (update_base(groups[0], m.scores[0], KEYS, unit_scale(), shrink))
                for (int head = 0; head < unit.heads; head++)
                    rescale(shrink, m.sums[head], head * unit.per_head, (head + 1) * unit.per_head);
            weigh(groups[0], m.scores[0], unit_scale(), KEYS / CHUNK, m.weights[0], [](int, int) {});
            before_tile_loads();
            for (int head = 0; head < unit.heads; head++) {
                if (head + 1 < unit.heads) interleave_values(unit, tile, m.values[(head + 1) % 2], head + 1);
                before_tile_loads();
                add(m.sums[head], m.values[head % 2], 0);
            }
        }
    }

    // --- units of several groups: pairs of a tile of keys and a group that sees part of it, tile by tile ---

    struct Pair {
        int64_t tile;
        int group;
    };

    // Moves to the next pair; false if there is none.
    bool advance(Pair& pair) const {
        do {
            if (++pair.group == num_groups) pair = {pair.tile + KEYS, 0};
            if (pair.tile >= highest) return false;
        } while (pair.tile >= groups[pair.group].highest || pair.tile + KEYS <= groups[pair.group].lowest);
        return true;
    }

    bf16* values_of(const Pair& pair) { return m.values[pair.tile / KEYS % 2]; }

    // Products for the matrix unit while the vector units weigh a pair: the scores of the next pair, and the sums of
    // the previous one.
    struct Products {
        const bf16 (*queries)[16][CHUNK] = nullptr;  // null if there is no next pair
        const bf16* keys[RUNS];
        int64_t key_stride;
        float (*sums)[QUERIES][LANES] = nullptr;  // null if there is no previous pair
        const bf16* values;
        bool is_first;        // the sums start at zero
        int halves, buffer;  // of the weights; the scores use the same buffer index
    };

    void several_groups(const Unit& unit, const Unit* following) {
        Pair now{first_tile(), -1}, next = now;
        Products products;
        bool more = advance(next);
        enter_tile(unit, next.tile, following);
        plan_scores(products, unit, next, 0);
        for (int slot = 0; slot < SLOTS / 2; slot++) multiply(products, slot);
        store_last_scores(products);
        for (int buffer = 0; more; buffer ^= 1) {
            bool entered = next.tile != now.tile || now.group < 0;
            now = next;
            if (entered) interleave_values(unit, now.tile, values_of(now), 0);
            more = advance(next);
            products.queries = nullptr;
            if (more && next.tile != now.tile) enter_tile(unit, next.tile, following);
            if (more) plan_scores(products, unit, next, buffer ^ 1);
            before_tile_loads();
            weigh_and_multiply(now, buffer, products);
        }
        before_tile_loads();
        for (int slot = SLOTS / 2; slot < SLOTS; slot++) multiply(products, slot);
        store_last_sums(products);
    }

    void enter_tile(const Unit& unit, int64_t tile, const Unit* following) {
        locate_all(unit, tile);
        plan_prefetch_after(unit, tile, following);
    }

    // Weighs a pair while the matrix unit computes `products`, then sets them up for the sums of this pair.
    __attribute__((always_inline)) void weigh_and_multiply(const Pair& pair, int buffer, Products& products) {
        Group& group = groups[pair.group];
        int halves = groups[pair.group].highest - pair.tile > CHUNK ? 2 : 1;
        __m512 shrink = _mm512_set1_ps(1.0f);
        cap_and_mask(group, pair.tile, m.scores[buffer], halves * CHUNK);
        bool shrinks = update_base(group, m.scores[buffer], halves * CHUNK, unit_scale(), shrink);
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
        weigh(group, m.scores[buffer], unit_scale(), halves, m.weights[buffer], between);
        store_last_sums(products);
        if (shrinks && group.has_sums) rescale(shrink, m.sums[pair.group], 0, group.count);
        products.sums = m.sums[pair.group];
        products.values = values_of(pair);
        products.is_first = !group.has_sums;
        products.halves = halves;
        products.buffer = buffer;
        group.has_sums = true;
    }

    void plan_scores(Products& products, const Unit& unit, const Pair& pair, int buffer) {
        products.queries = m.queries[pair.group];
        products.buffer = buffer;
        products.key_stride = in_place ? s.head_dim * 2 : MAX_HEAD * 2;
        for (int run = 0; run < RUNS; run++)
            products.keys[run] =
                pair.tile + run * RUN < groups[pair.group].highest ? keys_at(unit, pair.tile, 0, run) : nullptr;
    }

    // The products of one slot: the first half of the slots computes scores, two slots per run of keys, the second half
    // sums. Results are stored one slot later and a little at a time: the store queue has room for seven tiles.
    __attribute__((always_inline)) void multiply(const Products& p, int slot) {
        if (slot < SLOTS / 2) {
            if (p.queries) multiply_scores(p, slot / 2, slot % 2);
        } else {
            if (slot == SLOTS / 2 && p.queries) store_last_scores(p);
            if (p.sums) multiply_sums(p, slot - SLOTS / 2);
        }
        prefetch_lines(8);
    }

    __attribute__((always_inline)) void multiply_scores(const Products& p, int run, int part) {
        int64_t middle = (num_chunks() + 1) / 2, first = part ? middle : 0, end = part ? num_chunks() : middle;
        bool reload = run == 0 || num_chunks() > 2;  // two chunks of queries stay in tile registers
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
            _tile_stored(1, m.scores[p.buffer][(run - 1) * RUN], 64);
        else
            _tile_stored(0, m.scores[p.buffer][(run - 1) * RUN], 64);
    }

    void store_last_scores(const Products& p) { _tile_stored(1, m.scores[p.buffer][(RUNS - 1) * RUN], 64); }

    __attribute__((always_inline)) void multiply_sums(const Products& p, int slot) {
        int64_t stride = num_chunks() * 2 * CHUNK * sizeof(bf16), later = KEYS / 4 * num_chunks() * 2 * CHUNK;
        if (slot == 0) {
            _tile_loadd(6, m.weights[p.buffer][0], 64);
            if (p.halves > 1) _tile_loadd(7, m.weights[p.buffer][1], 64);
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

    // First and second 32 keys of a vector of sums, in tile register 0 or 1. Then the previous vector is stored.
    __attribute__((always_inline)) void begin_even(const Products& p, int64_t v) {
        if (p.is_first)
            _tile_zero(0);
        else
            _tile_loadd(0, p.sums[v], 64);
        _tile_dpbf16ps(0, 6, 2);
    }

    __attribute__((always_inline)) void begin_odd(const Products& p, int64_t v) {
        if (p.is_first)
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

    // A run of keys as rows of a tile: in place or copied. Keys that are not seen are masked later.
    const bf16* keys_at(const Unit& unit, int64_t tile, int head, int run) {
        const Run& r = now[head][run];
        bf16(*copied)[MAX_HEAD] = m.keys + run * RUN;
        if (!r.to) return nullptr;
        if (in_place) return r.keys;
        for (int k = 0; k < RUN; k++) {
            bool seen = k >= r.from && k < r.to;
            const bf16* row = seen ? key_at(unit, unit.kv_head + head, tile + run * RUN + k) : nullptr;
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
            prefetch_lines(8);
            if (keys[1]) {
                _tile_loadd(6, keys[1] + chunk * CHUNK, strides[1]);
                _tile_dpbf16ps(1, 6, 4);
            }
            prefetch_lines(8);
            if (keys[2]) {
                _tile_loadd(5, keys[2] + chunk * CHUNK, strides[2]);
                _tile_dpbf16ps(2, 5, 4);
            }
            prefetch_lines(8);
            if (keys[3]) {
                _tile_loadd(6, keys[3] + chunk * CHUNK, strides[3]);
                _tile_dpbf16ps(3, 6, 4);
            }
            prefetch_lines(8);
        }
    }

    void store_scores(int buffer) {
        _tile_stored(0, m.scores[buffer][0], 64);
        _tile_stored(1, m.scores[buffer][16], 64);
        _tile_stored(2, m.scores[buffer][32], 64);
        _tile_stored(3, m.scores[buffer][48], 64);
    }

    // Interleaves the values of two keys, as the AMX unit requires. The halves of a chunk hold alternating groups of
    // four dimensions. Values of unseen keys are zeros.
    void interleave_values(const Unit& unit, int64_t tile, bf16* to, int head) {
        for (int run = 0; run < RUNS; run++) {
            const Run& r = now[head][run];
            bool whole = in_place && r.from == 0 && r.to == RUN;
            for (int pair = 0; pair < RUN / 2; pair++) {
                bf16* target = to + (run * RUN / 2 + pair) * num_chunks() * 2 * CHUNK;
                prefetch_lines(2 * num_chunks());
                if (whole)
                    interleave_pair(r.values + 2 * pair * s.head_dim, r.values + (2 * pair + 1) * s.head_dim, target);
                else
                    interleave_pair(value_at(unit, tile, head, run, 2 * pair), value_at(unit, tile, head, run, 2 * pair + 1),
                            target);
            }
        }
    }

    const bf16* value_at(const Unit& unit, int64_t tile, int head, int run, int k) const {
        static const bf16 zeros[MAX_HEAD] = {};
        const Run& r = now[head][run];
        if (k < r.from || k >= r.to) return zeros;
        return key_at(unit, unit.kv_head + head, tile + run * RUN + k) + cache.values_at;
    }

    void interleave_pair(const bf16* first, const bf16* second, bf16* target) const {
        for (int64_t chunk = 0; chunk < num_chunks(); chunk++, target += 2 * CHUNK) {
            __m512i even = load_chunk(first, chunk), odd = load_chunk(second, chunk);
            _mm512_store_si512(target, _mm512_unpacklo_epi16(even, odd));
            _mm512_store_si512(target + CHUNK, _mm512_unpackhi_epi16(even, odd));
        }
    }

    void add(float (*sums)[QUERIES][LANES], const bf16* values, int buffer) {
        int64_t stride = num_chunks() * 2 * CHUNK * sizeof(bf16);
        const bf16* later = values + KEYS / 4 * num_chunks() * 2 * CHUNK;  // values of the second 32 keys
        _tile_loadd(4, m.weights[buffer][0], 64);
        _tile_loadd(5, m.weights[buffer][1], 64);
        for (int64_t chunk = 0; chunk < num_chunks(); chunk++, sums += 2) {
            int64_t at = chunk * 2 * CHUNK;
            _tile_loadd(0, sums[0], 64);
            _tile_loadd(1, sums[1], 64);
            _tile_loadd(6, values + at, stride);
            _tile_dpbf16ps(0, 4, 6);
            prefetch_lines(8);
            _tile_loadd(7, values + at + CHUNK, stride);
            _tile_dpbf16ps(1, 4, 7);
            prefetch_lines(8);
            _tile_loadd(6, later + at, stride);
            _tile_dpbf16ps(0, 5, 6);
            prefetch_lines(8);
            _tile_loadd(7, later + at + CHUNK, stride);
            _tile_dpbf16ps(1, 5, 7);
            prefetch_lines(8);
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
    switch (s.head_dim) {  // specialised for the most common sizes
        case 2 * CHUNK:
            return attend_units<AmxAttention<2>, Scratch>(s, queries, kv, out, num_rows, parallel);
        case 4 * CHUNK:
            return attend_units<AmxAttention<4>, Scratch>(s, queries, kv, out, num_rows, parallel);
        default:
            return attend_units<AmxAttention<0>, Scratch>(s, queries, kv, out, num_rows, parallel);
    }
}

#endif
