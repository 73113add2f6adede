// Linear layers for the rows of a prompt, on the AMX matrix unit.
//
// A unit of work is two panels of weights against some hundreds of rows. The panels, unpacked if they are quantised, stay
// in the nearest cache while the rows stream past them from the second. The matrix unit and the vector units work at the
// same time: between the tile products of one block of 32 rows, the results of the block before are finished (bias,
// activation, rounding, layout), and with the first block the weights are unpacked.
#include "linear_many.h"

#include "activation.h"

#if HAS_AMX

namespace linear_layer {
namespace {

constexpr int64_t TILE_BYTES = 1024, BLOCK_ROWS = 32;
constexpr int64_t SUMS = 16 * 16;
// Rows that stream past the weights stay in the second-level cache.
constexpr int64_t CHUNK_BYTES = 1 << 20;

// Items 2 i and 2 i + 1 of the result are item i of the first and of the second half.
inline __m512i interleave(__m512 first, __m512 second) {
    const vu index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const __m512i order = (__m512i)(index | (index + 16) << 16);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

// Two panels, which may belong to different parts, and the rows of one chunk.
struct Unit {
    const Layer *left_part, *right_part;
    int64_t left, right;          // panels in their parts
    int64_t first_row, num_rows;  // the last chunk may end within a block
};

// The weights of two panels as tiles, and how far apart.
struct Weights {
    const char *left, *right;
    int64_t step;
};

// Unpacks two panels tile by tile, so that it can be done beside other work.
class PairUnpacker {
  public:
    PairUnpacker(const Unit& unit, int64_t tiles)
        : unpack_(quantised::tile_pair(unit.left_part->format)), tiles_(tiles),
          memory_(static_cast<bf16*>(scratch<WEIGHTS>(tiles * 2 * TILE_BYTES))) {
        auto at = [&](const Layer* part, int64_t panel) {
            return quantised::panel_at(part->format, part->packed, part->k, panel);
        };
        left_ = at(unit.left_part, unit.left);
        right_ = at(unit.right_part, unit.right);
    }

    void next() {
        if (done_ == tiles_) return;
        unpack_(left_, right_, done_, memory_ + done_ * 2 * quantised::TILE_ITEMS);
        done_++;
    }

    Weights weights() const {
        auto* start = reinterpret_cast<const char*>(memory_);
        return {start, start + TILE_BYTES, 2 * TILE_BYTES};
    }

  private:
    quantised::TilePair unpack_;
    quantised::Panel left_, right_;
    int64_t tiles_, done_ = 0;
    bf16* memory_;
};

Weights plain_weights(const Unit& unit, int64_t tiles) {
    auto at = [&](const Layer* part, int64_t panel) {
        return static_cast<const char*>(part->packed) + panel * tiles * TILE_BYTES;
    };
    return {at(unit.left_part, unit.left), at(unit.right_part, unit.right), TILE_BYTES};
}

// 32 rows against two panels. `sums`: left panel, right panel with the upper 16 rows, then with the lower; each
// [16 rows][16 outputs], or with TURNED [16 outputs][16 rows]. `beside(t)` is called after the products of each tile.
template <bool TURNED, typename Beside>
inline void multiply(const char* upper, int64_t tiles, Weights w, float (*sums)[SUMS], Beside beside) {
    const char* lower = upper + tiles * TILE_BYTES;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t tile = 0; tile < tiles; tile++) {
        before_tile_loads();
        // Rows are loaded as what will not be needed again soon, so that the weights keep their place in the cache.
        _tile_stream_loadd(4, upper + tile * TILE_BYTES, 64);
        _tile_stream_loadd(5, lower + tile * TILE_BYTES, 64);
        _tile_loadd(6, w.left + tile * w.step, 64);
        _tile_loadd(7, w.right + tile * w.step, 64);
        if constexpr (TURNED) {
            _tile_dpbf16ps(0, 6, 4);
            _tile_dpbf16ps(1, 7, 4);
            _tile_dpbf16ps(2, 6, 5);
            _tile_dpbf16ps(3, 7, 5);
        } else {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        beside(tile);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
}

// The biases of two panels, zeros where there are no outputs.
struct Biases {
    alignas(64) float left[PANEL] = {}, right[PANEL] = {};
    bool any;

    explicit Biases(const Unit& unit) : any(unit.left_part->bias) {
        copy(*unit.left_part, unit.left, left);
        copy(*unit.right_part, unit.right, right);
    }

    // To sixteen outputs of a row.
    vf add_left(vf sums) const { return any ? sums + load(left) : sums; }
    vf add_right(vf sums) const { return any ? sums + load(right) : sums; }

    static void copy(const Layer& part, int64_t panel, float* target) {
        int64_t left = std::clamp<int64_t>(part.n - panel * PANEL, 0, PANEL);
        if (part.bias && left) memcpy(target, part.bias + panel * PANEL, left * sizeof(float));
    }
};

// --- what becomes of the sums of a block: a number of pieces of work each ---

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

    void piece(int i, int64_t block, const float (*sums)[SUMS]) {
        int half = i / 8, step = i % 4;
        i % 8 < 4 ? gather(step, sums + 2 * half) : spread(step, block * BLOCK_ROWS + half * 16);
    }

  private:
    // Rounded to pairs of outputs first, so that both panels are turned as one.
    void gather(int step, const float (*sums)[SUMS]) {
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

    void spread(int step, int64_t row) {
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

    void piece(int half, int64_t block, const float (*sums)[SUMS]) {
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

    void piece(int i, int64_t block, const float (*sums)[SUMS]) {
        const float(*half)[SUMS] = sums + i / 8 * 2;
        for (int r = i % 8 * 2; r < i % 8 * 2 + 2; r++)
            target_.put(block * BLOCK_ROWS + i / 8 * 16 + r, biases_.add_left(load(half[0] + r * 16)),
                        biases_.add_right(load(half[1] + r * 16)));
    }

  private:
    Biases biases_;
    Target<T> target_;
};

// Gates (the left panel) activated and multiplied with ups (the right one), as tiles for a layer with the same kind of
// weights. Rows past the last are whatever comes of zeros.
template <bool TURNED, int ACTIVATION>
class ToGatedTiles {
  public:
    static constexpr int PIECES = 16;  // two outputs of sixteen rows each, or two rows of sixteen outputs

    ToGatedTiles(const Unit& unit, char* tiles, int64_t inner) : biases_(unit) {
        row_bytes_ = inner / TILE_K * TILE_BYTES;
        // A panel is half of a tile's inputs.
        int64_t half = unit.left % 2 * (TURNED ? TILE_BYTES / 2 : PANEL * sizeof(bf16));
        target_ = tiles + unit.first_row / 16 * row_bytes_ + unit.left / 2 * TILE_BYTES + half;
    }

    void piece(int i, int64_t block, const float (*sums)[SUMS]) {
        int half = i / 8, pair = i % 8;
        const float *gates = sums[2 * half], *ups = sums[2 * half + 1];
        char* target = target_ + (2 * block + half) * row_bytes_ + pair * (TURNED ? 64 : 128);
        vf first = gated(gates, ups, 2 * pair), second = gated(gates, ups, 2 * pair + 1);
        if constexpr (TURNED) {
            _mm512_store_si512(target, interleave((__m512)first, (__m512)second));
        } else {
            store((bf16*)target, first);
            store((bf16*)(target + 64), second);
        }
    }

  private:
    vf gated(const float* gates, const float* ups, int i) const {
        vf gate = load(gates + i * 16), up = load(ups + i * 16);
        if (biases_.any) {
            gate += TURNED ? splat(biases_.left[i]) : load(biases_.left);
            up += TURNED ? splat(biases_.right[i]) : load(biases_.right);
        }
        // As if the products had been kept.
        return activate(rounded(gate, bf16{}), ACTIVATION) * rounded(up, bf16{});
    }

    Biases biases_;
    char* target_;
    int64_t row_bytes_;  // of sixteen rows
};

// --- units ---

// All blocks of rows of one unit; `x` are the tiles of its first row.
template <bool TURNED, typename Finish>
void run_unit(const Unit& unit, const char* x, int64_t tiles, Finish finish) {
    alignas(64) float sums[2][4][SUMS];
    int64_t blocks = (unit.num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS, block_bytes = 2 * tiles * TILE_BYTES;
    auto pieces_before = [&](int64_t block, int64_t tile, int& next) {  // of the block before, evenly over the tiles
        for (; (next + 1) * tiles <= Finish::PIECES * (tile + 1); next++)
            finish.piece(next, block - 1, sums[(block - 1) & 1]);
    };
    configure_tiles({});
    Weights weights;
    if constexpr (TURNED) {
        PairUnpacker unpacker(unit, tiles);
        weights = unpacker.weights();
        unpacker.next();
        unpacker.next();
        multiply<TURNED>(x, tiles, weights, sums[0], [&](int64_t) { unpacker.next(); });
    } else {
        weights = plain_weights(unit, tiles);
        multiply<TURNED>(x, tiles, weights, sums[0], [](int64_t) {});
    }
    for (int64_t block = 1; block < blocks; block++) {
        int next = 0;
        multiply<TURNED>(x + block * block_bytes, tiles, weights, sums[block & 1],
                         [&](int64_t tile) { pieces_before(block, tile, next); });
    }
    _tile_release();
    int next = 0;
    pieces_before(blocks, tiles - 1, next);
}

// Rows per chunk: whole blocks, all chunks about equal.
int64_t chunk_rows(int64_t rows, int64_t padded_k) {
    int64_t most = std::max<int64_t>(CHUNK_BYTES / (padded_k * sizeof(bf16)) / BLOCK_ROWS * BLOCK_ROWS, 2 * BLOCK_ROWS);
    int64_t chunks = (rows + most - 1) / most;
    return round_up((rows + chunks - 1) / chunks, BLOCK_ROWS);
}

template <typename F>
void for_chunks(int64_t rows, int64_t padded_k, F f) {
    int64_t size = chunk_rows(rows, padded_k);
    for (int64_t first = 0; first < rows; first += size) f(first, std::min(size, rows - first));
}

// Where a column of a layer of several parts is.
struct Place {
    const Layer* part;
    int64_t panel;  // -1 where no panel begins at that column
};

Place place_of(const std::vector<Layer>& parts, int64_t column) {
    for (const Layer& part : parts) {
        int64_t within = column - part.first_column;
        if (within >= 0 && within < part.n) return {&part, within % PANEL ? -1 : within / PANEL};
    }
    return {nullptr, -1};
}

std::vector<Unit> gated_units(const std::vector<Layer>& gate_up, int64_t rows) {
    int64_t inner = gate_up[0].out_stride / 2;
    std::vector<Unit> units;
    for_chunks(rows, gate_up[0].padded_k, [&](int64_t first, int64_t count) {
        for (int64_t column = 0; column < inner; column += PANEL) {
            Place gate = place_of(gate_up, column), up = place_of(gate_up, inner + column);
            units.push_back({gate.part, up.part, gate.panel, up.panel, first, count});
        }
    });
    return units;
}

template <bool TURNED, int ACTIVATION>
void run_gated(const std::vector<Unit>& units, const char* tiles, char* out, int64_t inner) {
    pool::for_each(units.size(), true, [&](int64_t i) {
        const Unit& unit = units[i];
        int64_t k_tiles = unit.left_part->padded_k / TILE_K;
        const char* x = tiles + unit.first_row / 16 * k_tiles * TILE_BYTES;
        run_unit<TURNED>(unit, x, k_tiles, ToGatedTiles<TURNED, ACTIVATION>(unit, out, inner));
    });
}

}  // namespace

int64_t tiles_bytes(int64_t rows, int64_t padded_k) { return round_up(rows, BLOCK_ROWS) * padded_k * sizeof(bf16); }

void lay_out(const bf16* x, int64_t stride, int64_t rows, const Layer& layer, bool turned, void* tiles) {
    int64_t row_bytes = layer.padded_k * 16 * sizeof(bf16);
    pool::for_each(round_up(rows, BLOCK_ROWS) / 16, rows * layer.k >= MIN_PARALLEL, [&](int64_t block) {
        char* target = static_cast<char*>(tiles) + block * row_bytes;
        if (turned) return by_pairs(x, stride, block * 16, rows, layer.k, (uint32_t*)target);
        for (int64_t r = 0; r < 16; r++) {
            const bf16* row = x + (block * 16 + r) * stride;
            int64_t k = block * 16 + r < rows ? layer.k : 0;
            for (int64_t at = 0; at < layer.padded_k; at += TILE_K) {
                __mmask32 there = k - at >= TILE_K ? 0xffffffffu : k > at ? (1u << (k - at)) - 1 : 0;
                _mm512_storeu_si512(target + at / TILE_K * TILE_BYTES + r * 64, _mm512_maskz_loadu_epi16(there, row + at));
            }
        }
    });
}

void many_rows(const std::vector<Layer>& parts, const void* plain_tiles, const void* turned_tiles, void* out,
               int64_t rows) {
    std::vector<Unit> units;
    for_chunks(rows, parts[0].padded_k, [&](int64_t first, int64_t count) {
        for (const Layer& part : parts)
            for (int64_t panel = 0; panel < part.panels(); panel += 2)
                units.push_back({&part, &part, panel, panel + 1, first, count});
    });
    pool::for_each(units.size(), true, [&](int64_t i) {
        const Unit& unit = units[i];
        int64_t k_tiles = unit.left_part->padded_k / TILE_K, from = unit.first_row / 16 * k_tiles * TILE_BYTES;
        bool turned = unit.left_part->is_quantised(), wide = unit.left_part->wide;
        const char* x = static_cast<const char*>(turned ? turned_tiles : plain_tiles) + from;
        if (turned && wide) return run_unit<true>(unit, x, k_tiles, TurnedToWideRows(unit, (float*)out));
        if (turned) return run_unit<true>(unit, x, k_tiles, TurnedToRows(unit, (bf16*)out));
        if (wide) return run_unit<false>(unit, x, k_tiles, StraightToRows<float>(unit, (float*)out));
        run_unit<false>(unit, x, k_tiles, StraightToRows<bf16>(unit, (bf16*)out));
    });
}

bool can_gate(const std::vector<Layer>& gate_up, const std::vector<Layer>& next) {
    int64_t inner = gate_up[0].out_stride / 2;
    if (inner % TILE_K || next[0].k != inner) return false;
    int format = gate_up[0].format;
    for (const Layer& part : gate_up)
        if (part.format != format || part.first_column % PANEL) return false;
    for (const Layer& part : next)
        if (part.is_quantised() != gate_up[0].is_quantised()) return false;
    return true;
}

void gated_rows(const std::vector<Layer>& gate_up, int activation, const void* tiles, void* out, int64_t rows) {
    std::vector<Unit> units = gated_units(gate_up, rows);
    int64_t inner = gate_up[0].out_stride / 2;
    auto* x = static_cast<const char*>(tiles);
    auto* target = static_cast<char*>(out);
    bool turned = gate_up[0].is_quantised();
    if (activation == SILU) (turned ? run_gated<true, SILU> : run_gated<false, SILU>)(units, x, target, inner);
    if (activation == GELU_TANH)
        (turned ? run_gated<true, GELU_TANH> : run_gated<false, GELU_TANH>)(units, x, target, inner);
    if (activation == GELU) (turned ? run_gated<true, GELU> : run_gated<false, GELU>)(units, x, target, inner);
}

}  // namespace linear_layer

#endif
