"""A stand-in for the hub's HTTP API: model info with sizes and digests, files with ranges, errors, broken transfers."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LFS_FROM = 1000
"""Files at least this large are in LFS, with a SHA-256."""


@dataclass
class FakeHub:
    repos: dict[str, dict[str, bytes]]
    recorded: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Answers of the hub's API about repositories whose files are not here."""
    gated: set[str] = field(default_factory=set)
    token: str = "hf_right"
    cut_after: int = 0
    """The next transfer of an LFS file breaks off after this many bytes, once."""
    damage: bool = False
    """LFS files arrive with other bytes than their digest says."""
    ranges: list[str] = field(default_factory=list)
    downloads: list[str] = field(default_factory=list)
    url: str = ""

    def info(self, repo: str) -> dict[str, Any]:
        if repo in self.recorded:
            return self.recorded[repo]
        return {
            "_id": "1",
            "id": repo,
            "modelId": repo,
            "sha": COMMIT,
            "private": False,
            "tags": [],
            "siblings": [self._sibling(name, data) for name, data in self.repos[repo].items()],
        }

    def _sibling(self, name: str, data: bytes) -> dict[str, Any]:
        entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": hashlib.sha1(data).hexdigest()}
        if len(data) >= LFS_FROM:
            entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return entry


@contextmanager
def running_hub(hub: FakeHub) -> Iterator[FakeHub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            info = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path)
            file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
            match = info or file
            if match is None:
                return self._error(404, "EntryNotFound", "no such path")
            repo, revision = match[1], match[2] or "main"
            if repo not in hub.repos and repo not in hub.recorded:
                return self._error(401, "RepoNotFound", "Repository not found")
            if repo in hub.gated and self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self._error(401, "GatedRepo", "Access to this model is restricted")
            if revision not in ("main", COMMIT, "v1"):
                return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            if info is not None:
                return self._send(json.dumps(hub.info(repo)).encode(), {"Content-Type": "application/json"}, with_body)
            assert file is not None
            if file[3] not in hub.repos[repo]:
                return self._error(404, "EntryNotFound", "Entry not found")
            return self._file(file[3], hub.repos[repo][file[3]], with_body)

        def _file(self, name: str, data: bytes, with_body: bool) -> None:
            is_lfs = len(data) >= LFS_FROM
            digest = hashlib.sha256(data).hexdigest() if is_lfs else hashlib.sha1(data).hexdigest()
            headers = {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            if is_lfs:
                headers |= {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(data))}
                if hub.damage:
                    data = bytes(len(data))
            status, wanted = 200, self.headers.get("Range", "")
            if with_body:
                hub.downloads.append(name)
            if wanted and with_body:
                hub.ranges.append(wanted)
                start = int(re.fullmatch(r"bytes=(\d+)-\d*", wanted)[1])  # type: ignore[index]
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
                data, status = data[start:], 206
            cut, is_cut = hub.cut_after, with_body and is_lfs and 0 < hub.cut_after < len(data)
            if is_cut:
                hub.cut_after = 0
            self._send(data, headers, with_body, status, cut if is_cut else None)

        def _send(
            self, data: bytes, headers: dict[str, str], with_body: bool, status: int = 200, cut: int | None = None
        ) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            if with_body:
                self.wfile.write(data if cut is None else data[:cut])
            if cut is not None:
                self.wfile.flush()
                self.close_connection = True
                self.connection.shutdown(2)

        def _error(self, status: int, code: str, message: str) -> None:
            self._send(b"{}", {"X-Error-Code": code, "X-Error-Message": message}, self.command == "GET", status)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
