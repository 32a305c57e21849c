"""The study file's own shape: one file is one question, and the load that answers it.

Owns the fields of configs/studies/*.yaml, the rules between them, and finding a file. Leaves
the order of the requests to `schedule` and the stack that is measured to `stage`.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator, model_validator

from serving import catalog
from serving.catalog import configs_dir
from serving.catalog.errors import CatalogError, ConfigError, FieldError, Problem
from serving.catalog.yaml_file import load_yaml
from serving.stack.load import shipped_stacks
from serving.stack.settings import EngineSettings, Spec

PLAIN = "plain"
# They become file names, variants and words of a cell's id.
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,38}[a-z0-9])?")
# What the study itself puts into a request.
_OWN_FIELDS = frozenset(
    {"model", "prompt", "messages", "stream", "stream_options", "max_tokens", "temperature"}
    | {"seed", "response_format", "logprobs", "top_logprobs", "token_details"}
)

Blocks = Literal["all-at-once", "pairs", "one-by-one"]
Streams = Annotated[int, Field(ge=1, le=1024)]
Tokens = Annotated[int, Field(ge=1, le=1_000_000)]


class EndpointSpec(Spec):
    """An arm that this project does not start: any server with OpenAI's API."""

    url: str = Field(description="base URL, as http://127.0.0.1:8080/v1")
    model: str = Field(description="the name its requests ask for")
    draft_tokens: int | None = Field(default=None, ge=0, description="its n; absent: not known")
    engine: str = Field(default="unknown", description="for the record, as llama.cpp")
    api_key_env: str | None = Field(
        default=None, description="environment variable that holds its API key"
    )

    @field_validator("url")
    @classmethod
    def _plain_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"found {url!r}; write it as http://127.0.0.1:8080/v1")
        if parts.username or parts.password:
            raise ValueError("holds a user or a password; put the key under api_key_env instead")
        return url.rstrip("/")


class ArmsSpec(Spec):
    """What is compared."""

    draft_tokens: tuple[Annotated[int, Field(ge=0, le=16)], ...] = Field(
        strict=False, default=(), description="a variant for each n: plain for 0, mtp-1, mtp-2, …"
    )
    variants: tuple[str, ...] = Field(
        strict=False, default=(), description="variants as the stack file has them"
    )
    endpoints: dict[str, EndpointSpec] = Field(
        default={}, description="servers that run already, by a name of your own"
    )

    @property
    def of_stack(self) -> tuple[str, ...]:
        """Names of the arms that the stack serves."""
        return (*map(variant_name, self.draft_tokens), *self.variants)

    @property
    def names(self) -> tuple[str, ...]:
        """Every arm's name, in the file's order."""
        return (*self.of_stack, *self.endpoints)

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if not self.names:
            raise FieldError("found none; give draft_tokens, variants or endpoints")
        for name in self.names:
            if not _NAME.fullmatch(name):
                raise FieldError(
                    f"found {name!r}; write up to 40 lower-case letters, digits, . and -"
                )
            if self.names.count(name) > 1:
                raise FieldError(f"{name!r} is there twice; every arm needs a name of its own")
        return self


class WarmUpSpec(Spec):
    """What each arm gets before its first counted request, and after an engine came back."""

    requests_per_stream: int = Field(
        default=2, ge=1, le=100, description="uncounted requests on each of the most streams"
    )
    max_tokens: int = Field(default=32, ge=1, description="tokens of each")


class StopSpec(Spec):
    """When a run ends before its schedule does."""

    max_minutes: float = Field(
        default=600, gt=0, description="no cell begins later than this after the start"
    )
    max_errors: int = Field(
        default=50, ge=1, description="failed requests after which an arm is given up"
    )


class ContextSpec(Spec):
    """Text put before each prompt, to measure at depth."""

    tokens: tuple[Annotated[int, Field(ge=0, le=1_000_000)], ...] = Field(
        strict=False, min_length=1, description="depths, about so many tokens each; 0 for none"
    )
    characters_per_token: float = Field(
        default=4, gt=0, description="of the model's tokenizer; what it was is in `usage`"
    )
    text: Path | None = Field(
        default=None, description="file that context is cut from; absent: Python's argparse.py"
    )

    @field_validator("text")
    @classmethod
    def _place(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        return path and _beside_the_file(path, info)


class StudySpec(Spec):
    """A whole study file."""

    schema_version: Literal[1] = Field(alias="schema", description="1")
    name: str = Field(description="the study's name; the file's where absent")
    question: str = Field(description="what is to be answered, in a sentence")
    stack: str | None = Field(
        default=None, description="a shipped stack's name or a path; absent: endpoints only"
    )
    model: str | None = Field(default=None, description="a model's id in the stack; its first")
    settings: EngineSettings = Field(
        default=EngineSettings(), description="engine settings over the stack file's"
    )
    gpu: str | None = Field(default=None, description="GPU class; the stack's where absent")
    arms: ArmsSpec = Field(description="what is compared")
    plain: str | None = Field(
        default=PLAIN, description="the arm that speed-ups are over; null for none"
    )
    blocks: Blocks | Literal["auto"] = Field(
        default="auto", description="which arms run at the same time; auto: as memory allows"
    )
    prompts: str | None = Field(
        default=None, description="a shipped prompt file's name or a path; absent: the shipped set"
    )
    categories: tuple[str, ...] = Field(
        strict=False, default=(), description="categories of prompts; absent: all"
    )
    prompts_per_category: int | None = Field(
        default=None, ge=1, description="the first so many; absent: all"
    )
    streams: tuple[Streams, ...] = Field(
        strict=False, min_length=1, description="numbers of requests in flight"
    )
    requests_per_stream: int = Field(
        default=1, ge=1, description="at least so many in a cell, prompts repeated as needed"
    )
    max_tokens: tuple[Tokens, ...] = Field(
        strict=False, min_length=1, description="longest answers, in tokens"
    )
    context: ContextSpec | None = Field(default=None, description="text before each prompt")
    repetitions: int = Field(ge=1, le=1000, description="interleaved rounds")
    seed: int = Field(default=1, description="of the prompts' order and of sampling")
    temperature: float = Field(default=0, ge=0, description="0 is greedy")
    request: dict[str, Any] = Field(
        default={}, description="other fields of each request, as ignore_eos"
    )
    warm_up: WarmUpSpec = Field(default=WarmUpSpec(), description="before anything counts")
    stop: StopSpec = Field(default=StopSpec(), description="ends a run early")
    keep_texts: bool = Field(default=False, description="record the answers themselves")
    token_details: bool = Field(
        default=False, description="record token ids and log-probability gaps, where told"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any, info: ValidationInfo) -> Any:
        file = (info.context or {}).get("path")
        if isinstance(data, dict) and isinstance(file, Path):
            return {"name": file.stem, **data}
        return data

    @field_validator("stack")
    @classmethod
    def _stack_place(cls, stack: str | None, info: ValidationInfo) -> str | None:
        if stack is None or stack in shipped_stacks():
            return stack
        path = _beside_the_file(Path(stack), info)
        if not path.is_file():
            names = ", ".join(shipped_stacks())
            raise ValueError(f"found {stack!r}; give a path or one of {names}")
        return str(path)

    @field_validator("prompts")
    @classmethod
    def _prompts_place(cls, prompts: str | None, info: ValidationInfo) -> str | None:
        if prompts is None:
            return None
        path = _beside_the_file(Path(prompts), info)
        return str(path) if path.exists() else prompts

    @field_validator("gpu")
    @classmethod
    def _known_gpu(cls, name: str | None) -> str | None:
        try:
            return name and catalog.find_gpu(name).id
        except CatalogError as error:
            raise ValueError(str(error)) from None

    @field_validator("request")
    @classmethod
    def _not_ours(cls, request: dict[str, Any]) -> dict[str, Any]:
        for name in request:
            if name in _OWN_FIELDS:
                raise FieldError("the study sets it itself; remove it", name)
        return request

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = self.arms.names
        if self.plain is not None and self.plain not in names:
            listed = ", ".join(names)
            raise FieldError(
                f"found {self.plain!r}; name one of the arms ({listed}), or write null", "plain"
            )
        if self.plain is None and self.blocks == "pairs":
            raise FieldError("found pairs, but no arm is plain; choose another", "blocks")
        if self.arms.of_stack and self.stack is None:
            raise FieldError("missing; draft_tokens and variants need one", "stack")
        if not self.arms.of_stack and self.stack is not None:
            raise FieldError("no arm is served by it; remove it, or add variants", "stack")
        for field in ("model", "settings"):
            if self.stack is None and field in self.model_fields_set:
                raise FieldError("there is no stack that it could be of; remove it", field)
        if self.stack is None and self.gpu is None:
            raise FieldError("missing; say what the endpoints run on (configs/gpus)", "gpu")
        for field in ("streams", "max_tokens", "categories"):
            values = getattr(self, field)
            if len(set(values)) < len(values):
                raise FieldError("the same value is there twice; remove one", field)
        return self


def variant_name(draft_tokens: int) -> str:
    """The name of the variant that drafts so many tokens."""
    return f"mtp-{draft_tokens}" if draft_tokens else PLAIN


def shipped_studies() -> tuple[str, ...]:
    """The names of the shipped study files, in order."""
    return tuple(sorted(path.stem for path in _studies_dir().glob("*.yaml")))


def load_study(path_or_name: str | Path) -> StudySpec:
    """The validated study of a file or of a shipped name.

    Raises ConfigError with every problem, each with file, line and field.
    """
    path, name = Path(path_or_name), str(path_or_name)
    if path.is_file():
        return load_yaml(path, StudySpec)
    if name in shipped_studies():
        return load_yaml(_studies_dir() / f"{name}.yaml", StudySpec)
    near = difflib.get_close_matches(path.stem, shipped_studies(), n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    text = f"no such study file; {hint}give a path or one of {', '.join(shipped_studies())}"
    raise ConfigError((Problem(name, 0, "", text),), code="no-study")


def _studies_dir() -> Path:
    return configs_dir() / "studies"


def _beside_the_file(path: Path, info: ValidationInfo) -> Path:
    """A relative path is taken from the folder of the file it stands in."""
    file = (info.context or {}).get("path")
    return path if path.is_absolute() or file is None else (file.parent / path).resolve()
