// The AMX matrix unit: 8 tile registers of 16 rows of 64 bytes; one instruction does 16 x 16 x 32 bfloat16 products.
#pragma once

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__linux__)
#define HAS_AMX 1

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

// Linux lets a process use AMX after it has asked for permission once.
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

// The whole structure is an operand of the asm. The compiler's intrinsic names only its first bytes, so stores to the
// others may be moved after it.
inline void configure_tiles(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }

// Compiler barriers, because tile loads and stores do not tell the compiler which memory they access.
// Stores before this are visible to the tile loads after it.
inline void before_tile_loads() { asm volatile("" ::: "memory"); }
// Loads after this see what the tile stores before it wrote.
inline void after_tile_stores() { asm volatile("" ::: "memory"); }

#else
#define HAS_AMX 0

inline bool use_amx() { return false; }

#endif
