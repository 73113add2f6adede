// Products with quantised weights for rows that decode; with few of them at the speed of memory.
//
// Over a group of inputs with one scale, sum x (a q + b) = a sum x q + b sum x. The matrix unit multiplies x with the
// integers q, which are exact in bfloat16 and take two or four instructions per 32 of them to come by; scales and offsets
// are applied to the sums of each group in float32. Nothing of a weight is rounded, so results differ from those of the
// other kernels, which round a q + b to bfloat16. Each output is summed in one order whatever the number of rows is.
#pragma once

#include "amx.h"
#include "linear/linear_layer.h"

#if HAS_AMX

namespace linear_layer {

// How the columns of a product are made of the rows of x: each whole, or split by the group of the inputs, which are the
// first and the second half of a tile, or come by turns.
enum Order { WHOLE, HALVES, TURNS, ORDERS };

// Rows of x as columns for the matrix unit, sixteen at most in a block: per block and tile [16 pairs of inputs][columns],
// and the sums [columns] of what each column has of that tile, in each order that some part needs.
class DecodeInputs {
  public:
    // Valid until this thread makes others.
    DecodeInputs(const std::vector<Layer>& parts, const bf16* x, int64_t stride, int64_t rows);

    const uint32_t* tiles(Order order, int64_t block) const { return tiles_[order] + block * tiles_per_row_ * 256; }
    const float* sums(Order order, int64_t block) const { return sums_[order] + block * tiles_per_row_ * 16; }
    int64_t rows() const { return rows_; }

  private:
    void lay_out(Order order, const bf16* x, int64_t stride);

    int64_t rows_, tiles_per_row_;
    const uint32_t* tiles_[ORDERS] = {};
    const float* sums_[ORDERS] = {};
};

// The panels from `first` to `last` of a quantised part.
void decode_panels(const Layer& layer, const DecodeInputs& inputs, bf16* out, int64_t first, int64_t last);

}  // namespace linear_layer

#endif
