// Activation functions on vectors, and rounding to the dtype in which results are stored.
#pragma once

#include "vec.h"

// The value after storing it in the model's dtype.
inline vf rounded(vf v, float) { return v; }
inline vf rounded(vf v, bf16) { return widen(to_bf16(v)); }

enum { SILU = 0, GELU_TANH = 1, GELU = 2 };

// 1 / x to about one unit in the last place, for x >= 1.
inline vf inverse(vf x) {
#if defined(__AVX512F__)
    vf near = (vf)_mm512_rcp14_ps((__m512)x);
    return fma(near, fma(-x, near, splat(1.0f)), near);
#else
    return 1.0f / x;
#endif
}

// x / (1 + e^-x) in three dependent steps, between which other work can be scheduled.
struct Silu {
    vf x, n, r;

    void begin(vf input) {
        x = input;
        split_exp(-x, n, r);
    }
    // Powers below e^-87 need not become 0 here: they vanish when added to 1.
    void advance() { n = times_power_of_two(exp_of_remainder(r), n); }
    vf end() const { return x * inverse(1.0f + n); }
};

// 1 - erf(x) for x >= 0, within 1.5e-7 (Abramowitz and Stegun, 7.1.26).
inline vf upper_error(vf x) {
    vf t = inverse(fma(x, 0.3275911f, splat(1.0f)));
    vf y = fma(t, 1.061405429f, splat(-1.453152027f));
    y = fma(y, t, splat(1.421413741f));
    y = fma(y, t, splat(-0.284496736f));
    y = fma(y, t, splat(0.254829592f));
    return y * t * exp(-x * x);
}

// x times the normal distribution up to x.
inline vf gelu(vf x) {
    vf size = max(x, -x);
    vf beyond = 0.5f * x * upper_error(0.70710678f * size);
    return x < 0.0f ? beyond : x - beyond;
}

inline vf activate(vf x, int kind) {
    if (kind == SILU) {
        Silu silu;
        silu.begin(x);
        silu.advance();
        return silu.end();
    }
    if (kind == GELU_TANH) return 0.5f * x * (1.0f + tanh(0.79788456f * (x + 0.044715f * x * x * x)));
    return gelu(x);
}
