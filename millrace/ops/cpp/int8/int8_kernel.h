// The kernel in the instructions of the processor that is compiled for.
//
// Each kernel defines
//   void multiply_panels(const Layer& layer, const Rows& x, float* out, int64_t first_row, int64_t last_row,
//                        int64_t first, int64_t last);
// which multiplies rows `first_row` to `last_row`, which starts and ends with a block, with panels `first` to `last`, both
// even, and
//   constexpr const char* KERNEL: its name for people.
#pragma once

#if defined(__AVX2__)
#include "int8/int8_x86.h"
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#include "int8/int8_arm.h"
#include "int8/int8_panels.h"
#else
#include "int8/int8_portable.h"

namespace int8 {
using portable::KERNEL;
using portable::multiply_panel;
}  // namespace int8

#include "int8/int8_panels.h"
#endif
