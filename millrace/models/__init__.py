"""Models: one decoder, described by a ModelSpec and built from a model's files.

Start with `decoder.py` (the forward pass) and `load.py` (how it is built). `spec/` turns a config.json into a
ModelSpec, `weights/` reads the file formats. May import `ops`, `sources`, `config` and `errors`; knows nothing of
requests.
"""
