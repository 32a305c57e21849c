"""The weights of a stack, fetched ahead of time and checked.

Owns which checkpoints a stack needs, whether the disk holds them, and comparing
every file with the checksum its repository gives. Leaves the transfer itself to
huggingface_hub, which resumes what was interrupted.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from serving.stack.spec import StackSpec

if TYPE_CHECKING:
    from huggingface_hub import HfApi

CHUNK_BYTES = 8 * 2**20
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Other forms of the same weights, which vLLM leaves aside where there are safetensors.
OTHER_FORMS = ["*.bin", "*.pt", "*.pth", "original/*"]


class WeightsError(RuntimeError):
    """Weights cannot be fetched or are not whole; the text names them and the cure."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where one checkpoint is: a folder, or a repository at a revision."""

    path: Path | None = None
    repo: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        return str(self.path or self.repo) + (f" at {self.revision}" if self.revision else "")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file as its repository describes it; `sha256` is None for small files kept in git."""

    name: str
    size: int
    sha256: str | None
    git_sha1: str | None


def sources(stack: StackSpec) -> tuple[Source, ...]:
    """Every checkpoint the stack needs, drafting ones included, each once."""
    found: dict[Source, None] = {}
    for model in stack.models:
        weights = model.checked_source()
        found[Source(weights.path, weights.repo, weights.revision)] = None
        for variant in model.variants.values():
            drafts = variant.speculative
            if drafts is None or drafts.model is None:
                continue
            folder = Path(drafts.model)
            local = folder.is_dir()
            found[
                Source(folder if local else None, None if local else drafts.model, drafts.revision)
            ] = None
    return tuple(found)


def pull_stack(
    stack: StackSpec, console: Console, endpoint: str | None = None, cache: Path | None = None
) -> None:
    """Fetch what is missing and check all of it; raises WeightsError at the first fault.

    `endpoint` and `cache` are huggingface_hub's own where absent.
    """
    for source in sources(stack):
        if source.path is not None:
            count = check_folder(source.path)
            console.print(f"{source.path}: on this machine, {count} file(s) whole", soft_wrap=True)
        else:
            _pull(source, console, endpoint, cache)


# --- local folders ------------------------------------------------------------------------


def check_folder(folder: Path) -> int:
    """How many weight files the folder has; raises WeightsError unless all are there and whole."""
    index = folder / INDEX
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = [SINGLE]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise WeightsError(f"{folder}: {', '.join(missing)} missing; correct the path or copy it")
    for name in names:
        _check_header(folder / name)
    return len(names)


def _check_header(path: Path) -> None:
    """The header says where the last tensor ends, so a cut file is found without reading it all."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            file.keys()
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"{path}: not a whole safetensors file ({error}); copy it anew"
        ) from None


# --- repositories -------------------------------------------------------------------------


def _pull(source: Source, console: Console, endpoint: str | None, cache: Path | None) -> None:
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint)
    with console.status(f"asking for {source}"):
        commit, files = _guarded(source, lambda: _describe(api, source))
    ignored = OTHER_FORMS if any(f.name.endswith(".safetensors") for f in files) else []
    options: dict[str, Any] = {
        "repo_id": source.repo,
        "revision": commit,
        "cache_dir": cache,
        "ignore_patterns": ignored,
    }
    _check_room(source, api, options)
    folder = Path(_guarded(source, lambda: api.snapshot_download(**options)))
    wanted = [file for file in files if (folder / file.name).is_file()]
    _check_files(source, folder, wanted, console)
    console.print(f"{source}: {len(wanted)} files fetched and checked", soft_wrap=True)


def _describe(api: HfApi, source: Source) -> tuple[str, list[HubFile]]:
    info = api.model_info(str(source.repo), revision=source.revision, files_metadata=True)
    files = [
        HubFile(
            name=sibling.rfilename,
            size=sibling.size or 0,
            sha256=sibling.lfs.sha256 if sibling.lfs else None,
            git_sha1=sibling.blob_id,
        )
        for sibling in info.siblings or ()
    ]
    return str(info.sha), files


def _check_room(source: Source, api: HfApi, options: dict[str, Any]) -> None:
    """Refuse before a byte is fetched where the rest would not fit."""
    from huggingface_hub import constants

    plan = _guarded(source, lambda: api.snapshot_download(**options, dry_run=True))
    need = sum(file.file_size for file in plan if file.will_download)
    place = Path(options["cache_dir"] or constants.HF_HUB_CACHE)
    existing = next(folder for folder in (place, *place.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if need > free:
        raise WeightsError(
            f"{source}: {need / 1e9:.1f} GB to fetch, but {place} has {free / 1e9:.1f} GB free; "
            "free some, or set HF_HOME to a larger disk"
        )


def _check_files(source: Source, folder: Path, files: list[HubFile], console: Console) -> None:
    columns = (
        TextColumn("checking {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task(str(source), total=sum(file.size for file in files))
        for file in files:
            path = folder / file.name
            if not matches(path, file, lambda count: bars.advance(bar, count)):
                # What is damaged would be taken for fetched by the next pull.
                path.resolve().unlink(missing_ok=True)
                path.unlink(missing_ok=True)
                raise WeightsError(
                    f"{source}: {file.name} does not match its checksum; it is removed, "
                    "pull again to fetch it anew"
                )


def matches(path: Path, file: HubFile, advance: Callable[[int], None]) -> bool:
    """Whether the file has the repository's checksum: SHA-256, or git's own for small files."""
    if file.sha256 is not None:
        digest, expected = hashlib.sha256(), file.sha256
    elif file.git_sha1 is not None:
        digest, expected = hashlib.sha1(usedforsecurity=False), file.git_sha1
        digest.update(b"blob %d\0" % path.stat().st_size)
    else:
        return path.stat().st_size == file.size
    with path.open("rb") as content:
        while chunk := content.read(CHUNK_BYTES):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest() == expected


def _guarded(source: Source, work: Callable[[], Any]) -> Any:
    """The library's errors as ours: what was asked for, what came, the cure."""
    from huggingface_hub import errors

    # Its HTTP client's own error, from which its answers' errors descend.
    unreachable: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
    try:
        return work()
    except errors.GatedRepoError:
        cure = (
            f"accept its terms on the page of {source.repo} and set HF_TOKEN to a token that may "
            "read it"
        )
        text = f"the repository is gated; {cure}"
    except errors.RevisionNotFoundError:
        text = "no such revision; correct `revision` in the stack file or the catalogue"
    except errors.RepositoryNotFoundError:
        text = "no such repository, or a private one; correct the name, or set HF_TOKEN"
    except errors.HfHubHTTPError as error:
        code = error.response.status_code
        text = f"the hub answered {code}; try again later, or check HF_TOKEN"
    except errors.HFValidationError as error:
        text = f"not a repository's name ({error}); correct it"
    except errors.XetDownloadError as error:
        text = f"the transfer broke off ({error}); pull again to go on from there"
    except (unreachable, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        text = "the hub cannot be reached; check the network and HF_ENDPOINT, then pull again"
    except OSError as error:
        full = error.errno == errno.ENOSPC
        cure = "free some space" if full else "check the cache folder's rights (HF_HOME)"
        text = f"{(error.strerror or str(error)).lower()}; {cure}, then pull again"
    raise WeightsError(f"{source}: {text}") from None
