"""What the GPU files say, and what one may say."""

from __future__ import annotations

import pytest

from serving.catalog import ConfigError, GpuClass, find_gpu, list_gpus
from serving.catalog.yaml_file import parse_yaml

CARD = """\
id: some-card
name: Some Card
memory_gib: 24
bandwidth_gb_s: 900
compute_capability: "8.6"
fp8: weight-only
nvfp4: emulated
int4: weight-only
bf16_tflops: null
source: a test
notes: none
"""


def formats(gpu_id: str) -> tuple[str, str, str]:
    gpu = find_gpu(gpu_id)
    return gpu.fp8, gpu.nvfp4, gpu.int4


@pytest.mark.parametrize(
    ("gpu_id", "expected"),
    [
        ("v100", ("none", "none", "weight-only")),
        ("rtx3090", ("weight-only", "emulated", "weight-only")),
        ("a100-80", ("weight-only", "emulated", "weight-only")),
        ("rtx4090", ("native", "emulated", "weight-only")),
        ("h200", ("native", "emulated", "weight-only")),
        ("rtx5090", ("native", "native", "weight-only")),
        ("b200", ("native", "native", "weight-only")),
        ("gb10", ("native", "native", "weight-only")),
    ],
)
def test_number_formats_follow_the_generation(gpu_id: str, expected: tuple[str, ...]) -> None:
    assert formats(gpu_id) == expected


def test_bandwidths_are_the_makers_figures() -> None:
    assert {gpu.id: gpu.bandwidth_gb_s for gpu in list_gpus()} == {
        "rtx3090": 936,
        "rtx3090ti": 1008,
        "rtx4090": 1008,
        "rtx5090": 1792,
        "rtx6000ada": 960,
        "rtxpro6000": 1792,
        "rtxpro6000maxq": 1792,
        "l40s": 864,
        "v100": 900,
        "a100-80": 2039,
        "h100": 3350,
        "h200": 4800,
        "b200": 8000,
        "gb10": 273,
        "strix-halo": 256,
        "apple-m-series": 400,
        "cpu": None,
    }


def test_compute_capabilities_compare_as_numbers() -> None:
    ten, eight = find_gpu("b200").sm, find_gpu("rtx4090").sm
    assert ten is not None and eight is not None
    assert (ten > eight, find_gpu("cpu").sm) == (True, None)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "fp8: weight-only",
            "fp8: native",
            "g.yaml:6: fp8: found 'native' with compute capability 8.6; "
            "CUDA has it native from 8.9, correct one of the two",
        ),
        (
            'compute_capability: "8.6"\nfp8: weight-only',
            'compute_capability: "12.0"\nfp8: native',
            "g.yaml:7: nvfp4: found 'emulated' with compute capability 12.0; "
            "CUDA has it native from 10.0, correct one of the two",
        ),
        (
            "notes: none",
            "note: none",
            "g.yaml:11: note: did you mean notes?",
        ),
    ],
)
def test_a_gpu_that_contradicts_itself_is_refused(old: str, new: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(CARD.replace(old, new), GpuClass, name="g.yaml")
    assert str(caught.value) == expected
