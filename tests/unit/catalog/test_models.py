"""The arithmetic of an architecture, and what a model file may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serving.catalog import CatalogError, ConfigError, ModelEntry, find_model
from serving.catalog.yaml_file import load_yaml, parse_yaml
from serving.demo import checkpoint_path

MIB = 1024 * 1024

DENSE = """\
id: some-model
name: Some Model
model_type: llama
architecture:
  layers: {full_attention: 2}
  hidden_size: 64
  heads: 4
  kv_heads: 2
  head_dim: 16
  ffn_size: 128
  vocab_size: 1000
  tie_embeddings: true
  vision: false
max_context: 4096
source: a test
checkpoints:
  bf16: {repo: some/model, quantisation: bf16, source: a test}
"""


def message(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, ModelEntry, name="m.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("model", "dtype", "expected"),
    [
        ("qwen3.6-27b", "bfloat16", 65_536),
        ("qwen3.6-27b", "fp8", 32_768),
        ("qwen3.8-27b", "bfloat16", 65_536),
        ("qwen3.6-35b-a3b", "bfloat16", 20_480),
        ("qwen3.6-35b-a3b", "fp8_e4m3", 10_240),
        ("tiny-moe", "bfloat16", 768),
    ],
)
def test_the_kv_cache_grows_by_two_values_per_head_element_and_layer(
    model: str, dtype: str, expected: int
) -> None:
    assert find_model(model).architecture.kv_bytes_per_token(dtype) == expected


def test_only_the_full_attention_layers_of_gemma_grow_with_the_context() -> None:
    assert find_model("gemma-4").architecture.kv_bytes_per_token() == 2 * 4 * 512 * 2 * 10


def test_tensor_parallel_splits_kv_heads_until_one_is_left() -> None:
    architecture = find_model("qwen3.6-35b-a3b").architecture
    sizes = [architecture.kv_bytes_per_token(tensor_parallel=cards) for cards in (1, 2, 4)]
    assert sizes == [20_480, 10_240, 10_240]


@pytest.mark.parametrize("draft_tokens", range(5))
def test_a_gdn_page_of_the_27b_is_what_vllm_logs(draft_tokens: int) -> None:
    page = find_model("qwen3.6-27b").architecture.gdn_page_bytes(draft_tokens, ssm_dtype="float16")
    assert page == 1_634_304 + 20_480 * draft_tokens


# MiB per request, vLLM's formula worked out for k = 0..4: (without, with) prefix caching.
STATES = {
    ("qwen3.6-27b", "float32"): [(147, 294), (296, 443), (446, 595), (598, 748), (753, 903)],
    ("qwen3.6-27b", "float16"): [(75, 150), (152, 227), (230, 307), (310, 388), (393, 471)],
    ("qwen3.6-35b-a3b", "float32"): [(61, 123), (124, 186), (187, 249), (251, 314), (316, 380)],
    ("qwen3.6-35b-a3b", "float16"): [(31, 63), (64, 96), (97, 129), (131, 164), (166, 200)],
}


@pytest.mark.parametrize(("model", "dtype"), STATES)
def test_draft_tokens_and_prefix_caching_multiply_the_gdn_state(model: str, dtype: str) -> None:
    architecture = find_model(model).architecture
    found = [
        tuple(
            round(
                architecture.gdn_bytes_per_request(k, prefix_caching=caching, ssm_dtype=dtype) / MIB
            )
            for caching in (False, True)
        )
        for k in range(5)
    ]
    assert found == STATES[model, dtype]


def test_the_gdn_state_has_the_dtype_of_the_checkpoint_unless_told_otherwise() -> None:
    architecture = find_model("qwen3.6-27b").architecture
    asked = architecture.gdn_page_bytes(ssm_dtype="float32")
    assert architecture.gdn_page_bytes() == asked == 3_207_168


def test_tensor_parallel_splits_the_gdn_state_evenly() -> None:
    architecture = find_model("qwen3.6-27b").architecture
    assert architecture.gdn_bytes_per_request(3, tensor_parallel=2) * 2 == (
        architecture.gdn_bytes_per_request(3)
    )


def test_a_model_without_gdn_layers_keeps_no_state() -> None:
    assert find_model("gemma-4").architecture.gdn_bytes_per_request(4) == 0


def test_an_unknown_kv_dtype_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(CatalogError) as caught:
        find_model("tiny-moe").architecture.kv_bytes_per_token("fp9")
    assert str(caught.value) == (
        "No KV cache dtype is called 'fp9'. Did you mean fp8? "
        "The known ones are: bfloat16, float16, fp8, fp8_e4m3, fp8_e5m2."
    )


def test_an_unknown_checkpoint_is_refused_with_those_there_are() -> None:
    with pytest.raises(CatalogError) as caught:
        find_model("gemma-4").checkpoint("nvfp8")
    assert str(caught.value) == (
        "No checkpoint of gemma-4 is called 'nvfp8'. Did you mean nvfp4? "
        "The known ones are: bf16, nvfp4."
    )


@pytest.mark.parametrize("name", ["tiny-moe", "tiny-dense"])
def test_a_demo_checkpoint_lies_in_the_package(name: str) -> None:
    checkpoint = find_model(name).checkpoint("bf16")
    assert (checkpoint.path, checkpoint.repo) == (checkpoint_path(name), None)


def test_a_relative_path_is_taken_from_the_files_folder(tmp_path: Path) -> None:
    file = tmp_path / "some-model.yaml"
    file.write_text(DENSE.replace("repo: some/model", "path: weights"))
    assert load_yaml(file, ModelEntry).checkpoint("bf16").path == tmp_path / "weights"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "repo: some/model",
            "demo: tiny",
            "m.yaml:17: checkpoints.bf16.demo: found 'tiny'; "
            "the demo models are tiny-moe, tiny-dense",
        ),
        (
            "repo: some/model",
            "repo: some/model, path: weights",
            "m.yaml:17: checkpoints.bf16: a checkpoint is in one place; "
            "give exactly one of `repo`, `path` and `demo`",
        ),
        (
            "{full_attention: 2}",
            "{full_attention: 2, gdn: 6}",
            "m.yaml:4: architecture.gdn: 6 layers of this kind, but the block `gdn` is missing; "
            "make the two agree",
        ),
        (
            "{full_attention: 2}",
            "{full_attention: 0}",
            "m.yaml:5: architecture.layers: no layer of any kind; give at least one count",
        ),
        (
            "  ffn_size: 128\n",
            "  experts: {count: 2, per_token: 4, size: 8}\n",
            "m.yaml:10: architecture.experts.per_token: found 4, but there are 2 experts; lower it",
        ),
        (
            "  ffn_size: 128\n",
            "  experts: {count: 4, per_token: 2, size: 8}\n  ffn_size: 128\n",
            "m.yaml:11: architecture.ffn_size: a model is dense or has experts; "
            "give one of `ffn_size` and `experts`",
        ),
        (
            "  ffn_size: 128\n",
            "  ffn_size: 128\n  mamba_ssm_dtype: float32\n",
            "m.yaml:11: architecture.mamba_ssm_dtype: must be given exactly when there are gdn "
            "layers; float32 is what Qwen ships",
        ),
    ],
)
def test_a_model_that_contradicts_itself_is_refused(old: str, new: str, expected: str) -> None:
    assert message(DENSE.replace(old, new)) == expected


@pytest.mark.parametrize("name", ["tiny-moe", "tiny-dense"])
def test_the_demo_entries_have_the_geometry_that_is_trained(name: str) -> None:
    train = pytest.importorskip("serving.demo.train")
    entry = find_model(name)
    config: dict[str, Any] = train.build_model(name).config.to_dict()
    architecture = entry.architecture
    assert architecture.gdn is not None
    kinds = config["layer_types"]
    assert (
        entry.model_type,
        entry.max_context,
        architecture.hidden_size,
        architecture.vocab_size,
        architecture.layers.gdn,
        architecture.layers.full_attention,
        architecture.kv_bytes_per_token_per_layer(),
        architecture.gdn.key_heads,
        architecture.gdn.value_heads,
        architecture.ffn_size,
        architecture.experts.count if architecture.experts else None,
    ) == (
        config["model_type"],
        config["max_position_embeddings"],
        config["hidden_size"],
        config["vocab_size"],
        kinds.count("linear_attention"),
        kinds.count("full_attention"),
        4 * config["num_key_value_heads"] * config["head_dim"],
        config["linear_num_key_heads"],
        config["linear_num_value_heads"],
        config.get("intermediate_size"),
        config.get("num_experts"),
    )
