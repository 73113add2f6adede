// The causal convolution and the linear recurrence of layers with a recurrent state (ops/recurrent). A row's tokens are
// computed one after the other, so results do not depend on how a prompt is cut into chunks; rows, heads and channels
// run in parallel. The state after n tokens is at place n % places.
#include <algorithm>
#include <vector>

#include "pool.h"
#include "vec.h"

namespace {

constexpr int64_t CHANNELS_PER_PIECE = 64;
constexpr int64_t MIN_PARALLEL = 1 << 13;

struct Rows {
    const int32_t* query_starts;
    const int32_t* starts;
    const int32_t* table_rows;
};

inline float silu(float x) { return x / (1.0f + std::exp(-x)); }

inline float as_float(float x) { return x; }
inline float as_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
inline void assign(float& to, float x) { to = x; }
inline void assign(bf16& to, float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    to.bits = x == x ? uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : uint16_t(0x7fc0);
}

template <typename T>
void conv(const T* x, const float* weight, const float* bias, T* states, T* out, Rows rows, int64_t num_rows,
          int64_t channels, int64_t width, int64_t places, bool has_silu) {
    int64_t before = width - 1, pieces = (channels + CHANNELS_PER_PIECE - 1) / CHANNELS_PER_PIECE;
    int64_t total = rows.query_starts[num_rows] * channels;
    pool::for_each(num_rows * pieces, total >= MIN_PARALLEL, [&](int64_t task) {
        int64_t row = task / pieces, first = rows.query_starts[row], count = rows.query_starts[row + 1] - first;
        if (count <= 0) return;
        int64_t start = rows.starts[row], channel = task % pieces * CHANNELS_PER_PIECE;
        int64_t last = std::min(channel + CHANNELS_PER_PIECE, channels);
        T* own = states + int64_t(rows.table_rows[row]) * places * channels * before;
        std::vector<T> inputs(before + count);
        for (; channel < last; channel++) {
            for (int64_t i = 0; i < before; i++) {
                if (start) inputs[i] = own[(start % places * channels + channel) * before + i];
                else assign(inputs[i], 0.0f);
            }
            for (int64_t i = 0; i < count; i++) inputs[before + i] = x[(first + i) * channels + channel];
            for (int64_t i = 0; i < count; i++) {
                float sum = 0.0f;
                for (int64_t j = 0; j < width; j++) sum += as_float(inputs[i + j]) * weight[channel * width + j];
                float total = bias ? sum + bias[channel] : sum;
                assign(out[(first + i) * channels + channel], has_silu ? silu(total) : total);
            }
            for (int64_t i = std::max(int64_t(0), count - places) + 1; i <= count; i++) {
                T* kept = own + ((start + i) % places * channels + channel) * before;
                for (int64_t j = 0; j < before; j++) kept[j] = inputs[i + j];
            }
        }
    });
}

// to[0:n] += a * x[0:n], or the same of a decayed `to`.
inline void add_scaled(float* to, float a, const float* x, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(to + i, load(to + i) + splat(a) * load(x + i));
    for (; i < n; i++) to[i] += a * x[i];
}

inline void scale(float* to, float a, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(to + i, splat(a) * load(to + i));
    for (; i < n; i++) to[i] *= a;
}

}  // namespace

extern "C" {

void millrace_causal_conv(int dtype, const void* x, const float* weight, const float* bias, void* states, void* out,
                          const int32_t* query_starts, const int32_t* starts, const int32_t* table_rows,
                          int64_t num_rows, int64_t channels, int64_t width, int64_t places, int64_t has_silu) {
    Rows rows{query_starts, starts, table_rows};
    if (dtype)
        conv((const bf16*)x, weight, bias, (bf16*)states, (bf16*)out, rows, num_rows, channels, width, places,
             has_silu);
    else
        conv((const float*)x, weight, bias, (float*)states, (float*)out, rows, num_rows, channels, width, places,
             has_silu);
}

void millrace_recurrence(const float* q, const float* k, const float* v, const float* decay, const float* beta,
                         float* states, float* out, const int32_t* query_starts, const int32_t* starts,
                         const int32_t* table_rows, int64_t num_rows, int64_t groups, int64_t heads, int64_t keys,
                         int64_t values, int64_t places) {
    int64_t size = keys * values, total = query_starts[num_rows] * heads * size;
    pool::for_each(num_rows * heads, total >= MIN_PARALLEL, [&](int64_t task) {
        int64_t row = task / heads, head = task % heads, group = head / (heads / groups);
        int64_t first = query_starts[row], count = query_starts[row + 1] - first, start = starts[row];
        if (count <= 0) return;
        float* own = states + int64_t(table_rows[row]) * places * heads * size;
        auto place = [&](int64_t tokens) { return own + (tokens % places * heads + head) * size; };
        std::vector<float> state(size, 0.0f), taken(values);
        if (start) memcpy(state.data(), place(start), size * sizeof(float));
        for (int64_t i = 0; i < count; i++) {
            int64_t at = first + i;
            const float *query = q + (at * groups + group) * keys, *key = k + (at * groups + group) * keys;
            const float* value = v + (at * heads + head) * values;
            float* result = out + (at * heads + head) * values;
            scale(state.data(), decay[at * heads + head], size);
            if (beta) {
                std::fill(taken.begin(), taken.end(), 0.0f);
                for (int64_t j = 0; j < keys; j++) add_scaled(taken.data(), key[j], &state[j * values], values);
                for (int64_t j = 0; j < values; j++) taken[j] = beta[at * heads + head] * (value[j] - taken[j]);
            } else {
                memcpy(taken.data(), value, values * sizeof(float));
            }
            std::fill(result, result + values, 0.0f);
            for (int64_t j = 0; j < keys; j++) {
                add_scaled(&state[j * values], key[j], taken.data(), values);
                add_scaled(result, query[j], &state[j * values], values);
            }
            if (i >= count - places) memcpy(place(start + i + 1), state.data(), size * sizeof(float));
        }
    });
}
}
