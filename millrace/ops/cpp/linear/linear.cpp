// Linear layers over packed weights, for any number of rows; the order of summation does not depend on it. bfloat16
// uses the AMX matrix unit if there is one.
//
// A plain weight [N, K] is packed into an even number of panels of 16 outputs, zero-padded:
//   float32   panel[k][16]                   one vector per input
//   bfloat16  panel[k / 2][16][2]            one vector per pair of inputs; 16 pairs are one AMX tile of 1 KiB
// A quantised weight, packed as in quantised.h, is unpacked into the same layout panel by panel as it is used.
#include "linear/linear.h"

#include "amx.h"
#include "int8/int8_linear.h"
#include "linear/linear_decode.h"
#include "linear/linear_layer.h"
#include "linear/linear_many.h"

namespace {

using namespace linear_layer;

// --- float32, and bfloat16 without a matrix unit ---
//
// Inputs are read in units of 32 bits: one float, or a pair of bfloat16. `rows_of` first transposes a block of rows to
// [unit][row], so that they are read through one pointer; sums stay in registers.

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

#if defined(__aarch64__)
// NEON has 32 registers of four floats; the sums of four rows and one panel take 16 of them. More rows take several
// passes.
//
// Every loop over an array of sums must be unrolled, also those that clear and store it; otherwise it stays in memory.
constexpr int ROWS_PER_PASS = 4;

struct Panel {
    uint32x4_t parts[4];
};

inline Panel load_panel(const uint32_t* weights) {
    return {vld1q_u32(weights), vld1q_u32(weights + 4), vld1q_u32(weights + 8), vld1q_u32(weights + 12)};
}

inline float32x4_t multiply_add(float32x4_t sum, uint32x4_t weights, uint32x4_t input, float) {
    return vfmaq_f32(sum, vreinterpretq_f32_u32(weights), vreinterpretq_f32_u32(input));
}

inline float32x4_t multiply_add(float32x4_t sum, uint32x4_t pairs, uint32x4_t input, bf16) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return vbfdotq_f32(sum, vreinterpretq_bf16_u32(pairs), vreinterpretq_bf16_u32(input));
#else
    const uint32x4_t upper = vdupq_n_u32(0xffff0000u);
    sum = vfmaq_f32(sum, vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16)), vreinterpretq_f32_u32(vshlq_n_u32(input, 16)));
    return vfmaq_f32(sum, vreinterpretq_f32_u32(vandq_u32(pairs, upper)),
                     vreinterpretq_f32_u32(vandq_u32(input, upper)));
#endif
}

// ROWS rows of a block of STRIDE rows, against one panel.
template <int ROWS, int STRIDE, typename T>
void multiply_rows(const Layer& layer, const uint32_t* inputs, T* out, int64_t row, int64_t panel) {
    int64_t units = layer.units<T>();
    const uint32_t* weights = (const uint32_t*)layer.packed + (panel - layer.first_panel) * units * PANEL;
    float32x4_t sums[ROWS][4];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++) sums[r][part] = vdupq_n_f32(0);
    for (int64_t unit = 0; unit < units; unit++, inputs += STRIDE, weights += PANEL) {
        Panel now = load_panel(weights);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            uint32x4_t input = vld1q_dup_u32(inputs + r);
#pragma GCC unroll 4
            for (int part = 0; part < 4; part++)
                sums[r][part] = multiply_add(sums[r][part], now.parts[part], input, T{});
        }
    }
    float all[ROWS][PANEL];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++) vst1q_f32(all[r] + 4 * part, sums[r][part]);
    for (int r = 0; r < ROWS; r++) finish(layer, out, row + r, panel, load(all[r]));
}

template <int ROWS, int PANELS, typename T>
void block(const Layer& layer, const uint32_t* inputs, T* out, int64_t row, int64_t panel) {
    constexpr int ROWS_AT_ONCE = ROWS < ROWS_PER_PASS ? ROWS : ROWS_PER_PASS;
    static_assert(ROWS % ROWS_AT_ONCE == 0);
    for (int p = 0; p < PANELS; p++)
        for (int r = 0; r < ROWS; r += ROWS_AT_ONCE)
            multiply_rows<ROWS_AT_ONCE, ROWS>(layer, inputs + r, out, row + r, panel + p);
}
#else
template <int ROWS, int PANELS, typename T>
void block(const Layer& layer, const uint32_t* inputs, T* out, int64_t row, int64_t panel) {
    int64_t units = layer.units<T>();
    const uint32_t* weights = (const uint32_t*)layer.packed + (panel - layer.first_panel) * units * PANEL;
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
#endif

// The largest block size that fits into the remaining rows.
int block_size(int64_t left) {
    for (int size : BLOCK_SIZES)
        if (size <= left) return size;
    return 0;
}

template <typename T>
void vector_panels(const Layer& layer, const uint32_t* inputs, T* out, int64_t rows, int64_t first, int64_t last) {
    // A single row leaves registers for four panels, so that more loads are in flight.
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

// Transposes the block that starts at `row`; incomplete units are padded with zeros.
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

template <typename T>
void vector_linear(const Layer& layer, const T* x, int64_t stride, T* out, int64_t rows) {
    std::vector<uint32_t> inputs(rows * layer.units<T>());
    std::vector<int64_t> starts;
    for (int64_t row = 0; row < rows; row += block_size(rows - row)) starts.push_back(row);
    pool::for_each(starts.size(), rows * layer.k >= MIN_PARALLEL, [&](int64_t i) {
        rows_of(layer, x, stride, inputs.data(), starts[i], block_size(rows - starts[i]));
    });
    // With few rows, unpack few panels at a time and use them while they are in the L1 cache.
    int64_t size = layer.is_quantised() && rows <= BLOCK_SIZES[0] ? 4 : group_size<T>(layer);
    for_panels(layer, size, [&](int64_t first, int64_t last) {
        vector_panels(as_plain<T>(layer, first, last), inputs.data(), out, rows, first, last);
    });
}

// --- packing, and reading rows back for embeddings; in units of 32 bits ---

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

// Inputs per packed row: a multiple of an AMX tile for bfloat16; quantised rows always are.
int64_t padded_inputs(int format, int64_t k) { return format == FORMAT_F32 ? k : round_up(k, TILE_K); }

int64_t item_bytes(int dtype) { return dtype == F32 ? 4 : 2; }

std::vector<Layer> parts_of(const LinearDesc& desc, bool wide = false) {
    std::vector<Layer> parts;
    int64_t first = 0;
    for (int64_t i = 0; i < desc.num_parts; i++) {
        const LinearPart& part = desc.parts[i];
        const float* bias = desc.bias ? desc.bias + first : nullptr;
        int64_t padded = padded_inputs(part.format, desc.k);
        parts.push_back({part.format, part.packed, bias, part.n, desc.k, padded, desc.n, first, wide});
        first += part.n;
    }
    return parts;
}

}  // namespace

void linear(const LinearDesc& desc, const void* x, int64_t stride, void* out, int64_t rows, bool wide, bool decode) {
    std::vector<Layer> parts = parts_of(desc, wide);
    if (desc.parts->order == ORDER_DOT) return int8::linear(parts, (const float*)x, stride, (float*)out, rows);
#if HAS_AMX
    if (desc.dtype != F32 && use_amx()) return amx_linear(parts, (const bf16*)x, stride, (bf16*)out, rows, decode);
#endif
    for (const Layer& part : parts) {
        if (desc.dtype == F32)
            vector_linear(part, (const float*)x, stride, (float*)out, rows);
        else
            vector_linear(part, (const bf16*)x, stride, (bf16*)out, rows);
    }
}

#if HAS_AMX

bool has_decode_kernel(const LinearDesc& desc) {
    if (desc.dtype == F32 || !use_amx()) return false;
    for (int64_t i = 0; i < desc.num_parts; i++)
        if (desc.parts[i].format > FORMAT_BF16) return true;
    return false;
}

int64_t input_tiles_bytes(const LinearDesc& next, int64_t rows) {
    return tiles_bytes(rows, padded_inputs(next.parts[0].format, next.k));
}

bool gated_linear(const LinearDesc& gate_up, int activation, const void* x, int64_t stride, int64_t rows,
                  const LinearDesc& next, void* next_tiles) {
    if (gate_up.dtype == F32 || rows <= FEW_ROWS || !use_amx()) return false;
    std::vector<Layer> parts = parts_of(gate_up);
    if (!can_fuse_gate(parts, parts_of(next))) return false;
    void* tiles = scratch<TRANSPOSED_ROWS>(tiles_bytes(rows, parts[0].padded_k));
    to_tiles((const bf16*)x, stride, rows, parts[0], parts[0].is_quantised(), tiles);
    gated_rows(parts, activation, tiles, next_tiles, rows);
    return true;
}

void linear_from_tiles(const LinearDesc& layer, const void* next_tiles, void* out, int64_t rows) {
    multiply_many_rows(parts_of(layer), next_tiles, next_tiles, (bf16*)out, rows);
}

#else

bool has_decode_kernel(const LinearDesc&) { return false; }

int64_t input_tiles_bytes(const LinearDesc&, int64_t) { return 0; }

bool gated_linear(const LinearDesc&, int, const void*, int64_t, int64_t, const LinearDesc&, void*) { return false; }

void linear_from_tiles(const LinearDesc&, const void*, void*, int64_t) {}

#endif

int64_t take_rows(const LinearDesc& desc, void* out, const int64_t* ids, int64_t count) {
    int64_t item = item_bytes(desc.dtype), row_bytes = desc.k * item;
    for (int64_t i = 0; i < count; i++) {
        if (ids[i] < 0 || ids[i] >= desc.n) return i;
        const LinearPart* part = desc.parts;
        int64_t row = ids[i];
        for (; row >= part->n; part++) row -= part->n;
        char* target = (char*)out + i * row_bytes;
        if (part->order == ORDER_DOT)
            int8::unpack_row(part->format, part->packed, desc.k, row, (float*)target);
        else if (part->format > FORMAT_BF16)
            quantised::unpack_row(part->format, desc.dtype, part->packed, desc.k, row, target);
        else
            take_row((const uint32_t*)part->packed, target, row, row_bytes,
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

int millrace_has_decode_kernel(const LinearDesc* layer) { return has_decode_kernel(*layer); }

void millrace_linear(const LinearDesc* layer, const void* x, int64_t stride, void* out, int64_t rows, int wide,
                     int decode) {
    linear(*layer, x, stride, out, rows, wide, decode);
}

// Both halves of a gated MLP (see linear.h); returns 0 if they must be computed by separate calls.
int millrace_gated_mlp(const LinearDesc* gate_up, const LinearDesc* down, int activation, const void* x, int64_t stride,
                       void* out, int64_t rows) {
    std::vector<char> memory(input_tiles_bytes(*down, rows) + 64);
    char* next_tiles = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
    if (!gated_linear(*gate_up, activation, x, stride, rows, *down, next_tiles)) return 0;
    linear_from_tiles(*down, next_tiles, out, rows);
    return 1;
}
}
