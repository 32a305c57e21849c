"""What each engine is started with."""

from __future__ import annotations

import pytest

from serving.catalog.yaml_file import parse_yaml
from serving.engines.probe_settings import Probes
from serving.stack.engine_plan import EnginePlan, plan_engines
from serving.stack.load import load_stack
from serving.stack.spec import StackSpec


def plan(settings: str = "", variant: str = "", gpu: str = "h100") -> EnginePlan:
    text = (
        f"schema: 1\nname: s\nmodels:\n- id: m\n  gpu: {gpu}\n"
        f"  inline: {{repo: a/b, max_context: 4096}}\n{settings}"
        f"  variants: {{v: {{{variant}}}}}\n"
    )
    (only,) = plan_engines(parse_yaml(text, StackSpec))
    return only


DRAFTS = "speculative: {method: mtp, num_speculative_tokens: 1}"


def test_the_demo_has_a_drafting_and_a_plain_engine_on_cpu() -> None:
    mtp, plain = plan_engines(load_stack("demo"))
    assert mtp.vllm_args == {
        "model": mtp.source,
        "language_model_only": True,
        "max_num_seqs": 16,
        "max_model_len": 2048,
        "enable_prefix_caching": False,
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
    }
    assert (mtp.is_default, plain.is_default, plain.speculative) == (True, False, None)
    assert plain.env == {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    assert mtp.env == plain.env | Probes(acceptance=True).to_environment()
    assert (mtp.gpus, mtp.num_cpus, mtp.replicas, mtp.max_ongoing_requests) == (0, 0.25, 1, 32)


def test_a_variant_s_setting_wins_and_null_takes_the_model_s_away() -> None:
    settings = "  max_num_seqs: 8\n  kv_cache_dtype: fp8\n  env: {A: '1', B: '1'}\n"
    got = plan(settings, "max_num_seqs: 4, kv_cache_dtype: null, env: {B: '2'}")
    assert got.vllm_args["max_num_seqs"] == 4
    assert "kv_cache_dtype" not in got.vllm_args
    assert got.env == {"A": "1", "B": "2"}


def test_a_variant_s_autoscaling_replaces_the_model_s_replicas() -> None:
    got = plan("  replicas: 2\n", "max_num_seqs: 8, autoscaling: {max_replicas: 3}")
    assert got.replicas is None
    assert got.autoscaling is not None
    assert got.autoscaling.target_ongoing_requests == 6


@pytest.mark.parametrize(
    ("gpu", "variant", "on"),
    [
        ("h100", "", True),
        ("h100", DRAFTS, False),
        ("cpu", "", False),
        ("h100", DRAFTS + ", prefix_caching: true", True),
    ],
)
def test_prefix_caching_is_off_on_cpu_and_with_drafting_unless_asked_for(
    gpu: str, variant: str, on: bool
) -> None:
    assert plan(variant=variant, gpu=gpu).vllm_args["enable_prefix_caching"] is on


@pytest.mark.parametrize(
    ("env", "keeps"),
    [
        ("{}", False),
        ("{VLLM_ENABLE_RESPONSES_API_STORE: '1'}", True),
        ("{VLLM_ENABLE_RESPONSES_API_STORE: '0'}", False),
    ],
)
def test_an_engine_keeps_responses_only_where_vllm_is_told_to(env: str, keeps: bool) -> None:
    assert plan(f"  env: {env}\n").keeps_responses is keeps


def test_gpus_are_counted_over_every_kind_of_parallelism() -> None:
    assert plan("  tensor_parallel_size: 2\n  data_parallel_size: 3\n").gpus == 6


def test_images_are_refused_unless_allowed() -> None:
    assert plan().vllm_args["language_model_only"] is True
    allowed = plan("  images: {max_per_prompt: 2, allowed_hosts: [img.example]}\n")
    assert "language_model_only" not in allowed.vllm_args
    assert allowed.vllm_args["limit_mm_per_prompt"] == {"image": 2, "video": 0, "audio": 0}
    assert allowed.vllm_args["allowed_media_domains"] == ["img.example"]
    assert allowed.env == {"VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0"}


def test_images_without_hosts_come_from_no_host_at_all() -> None:
    assert plan("  images: {}\n").vllm_args["allowed_media_domains"] == ["none.invalid"]


def test_parsers_go_to_the_part_of_vllm_that_takes_them() -> None:
    got = plan("  reasoning_parser: qwen3\n  tool_call_parser: qwen3_coder\n")
    assert got.vllm_args["reasoning_parser"] == "qwen3"
    assert got.frontend_args == {"enable_auto_tool_choice": True, "tool_call_parser": "qwen3_coder"}


@pytest.mark.parametrize(
    "same",
    [
        "aliases: [n]",
        "replicas: 3",
        "max_ongoing_requests: 9",
        "routing: {balancing: prefix-aware}",
    ],
)
def test_what_a_running_engine_can_take_over_keeps_its_name(same: str) -> None:
    assert plan(f"  {same}\n").app_name == plan().app_name


@pytest.mark.parametrize("other", ["max_num_seqs: 9", "env: {A: '1'}", "num_cpus: 2"])
def test_what_needs_a_new_engine_changes_the_name(other: str) -> None:
    assert plan(f"  {other}\n").app_name != plan().app_name
    assert plan().app_name.startswith("engine-m-v-")


MTP = "speculative: {method: mtp, num_speculative_tokens: 1}"


@pytest.mark.parametrize(
    ("settings", "variant", "probes"),
    [
        ("", "", Probes()),
        ("", MTP, Probes(acceptance=True)),
        ("  probes: {enabled: false}\n", MTP, Probes()),
        ("  probes: {acceptance: false}\n", MTP, Probes()),
        ("  tool_call_parser: qwen3_coder\n", MTP, Probes(acceptance=True, tools=True)),
        ("  prefix_caching: true\n", MTP, Probes(acceptance=True, prefix=True)),
        ("  probes: {}\n", "", Probes(prefix=True)),
        (
            "  probes: {long_context_tokens: 9, on_collapse: drain}\n",
            MTP,
            Probes(acceptance=True, long_context_tokens=9, on_collapse="drain"),
        ),
    ],
)
def test_what_drafts_is_probed_and_what_it_is_asked_follows_from_its_settings(
    settings: str, variant: str, probes: Probes
) -> None:
    assert Probes.from_environment(plan(settings, variant).env) == probes
