// Finds decode rows whose block tables start with the same blocks, so that their queries read those keys together.
#pragma once

#include <cstdint>
#include <vector>

constexpr int KEYS = 64;  // keys per tile, at positions 64 i .. 64 i + 63

// Decode rows whose positions from <= k < to, whole tiles, are in the same blocks.
struct SharedTiles {
    std::vector<int32_t> rows;
    int64_t from, to;
};

// What the rows of a step share; computed once for all layers. A level continues where the previous one ends: rows with
// a common prefix may form several groups that share more. A query sums over the same tiles in the same order as
// without sharing, so results are the same.
struct Sharing {
    std::vector<std::vector<SharedTiles>> levels;
    std::vector<int64_t> done;  // per row: the levels cover positions below this one; empty if there are no levels
    int64_t longest = 0;        // maximum length of a row that shares
    std::vector<float> state;   // partial sums of the queries after the levels so far, in the format of their kernel
};

Sharing find_sharing(const int32_t* query_starts, const int32_t* seq_lens, const int32_t* tables, int64_t num_rows,
                     int64_t table_width, int64_t block_size);
