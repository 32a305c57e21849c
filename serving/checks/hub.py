"""A checkpoint in a Hugging Face repository, read a few bytes at a time.

Owns listing a repository's files, range requests, and the wording of what goes wrong
on the way. A repository that is already in the cache can be read from there without
the network. Leaves tokens, endpoints and the cache's place to huggingface_hub.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import huggingface_hub
from huggingface_hub import constants, errors, hf_hub_url
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    hf_raise_for_status,
    http_stream_backoff,
)

from serving.checks.errors import CheckError
from serving.checks.source import CheckpointSource, LocalFolder

RETRIES = 2
TIMEOUT_S = 20

Result = TypeVar("Result")


@dataclass(frozen=True)
class HubRepository:
    """A model repository on the hub, at one commit."""

    repo: str
    revision: str | None = None
    endpoint: str | None = None
    """The hub's address; huggingface_hub's own (HF_ENDPOINT) where absent."""

    @property
    def place(self) -> str:
        return self.repo

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        return self._described[1]

    def read(self, name: str, start: int, length: int) -> bytes:
        return _guarded(self, lambda: self._range(name, start, length))

    @cached_property
    def _described(self) -> tuple[str, Mapping[str, int]]:
        """The commit, and the size of each file."""
        api = huggingface_hub.HfApi(endpoint=self.endpoint)
        info = _guarded(
            self,
            lambda: api.model_info(
                self.repo, revision=self.revision, files_metadata=True, timeout=TIMEOUT_S
            ),
        )
        return str(info.sha), {file.rfilename: file.size or 0 for file in info.siblings or ()}

    @cached_property
    def _headers(self) -> dict[str, str]:
        headers: dict[str, str] = build_hf_headers()
        # Compressed, the bytes asked for would not be those of the file.
        return headers | {"Accept-Encoding": "identity"}

    def _range(self, name: str, start: int, length: int) -> bytes:
        if length == 0:
            return b""
        commit = self._described[0]
        url = hf_hub_url(self.repo, name, revision=commit, endpoint=self.endpoint)
        headers = self._headers | {"Range": f"bytes={start}-{start + length - 1}"}
        got = bytearray()
        with http_stream_backoff(
            "GET",
            url,
            max_retries=RETRIES,
            headers=headers,
            timeout=TIMEOUT_S,
        ) as answer:
            hf_raise_for_status(answer)
            # A server that knows no ranges sends the file from its start: read on, and no further.
            skipped = start if answer.status_code == 200 else 0
            for chunk in answer.iter_bytes():
                got += chunk
                if len(got) >= skipped + length:
                    break
        return bytes(got[skipped : skipped + length])


def cached_repository(repo: str, revision: str | None) -> LocalFolder | None:
    """The repository's folder in huggingface_hub's cache; None where it is not there."""
    try:
        folder = huggingface_hub.snapshot_download(repo, revision=revision, local_files_only=True)
    except (OSError, ValueError):
        return None
    return LocalFolder(Path(folder), name=repo)


def open_repository(repo: str, revision: str | None) -> CheckpointSource:
    """The repository on the hub; from the cache where HF_HUB_OFFLINE is set.

    Raises CheckError where it is neither allowed to ask nor in the cache.
    """
    if not constants.HF_HUB_OFFLINE:
        return HubRepository(repo, revision)
    cached = cached_repository(repo, revision)
    if cached is None:
        cure = "unset HF_HUB_OFFLINE, or fetch it first with `moe-serving pull`"
        text = f"{repo}: HF_HUB_OFFLINE is set and the repository is not in the cache; {cure}"
        raise CheckError(text, code="offline")
    return cached


def _guarded(repository: HubRepository, work: Callable[[], Result]) -> Result:
    """The library's errors as ours: what was asked for, what came, the cure."""
    name = repository.repo
    # Its HTTP client's own error, from which its answers' errors descend.
    unreachable: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
    try:
        return work()
    except errors.GatedRepoError:
        code = "token"
        text = (
            f"the repository is gated; accept its terms on the page of {name} and set HF_TOKEN "
            "to a token that may read it"
        )
    except errors.RevisionNotFoundError:
        code, text = "missing", f"no revision {repository.revision!r}; correct it"
    except errors.RepositoryNotFoundError:
        code = "token"
        text = "no such repository, or a private one; correct the name, or set HF_TOKEN"
    except errors.HfHubHTTPError as error:
        code, status = "hub", error.response.status_code
        text = f"the hub answered {status}; try again later, or check HF_TOKEN"
    except errors.HFValidationError as error:
        code, text = "name", f"not a repository's name ({error}); correct it"
    except (unreachable, errors.OfflineModeIsEnabled):
        code = "offline"
        text = "the hub cannot be reached; check the network and HF_ENDPOINT"
    raise CheckError(f"{name}: {text}", code=code) from None
