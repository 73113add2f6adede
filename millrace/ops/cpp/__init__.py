"""C++ sources of the CPU kernels; `millrace.ops.native` compiles them for the machine at hand."""
