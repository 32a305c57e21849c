"""Predictions beside published measurements, and files that are not as they should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serving.catalog import configs_dir, find_gpu
from serving.planner.anchors import (
    Prediction,
    Skipped,
    predict_row,
    shipped_anchors,
    validate_file,
)
from serving.planner.errors import PlannerError
from serving.planner.fit import Fitted, fit, loss
from serving.planner.validation_report import validation_json

ROW = {
    "id": "a-row",
    "model": "qwen3.6-27b",
    "engine": "llama.cpp",
    "weights": "Q4_K_M",
    "gpu": "rtx3090",
    "gpus": 1,
    "n": 2,
    "plain_tok_s": 38.3,
    "mtp_tok_s": 63.8,
    "draft_acceptance": 0.805,
    "source": "a test",
}


def shipped(name: str = "anchors.json") -> dict[str, Any]:
    data: dict[str, Any] = json.loads((configs_dir() / name).read_text())
    return data


def row(**changes: Any) -> dict[str, Any]:
    return {key: each for key, each in (ROW | changes).items() if each is not ...}


def predicted(**changes: Any) -> Prediction:
    found = predict_row(row(**changes))
    assert isinstance(found, Prediction), found
    return found


def reason(**changes: Any) -> str:
    found = predict_row(row(**changes))
    assert isinstance(found, Skipped)
    return found.reason


def test_the_shipped_rows_are_predicted_within_the_targets() -> None:
    found = validate_file(shipped_anchors())
    medians = found.medians()
    assert medians.rows == len(shipped()["rows"]) == 17
    assert medians.speedup is not None
    assert medians.plain is not None
    assert medians.speedup <= 0.12
    assert medians.plain <= 0.15


def test_rows_that_nothing_was_fitted_to_are_predicted_as_well() -> None:
    found = validate_file(configs_dir() / "anchors-held-out.json")
    medians = found.medians()
    assert medians.rows == len(shipped("anchors-held-out.json")["rows"])
    assert medians.speedup is not None
    assert medians.plain is not None
    assert medians.speedup <= 0.12
    assert medians.plain <= 0.15


def test_every_shipped_row_names_its_source() -> None:
    rows = [*shipped()["rows"], *shipped("anchors-held-out.json")["rows"]]
    assert all(each["source"] for each in rows)
    assert len({each["id"] for each in rows}) == len(rows)


def test_the_catalogue_has_the_bandwidths_of_the_shipped_file() -> None:
    table = shipped()["bandwidth_gb_s"]
    assert table == {name: find_gpu(name).bandwidth_gb_s for name in table}
    assert validate_file(shipped_anchors()).notes == ()


def test_another_bandwidth_is_told_and_the_catalogues_used(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"bandwidth_gb_s": {"rtx3090": 900, "mine": 1}, "rows": []}))
    assert validate_file(file).notes == (
        "rtx3090: the file has 900 GB/s, the catalogue 936, which is used",
    )


def test_errors_are_signed_fractions_of_what_was_published() -> None:
    found = predicted()
    assert found.plain_error == pytest.approx(found.plain / 38.3 - 1)
    assert found.speedup_error == pytest.approx(found.speedup / (63.8 / 38.3) - 1)
    assert found.mtp == pytest.approx(found.plain * found.speedup)


@pytest.mark.parametrize(
    "field",
    ["weights", "gpus", "n", "plain_tok_s", "mtp_tok_s", "draft_acceptance", "source", "id"],
)
@pytest.mark.parametrize("value", [None, ...])
def test_a_row_without_a_field_is_predicted(field: str, value: Any) -> None:
    assert predicted(**{field: value}).speedup > 1


def test_what_was_assumed_is_told() -> None:
    found = predicted(weights=None, n=None, draft_acceptance=None)
    assert found.assumed == (
        "weights Q4_K_M",
        "n = 2",
        "acceptance of the prior for mixed text",
    )


def test_a_row_without_published_speeds_has_no_errors() -> None:
    found = predicted(plain_tok_s=None)
    assert (found.plain_error, found.speedup_error) == (None, None)
    assert found.mtp_error is not None


def test_rates_by_position_win_over_one_rate() -> None:
    assert predicted(per_position=[0.9, 0.9]).speedup > predicted(per_position=[0.5, 0.2]).speedup


def test_published_names_are_found_in_the_catalogue() -> None:
    same = predicted()
    assert predicted(model="Qwen/Qwen3.6-27B", gpu="NVIDIA GeForce RTX 3090").plain == same.plain
    other = predicted(model="qwen3.5-27b")
    assert other.plain == same.plain
    assert other.assumed == ("the shapes of qwen3.6-27b",)


def test_two_cards_of_llama_cpp_work_one_after_the_other_unless_told() -> None:
    one, two = predicted(), predicted(gpus=2)
    assert two.plain == one.plain
    assert two.assumed == ("layers split over the cards, which work one after the other",)
    assert predicted(gpus=2, source="-sm tensor").plain > 1.5 * one.plain


def test_running_requests_are_predicted_together() -> None:
    assert predicted(concurrency=4, engine="vllm").plain > 2 * predicted(engine="vllm").plain


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": "llama-9"}, "No model is called 'llama-9'."),
        ({"model": None}, "No model is called ''."),
        ({"gpu": "abacus"}, "No GPU class is called 'abacus'."),
        ({"engine": "mlx"}, "engine: found 'mlx', of which no constants are known;"),
        ({"engine": None}, "engine: found '', of which no constants are known;"),
        ({"weights": "ternary"}, "weights: found 'ternary';"),
        ({"gpu": "cpu"}, "gpu: the bandwidth of cpu is the machine's;"),
        ({"n": "two"}, "n: found 'two'; give a whole number, 0 or more"),
        ({"n": 1.5}, "n: found 1.5; give a whole number, 0 or more"),
        ({"plain_tok_s": -1}, "plain_tok_s: found -1; give tokens per second, above 0"),
        ({"draft_acceptance": 80.5}, "acceptance: found 80.5; give accepted / drafted"),
        ({"draft_acceptance": "high"}, "draft_acceptance: found 'high'; give a share from 0 to 1"),
        ({"per_position": [0.4, 0.8]}, "acceptance: found [0.4, 0.8], which rises;"),
        ({"per_position": "0.8"}, "per_position: found '0.8'; give a list of shares"),
    ],
)
def test_a_row_that_cannot_be_predicted_says_why(changes: dict[str, Any], expected: str) -> None:
    assert reason(**changes).startswith(expected)


@pytest.mark.parametrize("value", [None, 3, "row", ["row"]])
def test_what_is_no_row_is_skipped(value: Any) -> None:
    assert predict_row(value, 7) == Skipped("row 7", "", f"found {value!r}; a row is an object")


def test_a_plain_row_has_no_speed_up(tmp_path: Path) -> None:
    found = predicted(n=0)
    assert found.speedup == 1


def test_json_has_every_row_and_medians_by_engine(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps([row(), row(engine="vllm (patched)"), row(gpu="abacus")]))
    found = validation_json(validate_file(file))
    assert [each["skipped"] is None for each in found["rows"]] == [True, True, False]
    assert found["rows"][2]["speedup_error"] is None
    assert found["skipped"] == 1
    assert set(found["by_engine"]) == {"llama.cpp", "vllm (patched)"}
    only = found["by_engine"]["llama.cpp"]["median_abs_speedup_error"]
    assert only == abs(found["rows"][0]["speedup_error"])
    assert found["median_abs_plain_error"] > 0
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("not json", "not JSON"),
        ("{}", "no list `rows`; see configs/anchors.json for the form"),
        ('{"rows": {}}', "no list `rows`; see configs/anchors.json for the form"),
    ],
)
def test_what_is_no_anchors_file_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(PlannerError, match=expected.replace("`", ".")):
        validate_file(file)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="name an anchors file"):
        validate_file(tmp_path / "none.json")


def test_the_constants_in_force_are_near_the_fitted_ones() -> None:
    rows = shipped()["rows"]
    best = fit(rows)
    assert loss(rows, best) <= loss(rows, Fitted())
    assert best.bandwidth_fraction == pytest.approx(Fitted().bandwidth_fraction, abs=0.05)
    assert best.vector_fraction == pytest.approx(Fitted().vector_fraction, abs=0.05)
