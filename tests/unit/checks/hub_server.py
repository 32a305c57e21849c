"""A stand-in for the hub: the requests that a check makes, on a folder of this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

COMMIT = "b" * 40
RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@dataclass
class Hub:
    """What the server has, how it behaves, and what it was asked."""

    folder: Path
    url: str = ""
    ranges: bool = True
    """False: every answer is the whole file, as from a server that knows no ranges."""
    refused: tuple[int, str] | None = None
    """A status and the hub's error code for every request."""
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes sent of each file."""
    tokens: set[str | None] = field(default_factory=set)


@contextmanager
def serve(folder: Path) -> Iterator[Hub]:
    """The hub with the files of `folder` as the repository lab/model."""
    hub, lock = Hub(folder), Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            with lock:
                hub.tokens.add(self.headers.get("Authorization"))
            if hub.refused is not None:
                status, code = hub.refused
                self.answer(status, b"", {"X-Error-Code": code})
            elif self.path.startswith("/api/models/lab/model"):
                self.answer(200, json.dumps(described(hub.folder)).encode(), {})
            elif self.path.startswith(f"/lab/model/resolve/{COMMIT}/"):
                self.send_file(self.path.rpartition("/")[2])
            else:
                self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})

        def send_file(self, name: str) -> None:
            content = (hub.folder / name).read_bytes()
            asked = RANGE.fullmatch(self.headers.get("Range", ""))
            if asked is None or not hub.ranges:
                self.answer(200, content, {}, name)
                return
            start, end = int(asked[1]), min(int(asked[2]), len(content) - 1)
            headers = {"Content-Range": f"bytes {start}-{end}/{len(content)}"}
            self.answer(206, content[start : end + 1], headers, name)

        def answer(self, status: int, body: bytes, headers: dict[str, str], name: str = "") -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            try:
                for start in range(0, len(body), 65_536):
                    chunk = body[start : start + 65_536]
                    self.wfile.write(chunk)
                    with lock:
                        hub.sent[name] = hub.sent.get(name, 0) + len(chunk)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def described(folder: Path) -> dict[str, Any]:
    """The answer of the hub's API about the repository."""
    files = [
        {"rfilename": path.name, "size": path.stat().st_size} for path in sorted(folder.iterdir())
    ]
    return {"id": "lab/model", "modelId": "lab/model", "sha": COMMIT, "siblings": files}
