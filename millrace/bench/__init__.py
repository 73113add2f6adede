"""Benchmarks: of a server over HTTP (`http`), an engine on a GPU (`gpu`), single layers (`micro`), and peers (`peers`).

The subpackages measure; `millrace/commands/bench.py` and `commands/benchmarks/` take arguments and print. Shared
modules are here: `figures.py`, `local_server.py`, `metrics_page.py`. May import everything below `commands`. Start with
`http/suite.py`.
"""
