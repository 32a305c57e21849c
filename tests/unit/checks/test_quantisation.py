"""What vLLM will expect quantised, by each exporter's block."""

from __future__ import annotations

from typing import Any

import pytest

from serving.checks.quantisation import Quantisation

GROUPS = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}}


def expects(block: dict[str, Any], module: str = "mtp.layers.0.self_attn.q_proj") -> bool | None:
    return Quantisation.of({"quantization_config": block}, {}).expects_quantised(module)


def test_without_a_block_nothing_is_quantised() -> None:
    assert Quantisation.of({}, {}).expects_quantised("mtp.fc") is False


@pytest.mark.parametrize("pattern", ["mtp*", "mtp.*", "mtp.layers.0*", "*self_attn*", "mtp"])
def test_modelopt_leaves_out_by_wildcard_and_by_part(pattern: str) -> None:
    block = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": [pattern]}
    assert expects(block) is False


def test_modelopt_quantises_what_it_does_not_leave_out() -> None:
    block = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "mtp.fc"]}
    assert expects(block) is True
    assert expects(block, "mtp.fc") is False


def test_the_fc_of_a_modelopt_nvfp4_export_is_always_plain() -> None:
    block = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []}
    assert (expects(block, "mtp.fc"), expects(block)) == (False, True)


def test_mixed_precision_quantises_what_it_lists() -> None:
    block = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"mtp.layers.0.mlp.experts.0.up_proj": {"quant_algo": "NVFP4"}},
    }
    assert expects(block) is False
    assert expects(block, "mtp.layers.0.mlp.experts") is True


def test_modelopts_own_file_is_read_where_config_json_has_no_block() -> None:
    found = Quantisation.of(
        {}, {"quantization": {"quant_algo": "FP8", "exclude_modules": ["mtp.fc"]}}
    )
    assert (found.method, found.format) == ("modelopt", "fp8")
    assert found.expects_quantised("mtp.fc") is False


@pytest.mark.parametrize("ignored", ["mtp.layers.0.self_attn.q_proj", "re:.*mtp.*", r"re:^mtp\."])
def test_compressed_tensors_ignores_by_name_and_by_expression(ignored: str) -> None:
    block = {"quant_method": "compressed-tensors", "config_groups": GROUPS, "ignore": [ignored]}
    assert expects(block) is False
    assert expects({**block, "ignore": ["lm_head"]}) is True


def test_compressed_tensors_quantises_its_targets_only() -> None:
    groups = {"group_0": {"targets": [r"re:model\..*"], "weights": {}}}
    assert expects({"quant_method": "compressed-tensors", "config_groups": groups}) is False


@pytest.mark.parametrize("pattern", ["-:.*mtp.*", r"-:mtp\.layers\..*"])
def test_gptq_leaves_out_by_a_negative_pattern(pattern: str) -> None:
    block = {"quant_method": "gptq", "bits": 4, "dynamic": {pattern: {}}}
    assert expects(block) is False


def test_gptq_and_awq_go_by_the_tensors_where_no_list_is_given() -> None:
    assert expects({"quant_method": "gptq", "bits": 4}) is None
    assert expects({"quant_method": "awq", "bits": 4}) is None


def test_gptqs_short_names_reach_the_head_as_well() -> None:
    block = {"quant_method": "gptq", "modules_in_block_to_quantize": [["self_attn.q_proj"]]}
    assert (expects(block), expects(block, "mtp.fc")) == (True, False)


def test_awq_leaves_out_by_part_of_the_name() -> None:
    block = {"quant_method": "awq", "modules_to_not_convert": ["mtp"]}
    assert expects(block) is False
    assert expects({**block, "modules_to_not_convert": ["visual"]}) is True


def test_autoround_leaves_out_by_bits_and_by_block() -> None:
    block = {"quant_method": "auto-round", "bits": 4}
    assert expects(block) is True
    assert (
        expects({**block, "extra_config": {"mtp.layers.0.self_attn.q_proj": {"bits": 16}}}) is False
    )
    assert expects({**block, "extra_config": {".*mtp.*": {"bits": 16}}}) is False
    assert expects({**block, "block_name_to_quantize": "model.language_model.layers"}) is False


def test_fp8_leaves_out_by_the_whole_name() -> None:
    block = {"quant_method": "fp8", "modules_to_not_convert": ["mtp.fc", "mtp"]}
    assert (expects(block, "mtp.fc"), expects(block)) == (False, True)


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "awq"}, "int4"),
        ({"quant_method": "auto-round"}, "int4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "compressed-tensors", "config_groups": GROUPS}, "int4"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4"),
        ({"quant_method": "bitsandbytes"}, "other"),
    ],
)
def test_the_number_format_is_told(block: dict[str, Any], expected: str) -> None:
    assert Quantisation.of({"quantization_config": block}, {}).format == expected


@pytest.mark.parametrize("pattern", ["re:(", "re:(a+)+$", "re:" + ".*" * 9, "re:" + "a" * 999])
def test_a_pattern_that_is_none_or_too_costly_is_not_guessed_at(pattern: str) -> None:
    block = {"quant_method": "compressed-tensors", "config_groups": GROUPS, "ignore": [pattern]}
    assert expects(block) is None
