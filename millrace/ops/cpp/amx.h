// The AMX matrix unit: 8 tiles of 16 rows of 64 bytes, one instruction for 16 x 16 x 32 bfloat16 products.
#pragma once

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__linux__)
#define HAS_AMX 1

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

// The system grants the unit's state to a process once it asks.
inline bool use_amx() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    static const bool granted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return granted;
}

struct TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {};
    uint8_t rows[16] = {};

    TileConfig() {
        for (int tile = 0; tile < 8; tile++) {
            bytes_per_row[tile] = 64;
            rows[tile] = 16;
        }
    }
};

// The whole structure is named as an operand: the compiler's own function names its first bytes only, and what is written
// behind them may then come too late.
inline void configure_tiles(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }

// Tile loads do not say which memory they read. What was written before this is there for those after it.
inline void before_tile_loads() { asm volatile("" ::: "memory"); }
// Nor do tile stores say what they write. What is read after this is what they wrote before it.
inline void after_tile_stores() { asm volatile("" ::: "memory"); }

#else
#define HAS_AMX 0

inline bool use_amx() { return false; }

#endif
