"""The stack file's own shape: one file is one deployment.

Owns the gateway's, the models' and the variants' blocks and the rules between
them. Leaves an engine's settings to `settings`, drafting to `speculative`, the choice
between variants to `router.settings`, what a vLLM process is started with to
`engine_plan`, and reading files to `load`.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from serving import catalog
from serving.catalog.errors import CatalogError, FieldError
from serving.router.settings import Bounds, RoutingSpec
from serving.stack.settings import EngineSettings, Spec
from serving.stack.speculative import SpeculativeSpec

_DNS_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
# Formats whose kernels vLLM has for GPUs only.
GPU_ONLY = frozenset({"fp8", "nvfp4", "int4"})
_MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]*")


def _dns_like(name: str) -> str:
    if not _DNS_NAME.fullmatch(name):
        raise ValueError(
            f"found {name!r}; write up to 40 lower-case letters, digits and -, "
            "a letter or digit at both ends"
        )
    return name


def _model_id(name: str) -> str:
    if not _MODEL_ID.fullmatch(name):
        raise ValueError(
            f"found {name!r}; write letters, digits and . _ : / - only (@ separates id and variant)"
        )
    return name


def _beside_the_file(path: Path, info: ValidationInfo) -> Path:
    """A relative path is taken from the folder of the file it stands in."""
    file = (info.context or {}).get("path")
    return path if path.is_absolute() or file is None else (file.parent / path).resolve()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class TlsSpec(Spec):
    """Certificate of the gateway, both as PEM files."""

    cert_file: Path = Field(description="certificate chain")
    key_file: Path = Field(description="private key")

    @field_validator("cert_file", "key_file")
    @classmethod
    def _place(cls, path: Path, info: ValidationInfo) -> Path:
        return _beside_the_file(path, info)


class GatewaySpec(Spec):
    """The one address that clients see."""

    host: str = Field(default="127.0.0.1", description="address listened on; 0.0.0.0 for all")
    port: int = Field(default=8000, ge=1, le=65535, description="port listened on")
    replicas: int = Field(default=1, ge=1, description="gateway processes")
    max_replicas_per_node: int | None = Field(
        default=None, ge=1, le=100, description="gateway processes on one Ray node, at most"
    )
    num_cpus: float = Field(default=0.1, ge=0, description="cores Ray sets aside for each")
    max_body_mib: int = Field(default=16, ge=1, description="largest request body, MiB")
    max_ongoing_requests: int = Field(
        default=1024, ge=1, description="requests each gateway process holds at once"
    )
    request_timeout_s: float = Field(default=600, gt=0, description="longest request, seconds")
    connect_timeout_s: float = Field(default=5, gt=0, description="to reach an engine, seconds")
    queue_timeout_s: float = Field(
        default=30, gt=0, description="longest wait for a free slot of an engine, seconds"
    )
    wake_timeout_s: float = Field(
        default=300,
        gt=0,
        description="longest wait for an engine that was scaled to zero, seconds",
    )
    first_byte_timeout_s: float = Field(
        default=300, gt=0, description="longest silence before a stream's first part, seconds"
    )
    between_bytes_timeout_s: float = Field(
        default=120, gt=0, description="longest silence between a stream's parts, seconds"
    )
    keep_alive_s: float = Field(
        default=15, ge=0, description="silence before an SSE comment, seconds; 0 turns it off"
    )
    limits: Bounds = Field(
        default=Bounds(queued=1024), description="requests of all models: running, queued"
    )
    cors_origins: tuple[str, ...] = Field(
        strict=False, default=(), description="web origins that may call"
    )
    tls: TlsSpec | None = Field(default=None, description="absent: plain HTTP")
    access: Literal["keys", "open"] | None = Field(
        default=None,
        description="keys: who has a key of `moe-serving keys create`; open: anybody; absent: "
        "open, and on a loopback address only",
    )

    @model_validator(mode="after")
    def _said_who_may_ask(self) -> Self:
        if self.access is None and not _is_loopback(self.host):
            raise FieldError(
                f"absent, but host {self.host} lets other machines in; write access: keys, or "
                "access: open to let anybody in",
                "access",
            )
        return self


class InlineModel(Spec):
    """A checkpoint that the catalogue does not have."""

    path: Path | None = Field(default=None, description="folder of the checkpoint")
    repo: str | None = Field(default=None, description="Hugging Face repository id")
    revision: str | None = Field(default=None, description="commit, tag or branch of repo")
    max_context: int = Field(ge=1, description="longest sequence the model takes, in tokens")
    quantisation: str | None = Field(default=None, description="for the record, such as fp8")
    mtp_head: bool | None = Field(
        default=None, description="whether the mtp.* tensors are in it; absent: not known"
    )

    @field_validator("path")
    @classmethod
    def _place(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        return path and _beside_the_file(path, info)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.repo is None):
            found = "neither path nor repo" if self.path is None else "both path and repo"
            raise FieldError(f"found {found}; give one of the two")
        return self


class VariantSpec(EngineSettings):
    """One way to run a model: an engine of its own, with its own copy of the weights."""

    speculative: SpeculativeSpec | None = Field(default=None, description="absent: plain decoding")


class ModelSpec(EngineSettings):
    """One checkpoint with its variants; settings here hold for all of them."""

    id: str = Field(description="name clients ask for; the catalogue's id where absent")
    model: str | None = Field(default=None, description="id in the catalogue")
    inline: InlineModel | None = Field(default=None, description="instead of model")
    checkpoint: str | None = Field(
        default=None, description="quantisation, as the catalogue has it"
    )
    aliases: tuple[str, ...] = Field(strict=False, default=(), description="other names for id")
    gpu: str = Field(description="GPU class in the catalogue; cpu for none")
    limits: Bounds = Field(
        default=Bounds(), description="requests of all its variants: running, queued"
    )
    default_variant: str = Field(description="the variant that answers where none is asked for")
    variants: dict[str, VariantSpec] = Field(min_length=1, description="by name, as plain or mtp")
    routing: RoutingSpec = Field(default=RoutingSpec(), description="which variant answers")

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        filled = dict(data)
        if isinstance(data.get("model"), str):
            filled.setdefault("id", data["model"])
        variants = data.get("variants")
        if isinstance(variants, dict):
            # `plain:` with nothing under it is a variant without settings of its own.
            filled["variants"] = {name: block or {} for name, block in variants.items()}
            if len(variants) == 1:
                filled.setdefault("default_variant", next(iter(variants)))
        return filled

    @field_validator("id")
    @classmethod
    def _named(cls, name: str) -> str:
        return _model_id(name)

    @field_validator("aliases")
    @classmethod
    def _aliases_named(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_model_id(name) for name in names)

    @field_validator("gpu")
    @classmethod
    def _known_gpu(cls, name: str) -> str:
        try:
            return catalog.find_gpu(name).id
        except CatalogError as error:
            raise ValueError(str(error)) from None

    @field_validator("variants")
    @classmethod
    def _variants_named(cls, variants: dict[str, VariantSpec]) -> dict[str, VariantSpec]:
        for name in variants:
            try:
                _dns_like(name)
            except ValueError as error:
                raise FieldError(str(error), name) from None
        return variants

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.default_variant not in self.variants:
            names = ", ".join(self.variants)
            text = f"found {self.default_variant!r}; the variants are {names}"
            raise FieldError(text, "default_variant")
        if (self.model is None) == (self.inline is None):
            found = "neither model nor inline" if self.model is None else "both model and inline"
            raise FieldError(f"found {found}; give one of the two")
        source = self.checked_source()
        self._check_context(source)
        self._check_format(source)
        if self.gpu == "cpu":
            self._check_cpu(source)
        self._check_routing()
        return self

    def checked_source(self) -> InlineModel:
        """Where the weights are, from the catalogue or inline; raises FieldError."""
        if self.inline is not None:
            if self.checkpoint is not None:
                raise FieldError("only for a model of the catalogue; remove it", "checkpoint")
            return self.inline
        try:
            entry = catalog.find_model(str(self.model))
        except CatalogError as error:
            raise FieldError(str(error), "model") from None
        known = ", ".join(entry.checkpoints)
        key = self.checkpoint or (known if len(entry.checkpoints) == 1 else None)
        if key is None:
            raise FieldError(f"{entry.id} has several checkpoints; add `checkpoint:` {known}")
        if key not in entry.checkpoints:
            raise FieldError(f"found {key!r}; {entry.id} has {known}", "checkpoint")
        found = entry.checkpoints[key]
        return InlineModel(
            path=found.path,
            repo=None if found.path else found.repo,
            revision=found.revision,
            max_context=entry.max_context,
            quantisation=found.quantisation,
            mtp_head=found.mtp_head,
        )

    def _check_context(self, source: InlineModel) -> None:
        for block, path in self._blocks():
            length = block.max_model_len
            if length is not None and length > source.max_context:
                limit = f"the model takes {source.max_context} tokens"
                raise FieldError(f"found {length}; {limit}, lower it", *path, "max_model_len")
        for name, variant in self.variants.items():
            spec = variant.speculative
            if spec and spec.method == "mtp" and spec.model is None and source.mtp_head is False:
                raise FieldError(
                    "found mtp, but the checkpoint holds no MTP head; choose a checkpoint with "
                    "one, name a drafting checkpoint under speculative.model, or drop the block",
                    *("variants", name, "speculative", "method"),
                )

    def _check_format(self, source: InlineModel) -> None:
        place = str(source.path or source.repo)
        if source.quantisation == "gguf" or place.lower().endswith(".gguf"):
            raise FieldError(
                f"found a GGUF checkpoint ({place}), which vLLM does not serve for these models; "
                "choose another checkpoint",
                *(("inline",) if self.inline else ("checkpoint",)),
            )

    def _check_cpu(self, source: InlineModel) -> None:
        if source.quantisation in GPU_ONLY:
            raise FieldError(
                f"found cpu, but the checkpoint is {source.quantisation}, which needs a GPU; "
                "choose a bf16 checkpoint or a GPU class",
                "gpu",
            )
        for block, path in self._blocks():
            if block.prefix_caching:
                raise FieldError(
                    "found true, but on a CPU vLLM cannot cache the prefixes of these models; "
                    "remove it",
                    *path,
                    "prefix_caching",
                )

    def _check_routing(self) -> None:
        drafting = {name: block.speculative is not None for name, block in self.variants.items()}
        try:
            self.routing.check((self.id, *self.aliases), drafting)
        except FieldError as error:
            raise FieldError(str(error), "routing", *error.path) from None

    def _blocks(self) -> list[tuple[EngineSettings, tuple[str, ...]]]:
        """The model's own settings and each variant's, with the path that leads there."""
        variants = self.variants.items()
        return [(self, ()), *((variant, ("variants", name)) for name, variant in variants)]


class StackSpec(Spec):
    """A whole stack file."""

    schema_version: Literal[1] = Field(alias="schema", description="1")
    name: str = Field(description="the stack's name; the file's where absent")
    gateway: GatewaySpec = Field(default=GatewaySpec(), description="the address clients see")
    models: tuple[ModelSpec, ...] = Field(strict=False, min_length=1, description="what is served")

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any, info: ValidationInfo) -> Any:
        file = (info.context or {}).get("path")
        if isinstance(data, dict) and isinstance(file, Path):
            return {"name": file.stem, **data}
        return data

    @field_validator("name")
    @classmethod
    def _named(cls, name: str) -> str:
        return _dns_like(name)

    @model_validator(mode="after")
    def _unique_names(self) -> Self:
        taken: dict[str, str] = {}
        for i, model in enumerate(self.models):
            for place, name in _names(model):
                where = f"models[{i}].{place[0]}"
                if name in taken:
                    text = f"{name!r} is taken by {taken[name]}; choose another name"
                    raise FieldError(text, "models", i, *place)
                taken[name] = where
        return self

    @model_validator(mode="after")
    def _fallbacks_exist(self) -> Self:
        served = {name: model for model in self.models for _, name in _names(model)}
        listed = [
            (("models", i, "routing", "fallback", j), each)
            for i, model in enumerate(self.models)
            for j, each in enumerate(model.routing.fallback)
            if isinstance(each, str)
        ]
        for path, found in listed:
            name, separator, variant = found.partition("@")
            if name not in served:
                known = ", ".join(served)
                raise FieldError(f"found {found!r}; the stack serves {known}", *path)
            if separator and variant not in served[name].variants:
                known = ", ".join(served[name].variants)
                raise FieldError(f"found {found!r}; {name} has the variants {known}", *path)
        return self


def _names(model: ModelSpec) -> list[tuple[tuple[str | int, ...], str]]:
    """Each name a model answers to, and where in its block it stands."""
    aliases = [(("aliases", i), alias) for i, alias in enumerate(model.aliases)]
    return [(("id",), model.id), *aliases]
