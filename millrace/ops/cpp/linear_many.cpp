// Linear layers for the rows of a prompt, on the AMX matrix unit.
//
// A unit of work is two panels of weights against some hundreds of rows. The panels, unpacked if they are quantised, stay
// in the nearest cache while the rows stream past them from the second. The matrix unit and the vector units work at the
// same time: between the tile products of one block of 32 rows, the results of the block before are finished (bias,
// activation, rounding, layout), and the next weights are unpacked.
#include "linear_many.h"

#include <atomic>
#include <optional>
#include <type_traits>
#include <utility>

#include "linear_finish.h"

#if HAS_AMX

namespace linear_layer {
namespace {

// Rows that stream past the weights stay in the second-level cache.
constexpr int64_t CHUNK_BYTES = 1 << 20;
// With so many rows for each thread, every thread unpacks all weights for rows of its own.
constexpr int64_t OWN_ROWS = 512;

// The products of one tile of inputs: sums += 32 rows times two panels.
template <bool TURNED>
inline __attribute__((always_inline)) void multiply_tiles(const char* upper, const char* lower, const char* left,
                                                          const char* right) {
    before_tile_loads();
    // Rows are loaded as what will not be needed again soon, so that the weights keep their place in the cache.
    _tile_stream_loadd(4, upper, 64);
    _tile_stream_loadd(5, lower, 64);
    _tile_loadd(6, left, 64);
    _tile_loadd(7, right, 64);
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
}

template <int COUNT, typename F>
inline __attribute__((always_inline)) void unrolled(F f) {
    [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
        (f(std::integral_constant<int, I>{}), ...);
    }(std::make_integer_sequence<int, COUNT>{});
}

// 32 rows against two panels. `sums`: left panel, right panel with the upper 16 rows, then with the lower; each
// [16 rows][16 outputs], or with TURNED [16 outputs][16 rows]. After the products of each of the first tiles comes one of
// PIECES of other work, `piece(std::integral_constant)`, and after those of every tile a step of `preparer`: little enough
// for the vector units to do while the matrix unit is busy, and always the same at the same place, as branches and calls
// that are not foreseen would stop both.
template <bool TURNED, int PIECES, typename Piece, typename Preparer>
inline void multiply(const char* upper, int64_t tiles, Weights w, float (*sums)[SUMS], Piece piece, Preparer& preparer) {
    const char* lower = upper + tiles * TILE_BYTES;
    int64_t tile = 0;
    bool prepares = false;
    auto step = [&](auto i) __attribute__((always_inline)) {
        if (tile < tiles)
            multiply_tiles<TURNED>(upper + tile * TILE_BYTES, lower + tile * TILE_BYTES, w.left + tile * w.step,
                                   w.right + tile * w.step);
        tile++;
        if (i % 4 == 0) prepares = preparer.begin();
        if (prepares) preparer.template step<i % 4>();
        if constexpr (i < PIECES) piece(i);
    };
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    unrolled<(PIECES + 3) / 4 * 4>(step);
    while (tile < tiles) unrolled<4>([&](auto i) { step(std::integral_constant<int, PIECES + 4 + i - PIECES % 4>{}); });
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
}

// --- the work of a product, and who does what ---

// Rows per chunk: whole blocks, all chunks about equal; one chunk for each thread where there are rows enough.
int64_t chunk_rows(int64_t rows, int64_t padded_k) {
    int64_t most = std::max<int64_t>(CHUNK_BYTES / (padded_k * sizeof(bf16)) / BLOCK_ROWS * BLOCK_ROWS, 2 * BLOCK_ROWS);
    int64_t chunks = (rows + most - 1) / most, for_threads = std::min<int64_t>(pool::threads(), rows / OWN_ROWS);
    chunks = std::max(chunks, for_threads);
    return round_up((rows + chunks - 1) / chunks, BLOCK_ROWS);
}

// All pairs of panels with all chunks of rows. A thread begins with the chunk that is its own, which it has in its cache
// from the work before, and then helps with the others.
class Queue {
  public:
    Queue(std::vector<Pair> pairs, int64_t rows, int64_t padded_k)
        : pairs_(std::move(pairs)), rows_(rows), chunk_rows_(chunk_rows(rows, padded_k)),
          taken_((rows + chunk_rows_ - 1) / chunk_rows_) {}

    int64_t chunks() const { return taken_.size(); }

    // A worker's next unit; false when none is left.
    bool claim(int64_t worker, Unit& unit) {
        int64_t own = std::min(worker * chunks() / pool::threads(), chunks() - 1);
        for (int64_t i = 0; i < chunks(); i++) {
            int64_t chunk = (own + i) % chunks(), first = chunk * chunk_rows_;
            if (taken_[chunk].load(std::memory_order_relaxed) >= (int64_t)pairs_.size()) continue;
            int64_t index = taken_[chunk].fetch_add(1, std::memory_order_relaxed);
            if (index >= (int64_t)pairs_.size()) continue;
            unit = {pairs_[index], first, std::min(chunk_rows_, rows_ - first)};
            return true;
        }
        return false;
    }

  private:
    std::vector<Pair> pairs_;
    int64_t rows_, chunk_rows_;
    std::vector<std::atomic<int64_t>> taken_;
};

// One thread's part of a product. While a pair of panels is multiplied, the next is prepared; while a block of rows is,
// the sums of the block before become outputs.
template <bool TURNED, typename Finish, typename Out>
class Worker {
    using Preparer = std::conditional_t<TURNED, Unpacker, Fetcher>;

  public:
    Worker(Queue& queue, int64_t index, int64_t tiles, int64_t skip, const char* x, Out out)
        : queue_(queue), index_(index), tiles_(tiles), skip_(skip), x_(x), out_(out) {
        memory_ = static_cast<bf16*>(scratch<WEIGHTS>(2 * pair_bytes()));
    }

    void run() {
        Unit unit, next;
        if (!queue_.claim(index_, unit)) return;
        configure_tiles({});
        Preparer now = preparer(unit, 0);
        prepare_all(now);
        for (int turn = 0;; turn ^= 1) {
            bool more = queue_.claim(index_, next);
            Preparer later = more ? preparer(next, turn ^ 1) : now;  // `now` has nothing left to prepare
            multiply_unit(unit, now.weights(), later);
            if (!more) break;
            prepare_all(later);
            unit = next;
            now = later;
        }
        finish_block();
        _tile_release();
    }

  private:
    int64_t pair_bytes() const { return 2 * tiles_ * TILE_BYTES; }

    Preparer preparer(const Pair& pair, int turn) const {
        return Preparer(pair, memory_ + turn * pair_bytes() / sizeof(bf16), skip_);
    }

    void multiply_unit(const Unit& unit, const Weights& weights, Preparer& later) {
        int64_t blocks = (unit.num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
        const char* x = x_ + unit.first_row / 16 * tiles_ * TILE_BYTES;
        Finish finish(unit, out_);
        for (int64_t block = 0; block < blocks; block++, x += 2 * tiles_ * TILE_BYTES) {
            if (pending_ < 0)
                multiply<TURNED, 0>(x, tiles_, weights, sums_, [](auto) {}, later);
            else
                multiply<TURNED, Finish::PIECES>(x, tiles_, weights, sums_, piece(), later);
            if (block == 0) finish_ = finish;
            pending_ = block;
        }
    }

    // A piece of the pending block.
    auto piece() {
        return [this](auto i) { finish_->template piece<i.value>(pending_, sums_); };
    }

    void finish_block() {
        unrolled<Finish::PIECES>(piece());
    }

    Queue& queue_;
    int64_t index_, tiles_, skip_;
    const char* x_;
    Out out_;
    bf16* memory_;
    alignas(64) float sums_[4][SUMS];
    std::optional<Finish> finish_;  // of the pending block's unit
    int64_t pending_ = -1;          // the block whose sums are not outputs yet
};

template <bool TURNED, typename Finish, typename Out>
void run(Queue& queue, int64_t tiles, int64_t panels_apart, const void* x, Out out) {
    int64_t sharers = std::max<int64_t>(pool::threads() / queue.chunks(), 1);
    pool::for_each(pool::threads(), true, [&](int64_t index) {
        Worker<TURNED, Finish, Out>(queue, index, tiles, panels_apart * sharers, (const char*)x, out).run();
    });
}

// Where a column of a layer of several parts is.
struct Place {
    const Layer* part;
    int64_t panel;
};

Place place_of(const std::vector<Layer>& parts, int64_t column) {
    const Layer* part = parts.data();
    while (column >= part->first_column + part->n) part++;
    return {part, (column - part->first_column) / PANEL};
}

std::vector<Pair> pairs_of(const Layer& part) {
    std::vector<Pair> pairs;
    for (int64_t panel = 0; panel < part.panels(); panel += 2) pairs.push_back({&part, &part, panel, panel + 1});
    return pairs;
}

std::vector<Pair> gated_pairs(const std::vector<Layer>& gate_up) {
    int64_t inner = gate_up[0].out_stride / 2;
    std::vector<Pair> pairs;
    for (int64_t column = 0; column < inner; column += PANEL) {
        Place gate = place_of(gate_up, column), up = place_of(gate_up, inner + column);
        pairs.push_back({gate.part, up.part, gate.panel, up.panel});
    }
    return pairs;
}

// Neighbouring parts that one product can cover: of one format.
std::vector<Pair> pairs_of(const Layer*& part, const Layer* end) {
    std::vector<Pair> pairs;
    int format = part->format;
    for (; part < end && part->format == format; part++) {
        std::vector<Pair> own = pairs_of(*part);
        pairs.insert(pairs.end(), own.begin(), own.end());
    }
    return pairs;
}

template <int ACTIVATION>
void run_gated(Queue& queue, const Layer& gate_up, const void* tiles, const GatedTiles& out) {
    if (gate_up.is_quantised())
        run<true, ToGatedTiles<true, ACTIVATION>>(queue, gate_up.tiles(), 1, tiles, out);
    else
        run<false, ToGatedTiles<false, ACTIVATION>>(queue, gate_up.tiles(), 1, tiles, out);
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
    const Layer* end = parts.data() + parts.size();
    for (const Layer* part = parts.data(); part < end;) {
        const Layer& first = *part;
        Queue queue(pairs_of(part, end), rows, first.padded_k);
        int64_t tiles = first.tiles();
        if (first.is_quantised()) {
            if (first.wide)
                run<true, TurnedToWideRows>(queue, tiles, 2, turned_tiles, (float*)out);
            else
                run<true, TurnedToRows>(queue, tiles, 2, turned_tiles, (bf16*)out);
        } else {
            if (first.wide)
                run<false, StraightToRows<float>>(queue, tiles, 2, plain_tiles, (float*)out);
            else
                run<false, StraightToRows<bf16>>(queue, tiles, 2, plain_tiles, (bf16*)out);
        }
    }
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
    const Layer& any = gate_up[0];
    Queue queue(gated_pairs(gate_up), rows, any.padded_k);
    GatedTiles target{static_cast<char*>(out), any.out_stride / 2};
    if (activation == SILU) run_gated<SILU>(queue, any, tiles, target);
    if (activation == GELU_TANH) run_gated<GELU_TANH>(queue, any, tiles, target);
    if (activation == GELU) run_gated<GELU>(queue, any, tiles, target);
}

}  // namespace linear_layer

#endif
