#include "amx.h"

#if HAS_AMX

#include "linear/linear_decode.h"

#include "quantised/quantised_exact.h"
#include "transpose.h"

namespace linear_layer {
namespace {

using quantised::ScaleVectors;
using quantised::format_of;

constexpr Order order_of(int format) {
    return format_of(format).groups == 1 ? WHOLE : format_of(format).bits == 6 ? INTERLEAVED : HALVES;
}

constexpr int64_t groups_of(Order order) { return order == WHOLE ? 1 : 2; }
constexpr int64_t rows_per_block(Order order) { return 16 / groups_of(order); }

// Columns for the rows of one block: a power of two.
int64_t columns_for(Order order, int64_t rows) {
    int64_t columns = groups_of(order);
    while (columns < rows * groups_of(order)) columns *= 2;
    return columns;
}

// --- the rows of x ---

using Transposed = uint32_t[16][16];  // [pair of inputs][row]

// Sums over one tile's inputs, by group.
void sum_pairs(const Transposed& transposed, Order order, vf (&sums)[2]) {
    vf even[2] = {}, odd[2] = {};
    for (int pair = 0; pair < 16; pair++) {
        vu both;
        memcpy(&both, transposed[pair], sizeof both);
        int half = order == HALVES ? pair / 8 : 0;
        even[half] += (vf)(both << 16);
        odd[half] += (vf)(both & 0xffff0000u);
    }
    sums[0] = order == INTERLEAVED ? even[0] : even[0] + odd[0];
    sums[1] = order == INTERLEAVED ? odd[0] : even[1] + odd[1];
}

// Transposes one tile of `rows` rows; missing rows are zeros.
void transpose_tile(const bf16* x, int64_t stride, int rows, Order order, Transposed& transposed) {
    alignas(64) uint16_t index[32];
    for (int j = 0; j < 16; j++) index[2 * j] = j, index[2 * j + 1] = j + 16;
    alignas(64) uint32_t some[16][16] = {};
    for (int r = 0; r < rows; r++) {
        __m512i row = _mm512_loadu_si512(x + r * stride);
        if (order == INTERLEAVED) row = _mm512_permutexvar_epi16(_mm512_load_si512(index), row);
        _mm512_store_si512(some[r], row);
    }
    transpose16(some[0], 16, transposed[0], 16);
}

void write_columns(const Transposed& transposed, Order order, int64_t columns, uint32_t* out) {
    int64_t rows = columns / groups_of(order);
    __mmask16 there = (1 << rows) - 1;
    for (int pair = 0; pair < 16; pair++, out += columns) {
        __m512i all = _mm512_load_si512(transposed[pair]), none = _mm512_setzero_si512();
        __m512i first = all, second = none;
        if (order == HALVES) first = pair < 8 ? all : none, second = pair < 8 ? none : all;
        if (order == INTERLEAVED) {
            first = _mm512_and_si512(all, _mm512_set1_epi32(0xffff));
            second = _mm512_andnot_si512(_mm512_set1_epi32(0xffff), all);
        }
        _mm512_mask_storeu_epi32(out, there, first);
        if (order != WHOLE) _mm512_mask_storeu_epi32(out + rows, there, second);
    }
}

void lay_out_rows(const bf16* x, int64_t stride, int rows, int64_t tiles, Order order, uint32_t* out, float* out_sums) {
    int64_t columns = columns_for(order, rows), half = columns / groups_of(order);
    __mmask16 there = (1 << half) - 1;
    alignas(64) Transposed transposed;
    vf sums[2];
    for (int64_t tile = 0; tile < tiles; tile++, out += 16 * columns, out_sums += columns) {
        transpose_tile(x + tile * TILE_K, stride, rows, order, transposed);
        write_columns(transposed, order, columns, out);
        sum_pairs(transposed, order, sums);
        for (int64_t g = 0; g < groups_of(order); g++)
            _mm512_mask_storeu_ps(out_sums + g * half, there, (__m512)sums[g]);
    }
}

// A single row needs no layout, only its sums: sixteen tiles at a time, in the same order of summation.
void sum_single(const bf16* x, int64_t tiles, float* out) {
    alignas(64) Transposed transposed;
    vf sums[2];
    for (int64_t tile = 0; tile < tiles; tile += 16) {
        int some = std::min<int64_t>(tiles - tile, 16);
        transpose_tile(x + tile * TILE_K, TILE_K, some, WHOLE, transposed);
        sum_pairs(transposed, WHOLE, sums);
        store_upto(out + tile, sums[0], some);
    }
}

// --- the products ---
//
// The weights are the left operand, the rows of x are columns of the right one. A software pipeline: while one tile is
// multiplied, a later one is unpacked (LEAD), and the sums of an earlier one, already stored, are scaled (LAG).

constexpr int LEAD = 2, LAG = 2, RING = 4;
constexpr int64_t PREFETCH_FIRST = 16 << 10;

// Inlined: some compilers remove the call of a function that only prefetches.
inline __attribute__((always_inline)) void prefetch(const char* from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) _mm_prefetch(from + at, _MM_HINT_T1);
}

// Tile registers 0-1 hold sums, 4-5 columns of x, the others weights.
void configure(int64_t columns) {
    TileConfig config;
    for (int tile : {0, 1, 4, 5}) config.bytes_per_row[tile] = 4 * columns;
    configure_tiles(config);
}

// Products of one tile of x with TILES tiles of weights. Even and odd products use different tile registers.
template <int PARITY, int TILES>
inline __attribute__((always_inline)) void multiply(const bf16* weights, const uint32_t* x, int64_t bytes, float* sums) {
    before_tile_loads();
    if constexpr (PARITY == 0) {
        _tile_zero(0);
        _tile_loadd(4, x, bytes);
        _tile_loadd(6, weights, 64);
        _tile_dpbf16ps(0, 6, 4);
        if (TILES == 2) {
            _tile_loadd(2, weights + quantised::TILE_ITEMS, 64);
            _tile_dpbf16ps(0, 2, 4);
        }
        _tile_stored(0, sums, bytes);
    } else {
        _tile_zero(1);
        _tile_loadd(5, x, bytes);
        _tile_loadd(7, weights, 64);
        _tile_dpbf16ps(1, 7, 5);
        if (TILES == 2) {
            _tile_loadd(3, weights + quantised::TILE_ITEMS, 64);
            _tile_dpbf16ps(1, 3, 5);
        }
        _tile_stored(1, sums, bytes);
    }
    after_tile_stores();
}

// Scales for items 16 * v to 16 * v + 15 of the sums [16 outputs][COLUMNS]: by output and, within the columns, by
// group.
template <int COLUMNS, int GROUPS>
inline __m512 spread(const vf (&by_group)[2], const float (&memory)[2][16], int v) {
    if constexpr (COLUMNS == 1) return (__m512)by_group[0];
    if constexpr (COLUMNS == 16) {
        __m512 first = _mm512_set1_ps(memory[0][v]);
        return GROUPS == 1 ? first : _mm512_mask_blend_ps(0xff00, first, _mm512_set1_ps(memory[1][v]));
    }
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vi index = lane / COLUMNS + v * (16 / COLUMNS);
    if constexpr (GROUPS == 1) return _mm512_permutexvar_ps((__m512i)index, (__m512)by_group[0]);
    index += lane % COLUMNS / (COLUMNS / 2) * 16;
    return _mm512_permutex2var_ps((__m512)by_group[0], (__m512i)index, (__m512)by_group[1]);
}

// COLUMNS floats, repeated to fill the vector.
template <int COLUMNS>
inline __m512 repeat(const float* p) {
    if constexpr (COLUMNS == 1) return _mm512_set1_ps(*p);
    if constexpr (COLUMNS == 2) return (__m512)_mm512_set1_pd(*(const double*)p);
    if constexpr (COLUMNS == 4) return _mm512_broadcast_f32x4(_mm_loadu_ps(p));
    if constexpr (COLUMNS == 8) return _mm512_broadcast_f32x8(_mm256_loadu_ps(p));
    return _mm512_loadu_ps(p);
}

template <int F, int COLUMNS>
inline __attribute__((always_inline)) void add_scaled(__m512 (&total)[COLUMNS], const quantised::Panel& panel,
                                                      int64_t tile, const float* sums, const float* x_sums) {
    constexpr int groups = format_of(F).groups;
    ScaleVectors by_output;
    quantised::exact_scales<F>(panel, tile, by_output);
    alignas(64) float scales[2][16], offsets[2][16];
    if constexpr (COLUMNS == 16) {
        for (int g = 0; g < groups; g++) {
            store(scales[g], by_output.scales[g]);
            store(offsets[g], by_output.offsets[g]);
        }
        // Force reads from memory, one broadcast each: cheaper than the shuffles the compiler would use.
        asm volatile("" : "+m"(scales), "+m"(offsets));
    }
    __m512 x = repeat<COLUMNS>(x_sums);
#pragma GCC unroll 16
    for (int v = 0; v < COLUMNS; v++) {
        __m512 scale = spread<COLUMNS, groups>(by_output.scales, scales, v);
        __m512 offset = spread<COLUMNS, groups>(by_output.offsets, offsets, v);
        total[v] = _mm512_fmadd_ps(scale, _mm512_load_ps(sums + 16 * v), total[v]);
        total[v] = _mm512_fmadd_ps(offset, x, total[v]);
    }
}

// Stores the sums [16 outputs][columns] of one panel as outputs of `rows` rows.
__attribute__((noinline)) void finish_columns(const Layer& layer, const float* sums, int64_t columns, int64_t groups,
                                              bf16* out, int64_t row, int rows, int64_t panel) {
    alignas(64) float by_column[16][16];
    transpose16((const uint32_t*)sums, columns, (uint32_t*)by_column, 16);
    for (int r = 0; r < rows; r++) {
        vf sum = load(by_column[r]);
        if (groups == 2) sum += load(by_column[columns / 2 + r]);
        finish(layer, out, row + r, panel, sum);
    }
}

template <int F, int COLUMNS>
inline __attribute__((always_inline)) void finish_panel(const Layer& layer, const __m512 (&total)[COLUMNS], bf16* out,
                                                        int64_t row, int rows, int64_t panel) {
    if constexpr (COLUMNS == 1) return finish(layer, out, row, panel, (vf)total[0]);
    alignas(64) float sums[16 * COLUMNS + 16];  // padded: whole vectors are read
#pragma GCC unroll 16
    for (int v = 0; v < COLUMNS; v++) _mm512_store_ps(sums + 16 * v, total[v]);
    finish_columns(layer, sums, COLUMNS, format_of(F).groups, out, row, rows, panel);
}

// Position of a tile in a range of panels.
struct Place {
    quantised::Panel at;
    int64_t panel, tile = 0;

    // Moves to the next tile; returns true at the end of a panel.
    bool next(int64_t tiles, int64_t bytes) {
        if (++tile < tiles) return false;
        tile = 0;
        panel++;
        at.integers += bytes, at.halves += bytes, at.byte_scales += bytes;
        return true;
    }
};

// A block of columns against a range of panels.
struct Work {
    const Layer& layer;
    const uint32_t* x;
    const float* x_sums;
    bf16* out;
    int64_t first, last, row;
    int rows;
};

template <int F, int COLUMNS>
void multiply_range(const Work& w) {
    constexpr int exact_tiles = quantised::exact_tiles(F);
    int64_t tiles = w.layer.k / TILE_K, bytes = quantised::panel_bytes(F, w.layer.k), step = bytes / tiles;
    int64_t count = (w.last - w.first) * tiles, x_tile = 0;
    Place ahead{quantised::panel_at(F, w.layer.packed, w.layer.k, w.first), w.first}, behind = ahead;
    const char* later = ahead.at.integers + bytes;
    alignas(64) bf16 weights[RING][exact_tiles * quantised::TILE_ITEMS];
    alignas(64) float sums[RING][16 * COLUMNS];
    __m512 total[COLUMNS];
#pragma GCC unroll 16
    for (int v = 0; v < COLUMNS; v++) total[v] = _mm512_setzero_ps();

    auto unpack = [&](int64_t i) __attribute__((always_inline)) {
        if (i >= count) return;
        prefetch(later, step);
        later += step;
        quantised::exact_tile<F>(ahead.at, ahead.tile, weights[i % RING]);
        ahead.next(tiles, bytes);
    };
    auto product = [&](auto parity, int64_t i) __attribute__((always_inline)) {
        if (i >= count) return;
        const uint32_t* x = w.x + x_tile * 16 * COLUMNS;
        multiply<parity.value, exact_tiles>(weights[i % RING], x, 4 * COLUMNS, sums[i % RING]);
        if (++x_tile == tiles) x_tile = 0;
    };
    auto add = [&](int64_t i) __attribute__((always_inline)) {
        if (i < 0 || i >= count) return;
        add_scaled<F>(total, behind.at, behind.tile, sums[i % RING], w.x_sums + behind.tile * COLUMNS);
        int64_t panel = behind.panel;
        if (!behind.next(tiles, bytes)) return;
        finish_panel<F>(w.layer, total, w.out, w.row, w.rows, panel);
#pragma GCC unroll 16
        for (int v = 0; v < COLUMNS; v++) total[v] = _mm512_setzero_ps();
    };

    prefetch(ahead.at.integers, std::min(bytes, PREFETCH_FIRST));
    for (int64_t i = 0; i < LEAD; i++) unpack(i);
    for (int64_t i = 0; i < count + LAG; i += 2) {
        unpack(i + LEAD);
        product(std::integral_constant<int, 0>{}, i);
        add(i - LAG);
        unpack(i + 1 + LEAD);
        product(std::integral_constant<int, 1>{}, i + 1);
        add(i + 1 - LAG);
    }
}

// --- dispatch by format and number of columns ---

using MultiplyRange = void (*)(const Work&);

template <int F>
constexpr MultiplyRange multiply_range_of(int64_t columns) {
    if constexpr (format_of(F).groups == 1)
        if (columns == 1) return multiply_range<F, 1>;
    return columns == 2   ? multiply_range<F, 2>
           : columns == 4 ? multiply_range<F, 4>
           : columns == 8 ? multiply_range<F, 8>
                          : multiply_range<F, 16>;
}

template <int... I>
MultiplyRange multiply_range_of(int format, int64_t columns, std::integer_sequence<int, I...>) {
    static constexpr MultiplyRange (*of_format[])(int64_t) = {multiply_range_of<quantised::FIRST_FORMAT + I>...};
    return of_format[format - quantised::FIRST_FORMAT](columns);
}

}  // namespace

DecodeInputs::DecodeInputs(const std::vector<Layer>& parts, const bf16* x, int64_t stride, int64_t rows)
    : rows_(rows), tiles_per_row_(parts[0].k / TILE_K) {
    for (const Layer& part : parts)
        if (part.is_quantised() && !sums_[order_of(part.format)]) lay_out(order_of(part.format), x, stride);
}

void DecodeInputs::lay_out(Order order, const bf16* x, int64_t stride) {
    static thread_local std::vector<uint32_t> tiles[ORDERS];
    static thread_local std::vector<float> sums[ORDERS];
    int64_t size = rows_per_block(order), blocks = (rows_ + size - 1) / size;
    sums[order].resize(blocks * tiles_per_row_ * 16);
    sums_[order] = sums[order].data();
    if (order == WHOLE && rows_ == 1) {
        tiles_[order] = (const uint32_t*)x;
        return sum_single(x, tiles_per_row_, sums[order].data());
    }
    tiles[order].resize(blocks * tiles_per_row_ * 256);
    tiles_[order] = tiles[order].data();
    for (int64_t block = 0; block < blocks; block++) {
        int64_t row = block * size, layout = block * tiles_per_row_ * 16;
        lay_out_rows(x + row * stride, stride, std::min(rows_ - row, size), tiles_per_row_, order,
                     tiles[order].data() + layout * 16, sums[order].data() + layout);
    }
}

void decode_panels(const Layer& layer, const DecodeInputs& inputs, bf16* out, int64_t first, int64_t last) {
    Order order = order_of(layer.format);
    for (int64_t row = 0, block = 0; row < inputs.rows(); row += rows_per_block(order), block++) {
        int64_t rows = std::min(inputs.rows() - row, rows_per_block(order)), columns = columns_for(order, rows);
        configure(columns);
        MultiplyRange multiply_range =
            multiply_range_of(layer.format, columns, std::make_integer_sequence<int, quantised::NUM_FORMATS>{});
        multiply_range({layer, inputs.tiles(order, block), inputs.sums(order, block), out, first, last, row, (int)rows});
    }
    _tile_release();
}

}  // namespace linear_layer

#endif
