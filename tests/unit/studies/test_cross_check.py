"""What the comparison with vLLM's benchmark makes of results; no program is run."""

from __future__ import annotations

import pytest
from rich.console import Console

from serving.studies import cross_check
from serving.studies.cross_check import OURS, THEIRS, Figures, Load, as_table, figures_of

RESULT = {
    "completed": 2,
    "median_ttft_ms": 40.0,
    "median_tpot_ms": 5.0,
    "output_throughput": 500.0,
}
LOAD = Load("http://127.0.0.1:1", "m", ("a", "b"), streams=2, max_tokens=8)


def test_vllms_result_is_read_by_its_medians() -> None:
    assert figures_of(RESULT, requests=2) == Figures(40.0, 5.0, 500.0)


def test_a_round_in_which_a_request_failed_is_no_round() -> None:
    with pytest.raises(RuntimeError, match="completed 2 of 3"):
        figures_of(RESULT, requests=3)


def test_the_programs_take_turns_and_the_median_round_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    speeds = {OURS: iter([0.0, 100.0, 300.0, 200.0]), THEIRS: iter([90.0, 310.0, 220.0])}

    def one_round(name: str) -> Figures:
        order.append(name)
        return Figures(1.0, 1.0, next(speeds[name]))

    async def ours(load: Load) -> Figures:
        return one_round(OURS)

    monkeypatch.setattr(cross_check, "ours", ours)
    monkeypatch.setattr(cross_check, "theirs", lambda load, tokenizer: one_round(THEIRS))
    found = cross_check.compare(LOAD, tokenizer=None, rounds=3, console=Console(quiet=True))  # type: ignore[arg-type]
    # The first of ours warms up and is not counted.
    assert order == [OURS, OURS, THEIRS, THEIRS, OURS, OURS, THEIRS]
    assert found[OURS].tokens_per_s == 200.0
    assert found[THEIRS].tokens_per_s == 220.0


def test_the_table_sets_ours_over_theirs() -> None:
    table = as_table({OURS: Figures(40.0, 5.0, 500.0), THEIRS: Figures(50.0, 4.0, 400.0)})
    ratios = [str(cell) for cell in table.columns[3].cells]
    assert ratios == ["0.800", "1.250", "1.250"]
