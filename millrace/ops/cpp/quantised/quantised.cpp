// Unpacks panels: whole tiles for matrix products, single rows for embeddings.
#include "quantised/quantised.h"

#include <utility>

#include "quantised/quantised_exact.h"
#include "transpose.h"

namespace quantised {
namespace {

// --- scales ---

template <int F>
inline void read_scales(const Panel& panel, int64_t tile, Scales& out) {
    constexpr Format f = format_of(F);
    ScaleVectors read;
    read_scales<F>(panel, tile, read);
    for (int g = 0; g < f.groups; g++) {
        store(out.scales[g], read.scales[g]);
        if (f.offset) store(out.offsets[g], read.offsets[g]);
    }
}

// --- integers, in portable vectors ---

template <int F>
inline vf level_floats() {
    return load_bytes<vsb>((const char*)levels_of(packing_of(format_of(F))));
}

// Inputs `half * 16` to `half * 16 + 15` of output r.
template <int F>
inline vf integers(const char* tile, int r, int half) {
    constexpr Format f = format_of(F);
    if (f.bits == 8) return load_bytes<vsb>(tile + r * 32 + half * 16);
    vu q;
    if (f.bits == 6) {
        vu low, high;
        memcpy(&low, tile + r / 4 * 64, sizeof low);
        memcpy(&high, tile + 256 + r / 8 * 64, sizeof high);
        q = (low >> (16 * half + 4 * (r % 4)) & 15) | (high >> (16 * half + 2 * (r % 8)) & 3) << 4;
    } else {
        vh low, fifth;
        memcpy(&low, tile + r / 4 * 64 + half * 32, sizeof low);
        q = __builtin_convertvector(low, vu) >> 4 * (r % 4) & 15;
        if (f.levels) return __builtin_shuffle(level_floats<F>(), (vi)q);
        if (f.bits == 5) {
            memcpy(&fifth, tile + 256 + half * 32, sizeof fifth);
            q |= (__builtin_convertvector(fifth, vu) >> r & 1) << 4;
        }
    }
    return __builtin_convertvector((vi)q - f.zero, vf);
}

template <int F>
inline vf numbers(const char* tile, const Scales& scales, int r, int half) {
    constexpr Format f = format_of(F);
    int group = f.groups == 2 ? half : 0;
    vf value = integers<F>(tile, r, half) * scales.scales[group][r];
    return f.offset ? value + scales.offsets[group][r] : value;
}

template <int F, typename T>
inline void unpack_rows_portable(const char* tile, const Scales& scales, int first, int last, T* out) {
    for (int r = first; r < last; r++)
        for (int half = 0; half < 2; half++) store(out + r * TILE_K + half * 16, numbers<F>(tile, scales, r, half));
}

// --- the same in AVX-512 ---
//
// In every format the product of integer and scale is exact in float32, so a fused multiply-add rounds like the two
// operations.

#if defined(__AVX512F__)

// Table of the values of integers `first` to `first + 15` in a group.
template <int F>
inline __m512 decode_table(const Scales& scales, int group, int r, int first = 0) {
    constexpr Format f = format_of(F);
    const __m512 count = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512 levels = f.levels ? (__m512)level_floats<F>() : _mm512_add_ps(count, _mm512_set1_ps(first - f.zero));
    __m512 scale = _mm512_set1_ps(scales.scales[group][r]);
    if (!f.offset) return _mm512_mul_ps(levels, scale);
    return _mm512_fmadd_ps(levels, scale, _mm512_set1_ps(scales.offsets[group][r]));
}

// Four bits as float32: looked up in a table of sixteen values.
template <int F>
inline void float_tile_4(const char* tile, const Scales& scales, float* out) {
    for (int r = 0; r < ROWS; r++)
        for (int half = 0; half < 2; half++) {
            __m512 table = decode_table<F>(scales, format_of(F).groups == 2 ? half : 0, r);
            __m256i words = _mm256_loadu_si256((const __m256i*)(tile + r / 4 * 64 + half * 32));
            __m512i indices = _mm512_srl_epi32(_mm512_cvtepu16_epi32(words), _mm_cvtsi32_si128(4 * (r % 4)));
            _mm512_storeu_ps(out + r * TILE_K + half * 16, _mm512_permutexvar_ps(indices, table));
        }
}

#endif

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAS_FAST_TILES 1

inline __m512i both(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

// mask ? a : b, bit by bit
inline __m512i merge(__m512i mask, __m512i a, __m512i b) { return _mm512_ternarylogic_epi32(a, mask, b, 0xe2); }

template <int R>
inline __m512i four_bits(const char* tile) {
    return shift_words_right<4 * (R % 4)>(_mm512_loadu_si512(tile + R / 4 * 64));
}

// Four bits: looked up in tables of sixteen values, for two outputs or two groups at once.
template <int F, int R>
inline void two_rows_4(const char* tile, const Scales& scales, bf16* out) {
    const __m512i mask = _mm512_set1_epi16(15);
    if constexpr (format_of(F).groups == 1) {
        __m512i table = both(decode_table<F>(scales, 0, R), decode_table<F>(scales, 0, R + 1));
        __m512i left = _mm512_and_si512(four_bits<R>(tile), mask);
        __m512i right = _mm512_ternarylogic_epi32(four_bits<R + 1>(tile), mask, _mm512_set1_epi16(16), 0xea);
        _mm512_storeu_si512(out + R * TILE_K, _mm512_permutexvar_epi16(left, table));
        _mm512_storeu_si512(out + (R + 1) * TILE_K, _mm512_permutexvar_epi16(right, table));
    } else {
        const __m512i second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
        __m512i table = both(decode_table<F>(scales, 0, R), decode_table<F>(scales, 1, R));
        __m512i index = _mm512_ternarylogic_epi32(four_bits<R>(tile), mask, second, 0xea);
        _mm512_storeu_si512(out + R * TILE_K, _mm512_permutexvar_epi16(index, table));
        table = both(decode_table<F>(scales, 0, R + 1), decode_table<F>(scales, 1, R + 1));
        index = _mm512_ternarylogic_epi32(four_bits<R + 1>(tile), mask, second, 0xea);
        _mm512_storeu_si512(out + (R + 1) * TILE_K, _mm512_permutexvar_epi16(index, table));
    }
}

// Five bits: a table of 32 values for one output.
template <int F, int R>
inline void row_5(const char* tile, const Scales& scales, bf16* out) {
    __m512i table = both(decode_table<F>(scales, 0, R), decode_table<F>(scales, 0, R, 16));
    __m512i fifth = shift_words_right<R - 4>(_mm512_loadu_si512(tile + 256));
    __m512i index = merge(_mm512_set1_epi16(15), four_bits<R>(tile), fifth);
    _mm512_storeu_si512(out + R * TILE_K, _mm512_permutexvar_epi16(index, table));
}

// Six bits: written into the mantissa under the exponent of 64 they are 64 + q. One fused operation with the scale and
// the offset -(64 + zero) * scale then gives the exact product. (A zero may lose its sign, which changes no sum.)
constexpr float BASE = 64;

template <int F, int R>
inline void row_6(const char* tile, const Scales& scales, bf16* out) {
    const __m512i under = (__m512i)_mm512_set1_ps(BASE), mask = _mm512_set1_epi32(63 << 17);
    __m512i low = shift_words_right<4 * (R % 4) - 1>(_mm512_loadu_si512(tile + R / 4 * 64));
    __m512i upper = shift_words_right<2 * (R % 8) - 5>(_mm512_loadu_si512(tile + 256 + R / 8 * 64));
    __m512i words = merge(_mm512_set1_epi16(15 << 1), low, upper);
    __m512i first = _mm512_ternarylogic_epi32(_mm512_slli_epi32(words, 16), mask, under, 0xea);
    __m512i second = _mm512_ternarylogic_epi32(words, mask, under, 0xea);
    auto product = [&](__m512i integers, int group) {
        __m512 offset = _mm512_set1_ps(scales.offsets[group][R]);
        return _mm512_fmadd_ps((__m512)integers, _mm512_set1_ps(scales.scales[group][R]), offset);
    };
    _mm512_storeu_si512(out + R * TILE_K, both(product(first, 0), product(second, 1)));
}

// Eight bits: converted one by one.
template <int F, int R>
inline void row_8(const char* tile, const Scales& scales, bf16* out) {
    auto product = [&](int half, int group) {
        __m512 integers = (__m512)load_bytes<vsb>(tile + R * 32 + half * 16);
        return _mm512_mul_ps(integers, _mm512_set1_ps(scales.scales[group][R]));
    };
    __m512 first = product(0, 0), second = product(1, format_of(F).groups - 1);
    _mm512_storeu_si512(out + R * TILE_K, both(first, second));
}

template <int F, int R>
inline void two_rows(const char* tile, const Scales& scales, bf16* out) {
    constexpr int bits = format_of(F).bits;
    if constexpr (bits == 4) two_rows_4<F, R>(tile, scales, out);
    if constexpr (bits == 5) row_5<F, R>(tile, scales, out), row_5<F, R + 1>(tile, scales, out);
    if constexpr (bits == 6) row_6<F, R>(tile, scales, out), row_6<F, R + 1>(tile, scales, out);
    if constexpr (bits == 8) row_8<F, R>(tile, scales, out), row_8<F, R + 1>(tile, scales, out);
}

template <int F, int... PAIR>
inline void fast_tile(const char* tile, const Scales& scales, bf16* out, std::integer_sequence<int, PAIR...>) {
    (two_rows<F, 2 * PAIR>(tile, scales, out), ...);
}

#endif

// Scales in the form that the code for a row reads.
template <int F, typename T>
inline void prepare_scales(const Panel& panel, int64_t tile, Scales& scales) {
    read_scales<F>(panel, tile, scales);
#if HAS_FAST_TILES
    if constexpr (format_of(F).bits == 6)
        for (int g = 0; g < 2; g++) store(scales.offsets[g], load(scales.scales[g]) * -(BASE + format_of(F).zero));
#endif
    // Force scales to be read from memory, one broadcast each: cheaper than the shuffles the compiler would use.
    asm volatile("" : "+m"(scales));
}

template <int F, typename T>
__attribute__((noinline)) void unpack_tile(const Panel& panel, int64_t tile, T* out) {
    Scales scales;
    prepare_scales<F, T>(panel, tile, scales);
    const char* integers = panel.integers + tile * integer_bytes(format_of(F));
#if HAS_FAST_TILES
    if constexpr (sizeof(T) == 2) return fast_tile<F>(integers, scales, out, std::make_integer_sequence<int, ROWS / 2>{});
#endif
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4 && format_of(F).bits == 4) return float_tile_4<F>(integers, scales, out);
#endif
    unpack_rows_portable<F>(integers, scales, 0, ROWS, out);
}

template <int F>
void unpack_pair(const Panel& left, const Panel& right, int64_t tile, bf16* out) {
    unpack_tile<F>(left, tile, out);
    unpack_tile<F>(right, tile, out + TILE_ITEMS);
}

// Into a plain panel of linear.cpp: units of 32 bits, [unit][16 outputs].
template <int F, typename T>
void unpack_panel(const Panel& panel, int64_t k, uint32_t* out) {
    constexpr int64_t units = TILE_K * sizeof(T) / 4;
    alignas(64) T rows[TILE_ITEMS];
    for (int64_t tile = 0; tile < k / TILE_K; tile++, out += units * ROWS) {
        unpack_tile<F>(panel, tile, rows);
        for (int64_t unit = 0; unit < units; unit += 16)
            transpose16((const uint32_t*)rows + unit, units, out + unit * ROWS, ROWS);
    }
}

template <int F, typename T>
void unpack_row(const Panel& panel, int64_t k, int r, T* out) {
    for (int64_t tile = 0; tile < k / TILE_K; tile++) {
        Scales scales;
        read_scales<F>(panel, tile, scales);
        const char* integers = panel.integers + tile * integer_bytes(format_of(F));
        for (int half = 0; half < 2; half++)
            store(out + tile * TILE_K + half * 16, numbers<F>(integers, scales, r, half));
    }
}

// --- dispatch by format ---

struct FormatFunctions {
    TilePair pair;
    void (*panel_f32)(const Panel&, int64_t, uint32_t*);
    void (*panel_bf16)(const Panel&, int64_t, uint32_t*);
    void (*row_f32)(const Panel&, int64_t, int, float*);
    void (*row_bf16)(const Panel&, int64_t, int, bf16*);
};

template <int F>
constexpr FormatFunctions functions() {
    return {unpack_pair<F>, unpack_panel<F, float>, unpack_panel<F, bf16>, unpack_row<F, float>, unpack_row<F, bf16>};
}

template <int... I>
const FormatFunctions& functions_of(int format, std::integer_sequence<int, I...>) {
    static constexpr FormatFunctions all[] = {functions<FIRST_FORMAT + I>()...};
    return all[format - FIRST_FORMAT];
}

const FormatFunctions& functions_of(int format) {
    return functions_of(format, std::make_integer_sequence<int, NUM_FORMATS>{});
}

}  // namespace

Panel panel_at(int format, const void* packed, int64_t k, int64_t panel) {
    PanelLayout layout(format_of(format), k);
    const char* start = (const char*)packed + panel * layout.end;
    return {start, start + layout.halves, start + layout.byte_scales};
}

TilePair tile_pair(int format) { return functions_of(format).pair; }

void unpack_panels(int format, int dtype, const void* packed, int64_t k, int64_t first, int64_t last, void* out) {
    auto unpack = dtype == F32 ? functions_of(format).panel_f32 : functions_of(format).panel_bf16;
    int64_t words = ROWS * k * (dtype == F32 ? 4 : 2) / 4;
    for (int64_t panel = first; panel < last; panel++)
        unpack(panel_at(format, packed, k, panel), k, (uint32_t*)out + (panel - first) * words);
}

void unpack_row(int format, int dtype, const void* packed, int64_t k, int64_t row, void* out) {
    Panel panel = panel_at(format, packed, k, row / ROWS);
    if (dtype == F32)
        functions_of(format).row_f32(panel, k, row % ROWS, (float*)out);
    else
        functions_of(format).row_bf16(panel, k, row % ROWS, (bf16*)out);
}

}  // namespace quantised
