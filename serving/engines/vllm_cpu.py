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

Worker: vLLM gives even a single worker a process of its own, to bind its threads to cores
there. The engine core and that process then wait for each other by asking all the time and
yielding in between, which takes the cores the model is to run on: streams stand still for
half a second and then come at once. Where no thread is bound (`nobind`), the one worker
runs in the engine core's own process, as on a GPU: one process less to start, and no waiting.
"""

from __future__ import annotations

import os
from typing import Any

import torch


def register() -> None:
    """Entry point of the group `vllm.general_plugins`; changes nothing on a GPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
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
    platform = type(current_platform)
    check = platform.check_and_update_config.__func__

    def check_and_choose(cls: type, config: Any) -> None:
        check(cls, config)
        choose_executor(config.parallel_config)

    platform.check_and_update_config = classmethod(check_and_choose)


def choose_executor(parallel: Any) -> None:
    """Have the only worker of a vLLM `ParallelConfig` run in the engine core's process."""
    if parallel.world_size == 1 and os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind":
        parallel.distributed_executor_backend = "uni"


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
