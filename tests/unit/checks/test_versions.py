"""Version ranges, and which version is at hand."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

from serving.checks import versions
from serving.checks.installed import index_bounded
from serving.checks.versions import PINNED, known_version, llamacpp, vllm

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("version", "inside"),
    [
        ("0.16.9", False),
        ("0.17.0", True),
        ("0.25.1+cu129", True),
        ("0.26.0rc1", True),
        ("0.26.0.dev12+gabc", True),
        ("0.26.0", False),
        ("0.26.1rc0", False),
    ],
)
def test_a_pre_release_is_still_without_what_the_release_brought(
    version: str, inside: bool
) -> None:
    assert vllm(since="0.17", before="0.26").includes(Version(version)) is inside


def test_ranges_are_written_as_their_engine_writes_versions() -> None:
    assert str(vllm(since="0.17", before="0.26")) == "vLLM >=0.17, <0.26"
    assert str(llamacpp(since=9180)) == "llama.cpp >=b9180"
    assert str(vllm()) == "vLLM"
    assert str(versions.ANY) == "any"


def test_what_is_given_wins_over_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.31.0")
    assert str(known_version("vllm")) == "vLLM 0.31.0 (installed)"
    assert str(known_version("vllm", "0.25")) == "vLLM 0.25 (given)"
    assert str(known_version("llama.cpp", "b9200")) == "llama.cpp b9200 (given)"


def test_where_nothing_is_installed_the_pinned_version_is_assumed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert str(known_version("vllm")) == "vLLM 0.32.0 (assumed)"


def test_the_assumed_version_is_the_one_that_is_installed_with_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"vllm=={PINNED['vllm']}" in project["optional-dependencies"]["gpu"]


@pytest.mark.parametrize(
    ("kernel", "bounded"),
    [
        ("i_t = tl.load(num_accepted_tokens + i_n).to(tl.int64) - 1\ns = tl.load(x)\n", False),
        ("i_t = tl.maximum(tl.load(num_accepted_tokens + i_n) - 1, 0)\ns = tl.load(x)", True),
        ("n = tl.load(num_accepted_tokens + i_n)\ni_t = tl.minimum(n, T) - 1\ntl.load(x)", True),
        ("another kernel", None),
    ],
)
def test_the_installed_kernel_is_seen_to_be_bounded_or_not(
    kernel: str, bounded: bool | None
) -> None:
    assert index_bounded(kernel) is bounded
