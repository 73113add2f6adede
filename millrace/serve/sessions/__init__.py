"""Sessions: conversations that the server keeps, whose keys and values stay cached under the session's own handle.

The messages and tokens live in the front's database, so a session outlives an engine and a server. Its keys and values
live in the engine under a handle named after the session: under pressure they move down the tiers or are evicted, and
the next turn loads or computes them.
"""
