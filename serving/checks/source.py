"""Where a checkpoint's bytes are read from, a few at a time.

Owns the seam and the folder on this machine. Leaves repositories to `hub`, and what
the bytes mean to the readers of headers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from serving.checks.errors import CheckError

# The largest JSON file read whole. Tokenizers are larger, but are not read.
MAX_JSON_BYTES = 64 * 2**20


class CheckpointSource(Protocol):
    """A folder of files that can be read in part."""

    @property
    def place(self) -> str:
        """The path or repository id, as the engine would be given it."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Size in bytes of every file, by its path within the folder."""

    def read(self, name: str, start: int, length: int) -> bytes:
        """Up to `length` bytes of a file from `start` on; fewer where it ends before.

        Raises CheckError where the file cannot be read.
        """


@dataclass(frozen=True)
class LocalFolder:
    """A checkpoint's folder on this machine; `name` is what the engine is told, if not the path."""

    folder: Path
    name: str | None = None

    @property
    def place(self) -> str:
        return self.name or str(self.folder)

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        try:
            paths = [path for path in self.folder.iterdir() if path.is_file()]
            return {path.name: path.stat().st_size for path in paths}
        except OSError as error:
            raise _unreadable(self.folder, error) from None

    def read(self, name: str, start: int, length: int) -> bytes:
        path = self.folder / name
        try:
            with path.open("rb") as file:
                file.seek(start)
                return file.read(length)
        except OSError as error:
            raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> CheckError:
    reason = (error.strerror or str(error)).lower()
    return CheckError(
        f"{path}: cannot be read ({reason}); check the path and its permissions", code="unreadable"
    )
