// The products in AVX-512 or AVX2: two panels at a time, a part of their inputs after the other.
//
// The integers of a part are unpacked to bytes once, then multiplied with all rows. An instruction multiplies unsigned
// with signed bytes, so signed weights are taken as q + 128. The constant that represents 0 is subtracted with the sums
// of x. Each sum of floats is continued from part to part, so it does not depend on how the inputs are divided.
#pragma once

#include <algorithm>
#include <utility>

#include "int8/int8_lanes.h"
#include "int8/int8_rows.h"
#include "linear/linear_layer.h"
#include "quantised/quantised_scales.h"

namespace int8 {

using linear_layer::Layer;
using quantised::Panel;

constexpr int64_t OUTPUTS = 2 * quantised::ROWS;  // of two panels
constexpr int CHUNKS = 8;                         // of a tile: four inputs of each output
constexpr int MAX_GROUPS = 2;
// The most tiles of a part: unpacked, they stay in the L1 cache beside a block of rows.
constexpr int64_t PART_TILES = 9;

// A part of two panels.
struct Unpacked {
    alignas(64) char integers[PART_TILES][CHUNKS][4 * OUTPUTS];  // [output][input]
    alignas(64) float scales[PART_TILES][MAX_GROUPS][OUTPUTS];
    alignas(64) float offsets[PART_TILES][MAX_GROUPS][OUTPUTS];
};

// Requests memory that is needed later, evenly over the tiles of some work.
struct Prefetch {
    const char* next;
    int64_t bytes;  // per tile

    void operator()(int64_t tile) const {
        for (int64_t at = 0; at < bytes; at += 64) _mm_prefetch(next + tile * bytes + at, _MM_HINT_T0);
    }
};

// --- weights ---

// Integers that are signed bytes once unpacked, which are taken as q + 128.
constexpr bool has_signed_bytes(const quantised::Format& f) { return f.bits == 8 || f.levels; }

// The integer that represents 0.
template <int F>
constexpr float zero_of() {
    return has_signed_bytes(quantised::format_of(F)) ? 128 : quantised::format_of(F).zero;
}

// Chunk C of a tile, whose bytes for these lanes start at `tile`.
template <int PACKING, int C>
inline __attribute__((always_inline)) Lanes::Bytes chunk(const char* tile) {
    constexpr int BITS = quantised::packed_bits(PACKING);
    if constexpr (BITS == 8) return Lanes::flip(Lanes::load(tile + 64 * C), Lanes::set((char)0x80));
    const Lanes::Bytes mask = Lanes::set(15);
    Lanes::Bytes low = Lanes::both(Lanes::shift_right<C / 4 * 4>(Lanes::load(tile + C % 4 * 64)), mask);
    if constexpr (BITS == 5)
        return Lanes::add_bits(low, Lanes::shift_right<C - 4>(Lanes::load(tile + 256)), Lanes::set(1 << 4));
    if constexpr (BITS == 6)
        return Lanes::add_bits(low, Lanes::shift_right<C % 4 * 2 - 4>(Lanes::load(tile + 256 + C / 4 * 64)),
                               Lanes::set(3 << 4));
    if constexpr (PACKING != BITS) {
        Lanes::Bytes levels = Lanes::repeat(quantised::levels_of(PACKING));
        return Lanes::look_up(Lanes::flip(levels, Lanes::set((char)0x80)), low);
    }
    return low;
}

template <int PACKING, int... C>
inline __attribute__((always_inline)) void unpack_integers(const char* tile, char (*out)[4 * OUTPUTS],
                                                           std::integer_sequence<int, C...>) {
    for (int lane = 0; lane < quantised::ROWS; lane += Lanes::COUNT)
        (Lanes::store(out[C] + 4 * lane, chunk<PACKING, C>(tile + 4 * lane)), ...);
}

// Tiles `first` to `first + tiles` of one panel. `side`: 0 is the left one of two.
template <int F>
void unpack(const Panel& panel, int side, int64_t first, int64_t tiles, const Prefetch& prefetch, Unpacked& out) {
    constexpr quantised::Format f = quantised::format_of(F);
    for (int64_t i = 0; i < tiles; i++) {
        prefetch(i);
        const char* integers = panel.integers + (first + i) * quantised::integer_bytes(f);
        auto* target = reinterpret_cast<char(*)[4 * OUTPUTS]>(out.integers[i][0] + 64 * side);
        unpack_integers<quantised::packing_of(f)>(integers, target, std::make_integer_sequence<int, CHUNKS>{});
        quantised::ScaleVectors read;
        quantised::read_scales<F>(panel, first + i, read);
        for (int g = 0; g < f.groups; g++) {
            vf offset = f.offset ? read.offsets[g] : vf{};
            if (zero_of<F>() != 0) offset = fma(read.scales[g], -zero_of<F>(), offset);
            store(out.scales[i][g] + quantised::ROWS * side, read.scales[g]);
            store(out.offsets[i][g] + quantised::ROWS * side, offset);
        }
    }
}

// --- products ---

// Arrays of registers stay in registers only if every loop over them is unrolled.
#define UNROLLED _Pragma("GCC unroll 8")

constexpr int WIDTH = Lanes::COUNT == quantised::ROWS ? 2 : 1;  // registers of outputs at a time

template <int ROWS>
using Dots = Lanes::Bytes[ROWS][WIDTH];
template <int ROWS>
using Sums = Lanes::Floats[ROWS][WIDTH];

// Products of ROWS rows with some outputs of NUM chunks; `x` and `integers` are those of the first row and chunk.
template <int BITS, int NUM, int ROWS>
inline __attribute__((always_inline)) void multiply_chunks(const char* integers, const int8_t* x, Dots<ROWS>& out) {
    constexpr int CHAINS = ROWS * WIDTH <= 6 ? 2 : 1;  // so that instructions wait less for each other
    Dots<ROWS> dots[CHAINS];
    UNROLLED for (auto& chain : dots)
        UNROLLED for (auto& row : chain)
            UNROLLED for (auto& dot : row) dot = Lanes::zero();
    UNROLLED for (int c = 0; c < NUM; c++) {
        Lanes::Bytes weights[WIDTH];
        UNROLLED for (int v = 0; v < WIDTH; v++)
            weights[v] = Lanes::load(integers + c * 4 * OUTPUTS + v * 4 * Lanes::COUNT);
        UNROLLED for (int row = 0; row < ROWS; row++) {
            Lanes::Bytes four = Lanes::spread(x + row * TILE_K + 4 * c);
            UNROLLED for (int v = 0; v < WIDTH; v++) {
                Lanes::Bytes& dot = dots[c % CHAINS][row][v];
                dot = Lanes::dot<BITS>(dot, weights[v], four);
            }
        }
    }
    UNROLLED for (int row = 0; row < ROWS; row++)
        UNROLLED for (int v = 0; v < WIDTH; v++)
            out[row][v] = CHAINS == 1 ? dots[0][row][v] : Lanes::sum(dots[0][row][v], dots[CHAINS - 1][row][v]);
}

// sums += scales * x_scales * dots + offsets * x_sums
template <int ROWS>
inline __attribute__((always_inline)) void add_scaled(const Dots<ROWS>& dots, const float* scales, const float* offsets,
                                                      const float* x_scales, const float* x_sums, Sums<ROWS>& sums) {
    UNROLLED for (int row = 0; row < ROWS; row++) {
        Lanes::Floats x_scale = Lanes::spread(x_scales[row]), x_sum = Lanes::spread(x_sums[row]);
        UNROLLED for (int v = 0; v < WIDTH; v++) {
            Lanes::Floats own = Lanes::times(Lanes::load(scales + v * Lanes::COUNT), x_scale);
            sums[row][v] = Lanes::fma(Lanes::to_floats(dots[row][v]), own, sums[row][v]);
            sums[row][v] = Lanes::fma(Lanes::load(offsets + v * Lanes::COUNT), x_sum, sums[row][v]);
        }
    }
}

// Continues the sums [ROWS][OUTPUTS] of a block, or begins them, over the tiles of a part. `x` starts with the part's
// first tile.
template <int BITS, int GROUPS, int ROWS>
void multiply_block(const Unpacked& weights, int64_t tiles, const RowBlock& x, bool begins, const Prefetch& prefetch,
                    float* out) {
    constexpr int NUM = CHUNKS / GROUPS;
    for (int64_t output = 0; output < OUTPUTS; output += WIDTH * Lanes::COUNT) {
        Sums<ROWS> sums;
        UNROLLED for (int row = 0; row < ROWS; row++)
            UNROLLED for (int v = 0; v < WIDTH; v++)
                sums[row][v] = begins ? Lanes::spread(0.0f)
                                      : Lanes::load(out + row * OUTPUTS + output + v * Lanes::COUNT);
        for (int64_t tile = 0; tile < tiles; tile++) {
            if (output == 0) prefetch(tile);
            UNROLLED for (int g = 0; g < GROUPS; g++) {
                const int8_t* values = x.values + tile * ROWS * TILE_K + g * 4 * NUM;
                const float* x_sums = GROUPS == 1 ? x.sums + tile * ROWS : x.halves + (2 * tile + g) * ROWS;
                Dots<ROWS> dots;
                multiply_chunks<BITS, NUM, ROWS>(weights.integers[tile][g * NUM] + 4 * output, values, dots);
                add_scaled<ROWS>(dots, weights.scales[tile][g] + output, weights.offsets[tile][g] + output,
                                 x.scales + tile * ROWS, x_sums, sums);
            }
        }
        UNROLLED for (int row = 0; row < ROWS; row++)
            UNROLLED for (int v = 0; v < WIDTH; v++)
                Lanes::store(out + row * OUTPUTS + output + v * Lanes::COUNT, sums[row][v]);
    }
}

#undef UNROLLED

// --- the functions of a format ---

using Unpack = void (*)(const Panel& panel, int side, int64_t first, int64_t tiles, const Prefetch& prefetch,
                        Unpacked& out);
using Multiply = void (*)(const Unpacked& weights, int64_t tiles, const RowBlock& x, bool begins,
                          const Prefetch& prefetch, float* out);

// Indexed by number of rows - 1.
template <int BITS, int GROUPS, int... I>
const Multiply* multiply_functions(std::integer_sequence<int, I...>) {
    static constexpr Multiply all[] = {multiply_block<BITS, GROUPS, I + 1>...};
    return all;
}

struct Functions {
    Unpack unpack;
    const Multiply* multiply;
};

template <int F>
Functions functions() {
    constexpr quantised::Format f = quantised::format_of(F);
    constexpr int BITS = HAS_DOT ? 0 : has_signed_bytes(f) ? 8 : 4;  // formats that need the same code share it
    return {unpack<F>, multiply_functions<BITS, f.groups>(std::make_integer_sequence<int, MAX_BLOCK_ROWS>{})};
}

template <int... I>
Functions functions_of(int format, std::integer_sequence<int, I...>) {
    using Make = Functions (*)();
    static constexpr Make all[] = {functions<quantised::FIRST_FORMAT + I>...};
    return all[format - quantised::FIRST_FORMAT]();
}

inline Functions functions_of(int format) {
    return functions_of(format, std::make_integer_sequence<int, quantised::NUM_FORMATS>{});
}

// --- panels ---

// Rows `first_row` to `last_row`, which starts and ends with a block, against panels `first` to `last`, both even.
class PanelProducts {
  public:
    PanelProducts(const Layer& layer, const Rows& x, float* out, int64_t first_row, int64_t last_row)
        : layer_(layer), x_(x), out_(out), first_row_(first_row), last_row_(last_row),
          use_(functions_of(layer.format)),
          parts_((layer.tiles() + PART_TILES - 1) / PART_TILES),
          bytes_(quantised::panel_bytes(layer.format, layer.k)),
          weights_(static_cast<Unpacked*>(linear_layer::scratch<linear_layer::WEIGHTS>(sizeof(Unpacked)))) {
        int64_t rows = parts_ > 1 ? last_row - first_row : MAX_BLOCK_ROWS;
        sums_ = static_cast<float*>(linear_layer::scratch<linear_layer::INT8_SUMS>(rows * OUTPUTS * sizeof(float)));
    }

    // Panels `panel` and `panel + 1`.
    void multiply(int64_t panel) const {
        for (int64_t part = 0; part < parts_; part++) multiply_part(panel, part);
    }

  private:
    void multiply_part(int64_t panel, int64_t part) const {
        int64_t first = layer_.tiles() * part / parts_, tiles = layer_.tiles() * (part + 1) / parts_ - first;
        // The next two panels are requested meanwhile, in as many steps as there are functions called.
        const char* next = quantised::panel_at(layer_.format, layer_.packed, layer_.k, panel).integers + 2 * bytes_;
        int64_t steps = 2 + (last_row_ - first_row_ + MAX_BLOCK_ROWS - 1) / MAX_BLOCK_ROWS;
        Prefetch prefetch{next + 2 * bytes_ * part / parts_, 2 * bytes_ / parts_ / (steps * tiles)};
        for (int side = 0; side < 2; side++, prefetch.next += tiles * prefetch.bytes)
            use_.unpack(quantised::panel_at(layer_.format, layer_.packed, layer_.k, panel + side), side, first, tiles,
                        prefetch, *weights_);
        for (int64_t row = first_row_; row < last_row_; prefetch.next += tiles * prefetch.bytes) {
            int size = block_rows(x_.count() - row);
            float* sums = parts_ > 1 ? sums_ + (row - first_row_) * OUTPUTS : sums_;
            if (part + 1 == parts_) request_outputs(panel, row, size);
            use_.multiply[size - 1](*weights_, tiles, x_.block(row).from(first, size), part == 0, prefetch, sums);
            if (part + 1 == parts_) finish_block(panel, row, size, sums);
            row += size;
        }
    }

    float* output(int64_t panel, int64_t row) const {
        return out_ + row * layer_.out_stride + layer_.first_column + panel * quantised::ROWS;
    }

    // Outputs of many rows are not in the cache when they are written.
    void request_outputs(int64_t panel, int64_t row, int size) const {
        for (int r = 0; r < size; r++)
            for (int at = 0; at < OUTPUTS; at += LANES) __builtin_prefetch(output(panel, row + r) + at, 1);
    }

    void finish_block(int64_t panel, int64_t row, int size, const float* sums) const {
        const int64_t column = panel * quantised::ROWS;
        if (column + OUTPUTS > layer_.n) {
            for (int r = 0; r < size; r++)
                for (int side = 0; side < 2; side++)
                    finish(layer_, out_, row + r, panel + side, load(sums + r * OUTPUTS + side * quantised::ROWS));
            return;
        }
        for (int r = 0; r < size; r++)
            for (int at = 0; at < OUTPUTS; at += LANES) {
                vf sum = load(sums + r * OUTPUTS + at);
                store(output(panel, row + r) + at, layer_.bias ? sum + load(layer_.bias + column + at) : sum);
            }
    }

    const Layer& layer_;
    const Rows& x_;
    float* out_;
    const int64_t first_row_, last_row_;
    const Functions use_;
    const int64_t parts_, bytes_;  // parts of the inputs; bytes of a panel
    Unpacked* weights_;
    float* sums_;  // of all rows, or of a block if there is only one part
};

inline void multiply_panels(const Layer& layer, const Rows& x, float* out, int64_t first_row, int64_t last_row,
                            int64_t first, int64_t last) {
    PanelProducts products(layer, x, out, first_row, last_row);
    for (int64_t panel = first; panel < last; panel += 2) products.multiply(panel);
}

}  // namespace int8
