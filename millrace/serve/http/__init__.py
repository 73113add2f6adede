"""HTTP itself, below all dialects: connections, bodies, JSON answers, event streams, errors, query strings.

Knows nothing of models or tenants and imports nothing else of `serve`. `connection` is the only file that uses private
names of aiohttp. Start with `body` for the way in and `event_stream` for the way out.
"""
