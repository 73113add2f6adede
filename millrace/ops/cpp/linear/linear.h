// What a linear layer is to the kernels, whatever the format of its weight: y = x W^T + b.
//
// A weight [n, k] is one or several parts, one below the other, each packed on its own into panels of 16 outputs; the
// parts of a fused matrix may have different formats. ops/native.py mirrors these structures.
#pragma once

#include <cstdint>

// How a part's numbers are stored; the first two are also the types of inputs and outputs (`dtype`, as in vec.h).
// The others are GGUF's, packed as quantised.h says.
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
};

struct LinearPart {
    const void* packed;
    int64_t n;  // outputs
    int32_t format;
    int32_t unused;
};

struct LinearDesc {
    const LinearPart* parts;
    const float* bias;  // [n], or null
    int64_t num_parts;
    int64_t n, k;   // outputs of all parts, inputs
    int32_t dtype;  // of x and out
    int32_t unused;
};

// out [rows, n], contiguous, of x [rows, k], whose rows lie `stride` items apart. Each output is summed in one order
// whatever `rows` is; `wide` ones are float32, not rounded to the layer's type. With `decode` rows are multiplied as
// linear_decode.h says, where that can be: with results of their own, faster where they are few. Uses the pool, so it must not be called
// from a piece of the pool's work.
void linear(const LinearDesc& layer, const void* x, int64_t stride, void* out, int64_t rows, bool wide = false,
            bool decode = false);

// Whether `decode` makes a difference for this layer.
bool decodes_apart(const LinearDesc& layer);

// A gated MLP for many rows, in two halves. act(gate) * up of a layer whose first half of outputs are gates, laid out for
// the layer that comes `next`, into `laid_out`, which has room for `laid_out_bytes`; false, with nothing done, where these
// layers or so few rows are better multiplied one by one.
int64_t laid_out_bytes(const LinearDesc& next, int64_t rows);
bool gated_linear(const LinearDesc& gate_up, int activation, const void* x, int64_t stride, int64_t rows,
                  const LinearDesc& next, void* laid_out);
// And `next` over that; the results are those of `linear` over the rows.
void linear_laid_out(const LinearDesc& layer, const void* laid_out, void* out, int64_t rows);

// Rows of the weight by index: out [count, k]. The position of the first id that is no row, or -1.
int64_t take_rows(const LinearDesc& layer, void* out, const int64_t* ids, int64_t count);
