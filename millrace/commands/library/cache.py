"""`millrace cache`: prompts that a running server keeps cached under a name."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from millrace.terminal.parser import UsageError
from millrace.terminal.server_options import add_server, ask_server, download, send_to_server, upload
from millrace.terminal.table import print_table

USAGE = "millrace cache {ls,tree,show,warm,rm,export,import,forget} [NAME] [options]"
EXAMPLES = """\
A prompt that begins with a kept one starts behind it. Memory for this: --kv-retained.

examples:
  millrace cache warm manual --file manual.txt --ttl-s 3600      compute a text and keep it for an hour
  millrace cache ls
  millrace cache tree                                            all that is cached, by prefix (operators)
  millrace cache show manual
  millrace cache export manual --file manual.kv                  a signed file, for a replica of the same model
  millrace cache rm manual
  millrace cache import manual --file manual.kv
  millrace cache forget acme                                     what a tenant has in the cache (operators)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="WHAT", help="ls, tree, show, warm, rm, export, import or forget")
    parser.add_argument(
        "name", nargs="?", default="", metavar="NAME", help="name of the handle, or of the tenant (forget)"
    )
    parser.add_argument(
        "--file", type=Path, metavar="FILE", help="the text to keep cached (warm), or the signed file (export, import)"
    )
    parser.add_argument("--ttl-s", type=float, default=300.0, metavar="X", help="seconds to keep it (default: 300)")
    parser.add_argument("--json", action="store_true", help="print the server's answer")
    add_server(parser)


def run(args: argparse.Namespace) -> int:
    actions = {
        "ls": _list,
        "tree": _tree,
        "show": _show,
        "warm": _warm,
        "rm": _remove,
        "export": _export,
        "import": _import,
        "forget": _forget,
    }
    if args.what not in actions:
        raise UsageError(f"Unknown action '{args.what}'. Actions: {', '.join(actions)}.")
    if args.what not in ("ls", "tree") and not args.name:
        of_what = "tenant" if args.what == "forget" else "handle"
        raise UsageError(f"`cache {args.what}` needs the NAME of a {of_what}.")
    actions[args.what](args)
    return 0


def _list(args: argparse.Namespace) -> None:
    found = ask_server(args, "/v1/cache")
    if args.json:
        print(json.dumps(found))
        return
    header = ["name", "model", "tokens", "cached now", "MiB", "expires in"]
    print_table([header, *([one["id"], one["model"], *_figures(one)] for one in found["data"])], right=(2, 3, 4, 5))
    print(f"{found['used_bytes'] / 2**20:.1f} MiB kept, of {found['max_bytes'] / 2**20:.1f} MiB.")


def _tree(args: argparse.Namespace) -> None:
    found = ask_server(args, "/v1/kv/tree")
    if args.json:
        print(json.dumps(found))
        return
    for location, states in found["states"].items():
        print(f"{location}: " + ", ".join(f"{blocks:,} {name.replace('_', ' ')}" for name, blocks in states.items()))
    depths: list[int] = []
    rows = [["prefix", "tokens", "hits", "used by", "where", "idle", "owner"]]
    for one in found["nodes"]:
        depths.append(0 if one["parent"] < 0 else depths[one["parent"]] + 1)
        idle = "" if one["idle_s"] is None else f"{one['idle_s']:.0f} s"
        name = f"{'  ' * depths[-1]}{one['id']} {one['state'].replace('_', ' ')}"
        name += "" if one["start"] is not None else " (its beginning was evicted)"
        counts = [f"{one[field]:,}" for field in ("tokens", "hits", "refs")]
        rows.append([name, *counts, one["location"], idle, one["owner"] or "anyone"])
    print_table(rows, right=(1, 2, 3, 5))
    print(f"{found['tokens']:,} tokens in blocks of {found['block_tokens']}.", end="")
    if found["other_nodes"]:
        print(f" {found['other_nodes']:,} smaller nodes with {found['other_tokens']:,} tokens are not shown.", end="")
    print("" if found["is_whole"] else " Only the most recently used blocks were looked at.")


def _show(args: argparse.Namespace) -> None:
    one = ask_server(args, f"/v1/cache/{quote(args.name, safe='')}")
    if args.json:
        print(json.dumps(one))
    else:
        for name, value in one.items():
            print(f"{name}: {value}")


def _figures(one: dict[str, Any]) -> list[str]:
    expires = f"{one['expires_in_s']:.0f} s"
    return [f"{one['tokens']:,}", f"{one['resident_tokens']:,}", f"{one['bytes'] / 2**20:.1f}", expires]


def _warm(args: argparse.Namespace) -> None:
    if args.file is None:
        raise UsageError("`cache warm` needs --file FILE with the text to keep cached.")
    try:
        text = args.file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{args.file} cannot be read: {error}.") from error
    body = {"prompt": text, "name": args.name, "ttl_s": args.ttl_s}
    made = send_to_server(args, "POST", "/v1/cache", body | ({"model": args.model} if args.model else {}))
    if args.json:
        print(json.dumps(made))
    else:
        computed, cached = made["created_tokens"], made["cached_tokens"]
        print(f"{made['id']}: {made['tokens']:,} tokens kept, {computed:,} computed, {cached:,} were cached before.")


def _remove(args: argparse.Namespace) -> None:
    path = f"/v1/cache/{quote(args.name, safe='')}"
    gone = send_to_server(args, "DELETE", path + _of_model(args))
    print(json.dumps(gone) if args.json else f"{args.name} is no longer kept.")


def _export(args: argparse.Namespace) -> None:
    target = args.file or Path(f"{args.name}.kv")
    size = download(args, f"/v1/cache/{quote(args.name, safe='')}/export" + _of_model(args), target)
    print(json.dumps({"file": str(target), "bytes": size}) if args.json else f"{target}: {size / 2**20:.1f} MiB.")


def _import(args: argparse.Namespace) -> None:
    if args.file is None:
        raise UsageError("`cache import` needs --file FILE with an exported prompt.")
    made = upload(args, "/v1/cache/import" + _of_model(args, name=args.name), args.file)
    print(json.dumps(made) if args.json else f"{made['id']}: {made['tokens']:,} tokens kept, none computed.")


def _forget(args: argparse.Namespace) -> None:
    gone = send_to_server(args, "DELETE", f"/v1/tenants/{quote(args.name, safe='')}/cache")
    if args.json:
        print(json.dumps(gone))
        return
    counts = [f"{gone[name]:,} {name}" for name in ("requests", "sessions", "handles")]
    counts += [f"{count:,} KV blocks ({location})" for location, count in gone["blocks"].items()]
    print(f"{args.name} is forgotten: {', '.join(counts)}.")
    if gone["shares_prefixes"]:
        print("Its prefixes are shared with all tenants; they stay until they are evicted.")


def _of_model(args: argparse.Namespace, **query: str) -> str:
    query |= {"model": args.model} if args.model else {}
    return f"?{urlencode(query)}" if query else ""
