// Pairs of panels of weights as the products of many rows read them: tiles in memory, made little by little beside other work.
#pragma once

#include "linear_many.h"

#if HAS_AMX

namespace linear_layer {

constexpr int64_t TILE_BYTES = 1024;

// Two panels, which may belong to different parts.
struct Pair {
    const Layer *left_part, *right_part;
    int64_t left, right;  // panels in their parts
};

// Two panels and the rows of one chunk.
struct Unit : Pair {
    int64_t first_row, num_rows;  // the last chunk may end within a block
};

// The weights of two panels as tiles, and how far apart.
struct Weights {
    const char *left, *right;
    int64_t step;
};

// --- weights that will be needed soon, some tiles at a time ---

// Of quantised panels: unpacks them, and brings closer the same places of the panels that will come after.
class Unpacker {
  public:
    // The panels after these are `skip` panels further.
    Unpacker(const Pair& pair, bf16* memory, int64_t skip)
        : unpack_(quantised::tile_pair(pair.left_part->format)), tiles_(pair.left_part->tiles()), memory_(memory) {
        const Layer &left = *pair.left_part, &right = *pair.right_part;
        int64_t bytes = quantised::panel_bytes(left.format, left.k);
        left_ = quantised::panel_at(left.format, left.packed, left.k, pair.left);
        right_ = quantised::panel_at(right.format, right.packed, right.k, pair.right);
        ahead_ = skip * bytes;
        tile_bytes_ = bytes / tiles_;
    }

    // Up to `count` tiles of both panels.
    void prepare(int64_t count) {
        for (int64_t end = std::min(next_ + count, tiles_); next_ < end; next_++) {
            fetch(left_.integers + ahead_ + next_ * tile_bytes_);
            fetch(right_.integers + ahead_ + next_ * tile_bytes_);
            unpack_(left_, right_, next_, memory_ + next_ * 2 * quantised::TILE_ITEMS);
        }
    }

    Weights weights() const {
        auto* start = reinterpret_cast<const char*>(memory_);
        return {start, start + TILE_BYTES, 2 * TILE_BYTES};
    }

  private:
    void fetch(const char* tile) const {
        for (int64_t at = 0; at < tile_bytes_; at += 64) _mm_prefetch(tile + at, _MM_HINT_T1);
    }

    quantised::TilePair unpack_;
    quantised::Panel left_, right_;
    int64_t tiles_, next_ = 0, ahead_, tile_bytes_;
    bf16* memory_;  // left and right tiles by turns
};

// Of plain ones: they are read where they are, and only brought closer.
class Fetcher {
  public:
    Fetcher(const Pair& pair, bf16*, int64_t) : tiles_(pair.left_part->tiles()) {
        auto at = [&](const Layer* part, int64_t panel) {
            return static_cast<const char*>(part->packed) + panel * part->tiles() * TILE_BYTES;
        };
        weights_ = {at(pair.left_part, pair.left), at(pair.right_part, pair.right), TILE_BYTES};
    }

    void prepare(int64_t count) {
        int64_t end = std::min(next_ + count, tiles_);
        for (int64_t at = next_ * TILE_BYTES; at < end * TILE_BYTES; at += 64) {
            _mm_prefetch(weights_.left + at, _MM_HINT_T1);
            _mm_prefetch(weights_.right + at, _MM_HINT_T1);
        }
        next_ = end;
    }

    Weights weights() const { return weights_; }

  private:
    Weights weights_;
    int64_t tiles_, next_ = 0;
};

}  // namespace linear_layer

#endif
