"""Throughput of encoders, alone and beside a stream."""
