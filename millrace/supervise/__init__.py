"""Starts, watches and replaces the child processes of a server: the engine and the additional fronts.

`engine_child` and `front_child` are the main modules of these processes; the other modules run in the parent, which is
also the first front. May import
`engine`, `serve.app`, `link`, `config`, `host`, and for the children `observe.logs` and `sources`. Start with
`engine_process.py`.
"""
