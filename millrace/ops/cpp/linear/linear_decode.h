// Products of decode rows with quantised weights; few rows run at memory bandwidth.
//
// Over a group of inputs with one scale, sum x (a q + b) = a sum x q + b sum x. The matrix unit multiplies x with the
// integers q, which are exact in bfloat16 and take two or four instructions per 32 to unpack; scales and offsets are
// applied to the sums of each group in float32. Weights are not rounded, so results differ from those of the other
// kernels, which round a q + b to bfloat16. The order of summation does not depend on the number of rows.
#pragma once

#include "amx.h"
#include "linear/linear_layer.h"

#if HAS_AMX

namespace linear_layer {

// How a row of x becomes columns of a product: one column, or two, one per group of inputs. The groups are the two
// halves of a tile, or alternate.
enum Order { WHOLE, HALVES, INTERLEAVED, ORDERS };

// Rows of x as columns for the matrix unit, at most sixteen columns per block: per block and tile [16 pairs of
// inputs][columns], and the sum of each column over that tile; in every order that some part needs.
class DecodeInputs {
  public:
    // Valid until this thread creates the next one.
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

// Panels `first` to `last` of a quantised part.
void decode_panels(const Layer& layer, const DecodeInputs& inputs, bf16* out, int64_t first, int64_t last);

}  // namespace linear_layer

#endif
