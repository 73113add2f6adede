// What becomes of the sums of 32 rows and two panels: rows of outputs, or gated activations laid out for the next layer. Each
// is a number of PIECES of work, `piece<I>(block, sums)`, done in order beside the products of the next block.
#pragma once

#include "activation.h"
#include "linear_weights.h"

#if HAS_AMX

namespace linear_layer {

constexpr int64_t BLOCK_ROWS = 32, SUMS = 16 * 16;

// Items 2 i and 2 i + 1 of the result are item i of the first and of the second half.
inline __m512i interleave(__m512 first, __m512 second) {
    const vu index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const __m512i order = (__m512i)(index | (index + 16) << 16);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

// The biases of two panels, zeros where there are no outputs.
struct Biases {
    alignas(64) float left[PANEL] = {}, right[PANEL] = {};
    bool any;

    explicit Biases(const Pair& pair) : any(pair.left_part->bias) {
        copy(*pair.left_part, pair.left, left);
        copy(*pair.right_part, pair.right, right);
    }

    // To sixteen outputs of a row.
    vf add_left(vf sums) const { return any ? sums + load(left) : sums; }
    vf add_right(vf sums) const { return any ? sums + load(right) : sums; }

    static void copy(const Layer& part, int64_t panel, float* target) {
        int64_t left = std::clamp<int64_t>(part.n - panel * PANEL, 0, PANEL);
        if (part.bias && left) memcpy(target, part.bias + panel * PANEL, left * sizeof(float));
    }
};

// Rows of outputs, one after the other; both panels are neighbours in one part.
template <typename T>
struct Target {
    T* out;
    int64_t stride, num_rows;
    int columns;

    Target(const Unit& unit, T* all) : stride(unit.left_part->out_stride), num_rows(unit.num_rows) {
        const Layer& part = *unit.left_part;
        int64_t column = unit.left * PANEL;
        columns = std::min<int64_t>(part.n - column, 2 * PANEL);
        out = all + unit.first_row * stride + part.first_column + column;
    }

    // All 32 outputs of a row.
    void put(int64_t row, __m512i outputs) const {
        if (row >= num_rows) return;
        __mmask32 there = columns == 2 * PANEL ? 0xffffffffu : (1u << columns) - 1;
        _mm512_mask_storeu_epi16(out + row * stride, there, outputs);
    }

    void put(int64_t row, vf left, vf right) const {
        if (row >= num_rows) return;
        store_upto(out + row * stride, left, columns);
        if (columns > PANEL) store_upto(out + row * stride + PANEL, right, columns - PANEL);
    }
};

// The sums of quantised weights must be turned. For each sixteen rows there are two rounds of four pieces, as transpose.h
// says.
class TurnedToRows {
  public:
    static constexpr int PIECES = 16;

    TurnedToRows(const Unit& unit, bf16* out) : biases_(unit), target_(unit, out) {}

    template <int I>
    void piece(int64_t block, const float (*sums)[SUMS]) {
        constexpr int half = I / 8, step = I % 4;
        I % 8 < 4 ? gather(step, sums + 2 * half) : spread(step, block * BLOCK_ROWS + half * 16);
    }

  private:
    // Rounded to pairs of outputs first, so that both panels are turned as one.
    __attribute__((always_inline)) void gather(int step, const float (*sums)[SUMS]) {
        const float* panel = sums[step / 2] + step % 2 * 8 * 16;
        const float* biases = (step / 2 ? biases_.right : biases_.left) + step % 2 * 8;
        __m512i four[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++)
            four[j] = interleave(column(panel, biases, 2 * j), column(panel, biases, 2 * j + 1));
        gather_four(four);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) _mm512_store_si512(turning_[j][step], four[j]);
    }

    __attribute__((always_inline)) void spread(int step, int64_t row) {
        __m512i four[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) four[j] = _mm512_load_si512(turning_[step][j]);
        spread_four(four);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) target_.put(row + step + 4 * j, four[j]);
    }

    // One output of all sixteen rows.
    __m512 column(const float* sums, const float* biases, int i) const {
        __m512 sum = _mm512_load_ps(sums + i * 16);
        return biases_.any ? _mm512_add_ps(sum, _mm512_set1_ps(biases[i])) : sum;
    }

    Biases biases_;
    Target<bf16> target_;
    alignas(64) uint32_t turning_[4][4][16];
};

// The same where outputs are not rounded: a piece is sixteen rows.
class TurnedToWideRows {
  public:
    static constexpr int PIECES = 2;

    TurnedToWideRows(const Unit& unit, float* out) : biases_(unit), target_(unit, out) {}

    template <int half>
    void piece(int64_t block, const float (*sums)[SUMS]) {
        alignas(64) float left[SUMS], right[SUMS];
        transpose16((const uint32_t*)sums[2 * half], 16, (uint32_t*)left, 16);
        transpose16((const uint32_t*)sums[2 * half + 1], 16, (uint32_t*)right, 16);
        for (int r = 0; r < 16; r++)
            target_.put(block * BLOCK_ROWS + half * 16 + r, biases_.add_left(load(left + r * 16)),
                        biases_.add_right(load(right + r * 16)));
    }

  private:
    Biases biases_;
    Target<float> target_;
};

// The sums of plain weights are rows already: a piece is two of them.
template <typename T>
class StraightToRows {
  public:
    static constexpr int PIECES = 16;

    StraightToRows(const Unit& unit, T* out) : biases_(unit), target_(unit, out) {}

    template <int I>
    void piece(int64_t block, const float (*sums)[SUMS]) {
        const float(*half)[SUMS] = sums + I / 8 * 2;
        for (int r = I % 8 * 2; r < I % 8 * 2 + 2; r++)
            target_.put(block * BLOCK_ROWS + I / 8 * 16 + r, biases_.add_left(load(half[0] + r * 16)),
                        biases_.add_right(load(half[1] + r * 16)));
    }

  private:
    Biases biases_;
    Target<T> target_;
};

struct GatedTiles {
    char* tiles;
    int64_t inner;  // columns
};

// Gates (the left panel) activated and multiplied with ups (the right one), as tiles for a layer with the same kind of
// weights. Rows past the last are whatever comes of zeros.
template <bool TURNED, int ACTIVATION>
class ToGatedTiles {
  public:
    static constexpr int PAIRS = 16;  // two outputs of sixteen rows each, or two rows of sixteen outputs
    static constexpr int PIECES = PAIRS + 2;

    ToGatedTiles(const Unit& unit, const GatedTiles& out) : biases_(unit) {
        row_bytes_ = out.inner / TILE_K * TILE_BYTES;
        // A panel is half of a tile's inputs.
        int64_t half = unit.left % 2 * (TURNED ? TILE_BYTES / 2 : PANEL * sizeof(bf16));
        target_ = out.tiles + unit.first_row / 16 * row_bytes_ + unit.left / 2 * TILE_BYTES + half;
    }

    // Three pairs are under way at a time, so that no operation waits long for the one before.
    template <int I>
    __attribute__((always_inline)) void piece(int64_t block, const float (*sums)[SUMS]) {
        if constexpr (I >= 2) end<I - 2>(block, sums);
        if constexpr (I >= 1 && I <= PAIRS && ACTIVATION == SILU)
            for (int i = 0; i < 2; i++) under_way_[(I - 1) % 2][i].go_on();
        if constexpr (I < PAIRS && ACTIVATION == SILU)
            for (int i = 0; i < 2; i++) under_way_[I % 2][i].begin(gate<I>(sums, i));
    }

  private:
    // As if the products had been kept.
    template <int I>
    vf gate(const float (*sums)[SUMS], int i) const {
        vf sum = load(sums[I / 8 * 2] + (I % 8 * 2 + i) * 16);
        if (biases_.any) sum += TURNED ? splat(biases_.left[I % 8 * 2 + i]) : load(biases_.left);
        return rounded(sum, bf16{});
    }

    template <int I>
    vf up(const float (*sums)[SUMS], int i) const {
        vf sum = load(sums[I / 8 * 2 + 1] + (I % 8 * 2 + i) * 16);
        if (biases_.any) sum += TURNED ? splat(biases_.right[I % 8 * 2 + i]) : load(biases_.right);
        return rounded(sum, bf16{});
    }

    template <int I>
    vf active(const float (*sums)[SUMS], int i) const {
        if constexpr (ACTIVATION == SILU) return under_way_[I % 2][i].end();
        return activate(gate<I>(sums, i), ACTIVATION);
    }

    template <int I>
    __attribute__((always_inline)) void end(int64_t block, const float (*sums)[SUMS]) {
        vf first = active<I>(sums, 0) * up<I>(sums, 0), second = active<I>(sums, 1) * up<I>(sums, 1);
        char* target = target_ + (2 * block + I / 8) * row_bytes_ + I % 8 * (TURNED ? 64 : 128);
        if constexpr (TURNED) {
            _mm512_store_si512(target, interleave((__m512)first, (__m512)second));
        } else {
            store((bf16*)target, first);
            store((bf16*)(target + 64), second);
        }
    }

    Silu under_way_[2][2];
    Biases biases_;
    char* target_;
    int64_t row_bytes_;  // of sixteen rows
};

}  // namespace linear_layer

#endif
