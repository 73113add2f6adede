// Weights in GGUF's quantised formats: small integers with a scale, and in some formats an offset, per group of inputs.
//
// A weight [N, K] is packed into an even number of panels of 16 outputs, each split into tiles of 16 outputs by 32
// inputs. A panel holds the integers of its tiles, then their scales. In a tile, with output r and input j:
//   4 bits   4 x 32 words of 16 bits: bits 4 (r % 4) to 4 (r % 4) + 3 of word [r / 4][j]
//   5 bits   the same for the low four bits, then 32 words: bit r of word [j] is the fifth
//   6 bits   4 x 32 words, with the word of input j at 2 (j % 16) + j / 16, then 2 x 32 words in the same order: the upper
//            two bits are bits 2 (r % 8) and 2 (r % 8) + 1 of word [r / 8][j]
//   8 bits   16 x 32 signed bytes
// Scales are float16, or float16 per 256 inputs times 8-bit integers per 16 or 32. Values are bit-identical to those of
// models/weights/dequantise.py: (integer * scale) + offset in float32, then rounded to the model's dtype.
#pragma once

#include "linear/linear.h"
#include "vec.h"

namespace quantised {

constexpr int64_t TILE_ITEMS = 16 * 32;

// Bytes of one packed panel.
int64_t panel_bytes(int format, int64_t k);

// Addresses of one panel's integers, float16 scales and 8-bit scales.
struct Panel {
    const char *integers, *halves, *byte_scales;
};

Panel panel_at(int format, const void* packed, int64_t k, int64_t panel);

// Scales and offsets of a tile: [group of inputs][output].
struct Scales {
    alignas(64) float scales[2][16];
    alignas(64) float offsets[2][16];
};

// Unpacks the same tile of two panels: [panel][16 outputs][32 inputs].
using TilePair = void (*)(const Panel& left, const Panel& right, int64_t tile, bf16* out);
TilePair tile_pair(int format);

// Unpacks panels into the layout of plain weights (see linear.cpp).
void unpack_panels(int format, int dtype, const void* packed, int64_t k, int64_t first, int64_t last, void* out);

void unpack_row(int format, int dtype, const void* packed, int64_t k, int64_t row, void* out);

}  // namespace quantised
