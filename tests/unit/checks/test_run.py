"""Whole checks: the shipped demo models and stacks, and models that were tampered with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.catalog.errors import CatalogError, ConfigError
from serving.catalog.yaml_file import parse_yaml
from serving.checks.checkpoint import read_checkpoint
from serving.checks.errors import CheckError
from serving.checks.finding import Severity
from serving.checks.run import Report, check, check_stack, refuse
from serving.checks.source import LocalFolder
from serving.checks.versions import known_version
from serving.demo import NAMES, checkpoint_path
from serving.stack.load import load_stack, shipped_stacks
from serving.stack.spec import StackSpec
from tests.unit.checks.builders import (
    CONFIG,
    TRUNK,
    checkpoint,
    gguf,
    head,
    sharded,
    write_safetensors,
)
from tests.unit.checks.test_hub import put_in_cache

DRAFTING = ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}']


def codes(report: Report) -> list[str]:
    return [finding.rule.code for finding in report.findings]


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_demo_model_is_clean(name: str) -> None:
    arguments = [*DRAFTING, "--no-enable-prefix-caching"]
    report = check(str(checkpoint_path(name)), gpu="cpu", arguments=arguments)
    assert (report.findings, report.worst) == ((), None)


@pytest.mark.parametrize("stack", ["demo", "demo-two-models"])
def test_a_shipped_demo_stack_is_clean(stack: str) -> None:
    assert codes(check(stack)) == []


@pytest.mark.parametrize("stack", shipped_stacks())
def test_no_shipped_stack_is_refused(stack: str) -> None:
    assert refuse(load_stack(stack)) == []


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint_path("tiny-moe"), tmp_path / "tampered"))


def test_a_demo_model_without_its_head_is_caught(demo: Path) -> None:
    tensors = read_checkpoint(LocalFolder(demo)).tensors
    kept = {
        name: (each.dtype, each.shape)
        for name, each in tensors.items()
        if not name.startswith("mtp.")
    }
    write_safetensors(demo / "model.safetensors", kept)
    report = check(str(demo))
    assert codes(report) == ["MTP010"]
    assert report.findings[0].found == (
        f"mtp_num_hidden_layers is 1, but none of the {len(kept)} tensors is named mtp.*"
    )
    assert report.worst is Severity.ERROR


def test_a_demo_model_with_mrope_section_is_caught(demo: Path) -> None:
    config = json.loads((demo / "config.json").read_text())
    config["rope_parameters"]["mrope_section"] = [4, 2, 2]
    (demo / "config.json").write_text(json.dumps(config))
    report = check(str(demo))
    assert codes(report) == ["MTP106"]
    assert report.worst is Severity.ERROR


@pytest.mark.parametrize("cut", [1, 100_000, 8_900_000])
def test_a_demo_model_that_is_cut_off_is_caught(demo: Path, cut: int) -> None:
    weights = demo / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size - cut)
    assert codes(check(str(demo))) == ["MTP002"]


def test_a_head_in_a_file_that_the_index_leaves_out_is_told(tmp_path: Path) -> None:
    target = sharded(tmp_path / "model", {"a.safetensors": TRUNK})
    checkpoint(tmp_path / "head", tensors=head())
    shutil.copy(tmp_path / "head" / "model.safetensors", tmp_path / "model" / "mtp.safetensors")
    found = check(target).findings[0].found
    assert found.endswith("is named mtp.*; mtp.safetensors is not named by the index")


def test_experts_saved_together_and_one_by_one_are_both_whole(tmp_path: Path) -> None:
    config = CONFIG | {
        "model_type": "qwen3_5_moe",
        "num_experts": 256,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    }
    together, single, dense = head(config, together=True), head(config), head()
    assert (len(dense), len(together), len(single)) == (15, 19, 785)
    for name, tensors in (("together", together), ("single", single)):
        assert codes(check(checkpoint(tmp_path / name, config, TRUNK | tensors))) == []


def test_what_a_newer_version_has_settled_is_said(tmp_path: Path) -> None:
    target, arguments = checkpoint(tmp_path), [*DRAFTING, "--enable-prefix-caching"]
    old, new = (
        check(target, vllm_version=version, arguments=arguments) for version in ("0.25", "0.26")
    )
    assert "MTP201" in codes(old)
    assert "MTP201" not in codes(new)
    assert [(each.rule.code, each.rule.state) for each in new.fixed] == [
        ("MTP201", "fixed in 0.26")
    ]


def test_the_exact_length_below_which_prefixes_are_not_found_is_given() -> None:
    text = (
        "schema: 1\nname: s\nmodels:\n- {model: MODEL, checkpoint: fp8, gpu: h100, kv_cache_dtype: "
        "fp8, prefix_caching: true, variants: {mtp: {speculative: {method: mtp, "
        "num_speculative_tokens: 2}}}}\n"
    )
    found = {}
    for model in ("qwen3.6-27b", "qwen3.6-35b-a3b"):
        stack = parse_yaml(text.replace("MODEL", model), StackSpec)
        report = check_stack(stack, known_version("vllm", "0.32"))
        found[model] = [each.found for each in report.findings if each.rule.code == "MTP203"]
    # Twice the block sizes of vllm-project/vllm issues 38182 and 45238.
    assert found == {
        "qwen3.6-27b": ["prefixes below 3200 tokens are never found (blocks of 1600)"],
        "qwen3.6-35b-a3b": ["prefixes below 4256 tokens are never found (blocks of 2128)"],
    }


def test_findings_come_most_severe_first(tmp_path: Path) -> None:
    target = checkpoint(tmp_path, tensors=TRUNK, files={"tokenizer.json": "{}"})
    report = check(target, arguments=[*DRAFTING, "--kv-cache-dtype", "fp8"])
    severities = [each.rule.severity for each in report.findings]
    assert severities == sorted(severities, reverse=True)
    assert set(severities) == set(Severity)


def test_a_fault_of_a_checkpoint_is_said_once_for_all_its_variants(demo: Path) -> None:
    (demo / "tokenizer.json").unlink()
    text = (
        f"schema: 1\nname: s\nmodels:\n- {{id: m, gpu: cpu, inline: {{path: {demo}, max_context: "
        "2048}, default_variant: a, variants: {a: {}, b: {}}}\n"
    )
    found = refuse(parse_yaml(text, StackSpec))
    assert [(each.rule.code, each.subject) for each in found] == [("MTP004", "m@a, m@b")]


def test_up_reads_a_repository_from_the_cache_and_asks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = put_in_cache(tmp_path, monkeypatch)
    monkeypatch.setattr("serving.checks.hub.HubRepository.sizes", property(lambda _: 1 / 0))
    text = (
        "schema: 1\nname: s\nmodels:\n- {id: m, gpu: h100, inline: {repo: lab/model, max_context: "
        "2048}, variants: {mtp: {speculative: {method: mtp, num_speculative_tokens: 2}}}}\n"
    )
    stack = parse_yaml(text, StackSpec)
    assert refuse(stack) == []
    (snapshot / "tokenizer.json").unlink()
    assert refuse(stack) == []
    checkpoint(snapshot, tensors=TRUNK)
    assert [each.rule.code for each in refuse(stack)] == ["MTP010"]
    (snapshot / "model.safetensors").unlink()
    assert refuse(stack) == []
    (snapshot / "config.json").unlink()
    assert refuse(stack) == []


def test_a_thousand_shards_are_read_without_their_data(tmp_path: Path) -> None:
    shards = {
        f"model-{shard:05}-of-01000.safetensors": {
            f"model.layers.{shard}.mlp.{name}_proj.weight": ("BF16", (4096, 4096))
            for name in ("gate", "up", "down")
        }
        for shard in range(1000)
    }
    shards["model-00000-of-01000.safetensors"] |= head()
    sharded(tmp_path, shards)
    source = Recorder(tmp_path)
    found = read_checkpoint(source)
    assert (len(found.tensors), found.faults) == (3015, {})
    weights = [name for name in source.read_to if name.endswith(".safetensors")]
    assert len(weights) == 1000
    # 32 MB of data a tensor: nothing beyond the first stretch was asked for.
    assert max(source.read_to[name] for name in weights) <= 128 * 1024


class Recorder(LocalFolder):
    """A folder that remembers how far each file was read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.read_to: dict[str, int]
        object.__setattr__(self, "read_to", {})

    def read(self, name: str, start: int, length: int) -> bytes:
        self.read_to[name] = max(self.read_to.get(name, 0), start + length)
        return super().read(name, start, length)


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("no/such/folder", "no such folder, GGUF file or stack, nor a repository's name"),
        ("./nothing", "no such folder, GGUF file or stack, nor a repository's name"),
        ("nothing", "no such folder, GGUF file or stack, nor a repository's name"),
        ("EMPTY", "neither config.json nor safetensors there; name the folder"),
        ("GGUFS", "holds 2 GGUF files; name one of them"),
    ],
)
def test_a_target_that_is_none_is_told_with_its_cure(
    target: str, text: str, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    gguf(tmp_path / "ggufs" / "a.gguf")
    gguf(tmp_path / "ggufs" / "b.gguf")
    places = {"EMPTY": str(tmp_path / "empty"), "GGUFS": str(tmp_path / "ggufs")}
    with pytest.raises(CheckError, match=text):
        check(places.get(target, target))


def test_a_split_gguf_file_is_read_whole(tmp_path: Path) -> None:
    gguf(tmp_path / "m-00001-of-00002.gguf", layers=1)
    gguf(tmp_path / "m-00002-of-00002.gguf", nextn=True)
    assert codes(check(str(tmp_path / "m-00001-of-00002.gguf"))) == []
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    report = check(str(tmp_path / "m-00001-of-00002.gguf"))
    assert [each.found for each in report.findings] == ["m-00002-of-00002.gguf: is missing"]


def test_a_stack_takes_no_engine_arguments() -> None:
    with pytest.raises(CheckError, match="a stack file says what its engines are given"):
        check("demo", arguments=DRAFTING)


def test_an_unknown_gpu_class_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="rtx3090"):
        check(checkpoint(tmp_path), gpu="rtx3099")


# --- what strangers' files may hold ----------------------------------------------------------

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
KEYS = [*CONFIG, "text_config", "quantization_config", "num_experts", "full_attention_interval"]
BLOCK_KEYS = [
    "quant_method", "ignore", "config_groups", "dynamic", "modules_to_not_convert", "extra_config",
    "quantized_layers", "block_name_to_quantize", "modules_in_block_to_quantize",
]  # fmt: skip
METHODS = ["modelopt", "compressed-tensors", "gptq", "awq", "auto-round", "fp8", "new"]
blocks = st.dictionaries(st.sampled_from(BLOCK_KEYS), values).flatmap(
    lambda block: st.sampled_from(METHODS).map(lambda method: {**block, "quant_method": method})
)
configs = st.dictionaries(st.sampled_from(KEYS), values | blocks).map(
    lambda changes: {**CONFIG, **changes}
)
any_time = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@any_time
@given(config=configs)
def test_any_config_gives_a_report(tmp_path: Path, config: dict[str, Any]) -> None:
    target = checkpoint(tmp_path, config, TRUNK | head())
    arguments = [*DRAFTING, "--enable-prefix-caching", "--max-model-len", "2048"]
    for gpu in ("cpu", "rtx3090"):
        assert isinstance(check(target, gpu=gpu, arguments=arguments), Report)


@any_time
@given(content=st.binary(max_size=60) | values.map(lambda value: json.dumps(value).encode()))
def test_any_json_file_gives_a_report(tmp_path: Path, content: bytes) -> None:
    for name in ("config.json", "model.safetensors.index.json", "tokenizer_config.json"):
        checkpoint(tmp_path)
        (tmp_path / name).write_bytes(content)
        assert isinstance(check(str(tmp_path)), Report)
        (tmp_path / name).unlink()


arguments = st.dictionaries(
    st.sampled_from(
        ["speculative-config", "kv-cache-dtype", "tensor-parallel-size", "max-model-len",
         "max-num-seqs", "gpu-memory-utilization", "kv-transfer-config", "async-scheduling",
         "attention-config", "moe-backend", "spec-tokens"]
    ),
    values.map(json.dumps) | st.text(max_size=8),
)  # fmt: skip


@any_time
@given(given_=arguments)
def test_any_arguments_give_a_report_or_a_clear_error(
    tmp_path: Path, given_: dict[str, str]
) -> None:
    words = [f"--{name}={value}" for name, value in given_.items()]
    try:
        assert isinstance(check(checkpoint(tmp_path), gpu="h100", arguments=words), Report)
    except CheckError as error:
        assert str(error).startswith("engine arguments: ")


STACK = """schema: 1
models:
  - model: qwen3.6-27b
    checkpoint: fp8
    gpu: h100
    max_num_seqs: 8
    variants:
      mtp:
        speculative: {method: mtp, num_speculative_tokens: 2}
"""


@any_time
@given(at=st.integers(0, len(STACK) - 1), text=st.text(max_size=3) | values.map(json.dumps))
def test_any_stack_file_gives_a_report_or_a_clear_error(tmp_path: Path, at: int, text: str) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(STACK[:at] + text + STACK[at:], encoding="utf-8", errors="replace")
    try:
        assert isinstance(check(str(path)), Report)
    except ConfigError as error:
        assert str(error).startswith(f"{path}:")
