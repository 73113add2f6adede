// Attention for bfloat16 queries over an int8 cache on the AMX unit: the units, lanes and tiles of attention_amx.cpp,
// with integer products.
//
// Keys and values are multiplied as stored. Queries and softmax weights become 16-bit integers, so that they are not
// rounded to eight bits, and are multiplied in two halves, high and low. The integer sums are exact; scales are applied
// to them. Each weight includes the scale of its value.
#include "amx.h"

#if HAS_AMX && defined(__AMX_INT8__)

#include "attention/attention_amx.h"
#include "attention/attention_weights.h"

namespace {

constexpr int CHUNK = 64;  // inner dimension of one tile product
constexpr int MAX_CHUNKS = MAX_HEAD / CHUNK;
constexpr int FOURS = CHUNK / 4;             // inner items are stored in groups of four
constexpr float MAX_QUERY = 127 * 256 + 127;  // high half 127, low half 127
constexpr float MAX_WEIGHT = 65535;           // unsigned halves

struct Scratch {
    alignas(64) int8_t queries[PARTS][2][MAX_CHUNKS][FOURS][CHUNK];  // [group or head][half][chunk][four][query][4]
    alignas(64) int8_t keys[KEYS][MAX_HEAD];                         // used if they cannot be read in place
    alignas(64) int32_t products[2][4][QUERIES][LANES];  // [buffer]
    alignas(64) float scores[KEYS][QUERIES];  // later weights
    alignas(64) uint8_t weights[2][QUERIES][KEYS];  // [half]
    // [four keys][chunk][quarter][dimension][4], contiguous for any number of chunks
    alignas(64) int8_t values[KEYS / 4 * MAX_CHUNKS * 4 * CHUNK];
    alignas(64) float key_scales[UNIT_HEADS][KEYS], value_scales[UNIT_HEADS][KEYS];  // 0 where no query sees the key
    alignas(64) Sums sums[PARTS];  // vectors are quarters of chunks
};

struct Int8Attention : AmxUnit<int8_t> {
    Scratch& m;
    int64_t chunks;
    __m512 query_scales[MAX_GROUPS];
    __mmask16 lanes_of[PARTS];             // lanes of the queries of each part
    const int8_t* runs[UNIT_HEADS][RUNS];  // keys of the current tile; null if none is seen

    static int64_t chunks_of(const Step& s) { return (s.head_dim + CHUNK - 1) / CHUNK; }
    static int64_t vectors_of(const Step& s) { return 4 * chunks_of(s); }

    Int8Attention(const Step& s, const bf16* queries, const int8_t* kv, bf16* out, Scratch& scratch)
        : AmxUnit(s, queries, kv, out, scratch.sums, vectors_of(s),
                  s.block_size % RUN == 0 && s.head_dim % CHUNK == 0),
          m(scratch),
          chunks(chunks_of(s)) {}

    // --- queries ---

    void load_queries(const Unit& unit) {
        int64_t per_head = unit.heads > 1 ? unit.per_head : QUERIES;
        alignas(64) float scales[MAX_GROUPS][QUERIES] = {};
        for (int64_t first = 0, part = 0; first < unit.count(); first += per_head, part++) {
            int64_t lane = unit.heads > 1 ? first : 0, end = std::min(first + per_head, unit.count());
            lanes_of[part] = unit.heads > 1 ? ((1 << per_head) - 1) << lane : 0xffff;
            alignas(64) int8_t rows[2][QUERIES][MAX_HEAD];
            for (auto& half : rows)
                for (auto& row : half) memset(row, 0, chunks * CHUNK);
            for (int64_t i = first; i < end; i++, lane++)
                scales[unit.heads > 1 ? 0 : part][lane] = split_query(query(i), rows[0][lane], rows[1][lane]);
            for (int half = 0; half < 2; half++)
                for (int64_t chunk = 0; chunk < chunks; chunk++) {
                    vf words[LANES];
                    for (int i = 0; i < QUERIES; i++) memcpy(&words[i], rows[half][i] + chunk * CHUNK, CHUNK);
                    transpose(words, (float*)words, LANES);
                    memcpy(m.queries[part][half][chunk], words, sizeof words);
                }
        }
        for (int group = 0; group < num_groups; group++) query_scales[group] = _mm512_load_ps(scales[group]);
    }

    // Splits a query into integers 256 * high + low; returns their scale.
    float split_query(const bf16* from, int8_t* high, int8_t* low) const {
        vf largest = {};
        for (int64_t d = 0; d < s.head_dim; d += LANES) {
            vf x = load_upto(from + d, s.head_dim - d);
            largest = max(largest, max(x, -x));
        }
        float top = std::max(max_lanes(largest), 1e-30f), by = MAX_QUERY / top;
        for (int64_t d = 0; d < s.head_dim; d += LANES) {
            __m512i whole = _mm512_cvtps_epi32((__m512)(load_upto(from + d, s.head_dim - d) * by));
            __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
            __m512i lower = _mm512_sub_epi32(whole, _mm512_slli_epi32(upper, 8));
            _mm_storeu_si128((__m128i*)(high + d), _mm512_cvtepi32_epi8(upper));
            _mm_storeu_si128((__m128i*)(low + d), _mm512_cvtepi32_epi8(lower));
        }
        return top / MAX_QUERY;
    }

    // --- keys and values of a tile ---

    bool is_seen(int64_t position) const { return position >= lowest && position < highest; }

    // Addresses of the runs of keys of a tile, if read in place, and the scales.
    void locate_all(const Unit& unit, int64_t tile) {
        for (int head = 0; head < unit.heads; head++) locate(unit, head, tile);
    }

    void locate(const Unit& unit, int head, int64_t tile) {
        for (int run = 0; run < RUNS; run++) {
            int64_t start = tile + run * RUN;
            bool all = is_seen(start) && is_seen(start + RUN - 1), some = start < highest && start + RUN > lowest;
            runs[head][run] = in_place && some ? key_at(unit, unit.kv_head + head, start) : nullptr;
            if (in_place && all) {
                const float* scales = scale_of_key(unit, head, start);
                memcpy(m.key_scales[head] + run * RUN, scales, RUN * sizeof(float));
                memcpy(m.value_scales[head] + run * RUN, cache.value_scale(scales), RUN * sizeof(float));
                continue;
            }
            for (int64_t k = run * RUN; k < (run + 1) * RUN; k++) {
                const float* scale = is_seen(tile + k) ? scale_of_key(unit, head, tile + k) : nullptr;
                m.key_scales[head][k] = scale ? *scale : 0;
                m.value_scales[head][k] = scale ? *cache.value_scale(scale) : 0;
            }
        }
    }

    const float* scale_of_key(const Unit& unit, int head, int64_t position) const {
        int64_t block = s.tables[unit.row * s.table_width + position / s.block_size];
        return cache.key_scale(block, unit.kv_head + head, position % s.block_size);
    }

    __m512i load_chunk(const int8_t* row, int64_t chunk) const {
        if (in_place) return _mm512_loadu_si512(row + chunk * CHUNK);
        int64_t left = s.head_dim - chunk * CHUNK;
        return _mm512_maskz_loadu_epi8(left >= CHUNK ? ~0ull : (1ull << left) - 1, row + chunk * CHUNK);
    }

    // A run of keys as rows of a tile. Keys that are not seen are masked later.
    const int8_t* keys_at(const Unit& unit, int64_t tile, int head, int run, int64_t& stride) {
        stride = s.head_dim;
        if (in_place) return runs[head][run];
        stride = MAX_HEAD;
        for (int k = run * RUN; k < (run + 1) * RUN; k++) {
            bool seen = is_seen(tile + k);
            const int8_t* row = seen ? key_at(unit, unit.kv_head + head, tile + k) : nullptr;
            for (int64_t chunk = 0; chunk < chunks; chunk++)
                _mm512_store_si512(m.keys[k] + chunk * CHUNK, seen ? load_chunk(row, chunk) : _mm512_setzero_si512());
        }
        return m.keys[run * RUN];
    }

    // Interleaves the values of four keys, with the second and third swapped. A quarter of a chunk holds every fourth
    // group of four dimensions. Values of unseen keys may be anything: their weights are 0.
    void interleave_values(const Unit& unit, int64_t tile, int head) {
        static const int8_t zeros[MAX_HEAD] = {};
        int8_t* target = m.values;
        for (int k = 0; k < KEYS; k += 4) {
            const int8_t* rows[4];
            const int8_t* run = runs[head][k / RUN];
            for (int i = 0; i < 4; i++)
                rows[i] = run ? run + cache.values_at + (k % RUN + i) * s.head_dim
                          : !in_place && is_seen(tile + k + i)
                              ? key_at(unit, unit.kv_head + head, tile + k + i) + cache.values_at
                              : zeros;
            prefetch_lines(4 * chunks);
            for (int64_t chunk = 0; chunk < chunks; chunk++, target += 4 * CHUNK) {
                __m512i a = load_chunk(rows[0], chunk), b = load_chunk(rows[1], chunk);
                __m512i c = load_chunk(rows[2], chunk), d = load_chunk(rows[3], chunk);
                __m512i even = _mm512_unpacklo_epi8(a, c), odd = _mm512_unpacklo_epi8(b, d);
                _mm512_store_si512(target, _mm512_unpacklo_epi16(even, odd));
                _mm512_store_si512(target + CHUNK, _mm512_unpackhi_epi16(even, odd));
                even = _mm512_unpackhi_epi8(a, c), odd = _mm512_unpackhi_epi8(b, d);
                _mm512_store_si512(target + 2 * CHUNK, _mm512_unpacklo_epi16(even, odd));
                _mm512_store_si512(target + 3 * CHUNK, _mm512_unpackhi_epi16(even, odd));
            }
        }
    }

    // --- one tile of keys ---

    void one_group(const Unit& unit, const Unit* following) {
        for (int64_t tile = first_tile(); tile < highest; tile += KEYS) {
            locate_all(unit, tile);
            plan_prefetch_after(unit, tile, following);
            tile_of_heads(unit, tile);
        }
    }

    void several_groups(const Unit& unit, const Unit* following) {
        for (int64_t tile = first_tile(); tile < highest; tile += KEYS) {
            locate_all(unit, tile);
            plan_prefetch_after(unit, tile, following);
            tile_of_groups(unit, tile);
        }
    }

    void tile_of_heads(const Unit& unit, int64_t tile) {
        score(unit, tile, 0, unit.heads, 0);
        Factors by = weigh(unit, groups[0], tile);
        for (int head = 0; head < unit.heads; head++) {
            interleave_values(unit, tile, head);
            add(m.sums[head], by, head * unit.per_head, (head + 1) * unit.per_head);
        }
    }

    // Other work is placed between storing a group's weights and multiplying them, because loading a tile from memory
    // just stored is slow.
    void tile_of_groups(const Unit& unit, int64_t tile) {
        int seeing[MAX_GROUPS], count = 0;
        for (int index = 0; index < num_groups; index++)
            if (tile < groups[index].highest && tile + KEYS > groups[index].lowest) seeing[count++] = index;
        if (count) score(unit, tile, seeing[0], 1, seeing[0]);
        for (int i = 0; i < count; i++) {
            Group& group = groups[seeing[i]];
            Factors by = weigh(unit, group, tile);
            if (i == 0) interleave_values(unit, tile, 0);
            if (i + 1 < count) score(unit, tile, seeing[i + 1], 1, seeing[i + 1]);
            add(m.sums[seeing[i]], by, 0, group.count);
        }
    }

    // Scores of a group whose queries are in `parts` parts, each against the keys of its own head. The matrix unit
    // multiplies the next runs while the scores of the previous ones are combined.
    void score(const Unit& unit, int64_t tile, int first_part, int parts, int group) {
        multiply_keys(unit, tile, 0, first_part, parts);
        store_products(0);
        multiply_keys(unit, tile, 2, first_part, parts);
        combine_scores(unit, 0, group, m.products[0]);
        store_products(1);
        combine_scores(unit, 2, group, m.products[1]);
    }

    // Products of two runs of keys with the high and low halves of the queries.
    void multiply_keys(const Unit& unit, int64_t tile, int run, int first_part, int parts) {
        clear_products();
        for (int head = 0; head < parts; head++) {
            int64_t strides[2];
            const int8_t* keys[2];
            for (int i = 0; i < 2; i++) keys[i] = keys_at(unit, tile, head, run + i, strides[i]);
            auto& query = m.queries[first_part + head];
            for (int64_t chunk = 0; chunk < chunks; chunk++) {
                _tile_loadd(4, query[0][chunk], CHUNK);
                _tile_loadd(5, query[1][chunk], CHUNK);
                if (keys[0]) {
                    _tile_loadd(6, keys[0] + chunk * CHUNK, strides[0]);
                    _tile_dpbssd(0, 6, 4);
                    _tile_dpbssd(1, 6, 5);
                }
                prefetch_lines(8);
                if (keys[1]) {
                    _tile_loadd(7, keys[1] + chunk * CHUNK, strides[1]);
                    _tile_dpbssd(2, 7, 4);
                    _tile_dpbssd(3, 7, 5);
                }
                prefetch_lines(8);
            }
        }
    }

    void combine_scores(const Unit& unit, int run, int group, const int32_t (*products)[QUERIES][LANES]) {
        for (int i = 0; i < 2 * RUN; i++) {
            __m512 product = combine_halves(products[i / RUN * 2][i % RUN], products[i / RUN * 2 + 1][i % RUN]);
            __m512 scale = _mm512_mul_ps(of_heads(unit, m.key_scales, run * RUN + i), query_scales[group]);
            _mm512_store_ps(m.scores[run * RUN + i], _mm512_mul_ps(product, scale));
        }
    }

    void clear_products() {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }

    void store_products(int buffer) {
        _tile_stored(0, m.products[buffer][0], 64);
        _tile_stored(1, m.products[buffer][1], 64);
        _tile_stored(2, m.products[buffer][2], 64);
        _tile_stored(3, m.products[buffer][3], 64);
    }

    static __m512 combine_halves(const int32_t* high, const int32_t* low) {
        return _mm512_cvtepi32_ps(
            _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(high), 8), _mm512_load_si512(low)));
    }

    // The scale of key k for each lane, by the KV head of its query.
    __m512 of_heads(const Unit& unit, const float (*scales)[KEYS], int k) const {
        __m512 scale = _mm512_set1_ps(scales[0][k]);
        for (int head = 1; head < unit.heads; head++)
            scale = _mm512_mask_mov_ps(scale, lanes_of[head], _mm512_set1_ps(scales[head][k]));
        return scale;
    }

    // Factors for the sums so far and for the products of the current tile.
    struct Factors {
        __m512 shrink, tile_scale;
    };

    // Turns the scores into weights that include the scales of their values. A tile's weights are relative to its own
    // largest score; as integers they are relative to the largest of them.
    Factors weigh(const Unit& unit, Group& group, int64_t tile) {
        cap_and_mask(group, tile, m.scores, KEYS);
        __m512 scale = scale_of(), top = _mm512_mul_ps(largest(m.scores, KEYS), scale);
        // A query that sees no key here has -inf; relative to a finite base all its weights become 0.
        const __m512 lowest_base = _mm512_set1_ps(-1e30f);
        __m512 own = _mm512_max_ps(top, lowest_base), sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        __m512 largest[2] = {_mm512_set1_ps(1e-30f), _mm512_set1_ps(1e-30f)};
        for (int k = 0; k < KEYS; k++) {
            __m512 weight = exp2(_mm512_fmsub_ps(_mm512_load_ps(m.scores[k]), scale, own));
            sum[k % 2] = _mm512_add_ps(sum[k % 2], weight);
            weight = _mm512_mul_ps(weight, of_heads(unit, m.value_scales, k));
            largest[k % 2] = _mm512_max_ps(largest[k % 2], weight);
            _mm512_store_ps(m.scores[k], weight);
        }
        __m512 most = _mm512_max_ps(largest[0], largest[1]);
        split_weights(_mm512_div_ps(_mm512_set1_ps(MAX_WEIGHT), most));
        __m512 base = _mm512_max_ps(_mm512_max_ps(group.base, top), lowest_base);
        __m512 shrink = exp2(_mm512_sub_ps(group.base, base)), counts = exp2(_mm512_sub_ps(top, base));
        group.total = _mm512_fmadd_ps(group.total, shrink, _mm512_mul_ps(_mm512_add_ps(sum[0], sum[1]), counts));
        group.base = _mm512_max_ps(group.base, top);
        return {shrink, _mm512_mul_ps(counts, _mm512_mul_ps(most, _mm512_set1_ps(1 / MAX_WEIGHT)))};
    }

    // Weights times `by` as integers 256 * high + low. The second and third of four keys are swapped.
    void split_weights(__m512 by) {
        const __m512i even = _mm512_set1_epi32(0x00ff00ff);
        vf high[LANES], low[LANES];
        for (int four = 0; four < LANES; four++) {
            __m512i whole[4];
            for (int i = 0; i < 4; i++)
                whole[i] = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(m.scores[4 * four + i]), by));
            __m512i first = _mm512_or_si512(whole[0], _mm512_slli_epi32(whole[1], 16));
            __m512i second = _mm512_or_si512(whole[2], _mm512_slli_epi32(whole[3], 16));
            constexpr int CHOOSE = 0xca;  // bits of the first operand where `even` is 1, else of the second
            low[four] = (vf)_mm512_ternarylogic_epi32(even, first, _mm512_slli_epi32(second, 8), CHOOSE);
            high[four] = (vf)_mm512_ternarylogic_epi32(even, _mm512_srli_epi32(first, 8), second, CHOOSE);
        }
        transpose(high, (float*)high, LANES);
        memcpy(m.weights[0], high, sizeof high);
        transpose(low, (float*)low, LANES);
        memcpy(m.weights[1], low, sizeof low);
    }

    // Adds values times weights for lanes first <= i < last.
    void add(Sums& sums, const Factors& by, int first, int last) {
        alignas(64) float shrink[LANES], tile_scale[LANES];
        _mm512_store_ps(shrink, by.shrink);
        _mm512_store_ps(tile_scale, by.tile_scale);
        int64_t stride = chunks * 4 * CHUNK;
        _tile_loadd(4, m.weights[0], KEYS);
        _tile_loadd(5, m.weights[1], KEYS);
        for (int64_t vector = 0; vector < vectors; vector += 2) {
            int buffer = vector / 2 % 2;
            clear_products();
            _tile_loadd(6, m.values + vector * CHUNK, stride);
            _tile_dpbusd(0, 4, 6);
            _tile_dpbusd(1, 5, 6);
            prefetch_lines(8);
            _tile_loadd(7, m.values + (vector + 1) * CHUNK, stride);
            _tile_dpbusd(2, 4, 7);
            _tile_dpbusd(3, 5, 7);
            prefetch_lines(8);
            store_products(buffer);
            for (int half = 0; half < 2; half++)
                for (int i = first; i < last; i++) {
                    float* sum = sums[vector + half][i];
                    vf product = (vf)combine_halves(m.products[buffer][2 * half][i], m.products[buffer][2 * half + 1][i]);
                    store(sum, fma(product, tile_scale[i], load(sum) * shrink[i]));
                }
        }
    }

    void finish(const Unit& unit) {
        for (int64_t i = 0; i < unit.count(); i++) {
            float totals[LANES];
            _mm512_storeu_ps(totals, group_of(unit, i).total);
            write(m.sums[part_of(unit, i)], i % QUERIES, 1.0f / totals[i % QUERIES], target(i));
        }
    }

    // The four quarters of a chunk form a 4 x 4 matrix of groups of four dimensions, which is transposed here.
    void write(const Sums& sums, int64_t lane, float scale, bf16* target) const {
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
            __m512 quarter[4], pairs[4], fours[4];
            for (int i = 0; i < 4; i++) quarter[i] = _mm512_load_ps(sums[4 * chunk + i][lane]);
            for (int i = 0; i < 2; i++) {
                pairs[i] = _mm512_shuffle_f32x4(quarter[2 * i], quarter[2 * i + 1], 0x44);
                pairs[2 + i] = _mm512_shuffle_f32x4(quarter[2 * i], quarter[2 * i + 1], 0xee);
            }
            for (int i = 0; i < 2; i++) {
                fours[2 * i] = _mm512_shuffle_f32x4(pairs[2 * i], pairs[2 * i + 1], 0x88);
                fours[2 * i + 1] = _mm512_shuffle_f32x4(pairs[2 * i], pairs[2 * i + 1], 0xdd);
            }
            for (int64_t i = 0, d = chunk * CHUNK; i < 4 && d < s.head_dim; i++, d += LANES)
                store_upto(target + d, (vf)fours[i] * scale, s.head_dim - d);
        }
    }
};

}  // namespace

bool attend_amx(const Step& s, const bf16* queries, const int8_t* kv, bf16* out, int64_t num_rows, bool parallel) {
    return attend_units<Int8Attention, Scratch>(s, queries, kv, out, num_rows, parallel);
}

#endif
