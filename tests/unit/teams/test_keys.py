"""The form of a key, what is stored of it, and where the server's secret comes from."""

from __future__ import annotations

import base64
import hashlib
import hmac
import multiprocessing
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.teams.errors import TeamsError
from serving.teams.keys import (
    KEY_LENGTH,
    SECRET_FILE_VARIABLE,
    digest,
    id_of,
    mint,
    server_secret,
    well_formed,
)


def test_a_key_holds_256_random_bits_behind_a_readable_id() -> None:
    key = mint()
    assert key.startswith(f"msk_{id_of(key)}_")
    assert len(id_of(key)) == 8
    assert len(base64.urlsafe_b64decode(key[13:] + "=")) == 32


def test_every_key_made_is_well_formed_and_none_is_made_twice() -> None:
    made = [mint() for _ in range(500)]
    assert len(set(made)) == len(made)
    assert all(well_formed(key.encode()) and len(key) == KEY_LENGTH for key in made)


@given(st.binary(max_size=200))
def test_what_no_key_begins_with_is_not_well_formed(offered: bytes) -> None:
    assert well_formed(offered) is False


@given(st.integers(0, KEY_LENGTH - 1), st.sampled_from(b"\x00 \n\xff=+/."))
def test_a_key_with_a_foreign_byte_is_not_well_formed(place: int, byte: int) -> None:
    key = bytearray(mint().encode())
    key[place] = byte
    assert not well_formed(bytes(key))


@pytest.mark.parametrize("change", [lambda key: key[:-1], lambda key: key + b"a"])
def test_a_key_that_is_cut_or_longer_is_not_well_formed(change: Callable[[bytes], bytes]) -> None:
    assert not well_formed(change(mint().encode()))


@given(st.binary(min_size=32, max_size=64), st.binary(max_size=80))
def test_the_digest_is_hmac_sha_256(secret: bytes, key: bytes) -> None:
    assert digest(secret, key) == hmac.new(secret, key, hashlib.sha256).digest()


def test_the_secret_is_made_once_for_its_owner_only(tmp_path: Path) -> None:
    home = tmp_path / "home"
    first = server_secret(home)
    assert len(first) >= 32
    assert server_secret(home) == first
    assert [path.name for path in home.iterdir()] == ["keys.secret"]
    assert stat.S_IMODE((home / "keys.secret").stat().st_mode) == 0o600
    assert server_secret(tmp_path / "other") != first


def test_processes_that_make_the_secret_at_once_have_the_same(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        assert len(set(pool.map(server_secret, [tmp_path] * 16, chunksize=1))) == 1


def test_the_variable_names_the_file_of_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "shared"
    file.write_text("s" * 64 + "\n")
    monkeypatch.setenv(SECRET_FILE_VARIABLE, str(file))
    assert server_secret(tmp_path) == b"s" * 64
    assert not (tmp_path / "keys.secret").exists()


def test_a_named_file_that_is_not_there_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET_FILE_VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(TeamsError, match=r"absent: cannot be used \(no such file"):
        server_secret(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_short_secret_is_refused_without_showing_it(tmp_path: Path) -> None:
    file = tmp_path / "keys.secret"
    file.write_text("hunter2")
    os.chmod(file, 0o600)
    with pytest.raises(TeamsError, match="holds 7 bytes") as caught:
        server_secret(tmp_path)
    assert "hunter2" not in str(caught.value)


def test_a_secret_that_others_may_read_is_refused(tmp_path: Path) -> None:
    server_secret(tmp_path)
    file = tmp_path / "keys.secret"
    os.chmod(file, 0o640)
    with pytest.raises(TeamsError, match=f"run chmod 600 {file}"):
        server_secret(tmp_path)
