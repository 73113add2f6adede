"""`millrace create`: makes a model of a served one from a Modelfile."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

from millrace.sources.adapters.modelfile import read_modelfile
from millrace.terminal.server_options import add_server, send_to_server, upload

USAGE = "millrace create NAME [-f Modelfile] [options]"
EXAMPLES = """\
A Modelfile says FROM a model that the server serves, and what is different: ADAPTER (a directory saved by PEFT),
SYSTEM, PARAMETER, LICENSE. The new model is asked for by its name, in every API, until /api/delete removes it.

examples:
  millrace create pirate                    from ./Modelfile, on the server that runs here
  millrace create legal:v2 -f legal.modelfile --url http://127.0.0.1:8123"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of the new model")
    parser.add_argument("-f", "--file", type=Path, default=Path("Modelfile"), metavar="FILE", help="default: Modelfile")
    parser.add_argument("--json", action="store_true", help="print the server's answer")
    add_server(parser, with_model=False)


def run(args: argparse.Namespace) -> int:
    asked = read_modelfile(args.file)
    digests = {}
    for path in asked.adapter_files():
        with path.open("rb") as file:
            digests[path.name] = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        upload(args, f"/api/blobs/{digests[path.name]}", path)
    body = {
        "model": args.name,
        "from": asked.source,
        "adapters": digests or None,
        "system": asked.system,
        "license": asked.licence,
        "parameters": asked.parameters or None,
        "stream": False,
    }
    answer = send_to_server(args, "POST", "/api/create", body)
    print(json.dumps(answer) if args.json else f"{args.name} is a model of the server now, made of {asked.source}.")
    return 0
