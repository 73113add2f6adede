"""Measured tables: which tile sizes and algorithms are fastest for a product or a step size on one kind of GPU.

`<device>/*.json` are the data, each with its provenance: machine, versions, date, what was measured and what the fields
mean. `load.py` reads them and is the only place that decides which table a device gets. Imports only torch.
To add a device: measure, add a folder, and add its compute capability to `load.MEASURED`.
"""
