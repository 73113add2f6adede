// Packs the blocks of a GGUF file into panels.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3")  // vectorises the loops over bytes
#endif

#include "pool.h"
#include "quantised/quantised_format.h"

namespace quantised {
namespace {

// The 32 inputs of one output in one tile, as stored in the file.
struct Group32 {
    uint8_t integers[32];
    uint16_t scale = 0, offset = 0;              // float16
    uint8_t scales[2] = {0, 0}, offsets[2] = {0, 0};  // super formats only
};

uint16_t half_at(const uint8_t* p) { return p[0] | p[1] << 8; }

void read_nibbles(const uint8_t* p, uint8_t* out) {
    for (int j = 0; j < 16; j++) {
        out[j] = p[j] & 15;
        out[j + 16] = p[j] >> 4;
    }
}

void read_fifth_bits(const uint8_t* p, uint8_t* out) {
    for (int byte = 0; byte < 4; byte++)
        for (int bit = 0; bit < 8; bit++) out[8 * byte + bit] |= (p[byte] >> bit & 1) << 4;
}

// Eight 6-bit scales and eight 6-bit minima in twelve bytes.
void read_six_bits(const uint8_t* p, int block, Group32& out) {
    if (block < 4) {
        out.scales[0] = p[block] & 63;
        out.offsets[0] = p[block + 4] & 63;
    } else {
        out.scales[0] = (p[block + 4] & 15) | (p[block - 4] >> 6) << 4;
        out.offsets[0] = p[block + 4] >> 4 | (p[block] >> 6) << 4;
    }
}

void read_flat(int format, const uint8_t* p, Group32& out) {
    const Format& f = format_of(format);
    out.scale = half_at(p);
    if (f.offset) out.offset = half_at(p + 2);
    const uint8_t* integers = p + (f.offset ? 4 : 2);
    if (f.bits == 8) {
        memcpy(out.integers, integers, 32);
        return;
    }
    read_nibbles(integers + (f.bits == 5 ? 4 : 0), out.integers);
    if (f.bits == 5) read_fifth_bits(integers, out.integers);
}

void read_q2_k(const uint8_t* p, int block, Group32& out) {
    out.scale = half_at(p + 80);
    out.offset = half_at(p + 82);
    const uint8_t* quarters = p + 16 + block / 4 * 32;
    int shift = 2 * (block % 4);
    for (int j = 0; j < 32; j++) out.integers[j] = quarters[j] >> shift & 3;
    for (int g = 0; g < 2; g++) {
        out.scales[g] = p[2 * block + g] & 15;
        out.offsets[g] = p[2 * block + g] >> 4;
    }
}

void read_q3_k(const uint8_t* p, int block, Group32& out) {
    out.scale = half_at(p + 108);
    const uint8_t* quarters = p + 32 + block / 4 * 32;
    int shift = 2 * (block % 4);
    for (int j = 0; j < 32; j++) out.integers[j] = (quarters[j] >> shift & 3) | (p[j] >> block & 1) << 2;
    for (int g = 0; g < 2; g++) {
        int i = 2 * block + g;
        int low = p[96 + i % 8] >> 4 * (i / 8) & 15, high = p[104 + i % 4] >> 2 * (i / 4) & 3;
        out.scales[g] = (uint8_t)((low | high << 4) - 32);
    }
}

void read_q45_k(int format, const uint8_t* p, int block, Group32& out) {
    out.scale = half_at(p);
    out.offset = half_at(p + 2);
    read_six_bits(p + 4, block, out);
    const uint8_t* nibbles = p + (format == FORMAT_Q5_K ? 48 : 16) + block / 2 * 32;
    int shift = 4 * (block % 2);
    for (int j = 0; j < 32; j++) out.integers[j] = nibbles[j] >> shift & 15;
    if (format == FORMAT_Q5_K)
        for (int j = 0; j < 32; j++) out.integers[j] |= (p[16 + j] >> block & 1) << 4;
}

void read_q6_k(const uint8_t* p, int block, Group32& out) {
    out.scale = half_at(p + 208);
    int half = block / 4, quarter = block % 4;
    const uint8_t *low = p + half * 64 + quarter % 2 * 32, *upper = p + 128 + half * 32;
    int low_shift = 4 * (quarter / 2), upper_shift = 2 * quarter;
    for (int j = 0; j < 32; j++)
        out.integers[j] = (low[j] >> low_shift & 15) | (upper[j] >> upper_shift & 3) << 4;
    memcpy(out.scales, p + 192 + 2 * block, 2);
}

void read_bytes(const uint8_t* p, int block, Group32& out) {
    out.scale = half_at(p);
    memcpy(out.scales, p + 2 + 2 * block, 2);
    memcpy(out.integers, p + 18 + 32 * block, 32);
}

void read_iq4_xs(const uint8_t* p, int block, Group32& out) {
    out.scale = half_at(p);
    int low = p[4 + block / 2] >> 4 * (block % 2) & 15, high = half_at(p + 2) >> 2 * block & 3;
    out.scales[0] = (uint8_t)((low | high << 4) - 32);
    read_nibbles(p + 8 + 16 * block, out.integers);
}

void read_group(int format, const uint8_t* row, int64_t tile, Group32& out) {
    const Format& f = format_of(format);
    int block = tile % SUPER_TILES;
    const uint8_t* p = row + (f.super ? tile / SUPER_TILES : tile) * f.file_bytes;
    if (!f.super) return read_flat(format, p, out);
    if (format == FORMAT_Q2_K) return read_q2_k(p, block, out);
    if (format == FORMAT_Q3_K) return read_q3_k(p, block, out);
    if (format == FORMAT_Q6_K) return read_q6_k(p, block, out);
    if (format == FORMAT_IQ4_XS) return read_iq4_xs(p, block, out);
    if (format == FORMAT_BYTES) return read_bytes(p, block, out);
    read_q45_k(format, p, block, out);
}

template <int BITS>
void write_integers(const uint8_t* integers, int r, char* tile) {
    // In the order of the words: sequential, or for 6 bits the first and second half interleaved.
    uint8_t ordered[32];
    for (int j = 0; j < 16; j++) {
        ordered[BITS == 6 ? 2 * j : j] = integers[j];
        ordered[BITS == 6 ? 2 * j + 1 : j + 16] = integers[j + 16];
    }
    auto* low = (uint16_t*)tile + r / 4 * 32;
    int low_shift = 4 * (r % 4);
    for (int j = 0; j < 32; j++) low[j] |= (ordered[j] & 15) << low_shift;
    if (BITS == 4) return;
    auto* upper = (uint16_t*)(tile + 256) + (BITS == 5 ? 0 : r / 8 * 32);
    int upper_shift = BITS == 5 ? r : 2 * (r % 8);
    for (int j = 0; j < 32; j++) upper[j] |= (ordered[j] >> 4) << upper_shift;
}

// In dot order (int8/int8_linear.h).
void write_dot_integers(const Format& f, const uint8_t* integers, int r, char* tile) {
    auto* bytes = reinterpret_cast<uint8_t*>(tile);
    for (int j = 0; j < 32; j++) {
        int chunk = j / 4, at = 4 * r + j % 4, upper = integers[j] >> 4;
        if (f.bits == 8) {
            bytes[64 * chunk + at] = integers[j];
            continue;
        }
        bytes[chunk % 4 * 64 + at] |= (integers[j] & 15) << chunk / 4 * 4;
        if (f.bits == 5) bytes[256 + at] |= upper << chunk;
        if (f.bits == 6) bytes[256 + chunk / 4 * 64 + at] |= upper << chunk % 4 * 2;
    }
}

void write_integers(const Format& f, int order, const uint8_t* integers, int r, char* tile) {
    if (order == ORDER_DOT) return write_dot_integers(f, integers, r, tile);
    if (f.bits == 8) memcpy(tile + r * 32, integers, 32);
    if (f.bits == 6) write_integers<6>(integers, r, tile);
    if (f.bits == 5) write_integers<5>(integers, r, tile);
    if (f.bits == 4) write_integers<4>(integers, r, tile);
}

void write_scales(const Format& f, const PanelLayout& layout, const Group32& group, int64_t tile, int r, char* panel) {
    auto* halves = (uint16_t*)(panel + layout.halves + (f.super ? tile / SUPER_TILES : tile) * half_scale_bytes(f));
    halves[r] = group.scale;
    if (f.offset) halves[ROWS + r] = group.offset;
    if (!f.super) return;
    auto* byte_scales = (uint8_t*)panel + layout.byte_scales + tile * byte_scale_bytes(f);
    for (int g = 0; g < f.groups; g++) {
        byte_scales[g * ROWS + r] = group.scales[g];
        if (f.offset) byte_scales[(f.groups + g) * ROWS + r] = group.offsets[g];
    }
}

void pack_panel(int format, int order, const uint8_t* rows, int64_t row_bytes, int num_rows, int64_t k, char* panel) {
    const Format& f = format_of(format);
    PanelLayout layout(f, k);
    memset(panel, 0, layout.end);
    for (int64_t tile = 0; tile < k / TILE_K; tile++)
        for (int r = 0; r < num_rows; r++) {
            Group32 group;
            read_group(format, rows + r * row_bytes, tile, group);
            write_integers(f, order, group.integers, r, panel + tile * integer_bytes(f));
            write_scales(f, layout, group, tile, r, panel);
        }
}

}  // namespace

int64_t panel_bytes(int format, int64_t k) { return PanelLayout(format_of(format), k).end; }

}  // namespace quantised

extern "C" {

// Bytes of a packed weight of n outputs, padding included.
int64_t millrace_quantised_bytes(int format, int64_t n, int64_t k) {
    return (n + 31) / 32 * 2 * quantised::panel_bytes(format, k);
}

// `rows`: n contiguous rows of blocks, as in the file. `order`: a PartOrder.
void millrace_quantised_pack(int format, int order, const void* rows, void* packed, int64_t n, int64_t k) {
    using namespace quantised;
    const Format& f = format_of(format);
    int64_t row_bytes = k / (f.super ? TILE_K * SUPER_TILES : TILE_K) * f.file_bytes, bytes = panel_bytes(format, k);
    pool::for_each((n + 31) / 32 * 2, n * k >= 1 << 16, [&](int64_t panel) {
        int64_t first = panel * ROWS, left = n - first;
        pack_panel(format, order, (const uint8_t*)rows + first * row_bytes, row_bytes, left < 0 ? 0 : left < ROWS ? left : ROWS,
                   k, (char*)packed + panel * bytes);
    });
}
}
