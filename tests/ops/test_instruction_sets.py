"""Kernels for other x86-64 processors than this one: results without AVX-512, INT8 products of every instruction set.

They are compiled without optimisation, which takes half the time and changes no result.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.ops.cpp import native
from millrace.ops.cpp.targets import processor_features

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(1000),
    pytest.mark.skipif(platform.machine() != "x86_64" or shutil.which("g++") is None, reason="g++ for x86-64"),
]
AVX2 = "-march=x86-64-v3"
SETS = {
    "AVX2": ((AVX2,), {"avx2", "fma"}),
    "AVX-VNNI": ((AVX2, "-mavxvnni"), {"avx2", "fma", "avx_vnni"}),
    "AVX-512": (("-march=x86-64-v4",), {"avx512f", "avx512bw", "avx512vl", "avx512dq"}),
}
OWN = ("int8/int8_linear.cpp", "int8/int8_rows.cpp", "quantised/quantised.cpp")
"""Sources that are compiled for each set; the rest is that of the library for AVX2."""
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
EQUAL = """
import sys
from pathlib import Path
import millrace.ops.cpp.native as module
library = module.Native(Path(sys.argv[1]))
module.native_or_reason = lambda: library
assert not library.with_gil.has_amx()
import torch
from helpers.stored_blocks import dequantised, random_blocks
from millrace.ops.linear.dense import NativeLinear
from millrace.ops.linear.stored import FORMATS, StoredLinear, StoredPart, StoredWeight, pack_stored
torch.manual_seed(0)
for kind in FORMATS:
    blocks = random_blocks(kind, 45, 512)
    packed = pack_stored(kind, blocks, 45, 512)
    for dtype in (torch.float32, torch.bfloat16):
        weight = dequantised(kind, blocks, 512, dtype)
        stored = StoredLinear(StoredWeight((StoredPart(kind, 45, packed),), 512, dtype))
        assert torch.equal(stored.take_rows(torch.arange(45)), weight)
        for rows in (1, 5, 30):
            x = torch.randn(rows, 512).to(dtype)
            assert torch.equal(stored(x), NativeLinear(weight)(x)), (kind, dtype, rows)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All kernels, compiled for processors with AVX2."""
    others = (flag for flag in native.FLAGS if flag not in ("-march=native", "-O2"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "FLAGS", (AVX2, *others, "-O0"))
        return native.build(tmp_path_factory.mktemp("avx2"), ("g++",))


def test_without_avx512_results_equal_dequantised_weights(library: Path) -> None:
    if "avx2" not in processor_features():
        pytest.skip("this machine has no AVX2")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", EQUAL, str(library)], check=True, timeout=900, env=environment)


@pytest.mark.parametrize("name", SETS)
def test_products_are_those_of_the_portable_kernel(name: str, library: Path, tmp_path: Path) -> None:
    flags, features = SETS[name]
    source, program = tmp_path / "driver.cpp", tmp_path / "driver"
    source.write_text(DRIVER)
    own = [] if flags == (AVX2,) else [str(native.SOURCES / path) for path in OWN]
    options = ["-O0", "-std=c++20", "-Wno-psabi", "-ffp-contract=off", "-I", str(native.SOURCES)]
    options += ["-pthread", f"-Wl,-rpath,{library.parent}", "-o", str(program)]
    subprocess.run(["g++", *flags, str(source), *own, str(library), *options], check=True, timeout=900)
    if not features <= processor_features():
        return  # it compiles
    done = subprocess.run([str(program)], check=False, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[0] == name
