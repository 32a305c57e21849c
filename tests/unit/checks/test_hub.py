"""Repositories, read from a stand-in for the hub and from the cache."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from serving.checks import hub as hub_module
from serving.checks.checkpoint import read_checkpoint
from serving.checks.errors import CheckError
from serving.checks.hub import HubRepository, cached_repository, open_repository
from tests.unit.checks.builders import TRUNK, checkpoint, head, sharded
from tests.unit.checks.hub_server import COMMIT, Hub, serve

LARGE = {"model.layers.0.large.weight": ("F32", (10_000_000,))}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(hub_module, "RETRIES", 0)
    folder = tmp_path / "repository"
    sharded(folder, {"a.safetensors": TRUNK | LARGE, "b.safetensors": head()})
    with serve(folder) as running:
        yield running


def repository(hub: Hub) -> HubRepository:
    return HubRepository("lab/model", endpoint=hub.url)


def test_a_repository_reads_as_the_same_folder_does(hub: Hub) -> None:
    from serving.checks.source import LocalFolder

    there, here = (read_checkpoint(each) for each in (repository(hub), LocalFolder(hub.folder)))
    assert there.place == "lab/model"
    assert (there.tensors, there.index, there.files) == (here.tensors, here.index, here.files)
    assert there.faults == {}


def test_of_weights_only_headers_are_sent(hub: Hub) -> None:
    read_checkpoint(repository(hub))
    assert hub.sent["a.safetensors"] <= 128 * 1024
    assert (hub.folder / "a.safetensors").stat().st_size > 40_000_000


def test_a_server_without_ranges_is_not_read_to_the_end(hub: Hub) -> None:
    hub.ranges = False
    found = read_checkpoint(repository(hub))
    assert set(head()) < set(found.tensors)
    # What is on its way in the sockets' buffers comes on top of the 128 kB asked for.
    assert hub.sent["a.safetensors"] < 20_000_000


def test_a_token_is_sent_where_one_is_set(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    read_checkpoint(repository(hub))
    assert hub.tokens == {"Bearer hf_test"}


@pytest.mark.parametrize(
    ("refused", "text"),
    [
        (
            (403, "GatedRepo"),
            "lab/model: the repository is gated; accept its terms on the page of lab/model and set "
            "HF_TOKEN to a token that may read it",
        ),
        (
            (404, "RepoNotFound"),
            "lab/model: no such repository, or a private one; correct the name, or set HF_TOKEN",
        ),
        ((404, "RevisionNotFound"), "lab/model: no revision 'v9'; correct it"),
        ((500, ""), "lab/model: the hub answered 500; try again later, or check HF_TOKEN"),
    ],
)
def test_a_refusal_is_told_with_its_cure(hub: Hub, refused: tuple[int, str], text: str) -> None:
    hub.refused = refused
    with pytest.raises(CheckError) as error:
        read_checkpoint(HubRepository("lab/model", "v9", endpoint=hub.url))
    assert str(error.value) == text


def test_an_unreachable_hub_is_told_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = HubRepository("lab/model", endpoint="http://127.0.0.1:1")
    with pytest.raises(CheckError) as error:
        read_checkpoint(nobody)
    text = "lab/model: the hub cannot be reached; check the network and HF_ENDPOINT"
    assert str(error.value) == text


def test_a_hub_that_goes_away_between_files_is_told(hub: Hub) -> None:
    source = repository(hub)
    assert source.sizes
    hub.refused = (500, "")
    with pytest.raises(CheckError, match="the hub answered 500"):
        read_checkpoint(source)


def test_offline_without_the_repository_in_the_cache_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckError) as error:
        open_repository("lab/model", None)
    assert str(error.value) == (
        "lab/model: HF_HUB_OFFLINE is set and the repository is not in the cache; unset "
        "HF_HUB_OFFLINE, or fetch it first with `moe-serving pull`"
    )


def test_offline_the_cache_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    put_in_cache(tmp_path, monkeypatch)
    found = read_checkpoint(open_repository("lab/model", None))
    assert found.place == "lab/model"
    assert set(head()) < set(found.tensors)


def test_what_is_not_in_the_cache_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert cached_repository("lab/model", None) is None


def put_in_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The repository lab/model as huggingface_hub lays it out; returns its snapshot."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    place = cache / "models--lab--model"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(COMMIT)
    checkpoint(place / "snapshots" / COMMIT)
    return place / "snapshots" / COMMIT


def test_the_command_goes_by_hf_endpoint(hub: Hub, tmp_path: Path) -> None:
    program = (
        "import typer; from serving.checks.command import check; "
        "app = typer.Typer(); app.command()(check); app()"
    )
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    result = subprocess.run(
        [sys.executable, "-c", program, "lab/model"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "lab/model: vLLM" in result.stdout
    assert "nothing found" in result.stdout
