"""`millrace gateway`: one address in front of many replicas; `gateway replay` routes a recorded log again."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from millrace.terminal.parser import UsageError

USAGE = "millrace gateway [replay LOG] [--replicas URL,…] [--config FILE] [options]"
EXAMPLES = """\
examples:
  millrace gateway --replicas http://10.0.0.5:8000,http://10.0.0.6:8000
      two Millrace servers behind http://127.0.0.1:8080
  millrace gateway --config fleet.toml --host 0.0.0.0
      replicas and settings from a file, which is read again when it changes
  millrace gateway --replicas http://a:8000,vllm=http://b:8000,ollama=http://c:11434
      other servers beside one of Millrace
  millrace gateway --config fleet.toml --decision-log routes.jsonl
      write every routing decision to a file
  millrace gateway replay routes.jsonl --policy least-tokens
      route the same requests by another policy and compare

policies: round-robin, least-tokens, power-of-two, weighted, prefix, least-time, session, model, nearest"""

_OPTIONS: dict[str, tuple[type, str]] = {
    "host": (str, "address to listen on (default: 127.0.0.1)"),
    "port": (int, "port to listen on; 0 chooses one (default: 8080)"),
    "policy": (str, "how a replica is chosen (default: prefix)"),
    "region": (str, "the gateway's own region, for the policy nearest"),
    "keys_file": (str, "API keys that clients need; without it their keys go on to the replicas"),
    "replica_key": (str, "API key that replicas get instead of the client's"),
    "replica_ca": (str, "PEM file with an authority that signed the certificates of https replicas"),
    "gateway_key": (str, "the replicas' --gateway-key, with which they let streams move"),
    "limits_store": (str, "share quotas and budgets with other gateways: sqlite:PATH or redis://HOST:PORT"),
    "discover": (str, "HOST:PORT whose addresses in DNS are replicas"),
    "workers": (int, "processes that share the port and the limits, one per core to use (default: 1)"),
    "decision_log": (str, "write every routing decision to this file"),
    "otlp_url": (str, "send spans of requests and routing decisions to this OTLP/HTTP receiver"),
    "max_attempts": (int, "replicas that a request may try before its first token (default: 3)"),
    "probe_s": (float, "seconds between two looks at a replica (default: 1)"),
    "probe_timeout_s": (float, "seconds in which a replica must answer a probe (default: 5)"),
    "stall_s": (float, "seconds without progress after which a replica is ejected (default: 30)"),
    "head_s": (float, "seconds in which a replica must begin a stream, long before its first token (default: 15)"),
    "answer_s": (float, "seconds that a whole answer may take (default: 1800)"),
    "outlier_factor": (float, "eject a replica this many times slower than the others; 0: never (default: 5)"),
    "eject_s": (float, "seconds that a replica stays outside at first (default: 5)"),
    "ramp_s": (float, "seconds in which it returns to its full share (default: 10)"),
    "max_open": (int, "open requests per replica (default: 4096)"),
    "hedge_ms": (float, "send a request to a second replica after this time without an answer; 0: never"),
    "long_tokens": (int, "requests of this many tokens go to replicas with long_jobs (default: 32768)"),
    "kv_fetch_tokens": (int, "prompt tokens worth fetching from another replica's KV; 0: never (default: 512)"),
    "drain_s": (float, "seconds that open requests may take after SIGTERM (default: 30)"),
}

_SWITCHES = {
    "reuse_port": "let several gateways of this machine share the port",
    "share_prefixes": "let tenants of --keys-file share cached prefixes",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="*", metavar="replay LOG", help="route the requests of a decision log again")
    parser.add_argument(
        "--replicas", default="", metavar="URL,…", help="replicas; KIND=URL for vllm, llama.cpp, ollama"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML with [gateway] and [[replicas]]")
    for name, (kind, text) in _OPTIONS.items():
        metavar = {int: "N", float: "X", str: "TEXT"}[kind]
        parser.add_argument("--" + name.replace("_", "-"), type=kind, metavar=metavar, help=text)
    for name, text in _SWITCHES.items():
        parser.add_argument("--" + name.replace("_", "-"), action="store_true", default=None, help=text)


def run(args: argparse.Namespace) -> int:
    if args.what:
        return _replay(args)
    from millrace.gateway.settings import gateway_settings, parse_replicas, read_fleet
    from millrace.observe.logs import setup_logging

    from_file, replicas = read_fleet(args.config) if args.config is not None else ({}, ())
    given: dict[str, Any] = {
        name: getattr(args, name) for name in (*_OPTIONS, *_SWITCHES) if getattr(args, name) is not None
    }
    settings = gateway_settings(from_file, given)
    replicas += parse_replicas(args.replicas)
    if not replicas and args.config is None and not settings.discover:
        raise UsageError("A gateway needs --replicas URL,…, --config fleet.toml or --discover HOST:PORT.")
    setup_logging("info", process="gateway")

    import uvloop

    from millrace.gateway.app import serve_gateway
    from millrace.gateway.workers import serve_with_workers
    from millrace.terminal.startup_message import open_server_warning

    if not settings.keys_file and (warning := open_server_warning(settings.host)):
        print(warning, file=sys.stderr, flush=True)

    def on_listening(host: str, port: int) -> None:
        print(f"Gateway to {len(replicas)} replicas, policy {settings.policy}, on http://{host}:{port}", flush=True)

    if settings.workers == 1:
        uvloop.run(serve_gateway(settings, replicas, fleet_file=args.config, on_listening=on_listening))
    else:
        serve_with_workers(settings, replicas, fleet_file=args.config, on_listening=on_listening)
    return 0


def _replay(args: argparse.Namespace) -> int:
    from millrace.gateway.routing.replay import replay_log
    from millrace.terminal.table import print_table

    if args.what[0] != "replay" or len(args.what) != 2:
        raise UsageError("`millrace gateway` takes no arguments but `replay LOG`.")
    rows = [("policy", "requests", "prompt tokens cached", "busiest/mean", "moved")]
    for result in replay_log(Path(args.what[1]), args.policy):
        cached = f"{100 * result.hit_rate:.1f}%"
        rows.append((result.policy, str(result.num_requests), cached, f"{result.balance:.2f}", str(result.num_moved)))
    print_table(rows, right=(1, 2, 3, 4))
    return 0
