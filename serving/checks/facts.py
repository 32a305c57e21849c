"""What the rules look at: one engine, or one checkpoint that no engine has yet.

Owns the values and the few readings of them that several rules share, each as vLLM
0.32 reads its own arguments. Leaves collecting them to `run`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from packaging.version import Version

from serving.catalog.gpus import GpuClass
from serving.catalog.models import Architecture
from serving.checks.checkpoint import Checkpoint
from serving.checks.versions import EngineName
from serving.planner.precision import Precision

# The first version whose source was read with prefix caching on for hybrid models where nothing
# is said (engine/arg_utils.py); in 0.27 it was off.
PREFIX_CACHING_BY_DEFAULT = Version("0.32")
# The first version read in which the V2 model runner is taken wherever it can be.
V2_RUNNER_BY_DEFAULT = Version("0.32")
DYNAMIC_N = "num_speculative_tokens_per_batch_size"
# vLLM's defaults by the card's GiB: max_num_seqs and max_num_batched_tokens of its API server
# (0.32, engine/arg_utils.py), where an A100 counts as a small card.
SERVER_DEFAULTS = ((160, 1024, 16384), (70, 1024, 8192), (0, 256, 2048))


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One engine as it would be started; a checkpoint alone has no arguments."""

    subject: str
    """How findings name it: model@variant, or the target."""
    engine: EngineName
    version: Version
    place: str
    """Path or repository id of the weights, as the engine is told."""
    unreadable: str = ""
    """Why the checkpoint could not be read; empty where it could, or was not to be."""
    checkpoint: Checkpoint | None = None
    """None where it was not read."""
    model_type: str = ""
    architecture: Architecture | None = None
    precision: Precision | None = None
    """Bits per parameter, measured from the headers or the catalogue's."""
    quantisation: str = ""
    """bf16, fp8, nvfp4, int4 or gguf; empty where not known."""
    method: str = ""
    """How it was quantised, as config.json says: gptq, awq, modelopt; empty where not read."""
    claimed_head: bool | None = None
    """Whether the catalogue says that the MTP head is in it; None where nobody has looked."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """The engine's arguments, by its own names with `_`."""
    env: Mapping[str, str] = field(default_factory=dict)
    gpu: GpuClass | None = None
    """None where nobody said."""
    replicas: int = 1
    index_bounded: bool | None = None
    """Whether the installed vLLM bounds its index of accepted drafts; None where not known."""

    def number(self, name: str, default: int) -> int:
        """A whole number among the arguments."""
        value = self.args.get(name)
        return value if type(value) is int else default

    def text(self, name: str) -> str:
        """A text among the arguments, in lower case; empty where it is not given."""
        value = self.args.get(name)
        return value.lower() if isinstance(value, str) else ""

    @property
    def speculative(self) -> Mapping[str, Any]:
        """vLLM's speculative_config; {} for plain decoding."""
        value = self.args.get("speculative_config")
        return value if isinstance(value, dict) else {}

    @property
    def spec_method(self) -> str:
        """The drafting method asked for; empty for none."""
        value = self.speculative.get("method")
        return value.lower() if isinstance(value, str) else ""

    @property
    def mtp(self) -> bool:
        """Whether an MTP head is asked to draft, under any of its names."""
        return self.spec_method == "mtp" or self.spec_method.endswith("_mtp")

    @property
    def own_head(self) -> bool:
        """Whether that head is to be in the checkpoint itself."""
        return self.mtp and not self.speculative.get("model")

    @property
    def draft_tokens(self) -> int:
        """n, the draft tokens per step; 0 where nothing drafts."""
        value = self.speculative.get("num_speculative_tokens")
        return value if type(value) is int and value > 0 else 0

    @property
    def dynamic_n(self) -> bool:
        """Whether n changes with the batch size inside one engine."""
        return bool(self.speculative.get(DYNAMIC_N))

    @property
    def context(self) -> int:
        """Longest prompt plus answer, in tokens; 0 for a checkpoint without an engine."""
        longest = self.checkpoint.config.size("max_position_embeddings") if self.checkpoint else 0
        return self.number("max_model_len", (longest or 0) if self.args else 0)

    @property
    def max_num_seqs(self) -> int:
        """Requests decoded at once."""
        return self.number("max_num_seqs", self._server_defaults[0])

    @property
    def batched_tokens(self) -> int:
        """Tokens of the largest step."""
        return self.number("max_num_batched_tokens", self._server_defaults[1])

    @property
    def _server_defaults(self) -> tuple[int, int]:
        size = self.gpu.memory_gib or 0 if self.gpu and "a100" not in self.gpu.id else 0
        return next((seqs, tokens) for least, seqs, tokens in SERVER_DEFAULTS if size >= least)

    @property
    def tensor_parallel(self) -> int:
        """Cards that share every layer."""
        return max(1, self.number("tensor_parallel_size", 1))

    @property
    def cards(self) -> int:
        """Cards of one replica; 0 on a CPU."""
        if self.on_cpu:
            return 0
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        return math.prod(max(1, self.number(name, 1)) for name in sizes)

    @property
    def gpu_name(self) -> str:
        """The card's id in the catalogue; empty where no card is given."""
        return self.gpu.id if self.gpu else ""

    @property
    def on_cpu(self) -> bool:
        """Whether it runs on a CPU."""
        return self.gpu is not None and self.gpu.id == "cpu"

    @property
    def sm(self) -> tuple[int, int] | None:
        """The card's compute capability; None without CUDA or where no card is given."""
        return self.gpu.sm if self.gpu else None

    @property
    def hybrid(self) -> bool:
        """Whether some layers keep a GDN state."""
        if self.architecture is not None:
            return self.architecture.gdn is not None
        return self.checkpoint is not None and self.checkpoint.config.gdn

    @property
    def moe(self) -> bool:
        """Whether it is a mixture of experts."""
        if self.architecture is not None:
            return self.architecture.experts is not None
        return self.checkpoint is not None and not self.checkpoint.config.dense

    @property
    def drafts_asynchronously(self) -> bool:
        """Whether the scheduler works ahead of a drafting GDN model on a card, as by default."""
        off = self.args.get("async_scheduling") is False
        unpadded = self.speculative.get("disable_padded_drafter_batch") is True
        return self.mtp and self.hybrid and not self.on_cpu and not off and not unpadded

    @property
    def prefix_caching(self) -> bool:
        """Whether prefixes are cached, by argument or by the version's default."""
        value = self.args.get("enable_prefix_caching")
        if isinstance(value, bool):
            return value
        return bool(self.args) and self.version >= PREFIX_CACHING_BY_DEFAULT

    @property
    def kv_dtype(self) -> str:
        """The KV cache's type, `auto` where it is the model's."""
        return self.text("kv_cache_dtype") or "auto"

    @property
    def attention_backend(self) -> str:
        """The attention kernels asked for; empty where vLLM chooses."""
        block = self.args.get("attention_config")
        nested = block.get("backend") if isinstance(block, dict) else None
        value = nested if isinstance(nested, str) else self.text("attention_backend")
        return (value or self.env.get("VLLM_ATTENTION_BACKEND", "")).upper()

    @property
    def v1_runner(self) -> bool:
        """Whether the V1 model runner runs it: V2 needs Triton, and may be turned off."""
        asked = self.env.get("VLLM_USE_V2_MODEL_RUNNER")
        if asked is not None:
            return asked in ("0", "false", "False")
        return self.on_cpu or self.version < V2_RUNNER_BY_DEFAULT


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a stack is to run, as far as it is known."""

    cards: int | None = None
    memory: int | None = None
    """Main memory in bytes."""
