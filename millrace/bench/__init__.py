"""Benchmarks: of a server over HTTP (`http`), an engine on a GPU (`gpu`), single layers (`micro`), and peers (`peers`).

The sub-rooms measure; `millrace/commands/bench*.py` take arguments and print. What they share is here: `figures.py`,
`local_server.py`, `metrics_page.py`. May import everything below `commands`. Start with `http/suite.py`.
"""
