"""The summary's figures and the counters', on values worked by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from serving.studies.records import Drafting, RequestRecord

Import = Callable[[str], ModuleType]

EXPOSITION = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="tiny"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="tiny"} 20.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="tiny"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 4.0
vllm:spec_decode_num_accepted_tokens_created{engine="0"} 1.7e9
"""


def request(**fields: Any) -> RequestRecord:
    common = dict(cell="load", round=0, arm="mtp", streams=1, category="code", prompt="p")
    common |= dict(temperature=0, max_tokens=16, sent_at=10.0, outcome="ok")
    return RequestRecord.model_validate(common | fields)


def test_figures_are_medians_of_requests_and_ratios_of_sums(module: Import) -> None:
    drafting = Drafting(drafts=4, drafted=8, accepted=6)
    records = [
        request(ttft_s=0.1, duration_s=1.1, completion_tokens=11, chunks=5, drafting=drafting),
        request(ttft_s=0.3, duration_s=2.3, completion_tokens=11, chunks=6, sent_at=11.0),
        request(outcome="cut"),
    ]
    assert module("summary").figures(records) == (
        "3", "1", "200.0", "150.00", "6.7", "6.7", "2.22", "0.750", "2.50",
    )  # fmt: skip


def test_what_was_not_told_stays_empty(module: Import) -> None:
    failed = [request(outcome="refused", status=503)]
    assert module("summary").figures(failed) == ("1", "1", *[""] * 7)


def test_each_category_has_a_row_and_all_have_one(module: Import) -> None:
    table = module("summary").as_table([request(), request(category="chat"), request()])
    assert list(table.columns[0].cells) == ["chat", "code", "all"]
    assert list(table.columns[1].cells) == ["1", "2", "3"]


def test_counters_give_what_was_drafted_between_two_readings(module: Import) -> None:
    counters = module("counters")
    before = counters.read(EXPOSITION)
    assert before == {
        "drafts": 10,
        "draft_tokens": 20,
        "accepted_tokens": 12,
        "accepted_tokens_per_pos:0": 8,
        "accepted_tokens_per_pos:1": 4,
    }
    doubled = {name: 2 * value for name, value in before.items()}
    assert counters.between(before, doubled) == Drafting(
        drafts=10, drafted=20, accepted=12, accepted_per_position=(8, 4), source="counters"
    )
    assert counters.between(before, before) is None
    assert counters.between({}, {}) is None


def test_counters_of_several_engines_and_of_ray_are_summed(module: Import) -> None:
    text = 'ray_vllm_spec_decode_num_drafts{ReplicaId="a"} 1\nray_vllm_spec_decode_num_drafts 2.0\n'
    assert module("counters").read(text) == {"drafts": 3}
