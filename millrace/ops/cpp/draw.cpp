// Drawing tokens from logits: the likeliest one, or one by temperature, top-k, min-p and top-p, in that order, at the
// place where the cumulative distribution reaches a given uniform number. Each row by itself, in one order of sums.
#include "pool.h"
#include "vec.h"

#include <algorithm>
#include <vector>

namespace {

constexpr int64_t BLOCK = 256;             // tokens whose weights are summed together
constexpr int64_t PART = 64;               // tokens that are passed over together when none of them is heavy enough
constexpr int64_t MIN_PARALLEL = 1 << 16;  // logits below which other threads are not worth involving

struct Limits {
    float temperature;  // 0 for the likeliest token
    int64_t top_k;      // 0 for all
    float top_p, min_p;
    double uniform;
};

bool any(vi mask) {
    int64_t words[8], found = 0;
    memcpy(words, &mask, sizeof words);
    for (int64_t word : words) found |= word;
    return found != 0;
}

// The first of the largest.
int64_t likeliest(const float* logits, int64_t count) {
    vf top = splat(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) top = max(load(logits + i), top);  // a NaN is passed over
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

// What one thread needs to draw from one row.
struct Bench {
    std::vector<float> scaled, weights, picked;
    std::vector<double> sums;  // of the weights of each block
    std::vector<int64_t> tokens;
};

class Draw {
  public:
    Draw(Bench& bench, const float* logits, int64_t count, const Limits& limits)
        : b(bench), count(count), limits(limits), blocks((count + BLOCK - 1) / BLOCK) {
        b.scaled.resize(blocks * BLOCK);
        b.weights.resize(blocks * BLOCK);
        b.sums.resize(blocks);
        vf inverse = splat(1.0f / limits.temperature), top = splat(-INFINITY);
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
        if (limits.top_k > 0 && limits.top_k < count) floor = kth_largest(limits.top_k);
        if (limits.min_p > 0) floor = std::max(floor, largest + logf(limits.min_p));
        double total = weigh(floor);
        if (limits.top_p < 1) {
            float least = nucleus(total);
            return in_nucleus(least);
        }
        return reach(limits.uniform * total);
    }

  private:
    Bench& b;
    int64_t count;
    const Limits& limits;
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

    // Call f(i) for every i with values[i] >= least, in order.
    template <typename F>
    static void for_heavy(const std::vector<float>& values, float least, F f) {
        for (size_t part = 0; part < values.size(); part += PART) {
            if (!any(largest_of(&values[part]) >= least)) continue;
            for (size_t i = part; i < part + PART; i++)
                if (values[i] >= least) f(i);
        }
    }

    // The k-th largest of the parts' largest is no more than the k-th largest of all, and few are above it.
    float kth_largest(int64_t k) {
        b.picked.clear();
        for (size_t i = 0; i < b.scaled.size(); i += PART) b.picked.push_back(max_lanes(largest_of(&b.scaled[i])));
        float bound = int64_t(b.picked.size()) >= k ? nth(k) : -INFINITY;
        b.picked.clear();
        for_heavy(b.scaled, bound, [&](int64_t i) { b.picked.push_back(b.scaled[i]); });
        return nth(k);
    }

    float nth(int64_t k) {
        std::nth_element(b.picked.begin(), b.picked.begin() + k - 1, b.picked.end(), std::greater<float>());
        return b.picked[k - 1];
    }

    // Each token's weight relative to the likeliest, 0 below the floor; their sum.
    double weigh(float floor) {
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

    // The weight of the last of the fewest likeliest tokens that sum to top_p of the total. Lighter tokens than an
    // equal share of what may be left out cannot be among them. The tokens that may be are kept, in order.
    float nucleus(double total) {
        constexpr int ROUNDS = 10;
        double wanted = std::max(limits.top_p * total, 1e-30), before = 0;
        float low = std::max<float>((1.0f - limits.top_p) * total / count, 1e-38f), high = 2.0f;
        for (int round = 0; round < ROUNDS; round++) {  // tokens from `high` on do not reach what is wanted
            float middle = sqrtf(low) * sqrtf(high);
            double sum = sum_from(middle);
            if (sum >= wanted) {
                low = middle;
            } else {
                high = middle;
                before = sum;
            }
        }
        b.tokens.clear();
        b.picked.clear();
        for_heavy(b.weights, low, [&](int64_t i) {
            b.tokens.push_back(i);
            if (b.weights[i] < high) b.picked.push_back(b.weights[i]);
        });
        return b.picked.empty() ? high : edge(wanted - before);
    }

    double sum_from(float least) const {
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

    // Halve the candidates until one is left: the heavier half reaches what is wanted, or is taken whole.
    float edge(double wanted) {
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

    int64_t in_nucleus(float least) {
        double total = 0, sum = 0;
        int64_t found = 0;
        for (int64_t token : b.tokens)
            if (b.weights[token] >= least) total += b.weights[token];
        for (int64_t token : b.tokens) {
            if (b.weights[token] < least) continue;
            found = token;
            sum += b.weights[token];
            if (sum > limits.uniform * total) break;
        }
        return found;
    }

    // The first token with which the sum of weights exceeds the target; the last with any weight if none does.
    int64_t reach(double target) {
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

int64_t draw(const float* logits, int64_t count, const Limits& limits) {
    if (limits.temperature <= 0) return likeliest(logits, count);
    static thread_local Bench bench;
    return Draw(bench, logits, count, limits).token();
}

}  // namespace

extern "C" {

// The number in [0, 1) that run/sampling/noise.py gives a seed and a position.
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

// tokens[i] for each row of logits [rows, vocab], whose rows follow each other.
void millrace_draw(const float* logits, int64_t rows, int64_t vocab, const float* temperature, const int64_t* top_k,
                   const float* top_p, const float* min_p, const double* uniform, int64_t* tokens) {
    pool::for_each(rows, rows * vocab >= MIN_PARALLEL, [&](int64_t row) {
        Limits limits{temperature[row], top_k[row], top_p[row], min_p[row], uniform[row]};
        tokens[row] = draw(logits + row * vocab, vocab, limits);
    });
}
}
