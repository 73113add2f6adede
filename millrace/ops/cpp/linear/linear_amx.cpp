// Linear layers on the AMX matrix unit: few rows here, many in linear_many.cpp.
#include "amx.h"

#if HAS_AMX

#include "linear/linear_decode.h"
#include "linear/linear_many.h"

#include <optional>

namespace linear_layer {
namespace {

// --- plain weights: tiles of 16 rows by 32 inputs against tiles of 32 inputs by 16 outputs ---

// Tile registers 0-3 hold sums, 4-5 rows of x (`upper` and `lower` many), 6-7 weights.
void configure(int upper, int lower) {
    TileConfig config;
    config.rows[0] = config.rows[1] = config.rows[4] = upper;
    config.rows[2] = config.rows[3] = config.rows[5] = lower ? lower : 1;
    configure_tiles(config);
}

constexpr int64_t PREFETCH_BYTES = 4096;

void prefetch_tile(const char* tile) {
    for (int line = 0; line < 16; line++) _mm_prefetch(tile + PREFETCH_BYTES + line * 64, _MM_HINT_T0);
}

void finish_tile(const Layer& layer, bf16* out, int64_t row, int rows, int64_t panel, const float* sums) {
    for (int r = 0; r < rows; r++) finish(layer, out, row + r, panel, load(sums + r * PANEL));
}

// Up to 32 rows (`upper` <= 16, then `lower` <= 16) against two panels.
template <bool LOWER>
void amx_block(const Layer& layer, const bf16* x, int64_t stride, bf16* out, int64_t row, int upper, int lower,
               int64_t panel, bool stream) {
    int64_t tiles = layer.padded_k / TILE_K;
    const char* left = (const char*)layer.packed + (panel - layer.first_panel) * tiles * 1024;
    const char* right = left + tiles * 1024;
    const bf16* rows = x + row * stride;
    _tile_zero(0);
    _tile_zero(1);
    if (LOWER) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t tile = 0; tile < tiles; tile++) {
        if (stream) {
            prefetch_tile(left + tile * 1024);
            prefetch_tile(right + tile * 1024);
        }
        _tile_loadd(4, rows + tile * TILE_K, stride * 2);
        _tile_loadd(6, left + tile * 1024, 64);
        _tile_loadd(7, right + tile * 1024, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (LOWER) {
            _tile_loadd(5, rows + 16 * stride + tile * TILE_K, stride * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    alignas(64) float sums[4][16 * PANEL];
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    if (LOWER) {
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
    }
    finish_tile(layer, out, row, upper, panel, sums[0]);
    finish_tile(layer, out, row, upper, panel + 1, sums[1]);
    if (!LOWER) return;
    finish_tile(layer, out, row + 16, lower, panel, sums[2]);
    finish_tile(layer, out, row + 16, lower, panel + 1, sums[3]);
}

void amx_panels(const Layer& layer, const bf16* x, int64_t stride, bf16* out, int64_t rows, int64_t first,
                int64_t last) {
    int64_t whole = rows / 32 * 32;
    int rest = rows - whole, upper = rest < 16 ? rest : 16, lower = rest - upper;
    if (whole) {
        configure(16, 16);
        for (int64_t row = 0; row < whole; row += 32)
            for (int64_t panel = first; panel < last; panel += 2)
                amx_block<true>(layer, x, stride, out, row, 16, 16, panel, row == 0);
    }
    if (rest) {
        configure(upper, lower);
        for (int64_t panel = first; panel < last; panel += 2) {
            if (lower)
                amx_block<true>(layer, x, stride, out, whole, upper, lower, panel, !whole);
            else
                amx_block<false>(layer, x, stride, out, whole, upper, 0, panel, !whole);
        }
    }
    _tile_release();
}

// --- quantised weights ---
//
// The weights are the left operand, because unpacking yields the inputs of one output, a row of a tile; the rows of x
// are columns. The products of an output and their order are the same as for plain weights. For the first rows each
// tile is multiplied while the next one is unpacked; further rows use the unpacked tiles.

constexpr int64_t MAX_ROWS_AT_ONCE = 32;

// Tile registers 0-3 hold sums, 4-5 sixteen rows of x each (or a single one), 6-7 weights.
void configure_columns(bool single) {
    TileConfig config;
    if (single) config.bytes_per_row[0] = config.bytes_per_row[1] = config.bytes_per_row[4] = 4;
    configure_tiles(config);
}

// Unpacks the tiles of a range of panels, two panels at a time.
class Unpacker {
public:
    // `memory` has room for all pairs of tiles, or with `mask` 1 for two.
    Unpacker(const Layer& layer, int64_t first, int64_t last, bf16* memory, int64_t mask)
        : layer(layer), unpack(quantised::tile_pair(layer.format)), memory(memory), mask(mask), panel(first),
          last(last), tiles(layer.k / TILE_K) {
        int64_t bytes = 2 * quantised::panel_bytes(layer.format, layer.k);
        const char* start = (const char*)layer.packed + first / 2 * bytes;
        prefetch(start, std::min(bytes, PREFETCH_FIRST));
        ahead = start + bytes;
        step = bytes / tiles;
        next();
    }

    const bf16* at(int64_t index) const { return memory + (index & mask) * PAIR; }

    void next() {
        if (panel >= last) return;
        if (tile == 0) {
            left = quantised::panel_at(layer.format, layer.packed, layer.k, panel);
            right = quantised::panel_at(layer.format, layer.packed, layer.k, panel + 1);
        }
        prefetch(ahead, step);
        ahead += step;
        unpack(left, right, tile, memory + (count++ & mask) * PAIR);
        if (++tile == tiles) tile = 0, panel += 2;
    }

    static constexpr int64_t PAIR = 2 * quantised::TILE_ITEMS;

private:
    static constexpr int64_t PREFETCH_FIRST = 16 << 10;

    static void prefetch(const char* from, int64_t bytes) {
        for (int64_t at = 0; at < bytes; at += 64) _mm_prefetch(from + at, _MM_HINT_T1);
    }

    const Layer& layer;
    quantised::TilePair unpack;
    bf16* memory;
    int64_t mask, panel, last, tiles, tile = 0, count = 0, step;
    const char* ahead;  // the same position in the next pair of panels
    quantised::Panel left, right;
};

void finish_columns(const Layer& layer, bf16* out, int64_t row, int rows, int64_t panel, const float* sums) {
    alignas(64) float transposed[16 * PANEL];
    transpose16((const uint32_t*)sums, 16, (uint32_t*)transposed, 16);
    finish_tile(layer, out, row, rows, panel, transposed);
}

// Up to BLOCKS * 16 rows of x from `row` on; BLOCKS 0: a single row.
template <int BLOCKS>
void columns(const Layer& layer, Unpacker& weights, const uint32_t* inputs, bf16* out, int64_t row, int64_t rows,
             int64_t first, int64_t last) {
    int64_t tiles = layer.k / TILE_K, input_bytes = BLOCKS ? 64 : 4, index = 0;
    const char* upper = (const char*)inputs + row * layer.k * 2;
    const char* lower = upper + tiles * 1024;
    alignas(64) float sums[4][16 * PANEL];
    for (int64_t panel = first; panel < last; panel += 2) {
        _tile_zero(0);
        _tile_zero(1);
        if (BLOCKS == 2) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t tile = 0; tile < tiles; tile++) {
            weights.next();
            const bf16* pair = weights.at(index++);
            _tile_loadd(4, upper + tile * 16 * input_bytes, input_bytes);
            _tile_loadd(6, pair, 64);
            _tile_loadd(7, pair + quantised::TILE_ITEMS, 64);
            _tile_dpbf16ps(0, 6, 4);
            _tile_dpbf16ps(1, 7, 4);
            if (BLOCKS == 2) {
                _tile_loadd(5, lower + tile * 1024, 64);
                _tile_dpbf16ps(2, 6, 5);
                _tile_dpbf16ps(3, 7, 5);
            }
        }
        _tile_stored(0, sums[0], input_bytes);
        _tile_stored(1, sums[1], input_bytes);
        if (BLOCKS == 0) {
            finish(layer, out, row, panel, load(sums[0]));
            finish(layer, out, row, panel + 1, load(sums[1]));
            continue;
        }
        int count = std::min<int64_t>(rows - row, 16);
        finish_columns(layer, out, row, count, panel, sums[0]);
        finish_columns(layer, out, row, count, panel + 1, sums[1]);
        if (BLOCKS == 1) continue;
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
        count = std::min<int64_t>(rows - row - 16, 16);
        finish_columns(layer, out, row + 16, count, panel, sums[2]);
        finish_columns(layer, out, row + 16, count, panel + 1, sums[3]);
    }
}

void quantised_panels(const Layer& layer, const uint32_t* inputs, bf16* out, int64_t rows, int64_t first,
                      int64_t last) {
    bool once = rows <= MAX_ROWS_AT_ONCE;
    alignas(64) bf16 ring[2 * Unpacker::PAIR];
    int64_t pairs = (last - first) / 2 * (layer.k / TILE_K);
    void* memory = once ? ring : scratch(pairs * Unpacker::PAIR * sizeof(bf16));
    Unpacker weights(layer, first, last, (bf16*)memory, once ? 1 : -1);
    configure_columns(rows == 1);
    for (int64_t row = 0; row < rows; row += MAX_ROWS_AT_ONCE) {
        if (rows == 1)
            columns<0>(layer, weights, inputs, out, row, rows, first, last);
        else if (rows - row <= 16)
            columns<1>(layer, weights, inputs, out, row, rows, first, last);
        else
            columns<2>(layer, weights, inputs, out, row, rows, first, last);
    }
    _tile_release();
}

// Transposes x for `columns`, sixteen rows at a time; a single row needs no change.
const uint32_t* transpose_inputs(const bf16* x, int64_t stride, int64_t rows, int64_t k) {
    static thread_local std::vector<uint32_t> transposed;
    if (rows == 1) return (const uint32_t*)x;
    int64_t blocks = (rows + 15) / 16, words = 16 * k / 2;
    transposed.resize(blocks * words);
    uint32_t* target = transposed.data();
    pool::for_each(blocks, rows * k >= MIN_PARALLEL, [&](int64_t block) {
        transpose_pairs(x, stride, block * 16, rows, k, target + block * words);
    });
    return target;
}

// Pads each row with zeros, because whole tiles are read.
std::vector<bf16> pad(const bf16* x, int64_t stride, int64_t rows, const Layer& layer) {
    std::vector<bf16> padded(rows * layer.padded_k);
    for (int64_t row = 0; row < rows; row++)
        memcpy(padded.data() + row * layer.padded_k, x + row * stride, layer.k * sizeof(bf16));
    return padded;
}

// A range of panels of one part. The ranges of all parts form one job for the pool.
struct Range {
    const Layer* part;
    int64_t first, last;
};

// Panels per range for few rows and quantised weights: enough ranges that threads finish together, but not so short
// that their start, before the prefetches take effect, matters.
int64_t panels_per_range(int64_t panels, int64_t tiles) {
    constexpr int64_t LEAST_TILES = 768, MOST_PANELS = 64, RANGES_PER_THREAD = 8;
    int64_t each = std::clamp<int64_t>(panels * tiles / LEAST_TILES / pool::threads(), 1, RANGES_PER_THREAD);
    return std::min(round_up((panels + each * pool::threads() - 1) / (each * pool::threads()), 2), MOST_PANELS);
}

std::vector<Range> ranges_of(const std::vector<Layer>& parts, int64_t rows) {
    int64_t all = 0;
    for (const Layer& part : parts) all += part.panels();
    std::vector<Range> ranges;
    for (const Layer& part : parts) {
        bool few = part.is_quantised() && rows <= MAX_ROWS_AT_ONCE;
        int64_t size = few ? panels_per_range(all, part.tiles()) : group_size<bf16>(part);
        for (int64_t first = 0; first < part.panels(); first += size)
            ranges.push_back({&part, first, std::min(first + size, part.panels())});
    }
    return ranges;
}

}  // namespace

void amx_linear(const std::vector<Layer>& parts, const bf16* x, int64_t stride, bf16* out, int64_t rows, bool decode) {
    const Layer& first_part = parts[0];
    if (decode && rows > FEW_ROWS) {
        int64_t item = first_part.wide ? 2 : 1;  // `out` is counted in bfloat16 items
        for (int64_t row = 0; row < rows; row += FEW_ROWS)
            amx_linear(parts, x + row * stride, stride, out + row * first_part.out_stride * item,
                       std::min(rows - row, FEW_ROWS), true);
        return;
    }
    decode = decode && rows > 0;
    auto is_exact = [&](const Layer& part) { return decode && part.is_quantised(); };
    bool has_plain = false, has_quantised = false;
    for (const Layer& part : parts)
        if (!is_exact(part)) (part.is_quantised() ? has_quantised : has_plain) = true;
    if (rows > FEW_ROWS) {
        void *plain_rows = nullptr, *transposed_rows = nullptr;
        int64_t bytes = tiles_bytes(rows, first_part.padded_k);
        if (has_plain) to_tiles(x, stride, rows, first_part, false, plain_rows = scratch<PLAIN_ROWS>(bytes));
        if (has_quantised) to_tiles(x, stride, rows, first_part, true, transposed_rows = scratch<TRANSPOSED_ROWS>(bytes));
        return multiply_many_rows(parts, plain_rows, transposed_rows, out, rows);
    }
    std::optional<DecodeInputs> exact;
    if (decode) exact.emplace(parts, x, stride, rows);
    const uint32_t* transposed = has_quantised ? transpose_inputs(x, stride, rows, first_part.k) : nullptr;
    std::vector<bf16> padded;
    if (has_plain && first_part.padded_k != first_part.k) {
        padded = pad(x, stride, rows, first_part);
        x = padded.data();
        stride = first_part.padded_k;
    }
    std::vector<Range> ranges = ranges_of(parts, rows);
    pool::for_each(ranges.size(), first_part.out_stride * first_part.padded_k >= MIN_PARALLEL, [&](int64_t i) {
        const Range& r = ranges[i];
        if (is_exact(*r.part))
            decode_panels(*r.part, *exact, out, r.first, r.last);
        else if (r.part->is_quantised())
            quantised_panels(*r.part, transposed, out, rows, r.first, r.last);
        else
            amx_panels(*r.part, x, stride, out, rows, r.first, r.last);
    });
}

}  // namespace linear_layer

#endif
