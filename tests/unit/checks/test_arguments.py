"""Command lines of engines, as named values."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from serving.checks.arguments import parse_arguments
from serving.checks.errors import CheckError


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--max-num-seqs 8", {"max_num_seqs": 8}),
        ("--max-num-seqs=8", {"max_num_seqs": 8}),
        ("--gpu-memory-utilization 0.9", {"gpu_memory_utilization": 0.9}),
        ("--enable-prefix-caching", {"enable_prefix_caching": True}),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("--async-scheduling -tp 2", {"async_scheduling": True, "tensor_parallel_size": 2}),
        ("--kv-cache-dtype fp8", {"kv_cache_dtype": "fp8"}),
        (
            '--speculative-config \'{"method": "mtp"}\'',
            {"speculative_config": {"method": "mtp"}},
        ),
        (
            "--speculative-config.method mtp --speculative-config.num_speculative_tokens 2",
            {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
        ),
        ("--spec-method mtp --spec-tokens 2", {
            "speculative_config": {"method": "mtp", "num_speculative_tokens": 2}
        }),
        ("--seed -1", {"seed": -1}),
        ("", {}),
    ],
)  # fmt: skip
def test_vllms_options_are_read_as_vllm_reads_them(line: str, expected: dict[str, Any]) -> None:
    assert parse_arguments("vllm", shlex.split(line)) == expected


def test_llamacpps_options_have_one_name_each() -> None:
    line = "--spec-type draft-mtp -np 4 --draft-max 3 -md head.gguf"
    assert parse_arguments("llama.cpp", line.split()) == {
        "spec_type": "draft-mtp",
        "parallel": 4,
        "spec_draft_n_max": 3,
        "spec_draft_model": "head.gguf",
    }


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["serve", "model"], "'serve' belongs to no option; give the engine's options only"),
        (["--speculative-config", "mtp"], "--speculative-config: found 'mtp'; write a JSON object"),
    ],
)
def test_what_is_no_option_is_told(words: list[str], text: str) -> None:
    with pytest.raises(CheckError, match=text):
        parse_arguments("vllm", words)
