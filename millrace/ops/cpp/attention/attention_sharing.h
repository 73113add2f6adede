// Rows whose block tables begin with the same blocks: their queries go over the keys in those blocks together.
#pragma once

#include <cstdint>
#include <vector>

constexpr int KEYS = 64;  // keys per tile, at positions 64 i .. 64 i + 63

// Rows of one query each that have positions from <= k < to, whole tiles, in the same places.
struct SharedTiles {
    std::vector<int32_t> rows;
    int64_t from, to;
};

// What the rows of a step share, found once for all layers. A level begins where those before it end: rows that share a
// beginning may be of several sorts that share more. A query sums over the same tiles in the same order as it would
// alone, so nothing but time depends on what is found.
struct Sharing {
    std::vector<std::vector<SharedTiles>> levels;
    std::vector<int64_t> done;  // per row: positions below this one are in the levels; empty where there are none
    int64_t longest = 0;        // most keys of a row that shares
    std::vector<float> state;   // what queries have summed in the levels so far, in the form that their kernel gives it
};

Sharing find_sharing(const int32_t* query_starts, const int32_t* seq_lens, const int32_t* tables, int64_t num_rows,
                     int64_t table_width, int64_t block_size);
