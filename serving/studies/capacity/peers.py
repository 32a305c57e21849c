"""The two gateways of others that are compared, each in a Python environment of its own.

Owns their versions and where the environments lie. Leaves starting them to `targets`. Neither
goes into this project's environment: both pin what it uses, too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CACHE_VARIABLE = "XDG_CACHE_HOME"
COMPLETE = "complete"


@dataclass(frozen=True, slots=True)
class Peer:
    """One package of PyPI and the program it brings."""

    name: str
    version: str
    program: str
    extra: str = ""

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.name}{self.extra}=={self.version}"

    @property
    def folder(self) -> Path:
        """Its environment."""
        cache = os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache"
        return Path(cache) / "moe-serving" / "bench" / f"{self.name}-{self.version}"

    @property
    def installed(self) -> bool:
        """Whether its environment is there and whole."""
        return (self.folder / COMPLETE).is_file()

    @property
    def command(self) -> str:
        """The program's path."""
        return str(self.folder / "bin" / self.program)


VLLM_ROUTER = Peer("vllm-router", "0.1.17", "vllm-router")
# 1.82.7, 1.82.8 and 1.107.0 carried malicious code.
LITELLM = Peer("litellm", "1.108.7", "litellm", extra="[proxy]")


class PeerError(RuntimeError):
    """An environment could not be made; the text has pip's last line."""


def install(peer: Peer) -> None:
    """Make the peer's environment anew; raises PeerError and leaves none then."""
    shutil.rmtree(peer.folder, ignore_errors=True)
    peer.folder.parent.mkdir(parents=True, exist_ok=True)
    python = str(peer.folder / "bin" / "python")
    for command in (
        [sys.executable, "-m", "venv", str(peer.folder)],
        [python, "-m", "pip", "install", "--quiet", peer.requirement],
    ):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            shutil.rmtree(peer.folder, ignore_errors=True)
            said = (result.stderr or result.stdout).strip().splitlines()
            raise PeerError(f"{peer.requirement} was not installed: {said[-1] if said else 'pip'}")
    (peer.folder / COMPLETE).touch()
