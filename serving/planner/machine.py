"""What the planner needs of the hardware: bandwidth and arithmetic of the cards together.

Owns turning a GPU class, or a calibrated CPU, into these figures. Leaves measuring to
`calibrate`, and what GPUs exist to the catalogue.
"""

from __future__ import annotations

from dataclasses import dataclass

from serving.catalog.gpus import GpuClass
from serving.planner.errors import PlannerError
from serving.planner.precision import FP8_BITS, INT4_BITS, NVFP4_BITS

GIB = 1024**3
# Native formats multiply the bf16 peak; weight-only ones are unpacked and computed in bf16.
FP8_SPEEDUP, NVFP4_SPEEDUP = 2, 4
# Where no bf16 peak is known: tensor cores of consumer cards do at least this much more
# than their float32 units.
TENSOR_OVER_VECTOR = 2


@dataclass(frozen=True, slots=True)
class Machine:
    """One engine's cards, taken together. None where a figure is not known."""

    name: str
    bandwidth: float
    """Peak, bytes/s."""
    vector_flops: float | None
    """Peak of the float32 units, operations/s."""
    tensor_flops: float | None
    """Peak of bf16 with float32 accumulation, operations/s."""
    fp8_native: bool = False
    nvfp4_native: bool = False
    cards: int = 1
    memory: int | None = None
    """Bytes of one card."""

    def tensor_peak(self, bits: float) -> float | None:
        """Operations/s of a matrix product with weights of `bits` bits."""
        if self.tensor_flops is None:
            return None
        if self.fp8_native and bits == FP8_BITS:
            return self.tensor_flops * FP8_SPEEDUP
        if self.nvfp4_native and bits == NVFP4_BITS:
            return self.tensor_flops * NVFP4_SPEEDUP
        return self.tensor_flops


def machine_of(gpu: GpuClass, cards: int = 1, *, bandwidth: float | None = None) -> Machine:
    """`cards` devices of a class; `bandwidth` (bytes/s of one) where the class has none.

    Raises PlannerError where neither tells the bandwidth.
    """
    if bandwidth is None:
        if gpu.bandwidth_gb_s is None:
            raise PlannerError(
                f"gpu: the bandwidth of {gpu.id} is the machine's; run `moe-serving plan "
                "calibrate` on it, which measures and remembers it"
            )
        bandwidth = gpu.bandwidth_gb_s * 1e9
    vector = gpu.fp32_tflops and gpu.fp32_tflops * 1e12 * cards
    tensor = gpu.bf16_tflops and gpu.bf16_tflops * 1e12 * cards
    if tensor is None and vector is not None:
        tensor = vector * TENSOR_OVER_VECTOR
    return Machine(
        name=gpu.id,
        bandwidth=bandwidth * cards,
        vector_flops=vector,
        tensor_flops=tensor,
        fp8_native=gpu.fp8 == "native",
        nvfp4_native=gpu.nvfp4 == "native",
        cards=cards,
        memory=None if gpu.memory_gib is None else int(gpu.memory_gib * GIB),
    )


def runs_format(gpu: GpuClass, bits: float) -> bool:
    """Whether the class has kernels for weights of `bits` bits at all."""
    if bits == FP8_BITS:
        return gpu.fp8 != "none"
    if bits == NVFP4_BITS:
        return gpu.nvfp4 != "none"
    return bits != INT4_BITS or gpu.int4 != "none"
