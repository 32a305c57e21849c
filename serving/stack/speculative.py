"""The `speculative` block of a variant: vLLM 0.32's speculative_config, typed.

Owns the fields and which of vLLM's settings are refused and why. Leaves whether
the checkpoint holds an MTP head to `spec`, and whether n pays off to the studies.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from serving.catalog.errors import FieldError

Method = Literal[
    "mtp",
    "draft_model",
    "eagle",
    "eagle3",
    "dflash",
    "dspark",
    "medusa",
    "mlp_speculator",
    "ngram",
    "ngram_gpu",
    "suffix",
    "extract_hidden_states",
    "custom_class",
]

KvCacheDtype = Literal[
    "auto",
    "float16",
    "bfloat16",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_inc",
    "fp8_ds_mla",
    "nvfp4_ds_mla",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
    "ultraquant_4bit",
    "int4_per_token_head",
    "int8_per_token_head",
    "fp8_per_token_head",
    "nvfp4",
    "nvfp4_4over6",
]

DYNAMIC_N = "num_speculative_tokens_per_batch_size"


class SpeculativeSpec(BaseModel):
    """How a variant drafts; every field but the first two is vLLM's default where absent."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    method: Method = Field(description="how tokens are drafted; mtp uses the checkpoint's own head")
    num_speculative_tokens: int = Field(ge=1, description="n, draft tokens per step")
    model: str | None = Field(
        default=None, description="drafting checkpoint: Gemma 4's assistant, an EAGLE head"
    )
    revision: str | None = Field(default=None, description="revision of the drafting checkpoint")
    quantization: str | None = Field(
        default=None, description="quantisation of the drafting checkpoint"
    )
    draft_sample_method: Literal["greedy", "probabilistic"] | None = Field(
        default=None, description="probabilistic raises acceptance at temperature > 0"
    )
    rejection_sample_method: Literal["standard", "synthetic", "block"] | None = Field(
        default=None, description="how drafts are verified; synthetic is for benchmarks only"
    )
    synthetic_acceptance_rates: tuple[float, ...] | None = Field(
        strict=False,
        default=None,
        description="for synthetic: share of steps accepting at least 1, 2, … drafts",
    )
    synthetic_acceptance_length: float | None = Field(
        default=None, description="for synthetic: mean acceptance length, 1 to n + 1"
    )
    draft_tensor_parallel_size: int | None = Field(
        default=None, ge=1, description="1 or the target's tensor_parallel_size"
    )
    moe_backend: str | None = Field(
        default=None, description="the drafter's MoE kernels; triton beside a Marlin target"
    )
    attention_backend: str | None = Field(
        default=None, description="the drafter's attention kernels; not inherited from the target"
    )
    kv_cache_dtype: KvCacheDtype | None = Field(
        default=None, description="the drafter's KV cache type; inherited where absent"
    )
    max_model_len: int | None = Field(
        default=None, ge=1, description="longer sequences are not drafted for, in tokens"
    )
    enforce_eager: bool | None = Field(
        default=None, description="run the drafter without CUDA graphs"
    )
    disable_padded_drafter_batch: bool | None = Field(
        default=None, description="draft for unpadded batches; turns async scheduling off"
    )
    disable_eagle_block_drop: bool | None = Field(
        default=None, description="keep the last prefix-cache block; experimental in vLLM"
    )
    use_local_argmax_reduction: bool | None = Field(
        default=None, description="less traffic between tensor-parallel ranks, greedy drafts only"
    )
    parallel_drafting: bool | None = Field(
        default=None, description="all drafts in one pass; the head must be trained for it"
    )
    index_share_for_mtp_iteration: bool | None = Field(
        default=None, description="reuse the first step's sparse indices in later MTP steps"
    )
    prompt_lookup_max: int | None = Field(
        default=None, ge=1, description="for ngram: longest n-gram looked up, in tokens"
    )
    prompt_lookup_min: int | None = Field(
        default=None, ge=1, description="for ngram: shortest n-gram looked up, in tokens"
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_changing_n(cls, data: Any) -> Any:
        # Measured on vLLM 0.32: half of plain's speed, and the greedy text changes once n was 0.
        if isinstance(data, dict) and DYNAMIC_N in data:
            raise FieldError(
                "refused: changing n under load is slow and alters the text of these models in "
                "vLLM 0.32; write one variant for each n and choose between the variants",
                DYNAMIC_N,
            )
        return data

    @field_validator("method", mode="before")
    @classmethod
    def _refuse_old_names(cls, value: Any) -> Any:
        if isinstance(value, str) and value.endswith("_mtp"):
            raise ValueError(f"found {value!r}, an old name in vLLM; write `method: mtp`")
        return value

    @model_validator(mode="after")
    def _synthetic_has_one_target(self) -> SpeculativeSpec:
        given = (self.synthetic_acceptance_rates, self.synthetic_acceptance_length)
        count = sum(value is not None for value in given)
        synthetic = self.rejection_sample_method == "synthetic"
        if count != int(synthetic):
            raise FieldError(
                "synthetic takes exactly one of synthetic_acceptance_rates and "
                "synthetic_acceptance_length, and no other method takes either; "
                f"found {count} with {self.rejection_sample_method or 'standard'}",
                "rejection_sample_method",
            )
        return self

    def to_vllm(self) -> dict[str, Any]:
        """The value of vLLM's `speculative_config`: what the file gives and nothing else."""
        return self.model_dump(mode="json", exclude_none=True)
