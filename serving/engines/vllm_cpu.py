"""Cures a fault of vLLM's CPU build; vLLM loads it in each of its processes, as a plugin.

vLLM 0.32 on a CPU gives the rejection sampler's `_expand` its tensors converted
to int64 and drops the result, so that drafting at a temperature above 0 scales
the logits by whatever the memory held and the text becomes noise. Here the same
expansion is done by torch.
"""

from __future__ import annotations

import torch


def register() -> None:
    """Entry point of the group `vllm.general_plugins`; changes nothing on a GPU."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.sample import rejection_sampler

        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


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
