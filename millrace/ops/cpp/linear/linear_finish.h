// What becomes of the sums of 32 rows and two panels: rows of outputs, or gated activations laid out for the next layer.
//
// Each is a class with `run(block, sums, beside)`, which does its work in small, even steps and calls `beside` before each
// of them: for the products of the next block. All of it is one piece of code, without calls, so that what is under way
// stays in registers.
#pragma once

#include "activation.h"
#include "linear/linear_weights.h"

#if HAS_AMX

namespace linear_layer {

constexpr int64_t BLOCK_ROWS = 32, SUMS = 16 * 16;

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

    // Whether all outputs of the 32 rows from `row` on are there.
    bool whole(int64_t row) const { return columns == 2 * PANEL && row + BLOCK_ROWS <= num_rows; }

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

// The sums of quantised weights must be turned: from two panels of [16 outputs][16 rows] of float32 to sixteen rows of 32
// bfloat16. Where an item is, is told by the bits of its output (4 to 0, of which 4 is the panel) and its row (3 to 0). Two
// outputs that differ in bit 3, rounded into one register, have it and the row's bits as their place there, from the highest
// on. Each unpacking of words puts a bit of the output last, and the highest of a lane's three bits chooses the register;
// the last step exchanges row bit 3, which is a bit of the lane's number, with the panel. Two bits are exchanged in each of
// two rounds of four pieces, which memory lies between.
class TurnedToRows {
  public:
    TurnedToRows(const Unit& unit, bf16* out) : biases_(unit), target_(unit, out) {}

    template <typename Beside>
    __attribute__((always_inline)) void run(int64_t block, const float (*sums)[SUMS], Beside beside) {
        bool whole = target_.whole(block * BLOCK_ROWS);
        for (int half = 0; half < 2; half++) {
            int64_t row = block * BLOCK_ROWS + half * 16;
            for (int step = 0; step < 4; step++) {
                beside();
                gather(step, sums[2 * half + step / 2], step / 2 ? biases_.right : biases_.left);
            }
            for (int step = 0; step < 4; step++) {
                beside();
                spread(step, row, whole);
            }
        }
    }

  private:
    // Of the panel step / 2, the outputs whose bit 0 is step % 2: bits 2 and 1 against those of the rows.
    __attribute__((always_inline)) void gather(int step, const float* sums, const float* biases) {
        __m512i four[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            int output = 2 * j + step % 2;
            four[j] = rounded(column(sums, biases, output), column(sums, biases, output + 8));
        }
        unpack_words(four[0], four[2]);
        unpack_words(four[1], four[3]);
        unpack_words(four[0], four[1]);
        unpack_words(four[2], four[3]);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) _mm512_store_si512(turning_[j][step], four[j]);
    }

    // Of the rows whose bits 2 and 1 are `step`: bit 0, then bit 3.
    __attribute__((always_inline)) void spread(int step, int64_t row, bool whole) {
        __m512i four[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) four[j] = _mm512_load_si512(turning_[step][j]);
        unpack_words(four[0], four[1]);
        unpack_words(four[2], four[3]);
        __m512i rows[4] = {
            _mm512_shuffle_i32x4(four[0], four[2], 0x88),
            _mm512_shuffle_i32x4(four[1], four[3], 0x88),
            _mm512_shuffle_i32x4(four[0], four[2], 0xdd),
            _mm512_shuffle_i32x4(four[1], four[3], 0xdd),
        };
        row += 2 * step;
        if (whole) {
            bf16* out = target_.out + row * target_.stride;
            _mm512_storeu_si512(out, rows[0]);
            _mm512_storeu_si512(out + target_.stride, rows[1]);
            _mm512_storeu_si512(out + 8 * target_.stride, rows[2]);
            _mm512_storeu_si512(out + 9 * target_.stride, rows[3]);
        } else {
            target_.put(row, rows[0]);
            target_.put(row + 1, rows[1]);
            target_.put(row + 8, rows[2]);
            target_.put(row + 9, rows[3]);
        }
    }

    static __attribute__((always_inline)) __m512i rounded(__m512 first, __m512 second) {
        return (__m512i)_mm512_cvtne2ps_pbh(second, first);
    }

    static __attribute__((always_inline)) void unpack_words(__m512i& a, __m512i& b) {
        __m512i low = _mm512_unpacklo_epi16(a, b);
        b = _mm512_unpackhi_epi16(a, b);
        a = low;
    }

    // One output of all sixteen rows.
    __attribute__((always_inline)) __m512 column(const float* sums, const float* biases, int i) const {
        __m512 sum = _mm512_load_ps(sums + i * 16);
        return biases_.any ? _mm512_add_ps(sum, _mm512_set1_ps(biases[i])) : sum;
    }

    Biases biases_;
    Target<bf16> target_;
    alignas(64) uint32_t turning_[4][4][16];
};

// The same where outputs are not rounded: a step is sixteen rows.
class TurnedToWideRows {
  public:
    TurnedToWideRows(const Unit& unit, float* out) : biases_(unit), target_(unit, out) {}

    template <typename Beside>
    void run(int64_t block, const float (*sums)[SUMS], Beside beside) {
        for (int half = 0; half < 2; half++) {
            beside();
            alignas(64) float left[SUMS], right[SUMS];
            transpose16((const uint32_t*)sums[2 * half], 16, (uint32_t*)left, 16);
            transpose16((const uint32_t*)sums[2 * half + 1], 16, (uint32_t*)right, 16);
            for (int r = 0; r < 16; r++)
                target_.put(block * BLOCK_ROWS + half * 16 + r, biases_.add_left(load(left + r * 16)),
                            biases_.add_right(load(right + r * 16)));
        }
    }

  private:
    Biases biases_;
    Target<float> target_;
};

// The sums of plain weights are rows already: a step is two of them.
template <typename T>
class StraightToRows {
  public:
    StraightToRows(const Unit& unit, T* out) : biases_(unit), target_(unit, out) {}

    template <typename Beside>
    void run(int64_t block, const float (*sums)[SUMS], Beside beside) {
        for (int row = 0; row < BLOCK_ROWS; row++) {
            if (row % 2 == 0) beside();
            const float(*half)[SUMS] = sums + row / 16 * 2;
            target_.put(block * BLOCK_ROWS + row, biases_.add_left(load(half[0] + row % 16 * 16)),
                        biases_.add_right(load(half[1] + row % 16 * 16)));
        }
    }

  private:
    Biases biases_;
    Target<T> target_;
};

struct GatedTiles {
    char* tiles;
    int64_t inner;  // columns
};

// Two vectors, rounded to bfloat16 as one: the items at even places of the first, then of the second, and those at odd ones.
struct Two {
    vf even, odd;

    static __attribute__((always_inline)) Two rounded(vf first, vf second) {
        __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
        return {(vf)_mm512_slli_epi32(both, 16), (vf)_mm512_and_si512(both, _mm512_set1_epi32(0xffff0000))};
    }

    // Rounded: the items of both by turns, or those of the first and then of the second.
    __attribute__((always_inline)) __m512i joined(bool by_turns) const {
        const vu index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const vu of_first = (index >> 1) + (index & 1) * 16;  // where its items are
        __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
        vu order = by_turns ? of_first | (of_first + 8) << 16 : index | (index + 16) << 16;
        return _mm512_permutexvar_epi16((__m512i)order, both);
    }
};

// Gates (the left panel) activated and multiplied with ups (the right one), as tiles for a layer with the same kind of
// weights. Rows past the last are whatever comes of zeros.
template <bool TURNED, int ACTIVATION>
class ToGatedTiles {
  public:
    ToGatedTiles(const Unit& unit, const GatedTiles& out) : biases_(unit) {
        row_bytes_ = out.inner / TILE_K * TILE_BYTES;
        // A panel is half of a tile's inputs.
        int64_t half = unit.left % 2 * (TURNED ? TILE_BYTES / 2 : PANEL * sizeof(bf16));
        target_ = out.tiles + unit.first_row / 16 * row_bytes_ + unit.left / 2 * TILE_BYTES + half;
    }

    // Three pairs are under way at a time, so that no operation waits long for the one before.
    template <typename Beside>
    __attribute__((always_inline)) void run(int64_t block, const float (*sums)[SUMS], Beside beside) {
        char* target = target_ + 2 * block * row_bytes_;
        Active one, other;
        beside();
        one.begin(gates(sums, 0));
        beside();
        one.go_on();
        other.begin(gates(sums, 1));
        for (int pair = 2; pair < PAIRS; pair += 2) {
            beside();
            end(one, sums, pair - 2, target);
            other.go_on();
            one.begin(gates(sums, pair));
            beside();
            end(other, sums, pair - 1, target);
            one.go_on();
            other.begin(gates(sums, pair + 1));
        }
        beside();
        end(one, sums, PAIRS - 2, target);
        other.go_on();
        beside();
        end(other, sums, PAIRS - 1, target);
    }

  private:
    static constexpr int PAIRS = 16;  // of vectors: two outputs of sixteen rows each, or two rows of sixteen outputs

    struct Active {
        Silu even, odd;
        Two input;

        __attribute__((always_inline)) void begin(const Two& gates) {
            if constexpr (ACTIVATION == SILU) {
                even.begin(gates.even);
                odd.begin(gates.odd);
            } else {
                input = gates;
            }
        }

        __attribute__((always_inline)) void go_on() {
            if constexpr (ACTIVATION != SILU) return;
            even.go_on();
            odd.go_on();
        }

        __attribute__((always_inline)) Two end() const {
            if constexpr (ACTIVATION == SILU) return {even.end(), odd.end()};
            return {activate(input.even, ACTIVATION), activate(input.odd, ACTIVATION)};
        }
    };

    // Both are rounded as if the products had been kept.
    __attribute__((always_inline)) Two gates(const float (*sums)[SUMS], int pair) const {
        return rounded_pair(sums[pair / 8 * 2], biases_.left, pair % 8);
    }
    __attribute__((always_inline)) Two ups(const float (*sums)[SUMS], int pair) const {
        return rounded_pair(sums[pair / 8 * 2 + 1], biases_.right, pair % 8);
    }

    __attribute__((always_inline)) Two rounded_pair(const float* sums, const float* biases, int pair) const {
        vf first = load(sums + pair * 32), second = load(sums + pair * 32 + 16);
        if (biases_.any) {
            first += TURNED ? splat(biases[2 * pair]) : load(biases);
            second += TURNED ? splat(biases[2 * pair + 1]) : load(biases);
        }
        return Two::rounded(first, second);
    }

    __attribute__((always_inline)) void end(const Active& active, const float (*sums)[SUMS], int pair, char* target) const {
        Two gate = active.end(), up = ups(sums, pair);
        __m512i outputs = Two{gate.even * up.even, gate.odd * up.odd}.joined(TURNED);
        target += pair / 8 * row_bytes_ + pair % 8 * (TURNED ? 64 : 128);
        if constexpr (TURNED) {
            _mm512_store_si512(target, outputs);
        } else {
            _mm256_store_si256((__m256i*)target, _mm512_castsi512_si256(outputs));
            _mm256_store_si256((__m256i*)(target + 64), _mm512_extracti64x4_epi64(outputs, 1));
        }
    }

    Biases biases_;
    char* target_;
    int64_t row_bytes_;  // of sixteen rows
};

}  // namespace linear_layer

#endif
