// Draws tokens from logits: greedily, or with temperature, top-k, min-p and top-p, applied in that order. A given uniform
// number selects the position in the cumulative distribution. Rows are independent, with a fixed order of summation.
// A mask excludes tokens before that.
#include "pool.h"
#include "vec.h"

#include <algorithm>
#include <vector>

namespace {

constexpr int64_t BLOCK = 256;             // tokens whose weights are summed together
constexpr int64_t PART = 64;               // tokens that are skipped together if no weight is large enough
constexpr int64_t MIN_PARALLEL = 1 << 16;  // minimum number of logits for which other threads are used

struct Sampling {
    float temperature;  // 0: greedy
    int64_t top_k;      // 0: all
    float top_p, min_p;
    double uniform;
};

bool any(vi mask) {
    int64_t words[8], found = 0;
    memcpy(words, &mask, sizeof words);
    for (int64_t word : words) found |= word;
    return found != 0;
}

// Index of the first largest logit.
int64_t argmax(const float* logits, int64_t count) {
    vf top = splat(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) top = max(load(logits + i), top);  // ignores NaN
    float largest = max_lanes(top);
    for (int64_t rest = i; rest < count; rest++) largest = logits[rest] > largest ? logits[rest] : largest;
    for (i = 0; i + LANES <= count; i += LANES) {
        vi same = load(logits + i) == largest;
        if (!any(same)) continue;
        for (int lane = 0; lane < LANES; lane++)
            if (same[lane]) return i + lane;
    }
    for (; i < count; i++)
        if (logits[i] == largest) return i;
    return 0;
}

// Buffers of one thread for drawing from one row.
struct Scratch {
    std::vector<float> scaled, weights, picked;
    std::vector<double> sums;  // sum of the weights of each block
    std::vector<int64_t> tokens;
};

class Draw {
  public:
    Draw(Scratch& scratch, const float* logits, int64_t count, const Sampling& sampling)
        : b(scratch), count(count), sampling(sampling), blocks((count + BLOCK - 1) / BLOCK) {
        b.scaled.resize(blocks * BLOCK);
        b.weights.resize(blocks * BLOCK);
        b.sums.resize(blocks);
        vf inverse = splat(1.0f / sampling.temperature), top = splat(-INFINITY);
        for (int64_t i = 0; i < blocks * BLOCK; i += LANES) {
            int left = std::clamp<int64_t>(count - i, 0, LANES);
            vf x = left == LANES ? load(logits + i) * inverse : padded(logits + i, left) * inverse;
            x = x == x ? x : splat(-INFINITY);
            store(&b.scaled[i], x);
            top = max(top, x);
        }
        largest = max_lanes(top);
    }

    int64_t token() {
        float floor = -INFINITY;
        if (sampling.top_k > 0 && sampling.top_k < count) floor = kth_largest(sampling.top_k);
        if (sampling.min_p > 0) floor = std::max(floor, largest + logf(sampling.min_p));
        double total = compute_weights(floor);
        if (sampling.top_p < 1) {
            float least = nucleus_threshold(total);
            return draw_from_nucleus(least);
        }
        return find_at(sampling.uniform * total);
    }

  private:
    Scratch& b;
    int64_t count;
    const Sampling& sampling;
    int64_t blocks;
    float largest;

    static vf padded(const float* logits, int left) {
        vf x = splat(-INFINITY);
        for (int lane = 0; lane < left; lane++) x[lane] = logits[lane];
        return x;
    }

    static vf largest_of(const float* part) {
        vf top = load(part);
        for (int64_t i = LANES; i < PART; i += LANES) top = max(top, load(part + i));
        return top;
    }

    // Calls f(i) for every i with values[i] >= least, in order.
    template <typename F>
    static void for_each_from(const std::vector<float>& values, float least, F f) {
        for (size_t part = 0; part < values.size(); part += PART) {
            if (!any(largest_of(&values[part]) >= least)) continue;
            for (size_t i = part; i < part + PART; i++)
                if (values[i] >= least) f(i);
        }
    }

    // The k-th largest of the maxima of all parts is a lower bound of the k-th largest value; few values are above it.
    float kth_largest(int64_t k) {
        b.picked.clear();
        for (size_t i = 0; i < b.scaled.size(); i += PART) b.picked.push_back(max_lanes(largest_of(&b.scaled[i])));
        float bound = int64_t(b.picked.size()) >= k ? nth_largest(k) : -INFINITY;
        b.picked.clear();
        for_each_from(b.scaled, bound, [&](int64_t i) { b.picked.push_back(b.scaled[i]); });
        return nth_largest(k);
    }

    float nth_largest(int64_t k) {
        std::nth_element(b.picked.begin(), b.picked.begin() + k - 1, b.picked.end(), std::greater<float>());
        return b.picked[k - 1];
    }

    // Computes each token's weight relative to the likeliest, 0 below `floor`. Returns the sum of the weights.
    double compute_weights(float floor) {
        float base = largest == -INFINITY ? 0.0f : largest;
        double total = 0;
        for (int64_t block = 0; block < blocks; block++) {
            vf sum = {};
            for (int64_t i = block * BLOCK; i < (block + 1) * BLOCK; i += LANES) {
                vf x = load(&b.scaled[i]);
                vf weight = x >= floor ? exp(x - base) : vf{};
                store(&b.weights[i], weight);
                sum += weight;
            }
            b.sums[block] = sum_lanes(sum);
            total += b.sums[block];
        }
        return total;
    }

    // Smallest weight in the nucleus: the fewest likeliest tokens whose weights sum to top_p of the total. A token with
    // less than an equal share of the remaining 1 - top_p cannot be in it. Stores the candidates, in order.
    float nucleus_threshold(double total) {
        constexpr int ROUNDS = 10;
        double wanted = std::max(sampling.top_p * total, 1e-30), before = 0;
        float low = std::max<float>((1.0f - sampling.top_p) * total / count, 1e-38f), high = 2.0f;
        for (int round = 0; round < ROUNDS; round++) {  // weights from `high` on sum to less than `wanted`
            float middle = sqrtf(low) * sqrtf(high);
            double sum = sum_of_weights_from(middle);
            if (sum >= wanted) {
                low = middle;
            } else {
                high = middle;
                before = sum;
            }
        }
        b.tokens.clear();
        b.picked.clear();
        for_each_from(b.weights, low, [&](int64_t i) {
            b.tokens.push_back(i);
            if (b.weights[i] < high) b.picked.push_back(b.weights[i]);
        });
        return b.picked.empty() ? high : threshold(wanted - before);
    }

    double sum_of_weights_from(float least) const {
        double total = 0;
        for (int64_t block = 0; block < blocks; block++) {
            if (b.sums[block] < least) continue;
            vf sum = {};
            for (int64_t i = block * BLOCK; i < (block + 1) * BLOCK; i += LANES) {
                vf weight = load(&b.weights[i]);
                sum += weight >= least ? weight : vf{};
            }
            total += sum_lanes(sum);
        }
        return total;
    }

    // Halves the candidates until one is left: if the larger half reaches `wanted` continue in it, else in the other.
    float threshold(double wanted) {
        auto first = b.picked.begin(), last = b.picked.end();
        while (last - first > 1) {
            auto middle = first + (last - first) / 2;
            std::nth_element(first, middle, last, std::greater<float>());
            double half = 0;
            for (auto at = first; at != middle; ++at) half += *at;
            if (half >= wanted) {
                last = middle;
            } else {
                wanted -= half;
                first = middle;
            }
        }
        return *first;
    }

    int64_t draw_from_nucleus(float least) {
        double total = 0, sum = 0;
        int64_t found = 0;
        for (int64_t token : b.tokens)
            if (b.weights[token] >= least) total += b.weights[token];
        for (int64_t token : b.tokens) {
            if (b.weights[token] < least) continue;
            found = token;
            sum += b.weights[token];
            if (sum > sampling.uniform * total) break;
        }
        return found;
    }

    // The first token at which the cumulative weight exceeds the target, or else the last one with a weight.
    int64_t find_at(double target) {
        double sum = 0;
        int64_t found = 0;
        for (int64_t block = 0; block < blocks; block++) {
            bool is_last = block + 1 == blocks;
            if (sum + b.sums[block] <= target && !is_last) {
                sum += b.sums[block];
                continue;
            }
            double inside = sum;
            for (int64_t i = block * BLOCK; i < std::min(count, (block + 1) * BLOCK); i++) {
                if (b.weights[i] == 0) continue;
                found = i;
                inside += b.weights[i];
                if (inside > target) return i;
            }
            sum += b.sums[block];
        }
        return found;
    }
};

constexpr int64_t WORD = 32;  // tokens per word of a mask

// Sets the logits of tokens whose bit is 0 to -inf. Words with all bits set are skipped.
void mask(float* logits, int64_t count, const uint32_t* bits) {
    const vu lane = {1 << 0, 1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                     1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
    for (int64_t first = 0; first < count; first += WORD, bits++) {
        if (*bits == UINT32_MAX) continue;
        for (int half = 0; half < WORD / LANES; half++) {
            int64_t from = first + half * LANES;
            if (from >= count) break;
            vi allowed = (lane & (*bits >> half * LANES)) != 0;
            vf x = load_upto(logits + from, count - from);
            store_upto(logits + from, allowed ? x : splat(-INFINITY), count - from);
        }
    }
}

int64_t draw(const float* logits, int64_t count, const Sampling& sampling) {
    if (sampling.temperature <= 0) return argmax(logits, count);
    static thread_local Scratch scratch;
    return Draw(scratch, logits, count, sampling).token();
}

}  // namespace

extern "C" {

// The same number in [0, 1) for a seed and position as in run/sampling/noise.py.
double millrace_uniform(uint64_t seed, uint64_t position) {
    constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u, MIX_1 = 0xBF58476D1CE4E5B9u, MIX_2 = 0x94D049BB133111EBu;
    auto mix = [](uint64_t x) {
        x = (x ^ (x >> 30)) * MIX_1;
        x = (x ^ (x >> 27)) * MIX_2;
        return x ^ (x >> 31);
    };
    uint64_t state = mix(mix(seed + GOLDEN) ^ (position * GOLDEN + MIX_1));
    return double(state >> 11) * 0x1p-53;
}

// Masks row index[i] of the contiguous logits [rows, vocab] with bits[i], of ceil(vocab / 32) words, for `count` rows.
void millrace_mask(float* logits, int64_t vocab, const int64_t* index, const uint32_t* bits, int64_t count) {
    int64_t words = (vocab + WORD - 1) / WORD;
    pool::for_each(count, count * vocab >= MIN_PARALLEL,
                   [&](int64_t i) { mask(logits + index[i] * vocab, vocab, bits + i * words); });
}

// Draws tokens[i] from row i of the contiguous logits [rows, vocab].
void millrace_draw(const float* logits, int64_t rows, int64_t vocab, const float* temperature, const int64_t* top_k,
                   const float* top_p, const float* min_p, const double* uniform, int64_t* tokens) {
    pool::for_each(rows, rows * vocab >= MIN_PARALLEL, [&](int64_t row) {
        Sampling sampling{temperature[row], top_k[row], top_p[row], min_p[row], uniform[row]};
        tokens[row] = draw(logits + row * vocab, vocab, sampling);
    });
}
}
