"""The CPU kernels in C++, and `native.py`, which compiles, loads and calls them. Imports only `config`.

`step.cpp` runs a step from the request table: its body calls `stack.cpp`, all layers, and its head `draw.cpp`. These
call `linear/`, `attention/` and `elementwise.cpp`. `quantised/` reads GGUF weights. `vec.h` (vectors of 16 floats),
`amx.h` (the matrix unit) and `pool.h` (threads) serve all of them.
"""
