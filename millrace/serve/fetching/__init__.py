"""KV blocks of a prompt that another replica has: asked for by a gateway's header, fetched where that beats computing.

`wire` is what travels, `source` gives blocks, `fetcher` takes them. They know engines only by their client.
"""
