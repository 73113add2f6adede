"""Messages between fronts and the engine, and the channels that carry them.

May import the standard library, NumPy, msgspec, `errors` and `params`; never torch. Start with `messages.py`, then
`channel.py`, the interface of both ends. `client.py` is what a front uses, of the parts in `front/`; `engine_end.py`
and `front_end.py` are the two ends of a Unix socket. `engine_stats.py` is what an engine reports of itself.
"""
