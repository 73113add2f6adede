// Weights kept in a GGUF file's own numbers: small integers with a scale, and in some formats an offset, per group.
//
// A weight [N, K] is packed into an even number of panels of 16 outputs, each cut into tiles of 16 outputs by 32 inputs.
// A panel holds the integers of its tiles, then their scales. Per tile, with r the output and j the input in it:
//   4 bits   4 x 32 words of 16 bits: the four bits 4 (r % 4) of word [r / 4][j]
//   5 bits   the same for the low four bits, then 32 words: bit r of word [j] is the fifth
//   6 bits   4 x 32 words, the word of input j at 2 (j % 16) + j / 16, then 2 x 32 words in the same order: the two bits
//            2 (r % 8) of word [r / 8][j] are the upper ones
//   8 bits   16 x 32 signed bytes
// Scales are float16, or float16 per 256 inputs times 8-bit integers per 16 or 32. What a number means is computed as
// models/weights/dequantise.py does, bit for bit: (integer * scale) + offset in float32, then rounded to the model's type.
#pragma once

#include "linear/linear.h"
#include "vec.h"

namespace quantised {

constexpr int64_t TILE_ITEMS = 16 * 32;

// Bytes of one packed panel.
int64_t panel_bytes(int format, int64_t k);

// Where one panel's integers and scales begin.
struct Panel {
    const char *integers, *halves, *smalls;
};

Panel panel_at(int format, const void* packed, int64_t k, int64_t panel);

// What the scales of a tile are, by group of its inputs and output.
struct Scales {
    alignas(64) float scales[2][16];
    alignas(64) float offsets[2][16];
};

// One tile of two panels, each [16 outputs][32 inputs].
using TilePair = void (*)(const Panel& left, const Panel& right, int64_t tile, bf16* out);
TilePair tile_pair(int format);

// Panels in the layout that plain weights are packed in (see linear.cpp).
void unpack_panels(int format, int dtype, const void* packed, int64_t k, int64_t first, int64_t last, void* out);

void unpack_row(int format, int dtype, const void* packed, int64_t k, int64_t row, void* out);

}  // namespace quantised
