"""The INT8 kernels of other x86-64 instruction sets, compiled on their own, against the portable kernel."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from millrace.ops.cpp.native import SOURCES
from millrace.ops.cpp.targets import processor_features

SETS = {
    "AVX2": (("-march=x86-64-v3",), {"avx2", "fma"}),
    "AVX-VNNI": (("-march=x86-64-v3", "-mavxvnni"), {"avx2", "fma", "avx_vnni"}),
    "AVX-512": (("-march=x86-64-v4",), {"avx512f", "avx512bw", "avx512vl", "avx512dq"}),
}
DRIVER = """
#include "int8/int8_kernel.h"
#include "int8/int8_portable.h"
#include <cstdio>
#include <vector>

template <int F, int ROWS>
bool agrees() {
    constexpr int64_t TILES = 16;
    quantised::PanelLayout layout(quantised::format_of(F), TILES * 32);
    std::vector<char> packed(2 * layout.end);  // the next panel is prefetched
    std::vector<int8_t> values(ROWS * TILES * 32);
    std::vector<float> scales(ROWS * TILES), sums(ROWS * TILES), halves(2 * ROWS * TILES);
    uint32_t state = 1;
    auto draw = [&] { return (state = state * 1664525 + 1013904223) >> 16; };
    for (char& byte : packed) byte = draw();
    for (int64_t i = layout.halves; i < layout.byte_scales; i += 2) packed[i + 1] = 0x20 | draw() % 16;  // about 0.01
    for (int8_t& value : values) value = (int)(draw() % 255) - 127;
    for (float& scale : scales) scale = 0.5f + draw() % 100 / 100.0f;
    for (int64_t tile = 0; tile < TILES; tile++)
        for (int row = 0; row < ROWS; row++) {
            int half[2] = {0, 0};
            for (int j = 0; j < 32; j++) half[j / 16] += values[(tile * ROWS + row) * 32 + j];
            float scale = scales[tile * ROWS + row];
            sums[tile * ROWS + row] = scale * (half[0] + half[1]);
            for (int h = 0; h < 2; h++) halves[(2 * tile + h) * ROWS + row] = scale * half[h];
        }
    quantised::Panel panel{packed.data(), packed.data() + layout.halves, packed.data() + layout.byte_scales};
    int8::RowBlock x{values.data(), scales.data(), sums.data(), halves.data()};
    float found[ROWS * 16], expected[ROWS * 16], largest = 0, error = 0;
    int8::multiply_panel<F, ROWS>(panel, x, TILES, found);
    int8::portable::multiply_panel<F, ROWS>(panel, x, TILES, expected);
    for (int i = 0; i < ROWS * 16; i++) {
        largest = std::fmax(largest, std::fabs(expected[i]));
        error = std::fmax(error, std::fabs(found[i] - expected[i]));
    }
    printf("format %d, %d rows: largest %g, error %g\\n", F, ROWS, largest, error);
    return largest > 0 && error <= 1e-4f * largest;
}

template <int F>
bool all() { return agrees<F, 1>() & agrees<F, 4>() & agrees<F, 12>(); }

int main() {
    puts(int8::KERNEL);
    bool good = all<FORMAT_Q4_0>() & all<FORMAT_Q4_1>() & all<FORMAT_Q5_1>() & all<FORMAT_Q8_0>();
    good = good & all<FORMAT_Q4_K>() & all<FORMAT_Q5_K>() & all<FORMAT_Q6_K>();
    return good ? 0 : 1;
}
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for x86-64")
@pytest.mark.parametrize("name", SETS)
def test_products_are_those_of_the_portable_kernel(name: str, tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    flags, features = SETS[name]
    source, program = tmp_path / "driver.cpp", tmp_path / "driver"
    source.write_text(DRIVER)
    options = ["-O1", "-std=c++20", "-Wno-psabi", "-ffp-contract=off", "-I", str(SOURCES)]
    subprocess.run([compiler, *flags, *options, str(source), "-o", str(program)], check=True, timeout=240)
    if not features <= processor_features():
        return  # it compiles
    done = subprocess.run([str(program)], check=False, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[0] == name
