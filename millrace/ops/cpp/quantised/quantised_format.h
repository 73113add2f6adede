// Parameters of each quantised format, and the layout of a packed panel.
#pragma once

#include "quantised/quantised.h"

namespace quantised {

constexpr int FIRST_FORMAT = FORMAT_Q4_0, NUM_FORMATS = FORMAT_MXFP4 - FORMAT_Q4_0 + 1;
constexpr int64_t ROWS = 16, TILE_K = 32, SUPER_TILES = 8;

struct Format {
    int bits;        // per packed integer
    int zero;        // integer that represents 0
    int groups;      // groups with their own scale among the 32 inputs of a tile
    bool offset;     // has offsets
    bool super;      // 8-bit scales under one float16 per 256 inputs
    int file_bytes;  // bytes of one block in the file: 256 inputs if super, else 32
    float unit = 1;  // of the 8-bit scales
    int levels = 0;  // the table (LEVELS) in which packed integers are places; 0 for none
};

constexpr Format FORMATS[NUM_FORMATS] = {
    {4, 8, 1, false, false, 18},   // Q4_0
    {4, 0, 1, true, false, 20},    // Q4_1
    {5, 16, 1, false, false, 22},  // Q5_0
    {5, 0, 1, true, false, 24},    // Q5_1
    {8, 0, 1, false, false, 34},   // Q8_0
    {4, 0, 2, true, true, 84},     // Q2_K
    {4, 4, 2, false, true, 110},   // Q3_K
    {4, 0, 1, true, true, 144},    // Q4_K
    {5, 0, 1, true, true, 176},    // Q5_K
    {6, 32, 2, false, true, 210},  // Q6_K
    {8, 0, 2, false, true, 274, 0.125f},  // the I-quants, rewritten by ops/linear/byte_blocks.py
    {4, 0, 1, false, false, 18, 1, 1},    // IQ4_NL
    {4, 0, 1, false, true, 136, 1, 1},    // IQ4_XS
    {4, 0, 1, false, false, 18, 1, 2},    // MXFP4, with float16 scales
};

// Signed bytes; those of MXFP4 are twice the number.
constexpr int8_t LEVELS[][16] = {
    {},
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
};

// How a tile's integers are stored: bits, plus ten times the table. Formats with the same code share kernels.
constexpr int packing_of(const Format& f) { return f.bits + 10 * f.levels; }
constexpr int packed_bits(int packing) { return packing % 10; }
constexpr const int8_t* levels_of(int packing) { return LEVELS[packing / 10]; }

constexpr const Format& format_of(int format) { return FORMATS[format - FIRST_FORMAT]; }

constexpr int64_t integer_bytes(const Format& f) { return TILE_ITEMS * f.bits / 8; }
// Bytes per 16 outputs: float16 scales, then offsets.
constexpr int64_t half_scale_bytes(const Format& f) { return ROWS * 2 * (f.offset ? 2 : 1); }
// Bytes per tile of a super format: 16 scales per group, then 16 offsets per group.
constexpr int64_t byte_scale_bytes(const Format& f) { return ROWS * f.groups * (f.offset ? 2 : 1); }

// Byte offsets in a panel: the integers start at 0, then float16 scales per tile or super block, then 8-bit scales.
struct PanelLayout {
    int64_t halves, byte_scales, end;

    constexpr PanelLayout(const Format& f, int64_t k) {
        int64_t tiles = k / TILE_K, supers = (tiles + SUPER_TILES - 1) / SUPER_TILES;
        halves = tiles * integer_bytes(f);
        byte_scales = halves + (f.super ? supers : tiles) * half_scale_bytes(f);
        end = byte_scales + (f.super ? tiles * byte_scale_bytes(f) : 0);
        end = (end + 63) / 64 * 64;
    }
};

}  // namespace quantised
