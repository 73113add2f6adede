// Weights for products with many rows: two panels at a time, as tiles that are prepared one by one between products.
#pragma once

#include "linear/linear_many.h"

#if HAS_AMX

namespace linear_layer {

constexpr int64_t TILE_BYTES = 1024;

// Two panels, which may belong to different parts.
struct Pair {
    const Layer *left_part, *right_part;
    int64_t left, right;  // indices of the panels in their parts
};

// Two panels and one chunk of rows.
struct Unit : Pair {
    int64_t first_row, num_rows;  // the last chunk may end inside a block
};

// Addresses of the first tiles of two panels, and the distance between tiles.
struct Weights {
    const char *left, *right;
    int64_t step;
};

// --- preparing tiles ---
//
// Tile i of both panels is prepared before its first product. At the same time the corresponding tile of the next
// panels, `skip` panels further, is prefetched: spread over the work, so that no product waits for memory.

inline void fetch(const char* start, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) _mm_prefetch(start + at, _MM_HINT_T1);
}

// Unpacks quantised panels into `memory`.
class Unpacker {
  public:
    Unpacker(const Pair& pair, bf16* memory, int64_t skip)
        : unpack_(quantised::tile_pair(pair.left_part->format)), memory_(memory) {
        const Layer &left = *pair.left_part, &right = *pair.right_part;
        int64_t bytes = quantised::panel_bytes(left.format, left.k);
        left_ = quantised::panel_at(left.format, left.packed, left.k, pair.left);
        right_ = quantised::panel_at(right.format, right.packed, right.k, pair.right);
        next_ = skip * bytes;
        tile_bytes_ = bytes / left.tiles();
    }

    // Prepares tile `from + i`, which is tile i of `weights(from)`.
    void prepare(int64_t from, int64_t i) const {
        int64_t later = next_ + (from + i) * tile_bytes_;
        fetch(left_.integers + later, tile_bytes_);
        fetch(right_.integers + later, tile_bytes_);
        unpack_(left_, right_, from + i, memory_ + i * 2 * quantised::TILE_ITEMS);
    }

    Weights weights(int64_t) const {
        auto* start = reinterpret_cast<const char*>(memory_);
        return {start, start + TILE_BYTES, 2 * TILE_BYTES};
    }

  private:
    quantised::TilePair unpack_;
    quantised::Panel left_, right_;
    int64_t next_, tile_bytes_;
    bf16* memory_;  // left and right tiles alternate
};

// Plain panels are read in place; only prefetches.
class Fetcher {
  public:
    Fetcher(const Pair& pair, bf16*, int64_t skip) {
        int64_t bytes = pair.left_part->tiles() * TILE_BYTES;
        left_ = static_cast<const char*>(pair.left_part->packed) + pair.left * bytes;
        right_ = static_cast<const char*>(pair.right_part->packed) + pair.right * bytes;
        next_ = skip * bytes;
    }

    void prepare(int64_t from, int64_t i) const {
        int64_t later = next_ + (from + i) * TILE_BYTES;
        fetch(left_ + later, TILE_BYTES);
        fetch(right_ + later, TILE_BYTES);
    }

    Weights weights(int64_t from) const { return {left_ + from * TILE_BYTES, right_ + from * TILE_BYTES, TILE_BYTES}; }

  private:
    const char *left_, *right_;
    int64_t next_;
};

}  // namespace linear_layer

#endif
