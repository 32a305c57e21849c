"""The cures of vLLM's CPU build."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from serving.engines.vllm_cpu import (  # noqa: E402
    choose_executor,
    expand_batch_to_tokens,
    with_token_stride,
)


def test_each_value_is_repeated_once_per_draft_token() -> None:
    values = torch.tensor([0.7, 0.3, 1.0])
    totals = torch.tensor([2, 2, 5], dtype=torch.int32)
    expanded = expand_batch_to_tokens(values, totals, 5)
    assert torch.equal(expanded, torch.tensor([0.7, 0.7, 1.0, 1.0, 1.0]))


def test_greedy_temperatures_are_replaced_and_the_input_is_kept() -> None:
    values = torch.tensor([0.0, 0.5])
    totals = torch.tensor([1, 3], dtype=torch.int32)
    expanded = expand_batch_to_tokens(values, totals, 3, replace_from=0, replace_to=1)
    assert torch.equal(expanded, torch.tensor([1.0, 0.5, 0.5]))
    assert torch.equal(values, torch.tensor([0.0, 0.5]))


def test_integers_stay_integers() -> None:
    top_k = torch.tensor([20, 50], dtype=torch.int32)
    expanded = expand_batch_to_tokens(top_k, torch.tensor([1, 2], dtype=torch.int32), 2)
    assert expanded.dtype == torch.int32
    assert expanded.tolist() == [20, 50]


def test_a_lone_token_gets_the_stride_the_kernel_wants() -> None:
    cut = torch.arange(6.0).reshape(1, 6)[:, :4].contiguous().transpose(0, 1)
    assert cut.stride() == (1, 6)
    mended = with_token_stride(cut)
    assert mended.stride() == (1, 4)
    assert mended.flatten().tolist() == [0.0, 1.0, 2.0, 3.0]


def test_several_tokens_are_left_as_they_are() -> None:
    tokens = torch.arange(8.0).reshape(2, 4).transpose(0, 1)
    assert with_token_stride(tokens) is tokens


@pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="needs a CPU with AVX-512 BF16"
)
@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_the_drafting_convolution_is_the_one_that_vllm_loops_over(accepted: int) -> None:
    ops = pytest.importorskip("vllm._custom_ops")
    channels, width, drafts = 64, 4, 2
    torch.manual_seed(accepted)
    weight = torch.randn(channels, width, dtype=torch.bfloat16)
    history = torch.randn(channels, width - 1 + drafts, dtype=torch.bfloat16)
    tokens = torch.randn(1, drafts + 1, channels, dtype=torch.bfloat16)

    # What is kept: the history up to the last accepted token, then the new tokens.
    kept = history[:, accepted - 1 : accepted - 1 + width - 1]
    line = torch.cat([kept, tokens[0].T], dim=1)
    expected = torch.nn.functional.silu(
        torch.nn.functional.conv1d(line[None].float(), weight[:, None].float(), groups=channels)[0]
    )

    # Slot 0 is vLLM's null block; [slots, channels, history], channels side by side.
    states = torch.zeros(2, width - 1 + drafts, channels, dtype=torch.bfloat16).transpose(1, 2)
    states[1] = history
    result = ops.causal_conv1d_update_cpu(
        x=tokens,
        conv_states=states,
        weight=ops.causal_conv1d_weight_pack(weight),
        bias=None,
        silu_activation=True,
        conv_state_indices=torch.tensor([1], dtype=torch.int32),
        is_weight_packed=True,
        num_accepted_tokens=torch.tensor([accepted], dtype=torch.int32),
    )
    assert torch.allclose(result[0].T.float(), expected, atol=0.03, rtol=0.03)
    assert torch.equal(states[1][:, -(drafts + 1) :], tokens[0].T)


@pytest.mark.parametrize(
    ("workers", "bind", "executor"),
    [(1, "nobind", "uni"), (1, "0-1", "mp"), (1, None, "mp"), (2, "nobind", "mp")],
)
def test_the_only_worker_runs_in_the_engine_core_where_no_thread_is_bound(
    monkeypatch: pytest.MonkeyPatch, workers: int, bind: str | None, executor: str
) -> None:
    if bind is None:
        monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    else:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", bind)
    parallel = SimpleNamespace(world_size=workers, distributed_executor_backend="mp")
    choose_executor(parallel)
    assert parallel.distributed_executor_backend == executor
