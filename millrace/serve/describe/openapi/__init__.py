"""The OpenAPI document: schemas from the structs (`document.py`), what they do not state (`limits.py`), and the paths
(`paths.py`), by what they are about."""
