"""Finding the catalogue's files and reading them once.

Owns where `configs/` is and the look-up by id. Leaves reading YAML to
`yaml_file` and what the fields mean to `models` and `gpus`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TypeVar

from serving.catalog.errors import CatalogError, ConfigError, Problem
from serving.catalog.gpus import GpuClass
from serving.catalog.models import ModelEntry, unknown_name
from serving.catalog.yaml_file import load_yaml

PACKAGE_DIR = Path(__file__).resolve().parents[1]

Entry = TypeVar("Entry", ModelEntry, GpuClass)


def configs_dir(package: Path = PACKAGE_DIR) -> Path:
    """The folder with `models/`, `gpus/` and `stacks/`.

    `package` is the folder of the package `serving`: an installed one carries
    its own `configs/`, in a checkout the folder is beside it. Raises
    CatalogError where neither is there.
    """
    # The package's own first: in an installation the folder beside it is site-packages.
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "models").is_dir():
            return folder
    raise CatalogError(
        f"no catalogue in {package / 'configs'} nor in {package.parent / 'configs'}; "
        "install moe-serving again, or run it from a complete checkout",
        code="no-catalogue",
    )


def read_entries(folder: Path, kind: type[Entry]) -> dict[str, Entry]:
    """Every `*.yaml` of `folder` as one `kind`, by id, in the order of their names.

    Raises ConfigError for a faulty file and for one that is not named after its id.
    """
    entries: dict[str, Entry] = {}
    for path in sorted(folder.glob("*.yaml")):
        entry = load_yaml(path, kind)
        if entry.id != path.stem:
            text = f"found {entry.id!r} in a file called {path.name}; make the two agree"
            raise ConfigError((Problem(str(path), 1, "id", text),))
        entries[entry.id] = entry
    return entries


def list_models() -> list[ModelEntry]:
    """Every model of the catalogue, by id. Raises ConfigError for a faulty file."""
    return list(_models().values())


def list_gpus() -> list[GpuClass]:
    """Every GPU class of the catalogue, by id. Raises ConfigError for a faulty file."""
    return list(_gpus().values())


def find_model(model_id: str) -> ModelEntry:
    """The model called `model_id`; raises CatalogError naming the nearest and all ids."""
    return _find(_models(), model_id, "model")


def find_gpu(gpu_id: str) -> GpuClass:
    """The GPU class called `gpu_id`; raises CatalogError naming the nearest and all ids."""
    return _find(_gpus(), gpu_id, "GPU class")


@cache
def _models() -> dict[str, ModelEntry]:
    return read_entries(configs_dir() / "models", ModelEntry)


@cache
def _gpus() -> dict[str, GpuClass]:
    return read_entries(configs_dir() / "gpus", GpuClass)


def _find(entries: dict[str, Entry], entry_id: str, kind: str) -> Entry:
    if entry_id in entries:
        return entries[entry_id]
    raise CatalogError(unknown_name(kind, entry_id, list(entries)), code="unknown-id")
