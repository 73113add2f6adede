// Linear layers over quantised weights and activations rounded to INT8: products of integers, for processors whose
// instructions for those are faster than for bfloat16 and float32.
//
// Over a group of inputs with one scale, sum x (a q + b) = d (a sum v q + b sum v), where x = d v (int8_rows.h). The sum
// of v q is exact in 32 bits. The operations on a row, and their order, are the same whatever the number of rows.
//
// Weights are packed as described in quantised.h, but their integers in dot order (ORDER_DOT): what one instruction
// multiplies, four consecutive inputs of each of 16 outputs, is a chunk of 64 values, and a tile has eight chunks. With
// output r and input j = 4 c + i (chunk c), `at` = 4 r + i:
//   4 bits   4 x 64 bytes: byte [c % 4][at], chunks 0 to 3 in the low four bits, 4 to 7 in the high four
//   5 bits   the same for the low four bits, then 64 bytes: bit c of byte [at] is the fifth
//   6 bits   the same, then 2 x 64 bytes: bits 2 (c % 4) and 2 (c % 4) + 1 of byte [c / 4][at] are the upper two
//   8 bits   8 x 64 signed bytes: byte [c][at]
#pragma once

#include <vector>

#include "linear/linear_layer.h"

namespace int8 {

// All parts of a layer, each in dot order. Uses the pool.
void linear(const std::vector<linear_layer::Layer>& parts, const float* x, int64_t stride, float* out, int64_t rows);

// One row of a packed weight, bit-identical to models/weights/dequantise.py.
void unpack_row(int format, const void* packed, int64_t k, int64_t row, float* out);

}  // namespace int8
