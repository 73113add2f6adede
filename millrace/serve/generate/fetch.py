"""Before a prompt is submitted: fetch its KV blocks from the replica that a gateway names."""

from __future__ import annotations

import time

import numpy as np
from aiohttp import web

from millrace.serve.fetching.fetcher import Prefix
from millrace.serve.fetching.wire import FROM_HEADER
from millrace.serve.generate.generation import Generation
from millrace.serve.http.app_keys import TRACE
from millrace.serve.state import FrontState
from millrace.serve.tenancy.trust import is_gateway


async def fetch_prefix(state: FrontState, request: web.Request, generation: Generation) -> str:
    """What became of it, in one line; empty if the request is not one to fetch for."""
    server, source = state.config.server, request.headers[FROM_HEADER]
    if not is_gateway(request, server.host, server.gateway_key, has_keys=state.keyring is not None):
        return ""
    reads_cache = not (generation.prompt_logprobs or generation.params.pooling or state.adapter)
    if len(generation.prompts) != 1 or not reads_cache or not source.startswith(("http://", "https://")):
        return ""
    began = time.monotonic()
    tokens = np.array(generation.prompts[0].token_ids, np.int32).tobytes()
    salt, owner = generation.cache_salt.encode(), generation.caller.tenant
    prefix = Prefix(state.client, state.model_name, owner, salt, tokens)
    fetched = await state.fetcher.fetch(prefix, source, server.gateway_key)
    figures = state.figures
    figures.fetches.labels(fetched.outcome).inc()
    figures.fetched_tokens.inc(fetched.num_tokens)
    figures.fetched_bytes.inc(fetched.num_bytes)
    figures.fetch_seconds.inc(fetched.seconds)
    if (trace := request.get(TRACE)) is not None:
        trace.add_stage(
            "fetch", began, time.monotonic(), {"millrace.fetch": str(fetched), "millrace.fetch.from": source}
        )
    return str(fetched)
