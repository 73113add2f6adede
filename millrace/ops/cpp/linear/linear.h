// The interface of linear layers, for weights of any format: y = x W^T + b.
//
// A weight [n, k] consists of one or more parts, consecutive along the outputs, each packed separately into panels of
// 16 outputs; the parts of a fused matrix may have different formats. ops/cpp/native.py mirrors these structures.
#pragma once

#include <cstdint>

// How a part is stored. The first two are also the dtypes of inputs and outputs (`dtype`, as in vec.h); the others are
// GGUF formats, packed as described in quantised.h.
enum LinearFormat : int32_t {
    FORMAT_F32,
    FORMAT_BF16,
    FORMAT_Q4_0,
    FORMAT_Q4_1,
    FORMAT_Q5_0,
    FORMAT_Q5_1,
    FORMAT_Q8_0,
    FORMAT_Q2_K,
    FORMAT_Q3_K,
    FORMAT_Q4_K,
    FORMAT_Q5_K,
    FORMAT_Q6_K,
    FORMAT_BYTES,
    FORMAT_IQ4_NL,
    FORMAT_IQ4_XS,
    FORMAT_MXFP4,
};

// The order of a quantised part's integers, which decides how it is multiplied.
enum PartOrder : int32_t {
    ORDER_TILES,  // unpacked to `dtype` (quantised/quantised.h)
    ORDER_DOT,    // as integers, with x rounded to INT8 (int8/int8_linear.h); `dtype` must be F32
};

struct LinearPart {
    const void* packed;
    int64_t n;  // outputs
    int32_t format;
    int32_t order;  // the same for all parts of a layer
};

struct LinearDesc {
    const LinearPart* parts;
    const float* bias;  // [n], or null
    int64_t num_parts;
    int64_t n, k;   // outputs of all parts, inputs
    int32_t dtype;  // of x and out
    int32_t unused;
};

// out [rows, n], contiguous, from x [rows, k], whose rows are `stride` items apart. The order of summation does not
// depend on `rows`. With `wide` outputs are float32 instead of being rounded to the layer's dtype. With `decode`
// quantised parts use the kernel of linear_decode.h if there is one: faster for few rows, with slightly different
// results. Uses the pool, so it must not be called from a task of the pool.
void linear(const LinearDesc& layer, const void* x, int64_t stride, void* out, int64_t rows, bool wide = false,
            bool decode = false);

// Whether `decode` uses another kernel for this layer.
bool has_decode_kernel(const LinearDesc& layer);

// First half of a gated MLP for many rows: act(gate) * up, where the first half of the layer's outputs are gates,
// written as input tiles of the `next` layer into `next_tiles`, which has room for `input_tiles_bytes(next, rows)`.
// Returns false, without doing anything, if separate calls are faster or the layers do not fit.
int64_t input_tiles_bytes(const LinearDesc& next, int64_t rows);
bool gated_linear(const LinearDesc& gate_up, int activation, const void* x, int64_t stride, int64_t rows,
                  const LinearDesc& next, void* next_tiles);
// Second half: `layer` over input tiles; bit-identical to `linear` over the rows.
void linear_from_tiles(const LinearDesc& layer, const void* next_tiles, void* out, int64_t rows);

// Rows of the weight by index: out [count, k]. Returns the index of the first invalid id, or -1.
int64_t take_rows(const LinearDesc& layer, void* out, const int64_t* ids, int64_t count);
