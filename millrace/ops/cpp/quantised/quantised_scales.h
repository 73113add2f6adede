// Reads the scales and offsets of one tile as vectors over its 16 outputs.
#pragma once

#include <type_traits>

#include "quantised/quantised_format.h"

namespace quantised {

inline vf load_halves(const char* p) { return load(reinterpret_cast<const f16*>(p)); }

typedef uint8_t vb __attribute__((vector_size(16)));
typedef int8_t vsb __attribute__((vector_size(16)));

template <typename V>
inline vf load_bytes(const char* p) {
#if defined(__AVX512F__)
    __m128i bytes = _mm_loadu_si128((const __m128i*)p);
    bool is_signed = std::is_same_v<V, vsb>;
    return (vf)_mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#else
    V v;
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(__builtin_convertvector(v, vi), vf);
#endif
}

// Indexed by group of the tile's inputs.
struct ScaleVectors {
    vf scales[2], offsets[2];
};

// The products of float16 and 8-bit scales are exact in float32.
template <int F>
inline __attribute__((always_inline)) void read_scales(const Panel& panel, int64_t tile, ScaleVectors& out) {
    constexpr Format f = format_of(F);
    const char* halves = panel.halves + (f.super ? tile / SUPER_TILES : tile) * half_scale_bytes(f);
    vf scale = load_halves(halves), offset{};
    if (f.offset) offset = load_halves(halves + 2 * ROWS);
    if (!f.super) {
        out.scales[0] = scale;
        out.offsets[0] = offset;
        return;
    }
    const char* byte_scales = panel.byte_scales + tile * byte_scale_bytes(f);
    for (int g = 0; g < f.groups; g++) {
        vf small = f.offset ? load_bytes<vb>(byte_scales + g * ROWS) : load_bytes<vsb>(byte_scales + g * ROWS);
        out.scales[g] = scale * (f.unit == 1 ? small : small * f.unit);
        if (f.offset) out.offsets[g] = -(offset * load_bytes<vb>(byte_scales + (f.groups + g) * ROWS));
    }
}

}  // namespace quantised
