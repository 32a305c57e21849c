"""What is recommended, and that the stack takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serving.catalog import find_gpu, find_model
from serving.planner.acceptance import from_rate, prior
from serving.planner.errors import PlannerError
from serving.planner.plan import Request, choose_checkpoint, crossover, make_plan
from serving.planner.recommend import recommend
from serving.planner.stack_file import stack_text, write_stack
from serving.planner.words import advice
from serving.stack.load import load_stack

GIB = 1024**3


def request(
    model: str = "qwen3.6-27b", gpu: str = "h100", checkpoint: str = "fp8", **more: Any
) -> Request:
    entry = find_model(model)
    given = {"acceptance": prior("mixed", experts=entry.architecture.experts is not None)}
    return Request(entry, find_gpu(gpu), checkpoint=checkpoint, **given | more)


@pytest.mark.parametrize(
    ("model", "gpu", "checkpoint", "cards", "engines"),
    [
        ("qwen3.6-27b", "rtx3090", "int4-autoround", 1, 1),
        ("qwen3.6-27b", "rtx5090", "nvfp4", 1, 1),
        ("qwen3.6-35b-a3b", "h100", "fp8", 1, 2),
        ("qwen3.6-35b-a3b", "rtx3090", "int4-awq", 2, 1),
        ("qwen3.6-35b-a3b", "rtxpro6000", "nvfp4", 1, 1),
        ("qwen3.8-27b", "gb10", "fp8", 1, 1),
        ("gemma-4", "h200", "bf16", 1, 1),
        ("tiny-moe", "cpu", "bf16", 1, 1),
    ],
)
def test_the_stack_file_loads_as_it_was_planned(
    tmp_path: Path, model: str, gpu: str, checkpoint: str, cards: int, engines: int
) -> None:
    more = {"bandwidth": 10e9, "context": 4_096} if gpu == "cpu" else {"concurrency": 2}
    found = recommend(request(model, gpu, checkpoint, cards=cards, engines=engines, **more))
    file = tmp_path / "planned.yaml"
    write_stack(found, file)
    stack = load_stack(file)
    served = stack.models[0]
    assert (served.model, served.checkpoint, served.gpu) == (model, checkpoint, gpu)
    assert served.max_num_seqs == found.plan.request.concurrency
    assert served.max_model_len == found.plan.request.context
    assert set(served.variants) == ({"mtp", "plain"} if engines > 1 else {"mtp"})
    drafting = served.variants["mtp"].speculative
    assert drafting is not None
    assert drafting.num_speculative_tokens == found.draft_tokens > 0
    assert served.variants["mtp"].prefix_caching in (False, None)
    assert served.default_variant == "mtp"


def test_drafts_that_do_not_fit_beside_so_many_requests_are_left_out_and_told() -> None:
    found = recommend(request(gpu="rtx5090", checkpoint="nvfp4", concurrency=4))
    assert (found.draft_tokens, found.fits) == (0, True)
    assert "Drafting for so many requests does not fit; for 2 at once it would" in " ".join(
        advice(found)
    )


def test_what_is_recommended_fits() -> None:
    found = recommend(request(gpu="rtx3090", checkpoint="int4-autoround"))
    assert found.fits is True
    assert found.changes == (
        "mamba_ssm_cache_dtype float16, which halves the GDN states",
        "2 requests at once instead of 4",
    )
    plan = found.plan.memory[found.draft_tokens]
    assert plan.budget is not None
    assert plan.required <= plan.budget


def test_a_request_that_fits_is_left_as_it_is() -> None:
    asked = request()
    found = recommend(asked)
    assert found.changes == ()
    assert found.plan.request == asked


def test_one_shorter_request_is_planned_where_a_long_one_does_not_fit() -> None:
    found = recommend(
        request(gpu="rtx3090", checkpoint="int4-autoround", context=262_144, concurrency=8)
    )
    assert found.fits is True
    assert found.plan.request.concurrency == 1
    assert found.plan.request.context < 262_144
    assert "instead of 262144" in found.changes[-1]


def test_weights_that_do_not_fit_give_no_stack_file(tmp_path: Path) -> None:
    found = recommend(request(gpu="rtx3090", checkpoint="bf16"))
    assert found.fits is False
    with pytest.raises(PlannerError) as caught:
        write_stack(found, tmp_path / "none.yaml")
    assert str(caught.value).startswith("no stack file: It does not fit: ")
    assert not (tmp_path / "none.yaml").exists()


def test_a_stack_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="name another file with -o"):
        write_stack(recommend(request()), tmp_path / "no-such-folder" / "a.yaml")


def test_a_gain_too_small_to_tell_is_no_reason_to_draft() -> None:
    found = recommend(request(acceptance=from_rate(0.05, 2)))
    assert found.draft_tokens == 0
    assert next(advice(found)).startswith("Do not draft: the best n gains ")
    assert "plain:" in stack_text(found)


def test_no_more_than_four_drafts_are_recommended() -> None:
    found = recommend(request(acceptance=from_rate(0.99, 6), concurrency=1))
    assert found.plan.best.draft_tokens == 6
    assert found.draft_tokens == 4


def test_a_checkpoint_without_a_head_is_served_plainly() -> None:
    entry = find_model("qwen3.6-27b")
    bare = entry.checkpoints["fp8"].model_copy(update={"mtp_head": False})
    entry = entry.model_copy(update={"checkpoints": {"fp8": bare}})
    found = recommend(
        Request(entry, find_gpu("h100"), prior("code", experts=False), checkpoint="fp8")
    )
    assert found.draft_tokens == 0
    assert next(advice(found)).startswith("Nothing is known that could draft here.")


def test_settings_follow_the_rules() -> None:
    pair = recommend(request("qwen3.6-35b-a3b", "rtx3090", "int4-awq", cards=2))
    settings = {each.key: each.value for each in pair.settings}
    assert settings["tensor_parallel_size"] == 2
    assert settings["gpu_memory_utilization"] == 0.93
    assert settings["env"] == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}
    assert {each.key: each.value for each in pair.speculative}["moe_backend"] == "triton"
    pro = recommend(request("qwen3.6-35b-a3b", "rtxpro6000", "nvfp4"))
    backend = {each.key: each.value for each in pro.speculative}["moe_backend"]
    assert backend == "flashinfer_cutlass"
    spark = {each.key: each.value for each in recommend(request(gpu="gb10")).settings}
    assert spark["env"] == {"VLLM_USE_DEEP_GEMM": "0"}
    assert spark["gpu_memory_utilization"] == 0.5


@pytest.mark.parametrize(
    ("changes", "caution"),
    [
        ({"gpu": "h100"}, "outside validation: vLLM on h100"),
        ({"concurrency": 32}, "outside validation: more than 8 requests at once"),
        ({"prompt": 30_000}, "outside validation: 30256 tokens deep"),
        ({"checkpoint": "int4-awq", "gpu": "rtx3090"}, "nobody has looked whether"),
        ({}, "acceptance is a prior, not measured"),
    ],
)
def test_the_limits_of_a_plan_are_told(changes: dict[str, Any], caution: str) -> None:
    found = recommend(request(**changes))
    assert any(each.startswith(caution) for each in found.cautions), found.cautions


def test_measured_acceptance_on_a_validated_card_needs_no_caution() -> None:
    found = recommend(
        request(gpu="rtxpro6000maxq", checkpoint="fp8", acceptance=from_rate(0.75, 2))
    )
    assert found.cautions == ()


def test_the_crossover_is_the_first_load_without_a_gain() -> None:
    asked = request(gpu="rtx3090", checkpoint="int4-autoround")
    found = crossover(asked, 3)
    assert found is not None
    assert asked.decode(3, found).speedup <= 1 < asked.decode(3, found - 1).speedup


def test_break_even_is_where_the_saved_time_makes_up_for_the_prefill() -> None:
    plan = make_plan(request(gpu="rtx3090", checkpoint="int4-autoround", prompt=8_192))
    tokens = plan.break_even_output
    assert tokens is not None
    assert plan.first_token_s is not None
    assert plan.first_token_drafting_s is not None
    plain = plan.first_token_s + tokens / plan.plain.per_request
    drafting = plan.first_token_drafting_s + tokens / plan.best.per_request
    assert plain == pytest.approx(drafting)


@pytest.mark.parametrize(
    ("model", "gpu", "gib", "expected"),
    [
        ("qwen3.6-27b", "rtx3090", 24, "int4-autoround"),
        ("qwen3.6-27b", "h100", 80, "bf16"),
        ("qwen3.6-35b-a3b", "h100", 80, "fp8"),
        ("qwen3.6-27b", "rtxpro6000", 96, "bf16"),
        ("qwen3.6-27b", "gb10", 119, "fp8"),
        ("tiny-moe", "cpu", None, "bf16"),
    ],
)
def test_the_checkpoint_is_the_largest_with_a_head_that_leaves_room(
    model: str, gpu: str, gib: int | None, expected: str
) -> None:
    memory = None if gib is None else gib * GIB
    assert choose_checkpoint(find_model(model), find_gpu(gpu), 1, memory) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 300_000}, "context: found 300000; qwen3.6-27b takes 262144 tokens, lower it"),
        ({"prompt": 0}, "prompt: found 0; give 1 or more"),
        (
            {"checkpoint": "fp8", "gpu": "v100"},
            "checkpoint: fp8 is FP8 linear layers, MTP included, which v100 has no kernels for; "
            "choose another checkpoint",
        ),
        (
            {"checkpoint": "gguf-q4"},
            "checkpoint: gguf-q4 is a GGUF file, which vLLM does not serve for these models; "
            "choose another checkpoint",
        ),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlannerError) as caught:
        request(**changes)
    assert str(caught.value) == message
