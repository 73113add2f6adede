// Attention for bfloat16 on the AMX unit, over the same tiles of 64 keys as attention.cpp.
//
// Scores are computed transposed, keys by queries: keys then come straight from the cache, and the softmax runs down
// the vectors with one query per lane. Weights are rounded to bfloat16 before they multiply the values.
//
// A unit of work has either up to 64 queries of one KV head, in groups of 16 lanes that share each tile of keys and
// values while it is in the first-level cache; or few queries of each of several KV heads, which share the lanes of one
// group: each head's products are added to the scores with zeros for the queries of the others, and of each head's sums
// only the rows of its own queries are used.
#include "attention_amx.h"

#if HAS_AMX

namespace {

constexpr int CHUNK = 32;  // inner items of one tile product
constexpr int MAX_CHUNKS = MAX_HEAD / CHUNK;

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

struct AmxAttention : AmxUnit<bf16> {
    Scratch& m;
    int64_t chunks;
    Run now[UNIT_HEADS][RUNS];  // those of the tile at hand, by head

    static int64_t chunks_of(const Step& s) { return (s.head_dim + CHUNK - 1) / CHUNK; }
    static int64_t vectors_of(const Step& s) { return 2 * chunks_of(s); }

    AmxAttention(const Step& s, const bf16* queries, const bf16* kv, bf16* out, Scratch& scratch)
        : AmxUnit(s, queries, kv, out, scratch.sums, vectors_of(s),
                  s.block_size % RUN == 0 && s.head_dim % CHUNK == 0),
          m(scratch),
          chunks(chunks_of(s)) {}

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
        int64_t count = unit.each * unit.heads, each = unit.heads > 1 ? unit.each : QUERIES;
        for (int64_t first = 0, part = 0; first < count; first += each, part++) {
            int64_t lane = unit.heads > 1 ? first : 0, end = std::min(first + each, count);
            for (int64_t chunk = 0; chunk < chunks; chunk++) {
                vf rows[LANES] = {};
                for (int64_t i = first; i < end; i++)
                    rows[lane + i - first] = (vf)load_chunk(query(i), chunk);
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
        // Weights wait before they can be loaded as tiles. With few groups other work has to come in between.
        bool few = num_groups <= 2;
        if (!few) pair_values(unit, tile, 0);
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
                if (few && i == 0) pair_values(unit, tile, 0);
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
            __m512i turning[4][4];  // as transpose.h says
#pragma GCC unroll 4
            for (int step = 0; step < 4; step++) {
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    const float* scores = m.scores[turn][half * CHUNK + 8 * step + 2 * i];
                    __m512 even = exp2(_mm512_fmsub_ps(_mm512_load_ps(scores), scale, base));
                    __m512 odd = exp2(_mm512_fmsub_ps(_mm512_load_ps(scores + QUERIES), scale, base));
                    sum[2 * (i % 2)] = _mm512_add_ps(sum[2 * (i % 2)], even);
                    sum[2 * (i % 2) + 1] = _mm512_add_ps(sum[2 * (i % 2) + 1], odd);
                    turning[step][i] =
                        _mm512_permutexvar_epi16(interleave, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
                }
                gather_four(turning[step]);
            }
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) {
                __m512i rows[4] = {turning[0][c], turning[1][c], turning[2][c], turning[3][c]};
                spread_four(rows);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) _mm512_store_si512(m.weights[turn][half][c + 4 * i], rows[i]);
            }
        }
        group.total = _mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3]));
        group.base = next;
        return shrink;
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
        return place(unit, unit.kv_head + head, tile + run * RUN + k) + cache.values_at;
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
            write(m.sums[part_of(unit, i)], i % QUERIES, 1.0f / totals[i % QUERIES], target(i));
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

}  // namespace

bool attend_amx(const Step& s, const bf16* queries, const bf16* kv, bf16* out, int64_t num_rows, bool parallel) {
    return attend_units<AmxAttention, Scratch>(s, queries, kv, out, num_rows, parallel);
}

#else

bool attend_amx(const Step&, const bf16*, const bf16*, bf16*, int64_t, bool) { return false; }

#endif
