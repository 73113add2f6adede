"""Starts, watches and replaces the processes of a server: the engine and the fronts beside the first.

`engine_child` and `front_child` are the main modules of these processes; the others run in the parent. May import
`engine`, `serve.app`, `link`, `config`, `host`, and for the children `observe.logs` and `sources`. Start with
`engine_process.py`.
"""
