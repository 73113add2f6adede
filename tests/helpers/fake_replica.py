"""A program with the commands `serve` and `gateway` of Millrace, for tests that start and kill many of them fast.

Run as `python fake_replica.py serve MODEL --host HOST --port PORT …`. A model "broken" ends at once.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"model": "fake", "running": 1, "waiting": 0, "args": sys.argv}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--config", type=Path)
    args, _ = parser.parse_known_args()
    if args.model == "broken":
        sys.exit(3)
    port = tomllib.loads(args.config.read_text())["gateway"]["port"] if args.config else args.port
    ThreadingHTTPServer((args.host, port), Handler).serve_forever()


if __name__ == "__main__":
    main()
