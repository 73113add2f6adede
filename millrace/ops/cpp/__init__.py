"""The CPU kernels in C++, and `native.py`, which compiles, loads and calls them. Imports only `config`.

`step.cpp` runs a whole step; it calls `linear/`, `attention/`, `elementwise.cpp` and `draw.cpp`. `quantised/` reads
GGUF weights. `vec.h` (vectors of 16 floats), `amx.h` (the matrix unit) and `pool.h` (threads) serve all of them.
"""
