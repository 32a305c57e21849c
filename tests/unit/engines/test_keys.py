"""The engine key: where it comes from, how it is rolled, and the port it guards."""

from __future__ import annotations

import os
import stat
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.engines.keys import (
    ENGINE_KEY_HEADER,
    KEY_FILE_VARIABLE,
    KEY_VARIABLE,
    EngineKeyError,
    EngineKeyMiddleware,
    EngineKeys,
    Receive,
    Scope,
    Send,
    make_key_file,
)

REFUSAL = (
    b'{"error": {"message": "this port serves the stack\'s gateway only; send requests to '
    b'the gateway", "type": "authentication_error", "param": null, "code": "engine_key"}}'
)


@pytest.fixture(autouse=True)
def no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.delenv(KEY_FILE_VARIABLE, raising=False)


def test_a_key_rolled_while_running_leaves_old_and_new_accepted(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("old\n")
    keys = EngineKeys(file=file)
    assert (keys.current(), keys.accepts(b"old"), keys.accepts(b"new")) == ("old", True, False)

    file.write_text("new\nold\n")
    assert (keys.current(), keys.accepts(b"old"), keys.accepts(b"new")) == ("new", True, True)

    file.write_text("new\n")
    assert (keys.current(), keys.accepts(b"old"), keys.accepts(b"new")) == ("new", False, True)


def test_a_rewrite_that_keeps_size_and_time_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("one\n")
    os.utime(file, (1, 1))
    keys = EngineKeys(file=file)
    file.write_text("two\n")
    os.utime(file, (1, 1))
    assert (keys.current(), keys.accepts(b"one")) == ("two", False)


@pytest.mark.parametrize("caught", ["", "\n", "caf\u00e9\n", None])
def test_a_key_file_caught_in_a_rewrite_leaves_the_last_good_keys(
    tmp_path: Path, caught: str | None
) -> None:
    file = tmp_path / "key"
    file.write_text("one\n")
    keys = EngineKeys(file=file)
    file.unlink()
    if caught is not None:
        file.write_text(caught, encoding="utf-8")
    assert (keys.current(), keys.accepts(b"one"), keys.accepts(b"")) == ("one", True, False)

    file.write_text("two\n")
    assert (keys.current(), keys.accepts(b"one")) == ("two", False)


def test_an_empty_key_is_never_accepted(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("\n  secret \n\n")
    keys = EngineKeys(file=file)
    assert (keys.accepts(b""), keys.accepts(b"secret")) == (False, True)


def test_keys_in_the_variable_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "new, old")
    keys = EngineKeys.from_environment()
    assert (keys.current(), keys.accepts(b"old"), keys.accepts(b"new, old")) == ("new", True, False)


def test_the_key_file_of_the_environment_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("secret\n")
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(tmp_path / "key"))
    assert EngineKeys.from_environment().current() == "secret"


def test_unset_variables_are_an_error_that_names_both() -> None:
    with pytest.raises(EngineKeyError) as error:
        EngineKeys.from_environment()
    assert str(error.value) == (
        "no engine key: set MOE_SERVING_ENGINE_KEY or MOE_SERVING_ENGINE_KEY_FILE "
        "for every Ray process"
    )


@pytest.mark.parametrize("value", [",", " , ", ",,"])
def test_a_variable_without_a_key_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, value)
    with pytest.raises(EngineKeyError) as error:
        EngineKeys.from_environment()
    assert str(error.value) == (
        "MOE_SERVING_ENGINE_KEY holds no key: write one or more, with commas between them, "
        "or unset it and name a file in MOE_SERVING_ENGINE_KEY_FILE"
    )


def test_a_missing_key_file_is_an_error_at_start_that_names_it(tmp_path: Path) -> None:
    file = tmp_path / "key"
    with pytest.raises(EngineKeyError) as error:
        EngineKeys(file=file)
    assert str(error.value) == (
        f"engine key file {file}: [Errno 2] No such file or directory: '{file}'"
    )


def test_a_key_file_without_a_key_is_an_error_at_start_that_names_it(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("\n")
    with pytest.raises(EngineKeyError) as error:
        EngineKeys(file=file)
    assert str(error.value) == f"engine key file {file} holds no key"


def test_a_new_key_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "run" / "key"
    make_key_file(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    # 256 bits in base64 without padding.
    assert len(EngineKeys(file=file).current()) == 43


def test_two_new_key_files_hold_different_keys(tmp_path: Path) -> None:
    make_key_file(tmp_path / "one")
    make_key_file(tmp_path / "two")
    assert (tmp_path / "one").read_text() != (tmp_path / "two").read_text()


def test_an_existing_key_file_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("mine\n")
    make_key_file(file)
    assert file.read_text() == "mine\n"


async def answer_ok(scope: Scope, receive: Receive, send: Send) -> None:
    """The guarded application: it answers every path."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"engine"})


async def get(path: str, headers: dict[str, str] | None = None) -> httpx.Response:
    app = EngineKeyMiddleware(answer_ok, EngineKeys(keys=("new", "old")))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        return await client.get(path, headers=headers)


GUARDED = ["/v1/x", "/metrics", "/tokenize", "/invocations", "/health/x", "/healthz"]


@pytest.mark.parametrize("path", GUARDED)
async def test_a_request_without_the_key_is_refused(path: str) -> None:
    response = await get(path)
    assert (response.status_code, response.content) == (401, REFUSAL)
    assert response.headers["content-type"] == "application/json"
    assert response.headers["content-length"] == str(len(REFUSAL))


@pytest.mark.parametrize(
    "headers",
    [
        {ENGINE_KEY_HEADER: "wrong"},
        {ENGINE_KEY_HEADER: ""},
        {ENGINE_KEY_HEADER: "new,old"},
        {"authorization": "Bearer new"},
    ],
)
async def test_a_request_with_another_key_is_refused(headers: dict[str, str]) -> None:
    response = await get("/v1/x", headers)
    assert (response.status_code, response.content) == (401, REFUSAL)


@pytest.mark.parametrize("key", ["new", "old"])
@pytest.mark.parametrize("path", GUARDED)
async def test_a_request_with_any_of_the_keys_passes(path: str, key: str) -> None:
    response = await get(path, {ENGINE_KEY_HEADER: key})
    assert (response.status_code, response.content) == (200, b"engine")


async def test_the_health_check_passes_without_a_key() -> None:
    response = await get("/health")
    assert (response.status_code, response.content) == (200, b"engine")


async def test_a_websocket_is_closed_even_with_the_key() -> None:
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    app = EngineKeyMiddleware(answer_ok, EngineKeys(keys=("new",)))
    scope = {
        "type": "websocket",
        "path": "/v1/realtime",
        "headers": [(ENGINE_KEY_HEADER.encode(), b"new")],
    }
    await app(scope, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]
