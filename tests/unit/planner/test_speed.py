"""The roofline: what must hold for every model, machine and load."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.catalog import find_gpu, find_model
from serving.planner.acceptance import from_rate
from serving.planner.constants import LLAMA_CPP, VLLM, EngineFamily
from serving.planner.errors import PlannerError
from serving.planner.machine import machine_of
from serving.planner.precision import precision_of
from serving.planner.speed import (
    Setup,
    Target,
    decode,
    draft_time,
    first_token_time,
    step_time,
    unique_experts,
)

MODELS = (
    ("qwen3.6-27b", "int4-autoround"),
    ("qwen3.6-27b", "gguf-q4"),
    ("qwen3.6-35b-a3b", "fp8"),
    ("gemma-4", "nvfp4"),
    ("tiny-moe", "bf16"),
)
GPUS = ("rtx3090", "rtx5090", "h100", "b200", "v100", "strix-halo", "gb10")
SETUPS = st.builds(
    lambda which, gpu, cards, family: setup(*which, gpu=gpu, cards=cards, family=family),
    st.sampled_from(MODELS),
    st.sampled_from(GPUS),
    st.sampled_from([1, 2]),
    st.sampled_from([VLLM, LLAMA_CPP]),
)
LOADS = {
    "given_setup": SETUPS,
    "drafts": st.integers(0, 8),
    "rate": st.floats(0, 1),
    "concurrency": st.integers(1, 256),
    "context": st.integers(0, 100_000),
}


def setup(
    model: str = "qwen3.6-27b",
    checkpoint: str = "int4-autoround",
    *,
    gpu: str = "rtx3090",
    cards: int = 1,
    family: EngineFamily = VLLM,
) -> Setup:
    entry = find_model(model)
    target = Target.of(entry, precision_of(entry, checkpoint))
    return Setup(target, machine_of(find_gpu(gpu), cards), family)


@given(**LOADS)
def test_no_drafts_is_plain_decoding(
    given_setup: Setup, drafts: int, rate: float, concurrency: int, context: int
) -> None:
    found = decode(given_setup, 0, from_rate(rate, 2), concurrency=concurrency, context=context)
    assert found.speedup == 1
    assert found.tokens_per_s == concurrency / found.step.total
    assert found.step.drafting == 0


@given(**LOADS)
def test_the_speed_up_is_never_above_the_expected_length(
    given_setup: Setup, drafts: int, rate: float, concurrency: int, context: int
) -> None:
    acceptance = from_rate(rate, 2)
    found = decode(given_setup, drafts, acceptance, concurrency=concurrency, context=context)
    assert 0 < found.speedup <= acceptance.expected_length(drafts) + 1e-9


@given(**LOADS)
def test_a_step_never_gets_shorter_with_drafts_requests_or_context(
    given_setup: Setup, drafts: int, rate: float, concurrency: int, context: int
) -> None:
    step = step_time(given_setup, drafts, sequences=concurrency, context=context).total
    more = (
        step_time(given_setup, drafts + 1, sequences=concurrency, context=context),
        step_time(given_setup, drafts, sequences=concurrency + 1, context=context),
        step_time(given_setup, drafts, sequences=concurrency, context=context + 1_000),
    )
    assert all(each.total >= step * (1 - 1e-12) for each in more)


@given(given_setup=SETUPS, drafts=st.integers(1, 6))
def test_more_bandwidth_never_slows_a_step(given_setup: Setup, drafts: int) -> None:
    machine = replace(given_setup.machine, bandwidth=2 * given_setup.machine.bandwidth)
    faster = replace(given_setup, machine=machine)
    assert step_time(faster, drafts).total <= step_time(given_setup, drafts).total


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(1, 8), (2, 15.8), (3, 23.3), (4, 30.5), (5, 37.6), (8, 57.4), (16, 102), (64, 222)],
)
def test_unique_experts_are_those_of_the_field_notes(tokens: int, expected: float) -> None:
    assert unique_experts(256, 8, tokens) == pytest.approx(expected, rel=5e-3)


def test_at_94_tokens_95_percent_of_the_experts_are_read() -> None:
    assert unique_experts(256, 8, 94) == pytest.approx(0.95 * 256, rel=1e-3)


def test_a_step_of_the_27b_is_mostly_reading_its_weights_once() -> None:
    # 15.2 GB of weights beside the embedding, at 84 % of 936 GB/s; the notes say 21.7 ms in all.
    found = step_time(setup(checkpoint="int4-gptq"))
    assert found.weights == pytest.approx(15.2e9 / (0.84 * 936e9), rel=0.02)
    assert found.total == pytest.approx(21.7e-3, rel=0.05)


def test_a_draft_of_the_27b_reads_the_bf16_head_and_mtp_layer() -> None:
    # Field notes, 4.4: 2.54 + 0.83 GB per drafted token, 4.2 ms at 3090 speed.
    found = draft_time(setup(checkpoint="int4-gptq"))
    assert found - VLLM.draft_s == pytest.approx(3.39e9 / (0.84 * 936e9), rel=0.01)


def test_splitting_over_cards_adds_all_reduces_and_halves_reading() -> None:
    one, two = step_time(setup()), step_time(setup(cards=2))
    assert two.weights == pytest.approx(one.weights / 2)
    assert (one.allreduce, two.allreduce) == (0, pytest.approx(2 * 64 * 15e-6))


def test_many_requests_are_bound_by_arithmetic_and_drafts_stop_paying() -> None:
    acceptance = from_rate(0.75, 2)
    alone = decode(setup(), 4, acceptance, concurrency=1)
    many = decode(setup(), 4, acceptance, concurrency=64)
    assert alone.speedup > 1.5
    assert many.speedup < 1


def test_small_batches_of_llama_cpp_pay_for_every_token() -> None:
    llama = setup(checkpoint="gguf-q4", family=LLAMA_CPP)
    per_token = 2 * 25.6e9 / (0.35 * 35.6e12)
    growth = step_time(llama, 2).weights - step_time(llama, 1).weights
    assert growth == pytest.approx(per_token, rel=0.02)


def test_a_drafter_of_its_own_is_read_instead_of_an_mtp_layer() -> None:
    gemma = setup("gemma-4", "bf16", gpu="h100")
    assert gemma.target.drafter_bytes == 0.15e9
    assert draft_time(gemma) - VLLM.draft_s == pytest.approx(0.15e9 / (0.84 * 3_350e9))


def test_what_cannot_draft_is_not_asked_to() -> None:
    target = replace(setup("gemma-4", "bf16", gpu="h100").target, drafter_bytes=None)
    bare = replace(setup(gpu="h100"), target=target)
    with pytest.raises(PlannerError) as caught:
        step_time(bare, 1)
    assert str(caught.value) == (
        "draft_tokens: nothing is known of this model's drafter; ask for 0 draft tokens"
    )


def test_the_first_token_takes_longer_while_drafting_and_with_a_longer_prompt() -> None:
    plain = first_token_time(setup(), 2_048, drafting=False)
    drafting = first_token_time(setup(), 2_048, drafting=True)
    longer = first_token_time(setup(), 8_192, drafting=False)
    assert plain is not None
    assert drafting is not None
    assert longer is not None
    assert drafting / plain == pytest.approx(1.17)
    assert longer > 4 * (plain - VLLM.step_s)


def test_nothing_is_said_of_the_first_token_where_the_arithmetic_is_not_known() -> None:
    cpu = replace(setup(), machine=machine_of(find_gpu("cpu"), bandwidth=10e9))
    assert first_token_time(cpu, 100, drafting=False) is None


def test_a_class_without_bandwidth_asks_for_calibration() -> None:
    with pytest.raises(PlannerError) as caught:
        machine_of(find_gpu("cpu"))
    assert str(caught.value) == (
        "gpu: the bandwidth of cpu is the machine's; run `moe-serving plan calibrate` on it, "
        "which measures and remembers it"
    )


def test_native_formats_multiply_the_peak_and_others_do_not() -> None:
    h100, ampere = machine_of(find_gpu("h100")), machine_of(find_gpu("rtx3090"))
    assert h100.tensor_peak(8) == 2 * 989e12
    assert ampere.tensor_peak(8) == 71e12
    assert machine_of(find_gpu("b200")).tensor_peak(4.5) == 4 * 2250e12
