"""A server of files that can cut connections: plain HTTP with ranges, and the routes of the Hugging Face hub."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c" * 40


class FileServer:
    """Files by path.

    /NAME                                     plain
    /datasets/OWNER/REPO/resolve/main/NAME    as the hub serves them (a model without `datasets/`)
    /api/models/OWNER/REPO/revision/main      the list of a repository's files

    redirects path -> address to redirect to
    sized     whether answers have a Content-Length
    cuts      bytes after which the next connections end, one number for each
    halt      bytes after which each connection waits until `going` is set, if it is not negative
    requests  (method, path, range) of each request
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.redirects: dict[str, str] = {}
        self.sized = True
        self.cuts: list[int] = []
        self.halt, self.going = -1, threading.Event()
        self.requests: list[tuple[str, str, str]] = []
        self.large = True
        """Whether the hub has a sha256 of its files, as it does for large ones."""
        self.needs_login = ""
        self.url = ""

    def content(self, path: str) -> bytes | None:
        path = path.lstrip("/")
        if path.startswith("api/"):
            kind, owner, repo, *_ = [*path.removeprefix("api/").split("/"), "", ""]
            prefix = f"{'datasets/' if kind == 'datasets' else ''}{owner}/{repo}/resolve/main/"
            names = [name.removeprefix(prefix) for name in self.files if name.startswith(prefix)]
            return json.dumps({"siblings": [{"rfilename": name} for name in names]}).encode()
        return self.files.get(path.replace(f"/resolve/{COMMIT}/", "/resolve/main/"))


@contextmanager
def file_server() -> Iterator[FileServer]:
    """Serve on a free port until the end of the block."""
    served = FileServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"served": served}))
    served.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    served: FileServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        served = self.served
        served.requests.append((self.command, self.path, self.headers.get("Range", "")))
        content = served.content(self.path)
        if self.path in served.redirects:
            self._head(302, 0, {"Location": served.redirects[self.path]})
            return
        if served.needs_login and self.headers.get("Authorization") != f"Bearer {served.needs_login}":
            self._head(401, 0, {})
            return
        if content is None:
            self._head(404, 0, {"X-Error-Code": "EntryNotFound"})
            return
        tag = f'"{hashlib.sha256(content).hexdigest() if served.large else hashlib.md5(content).hexdigest()}"'
        headers = {"ETag": tag, "Accept-Ranges": "bytes"}
        if "/resolve/" in self.path:
            headers |= {"X-Repo-Commit": COMMIT, "X-Linked-Etag": tag, "X-Linked-Size": str(len(content))}
        start, status = self._start(tag), 200
        if start >= len(content) and start:
            self._head(416, 0, {"Content-Range": f"bytes */{len(content)}"})
            return
        if start:
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        rest = content[start:]
        self._head(status, len(rest), headers)
        if body:
            cut = served.cuts.pop(0) if served.cuts and not self.path.startswith("/api/") else None
            if 0 <= served.halt < len(rest) and not served.going.is_set():
                self.wfile.write(rest[: served.halt])
                self.wfile.flush()
                served.going.wait(60)
                rest = rest[served.halt :]
            with suppress(ConnectionError):  # the client was stopped
                self.wfile.write(rest if cut is None else rest[:cut])
            if cut is not None:
                self.close_connection = True

    def _start(self, tag: str) -> int:
        given = self.headers.get("Range", "")
        if not given or self.headers.get("If-Range", tag) != tag:
            return 0
        return int(given.removeprefix("bytes=").partition("-")[0])

    def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.served.sized:
            self.send_header("Content-Length", str(length))
        else:
            self.close_connection = True
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass
