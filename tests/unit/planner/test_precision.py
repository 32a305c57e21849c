"""Which bits a checkpoint spends on which part, by its name or its size."""

from __future__ import annotations

import pytest

from serving.catalog import find_gpu, find_model, list_models
from serving.catalog.models import ModelEntry
from serving.planner.constants import LLAMA_CPP, VLLM
from serving.planner.errors import PlannerError
from serving.planner.parameters import count_parameters
from serving.planner.precision import FP8_BITS, INT4_BITS, NVFP4_BITS, precision_of, size_error
from serving.planner.weight_names import precision_of_name

SIZED = [
    (model, key)
    for model in list_models()
    for key, checkpoint in model.checkpoints.items()
    if checkpoint.size_gb is not None
]


@pytest.mark.parametrize(("model", "key"), SIZED, ids=lambda part: getattr(part, "id", part))
def test_the_parts_add_up_to_the_published_size(model: ModelEntry, key: str) -> None:
    error = size_error(model, model.checkpoint(key), precision_of(model, key))
    assert error is not None
    assert abs(error) < 0.085


def test_the_layout_is_the_one_nearest_to_the_published_size() -> None:
    model = find_model("qwen3.6-35b-a3b")
    awq = precision_of(model, "int4-awq")
    gptq = precision_of(model, "int4-gptq")
    assert (awq.bits["experts"], awq.bits["attention"]) == (INT4_BITS, 16)
    assert (gptq.bits["experts"], gptq.bits["attention"]) == (INT4_BITS, INT4_BITS)


@pytest.mark.parametrize(
    ("name", "part", "bits"),
    [
        ("Q4_K_M", "ffn", 4.85),
        ("Q4_K_M", "lm_head", 6.5625),
        ("UD-Q4_K_XL", "ffn", 5.1),
        ("UD-Q8_K_XL", "ffn", 8.75),
        ("Q8_0", "lm_head", 8.5),
        ("lmstudio-Q8_0", "ffn", 8.5),
        ("Q4-XYZ-v2", "ffn", 4.85),
        ("IQ4_XS", "ffn", 4.4),
        ("NVFP4", "ffn", NVFP4_BITS),
        ("FP8", "attention", FP8_BITS),
        ("FP8", "lm_head", 16),
        ("AWQ 4-bit", "ffn", INT4_BITS),
        ("GPTQ-Int4", "lm_head", 16),
        ("INT4, INT4 head", "lm_head", INT4_BITS),
        ("W4A16", "attention", INT4_BITS),
        ("bf16", "ffn", 16),
    ],
)
def test_a_published_name_is_read(name: str, part: str, bits: float) -> None:
    found = precision_of_name(name, find_model("qwen3.6-27b"), VLLM, find_gpu("h100"))
    assert found.bits[part] == bits  # type: ignore[index]


def test_a_number_of_bits_is_a_gguf_file_where_llama_cpp_runs_it() -> None:
    model, gpu = find_model("qwen3.6-35b-a3b"), find_gpu("a100-80")
    assert precision_of_name("mixed 4-bit", model, LLAMA_CPP, gpu).bits["experts"] == 4.85


def test_an_awq_export_of_experts_leaves_the_rest_in_bf16() -> None:
    model, gpu = find_model("qwen3.6-35b-a3b"), find_gpu("rtx3090")
    bits = precision_of_name("AWQ 4-bit", model, VLLM, gpu).bits
    assert (bits["experts"], bits["attention"]) == (INT4_BITS, 16)


@pytest.mark.parametrize(("gpu", "expected"), [("rtx3090", "Q4_K_M"), ("rtxpro6000", "Q8_0")])
def test_weights_that_nobody_named_are_the_largest_that_leave_room(gpu: str, expected: str) -> None:
    found = precision_of_name(None, find_model("qwen3.6-27b"), LLAMA_CPP, find_gpu(gpu))
    assert found.name == expected


def test_an_unknown_name_is_told_with_the_known_ones() -> None:
    with pytest.raises(PlannerError) as caught:
        precision_of_name("ternary", find_model("qwen3.6-27b"), VLLM, find_gpu("h100"))
    assert str(caught.value) == (
        "weights: found 'ternary'; write a GGUF type such as Q4_K_M, or BF16, FP8, NVFP4, INT4, "
        "AWQ, GPTQ or AutoRound"
    )


def test_bytes_are_bits_over_eight() -> None:
    model = find_model("tiny-moe")
    counted = count_parameters(model.architecture)
    assert precision_of(model, "bf16").bytes_of(counted).total == 2 * counted.total
