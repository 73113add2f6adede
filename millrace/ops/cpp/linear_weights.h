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

// --- weights that will be needed soon: tile by tile, each in four little steps ---

// Of quantised panels: unpacks them, and brings closer the same places of the panels that will come after.
class Unpacker {
  public:
    // The panels after these are `skip` panels further.
    Unpacker(const Pair& pair, bf16* memory, int64_t skip)
        : unpack_(&quantised::tile_steps(pair.left_part->format)), left_(2 * pair.left_part->tiles()), start_(memory),
          target_(memory - quantised::TILE_ITEMS) {
        const Layer &left = *pair.left_part, &right = *pair.right_part;
        int64_t bytes = quantised::panel_bytes(left.format, left.k);
        panels_[0] = quantised::panel_at(left.format, left.packed, left.k, pair.left);
        panels_[1] = quantised::panel_at(right.format, right.packed, right.k, pair.right);
        ahead_ = skip * bytes;
        tile_bytes_ = bytes / left.tiles();
    }

    // Before the steps of a tile; false when there is none left.
    bool begin() {
        if (!left_) return false;
        side_ = left_-- % 2;
        tile_ += !side_;
        target_ += quantised::TILE_ITEMS;
        const quantised::Panel& panel = panels_[side_];
        const char* later = panel.integers + ahead_ + tile_ * tile_bytes_;
        for (int64_t at = 0; at < tile_bytes_; at += 64) _mm_prefetch(later + at, _MM_HINT_T1);
        unpack_->scales(panel, tile_, scales_);
        return true;
    }

    template <int QUARTER>
    void step() {
        unpack_->rows[QUARTER](panels_[side_], tile_, scales_, target_);
    }

    Weights weights() const {
        auto* start = reinterpret_cast<const char*>(start_);
        return {start, start + TILE_BYTES, 2 * TILE_BYTES};
    }

  private:
    const quantised::TileSteps* unpack_;
    quantised::Panel panels_[2];
    quantised::Scales scales_;
    int64_t left_, tile_ = -1, side_ = 0, ahead_, tile_bytes_;
    bf16 *start_, *target_;  // left and right tiles by turns
};

// Of plain ones: they are read where they are, and only brought closer.
class Fetcher {
  public:
    Fetcher(const Pair& pair, bf16*, int64_t) : left_(2 * pair.left_part->tiles()) {
        auto at = [&](const Layer* part, int64_t panel) {
            return static_cast<const char*>(part->packed) + panel * part->tiles() * TILE_BYTES;
        };
        weights_ = {at(pair.left_part, pair.left), at(pair.right_part, pair.right), TILE_BYTES};
        next_ = weights_.left;
    }

    bool begin() {
        if (!left_) return false;
        tile_ = next_;
        left_--;
        next_ = left_ % 2 ? weights_.right + (tile_ - weights_.left) : weights_.left + (tile_ - weights_.right) + TILE_BYTES;
        return true;
    }

    template <int QUARTER>
    void step() {
        constexpr int64_t size = TILE_BYTES / 4;
        for (int64_t at = 0; at < size; at += 64) _mm_prefetch(tile_ + QUARTER * size + at, _MM_HINT_T1);
    }

    Weights weights() const { return weights_; }

  private:
    int64_t left_;
    Weights weights_;
    const char *next_, *tile_ = nullptr;
};

template <typename Preparer>
void prepare_all(Preparer& preparer) {
    while (preparer.begin()) {
        preparer.template step<0>();
        preparer.template step<1>();
        preparer.template step<2>();
        preparer.template step<3>();
    }
}

}  // namespace linear_layer

#endif
