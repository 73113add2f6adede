"""The front: HTTP in, streamed text out. Never imports torch.

One order of layers, checked by import-linter: `app`, `routing`, `api_routes` (the table of routes), `describe`, the
dialects (`openai`, `responses`, `anthropic`, `ollama`), `stored`, `generate`, `state`, `database` and `tenancy`, and
`http`. Each imports only layers below it, and no dialect imports another.

Start with `api_routes`, then follow one request: `openai/routes`, `generate/respond`, `generate/job`.
"""
