"""What a GPU class is: memory, bandwidth and the number formats it computes in.

Owns the typed form of `configs/gpus/*.yaml`. Leaves finding files to `load`, and
what follows from the figures (what fits, how fast) to the planner.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from serving.catalog.errors import FieldError

# FP8 tensor cores came with Ada (8.9), FP4 ones with Blackwell (10.0).
FIRST_NATIVE_FP8 = (8, 9)
FIRST_NATIVE_NVFP4 = (10, 0)


class GpuClass(BaseModel):
    """One kind of accelerator, or the CPU. Figures are for a single device."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$", description="short name used in stack files")
    name: str = Field(min_length=1, description="name as its makers write it")
    memory_gib: float | None = Field(gt=0, description="GiB; null where the machine decides")
    bandwidth_gb_s: float | None = Field(
        gt=0, description="peak memory bandwidth, 10^9 bytes/s; null where the machine decides"
    )
    compute_capability: str | None = Field(
        pattern=r"^\d+\.\d$", description="CUDA compute capability in quotes; null without CUDA"
    )
    fp8: Literal["native", "weight-only", "none"]
    nvfp4: Literal["native", "emulated", "none"]
    int4: Literal["weight-only", "none"]
    bf16_tflops: float | None = Field(
        gt=0, description="dense bf16 peak with float32 accumulation, 10^12 operations/s"
    )
    fp32_tflops: float | None = Field(
        default=None, gt=0, description="float32 peak without tensor cores, 10^12 operations/s"
    )
    verified: bool = Field(
        default=False, description="whether `source` itself was read for these facts"
    )
    notes: str = ""
    source: str = Field(min_length=1, description="document the facts are from")

    @property
    def sm(self) -> tuple[int, int] | None:
        """The compute capability as (major, minor), to compare; None without CUDA."""
        if self.compute_capability is None:
            return None
        major, minor = self.compute_capability.split(".")
        return int(major), int(minor)

    @model_validator(mode="after")
    def _formats_fit_the_capability(self) -> Self:
        for field, value, first in (
            ("fp8", self.fp8, FIRST_NATIVE_FP8),
            ("nvfp4", self.nvfp4, FIRST_NATIVE_NVFP4),
        ):
            native = self.sm is not None and self.sm >= first
            if native != (value == "native"):
                raise FieldError(
                    f"found {value!r} with compute capability {self.compute_capability}; "
                    f"CUDA has it native from {first[0]}.{first[1]}, correct one of the two",
                    field,
                )
        return self
