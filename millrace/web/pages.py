"""Serves the pages and their files from memory, under a content security policy without exceptions."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aiohttp import hdrs, web

ROOT: Final = Path(__file__).with_name("static")
PREFIX: Final = "/web/"
PAGES: Final = {"/": "playground/index.html", "/dashboard": "dashboard/index.html", "/docs": "docs/index.html"}
"""Path of each page and its file."""
GATEWAY_PAGES: Final = {**PAGES, "/dashboard": "fleet/index.html"}
"""The same paths: a gateway's dashboard shows its replicas."""
MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_RULES: Final = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' blob:",  # Blobs: images that the user attached.
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
POLICY: Final = "; ".join(f"{name} {value}" for name, value in _RULES.items())
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=(), payment=()",
    "Cache-Control": "no-cache",  # Revalidated by ETag, so that an upgrade shows at once.
    "Server": "millrace",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Asset:
    body: bytes
    media_type: str
    etag: str


def load_assets(root: Path = ROOT) -> dict[str, Asset]:
    """Every file of the pages, by its path below `static/`."""
    assets: dict[str, Asset] = {}
    for file in sorted(root.rglob("*")):
        if file.suffix in MEDIA_TYPES:
            body = file.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            assets[file.relative_to(root).as_posix()] = Asset(body, MEDIA_TYPES[file.suffix], etag)
    return assets


def add_pages(app: web.Application, pages: Mapping[str, str] = PAGES) -> None:
    assets = load_assets()
    for path, name in pages.items():
        app.router.add_get(path, _page(assets[name]))

    async def file(request: web.Request) -> web.StreamResponse:
        asset = assets.get(request.match_info["name"])
        if asset is None:
            raise web.HTTPNotFound
        return _answer(request, asset)

    app.router.add_get(PREFIX + "{name:.+}", file)


def is_open(path: str) -> bool:
    """True for what needs no key: the pages themselves hold nothing of any tenant."""
    return path in PAGES or path.startswith(PREFIX)


def _page(asset: Asset) -> Handler:
    async def page(request: web.Request) -> web.StreamResponse:
        return _answer(request, asset)

    return page


def _answer(request: web.Request, asset: Asset) -> web.Response:
    headers = {**HEADERS, hdrs.ETAG: asset.etag}
    if request.headers.get(hdrs.IF_NONE_MATCH) == asset.etag:
        return web.Response(status=304, headers=headers)
    return web.Response(body=asset.body, headers={**headers, hdrs.CONTENT_TYPE: asset.media_type})
