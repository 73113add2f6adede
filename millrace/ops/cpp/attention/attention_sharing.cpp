#include "attention/attention_sharing.h"

#include <algorithm>
#include <cstring>

namespace {

constexpr int64_t MIN_SAVED = 6;  // tile reads that a level must save to outweigh the barrier after it
constexpr size_t MAX_LEVELS = 4;

struct Finder {
    const int32_t *seq_lens, *tables;
    int64_t width, block_size;

    const int32_t* table(int32_t row) const { return tables + row * width; }
    int64_t whole_tiles(int32_t row) const { return seq_lens[row] / KEYS * KEYS; }

    // End of the common prefix of two rows, rounded down to whole tiles of both; they agree below `from`.
    int64_t common(int32_t a, int32_t b, int64_t from) const {
        int64_t most = std::min(whole_tiles(a), whole_tiles(b)), block = from / block_size;
        while (block * block_size < most && table(a)[block] == table(b)[block]) block++;
        return std::min(most, block * block_size / KEYS * KEYS);
    }

    // Splits rows that share the positions below `from` into groups that also share the next tile.
    void split(std::vector<int32_t> rows, int64_t from, std::vector<SharedTiles>& found) const {
        std::erase_if(rows, [&](int32_t row) { return whole_tiles(row) < from + KEYS; });
        int64_t last = (from + KEYS - 1) / block_size;
        auto block = [&](int32_t row) { return table(row)[last]; };
        std::stable_sort(rows.begin(), rows.end(), [&](int32_t a, int32_t b) { return block(a) < block(b); });
        for (size_t first = 0, end; first < rows.size(); first = end) {
            SharedTiles shared{{rows[first]}, from, whole_tiles(rows[first])};
            for (end = first + 1; end < rows.size() && block(rows[end]) == block(rows[first]); end++) {
                int64_t to = common(rows[first], rows[end], from);
                if (to == from) continue;  // an earlier block of the tile differs
                shared.rows.push_back(rows[end]);
                shared.to = std::min(shared.to, to);
            }
            if (shared.rows.size() > 1) found.push_back(std::move(shared));
        }
    }
};

int64_t saved(const std::vector<SharedTiles>& level) {
    int64_t tiles = 0;
    for (const SharedTiles& shared : level) tiles += (shared.rows.size() - 1) * ((shared.to - shared.from) / KEYS);
    return tiles;
}

}  // namespace

Sharing find_sharing(const int32_t* query_starts, const int32_t* seq_lens, const int32_t* tables, int64_t num_rows,
                     int64_t table_width, int64_t block_size) {
    Finder finder{seq_lens, tables, table_width, block_size};
    Sharing sharing;
    std::vector<int32_t> decoding;
    for (int64_t row = 0; row < num_rows; row++)
        if (query_starts[row + 1] - query_starts[row] == 1) decoding.push_back(row);
    std::vector<SharedTiles> level;
    finder.split(decoding, 0, level);
    while (sharing.levels.size() < MAX_LEVELS && saved(level) >= MIN_SAVED) {
        sharing.done.resize(num_rows);
        std::vector<SharedTiles> next;
        for (const SharedTiles& shared : level) {
            for (int32_t row : shared.rows) {
                sharing.done[row] = shared.to;
                sharing.longest = std::max<int64_t>(sharing.longest, seq_lens[row]);
            }
            finder.split(shared.rows, shared.to, next);
        }
        sharing.levels.push_back(std::move(level));
        level = std::move(next);
    }
    return sharing;
}

extern "C" {

// Number of reads of tiles of 64 keys that sharing saves in a step.
int64_t millrace_tiles_saved(const int32_t* query_starts, const int32_t* seq_lens, const int32_t* tables,
                              int64_t num_rows, int64_t table_width, int64_t block_size) {
    int64_t tiles = 0;
    for (const auto& level : find_sharing(query_starts, seq_lens, tables, num_rows, table_width, block_size).levels)
        tiles += saved(level);
    return tiles;
}
}
