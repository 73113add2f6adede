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
NEEDED = (
    "int8/int8_linear.cpp",
    "int8/int8_rows.cpp",
    "quantised/quantised.cpp",
    "quantised/quantised_pack.cpp",
    "pool.cpp",
)
DRIVER = """
#include "int8/int8_linear.h"
#include "int8/int8_portable.h"
#include <cstdio>
#include <vector>

extern "C" const char* millrace_int8_kernel();

template <int F>
bool agrees(int rows) {
    // Several parts of inputs, and a panel that is not full.
    constexpr int64_t TILES = 24, K = TILES * 32, N = 50, PANELS = 4;
    quantised::PanelLayout layout(quantised::format_of(F), K);
    std::vector<char> packed((PANELS + 2) * layout.end);  // the next panels are prefetched
    std::vector<float> x(rows * K), found(rows * N), bias(N);
    uint32_t state = 1;
    auto draw = [&] { return (state = state * 1664525 + 1013904223) >> 16; };
    for (char& byte : packed) byte = draw();
    for (int64_t panel = 0; panel < PANELS; panel++)
        for (int64_t i = layout.halves; i < layout.byte_scales; i += 2)
            packed[panel * layout.end + i + 1] = 0x20 | draw() % 16;  // about 0.01
    for (float& value : x) value = ((int)(draw() % 2001) - 1000) / 500.0f;
    for (float& value : bias) value = draw() % 10;
    linear_layer::Layer layer{F, packed.data(), bias.data(), N, K, K, N, 0, false};
    int8::linear({layer}, x.data(), K, found.data(), rows);
    float largest = 0, error = 0;
    for (int row = 0; row < rows; row++) {
        int8::Rows rounded(x.data() + row * K, K, 1, K, true);
        for (int64_t panel = 0; panel < PANELS; panel++) {
            float expected[16];
            quantised::Panel weights = quantised::panel_at(F, packed.data(), K, panel);
            int8::portable::multiply_panel<F, 1>(weights, rounded.block(0), TILES, expected);
            for (int64_t i = 0, at = panel * 16; i < 16 && at < N; i++, at++) {
                largest = std::fmax(largest, std::fabs(expected[i]));
                error = std::fmax(error, std::fabs(found[row * N + at] - bias[at] - expected[i]));
            }
        }
    }
    printf("format %d, %d rows: largest %g, error %g\\n", F, rows, largest, error);
    return largest > 0 && error <= 1e-4f * largest;
}

template <int F>
bool all() { return agrees<F>(1) & agrees<F>(3) & agrees<F>(5) & agrees<F>(16); }

int main() {
    puts(millrace_int8_kernel());
    bool good = all<FORMAT_Q4_0>() & all<FORMAT_Q4_1>() & all<FORMAT_Q5_1>() & all<FORMAT_Q8_0>();
    good = good & all<FORMAT_Q4_K>() & all<FORMAT_Q5_K>() & all<FORMAT_Q6_K>() & all<FORMAT_BYTES>();
    good = good & all<FORMAT_IQ4_NL>() & all<FORMAT_IQ4_XS>();
    return good ? 0 : 1;
}
"""


@pytest.mark.timeout(1000)
@pytest.mark.live
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
    needed = [str(SOURCES / name) for name in NEEDED]
    command = [compiler, *flags, *options, str(source), *needed, "-pthread", "-o", str(program)]
    subprocess.run(command, check=True, timeout=900)
    if not features <= processor_features():
        return  # it compiles
    done = subprocess.run([str(program)], check=False, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[0] == name
