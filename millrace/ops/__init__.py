"""Tensor operations: for each op a torch reference that defines it and faster versions for CPU and GPU.

`registry.py` lists every op with its versions and picks one of each when a model is loaded; start there. Layers
of packages, top to bottom: attention, head, moe; linear; elementwise; triton; tuning, cpp, kv; base. Each imports only
packages below it. `ops` knows nothing of requests: outside itself it imports only `config` and `errors`.
"""
