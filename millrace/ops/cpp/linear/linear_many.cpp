// Linear layers for many rows (prompts) on the AMX matrix unit.
//
// A unit of work is two panels of weights against some hundreds of rows. As much of the panels as fits into the L1
// cache, unpacked if quantised, stays there while the rows are read from L2. If the rows have more inputs than L2
// holds, several pairs of panels are multiplied with one part of the inputs before the next part. The matrix unit and
// the vector units work concurrently: between the tile products of a block of 32 rows, the results of the previous
// block are finished (bias, activation, rounding, layout). Weights are unpacked between the products of the first
// block.
#include "amx.h"

#if HAS_AMX

#include "linear/linear_many.h"

#include <atomic>
#include <type_traits>

#include "linear/linear_finish.h"

namespace linear_layer {
namespace {

// L2 cache for a chunk of rows: with all their inputs, or, if there are too many, with a part of the inputs and the
// sums of several pairs of panels.
constexpr int64_t CHUNK_BYTES = 1 << 20, SUMS_BYTES = 512 << 10;
// Tiles of each of two panels that stay in the L1 cache.
constexpr int64_t L1_TILES = 18;
// From this many rows per thread on, each thread gets its own chunk of rows and unpacks all weights for it: the rows
// are in its cache from the previous operation, and its outputs stay there for the next. Gated layers need more rows.
constexpr int64_t MIN_ROWS_PER_THREAD = 256, MIN_ROWS_PER_THREAD_GATED = 512;

// Products of one tile of inputs: sums += 32 rows times two panels.
template <bool TRANSPOSED>
inline __attribute__((always_inline)) void multiply_tiles(const char* upper, const char* lower, const char* left,
                                                          const char* right) {
    before_tile_loads();
    // Rows are loaded with a streaming hint, so that the weights stay in the cache.
    _tile_stream_loadd(4, upper, 64);
    _tile_stream_loadd(5, lower, 64);
    _tile_loadd(6, left, 64);
    _tile_loadd(7, right, 64);
    if constexpr (TRANSPOSED) {
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

// 32 rows against two panels, over one part of the inputs. `upper` and `lower` are tiles of sixteen rows. `sums`: left
// and right panel with the upper rows, then with the lower; each [16 rows][16 outputs], or if TRANSPOSED [16
// outputs][16 rows]. Adds to `sums` unless this is the `first` part of the inputs. `interleave(product)` may call
// `product` any number of times, between other work.
template <bool TRANSPOSED, typename Interleave>
inline void multiply(const char* upper, const char* lower, int64_t tiles, Weights w, bool first, float (*sums)[SUMS],
                     Interleave interleave) {
    const char* end = upper + tiles * TILE_BYTES;
    auto product = [&]() __attribute__((always_inline)) {
        if (upper == end) return;
        multiply_tiles<TRANSPOSED>(upper, lower, w.left, w.right);
        upper += TILE_BYTES, lower += TILE_BYTES;
        w.left += w.step, w.right += w.step;
    };
    if (first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums[0], 64);
        _tile_loadd(1, sums[1], 64);
        _tile_loadd(2, sums[2], 64);
        _tile_loadd(3, sums[3], 64);
    }
    interleave(product);
    while (upper != end) product();
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
}

// --- splitting a product into work for threads ---

// How rows and pairs of panels are split: about equal chunks of whole blocks of rows, one per thread if each gets at
// least `own` rows, and `pairs` pairs of panels at a time.
struct Partition {
    int64_t rows, pairs = 1;

    Partition(int64_t all_rows, int64_t padded_k, int64_t own, int64_t all_pairs) {
        int64_t for_threads = std::clamp<int64_t>(all_rows / own, 1, pool::threads());
        rows = even_part(all_rows, for_threads);
        if (rows * bytes(padded_k) <= CHUNK_BYTES) return;
        int64_t parts = parts_of(padded_k / TILE_K), room = parts == 1 ? CHUNK_BYTES : CHUNK_BYTES - SUMS_BYTES;
        int64_t most = room / bytes(padded_k / parts);
        rows = even_part(rows, (rows + most - 1) / most);
        if (parts == 1) return;
        int64_t together = std::max<int64_t>(SUMS_BYTES / (rows / BLOCK_ROWS * 4 * SUMS * sizeof(float)), 1);
        int64_t groups = (all_pairs + together - 1) / together;
        pairs = (all_pairs + groups - 1) / groups;
    }

    // Number of parts into which this many tiles of inputs are split.
    static int64_t parts_of(int64_t tiles) { return (tiles + L1_TILES - 1) / L1_TILES; }

  private:
    static int64_t bytes(int64_t inputs) { return inputs * sizeof(bf16); }
    static int64_t even_part(int64_t all, int64_t parts) { return round_up((all + parts - 1) / parts, BLOCK_ROWS); }
};

// Consecutive pairs and one chunk of rows.
struct Group {
    const Pair* pairs;
    int64_t count, first_row, num_rows;
};

// All pairs of panels with all chunks of rows, in shares of neighbouring pairs and one chunk. Each thread starts with
// its own share, so that threads do not write near each other and find their chunk in their cache; then it takes work
// from the other shares.
class Queue {
  public:
    Queue(std::vector<Pair> pairs, int64_t rows, int64_t padded_k, int64_t own_rows)
        : pairs_(std::move(pairs)), rows_(rows), partition_(rows, padded_k, own_rows, pairs_.size()) {
        int64_t chunks = (rows + partition_.rows - 1) / partition_.rows;
        int64_t groups = (pairs_.size() + partition_.pairs - 1) / partition_.pairs;
        shares_per_chunk_ = std::clamp<int64_t>(pool::threads() / chunks, 1, groups);
        shares_ = std::vector<Share>(chunks * shares_per_chunk_);
        for (int64_t i = 0; i < (int64_t)shares_.size(); i++) {
            int64_t share = i % shares_per_chunk_;
            shares_[i].next.store(share * groups / shares_per_chunk_, std::memory_order_relaxed);
            shares_[i].end = (share + 1) * groups / shares_per_chunk_;
        }
    }

    const Partition& partition() const { return partition_; }

    // Gets a worker's next group; false if none is left.
    bool claim(int64_t worker, Group& group) {
        int64_t count = shares_.size(), own = std::min(worker * count / pool::threads(), count - 1);
        for (int64_t i = 0; i < count; i++) {
            Share& share = shares_[(own + i) % count];
            if (share.next.load(std::memory_order_relaxed) >= share.end) continue;
            int64_t index = share.next.fetch_add(1, std::memory_order_relaxed);
            if (index >= share.end) continue;
            group = group_at(index, (own + i) % count / shares_per_chunk_);
            return true;
        }
        return false;
    }

  private:
    struct alignas(64) Share {
        std::atomic<int64_t> next{0};  // next group
        int64_t end = 0;
    };

    Group group_at(int64_t index, int64_t chunk) const {
        int64_t pair = index * partition_.pairs, row = chunk * partition_.rows;
        return {pairs_.data() + pair, std::min<int64_t>(partition_.pairs, pairs_.size() - pair), row,
                std::min(partition_.rows, rows_ - row)};
    }

    std::vector<Pair> pairs_;
    int64_t rows_;
    Partition partition_;
    int64_t shares_per_chunk_;
    std::vector<Share> shares_;
};

// One thread's work on a product.
template <bool TRANSPOSED, typename Finish, typename Out>
class Worker {
    using Source = std::conditional_t<TRANSPOSED, Unpacker, Fetcher>;

  public:
    Worker(Queue& queue, int64_t index, int64_t tiles, int64_t skip, const char* x, Out out)
        : queue_(queue), index_(index), tiles_(tiles), skip_(skip), parts_(Partition::parts_of(tiles)), x_(x), out_(out) {
        // If all inputs are multiplied at once, the sums of one block are enough.
        blocks_ = queue.partition().rows / BLOCK_ROWS;
        int64_t sums_bytes = (parts_ == 1 ? 1 : queue.partition().pairs * blocks_) * sizeof(Sums);
        char* memory = static_cast<char*>(scratch<WEIGHTS>(sums_bytes + 2 * L1_TILES * TILE_BYTES));
        sums_ = reinterpret_cast<Sums*>(memory);
        unpacked_ = reinterpret_cast<bf16*>(memory + sums_bytes);
    }

    void run() {
        Group group;
        configure_tiles({});
        while (queue_.claim(index_, group))
            for (int64_t part = 0; part < parts_; part++)
                for (int64_t i = 0; i < group.count; i++)
                    multiply_part({group.pairs[i], group.first_row, group.num_rows}, part, sums_ + i * blocks_);
        _tile_release();
    }

  private:
    using Sums = float[4][SUMS];

    // One part of the inputs of a unit. In the last part, while a block of rows is multiplied, the sums of the previous
    // block become outputs.
    void multiply_part(const Unit& unit, int64_t part, Sums* sums) {
        int64_t blocks = (unit.num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
        if (parts_ == 1) sums = sums_;
        auto sums_of = [&](int64_t block) -> Sums& { return sums[parts_ == 1 ? 0 : block]; };
        Source source(unit, unpacked_, skip_);
        prepare_and_multiply(unit, part, source, sums_of(0));
        Weights weights = source.weights(first_tile(part));
        if (part + 1 < parts_) {
            for (int64_t block = 1; block < blocks; block++)
                multiply_block(unit, block, part, weights, sums_of(block), [](auto&) {});
            return;
        }
        Finish finish(unit, out_);
        for (int64_t block = 1; block < blocks; block++)
            multiply_block(unit, block, part, weights, sums_of(block),
                           [&](auto& product) { finish.run(block - 1, sums_of(block - 1), product); });
        finish.run(blocks - 1, sums_of(blocks - 1), [] {});
    }

    // The first block: products are two tiles behind the preparation, because memory just written is slow to load as a
    // tile.
    void prepare_and_multiply(const Unit& unit, int64_t part, const Source& source, Sums& sums) {
        int64_t from = first_tile(part), count = first_tile(part + 1) - from;
        int64_t ahead = std::min<int64_t>(count, 2);
        for (int64_t tile = 0; tile < ahead; tile++) source.prepare(from, tile);
        multiply_block(unit, 0, part, source.weights(from), sums, [&](auto& product) {
            for (int64_t tile = ahead; tile < count; tile++) {
                source.prepare(from, tile);
                product();
            }
        });
    }

    template <typename Interleave>
    __attribute__((always_inline)) void multiply_block(const Unit& unit, int64_t block, int64_t part,
                                                       const Weights& weights, Sums& sums, Interleave interleave) {
        int64_t from = first_tile(part), count = first_tile(part + 1) - from;
        const char* upper = x_ + ((unit.first_row / 16 + 2 * block) * tiles_ + from) * TILE_BYTES;
        const char* lower = upper + tiles_ * TILE_BYTES;
        multiply<TRANSPOSED>(upper, lower, count, weights, part == 0, sums, interleave);
    }

    int64_t first_tile(int64_t part) const { return tiles_ * part / parts_; }

    Queue& queue_;
    int64_t index_, tiles_, skip_;
    int64_t parts_;   // number of parts of the inputs
    int64_t blocks_;  // blocks of rows in a chunk
    const char* x_;
    Out out_;
    Sums* sums_;  // [pairs of a group][blocks], or a single one
    bf16* unpacked_;
};

template <bool TRANSPOSED, typename Finish, typename Out>
void run(Queue& queue, int64_t tiles, int64_t panels_apart, const void* x, Out out) {
    pool::for_each(pool::threads(), true, [&](int64_t index) {
        Worker<TRANSPOSED, Finish, Out>(queue, index, tiles, panels_apart, (const char*)x, out).run();
    });
}

// Part and panel that hold a column of a layer.
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

// Pairs of neighbouring parts with the same format, which one product can cover.
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

void to_tiles(const bf16* x, int64_t stride, int64_t rows, const Layer& layer, bool transposed, void* tiles) {
    int64_t row_bytes = layer.padded_k * 16 * sizeof(bf16);
    pool::for_each(round_up(rows, BLOCK_ROWS) / 16, rows * layer.k >= MIN_PARALLEL, [&](int64_t block) {
        char* target = static_cast<char*>(tiles) + block * row_bytes;
        if (transposed) return transpose_pairs(x, stride, block * 16, rows, layer.k, (uint32_t*)target);
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

void multiply_many_rows(const std::vector<Layer>& parts, const void* plain_tiles, const void* transposed_tiles, void* out,
               int64_t rows) {
    const Layer* end = parts.data() + parts.size();
    for (const Layer* part = parts.data(); part < end;) {
        const Layer& first = *part;
        Queue queue(pairs_of(part, end), rows, first.padded_k, MIN_ROWS_PER_THREAD);
        int64_t tiles = first.tiles();
        if (first.is_quantised()) {
            if (first.wide)
                run<true, TransposedToFloatRows>(queue, tiles, 2, transposed_tiles, (float*)out);
            else
                run<true, TransposedToRows>(queue, tiles, 2, transposed_tiles, (bf16*)out);
        } else {
            if (first.wide)
                run<false, PlainToRows<float>>(queue, tiles, 2, plain_tiles, (float*)out);
            else
                run<false, PlainToRows<bf16>>(queue, tiles, 2, plain_tiles, (bf16*)out);
        }
    }
}

bool can_fuse_gate(const std::vector<Layer>& gate_up, const std::vector<Layer>& next) {
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
    const Layer& first_part = gate_up[0];
    Queue queue(gated_pairs(gate_up), rows, first_part.padded_k, MIN_ROWS_PER_THREAD_GATED);
    GatedTiles target{static_cast<char*>(out), first_part.out_stride / 2};
    if (activation == SILU) run_gated<SILU>(queue, first_part, tiles, target);
    if (activation == GELU_TANH) run_gated<GELU_TANH>(queue, first_part, tiles, target);
    if (activation == GELU) run_gated<GELU>(queue, first_part, tiles, target);
}

}  // namespace linear_layer

#endif
