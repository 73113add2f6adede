// Attention for bfloat16 on the AMX unit, in the same units of work and tiles of keys as attention.cpp.
//
// Scores are computed transposed, keys by queries: keys then come straight from the cache, and the softmax runs down
// the vectors with one query per lane. Weights are rounded to bfloat16 before they multiply the values. Several KV
// heads share the lanes: each head's products are added to the scores with zeros for the queries of the others, and of
// each head's sums only the rows of its own queries are used.
#include "attention.h"

#include "amx.h"
#include "pool.h"

#if HAS_AMX

namespace {

constexpr int CHUNK = 32;  // inner items of one tile product
constexpr int MAX_CHUNKS = MAX_HEAD / CHUNK;
constexpr float LOG2E = 1.44269504f;

struct Scratch {
    alignas(64) bf16 queries[UNIT_HEADS][MAX_CHUNKS][16][CHUNK];  // [head][chunk][pair of dimensions][query][2]
    alignas(64) bf16 keys[KEYS][MAX_HEAD];                        // where they do not follow each other in the cache
    alignas(64) float scores[KEYS][QUERIES];
    alignas(64) bf16 weights[KEYS / CHUNK][QUERIES][CHUNK];
    alignas(64) bf16 values[2][KEYS / 2][MAX_CHUNKS][2][CHUNK];      // [turn][pair of keys][chunk][half][dimension][2]
    alignas(64) float sums[UNIT_HEADS][2 * MAX_CHUNKS][QUERIES][LANES];  // [head][chunk and half][query][dimension]
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

struct AmxAttention : UnitRows<bf16> {
    Scratch& m;
    int64_t chunks;
    TileRows<bf16> tiles[2][UNIT_HEADS];
    TileRows<bf16>*now = tiles[0], *next = tiles[1];
    __m512 largest, total;  // per query, in units of log2; and the sum of its weights

    AmxAttention(const Step& s, const bf16* queries, const bf16* kv, bf16* out, Scratch& scratch)
        : UnitRows<bf16>{s, queries, kv, out, {}, 0, 0, 0}, m(scratch), chunks((s.head_dim + CHUNK - 1) / CHUNK) {}

    void run(const Unit& unit) {
        begin(unit);
        load_queries(unit);
        for (int head = 0; head < unit.heads; head++) memset(m.sums[head], 0, 2 * chunks * sizeof m.sums[head][0]);
        largest = _mm512_set1_ps(-INFINITY);
        total = _mm512_setzero_ps();
        int64_t first_tile = lowest / KEYS * KEYS;
        find_all(unit, first_tile);
        for (int64_t tile = first_tile; tile < highest; tile += KEYS) {
            std::swap(now, next);
            find_all(unit, tile + KEYS);
            clear_scores();
            for (int head = 0; head < unit.heads; head++) multiply_keys(tile, head);
            pair_values(0);  // keeps the vector units busy while the products are computed
            store_scores();
            weigh(unit, tile);
            for (int head = 0; head < unit.heads; head++) {
                if (head + 1 < unit.heads) pair_values(head + 1);
                add(head);
            }
        }
        finish(unit);
    }

    void find_all(const Unit& unit, int64_t tile) {
        for (int head = 0; head < unit.heads; head++) find(unit, unit.kv_head + head, tile, next[head]);
    }

    __m512i load_chunk(const bf16* row, int64_t chunk) const {
        int64_t left = s.head_dim - chunk * CHUNK;
        __mmask32 mask = left >= CHUNK ? 0xffffffffu : (1u << left) - 1;
        return _mm512_maskz_loadu_epi16(mask, row + chunk * CHUNK);
    }

    void load_queries(const Unit& unit) {
        for (int head = 0; head < unit.heads; head++)
            for (int64_t chunk = 0; chunk < chunks; chunk++) {
                vf rows[LANES] = {};
                for (int i = head * unit.each; i < (head + 1) * unit.each; i++)
                    rows[i] = (vf)load_chunk(query(unit, i), chunk);
                transpose(rows);
                memcpy(m.queries[head][chunk], rows, sizeof rows);
            }
    }

    // Sixteen keys as the rows of tiles: in place where they lie in one block and are all seen, else copied together.
    const bf16* keys_at(const TileRows<bf16>& rows, int64_t tile, int first, int64_t& stride) {
        stride = s.head_dim;
        bool in_one_block = s.block_size % 16 == 0 && tile + first >= rows.from && tile + first + 16 <= rows.to;
        if (in_one_block && s.head_dim % CHUNK == 0) return rows.keys[first];
        stride = MAX_HEAD;
        for (int k = first; k < first + 16; k++)
            for (int64_t chunk = 0; chunk < chunks; chunk++)
                _mm512_store_si512(m.keys[k] + chunk * CHUNK, load_chunk(rows.keys[k], chunk));
        return m.keys[first];
    }

    void clear_scores() {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }

    void multiply_keys(int64_t tile, int head) {
        int64_t strides[4];
        const bf16* keys[4];
        for (int group = 0; group < 4; group++) keys[group] = keys_at(now[head], tile, group * 16, strides[group]);
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
            _tile_loadd(4, m.queries[head][chunk], 64);
            _tile_loadd(5, keys[0] + chunk * CHUNK, strides[0] * 2);
            _tile_dpbf16ps(0, 5, 4);
            _tile_loadd(6, keys[1] + chunk * CHUNK, strides[1] * 2);
            _tile_dpbf16ps(1, 6, 4);
            _tile_loadd(5, keys[2] + chunk * CHUNK, strides[2] * 2);
            _tile_dpbf16ps(2, 5, 4);
            _tile_loadd(6, keys[3] + chunk * CHUNK, strides[3] * 2);
            _tile_dpbf16ps(3, 6, 4);
        }
    }

    void store_scores() {
        _tile_stored(0, m.scores[0], 64);
        _tile_stored(1, m.scores[16], 64);
        _tile_stored(2, m.scores[32], 64);
        _tile_stored(3, m.scores[48], 64);
    }

    // Scale, cap and mask the scores, in units of log2.
    __m512 shape_scores(const Unit& unit, int64_t tile) {
        bool all_seen = tile + KEYS - 1 <= positions[0] && (!s.window || positions[count - 1] - tile < s.window);
        __m512 scale = _mm512_set1_ps(s.softcap > 0 ? s.scale / s.softcap : s.scale * LOG2E);
        __m512 cap = _mm512_set1_ps(s.softcap * LOG2E);
        __m512i position = _mm512_loadu_si512(positions);
        __m512i before = s.window ? _mm512_sub_epi32(position, _mm512_set1_epi32(s.window)) : _mm512_set1_epi32(-1);
        __m512 top = _mm512_set1_ps(-INFINITY);
        for (int k = 0; k < KEYS; k++) {
            for (int head = 0; head < unit.heads; head++) prefetch(next[head], k);
            __m512 x = _mm512_mul_ps(_mm512_load_ps(m.scores[k]), scale);
            if (s.softcap > 0) x = _mm512_mul_ps((__m512)tanh((vf)x), cap);
            if (!all_seen) {
                __m512i key = _mm512_set1_epi32(tile + k);
                __mmask16 seen = _mm512_cmple_epi32_mask(key, position) & _mm512_cmpgt_epi32_mask(key, before);
                x = _mm512_mask_blend_ps(seen, _mm512_set1_ps(-INFINITY), x);
            }
            _mm512_store_ps(m.scores[k], x);
            top = _mm512_max_ps(top, x);
        }
        return top;
    }

    void weigh(const Unit& unit, int64_t tile) {
        __m512 next = _mm512_max_ps(largest, shape_scores(unit, tile));
        // A query that has seen no key yet has -inf here; against 0 all its weights become 0.
        __m512 base = _mm512_max_ps(next, _mm512_set1_ps(-1e30f));
        __m512 shrink = exp2(_mm512_sub_ps(largest, base));
        __m512 sum[4] = {_mm512_mul_ps(total, shrink), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
        // Item i of the first sixteen next to item i of the second: word 2 i takes i, word 2 i + 1 takes 16 + i.
        const vu index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const __m512i interleave = (__m512i)(index | (index + 16) << 16);
        for (int half = 0; half < KEYS / CHUNK; half++) {
            vf rows[LANES];
            for (int pair = 0; pair < LANES; pair++) {
                const float* scores = m.scores[half * CHUNK + 2 * pair];
                __m512 even = exp2(_mm512_sub_ps(_mm512_load_ps(scores), base));
                __m512 odd = exp2(_mm512_sub_ps(_mm512_load_ps(scores + QUERIES), base));
                sum[2 * (pair % 2)] = _mm512_add_ps(sum[2 * (pair % 2)], even);
                sum[2 * (pair % 2) + 1] = _mm512_add_ps(sum[2 * (pair % 2) + 1], odd);
                rows[pair] = (vf)_mm512_permutexvar_epi16(interleave, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
            }
            transpose(rows);
            memcpy(m.weights[half], rows, sizeof rows);
        }
        total = _mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3]));
        rescale(unit, shrink);
        largest = next;
    }

    void rescale(const Unit& unit, __m512 shrink) {
        if (_mm512_cmp_ps_mask(shrink, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) == 0) return;
        float by[LANES];
        _mm512_storeu_ps(by, shrink);
        for (int i = 0; i < count; i++)
            for (int64_t part = 0; part < 2 * chunks; part++) {
                float* sums = m.sums[i / unit.each][part][i];
                store(sums, load(sums) * by[i]);
            }
    }

    // Values of two keys interleaved, as the unit wants them. The halves of a chunk hold every other four dimensions.
    void pair_values(int head) {
        const TileRows<bf16>& rows = now[head];
        for (int pair = 0; pair < KEYS / 2; pair++)
            for (int64_t chunk = 0; chunk < chunks; chunk++) {
                __m512i even = load_chunk(rows.values[2 * pair], chunk);
                __m512i odd = load_chunk(rows.values[2 * pair + 1], chunk);
                bf16(*target)[CHUNK] = m.values[head % 2][pair][chunk];
                _mm512_store_si512(target[0], _mm512_unpacklo_epi16(even, odd));
                _mm512_store_si512(target[1], _mm512_unpackhi_epi16(even, odd));
            }
    }

    void add(int head) {
        constexpr int64_t STRIDE = sizeof m.values[0][0];
        auto& values = m.values[head % 2];
        _tile_loadd(4, m.weights[0], 64);
        _tile_loadd(5, m.weights[1], 64);
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
            float(*sums)[QUERIES][LANES] = m.sums[head] + 2 * chunk;
            _tile_loadd(0, sums[0], 64);
            _tile_loadd(1, sums[1], 64);
            _tile_loadd(6, values[0][chunk][0], STRIDE);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, values[0][chunk][1], STRIDE);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(6, values[16][chunk][0], STRIDE);
            _tile_dpbf16ps(0, 5, 6);
            _tile_loadd(7, values[16][chunk][1], STRIDE);
            _tile_dpbf16ps(1, 5, 7);
            _tile_stored(0, sums[0], 64);
            _tile_stored(1, sums[1], 64);
        }
    }

    void finish(const Unit& unit) {
        const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
        const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
        float totals[LANES];
        _mm512_storeu_ps(totals, total);
        for (int i = 0; i < count; i++) {
            float scale = 1.0f / totals[i];
            for (int64_t chunk = 0; chunk < chunks; chunk++) {
                __m512 low = _mm512_load_ps(m.sums[i / unit.each][2 * chunk][i]);
                __m512 high = _mm512_load_ps(m.sums[i / unit.each][2 * chunk + 1][i]);
                int64_t d = chunk * CHUNK;
                store_upto(target(unit, i) + d, (vf)_mm512_permutex2var_ps(low, first, high) * scale, s.head_dim - d);
                if (d + LANES < s.head_dim)
                    store_upto(target(unit, i) + d + LANES, (vf)_mm512_permutex2var_ps(low, second, high) * scale,
                               s.head_dim - d - LANES);
            }
        }
    }
};

}  // namespace

bool attend_amx(const Step& s, const bf16* queries, const bf16* kv, bf16* out, int64_t num_rows, bool parallel) {
    if (!use_amx()) return false;
    std::vector<Unit> units = units_of(s, num_rows, pool::threads());
    pool::for_each(units.size(), parallel, [&](int64_t i) {
        static thread_local Scratch scratch;
        const TileConfig config;
        _tile_loadconfig(&config);
        AmxAttention(s, queries, kv, out, scratch).run(units[i]);
        _tile_release();
    });
    return true;
}

#else

bool attend_amx(const Step&, const bf16*, const bf16*, bf16*, int64_t, bool) { return false; }

#endif
