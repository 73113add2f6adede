"""`millrace keys`: creates, lists and revokes API keys. The file stores hashes; a key is shown once, when created."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.terminal.folding import folded
from millrace.terminal.parser import UsageError

if TYPE_CHECKING:
    from millrace.serve.tenancy.keyring import Tenant

USAGE = "millrace keys {add,list,remove} FILE [options]"
EXAMPLES = """\
examples:
  millrace keys add keys.toml --tenant acme                          create a key for a new or existing tenant
  millrace keys add keys.toml --tenant acme --tokens-per-minute 100000 --max-concurrent 32 --weight 2
  millrace keys add keys.toml --tenant acme --models "smollm2:pirate"  for one adapter only
  millrace keys list keys.toml                                       tenants, limits and hash prefixes
  millrace keys remove keys.toml --hash 3fb2c9                       revoke the key with this hash prefix
  millrace serve --keys-file keys.toml                               require keys; changes apply within a second"""

_FIELDS = (
    "weight",
    "tokens_per_minute",
    "max_concurrent",
    "most_urgent",
    "private_cache",
    "cache_mib",
    "models",
    "operator",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="WHAT", help="add, list or remove")
    parser.add_argument("file", metavar="FILE", type=Path, help="the keys file")
    parser.add_argument("--tenant", default="", help="owner of the key (with add)")
    parser.add_argument("--hash", default="", help="prefix of the key's hash (with remove)")
    parser.add_argument("--weight", type=float, help="fair-share weight of the tenant")
    parser.add_argument(
        "--tokens-per-minute", type=int, metavar="N", help="limit on prompt and output tokens; 0 = no limit"
    )
    parser.add_argument("--max-concurrent", type=int, metavar="N", help="maximum concurrent requests; 0 = no limit")
    parser.add_argument(
        "--most-urgent", metavar="CLASS", help="highest priority class allowed: interactive, standard or batch"
    )
    parser.add_argument(
        "--private-cache",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="share no cached prefixes with other tenants; the default, unless the server has --share-prefixes",
    )
    parser.add_argument(
        "--cache-mib",
        type=int,
        metavar="N",
        help="KV memory that its handles may keep; 0 = no own limit",
    )
    parser.add_argument(
        "--models",
        "--adapters",
        type=lambda text: tuple(filter(None, text.split(","))),
        metavar="NAME,…",
        help="models and adapters (MODEL:NAME) that its keys may ask for, with * for any text; default: all",
    )
    parser.add_argument(
        "--operator",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="see, explain and cancel the requests of all tenants; unload, download and delete models",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; list: one line per tenant")


def run(args: argparse.Namespace) -> int:
    actions = {"add": _add, "list": _list, "remove": _remove}
    if args.what not in actions:
        raise UsageError(f"Unknown action '{args.what}'. Actions: add, list, remove.")
    actions[args.what](args)
    return 0


def _add(args: argparse.Namespace) -> None:
    import msgspec

    from millrace.serve.tenancy.keyring import DIGEST_PREFIX, Tenant, digest_of, read_tenants

    if not args.tenant:
        raise UsageError("`keys add` needs --tenant NAME.")
    tenants = read_tenants(args.file) if args.file.exists() else {}
    given = {name: getattr(args, name) for name in _FIELDS if getattr(args, name) is not None}
    key = "mr-" + secrets.token_urlsafe(32)
    tenant = msgspec.structs.replace(tenants.get(args.tenant, Tenant()), **given)
    keys = (*tenant.keys, DIGEST_PREFIX + digest_of(key).hex())
    tenants[args.tenant] = msgspec.structs.replace(tenant, keys=keys)
    _write(args.file, tenants)
    if args.json:
        print(json.dumps({"tenant": args.tenant, "key": key, "hash": keys[-1].removeprefix(DIGEST_PREFIX)}))
    else:
        print(f"{key}\nStore this key now: it is not shown again. {args.file} keeps only its hash.")


def _limits(tenant: Tenant) -> dict[str, object]:
    """What is set; `private_cache` may be left to the server."""
    values = {field: getattr(tenant, field) for field in _FIELDS}
    return {field: value for field, value in values.items() if value is not None}


def _list(args: argparse.Namespace) -> None:
    from millrace.serve.tenancy.keyring import DIGEST_PREFIX, read_tenants

    for name, tenant in read_tenants(args.file).items():
        if args.json:
            own = [key.removeprefix(DIGEST_PREFIX) for key in tenant.keys]
            print(json.dumps({"tenant": name, "hashes": own, **_limits(tenant)}))
            continue
        hashes = ", ".join(key.removeprefix(DIGEST_PREFIX)[:12] + "…" for key in tenant.keys) or "no keys"
        limits = ", ".join(f"{field} {value}" for field, value in _limits(tenant).items())
        print(folded(f"{name}: {hashes}; {limits}"))


def _remove(args: argparse.Namespace) -> None:
    import msgspec

    from millrace.serve.tenancy.keyring import DIGEST_PREFIX, read_tenants

    if not args.hash:
        raise UsageError("`keys remove` needs --hash with the start of a hash; `millrace keys list` shows the hashes.")
    tenants = read_tenants(args.file)
    found = [
        (name, key)
        for name, tenant in tenants.items()
        for key in tenant.keys
        if key.removeprefix(DIGEST_PREFIX).startswith(args.hash.removeprefix(DIGEST_PREFIX))
    ]
    if len(found) != 1:
        raise UsageError(f"{len(found)} keys in {args.file} have a hash that starts with '{args.hash}'; expected one.")
    name, key = found[0]
    tenants[name] = msgspec.structs.replace(tenants[name], keys=tuple(k for k in tenants[name].keys if k != key))
    _write(args.file, tenants)
    if args.json:
        print(json.dumps({"tenant": name, "revoked": key.removeprefix(DIGEST_PREFIX)}))
    else:
        print(f"Revoked key {key[7:19]}… of tenant '{name}'.")


def _write(file: Path, tenants: dict[str, Tenant]) -> None:
    """Replace the file atomically, readable by its owner only: a running server never reads a partial file."""
    import tomli_w

    from millrace.serve.tenancy.keyring import read_keys

    tree: dict[str, object] = {
        "tenants": {name: {"keys": list(tenant.keys), **_limits(tenant)} for name, tenant in tenants.items()}
    }
    if file.exists() and (models := read_keys(file).models):
        fields = ("tokens_per_minute", "max_concurrent")
        tree["models"] = {name: {field: getattr(one, field) for field in fields} for name, one in models.items()}
    descriptor, path = tempfile.mkstemp(dir=file.parent or Path(), prefix=file.name)
    try:
        with os.fdopen(descriptor, "wb") as out:
            tomli_w.dump(tree, out)
        read_keys(Path(path))  # Validate before replacing.
        os.replace(path, file)
    except BaseException:
        os.unlink(path)
        raise
