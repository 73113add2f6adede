// Linear layers on the AMX matrix unit.
#include "amx.h"

#include "linear_layer.h"
#include "transpose.h"

#if HAS_AMX

namespace linear_layer {
namespace {

// --- plain weights: tiles of 16 rows by 32 inputs against tiles of 32 inputs by 16 outputs ---


// Tiles 0-3 hold sums, 4-5 rows of x (`upper` and `lower` of them), 6-7 weights.
void configure(int upper, int lower) {
    TileConfig config;
    config.rows[0] = config.rows[1] = config.rows[4] = upper;
    config.rows[2] = config.rows[3] = config.rows[5] = lower ? lower : 1;
    _tile_loadconfig(&config);
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

// --- few rows against quantised weights ---
//
// Here the weights are the left operand, so that the inputs of one output, which is what unpacking gives, are a row of
// a tile, and the rows of x are columns. Each output's products and their order are the same. A tile is unpacked while
// the unit multiplies with the one before.

constexpr int64_t FEW_ROWS = 32;

// Tiles 0-3 hold sums, 4-5 sixteen rows of x each (or a single one), 6-7 weights.
void configure_few(bool single) {
    TileConfig config;
    if (single) config.bytes_per_row[0] = config.bytes_per_row[1] = config.bytes_per_row[4] = 4;
    _tile_loadconfig(&config);
}

// Rows of x by pairs of inputs: [block of 16 rows][k / 2][16]; rows that are not there are zeros.
void by_pairs(const bf16* x, int64_t stride, int64_t rows, int64_t k, uint32_t* out) {
    alignas(64) uint32_t some[16][16] = {};
    for (int64_t row = 0; row < rows; row += 16)
        for (int64_t pair = 0; pair < k / 2; pair += 16, out += 256) {
            const bf16* source = x + row * stride + 2 * pair;
            if (row + 16 <= rows && stride % 2 == 0) {
                transpose16((const uint32_t*)source, stride / 2, out, 16);
                continue;
            }
            for (int64_t r = 0; r < 16; r++)
                if (row + r < rows)
                    memcpy(some[r], source + r * stride, 64);
                else
                    memset(some[r], 0, 64);
            transpose16(some[0], 16, out, 16);
        }
}

void finish_columns(const Layer& layer, bf16* out, int64_t row, int rows, int64_t panel, const float* sums) {
    alignas(64) float turned[16 * PANEL];
    transpose16((const uint32_t*)sums, 16, (uint32_t*)turned, 16);
    finish_tile(layer, out, row, rows, panel, turned);
}

// BLOCKS: 0 for a single row, else of 16 rows.
template <int BLOCKS>
void few_panels(const Layer& layer, const uint32_t* inputs, bf16* out, int64_t rows, int64_t first, int64_t last) {
    int64_t tiles = layer.k / TILE_K, input_bytes = BLOCKS ? 64 : 4;
    auto unpack = quantised::tile_pair(layer.format);
    alignas(64) bf16 ring[2][2 * quantised::TILE_ITEMS];
    alignas(64) float sums[4][16 * PANEL];
    quantised::Panel left, right;
    int64_t next_panel = first, next_tile = 0;
    int slot = 0;
    auto unpack_next = [&] {
        if (next_panel >= last) return;
        if (next_tile == 0) {
            left = quantised::panel_at(layer.format, layer.packed, layer.k, next_panel);
            right = quantised::panel_at(layer.format, layer.packed, layer.k, next_panel + 1);
        }
        unpack(left, right, next_tile, ring[slot]);
        if (++next_tile == tiles) next_tile = 0, next_panel += 2;
    };
    configure_few(BLOCKS == 0);
    unpack_next();
    for (int64_t panel = first; panel < last; panel += 2) {
        _tile_zero(0);
        _tile_zero(1);
        if (BLOCKS == 2) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t tile = 0; tile < tiles; tile++) {
            const bf16* weights = ring[slot];
            const char* x = (const char*)inputs + tile * 16 * input_bytes;
            _tile_loadd(4, x, input_bytes);
            _tile_loadd(6, weights, 64);
            _tile_loadd(7, weights + quantised::TILE_ITEMS, 64);
            _tile_dpbf16ps(0, 6, 4);
            _tile_dpbf16ps(1, 7, 4);
            if (BLOCKS == 2) {
                _tile_loadd(5, x + tiles * 16 * input_bytes, 64);
                _tile_dpbf16ps(2, 6, 5);
                _tile_dpbf16ps(3, 7, 5);
            }
            slot ^= 1;
            unpack_next();
        }
        _tile_stored(0, sums[0], input_bytes);
        _tile_stored(1, sums[1], input_bytes);
        if (BLOCKS == 0) {
            finish(layer, out, 0, panel, load(sums[0]));
            finish(layer, out, 0, panel + 1, load(sums[1]));
            continue;
        }
        int upper = std::min<int64_t>(rows, 16);
        finish_columns(layer, out, 0, upper, panel, sums[0]);
        finish_columns(layer, out, 0, upper, panel + 1, sums[1]);
        if (BLOCKS == 1) continue;
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
        finish_columns(layer, out, 16, rows - 16, panel, sums[2]);
        finish_columns(layer, out, 16, rows - 16, panel + 1, sums[3]);
    }
    _tile_release();
}

// Pairs of panels per range: enough ranges that threads end together, few enough that claiming them costs little.
int64_t few_size(const Layer& layer) {
    int64_t size = round_up(layer.panels() / (8 * pool::threads()), 2);
    return std::max<int64_t>(2, std::min<int64_t>(size, 32));
}

void few_linear(const Layer& layer, const bf16* x, int64_t stride, bf16* out, int64_t rows) {
    static thread_local std::vector<uint32_t> pairs;
    const uint32_t* inputs = (const uint32_t*)x;
    if (rows > 1) {
        pairs.resize(round_up(rows, 16) * layer.k / 2);
        by_pairs(x, stride, rows, layer.k, pairs.data());
        inputs = pairs.data();
    }
    for_panels(layer, few_size(layer), [&](int64_t first, int64_t last) {
        if (rows == 1) return few_panels<0>(layer, inputs, out, rows, first, last);
        if (rows <= 16) return few_panels<1>(layer, inputs, out, rows, first, last);
        few_panels<2>(layer, inputs, out, rows, first, last);
    });
}

}  // namespace

void amx_linear(const Layer& layer, const bf16* x, int64_t stride, bf16* out, int64_t rows) {
    if (layer.is_quantised() && rows <= FEW_ROWS) return few_linear(layer, x, stride, out, rows);
    std::vector<bf16> padded;
    if (layer.padded_k != layer.k) {  // whole tiles are read: give each row room for zeros
        padded.resize(rows * layer.padded_k);
        for (int64_t row = 0; row < rows; row++)
            memcpy(padded.data() + row * layer.padded_k, x + row * stride, layer.k * sizeof(bf16));
        x = padded.data();
        stride = layer.padded_k;
    }
    for_panels(layer, group_size<bf16>(layer), [&](int64_t first, int64_t last) {
        amx_panels(plain<bf16>(layer, first, last), x, stride, out, rows, first, last);
    });
}

}  // namespace linear_layer

#endif
