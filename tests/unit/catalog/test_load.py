"""Finding the catalogue, and looking things up in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from serving.catalog import (
    CatalogError,
    ConfigError,
    configs_dir,
    find_gpu,
    find_model,
    list_gpus,
    list_models,
)
from serving.catalog.gpus import GpuClass
from serving.catalog.load import read_entries


def test_every_model_that_is_promised_is_there() -> None:
    assert [model.id for model in list_models()] == [
        "gemma-4",
        "qwen3.6-27b",
        "qwen3.6-35b-a3b",
        "qwen3.8-27b",
        "tiny-dense",
        "tiny-moe",
    ]


def test_every_file_of_the_catalogue_is_read() -> None:
    folder = configs_dir()
    assert {gpu.id for gpu in list_gpus()} == {file.stem for file in folder.glob("gpus/*.yaml")}
    assert {model.id for model in list_models()} == {
        file.stem for file in folder.glob("models/*.yaml")
    }


def test_a_model_drafts_with_its_own_layers_or_with_a_checkpoint_beside_it() -> None:
    drafters = {
        model.id: (model.architecture.mtp_layers, model.draft.repo if model.draft else None)
        for model in list_models()
    }
    assert drafters.pop("gemma-4") == (0, "google/gemma-4-31B-it-assistant")
    assert set(drafters.values()) == {(1, None)}


def test_qwen_models_come_in_every_quantisation() -> None:
    for name in ("qwen3.6-27b", "qwen3.6-35b-a3b", "qwen3.8-27b"):
        kinds = {point.quantisation for point in find_model(name).checkpoints.values()}
        assert kinds == {"bf16", "fp8", "nvfp4", "int4", "gguf"}


@pytest.mark.parametrize(
    ("find", "name", "expected"),
    [
        (
            find_model,
            "qwen3.6-27",
            "No model is called 'qwen3.6-27'. "
            "Did you mean qwen3.6-27b, qwen3.8-27b, qwen3.6-35b-a3b? The known ones are: gemma-4, "
            "qwen3.6-27b, qwen3.6-35b-a3b, qwen3.8-27b, tiny-dense, tiny-moe.",
        ),
        (
            find_gpu,
            "Strix",
            "No GPU class is called 'Strix'. Did you mean strix-halo? The known ones are: "
            "a100-80, apple-m-series, b200, cpu, gb10, h100, h200, l40s, rtx3090, rtx3090ti, "
            "rtx4090, rtx5090, rtx6000ada, rtxpro6000, rtxpro6000maxq, strix-halo, v100.",
        ),
    ],
)
def test_an_unknown_id_is_answered_with_the_nearest_and_all(
    find: Callable[[str], object], name: str, expected: str
) -> None:
    with pytest.raises(CatalogError) as caught:
        find(name)
    assert (str(caught.value), caught.value.code) == (expected, "unknown-id")


def test_entries_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        find_gpu("rtx3090").memory_gib = 48  # type: ignore[misc]


def test_an_installed_package_carries_its_own_configs(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "serving"
    (package / "configs" / "models").mkdir(parents=True)
    # Another distribution's folder of the same name must not be taken for ours.
    (package.parent / "configs" / "models").mkdir(parents=True)
    assert configs_dir(package) == package / "configs"


def test_a_checkout_has_its_configs_beside_the_package(tmp_path: Path) -> None:
    (tmp_path / "configs" / "models").mkdir(parents=True)
    assert configs_dir(tmp_path / "serving") == tmp_path / "configs"


def test_a_missing_catalogue_is_named_with_its_cure(tmp_path: Path) -> None:
    with pytest.raises(CatalogError) as caught:
        configs_dir(tmp_path / "serving")
    assert str(caught.value) == (
        f"no catalogue in {tmp_path}/serving/configs nor in {tmp_path}/configs; "
        "install moe-serving again, or run it from a complete checkout"
    )


def test_a_file_is_named_after_its_id(tmp_path: Path) -> None:
    file = tmp_path / "rtx3080.yaml"
    file.write_text((configs_dir() / "gpus" / "rtx3090.yaml").read_text())
    with pytest.raises(ConfigError) as caught:
        read_entries(tmp_path, GpuClass)
    assert str(caught.value) == (
        f"{file}:1: id: found 'rtx3090' in a file called rtx3080.yaml; make the two agree"
    )
