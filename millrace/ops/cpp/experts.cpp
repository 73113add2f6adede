// The experts of a mixture in one call, and a linear layer for each head: many small linear layers, between which
// Python would take longer than they do.
#include "activation.h"
#include "linear/linear.h"
#include "pool.h"
#include "vec.h"

#include <vector>

namespace {

constexpr int CLAMPED = 3;  // beside the activations of activation.h
constexpr int64_t MIN_PARALLEL = 1 << 13;

struct Gate {
    int kind;
    float slope, limit;  // of CLAMPED: gate · sigmoid(slope · gate) · (up + 1), gate <= limit, |up| <= limit
};

inline vf apply(const Gate& own, vf gate, vf up) {
    if (own.kind != CLAMPED) return activate(gate, own.kind) * up;
    vf limit = splat(own.limit), kept = min(gate, limit);
    Silu silu;
    silu.begin(own.slope * kept);
    silu.advance();
    return kept * inverse(1.0f + silu.n) * (min(max(up, -limit), limit) + 1.0f);
}

template <typename T>
void gated(const T* gate_up, T* out, int64_t rows, int64_t inner, const Gate& own) {
    pool::for_each(rows, rows * inner >= MIN_PARALLEL, [&](int64_t row) {
        const T *gate = gate_up + row * 2 * inner, *up = gate + inner;
        for (int64_t i = 0; i < inner; i += LANES) {
            int n = inner - i;
            store_upto(out + row * inner + i, apply(own, load_upto(gate + i, n), load_upto(up + i, n)), n);
        }
    });
}

// Consecutive slots of each expert, in the order of tokens: `order` lists slots, `starts` has one more than experts.
void sort_slots(const int64_t* ids, int64_t slots, int64_t experts, std::vector<int64_t>& starts,
                std::vector<int64_t>& order) {
    starts.assign(experts + 1, 0);
    for (int64_t slot = 0; slot < slots; slot++) starts[ids[slot] + 1]++;
    for (int64_t expert = 0; expert < experts; expert++) starts[expert + 1] += starts[expert];
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    order.resize(slots);
    for (int64_t slot = 0; slot < slots; slot++) order[next[ids[slot]]++] = slot;
}

template <typename T>
void experts(const LinearDesc* const* gate_ups, const LinearDesc* const* downs, int64_t count, const Gate& own,
             const T* x, const int64_t* ids, const float* weights, T* out, int64_t tokens, int64_t top_k) {
    int64_t hidden = gate_ups[0]->k, inner = downs[0]->k, slots = tokens * top_k, most = 0;
    std::vector<int64_t> starts, order;
    sort_slots(ids, slots, count, starts, order);
    for (int64_t expert = 0; expert < count; expert++)
        if (starts[expert + 1] - starts[expert] > most) most = starts[expert + 1] - starts[expert];
    std::vector<T> inputs(most * hidden), both(most * 2 * inner), gates(most * inner), results(most * hidden);
    std::vector<T> outputs(slots * hidden);
    for (int64_t expert = 0; expert < count; expert++) {
        int64_t first = starts[expert], rows = starts[expert + 1] - first;
        if (!rows) continue;
        for (int64_t row = 0; row < rows; row++)
            memcpy(&inputs[row * hidden], x + order[first + row] / top_k * hidden, hidden * sizeof(T));
        linear(*gate_ups[expert], inputs.data(), hidden, both.data(), rows);
        gated(both.data(), gates.data(), rows, inner, own);
        linear(*downs[expert], gates.data(), inner, results.data(), rows);
        for (int64_t row = 0; row < rows; row++)
            memcpy(&outputs[order[first + row] * hidden], &results[row * hidden], hidden * sizeof(T));
    }
    pool::for_each(tokens, slots * hidden >= MIN_PARALLEL, [&](int64_t token) {
        for (int64_t i = 0; i < hidden; i += LANES) {
            int n = hidden - i;
            vf sum = {};
            for (int64_t slot = token * top_k; slot < (token + 1) * top_k; slot++)
                sum += load_upto(&outputs[slot * hidden + i], n) * weights[slot];
            store_upto(out + token * hidden + i, sum, n);
        }
    });
}

}  // namespace

extern "C" {

// out [tokens, hidden]: the weighted sum of the experts `ids` [tokens, top_k] of each token, added in their order.
void millrace_experts(int dtype, const LinearDesc* const* gate_ups, const LinearDesc* const* downs, int64_t count,
                      int kind, float slope, float limit, const void* x, const int64_t* ids, const float* weights,
                      void* out, int64_t tokens, int64_t top_k) {
    Gate own{kind, slope, limit};
    if (dtype == BF16)
        experts(gate_ups, downs, count, own, (const bf16*)x, ids, weights, (bf16*)out, tokens, top_k);
    else
        experts(gate_ups, downs, count, own, (const float*)x, ids, weights, (float*)out, tokens, top_k);
}

// out [rows, heads, n] from x [rows, heads, k]: each head by its own layer.
void millrace_per_head(const LinearDesc* const* layers, int64_t heads, const void* x, void* out, int64_t rows) {
    int64_t item = layers[0]->dtype == BF16 ? 2 : 4, n = layers[0]->n * item, k = layers[0]->k;
    std::vector<char> own(rows > 1 ? rows * n : 0);
    for (int64_t head = 0; head < heads; head++) {
        auto* target = static_cast<char*>(out) + head * n;
        void* made = rows > 1 ? own.data() : target;
        linear(*layers[head], static_cast<const char*>(x) + head * k * item, heads * k, made, rows);
        for (int64_t row = 0; rows > 1 && row < rows; row++) memcpy(target + row * heads * n, &own[row * n], n);
    }
}
}
