"""Kernels compiled for a foreign processor and called under an emulator."""
