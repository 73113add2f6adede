// Linear layers over packed weights, for one row or thousands, each output summed in the same order however many
// rows there are. bfloat16 goes through the AMX matrix unit where there is one.
//
// A weight [N, K] is packed into an even number of panels of 16 outputs, zero-padded:
//   float32   panel[k][16]                   one vector per input
//   bfloat16  panel[k / 2][16][2]            one vector per pair of inputs; 16 pairs are one AMX tile of 1 KiB
#include "linear.h"

#include "amx.h"
#include "pool.h"
#include "vec.h"

#include <vector>

namespace {

constexpr int64_t PANEL = 16;
constexpr int64_t TILE_K = 32;
// Weights of so many bytes stay in the second-level cache while all rows pass by.
constexpr int64_t GROUP_BYTES = 512 << 10;

int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// One part of a layer: its own outputs lie side by side in rows of `out_stride` items.
struct Layer {
    const void* packed;
    const float* bias;  // [N] or null
    int64_t n, k, padded_k, out_stride;

    int64_t panels() const { return round_up(n, 2 * PANEL) / PANEL; }
    template <typename T>
    int64_t units() const {
        return padded_k * sizeof(T) / 4;
    }
};

template <typename T>
void finish(const Layer& layer, T* out, int64_t row, int64_t panel, vf sum) {
    int64_t column = panel * PANEL;
    int lanes = layer.n - column < PANEL ? layer.n - column : PANEL;
    if (lanes <= 0) return;
    if (layer.bias) sum += load_upto(layer.bias + column, lanes);
    store_upto(out + row * layer.out_stride + column, sum, lanes);
}

// --- float32, and bfloat16 without a matrix unit ---
//
// Inputs are read in units of 32 bits: one float, or a pair of bfloat16. A block of rows is first laid out by unit
// ([unit][row], as `rows_of` does), so that one pointer walks through all of them; sums stay in registers.

constexpr int BLOCK_SIZES[] = {12, 4, 1};

inline vf multiply_add(vf sum, const uint32_t* weights, const uint32_t* input, float) {
    float x;
    memcpy(&x, input, sizeof x);
    return fma(load((const float*)weights), x, sum);
}

inline vf multiply_add(vf sum, const uint32_t* weights, const uint32_t* input, bf16) {
#if defined(__AVX512BF16__)
    __m512bh both = (__m512bh)_mm512_set1_epi32(*input);
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(weights), both);
#else
    vu pairs;
    memcpy(&pairs, weights, sizeof pairs);
    uint32_t low = *input << 16, high = *input & 0xffff0000u;
    float even, odd;
    memcpy(&even, &low, sizeof even);
    memcpy(&odd, &high, sizeof odd);
    return fma((vf)(pairs & 0xffff0000u), odd, fma((vf)(pairs << 16), even, sum));
#endif
}

template <int ROWS, int PANELS, typename T>
void block(const Layer& layer, const uint32_t* inputs, T* out, int64_t row, int64_t panel) {
    int64_t units = layer.units<T>();
    const uint32_t* weights = (const uint32_t*)layer.packed + panel * units * PANEL;
    vf sums[ROWS][PANELS] = {};
    for (int64_t unit = 0; unit < units; unit++, inputs += ROWS, weights += PANEL) {
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int p = 0; p < PANELS; p++)
                sums[r][p] = multiply_add(sums[r][p], weights + p * units * PANEL, inputs + r, T{});
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) finish(layer, out, row + r, panel + p, sums[r][p]);
}

// The largest block that fits into the rows that are left.
int block_size(int64_t left) {
    for (int size : BLOCK_SIZES)
        if (size <= left) return size;
    return 0;
}

template <typename T>
void vector_panels(const Layer& layer, const uint32_t* inputs, T* out, int64_t rows, int64_t first, int64_t last) {
    // A single row leaves registers for more panels, and so more reads under way at once.
    if (rows == 1)
        for (; first + 4 <= last; first += 4) block<1, 4>(layer, inputs, out, 0, first);
    for (int64_t panel = first; panel < last; panel += 2)
        for (int64_t row = 0; row < rows;) {
            int size = block_size(rows - row);
            const uint32_t* own = inputs + row * layer.units<T>();
            if (size == 12) block<12, 2>(layer, own, out, row, panel);
            if (size == 4) block<4, 2>(layer, own, out, row, panel);
            if (size == 1) block<1, 2>(layer, own, out, row, panel);
            row += size;
        }
}

// Lay out the block that starts at `row`; odd ends are filled with zeros.
template <typename T>
void rows_of(const Layer& layer, const T* x, int64_t stride, uint32_t* inputs, int64_t row, int size) {
    int64_t units = layer.units<T>(), row_bytes = layer.k * sizeof(T);
    for (int r = 0; r < size; r++) {
        const char* source = (const char*)(x + (row + r) * stride);
        for (int64_t unit = 0; unit < units; unit++) {
            uint32_t value = 0;
            int64_t left = row_bytes - unit * 4;
            if (left >= 4)
                memcpy(&value, source + unit * 4, 4);
            else if (left > 0)
                memcpy(&value, source + unit * 4, left);
            inputs[row * units + unit * size + r] = value;
        }
    }
}

// --- AMX: tiles of 16 rows by 32 inputs against tiles of 32 inputs by 16 outputs ---

#if HAS_AMX

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
    const char* left = (const char*)layer.packed + panel * tiles * 1024;
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

#endif

constexpr int64_t MIN_PARALLEL = 1 << 16;
constexpr int64_t PANEL_STEP = 4;

// Call f(first, last) for ranges of panels, several per thread, none with more weights than stay in the cache.
template <typename T, typename F>
void for_panels(const Layer& layer, F f) {
    int64_t panels = layer.panels(), panel_bytes = layer.units<T>() * PANEL * 4;
    int64_t size = round_up(panels / (3 * pool::threads()), PANEL_STEP), most = GROUP_BYTES / panel_bytes;
    size = size < most ? size : most / PANEL_STEP * PANEL_STEP;
    size = size < PANEL_STEP ? PANEL_STEP : size;
    pool::for_each((panels + size - 1) / size, layer.n * layer.padded_k >= MIN_PARALLEL, [&](int64_t piece) {
        int64_t last = (piece + 1) * size;
        f(piece * size, last < panels ? last : panels);
    });
}

#if HAS_AMX
void amx_linear(const Layer& layer, const bf16* x, int64_t stride, bf16* out, int64_t rows) {
    std::vector<bf16> padded;
    if (layer.padded_k != layer.k) {  // whole tiles are read: give each row room for zeros
        padded.resize(rows * layer.padded_k);
        for (int64_t row = 0; row < rows; row++)
            memcpy(padded.data() + row * layer.padded_k, x + row * stride, layer.k * sizeof(bf16));
        x = padded.data();
        stride = layer.padded_k;
    }
    for_panels<bf16>(layer,
                     [&](int64_t first, int64_t last) { amx_panels(layer, x, stride, out, rows, first, last); });
}
#endif

template <typename T>
void vector_linear(const Layer& layer, const T* x, int64_t stride, T* out, int64_t rows) {
    std::vector<uint32_t> inputs(rows * layer.units<T>());
    std::vector<int64_t> starts;
    for (int64_t row = 0; row < rows; row += block_size(rows - row)) starts.push_back(row);
    pool::for_each(starts.size(), rows * layer.k >= MIN_PARALLEL, [&](int64_t i) {
        rows_of(layer, x, stride, inputs.data(), starts[i], block_size(rows - starts[i]));
    });
    for_panels<T>(layer, [&](int64_t first, int64_t last) {
        vector_panels(layer, inputs.data(), out, rows, first, last);
    });
}

void linear(const Layer& layer, const float* x, int64_t stride, float* out, int64_t rows) {
    vector_linear(layer, x, stride, out, rows);
}

void linear(const Layer& layer, const bf16* x, int64_t stride, bf16* out, int64_t rows) {
#if HAS_AMX
    if (use_amx()) return amx_linear(layer, x, stride, out, rows);
#endif
    vector_linear(layer, x, stride, out, rows);
}

// --- packing, and reading single rows back for embeddings; in units of 32 bits: one float or a pair of bfloat16 ---

void pack(const char* weight, uint32_t* packed, int64_t n, int64_t row_bytes, int64_t units) {
    int64_t panels = round_up(n, 2 * PANEL) / PANEL;
    pool::for_each(panels, panels * units >= MIN_PARALLEL, [&](int64_t panel) {
        std::vector<uint32_t> rows(PANEL * units);
        for (int64_t row = 0; row < PANEL && panel * PANEL + row < n; row++)
            memcpy(rows.data() + row * units, weight + (panel * PANEL + row) * row_bytes, row_bytes);
        uint32_t* target = packed + panel * PANEL * units;
        for (int64_t unit = 0; unit < units; unit++)
            for (int64_t row = 0; row < PANEL; row++) target[unit * PANEL + row] = rows[row * units + unit];
    });
}

void take_row(const uint32_t* packed, char* out, int64_t row, int64_t row_bytes, int64_t units) {
    const uint32_t* source = packed + row / PANEL * PANEL * units + row % PANEL;
    for (int64_t unit = 0; unit < units && unit * 4 < row_bytes; unit++)
        memcpy(out + unit * 4, source + unit * PANEL, row_bytes - unit * 4 < 4 ? row_bytes - unit * 4 : 4);
}

// Inputs per packed row: whole AMX tiles for bfloat16.
int64_t padded_inputs(int format, int64_t k) { return format == FORMAT_F32 ? k : round_up(k, TILE_K); }

int64_t item_bytes(int dtype) { return dtype == F32 ? 4 : 2; }

}  // namespace

void linear(const LinearDesc& desc, const void* x, int64_t stride, void* out, int64_t rows) {
    int64_t first = 0;
    for (int64_t i = 0; i < desc.num_parts; i++) {
        const LinearPart& part = desc.parts[i];
        const float* bias = desc.bias ? desc.bias + first : nullptr;
        Layer layer{part.packed, bias, part.n, desc.k, padded_inputs(part.format, desc.k), desc.n};
        if (desc.dtype == F32)
            linear(layer, (const float*)x, stride, (float*)out + first, rows);
        else
            linear(layer, (const bf16*)x, stride, (bf16*)out + first, rows);
        first += part.n;
    }
}

int64_t take_rows(const LinearDesc& desc, void* out, const int64_t* ids, int64_t count) {
    int64_t item = item_bytes(desc.dtype), row_bytes = desc.k * item;
    for (int64_t i = 0; i < count; i++) {
        if (ids[i] < 0 || ids[i] >= desc.n) return i;
        const LinearPart* part = desc.parts;
        int64_t row = ids[i];
        for (; row >= part->n; part++) row -= part->n;
        take_row((const uint32_t*)part->packed, (char*)out + i * row_bytes, row, row_bytes,
                 padded_inputs(part->format, desc.k) * item / 4);
    }
    return -1;
}

extern "C" {

int millrace_has_amx() { return use_amx(); }

int64_t millrace_padded_inputs(int format, int64_t k) { return padded_inputs(format, k); }

void millrace_pack(int format, const void* weight, void* packed, int64_t n, int64_t k) {
    int64_t item = item_bytes(format);
    pack((const char*)weight, (uint32_t*)packed, n, k * item, padded_inputs(format, k) * item / 4);
}

int64_t millrace_take_rows(const LinearDesc* layer, void* out, const int64_t* ids, int64_t count) {
    return take_rows(*layer, out, ids, count);
}

void millrace_linear(const LinearDesc* layer, const void* x, int64_t stride, void* out, int64_t rows) {
    linear(*layer, x, stride, out, rows);
}
}
