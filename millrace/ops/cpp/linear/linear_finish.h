// Turns the sums of 32 rows and two panels into outputs: rows, or gated activations as input tiles of the next layer.
//
// Each class has `run(block, sums, next_product)`, which works in small, even steps and calls `next_product` before
// each of them, to interleave the tile products of the next block. Everything is inlined, so that values stay in
// registers.
#pragma once

#include "activation.h"
#include "linear/linear_weights.h"

#if HAS_AMX

namespace linear_layer {

constexpr int64_t BLOCK_ROWS = 32, SUMS = 16 * 16;

// The biases of two panels; zeros for padding outputs.
struct Biases {
    alignas(64) float left[PANEL] = {}, right[PANEL] = {};
    bool any;

    explicit Biases(const Pair& pair) : any(pair.left_part->bias) {
        copy(*pair.left_part, pair.left, left);
        copy(*pair.right_part, pair.right, right);
    }

    // Adds biases to sixteen outputs of a row.
    vf add_left(vf sums) const { return any ? sums + load(left) : sums; }
    vf add_right(vf sums) const { return any ? sums + load(right) : sums; }

    static void copy(const Layer& part, int64_t panel, float* target) {
        int64_t left = std::clamp<int64_t>(part.n - panel * PANEL, 0, PANEL);
        if (part.bias && left) memcpy(target, part.bias + panel * PANEL, left * sizeof(float));
    }
};

// Rows of outputs. Both panels are neighbours in one part.
template <typename T>
struct OutputRows {
    T* out;
    int64_t stride, num_rows;
    int columns;

    OutputRows(const Unit& unit, T* all) : stride(unit.left_part->out_stride), num_rows(unit.num_rows) {
        const Layer& part = *unit.left_part;
        int64_t column = unit.left * PANEL;
        columns = std::min<int64_t>(part.n - column, 2 * PANEL);
        out = all + unit.first_row * stride + part.first_column + column;
    }

    // Whether the block of 32 rows at `row` is complete: all rows and all outputs exist.
    bool whole(int64_t row) const { return columns == 2 * PANEL && row + BLOCK_ROWS <= num_rows; }

    // Stores the 32 outputs of a row.
    void store_row(int64_t row, __m512i outputs) const {
        if (row >= num_rows) return;
        __mmask32 there = columns == 2 * PANEL ? 0xffffffffu : (1u << columns) - 1;
        _mm512_mask_storeu_epi16(out + row * stride, there, outputs);
    }

    void store_row(int64_t row, vf left, vf right) const {
        if (row >= num_rows) return;
        store_upto(out + row * stride, left, columns);
        if (columns > PANEL) store_upto(out + row * stride + PANEL, right, columns - PANEL);
    }
};

// The sums of quantised weights must be transposed: from two panels of float32 [16 outputs][16 rows] to 16 rows of 32
// bfloat16. The position of an item is a permutation of the bits of its output (4 to 0; bit 4 is the panel) and of its
// row (3 to 0). Rounding two outputs that differ in bit 3 into one register gives the position (output bit 3, row bits
// 3 to 0). Each unpack of words appends an output bit as the lowest bit, while the highest of the three position bits
// within a 128-bit lane selects the register; the last step swaps row bit 3, a bit of the lane number, with the panel.
// The work is two rounds of four steps with a store to memory between them; each round moves two bits.
class TransposedToRows {
  public:
    TransposedToRows(const Unit& unit, bf16* out) : biases_(unit), target_(unit, out) {}

    template <typename Product>
    __attribute__((always_inline)) void run(int64_t block, const float (*sums)[SUMS], Product next_product) {
        bool whole = target_.whole(block * BLOCK_ROWS);
        for (int half = 0; half < 2; half++) {
            int64_t row = block * BLOCK_ROWS + half * 16;
            for (int step = 0; step < 4; step++) {
                next_product();
                gather(step, sums[2 * half + step / 2], step / 2 ? biases_.right : biases_.left);
            }
            for (int step = 0; step < 4; step++) {
                next_product();
                spread(step, row, whole);
            }
        }
    }

  private:
    // Outputs with bit 0 = step % 2 of panel step / 2: swaps output bits 2 and 1 with row bits.
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
        for (int j = 0; j < 4; j++) _mm512_store_si512(partial_[j][step], four[j]);
    }

    // Rows whose bits 2 and 1 are `step`: swaps bit 0, then bit 3.
    __attribute__((always_inline)) void spread(int step, int64_t row, bool whole) {
        __m512i four[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) four[j] = _mm512_load_si512(partial_[step][j]);
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
            target_.store_row(row, rows[0]);
            target_.store_row(row + 1, rows[1]);
            target_.store_row(row + 8, rows[2]);
            target_.store_row(row + 9, rows[3]);
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

    // One output of sixteen rows.
    __attribute__((always_inline)) __m512 column(const float* sums, const float* biases, int i) const {
        __m512 sum = _mm512_load_ps(sums + i * 16);
        return biases_.any ? _mm512_add_ps(sum, _mm512_set1_ps(biases[i])) : sum;
    }

    Biases biases_;
    OutputRows<bf16> target_;
    alignas(64) uint32_t partial_[4][4][16];
};

// The same for float32 outputs; a step is sixteen rows.
class TransposedToFloatRows {
  public:
    TransposedToFloatRows(const Unit& unit, float* out) : biases_(unit), target_(unit, out) {}

    template <typename Product>
    void run(int64_t block, const float (*sums)[SUMS], Product next_product) {
        for (int half = 0; half < 2; half++) {
            next_product();
            alignas(64) float left[SUMS], right[SUMS];
            transpose16((const uint32_t*)sums[2 * half], 16, (uint32_t*)left, 16);
            transpose16((const uint32_t*)sums[2 * half + 1], 16, (uint32_t*)right, 16);
            for (int r = 0; r < 16; r++)
                target_.store_row(block * BLOCK_ROWS + half * 16 + r, biases_.add_left(load(left + r * 16)),
                            biases_.add_right(load(right + r * 16)));
        }
    }

  private:
    Biases biases_;
    OutputRows<float> target_;
};

// The sums of plain weights are already rows; a step is two rows.
template <typename T>
class PlainToRows {
  public:
    PlainToRows(const Unit& unit, T* out) : biases_(unit), target_(unit, out) {}

    template <typename Product>
    void run(int64_t block, const float (*sums)[SUMS], Product next_product) {
        for (int row = 0; row < BLOCK_ROWS; row++) {
            if (row % 2 == 0) next_product();
            const float(*half)[SUMS] = sums + row / 16 * 2;
            target_.store_row(block * BLOCK_ROWS + row, biases_.add_left(load(half[0] + row % 16 * 16)),
                        biases_.add_right(load(half[1] + row % 16 * 16)));
        }
    }

  private:
    Biases biases_;
    OutputRows<T> target_;
};

struct GatedTiles {
    char* tiles;
    int64_t inner;  // number of columns
};

// Two vectors after rounding to bfloat16: the items at even positions of the first and then the second, and those at
// odd.
struct RoundedPair {
    vf even, odd;

    static __attribute__((always_inline)) RoundedPair rounded(vf first, vf second) {
        __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
        return {(vf)_mm512_slli_epi32(both, 16), (vf)_mm512_and_si512(both, _mm512_set1_epi32(0xffff0000))};
    }

    // Both vectors as bfloat16: items interleaved, or the first vector and then the second.
    __attribute__((always_inline)) __m512i joined(bool by_turns) const {
        const vu index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const vu of_first = (index >> 1) + (index & 1) * 16;  // positions of its items
        __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
        vu order = by_turns ? of_first | (of_first + 8) << 16 : index | (index + 16) << 16;
        return _mm512_permutexvar_epi16((__m512i)order, both);
    }
};

// act(gate) * up, with gates in the left panel and ups in the right one, as input tiles for a layer with the same kind
// of weights. Rows past the last are computed from zeros.
template <bool TRANSPOSED, int ACTIVATION>
class ToGatedTiles {
  public:
    ToGatedTiles(const Unit& unit, const GatedTiles& out) : biases_(unit) {
        row_bytes_ = out.inner / TILE_K * TILE_BYTES;
        // A panel covers half of a tile's inputs.
        int64_t half = unit.left % 2 * (TRANSPOSED ? TILE_BYTES / 2 : PANEL * sizeof(bf16));
        target_ = out.tiles + unit.first_row / 16 * row_bytes_ + unit.left / 2 * TILE_BYTES + half;
    }

    // Software pipeline with three pairs in flight, to hide the latency of each operation.
    template <typename Product>
    __attribute__((always_inline)) void run(int64_t block, const float (*sums)[SUMS], Product next_product) {
        char* target = target_ + 2 * block * row_bytes_;
        PendingActivation one, other;
        next_product();
        one.begin(gates(sums, 0));
        next_product();
        one.advance();
        other.begin(gates(sums, 1));
        for (int pair = 2; pair < PAIRS; pair += 2) {
            next_product();
            end(one, sums, pair - 2, target);
            other.advance();
            one.begin(gates(sums, pair));
            next_product();
            end(other, sums, pair - 1, target);
            one.advance();
            other.begin(gates(sums, pair + 1));
        }
        next_product();
        end(one, sums, PAIRS - 2, target);
        other.advance();
        next_product();
        end(other, sums, PAIRS - 1, target);
    }

  private:
    static constexpr int PAIRS = 16;  // of vectors: two outputs of 16 rows each, or two rows of 16 outputs

    struct PendingActivation {
        Silu even, odd;
        RoundedPair input;

        __attribute__((always_inline)) void begin(const RoundedPair& gates) {
            if constexpr (ACTIVATION == SILU) {
                even.begin(gates.even);
                odd.begin(gates.odd);
            } else {
                input = gates;
            }
        }

        __attribute__((always_inline)) void advance() {
            if constexpr (ACTIVATION != SILU) return;
            even.advance();
            odd.advance();
        }

        __attribute__((always_inline)) RoundedPair end() const {
            if constexpr (ACTIVATION == SILU) return {even.end(), odd.end()};
            return {activate(input.even, ACTIVATION), activate(input.odd, ACTIVATION)};
        }
    };

    // Both are rounded to bfloat16, as if the products had been stored.
    __attribute__((always_inline)) RoundedPair gates(const float (*sums)[SUMS], int pair) const {
        return rounded_pair(sums[pair / 8 * 2], biases_.left, pair % 8);
    }
    __attribute__((always_inline)) RoundedPair ups(const float (*sums)[SUMS], int pair) const {
        return rounded_pair(sums[pair / 8 * 2 + 1], biases_.right, pair % 8);
    }

    __attribute__((always_inline)) RoundedPair rounded_pair(const float* sums, const float* biases, int pair) const {
        vf first = load(sums + pair * 32), second = load(sums + pair * 32 + 16);
        if (biases_.any) {
            first += TRANSPOSED ? splat(biases[2 * pair]) : load(biases);
            second += TRANSPOSED ? splat(biases[2 * pair + 1]) : load(biases);
        }
        return RoundedPair::rounded(first, second);
    }

    __attribute__((always_inline)) void end(const PendingActivation& active, const float (*sums)[SUMS], int pair,
                                            char* target) const {
        RoundedPair gate = active.end(), up = ups(sums, pair);
        __m512i outputs = RoundedPair{gate.even * up.even, gate.odd * up.odd}.joined(TRANSPOSED);
        target += pair / 8 * row_bytes_ + pair % 8 * (TRANSPOSED ? 64 : 128);
        if constexpr (TRANSPOSED) {
            _mm512_store_si512(target, outputs);
        } else {
            _mm256_store_si256((__m256i*)target, _mm512_castsi512_si256(outputs));
            _mm256_store_si256((__m256i*)(target + 64), _mm512_extracti64x4_epi64(outputs, 1));
        }
    }

    Biases biases_;
    char* target_;
    int64_t row_bytes_;  // per sixteen rows
};

}  // namespace linear_layer

#endif
