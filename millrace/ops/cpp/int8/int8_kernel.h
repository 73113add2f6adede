// The kernel of one panel and one block of rows, in the instructions of the processor that is compiled for.
//
// Each kernel header defines
//   template <int F, int ROWS> void multiply_panel(const Panel& panel, const RowBlock& x, int64_t tiles, float* out);
// which writes the sums of 16 outputs for ROWS rows to out [ROWS][16], for format F in dot order (int8_linear.h), and
//   constexpr const char* KERNEL: its name for people.
#pragma once

#include "int8/int8_rows.h"
#include "quantised/quantised_scales.h"

#if defined(__AVX2__)
#include "int8/int8_x86.h"
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#include "int8/int8_arm.h"
#else
#include "int8/int8_portable.h"

namespace int8 {
using portable::KERNEL;
using portable::multiply_panel;
}  // namespace int8
#endif
