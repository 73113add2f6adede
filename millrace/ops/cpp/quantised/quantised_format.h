// The shape of each quantised format, and where a packed panel keeps what.
#pragma once

#include "quantised/quantised.h"

namespace quantised {

constexpr int FIRST_FORMAT = FORMAT_Q4_0, NUM_FORMATS = FORMAT_Q6_K - FORMAT_Q4_0 + 1;
constexpr int64_t ROWS = 16, TILE_K = 32, SUPER_TILES = 8;

struct Format {
    int bits;        // per packed integer
    int zero;        // what stands for 0
    int groups;      // with scales of their own in the 32 inputs of a tile
    bool offset;     // whether there are offsets
    bool super;      // 8-bit scales under one float16 per 256 inputs
    int file_bytes;  // of one block in the file: 256 inputs if super, else 32
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
};

constexpr const Format& format_of(int format) { return FORMATS[format - FIRST_FORMAT]; }

constexpr int64_t integer_bytes(const Format& f) { return TILE_ITEMS * f.bits / 8; }
// Per 16 outputs: float16 scales, then offsets.
constexpr int64_t half_bytes(const Format& f) { return ROWS * 2 * (f.offset ? 2 : 1); }
// Per tile of a super format: for each group 16 bytes of scales, then likewise of offsets.
constexpr int64_t small_bytes(const Format& f) { return ROWS * f.groups * (f.offset ? 2 : 1); }

// The address of a panel's integers, and behind them float16 scales per tile or per super block, and 8-bit scales.
struct Places {
    int64_t halves, smalls, end;

    constexpr Places(const Format& f, int64_t k) {
        int64_t tiles = k / TILE_K, supers = (tiles + SUPER_TILES - 1) / SUPER_TILES;
        halves = tiles * integer_bytes(f);
        smalls = halves + (f.super ? supers : tiles) * half_bytes(f);
        end = smalls + (f.super ? tiles * small_bytes(f) : 0);
        end = (end + 63) / 64 * 64;
    }
};

}  // namespace quantised
