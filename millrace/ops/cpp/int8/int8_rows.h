// Activations rounded to INT8: the rows of x that are multiplied with quantised weights (int8_linear.h).
#pragma once

#include "vec.h"

namespace int8 {

constexpr int64_t TILE_K = 32;

// Rows are multiplied in blocks: the size of the next one, with `left` > 0 rows left.
#if defined(__AVX2__)
constexpr int MAX_BLOCK_ROWS = 6;

// As many blocks as necessary, of nearly the same size.
inline int block_rows(int64_t left) {
    int64_t blocks = (left + MAX_BLOCK_ROWS - 1) / MAX_BLOCK_ROWS;
    return (left + blocks - 1) / blocks;
}
#else
constexpr int BLOCK_ROWS[] = {12, 8, 4, 2, 1};
constexpr int NUM_BLOCKS = sizeof BLOCK_ROWS / sizeof BLOCK_ROWS[0];
constexpr int MAX_BLOCK_ROWS = BLOCK_ROWS[0];

inline int block_rows(int64_t left) {
    for (int size : BLOCK_ROWS)
        if (size <= left) return size;
    return 0;
}
#endif

// A block of `size` rows. Every 32 inputs of a row (a tile) have one scale, the largest magnitude / 127:
// x = scale * value, rounded to the nearest value, from -127 to 127. A NaN or an infinity makes the scale NaN, so that
// it reaches all outputs.
struct RowBlock {
    const int8_t* values;  // [tile][row][32]
    const float* scales;   // [tile][row]
    const float* sums;     // [tile][row]: scale times the sum of the values
    const float* halves;   // [tile][2][row]: the same for the first and the last 16 values; if required

    // The same block of `size` rows from `tile` on.
    RowBlock from(int64_t tile, int size) const {
        int64_t skip = tile * size;
        return {values + skip * TILE_K, scales + skip, sums + skip, halves + 2 * skip};
    }
};

// All rows of x [rows, k], in blocks from the first row on. Valid until this thread creates the next one.
class Rows {
  public:
    Rows(const float* x, int64_t stride, int64_t rows, int64_t k, bool with_halves);

    int64_t count() const { return rows_; }

    // The block that starts at `row`.
    RowBlock block(int64_t row) const {
        int64_t tiles = k_ / TILE_K;
        return {values_ + row * k_, scales_ + row * tiles, sums_ + row * tiles, halves_ + row * 2 * tiles};
    }

  private:
    void round_block(const float* x, int64_t stride, int64_t row, int size);

    int64_t rows_, k_;
    bool with_halves_;
    int8_t* values_;
    float *scales_, *sums_, *halves_;
};

}  // namespace int8
