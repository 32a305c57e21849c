"""The cure of vLLM's CPU rejection sampler."""

import pytest

torch = pytest.importorskip("torch")

from serving.engines.vllm_cpu import expand_batch_to_tokens, with_token_stride  # noqa: E402


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
