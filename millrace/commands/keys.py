"""`millrace keys`: make, list and withdraw API keys. The file holds hashes; a key is shown once, when it is made."""

from __future__ import annotations

import argparse
import os
import secrets
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.terminal.parser import UsageError

if TYPE_CHECKING:
    from millrace.serve.tenancy.keyring import Tenant

USAGE = "millrace keys {add,list,remove} FILE [options]"
EXAMPLES = """\
examples:
  millrace keys add keys.toml --tenant acme                          a new key for a new or known tenant
  millrace keys add keys.toml --tenant acme --tokens-per-minute 100000 --max-concurrent 32 --weight 2
  millrace keys list keys.toml                                       tenants, limits, and the beginnings of hashes
  millrace keys remove keys.toml --hash 3fb2c9                       withdraw the key whose hash begins so
  millrace serve --keys-file keys.toml                               demand keys; changes count within a second"""

_FIELDS = ("weight", "tokens_per_minute", "max_concurrent", "most_urgent", "private_cache")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="WHAT", help="add, list or remove")
    parser.add_argument("file", metavar="FILE", type=Path, help="the keys file")
    parser.add_argument("--tenant", default="", help="whose key it is (with add)")
    parser.add_argument("--hash", default="", help="the beginning of a key's hash (with remove)")
    parser.add_argument("--weight", type=float, help="the tenant's share relative to others")
    parser.add_argument("--tokens-per-minute", type=int, metavar="N", help="prompt and output together; 0 is no limit")
    parser.add_argument("--max-concurrent", type=int, metavar="N", help="requests at once; 0 is no limit")
    parser.add_argument("--most-urgent", metavar="CLASS", help="interactive, standard or batch")
    parser.add_argument(
        "--private-cache", action=argparse.BooleanOptionalAction, default=None, help="share no cached prefixes"
    )


def run(args: argparse.Namespace) -> int:
    actions = {"add": _add, "list": _list, "remove": _remove}
    if args.what not in actions:
        raise UsageError(f"`millrace keys` has no '{args.what}'. It has: add, list, remove.")
    actions[args.what](args)
    return 0


def _add(args: argparse.Namespace) -> None:
    import msgspec

    from millrace.serve.tenancy.keyring import DIGEST_PREFIX, Tenant, digest_of, read_tenants

    if not args.tenant:
        raise UsageError("Say whose key it is: --tenant NAME.")
    tenants = read_tenants(args.file) if args.file.exists() else {}
    given = {name: getattr(args, name) for name in _FIELDS if getattr(args, name) is not None}
    key = "mr-" + secrets.token_urlsafe(32)
    tenant = msgspec.structs.replace(tenants.get(args.tenant, Tenant()), **given)
    keys = (*tenant.keys, DIGEST_PREFIX + digest_of(key).hex())
    tenants[args.tenant] = msgspec.structs.replace(tenant, keys=keys)
    _write(args.file, tenants)
    print(f"{key}\nThis is the only time that the key is shown; {args.file} holds its hash.")


def _list(args: argparse.Namespace) -> None:
    from millrace.serve.tenancy.keyring import DIGEST_PREFIX, read_tenants

    for name, tenant in read_tenants(args.file).items():
        hashes = ", ".join(key.removeprefix(DIGEST_PREFIX)[:12] + "…" for key in tenant.keys) or "no keys"
        limits = ", ".join(f"{field} {getattr(tenant, field)}" for field in _FIELDS)
        print(f"{name}: {hashes}; {limits}")


def _remove(args: argparse.Namespace) -> None:
    import msgspec

    from millrace.serve.tenancy.keyring import DIGEST_PREFIX, read_tenants

    if not args.hash:
        raise UsageError("Say which key: --hash and the beginning of its hash, as `millrace keys list` shows it.")
    tenants = read_tenants(args.file)
    found = [
        (name, key)
        for name, tenant in tenants.items()
        for key in tenant.keys
        if key.removeprefix(DIGEST_PREFIX).startswith(args.hash.removeprefix(DIGEST_PREFIX))
    ]
    if len(found) != 1:
        raise UsageError(f"{len(found)} keys in {args.file} have a hash that begins with '{args.hash}'; name one.")
    name, key = found[0]
    tenants[name] = msgspec.structs.replace(tenants[name], keys=tuple(k for k in tenants[name].keys if k != key))
    _write(args.file, tenants)
    print(f"The key {key[7:19]}… of tenant '{name}' is withdrawn.")


def _write(file: Path, tenants: dict[str, Tenant]) -> None:
    """The whole file at once, readable by its owner only: a server that reads it never meets half of it."""
    import tomli_w

    from millrace.serve.tenancy.keyring import read_tenants

    tables = {
        name: {"keys": list(tenant.keys), **{field: getattr(tenant, field) for field in _FIELDS}}
        for name, tenant in tenants.items()
    }
    descriptor, path = tempfile.mkstemp(dir=file.parent or Path(), prefix=file.name)
    try:
        with os.fdopen(descriptor, "wb") as out:
            tomli_w.dump({"tenants": tables}, out)
        read_tenants(Path(path))  # What could not be read again is not put in place.
        os.replace(path, file)
    except BaseException:
        os.unlink(path)
        raise
