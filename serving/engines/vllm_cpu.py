"""Cures four faults of vLLM's CPU build; vLLM loads it in each of its processes, as a plugin.

Sampling: vLLM 0.32 on a CPU gives the rejection sampler's `_expand` its tensors
converted to int64 and drops the result, so that drafting at a temperature above 0
scales the logits by whatever the memory held and the text becomes noise. Here
torch does the expansion.

One-token prompts: the convolution of the gated-delta-net layers wants its input
[channels, tokens] with a stride of `channels` between tokens. Cut from a wider
tensor, one lone token keeps that tensor's stride, the kernel refuses it, and the
engine dies. Here the stride is put right, which for one token moves no data.

Drafting: the same convolution, with drafting on, takes a loop in Python over the
sequences unless the CPU has AMX, although its kernel, as the weights are packed
for it, wants no more than AVX-512 BF16. Here it is used wherever it runs.

Waiting: the engine core and its worker wait for each other by asking all the time
and yielding in between. That takes the cores the model is to run on, and since Linux
6.18, where yielding gives up more than a turn, whoever else wants a core may wait for
half a second: streams stand still and then come at once. Here they sleep until told.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

# The message that wakes a sleeper may be dropped, so none sleeps longer in a busy engine.
WAKE_AFTER_MS = 1
BUSY_FOR_S = 1.0


def register() -> None:
    """Entry point of the group `vllm.general_plugins`; changes nothing on a GPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.v1.sample import rejection_sampler

    convolve = gdn_attention._causal_conv1d_fwd_cpu

    def convolve_any_length(*, x: torch.Tensor, **rest: Any) -> torch.Tensor:
        result: torch.Tensor = convolve(x=with_token_stride(x), **rest)
        return result

    gdn_attention._causal_conv1d_fwd_cpu = convolve_any_length
    # Asked beside AMX wherever vLLM chooses; on Arm its own answer stays.
    if torch.cpu._is_avx512_bf16_supported():
        gdn_attention.is_arm_bf16 = lambda: True
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    shm_broadcast.SpinCondition.wait = wait_asleep(shm_broadcast.SpinCondition.wait)


def wait_asleep(wait: Callable[..., None]) -> Callable[..., None]:
    """A `SpinCondition.wait` that polls the notification's socket where `wait` would yield."""

    def asleep(condition: Any, timeout_ms: int | None = None) -> None:
        condition.busy_loop_s = -1  # never yields
        busy = time.monotonic() <= condition.last_read + BUSY_FOR_S
        wait(condition, WAKE_AFTER_MS if busy else timeout_ms)

    return asleep


def with_token_stride(x: torch.Tensor) -> torch.Tensor:
    """`x` [channels, tokens] with `channels` between tokens, also where there is one token."""
    channels, tokens = x.shape
    return x.as_strided(x.shape, (1, channels)) if tokens == 1 else x


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Repeat each request's value once per draft token of that request.

    `x` and `cu_num_tokens` (running totals) have one element per request, the
    result has `num_tokens`. Values equal to `replace_from` become `replace_to`.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(values, counts, output_size=num_tokens)
