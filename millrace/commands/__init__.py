"""One module per command of `millrace`: its options, what it prints and its exit code.

A command has `USAGE`, `EXAMPLES`, `add_arguments(parser)` and `run(args) -> exit code`. It may import everything, with
heavy imports (torch, aiohttp, rich) inside `run`; only `cli` imports commands. What is measured lives in `bench` and
`faults`, what is drawn in `terminal`. Start with `serve.py`.
"""
