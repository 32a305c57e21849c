"""What a model is: its architecture, its checkpoints and the arithmetic they settle.

Owns the typed form of `configs/models/*.yaml` and the byte counts that follow
from an architecture alone. Leaves finding files to `load`, and whatever depends
on a deployment (weights, concurrency, what fits a card) to the planner.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from serving.catalog.errors import CatalogError, FieldError
from serving.demo import NAMES as DEMO_NAMES
from serving.demo import checkpoint_path

Quantisation = Literal["bf16", "fp8", "nvfp4", "int4", "gguf"]
SsmDtype = Literal["float32", "float16", "bfloat16"]

# Bytes per stored value; the names are those of vLLM's --kv-cache-dtype.
KV_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
SSM_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# The convolution state is kept in the model's own dtype, bf16 or fp16.
CONV_STATE_BYTES = 2


class _Value(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Layers(_Value):
    """How many decoder layers there are of each kind."""

    full_attention: int = Field(default=0, ge=0, description="layers that attend to every token")
    sliding_attention: int = Field(default=0, ge=0, description="layers with a bounded window")
    gdn: int = Field(default=0, ge=0, description="gated delta net layers, of constant state")

    @property
    def total(self) -> int:
        """Decoder layers in all, MTP layers not counted."""
        return self.full_attention + self.sliding_attention + self.gdn


class SlidingAttention(_Value):
    """The shape of the layers with a bounded window."""

    kv_heads: int = Field(gt=0, description="key-value heads")
    head_dim: int = Field(gt=0, description="size of one head")
    window: int = Field(gt=0, description="tokens a layer looks back")


class Gdn(_Value):
    """The shape of a gated delta net layer (transformers' `linear_*` fields)."""

    key_heads: int = Field(gt=0, description="linear_num_key_heads")
    value_heads: int = Field(gt=0, description="linear_num_value_heads")
    key_dim: int = Field(gt=0, description="linear_key_head_dim")
    value_dim: int = Field(gt=0, description="linear_value_head_dim")
    conv_kernel: int = Field(gt=1, description="linear_conv_kernel_dim")


class Experts(_Value):
    """The routed experts of a mixture-of-experts layer."""

    count: int = Field(gt=0, description="routed experts per layer")
    per_token: int = Field(gt=0, description="experts that answer for one token")
    size: int = Field(gt=0, description="intermediate size of one expert")
    shared_size: int | None = Field(
        default=None, gt=0, description="intermediate size of the expert every token uses"
    )

    @model_validator(mode="after")
    def _no_more_than_there_are(self) -> Self:
        if self.per_token > self.count:
            raise FieldError(
                f"found {self.per_token}, but there are {self.count} experts; lower it",
                "per_token",
            )
        return self


class Architecture(_Value):
    """The facts of a model's config.json that serving depends on."""

    layers: Layers
    hidden_size: int = Field(gt=0, description="width of the residual stream")
    heads: int = Field(gt=0, description="query heads of a full attention layer")
    kv_heads: int = Field(gt=0, description="key-value heads of a full attention layer")
    head_dim: int = Field(gt=0, description="size of one head of a full attention layer")
    attention_gate: bool = Field(
        default=False, description="whether the query projection makes a gate as wide as itself"
    )
    sliding: SlidingAttention | None = None
    gdn: Gdn | None = None
    mamba_ssm_dtype: SsmDtype | None = Field(
        default=None, description="dtype the checkpoint asks for in the GDN state"
    )
    ffn_size: int | None = Field(default=None, gt=0, description="intermediate size if dense")
    experts: Experts | None = None
    mtp_layers: int = Field(default=0, ge=0, description="MTP layers inside the checkpoint")
    vocab_size: int = Field(gt=0, description="entries of the vocabulary")
    tie_embeddings: bool = Field(description="whether the output head is the embedding table")
    vision: bool = Field(description="whether the checkpoints hold a vision tower")
    vision_parameters: int | None = Field(
        default=None, gt=0, description="parameters of the vision tower; null where not known"
    )

    @model_validator(mode="after")
    def _parts_fit_the_layers(self) -> Self:
        if self.layers.total == 0:
            raise FieldError("no layer of any kind; give at least one count", "layers")
        for kind, count, part in (
            ("gdn", self.layers.gdn, self.gdn),
            ("sliding", self.layers.sliding_attention, self.sliding),
        ):
            if (count > 0) != (part is not None):
                raise FieldError(
                    f"{count} layers of this kind, but the block `{kind}` is "
                    f"{'given' if part else 'missing'}; make the two agree",
                    kind,
                )
        if (self.layers.gdn > 0) != (self.mamba_ssm_dtype is not None):
            raise FieldError(
                "must be given exactly when there are gdn layers; float32 is what Qwen ships",
                "mamba_ssm_dtype",
            )
        if (self.ffn_size is None) == (self.experts is None):
            raise FieldError(
                "a model is dense or has experts; give one of `ffn_size` and `experts`",
                "ffn_size",
            )
        return self

    def kv_bytes_per_token_per_layer(
        self, kv_dtype: str = "bfloat16", *, tensor_parallel: int = 1
    ) -> int:
        """Bytes one full attention layer keeps for one token on one card.

        2 x kv_heads x head_dim x bytes, keys and values; a head that cannot be
        split further is kept on every card (vLLM, ModelConfig.get_num_kv_heads).
        Raises CatalogError for a dtype whose size is not known.
        """
        width = _bytes_of(kv_dtype, KV_DTYPE_BYTES, "KV cache dtype")
        return 2 * max(1, self.kv_heads // tensor_parallel) * self.head_dim * width

    def kv_bytes_per_token(self, kv_dtype: str = "bfloat16", *, tensor_parallel: int = 1) -> int:
        """Bytes the KV cache grows by for each token of context on one card.

        Full attention layers only: sliding layers stop growing at their window,
        GDN layers never grow. An MTP layer adds one layer's worth while drafting.
        """
        per_layer = self.kv_bytes_per_token_per_layer(kv_dtype, tensor_parallel=tensor_parallel)
        return per_layer * self.layers.full_attention

    def gdn_page_bytes(
        self, draft_tokens: int = 0, *, ssm_dtype: str | None = None, tensor_parallel: int = 1
    ) -> int:
        """Bytes of one state of one GDN layer on one card; 0 without such layers.

        conv = (2 hk Hk + hv Hv) / TP x (kernel - 1 + k) x 2 B and
        ssm = Hv / TP x hv x hk x S (vLLM 0.32.0,
        model_executor/layers/mamba/mamba_utils.py). `ssm_dtype` defaults to the
        checkpoint's. Raises CatalogError for an unknown dtype.
        """
        if self.gdn is None:
            return 0
        gdn = self.gdn
        width = _bytes_of(
            ssm_dtype or self.mamba_ssm_dtype or "float32", SSM_DTYPE_BYTES, "SSM dtype"
        )
        channels = 2 * gdn.key_dim * gdn.key_heads + gdn.value_dim * gdn.value_heads
        rows = gdn.conv_kernel - 1 + draft_tokens
        conv = channels // tensor_parallel * rows * CONV_STATE_BYTES
        ssm = gdn.value_heads // tensor_parallel * gdn.value_dim * gdn.key_dim * width
        return conv + ssm

    def gdn_bytes_per_request(
        self,
        draft_tokens: int = 0,
        *,
        prefix_caching: bool = False,
        ssm_dtype: str | None = None,
        tensor_parallel: int = 1,
    ) -> int:
        """Bytes of GDN state one running request holds on one card.

        Each of k draft tokens needs a state to fall back to: 1 + k states, and
        one more with prefix caching (vLLM's mamba_cache_mode `align`).
        """
        states = draft_tokens + (2 if prefix_caching else 1)
        page = self.gdn_page_bytes(
            draft_tokens, ssm_dtype=ssm_dtype, tensor_parallel=tensor_parallel
        )
        return page * states * self.layers.gdn


class Checkpoint(_Value):
    """One published form of a model's weights.

    Exactly one of `repo` (a Hugging Face id) and `path` (a folder or file) says
    where it is; `demo` names a model shipped with this package and sets `path`.
    """

    repo: str | None = Field(default=None, min_length=1, description="Hugging Face repository")
    revision: str | None = Field(default=None, description="commit or tag, where it matters")
    path: Path | None = Field(default=None, description="folder or GGUF file on this machine")
    demo: str | None = Field(default=None, description="name of a demo model of this package")
    quantisation: Quantisation
    size_gb: float | None = Field(default=None, gt=0, description="10^9 bytes on disk")
    mtp_head: bool | None = Field(default=None, description="null where nobody has looked")
    verified: bool = Field(
        default=False, description="whether `source` was read for repository and MTP head"
    )
    notes: str = ""
    source: str = Field(min_length=1, description="file or thread the facts are from")

    @model_validator(mode="before")
    @classmethod
    def _path_of_demo(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(name := data.get("demo"), str):
            return data
        if name not in DEMO_NAMES:
            raise FieldError(f"found {name!r}; the demo models are {', '.join(DEMO_NAMES)}", "demo")
        return {**data, "path": str(checkpoint_path(name))}

    @field_validator("path")
    @classmethod
    def _from_the_files_folder(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        file: Path | None = (info.context or {}).get("path")
        return file.parent / path if file is not None and path is not None else path

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.repo is None) == (self.path is None):
            raise ValueError(
                "a checkpoint is in one place; give exactly one of `repo`, `path` and `demo`"
            )
        return self


class ModelEntry(_Value):
    """A model of the catalogue, or one written out in a stack file."""

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$", description="short name used in stack files")
    name: str = Field(min_length=1, description="name as its makers write it")
    model_type: str = Field(min_length=1, description="model_type of config.json")
    architecture: Architecture
    max_context: int = Field(gt=0, description="max_position_embeddings, in tokens")
    draft: Checkpoint | None = Field(
        default=None, description="checkpoint that drafts, where it is not an MTP layer"
    )
    checkpoints: dict[str, Checkpoint] = Field(min_length=1)
    verified: bool = Field(
        default=False, description="whether `source` itself was read for the architecture"
    )
    notes: str = ""
    source: str = Field(min_length=1, description="file or thread the architecture is from")

    def checkpoint(self, key: str) -> Checkpoint:
        """The checkpoint called `key`; raises CatalogError naming those there are."""
        if key in self.checkpoints:
            return self.checkpoints[key]
        raise CatalogError(unknown_name(f"checkpoint of {self.id}", key, list(self.checkpoints)))


def unknown_name(kind: str, found: str, known: list[str]) -> str:
    """The text for a name the catalogue does not have: nearest names, then all."""
    near = difflib.get_close_matches(found.lower(), known, n=3)
    hint = f" Did you mean {', '.join(near)}?" if near else ""
    return f"No {kind} is called {found!r}.{hint} The known ones are: {', '.join(known)}."


def _bytes_of(dtype: str, sizes: dict[str, int], what: str) -> int:
    if dtype not in sizes:
        raise CatalogError(unknown_name(what, dtype, list(sizes)))
    return sizes[dtype]
